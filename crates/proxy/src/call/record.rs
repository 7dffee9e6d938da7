//! [`CallRecord`]: what is known of one call. See the [module](super).
//!
//! A fast read from memory is recorded without an allocation of its own.

use std::time::{Duration, SystemTime};
use std::{net::IpAddr, sync::Arc};

use bytes::{Buf, Bytes};
use etcd_store::cache::{RangeQuery, Rope};
use etcd_wire::grpc::metadata::{AGE_MILLIS, OUTCOME};
use etcd_wire::grpc::status::grpc_code;
use etcd_wire::grpc::{Status, set_history};
use http::{HeaderMap, HeaderValue, Request, Response};
use rangecache_base::telemetry::calls::{Call, Revisions};
use rangecache_base::telemetry::clients::{ClientCall, ClientName, ClientStats};
use rangecache_base::telemetry::metrics::{Code, Source};
use rangecache_base::telemetry::outcome::{Failure, Kind};
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_base::{net::Url, telemetry::trace::SpanContext};
use rangecache_edge::limits::{Deadline, HeldBytes};
use rangecache_mirror::{Mirrors, freshness::Proof, lineage::HistoryId, view::Mirror};
use tokio::time::Instant;

use super::access::{AccessCall, CallHead, logged_prefix};
use super::spans::{CreateSpans, Trace};
use crate::metrics::ProxyTelemetry;

/// Extension of a response with which rangecache ends a call that was to be answered by etcd: how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended(pub(crate) Outcome);

impl Ended {
    /// The outcome in this response, if it has one.
    fn of<B>(response: &Response<B>) -> Option<Outcome> {
        response.extensions().get().map(|Ended(outcome)| *outcome)
    }
}

/// Record of a call from its arrival to the end of its response. Dropping it reports the call.
#[derive(Debug)]
pub(crate) struct CallRecord {
    telemetry: Arc<ProxyTelemetry>,
    /// The call as its client's.
    client: ClientCall,
    /// In the access log; `None` if it is not logged.
    access: Option<Box<AccessCall>>,
    /// `None` if it is not sampled.
    trace: Option<Box<Trace>>,
    /// Span of a read in the log; `None` if its lines are not logged.
    log_span: Option<Box<tracing::Span>>,
    /// `None` unless it is a read.
    read: Option<Kind>,
    /// Whether etcd is to answer a call that is no read, until the response begins.
    is_for_etcd: bool,
    /// Bytes of the request, in the account of the client's connection.
    pub(crate) bytes: HeldBytes,
    /// Until when the client waits.
    deadline: Deadline,
    /// When the handler of a read began; of another call, when that arrived.
    begun: Instant,
    /// When the mirror was proven fresh enough for a read; `None` before.
    proven: Option<Instant>,
    /// Whether a read waited for the mirror to catch up.
    waited: bool,
    /// Outcome of a read so far; cancelled by the client until it is set.
    pub(crate) outcome: Outcome,
    /// Position of the mirror whose scope contains the range of a read, if any.
    mirror: Option<usize>,
    pub(crate) revisions: Revisions,
    /// Number of entries in a response from memory.
    pub(crate) keys: u64,
    /// Whether a read may return a whole range.
    pub(crate) is_list: bool,
    /// Whether the client asks what answers a read.
    explains: bool,
    /// Whether the client is another rangecache, to which responses tell where they come from.
    is_of_rangecache: bool,
    /// The history that a quorum check for the read has shown, and when its connection was opened.
    history: Option<(HistoryId, Instant)>,
    /// Age of a response from the last view, while no member of etcd answers.
    pub(crate) stale_age: Option<Duration>,
    /// Time until the head of the response, once a read is counted.
    first_byte: Option<Duration>,
    /// Time until the end of a response that was complete at once.
    ended: Option<Duration>,
    /// Bytes of the response's messages that were sent.
    sent_bytes: u64,
}

