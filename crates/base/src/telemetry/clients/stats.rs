//! Counters of one client.

use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU64};
use std::sync::{Arc, atomic::Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::{Serialize, Serializer, ser::SerializeStruct as _};
use tokio::time::Instant;

use super::name::{ClientName, cut, shared_text};
use crate::telemetry::metrics::{CallMethod, CallMetrics, Code, Source};
use crate::{telemetry::Outcome, unix_time};

/// Longest user agent that is kept, in bytes.
const MAX_AGENT_BYTES: usize = 64;
/// Cost of a call, in bytes.
const CALL_COST_BYTES: f64 = 8192.0;
/// Cost of a call that etcd answered, in bytes, in addition to [`CALL_COST_BYTES`].
const ETCD_COST_BYTES: f64 = 65_536.0;

/// Counters of one client, over all of its connections.
#[derive(Debug)]
pub struct ClientStats {
    /// Number of the client; no other has it.
    number: u64,
    name: ClientName,
    pub(super) connections: AtomicI64,
    calls: AtomicU64,
    in_flight: AtomicI64,
    watches: AtomicI64,
    lists: AtomicU64,
    from_memory: AtomicU64,
    from_etcd: AtomicU64,
    refused: AtomicU64,
    received_bytes: AtomicU64,
    sent_bytes: AtomicU64,
    /// Begin of the last call, in seconds since 1970.
    last_seen_seconds: AtomicU64,
    agent: Mutex<Arc<str>>,
    sampled: Mutex<Sampled>,
    /// Calls of all clients.
    of_all: Arc<CallMetrics>,
}

/// Counters at the last sample, and the rates up to it.
#[derive(Debug, Default)]
struct Sampled {
    at: Option<Instant>,
    counts: Counts,
    rates: ClientRates,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    calls: u64,
    from_etcd: u64,
    bytes: u64,
}

/// Current cost of a client, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ClientRates {
    /// Calls.
    pub calls: f64,
    /// Calls that etcd answered.
    pub from_etcd: f64,
    /// Bytes received and sent.
    pub bytes: f64,
}

impl ClientRates {
    /// Cost to sort clients by, in bytes per second: a call counts 8 KiB, one that etcd answered 64 KiB more.
    #[must_use]
    pub fn cost(&self) -> f64 {
        self.bytes + self.calls * CALL_COST_BYTES + self.from_etcd * ETCD_COST_BYTES
    }
}

impl Serialize for ClientRates {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut rates = serializer.serialize_struct("ClientRates", 4)?;
        rates.serialize_field("calls_per_second", &self.calls)?;
        rates.serialize_field("etcd_calls_per_second", &self.from_etcd)?;
        rates.serialize_field("bytes_per_second", &self.bytes)?;
        rates.serialize_field("cost", &self.cost())?;
        rates.end()
    }
}

/// Figures of one client. Counts are since the start.
#[derive(Clone, Debug, Serialize)]
pub struct ClientFigures {
    /// Name of the client, with its kind.
    #[serde(flatten)]
    pub name: ClientName,
    /// Open connections; of a user of etcd those that had its token last.
    pub connections: u64,
    /// Calls in flight.
    #[serde(rename = "calls_in_flight")]
    pub in_flight: u64,
    /// Open Watch streams, part of the calls in flight.
    pub watches: u64,
    /// Rates at the last sample.
    #[serde(flatten)]
    pub rates: ClientRates,
    /// Calls.
    pub calls: u64,
    /// Reads of ranges without a limit, and RangeStreams.
    pub lists: u64,
    /// Calls that memory answered.
    pub from_memory: u64,
    /// Calls that etcd answered.
    pub from_etcd: u64,
    /// Calls that were refused.
    pub refused: u64,
    /// Bytes received on the connections.
    pub received_bytes: u64,
    /// Bytes of responses.
    pub sent_bytes: u64,
    /// User agent of the newest connection.
    #[serde(rename = "user_agent", serialize_with = "shared_text")]
    pub agent: Arc<str>,
    /// Begin of the last call, in JSON UTC, RFC 3339; `None` before the first one.
    #[serde(serialize_with = "in_seconds")]
    pub last_seen: Option<SystemTime>,
}

