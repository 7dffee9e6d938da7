//! The honest client: 1,000 GETs a second, ten probes of the admin port, and once a second a list from memory, a list from
//! etcd, and a TLS handshake.
//! Latency counts from the time at which a call was due, so that a stall delays all calls that were due during it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use testkit::grpc::Client;
use testkit::http;
use testkit::pb::RangeRequest;
use testkit::tls::{self, Ca, Trust};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::dataset;

/// GETs a second.
const GETS_PER_SECOND: u32 = 1_000;
/// A call without a response for this long is lost.
const LOST: Duration = Duration::from_secs(20);

/// Kinds of the honest client's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Linearizable read of one key, answered from memory.
    Get,
    /// List answered from memory.
    List,
    /// List answered by etcd.
    ForwardedList,
    /// New connection with a TLS handshake.
    Handshake,
    /// Probe of the admin port, on a connection of its own.
    Livez,
}

/// Every kind, with its name in the table.
pub(crate) const KINDS: [(Kind, &str); 5] = [
    (Kind::Get, "GET"),
    (Kind::List, "LIST"),
    (Kind::ForwardedList, "LIST by etcd"),
    (Kind::Handshake, "TLS"),
    (Kind::Livez, "/livez"),
];

/// Latencies in microseconds and failures of one kind of call.
#[derive(Clone)]
pub(crate) struct Latencies {
    histogram: Histogram<u64>,
    pub(crate) lost: u64,
    /// Number of failures by error.
    pub(crate) errors: BTreeMap<String, u64>,
}

impl Latencies {
    fn new() -> Latencies {
        Latencies {
            // Microseconds up to a minute, to three digits.
            histogram: Histogram::new_with_bounds(1, 60_000_000, 3).unwrap_or_else(|_| unreachable!()),
            lost: 0,
            errors: BTreeMap::new(),
        }
    }

    fn record(&mut self, latency: Duration, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => self
                .histogram
                .saturating_record(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX)),
            Err(error) => {
                self.lost += 1;
                *self.errors.entry(error).or_default() += 1;
            }
        }
    }

    /// Latency at `percentile`, in milliseconds.
    pub(crate) fn at_ms(&self, percentile: f64) -> f64 {
        self.histogram.value_at_percentile(percentile) as f64 / 1_000.0
    }
}

/// Latencies by kind, in the order of [`KINDS`].
pub(crate) type Phase = [Latencies; 5];

/// The honest clients' connections.
#[derive(Clone)]
pub(crate) struct Honest {
    /// Connections for gets, one of each client, used in turn.
    gets: Arc<[Client]>,
    lists: Client,
    tls_url: String,
    livez_url: String,
    trust: Arc<Trust>,
}

impl Honest {
    /// Connects to the plaintext `url`, from this many addresses; handshakes go to `tls_url`, and probes to `admin_url`.
    pub(crate) async fn connect(
        url: &str,
        tls_url: &str,
        admin_url: &str,
        clients: u8,
    ) -> anyhow::Result<Honest> {
        // Another client than the one that misbehaves, which is bounded as a whole.
        let connect = async |client| {
            let connected = Client::connect_from([127, 0, 1, client].into(), url).await;
            connected.map_err(|error| anyhow::anyhow!("{error}"))
        };
        let mut gets = Vec::new();
        for client in 1..=clients {
            gets.push(connect(client).await?);
        }
        Ok(Honest {
            gets: gets.into(),
            lists: connect(1).await?,
            tls_url: tls_url.to_owned(),
            livez_url: format!("{admin_url}/livez"),
            // rangecache generates its certificate (`--auto-tls`): there is no CA to verify it with.
            trust: Arc::new(Trust::new(&Ca::new()).accept_any()),
        })
    }

    async fn call(self, kind: Kind, number: usize) -> Result<(), String> {
        let list = async |prefix: &str| {
            let listed = self.lists.range(&dataset::all(prefix)).await;
            listed.map_err(|status| format!("{status:?}"))
        };
        let call = async {
            match kind {
                Kind::Get => {
                    let key = RangeRequest::one(dataset::get_key(number));
                    let read = self.gets[number % self.gets.len()]
                        .range(&key)
                        .await
                        .map_err(|status| format!("{status:?}"))?;
                    (read.count == 1)
                        .then_some(())
                        .ok_or("the key is missing".to_owned())
                }
                Kind::List => list(dataset::LIST).await.map(|_| ()),
                Kind::ForwardedList => list(dataset::DIRECT_LIST).await.map(|_| ()),
                Kind::Handshake => {
                    let shaken = tls::handshake(&self.tls_url, &self.trust, &["h2"]).await;
                    shaken.map(|_| ()).map_err(|error| error.to_string())
                }
                Kind::Livez => match http::get(&self.livez_url).await {
                    Ok(page) if page.status == 200 => Ok(()),
                    Ok(page) => Err(format!("status {}", page.status)),
                    Err(error) => Err(error.to_string()),
                },
            }
        };
        tokio::time::timeout(LOST, call)
            .await
            .unwrap_or_else(|_| Err(format!("no response within {LOST:?}")))
    }

    /// Calls for `duration`, and waits for the last responses.
    pub(crate) async fn run(&self, duration: Duration) -> Phase {
        let mut phase = KINDS.map(|_| Latencies::new());
        let mut calls = JoinSet::new();
        let start = Instant::now();
        let start_call = |calls: &mut JoinSet<_>, kind: Kind, due: Instant, number| {
            let honest = self.clone();
            calls.spawn(async move {
                let outcome = honest.call(kind, number).await;
                (kind, due.elapsed(), outcome)
            });
        };
        let mut ticks = ticks(start, duration);
        while let Some((number, due)) = ticks.recv().await {
            start_call(&mut calls, Kind::Get, due, number as usize);
            // Spread over the second, so that they do not wait for each other.
            match number % GETS_PER_SECOND {
                100 => start_call(&mut calls, Kind::List, due, 0),
                400 => start_call(&mut calls, Kind::ForwardedList, due, 0),
                700 => start_call(&mut calls, Kind::Handshake, due, 0),
                number if number % 100 == 50 => start_call(&mut calls, Kind::Livez, due, 0),
                _ => {}
            }
            while let Some(Ok(finished)) = calls.try_join_next() {
                record(&mut phase, finished);
            }
        }
        while let Some(Ok(finished)) = calls.join_next().await {
            record(&mut phase, finished);
        }
        phase
    }
}

/// Sends number and due time of each GET when it is due. On a thread of its own: the runtime's timer has steps of a
/// millisecond, as long as the latencies measured.
fn ticks(start: Instant, duration: Duration) -> mpsc::UnboundedReceiver<(u32, Instant)> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for number in 0.. {
            let due = start + Duration::from_secs(1) * number / GETS_PER_SECOND;
            if due - start >= duration {
                return;
            }
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if sender.send((number, due)).is_err() {
                return;
            }
        }
    });
    receiver
}

fn record(phase: &mut Phase, (kind, latency, outcome): (Kind, Duration, Result<(), String>)) {
    if let Some(at) = KINDS.iter().position(|(of, _)| *of == kind) {
        phase[at].record(latency, outcome);
    }
}