impl CallRecord {
    /// The record of a call of `client`, whose request is counted in `bytes`, with the head of `request`, which has `arrived` on a connection of the client
    /// `of_connection` at `peer`.
    pub(crate) fn begin<B>(
        telemetry: &Arc<ProxyTelemetry>,
        (mut client, bytes): (ClientCall, HeldBytes),
        (of_connection, peer): (&ClientStats, Option<IpAddr>),
        (head, request): (&CallHead, &Request<B>),
        arrived: Instant,
    ) -> CallRecord {
        client.measure(head.counted(request.uri().path()), arrived);
        let mut record = CallRecord::new(telemetry, client, bytes, arrived);
        record.explains = head.fields.explains;
        record.deadline = Deadline::after(arrived, head.fields.timeout());
        record.is_of_rangecache = head.fields.is_of_rangecache && head.is_http2 && head.fields.is_grpc();
        let access_log = &telemetry.access_log;
        if access_log.takes(request.headers()) {
            let access = AccessCall::begin(access_log, of_connection, head, request);
            let access = record.access.insert(access);
            access.record_caller(record.client.client().name());
        }
        if let Some(span) = telemetry.tracer.server(request.headers()) {
            let trace = Trace::begin(&telemetry.tracer, *span, head, request);
            let trace = record.trace.insert(trace);
            trace.record_peer(peer);
            trace.record_client(record.client.client().name());
            if let Some(access) = &mut record.access {
                access.record_trace(trace.id());
            }
        }
        record
    }

    /// The record of a call that has `arrived`, and is neither logged nor traced.
    pub(super) fn new(
        telemetry: &Arc<ProxyTelemetry>,
        client: ClientCall,
        bytes: HeldBytes,
        arrived: Instant,
    ) -> CallRecord {
        CallRecord {
            telemetry: Arc::clone(telemetry),
            client,
            access: None,
            trace: None,
            log_span: None,
            read: None,
            is_for_etcd: false,
            bytes,
            deadline: Deadline::NONE,
            begun: arrived,
            proven: None,
            waited: false,
            outcome: Outcome::Cancelled(Reason::Gone),
            mirror: None,
            revisions: Revisions::default(),
            keys: 0,
            is_list: false,
            explains: false,
            is_of_rangecache: false,
            history: None,
            stale_age: None,
            first_byte: None,
            ended: None,
            sent_bytes: 0,
        }
    }

    /// Spans for the create requests of a Watch stream, if the call is sampled.
    pub(crate) fn create_spans(&self) -> Option<Box<CreateSpans>> {
        self.trace.as_ref().map(|trace| trace.creates())
    }

