//! Clients that watch: streams with any number of watchers, which count events and measure their latency.
//!
//! Values start with the time at which their put was sent, so that each delivery has a latency.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::{Buf, Bytes, BytesMut};
use h2::{RecvStream, SendStream};
use testkit::pb::{WatchCreateRequest, WatchRequest};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::client::{Connection, Method};
use crate::load::{Outcome, nanoseconds};
use crate::watch_message::Response;
use crate::wire;

/// Timeout of all `created` responses of a set of watchers.
const CREATED_DEADLINE: Duration = Duration::from_secs(60);

/// Counters that all streams of a set share.
#[derive(Default)]
struct Tally {
    created: AtomicU64,
    events: AtomicU64,
    bytes: AtomicU64,
    /// Latencies of values made before this time, in nanoseconds since the epoch, are not kept.
    measured_from_ns: AtomicU64,
    changed: Notify,
}

/// Open watch streams; dropping the set closes them.
pub(crate) struct Watchers {
    tally: Arc<Tally>,
    /// Time zero of the values.
    epoch: Instant,
    /// Creates that were sent.
    watchers: u64,
    streams: JoinSet<Result<Vec<u64>>>,
    stop: tokio::sync::watch::Sender<bool>,
}

impl Watchers {
    /// An empty set; `epoch` is the one of [`stamp`].
    pub(crate) fn new(epoch: Instant) -> Self {
        Watchers {
            tally: Arc::default(),
            epoch,
            watchers: 0,
            streams: JoinSet::new(),
            stop: tokio::sync::watch::Sender::new(false),
        }
    }

    /// Opens one stream with these watchers.
    pub(crate) async fn open(
        &mut self,
        connection: &Connection,
        creates: Vec<WatchCreateRequest>,
    ) -> Result<()> {
        self.watchers += creates.len() as u64;
        let (mut send, response) = connection.start(Method::Watch).await?;
        for create in creates {
            send.send_data(create_frame(create), false)?;
        }
        let (tally, epoch, mut stop) = (self.tally.clone(), self.epoch, self.stop.subscribe());
        self.streams.spawn(async move {
            let mut latencies = Vec::new();
            let receive = async {
                let body = response.await?.into_body();
                let mut stream = Stream::new(send, body);
                loop {
                    let Some(message) = stream.next().await? else {
                        bail!("a watch stream ended");
                    };
                    count(&message, &tally, epoch, &mut latencies);
                }
            };
            tokio::select! {
                ended = receive => ended?,
                _ = stop.wait_for(|stopped| *stopped) => {}
            }
            Ok(latencies)
        });
        Ok(())
    }

    /// Waits until every watcher is created.
    pub(crate) async fn wait_created(&self) -> Result<()> {
        let all = self.wait(CREATED_DEADLINE, |tally| {
            tally.created.load(Ordering::Relaxed) >= self.watchers
        });
        let result = all.await;
        result.with_context(|| format!("{} of {} watchers were created", self.created(), self.watchers))
    }

    /// Number of watchers that the target has created so far.
    pub(crate) fn created(&self) -> u64 {
        self.tally.created.load(Ordering::Relaxed)
    }

    /// Waits until the set has received this many events; the error is what is missing.
    pub(crate) async fn wait_events(&self, events: u64, deadline: Duration) -> Result<()> {
        let waited = self.wait(deadline, |tally| tally.events.load(Ordering::Relaxed) >= events);
        let received = self.tally.events.load(Ordering::Relaxed);
        waited
            .await
            .with_context(|| format!("fewer than {events} events after {deadline:?}; {received} at first"))
    }

    /// Starts the measurement of latencies; returns the events received so far.
    pub(crate) fn begin(&self) -> u64 {
        let now = nanoseconds(self.epoch.elapsed());
        self.tally.measured_from_ns.store(now, Ordering::Relaxed);
        self.tally.events.load(Ordering::Relaxed)
    }

    async fn wait(&self, deadline: Duration, is_done: impl Fn(&Tally) -> bool) -> Result<()> {
        let waiting = async {
            loop {
                let changed = self.tally.changed.notified();
                if is_done(&self.tally) {
                    return;
                }
                // A notification may be missed by a hair: the counters are looked at again soon.
                let _ = tokio::time::timeout(Duration::from_millis(5), changed).await;
            }
        };
        Ok(tokio::time::timeout(deadline, waiting).await?)
    }

    /// Closes the streams, and returns what they received, with the time since `start`.
    pub(crate) async fn finish(mut self, start: Instant) -> Result<Outcome> {
        let elapsed = start.elapsed();
        self.stop.send_replace(true);
        let mut outcome = Outcome {
            calls: self.tally.events.load(Ordering::Relaxed),
            bytes: self.tally.bytes.load(Ordering::Relaxed),
            elapsed,
            ..Outcome::default()
        };
        while let Some(stream) = self.streams.join_next().await {
            match stream? {
                Ok(latencies) => outcome.latencies_ns.extend(latencies),
                Err(error) => {
                    outcome.errors += 1;
                    outcome.first_error.get_or_insert(format!("{error:#}"));
                }
            }
        }
        outcome.latencies_ns.sort_unstable();
        Ok(outcome)
    }
}

/// The frame of a create request.
pub(crate) fn create_frame(create: WatchCreateRequest) -> Bytes {
    wire::frame(&WatchRequest {
        create_request: Some(create),
        ..WatchRequest::default()
    })
}

/// A value of this size that carries the time since `epoch`.
pub(crate) fn stamp(epoch: Instant, bytes: usize) -> Vec<u8> {
    let mut value = vec![b'v'; bytes.max(8)];
    value[..8].copy_from_slice(&nanoseconds(epoch.elapsed()).to_le_bytes());
    value
}

/// A watch stream whose messages are read one by one.
pub(crate) struct Stream {
    /// Dropping the sending side would end the stream at grpc-proxy.
    pub(crate) send: SendStream<Bytes>,
    body: RecvStream,
    buffer: BytesMut,
}

impl Stream {
    /// A stream of which nothing was read.
    pub(crate) fn new(send: SendStream<Bytes>, body: RecvStream) -> Stream {
        Stream {
            send,
            body,
            buffer: BytesMut::new(),
        }
    }

    /// The next message, without its prefix; `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(prefix) = self.buffer.get(1..5) {
                let length = u32::from_be_bytes(prefix.try_into()?) as usize;
                if self.buffer.len() >= 5 + length {
                    self.buffer.advance(5);
                    return Ok(Some(self.buffer.split_to(length).freeze()));
                }
            }
            let Some(data) = self.body.data().await else {
                return Ok(None);
            };
            let data = data?;
            self.body.flow_control().release_capacity(data.len())?;
            self.buffer.extend_from_slice(&data);
        }
    }
}

/// Counts a WatchResponse.
fn count(message: &[u8], tally: &Tally, epoch: Instant, latencies: &mut Vec<u64>) {
    let now = nanoseconds(epoch.elapsed());
    let from = tally.measured_from_ns.load(Ordering::Relaxed);
    let response = Response::of(message);
    let mut events = 0;
    for event in response.events() {
        events += 1;
        let made = event.map(|event| event.made_ns).filter(|made| *made >= from);
        latencies.extend(made.and_then(|made| now.checked_sub(made)));
    }
    tally.bytes.fetch_add(message.len() as u64, Ordering::Relaxed);
    tally
        .created
        .fetch_add(u64::from(response.created), Ordering::Relaxed);
    tally.events.fetch_add(events, Ordering::Relaxed);
    tally.changed.notify_one();
}