#[allow(clippy::ref_option, reason = "serde passes references")]
fn in_seconds<S: Serializer>(at: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
    let at = at.map(|at| humantime::format_rfc3339_seconds(at).to_string());
    at.serialize(serializer)
}

impl ClientStats {
    /// A client without calls; they are counted in `of_all`, too.
    pub(super) fn new(number: u64, name: ClientName, of_all: Arc<CallMetrics>) -> Arc<ClientStats> {
        Arc::new(ClientStats {
            number,
            name,
            connections: AtomicI64::new(0),
            calls: AtomicU64::new(0),
            in_flight: AtomicI64::new(0),
            watches: AtomicI64::new(0),
            lists: AtomicU64::new(0),
            from_memory: AtomicU64::new(0),
            from_etcd: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            sent_bytes: AtomicU64::new(0),
            last_seen_seconds: AtomicU64::new(0),
            agent: Mutex::new("".into()),
            sampled: Mutex::default(),
            of_all,
        })
    }

    /// Number of the client; no other has it.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Name of the client.
    #[must_use]
    pub fn name(&self) -> &ClientName {
        &self.name
    }

    /// Begins a call.
    #[must_use]
    pub fn begin_call(self: &Arc<Self>) -> ClientCall {
        self.calls.fetch_add(1, Relaxed);
        self.in_flight.fetch_add(1, Relaxed);
        let now = u64::try_from(unix_time::now_seconds()).unwrap_or(0);
        self.last_seen_seconds.store(now, Relaxed);
        ClientCall {
            client: Arc::clone(self),
            is_watch: false,
            source: AtomicU8::new(UNDECIDED),
            measured: None,
        }
    }

    /// Counts bytes that were received on a connection.
    pub fn record_received(&self, bytes: u64) {
        if bytes > 0 {
            self.received_bytes.fetch_add(bytes, Relaxed);
            self.of_all.record_received(bytes);
        }
    }

    /// Records the user agent of a connection.
    pub fn record_agent(&self, agent: &str) {
        *self.agent.lock() = cut(agent, MAX_AGENT_BYTES).into();
    }

    /// Begin of the last call, in seconds since 1970; 0 before the first one.
    pub(super) fn last_seen_seconds(&self) -> u64 {
        self.last_seen_seconds.load(Relaxed)
    }

    /// Adds the sums of a client that leaves the registry.
    pub(super) fn add_sums_of(&self, left: &ClientStats) {
        for (sum, of) in [
            (&self.calls, &left.calls),
            (&self.lists, &left.lists),
            (&self.from_memory, &left.from_memory),
            (&self.from_etcd, &left.from_etcd),
            (&self.refused, &left.refused),
            (&self.received_bytes, &left.received_bytes),
            (&self.sent_bytes, &left.sent_bytes),
        ] {
            sum.fetch_add(of.load(Relaxed), Relaxed);
        }
        // What others did before is not a rate of now.
        self.sampled.lock().counts = self.counts();
    }

    /// Determines the rates since the last sample.
    #[allow(clippy::cast_precision_loss, reason = "rates show magnitudes")]
    pub(super) fn sample(&self, now: Instant) {
        let counts = self.counts();
        let mut sampled = self.sampled.lock();
        let since = sampled.at.map(|at| now.duration_since(at).as_secs_f64());
        if let Some(seconds) = since.filter(|seconds| *seconds > 0.0) {
            let last = sampled.counts;
            let rate = |now: u64, last: u64| now.saturating_sub(last) as f64 / seconds;
            sampled.rates = ClientRates {
                calls: rate(counts.calls, last.calls),
                from_etcd: rate(counts.from_etcd, last.from_etcd),
                bytes: rate(counts.bytes, last.bytes),
            };
        }
        sampled.at = Some(now);
        sampled.counts = counts;
    }

    fn counts(&self) -> Counts {
        Counts {
            calls: self.calls.load(Relaxed),
            from_etcd: self.from_etcd.load(Relaxed),
            bytes: self.received_bytes.load(Relaxed) + self.sent_bytes.load(Relaxed),
        }
    }