    /// The mirror whose scope contains the range of a read, if any.
    pub(crate) fn mirror<'a>(&self, mirrors: &'a Mirrors) -> Option<&'a Mirror> {
        mirrors.at(self.mirror?)
    }

    /// Context of the phase **prove** for a call to etcd, if the call is sampled.
    pub(crate) fn propagated_context(&self) -> Option<SpanContext> {
        self.trace.as_ref()?.propagated_context()
    }

    /// The place for the context of the quorum check that the call waits for, if the call is sampled.
    pub(crate) fn check_context(&mut self) -> Option<&mut Option<SpanContext>> {
        self.trace.as_mut().map(|trace| trace.check_context())
    }

    /// Counts the call as an open Watch stream.
    pub(crate) fn set_watch(&mut self) {
        self.client.set_watch();
    }

    /// Records what answers the call; of a watch, what does from now on.
    pub(crate) fn set_source(&self, source: Source) {
        self.client.set_source(source);
    }

    /// Records the history that a quorum check for the read has shown.
    pub(crate) fn record_proof(&mut self, proof: &Proof) {
        self.history = Some((proof.history, proof.connection_opened()));
    }

    /// Begins a read; its times are measured from now on.
    pub(crate) fn begin_read(&mut self, kind: Kind) {
        self.read = Some(kind);
        self.begun = Instant::now();
    }

    /// Measures the times of the call from now on.
    pub(crate) fn measure_from_now(&mut self) {
        self.begun = Instant::now();
        self.client.measure_from(self.begun);
    }

    /// Name of the client that makes the call.
    pub(crate) fn client_name(&self) -> &ClientName {
        self.client.client().name()
    }

    /// Logs what follows of a read in `span`, to which its prefix is added.
    pub(crate) fn log_in(&mut self, span: tracing::Span) {
        self.log_span = Some(Box::new(span));
    }

    /// Time that a read waited for its proof; `None` without one.
    pub(crate) fn wait(&self) -> Option<Duration> {
        Some(self.proven?.duration_since(self.begun))
    }

    /// When the handler of a read began.
    pub(crate) fn begun(&self) -> Instant {
        self.begun
    }

    /// Until when the client waits.
    pub(crate) fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Records what a read asks for.
    pub(crate) fn record_query(&mut self, query: &RangeQuery) {
        self.revisions.asked = query.revision;
        if !query.range_end.is_empty() {
            self.client.record_range();
        }
        if let Some(span) = &self.log_span {
            let prefix = logged_prefix(&query.key, &query.range_end);
            span.record("prefix", &*String::from_utf8_lossy(prefix));
        }
        if let Some(access) = &mut self.access {
            access.record_query(query);
        }
        if let Some(trace) = &mut self.trace {
            trace.record_query(query);
        }
    }

    /// Records what the first watcher of a stream asks for.
    pub(crate) fn record_watcher(&mut self, key: &[u8], range_end: &[u8], first_revision: i64) {
        if let Some(access) = &mut self.access {
            access.record_watcher(key, range_end, first_revision);
        }
        if let Some(trace) = &mut self.trace {
            trace.record_range(key, range_end);
        }
    }

    /// Records for the access log what serves a Watch stream, and why.
    pub(crate) fn record_watch_source(&mut self, source: &'static str, reason: &'static str) {
        if let Some(access) = &mut self.access {
            access.record_labels((source, reason));
        }
    }

    /// Records the mirror whose scope contains the range of a read, at this `position`, and begins the phase **prove**, after the
    /// plan is made.
    pub(crate) fn begin_prove(&mut self, position: Option<usize>, mirror: Option<&Mirror>) {
        self.mirror = position;
        if let Some(trace) = &mut self.trace {
            trace.begin_prove(mirror.map(|mirror| &*mirror.name));
        }
    }

    /// Records the revision that the mirror must reach, for which a read may have to wait from now on.
    pub(crate) fn record_required_revision(&mut self, revision: i64) {
        self.revisions.proven = revision;
        if let Some(trace) = &mut self.trace {
            trace.record_required_revision();
        }
    }

    /// Records that `mirror` is at `revision`, which is fresh enough. Ends **prove**.
    pub(crate) fn record_proven(&mut self, mirror: &Mirror, revision: i64, waited: bool) {
        let now = Instant::now();
        self.proven = Some(now);
        self.waited = waited;
        self.revisions.served = revision;
        if let Some(trace) = &mut self.trace {
            trace.end_prove(now, waited, mirror.last_progress_request(), None);
        }
    }

    /// Records that `mirror` was not proven fresh, for `reason`, unless it was: memory may have no answer nevertheless. Ends
    /// **prove**.
    pub(crate) fn record_not_proven(&mut self, mirror: &Mirror, reason: Reason) {
        if self.proven.is_some() {
            return;
        }
        self.waited = reason == Reason::NotFresh;
        if let Some(trace) = &mut self.trace {
            let progress_requested = mirror.last_progress_request();
            trace.end_prove(Instant::now(), self.waited, progress_requested, Some(reason));
        }
    }

    /// Begins the phase **forward** and adds the trace context to the `headers` of the call to etcd.
    pub(crate) fn begin_forward(&mut self, headers: &mut HeaderMap) {
        if let Some(trace) = &mut self.trace {
            trace.begin_forward(headers);
        }
    }

    /// Counts a call that is neither a read nor a watch from memory, and begins **forward**.
    pub(crate) fn record_forwarded(&mut self, headers: &mut HeaderMap) {
        self.telemetry.metrics.forwarding.calls.inc();
        self.is_for_etcd = true;
        self.begin_forward(headers);
    }

    /// Counts a call that is refused before it has a handler; `reason` is the bound that is reached, if it is one.
    pub(crate) fn record_refused(&mut self, kind: Option<Kind>, reason: Option<Reason>) {
        self.client.record_refused();
        let Some(reason) = reason else {
            return;
        };
        self.telemetry.metrics.refusals.shed_calls.inc();
        let shed = Outcome::Shed(reason);
        self.record_outcome(shed);
        if let Some(kind) = kind {
            let outcome = match reason {
                Reason::Deadline => Outcome::Cancelled(reason),
                _ => shed,
            };
            let reads = &self.telemetry.metrics.reads;
            reads.record(kind, outcome, Duration::ZERO, Duration::ZERO);
        }
    }

    /// Records the endpoint of etcd that responds, if one does.
    pub(crate) fn record_endpoint(&mut self, endpoint: Option<&Url>) {
        if let (Some(trace), Some(endpoint)) = (&mut self.trace, endpoint) {
            trace.record_endpoint(endpoint);
        }
    }

    /// Records the head of the response. Counts a read; `mirror` is [`CallRecord::mirror`].
    pub(crate) fn begin_response<B>(&mut self, response: &mut Response<B>, mirror: Option<&Mirror>) {
        self.record_endpoint(response.extensions().get());
        let ended = Ended::of(response);
        self.outcome = ended.unwrap_or(self.outcome);
        match self.read {
            Some(kind) => {
                self.client.record_read(self.outcome, self.is_list);
                self.count_read(kind, mirror);
                self.explain(response);
            }
            None => {
                let is_of_etcd = std::mem::take(&mut self.is_for_etcd) && ended.is_none();
                if let Some(outcome) = ended {
                    self.client.record_ended(outcome);
                    self.record_outcome(outcome);
                } else if is_of_etcd {
                    self.client.record_from_etcd();
                }
            }
        }
        if let Some(age) = self.stale_age {
            self.telemetry.metrics.reads.record_stale(age);
            let millis = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
            response.headers_mut().insert(AGE_MILLIS, millis.into());
        }
        if self.is_of_rangecache {
            self.tell_origin(response);
        }
        if let Some(trace) = &mut self.trace {
            trace.record_head(response.status());
        }
        if let Some(access) = &mut self.access {
            access.begin_response(response.status());
        }
        self.record_status(response.headers());
    }

    /// Tells another rangecache in the response that it comes from one, and the history in which memory was proven to have it.
    fn tell_origin<B>(&self, response: &mut Response<B>) {
        let is_proven = self.outcome.is_from_memory() && self.stale_age.is_none();
        let proof = self.history.filter(|_| is_proven);
        let proof = proof.map(|(history, opened)| (history.number(), opened.elapsed()));
        set_history(response.headers_mut(), self.telemetry.instance.id(), proof);
    }

    /// Adds what answers a read to its response, if the client asks for it.
    fn explain<B>(&self, response: &mut Response<B>) {
        if self.explains {
            let (outcome, reason) = self.outcome.labels();
            // Labels are of letters and underscores.
            if let Ok(value) = HeaderValue::try_from(format!("{outcome}; {reason}")) {
                response.headers_mut().insert(OUTCOME, value);
            }
        }
    }

    /// Records that etcd has reset the call's stream before a response.
    pub(crate) fn record_reset(&mut self) {
        self.client.record_no_code();
        if std::mem::take(&mut self.is_for_etcd) {
            self.client.record_from_etcd();
        }
        if let Some(kind) = self.read {
            self.client.record_read(self.outcome, self.is_list);
            self.count_read(kind, None);
        }
    }

    /// Records that the response did not fit into the buffers, and is replaced by a refusal.
    pub(crate) fn record_refused_response(&mut self) {
        self.client.set_source(Source::Refused);
        self.record_code(Status::BufferBytes.code() as u16);
        self.record_outcome(Outcome::Shed(Reason::BufferBytes));
    }

    /// Records an outcome that is not the counted one of a read, for the access log and the trace.
    fn record_outcome(&mut self, outcome: Outcome) {
        if let Some(access) = &mut self.access {
            access.record_labels(outcome.labels());
        }
        if let Some(trace) = &mut self.trace {
            trace.set_outcome(outcome);
        }
    }

    /// Records data of the response that is sent now.
    pub(crate) fn record_data(&mut self, data: &Rope) {
        let bytes = data.remaining() as u64;
        self.sent_bytes += bytes;
        self.client.record_sent(bytes);
        if let Some(trace) = &mut self.trace {
            trace.record_data(data);
        }
        if let Some(access) = &mut self.access {
            access.record_data(data.remaining(), data.pieces());
        }
    }

    /// Records the whole body of a response that is complete: one message, if there is one, and `trailers`.
    pub(crate) fn record_complete(&mut self, data: Option<&Bytes>, trailers: Option<&HeaderMap>) {
        match data {
            Some(data) if self.trace.is_some() || self.access.is_some() => {
                self.record_data(&data.clone().into());
            }
            Some(data) => {
                self.sent_bytes = data.len() as u64;
                self.client.record_sent(self.sent_bytes);
            }
            None => {}
        }
        self.record_end(trailers);
        self.ended = self.first_byte;
    }

    /// Records the end of the response, with its `trailers`.
    pub(crate) fn record_end(&mut self, trailers: Option<&HeaderMap>) {
        if let Some(trailers) = trailers {
            self.record_status(trailers);
        }
        self.client.record_no_code();
    }

    /// Records the gRPC status in these headers or trailers, if there is one.
    fn record_status(&mut self, headers: &HeaderMap) {
        if let Some(code) = grpc_code(headers) {
            self.record_code(code);
        }
    }

    fn record_code(&mut self, code: u16) {
        self.client.record_code(Code::of(code));
        if let Some(trace) = &mut self.trace {
            trace.record_code(code);
        }
        if let Some(access) = &mut self.access {
            access.record_code(code);
        }
    }

    /// Counts a read when its response begins, or when it ends without one.
    fn count_read(&mut self, kind: Kind, mirror: Option<&Mirror>) {
        if !self.outcome.is_from_memory() {
            // Memory had begun to answer, and etcd did.
            (self.revisions.served, self.keys) = (0, 0);
        }
        let waited = self.wait().unwrap_or_default();
        let total = self.begun.elapsed();
        self.first_byte = Some(total);
        let outcome = self.outcome;
        let (label, reason) = outcome.labels();
        // The head of a response is sent, and a call is cancelled, outside of the read's span.
        let entered = self.log_span.as_ref().map(|span| span.enter());
        tracing::debug!(outcome = label, reason, waited = ?waited, total = ?total, "read finished");
        drop(entered);
        let reads = &self.telemetry.metrics.reads;
        reads.record(kind, outcome, waited, total);
        if outcome.is_from_memory()
            && let Some(mirror) = mirror
        {
            mirror.metrics.read_wait.observe(waited);
        }
        if let Some(trace) = &mut self.trace {
            reads.record_exemplar(trace.id(), outcome, waited, total);
            if matches!(outcome, Outcome::Hit(_) | Outcome::Waited(_)) {
                trace.begin_answer(self.proven.unwrap_or_else(Instant::now));
            }
            trace.record_read(outcome, self.revisions, self.keys);
        }
        if let Some(access) = &mut self.access {
            let proven = self.proven.map(|_| waited);
            access.record_read(outcome, proven, self.revisions.served);
        }
    }

    /// The outcome of a read whose client has left, and hyper has dropped its future: what it was to be is none.
    fn outcome_without_response(&self) -> Outcome {
        match self.outcome {
            Outcome::Streamed(_) | Outcome::Forwarded(_) | Outcome::Paged(_)
                if self.deadline.has_expired_for_client() =>
            {
                Outcome::Failed(Failure::Deadline)
            }
            // Its proof is etcd's, too.
            Outcome::Cancelled(_) if self.mirror.is_some() && self.deadline.has_expired_for_client() => {
                Outcome::Failed(Failure::Deadline)
            }
            Outcome::Streamed(reason) | Outcome::Forwarded(reason) | Outcome::Paged(reason) => {
                Outcome::Cancelled(reason)
            }
            other => other,
        }
    }

    /// Records the end of a call whose client got no response in time, by the code that etcd counts then.
    fn end_expired(&mut self) {
        self.client.record_ended(Outcome::Failed(Failure::Deadline));
        self.client.record_code(Code::DEADLINE_EXCEEDED);
    }

    /// The facts of a read that ends now, after `ended`.
    #[cold]
    fn to_call(&self, kind: Kind, ended: Duration) -> Call {
        Call {
            kind,
            outcome: self.outcome,
            ended_at: SystemTime::now(),
            proven: self.wait(),
            waited: self.waited,
            first_byte: self.first_byte.unwrap_or(ended),
            ended,
            mirror: self.mirror,
            revisions: self.revisions,
            keys: self.keys,
            bytes: self.sent_bytes,
        }
    }
}

impl Drop for CallRecord {
    fn drop(&mut self) {
        let Some(kind) = self.read else {
            if self.is_for_etcd && self.deadline.has_expired_for_client() {
                self.end_expired();
                self.record_outcome(Outcome::Failed(Failure::Deadline));
            }
            return;
        };
        if self.first_byte.is_none() {
            self.outcome = self.outcome_without_response();
            if self.outcome == Outcome::Failed(Failure::Deadline) {
                self.end_expired();
            }
            self.count_read(kind, None);
        }
        let ended = self.ended.unwrap_or_else(|| self.begun.elapsed());
        self.telemetry.slowest.offer(ended, || self.to_call(kind, ended));
    }
}

#[cfg(test)]
mod tests {
    use rangecache_base::telemetry::outcome::Read;

    use super::super::testing::{record_in, telemetry};
    use super::*;

    const HIT: Outcome = Outcome::Hit(Read::Linearizable);

    /// The slowest reads, with the bytes that were sent, and the calls of the client: from memory, from etcd, and refused.
    fn reported(telemetry: &ProxyTelemetry) -> (Vec<(Outcome, u64)>, [u64; 3]) {
        let calls = telemetry.slowest.list();
        let calls = calls.iter().map(|call| (call.outcome, call.bytes)).collect();
        let clients = telemetry.clients.figures();
        let of = clients.iter().find(|of| of.calls > 0).expect("a client");
        (calls, [of.from_memory, of.from_etcd, of.refused])
    }