    /// Current figures.
    #[must_use]
    pub fn figures(&self) -> ClientFigures {
        let gauge = |value: &AtomicI64| u64::try_from(value.load(Relaxed)).unwrap_or(0);
        let last_seen = self.last_seen_seconds();
        ClientFigures {
            name: self.name.clone(),
            connections: gauge(&self.connections),
            calls: self.calls.load(Relaxed),
            in_flight: gauge(&self.in_flight),
            watches: gauge(&self.watches),
            lists: self.lists.load(Relaxed),
            from_memory: self.from_memory.load(Relaxed),
            from_etcd: self.from_etcd.load(Relaxed),
            refused: self.refused.load(Relaxed),
            received_bytes: self.received_bytes.load(Relaxed),
            sent_bytes: self.sent_bytes.load(Relaxed),
            agent: Arc::clone(&self.agent.lock()),
            last_seen: (last_seen > 0).then(|| SystemTime::UNIX_EPOCH + Duration::from_secs(last_seen)),
            rates: self.sampled.lock().rates,
        }
    }
}

/// A call of a client, which is in flight until this is dropped.
#[derive(Debug)]
pub struct ClientCall {
    client: Arc<ClientStats>,
    is_watch: bool,
    /// Source of the response: a [`Source`], or [`UNDECIDED`].
    source: AtomicU8,
    measured: Option<Measured>,
}

/// Value of [`ClientCall::source`] before anything answers.
const UNDECIDED: u8 = u8::MAX;

/// Facts about a call that its metrics need.
#[derive(Debug)]
struct Measured {
    /// `None` if it is not a gRPC call.
    method: Option<CallMethod>,
    arrived: Instant,
    /// Status of the response; `None` before it is sent.
    code: Option<Code>,
    /// Whether it is a Range of several keys.
    is_range: bool,
}

impl ClientCall {
    /// The client.
    #[must_use]
    pub fn client(&self) -> &Arc<ClientStats> {
        &self.client
    }

    /// Counts the call in the metrics of all calls: in flight now, and by its status when it ends. `method` is `None` for
    /// one that is not a gRPC call.
    pub fn measure(&mut self, method: Option<CallMethod>, arrived: Instant) {
        if self.measured.is_none() {
            self.client.of_all.begin(method);
            self.measured = Some(Measured {
                method,
                arrived,
                code: None,
                is_range: false,
            });
        }
    }

    /// Measures the call as if it had `arrived` then.
    pub fn measure_from(&mut self, arrived: Instant) {
        if let Some(measured) = &mut self.measured {
            measured.arrived = arrived;
        }
    }

    /// Counts the call as an open Watch stream.
    pub fn set_watch(&mut self) {
        if !self.is_watch {
            self.is_watch = true;
            self.client.watches.fetch_add(1, Relaxed);
        }
    }

    /// Records that the call reads a range of keys.
    pub fn record_range(&mut self) {
        if let Some(measured) = &mut self.measured {
            measured.is_range = true;
        }
    }

    /// Records the status of the response; the last one counts.
    pub fn record_code(&mut self, code: Code) {
        if let Some(measured) = &mut self.measured {
            measured.code = Some(code);
        }
    }

    /// Records that the response has ended without a status.
    pub fn record_no_code(&mut self) {
        if let Some(measured) = &mut self.measured {
            measured.code.get_or_insert(Code::UNKNOWN);
        }
    }

    /// Counts bytes of the response.
    pub fn record_sent(&self, bytes: u64) {
        self.client.sent_bytes.fetch_add(bytes, Relaxed);
        self.client.of_all.record_sent(self.source(), bytes);
    }

    /// Counts the outcome of a read.
    pub fn record_read(&self, outcome: Outcome, is_list: bool) {
        if is_list {
            self.client.lists.fetch_add(1, Relaxed);
        }
        match outcome {
            Outcome::Hit(_) | Outcome::Waited(_) => {
                self.client.from_memory.fetch_add(1, Relaxed);
                self.set_source(Source::Memory);
            }
            Outcome::Streamed(_) | Outcome::Forwarded(_) | Outcome::Paged(_) => self.record_from_etcd(),
            Outcome::Failed(_) | Outcome::Cancelled(_) => self.record_ended(outcome),
            Outcome::Shed(_) => self.record_refused(),
        }
    }