    fn begin_response(record: &mut CallRecord, ended: Option<Outcome>) -> Response<()> {
        let mut response = Response::new(());
        if let Some(outcome) = ended {
            response.extensions_mut().insert(Ended(outcome));
        }
        record.begin_response(&mut response, None);
        response
    }

    #[test]
    fn read_is_reported_once_at_its_end_with_what_was_sent() {
        let telemetry = telemetry();
        let mut record = record_in(&telemetry);
        record.begin_read(Kind::Unary);
        record.outcome = HIT;
        begin_response(&mut record, None);
        record.record_data(&Bytes::from_static(b"first").into());
        record.record_data(&Bytes::from_static(b"second").into());
        record.record_end(Some(&Status::BufferBytes.trailers()));
        assert!(telemetry.slowest.list().is_empty(), "it has not ended");
        drop(record);
        assert_eq!(reported(&telemetry), (vec![(HIT, 11)], [1, 0, 0]));
    }

    #[test]
    fn read_that_is_dropped_before_its_response_was_cancelled() {
        let telemetry = telemetry();
        let mut record = record_in(&telemetry);
        record.begin_read(Kind::Stream);
        drop(record);
        let gone = Outcome::Cancelled(Reason::Gone);
        assert_eq!(reported(&telemetry), (vec![(gone, 0)], [0, 0, 0]));
    }

    #[tokio::test(start_paused = true)]
    async fn read_that_etcd_has_not_answered_when_its_client_leaves_is_not_etcds() {
        let forwarded = Outcome::Forwarded(Reason::FeedLost);
        let failed = Outcome::Failed(Failure::Deadline);
        let second = Duration::from_secs(1);
        for (outcome, is_in_mirror, after, expected) in [
            (forwarded, false, second, failed),
            (Outcome::Streamed(Reason::FeedLost), true, second, failed),
            (forwarded, true, second / 2, Outcome::Cancelled(Reason::FeedLost)),
            // Without a proof until then.
            (Outcome::Cancelled(Reason::Gone), true, second, failed),
            (
                Outcome::Cancelled(Reason::Gone),
                true,
                second / 2,
                Outcome::Cancelled(Reason::Gone),
            ),
            (
                Outcome::Cancelled(Reason::Gone),
                false,
                second,
                Outcome::Cancelled(Reason::Gone),
            ),
        ] {
            let telemetry = telemetry();
            let mut record = record_in(&telemetry);
            record.deadline = Deadline::after(Instant::now(), Some(second));
            record.begin_read(Kind::Unary);
            record.mirror = is_in_mirror.then_some(0);
            record.outcome = outcome;
            tokio::time::advance(after).await;
            drop(record);
            assert_eq!(reported(&telemetry), (vec![(expected, 0)], [0, 0, 0]));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn call_that_etcd_has_not_answered_when_its_client_leaves_is_not_etcds() {
        let telemetry = telemetry();
        let mut record = record_in(&telemetry);
        record.deadline = Deadline::after(Instant::now(), Some(Duration::from_secs(1)));
        record.record_forwarded(&mut HeaderMap::new());
        tokio::time::advance(Duration::from_secs(1)).await;
        drop(record);
        assert_eq!(reported(&telemetry), (Vec::new(), [0, 0, 0]));
    }

    #[test]
    fn response_that_rangecache_ends_has_its_outcome() {
        let telemetry = telemetry();
        let shed = Outcome::Shed(Reason::BufferBytes);
        let mut record = record_in(&telemetry);
        record.begin_read(Kind::Unary);
        record.outcome = Outcome::Forwarded(Reason::Loading);
        begin_response(&mut record, Some(shed));
        drop(record);
        assert_eq!(reported(&telemetry), (vec![(shed, 0)], [0, 0, 1]));
    }

    #[test]
    fn age_of_a_stale_response_is_in_its_head() {
        let mut record = record_in(&telemetry());
        record.begin_read(Kind::Unary);
        record.stale_age = Some(Duration::from_millis(1_234));
        let response = begin_response(&mut record, None);
        assert_eq!(response.headers()[AGE_MILLIS], "1234");
    }

    #[test]
    fn calls_that_are_no_reads_are_not_among_the_slowest() {
        let telemetry = telemetry();
        let mut record = record_in(&telemetry);
        record.record_forwarded(&mut HeaderMap::new());
        begin_response(&mut record, None);
        record.record_complete(None, None);
        drop(record);
        let mut refused = record_in(&telemetry);
        refused.record_refused(Some(Kind::Unary), Some(Reason::BufferBytes));
        drop(refused);
        assert_eq!(reported(&telemetry), (Vec::new(), [0, 1, 1]));
        assert_eq!(telemetry.metrics.refusals.shed_calls.get(), 1);
    }
}