    /// Records what ends the call in place of etcd.
    pub fn record_ended(&self, outcome: Outcome) {
        match outcome {
            Outcome::Failed(_) => self.set_source(Source::Failed),
            Outcome::Shed(_) => self.set_source(Source::Refused),
            _ => {}
        }
    }

    /// Counts the call as answered by etcd.
    pub fn record_from_etcd(&self) {
        self.client.from_etcd.fetch_add(1, Relaxed);
        self.set_source(Source::Etcd);
    }

    /// Counts the call as refused.
    pub fn record_refused(&self) {
        self.client.refused.fetch_add(1, Relaxed);
        self.set_source(Source::Refused);
    }

    /// Records what answers the call; of a watch, what does from now on.
    pub fn set_source(&self, source: Source) {
        self.source.store(source as u8, Relaxed);
    }

    /// Source of the response. Until it is recorded, the response can only be an error of rangecache's own.
    fn source(&self) -> Source {
        let source = self.source.load(Relaxed);
        let known = [Source::Memory, Source::Etcd, Source::Failed]
            .into_iter()
            .find(|known| *known as u8 == source);
        known.unwrap_or(Source::Refused)
    }
}

impl Drop for ClientCall {
    fn drop(&mut self) {
        self.client.in_flight.fetch_sub(1, Relaxed);
        if self.is_watch {
            self.client.watches.fetch_sub(1, Relaxed);
        }
        let Some(measured) = &self.measured else {
            return;
        };
        let of_all = &self.client.of_all;
        of_all.end(measured.method);
        let Some(method) = measured.method else {
            return;
        };
        let is_undecided = self.source.load(Relaxed) == UNDECIDED;
        let source = match measured.code {
            None if is_undecided => Source::Nothing,
            _ => self.source(),
        };
        let code = measured.code.unwrap_or(Code::CANCELED);
        let took = measured.arrived.elapsed();
        of_all.record(method, code, source, took, measured.is_range);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::CodeCounts;
    use crate::telemetry::outcome::{Failure, Read, Reason};

    const SOURCES: [Source; 5] = [
        Source::Memory,
        Source::Etcd,
        Source::Failed,
        Source::Refused,
        Source::Nothing,
    ];

    fn client(of_all: &Arc<CallMetrics>) -> Arc<ClientStats> {
        ClientStats::new(1, ClientName::of_user("alice"), Arc::clone(of_all))
    }

    /// Code and source by which a measured Range is counted that ends after `act`.
    fn counted(act: impl FnOnce(&mut ClientCall)) -> (&'static str, Source) {
        let of_all = Arc::default();
        let mut call = client(&of_all).begin_call();
        call.measure(
            Some(CallMethod::of_path("/etcdserverpb.KV/Range")),
            Instant::now(),
        );
        act(&mut call);
        assert_eq!(of_all.by_code(), [], "counted before its end");
        drop(call);
        let by_code = of_all.by_code();
        let [counts] = by_code.as_slice() else {
            panic!("not one code: {by_code:?}");
        };
        assert_eq!(counts.total(), 1);
        let source = SOURCES.into_iter().find(|source| counts.of(*source) == 1);
        (counts.code, source.unwrap())
    }

    #[test]
    fn call_is_counted_by_its_last_code_and_source() {
        let ended = counted(|call| {
            call.record_code(Code::OK);
            call.set_source(Source::Memory);
            call.record_code(Code::of(8));
            call.set_source(Source::Etcd);
        });
        assert_eq!(ended, ("ResourceExhausted", Source::Etcd));
    }

    #[test]
    fn call_without_a_response_is_cancelled_and_one_with_a_code_alone_is_refused() {
        assert_eq!(counted(|_| {}), ("Canceled", Source::Nothing));
        assert_eq!(
            counted(|call| call.record_code(Code::of(8))),
            ("ResourceExhausted", Source::Refused)
        );
        assert_eq!(
            counted(|call| call.set_source(Source::Etcd)),
            ("Canceled", Source::Etcd),
            "the client left during the response"
        );
    }

    #[test]
    fn end_without_a_status_is_unknown_unless_a_code_was_sent() {
        let unknown = counted(|call| {
            call.record_from_etcd();
            call.record_no_code();
        });
        assert_eq!(unknown, ("Unknown", Source::Etcd));
        let known = counted(|call| {
            call.record_from_etcd();
            call.record_code(Code::OK);
            call.record_no_code();
        });
        assert_eq!(known, ("OK", Source::Etcd));
    }

    #[test]
    fn read_is_counted_by_what_answered_it() {
        let figures_after = |outcome, is_list| {
            let client = client(&Arc::default());
            client.begin_call().record_read(outcome, is_list);
            let figures = client.figures();
            (
                figures.lists,
                figures.from_memory,
                figures.from_etcd,
                figures.refused,
            )
        };
        assert_eq!(figures_after(Outcome::Hit(Read::Pinned), true), (1, 1, 0, 0));
        assert_eq!(figures_after(Outcome::Paged(Reason::Loading), true), (1, 0, 1, 0));
        assert_eq!(
            figures_after(Outcome::Shed(Reason::TooManyWaiting), false),
            (0, 0, 0, 1)
        );
        let failed = Outcome::Failed(Failure::NoEndpoint);
        assert_eq!(
            figures_after(failed, false),
            (0, 0, 0, 0),
            "neither memory nor etcd answered"
        );
        assert_eq!(
            counted(|call| call.record_read(failed, false)),
            ("Canceled", Source::Failed)
        );
    }

    #[test]
    fn call_is_measured_once_and_one_that_is_not_grpc_has_no_code() {
        let of_all = Arc::<CallMetrics>::default();
        let client = client(&of_all);
        let watch = Some(CallMethod::of_path("/etcdserverpb.Watch/Watch"));
        let mut call = client.begin_call();
        call.measure(watch, Instant::now());
        call.measure(watch, Instant::now());
        assert_eq!(of_all.open_watches(), 1);
        drop(call);
        assert_eq!(of_all.open_watches(), 0);
        let before = of_all.by_code();
        let mut json = client.begin_call();
        json.measure(None, Instant::now());
        json.record_code(Code::OK);
        drop(json);
        drop(client.begin_call());
        assert_eq!(of_all.by_code(), before);
        let counted: u64 = before.iter().map(CodeCounts::total).sum();
        assert_eq!((counted, client.figures().calls), (1, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn rates_are_those_between_the_last_two_samples() {
        let client = client(&Arc::default());
        let start = Instant::now();
        client.record_received(1000);
        client.begin_call().record_from_etcd();
        client.sample(start);
        assert_eq!(client.figures().rates, ClientRates::default(), "one sample only");
        for _ in 0..4 {
            client.begin_call().record_from_etcd();
        }
        client.begin_call().record_sent(20);
        client.record_received(40);
        client.sample(start + Duration::from_secs(2));
        let rates = ClientRates {
            calls: 2.5,
            from_etcd: 2.0,
            bytes: 30.0,
        };
        assert_eq!(client.figures().rates, rates);
        client.sample(start + Duration::from_secs(2));
        assert_eq!(client.figures().rates, rates, "no time has passed");
        client.sample(start + Duration::from_secs(3));
        assert_eq!(client.figures().rates, ClientRates::default());
    }

    #[tokio::test(start_paused = true)]
    async fn sums_of_a_client_that_left_are_no_rate_of_the_others() {
        let of_all = Arc::default();
        let (others, left) = (client(&of_all), client(&of_all));
        let start = Instant::now();
        others.sample(start);
        left.begin_call().record_from_etcd();
        left.record_received(1 << 20);
        others.add_sums_of(&left);
        others.sample(start + Duration::from_secs(1));
        let figures = others.figures();
        assert_eq!(
            (figures.calls, figures.from_etcd, figures.received_bytes),
            (1, 1, 1 << 20)
        );
        assert_eq!(figures.rates, ClientRates::default());
    }
}
