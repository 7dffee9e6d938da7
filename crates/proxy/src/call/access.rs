//! [`CallHead`]: what the head of a request says about its call, read once. [`AccessCall`]: what the access log says about one call,
//! collected on its way.
//!
//! Calls that are not logged have none. Keys are copied only if the operator logs them; values never are (I10).

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use etcd_store::{cache::RangeQuery, keyspace::common_prefix};
use etcd_wire::grpc::{EventScanner, HeaderScanner, Method, Scanned};
use etcd_wire::{etcdserverpb::RangeRequest, grpc::metadata::HeadFields};
use http::{Request, StatusCode, Version};
use rangecache_base::net::Transport;
use rangecache_base::telemetry::access_log::{AccessLog, LogEntry, MAX_KEY_BYTES, Phases, RangeFacts};
use rangecache_base::telemetry::clients::{ClientKind, ClientName, ClientStats};
use rangecache_base::telemetry::trace::{TraceId, trace_id_of};
use rangecache_base::telemetry::{Outcome, metrics::CallMethod, outcome::Kind};
use tokio::time::Instant;

/// gRPC code of a call whose client cancelled it: dropped before a status was sent.
const CANCELLED: u16 = 1;
/// Parts of the prefix that is logged for a range.
const PREFIX_PARTS: usize = 2;
/// Characters of a call's path that are logged.
const MAX_PATH_CHARACTERS: usize = 256;

/// Access log entry of a call in flight; logged when dropped.
#[derive(Debug)]
pub(super) struct AccessCall {
    log: AccessLog,
    arrived: Instant,
    /// Time until memory was proven fresh.
    proven: Option<Duration>,
    /// Time until the response began.
    responded: Option<Duration>,
    is_grpc: bool,
    headers: Option<HeaderScanner>,
    /// Of a Watch stream.
    events: Option<EventScanner>,
    /// `None` once it is queued.
    entry: Option<LogEntry>,
}

impl AccessCall {
    /// Begins the entry of a logged call with the head of `request` on a connection of `client`.
    #[cold]
    pub(super) fn begin<B>(
        log: &AccessLog,
        client: &ClientStats,
        head: &CallHead,
        request: &Request<B>,
    ) -> Box<AccessCall> {
        let path = request.uri().path();
        let (is_grpc, method) = (head.fields.is_grpc(), head.method);
        let shown = if is_grpc {
            path.trim_start_matches('/')
        } else {
            path
        };
        Box::new(AccessCall {
            log: log.clone(),
            arrived: Instant::now(),
            proven: None,
            responded: None,
            is_grpc,
            headers: HeaderScanner::new(method).filter(|_| is_grpc),
            events: (is_grpc && method == Method::Watch).then(EventScanner::default),
            entry: Some(LogEntry {
                trace_id: trace_id_of(request.headers()),
                ..LogEntry::new(
                    SystemTime::now(),
                    client.name().clone(),
                    shown.chars().take(MAX_PATH_CHARACTERS).collect(),
                )
            }),
        })
    }

    /// Records who makes the call, which may be a user of etcd.
    pub(super) fn record_caller(&mut self, name: &ClientName) {
        if let Some(entry) = &mut self.entry {
            entry.user = (name.kind() == ClientKind::User).then(|| name.clone());
        }
    }

    /// Records what a read asks for.
    pub(super) fn record_query(&mut self, query: &RangeQuery) {
        self.record_range(&query.key, &query.range_end, query.to_request());
    }

    /// Records what the first watcher of a stream asks for.
    pub(super) fn record_watcher(&mut self, key: &[u8], range_end: &[u8], first_revision: i64) {
        let options = RangeRequest {
            revision: first_revision,
            ..RangeRequest::default()
        };
        self.record_range(key, range_end, options);
    }

    fn record_range(&mut self, key: &[u8], range_end: &[u8], request: RangeRequest) {
        let Some(entry) = &mut self.entry else {
            return;
        };
        let is_cut = key.len().max(range_end.len()) > MAX_KEY_BYTES;
        let prefix = logged_prefix(key, range_end);
        let has_keys = self.log.has_keys();
        entry.range = Some(RangeFacts {
            prefix: String::from_utf8_lossy(prefix).into_owned(),
            keys: (has_keys && !is_cut).then(|| (key.to_vec(), range_end.to_vec())),
            is_cut: has_keys && is_cut,
            // Without the keys (I10), which would also hold the buffer of the client's message.
            options: RangeRequest {
                key: Bytes::new(),
                range_end: Bytes::new(),
                ..request
            },
        });
    }

    /// Records how a read ends: its outcome, the time until it was `proven`, and the revision of a response from memory.
    pub(super) fn record_read(&mut self, outcome: Outcome, proven: Option<Duration>, revision: i64) {
        self.proven = proven;
        self.record_labels(outcome.labels());
        if let Some(entry) = &mut self.entry {
            entry.header_revision = revision;
        }
    }

    /// Records outcome and reason.
    pub(super) fn record_labels(&mut self, labels: (&'static str, &'static str)) {
        if let Some(entry) = &mut self.entry {
            entry.outcome = Some(labels);
        }
    }

    /// Records the trace of a call that is traced.
    pub(super) fn record_trace(&mut self, trace_id: TraceId) {
        if let Some(entry) = &mut self.entry {
            entry.trace_id = Some(trace_id);
        }
    }

    /// Records the HTTP status of the response.
    pub(super) fn begin_response(&mut self, status: StatusCode) {
        self.responded = Some(self.arrived.elapsed());
        if let Some(entry) = &mut self.entry
            && (!self.is_grpc || status != StatusCode::OK)
        {
            entry.http_status = Some(status.as_u16());
        }
    }

    /// Records the gRPC code.
    pub(super) fn record_code(&mut self, code: u16) {
        if let Some(entry) = &mut self.entry {
            entry.code = Some(code);
        }
    }

    /// Records data of the response, in pieces.
    pub(super) fn record_data<'a>(&mut self, bytes: usize, pieces: impl Iterator<Item = &'a [u8]>) {
        let Some(entry) = &mut self.entry else {
            return;
        };
        entry.bytes += bytes as u64;
        if self.headers.is_none() && self.events.is_none() {
            return;
        }
        for piece in pieces {
            if let Some(events) = &mut self.events {
                events.scan(piece);
            }
            let Some(headers) = &mut self.headers else {
                continue;
            };
            let mut found = None;
            headers.scan(piece, |scanned| {
                if let Scanned::Header { revision, .. } = scanned {
                    found = Some(revision);
                }
            });
            entry.header_revision = found.unwrap_or(entry.header_revision);
            // The first header is enough, except on a stream without an end.
            if entry.header_revision != 0 && self.events.is_none() {
                self.headers = None;
                return;
            }
        }
    }
}

/// The part of a range's keys that logs and traces contain: the first two parts that all of its keys have in common.
pub(super) fn logged_prefix<'a>(key: &'a [u8], range_end: &[u8]) -> &'a [u8] {
    let prefix = common_prefix(key, range_end, PREFIX_PARTS);
    &prefix[..prefix.len().min(MAX_KEY_BYTES)]
}

impl Drop for AccessCall {
    fn drop(&mut self) {
        let Some(mut entry) = self.entry.take() else {
            return;
        };
        let duration = self.arrived.elapsed();
        let responded = self.responded.unwrap_or(duration);
        entry.phases = Phases {
            prove: self.proven,
            respond: responded.saturating_sub(self.proven.unwrap_or_default()),
            send: duration.saturating_sub(responded),
        };
        if self.is_grpc && entry.code.is_none() && entry.http_status.is_none() {
            entry.code = Some(CANCELLED);
        }
        entry.events = self.events.as_ref().map(EventScanner::events);
        self.log.queue(entry);
    }
}

/// Facts that decide about a call before its message is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallHead {
    /// Method, by the path.
    pub(crate) method: Method,
    /// The request came by HTTP/2.
    pub(crate) is_http2: bool,
    /// The request came by TLS.
    pub(crate) is_tls: bool,
    /// Its header fields, read in one pass.
    pub(crate) fields: HeadFields,
    /// etcd's HTTP server answers it, not its gRPC server. With TLS, etcd serves `/health` and the JSON gateway over HTTP/2,
    /// too. Without TLS, its HTTP/2 is gRPC only.
    pub(crate) is_http: bool,
    /// etcd's gRPC server finds the method: it takes a query for a part of the path.
    pub(crate) is_grpc_call: bool,
}

impl CallHead {
    /// Reads the head of `request`, which came by `transport`.
    pub(crate) fn of<B>(request: &Request<B>, transport: Transport) -> CallHead {
        let is_http2 = request.version() == Version::HTTP_2;
        let fields = HeadFields::of(request.headers());
        CallHead {
            method: Method::from_path(request.uri().path()),
            is_http2,
            is_tls: transport.tls,
            fields,
            is_http: !is_http2 || (transport.tls && !fields.is_grpc()),
            is_grpc_call: request.method() == http::Method::POST && request.uri().query().is_none(),
        }
    }

    /// Method by which the call is counted; `None` if it is not gRPC.
    pub(crate) fn counted(&self, path: &str) -> Option<CallMethod> {
        (self.is_http2 && self.fields.is_grpc()).then(|| CallMethod::of_path(path))
    }

    /// Kind of read under which the call is counted; `None` if it is not a read.
    pub(crate) fn read_kind(&self) -> Option<Kind> {
        match self.method {
            Method::Range => Some(Kind::Unary),
            Method::RangeStream => Some(Kind::Stream),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use etcd_wire::etcdserverpb::{RangeResponse, ResponseHeader};
    use etcd_wire::grpc::frame::framed;
    use rangecache_base::telemetry::access_log::{AccessLogWriter, Destination};
    use rangecache_base::{net::Transport, telemetry::Metrics};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::call::testing::telemetry;

    const TRANSPORT: Transport = Transport {
        tls: false,
        unix: false,
        local: true,
    };

    /// The line of a call to `path` with gRPC, or of HTTP/1, after `record`.
    async fn line(
        has_keys: bool,
        is_grpc: bool,
        path: &str,
        record: impl FnOnce(&mut AccessCall),
    ) -> serde_json::Value {
        static FILES: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = FILES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("rangecache-access-{}-{number}", std::process::id());
        let file = std::env::temp_dir().join(name);
        let destination = Destination::File(file.clone());
        let (writer, log) = AccessLogWriter::open(destination, 1.0, has_keys, &Metrics::default()).unwrap();
        let mut request = Request::post(path);
        if is_grpc {
            request = request
                .version(http::Version::HTTP_2)
                .header("content-type", "application/grpc");
        }
        let request = request.body(()).unwrap();
        let head = CallHead::of(&request, TRANSPORT);
        let client = telemetry()
            .clients
            .connect(&ClientName::of_connection(None, None));
        let mut call = AccessCall::begin(&log, &client, &head, &request);
        record(&mut call);
        drop(call);
        let stop = CancellationToken::new();
        stop.cancel();
        let look = tokio::sync::watch::Sender::new(());
        writer.run(look.subscribe(), stop).await;
        let text = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    const RANGE: &str = "/etcdserverpb.KV/Range";

    fn query() -> RangeQuery {
        RangeQuery {
            key: "/registry/secrets/default/password".into(),
            ..RangeQuery::default()
        }
    }

    #[tokio::test]
    async fn call_that_ends_before_its_status_was_cancelled_by_its_client() {
        let cancelled = line(false, true, RANGE, |_| {}).await;
        assert_eq!(
            (&cancelled["code"], &cancelled["method"]),
            (&1.into(), &RANGE[1..].into())
        );
        let ended = line(false, true, RANGE, |call| call.record_code(0)).await;
        assert_eq!(ended["code"], 0);
        let http1 = line(false, false, "/health", |call| {
            call.begin_response(StatusCode::OK)
        })
        .await;
        assert!(http1["code"].is_null());
        assert_eq!(
            (&http1["http_status"], &http1["method"]),
            (&200.into(), &"/health".into())
        );
    }

    #[tokio::test]
    async fn keys_are_logged_only_if_the_operator_wants_them_and_they_are_short() {
        let without = line(false, true, RANGE, |call| {
            call.record_query(&query());
            assert!(!format!("{:?}", call.entry).contains("password"));
        })
        .await;
        assert!(without["key"].is_null());
        assert_eq!(without["prefix"], "/registry/secrets/");
        let with = line(true, true, RANGE, |call| call.record_query(&query())).await;
        assert_eq!(with["key"], "/registry/secrets/default/password");
        let long = RangeQuery {
            key: vec![b'k'; MAX_KEY_BYTES + 1].into(),
            ..RangeQuery::default()
        };
        let long = line(true, true, RANGE, |call| call.record_query(&long)).await;
        assert!(long["key"].is_null());
    }

    #[tokio::test]
    async fn revision_of_a_forwarded_response_is_that_of_its_header_however_it_is_cut() {
        let message = framed(&RangeResponse {
            header: Some(ResponseHeader {
                cluster_id: 1,
                revision: 42,
                ..ResponseHeader::default()
            }),
            ..RangeResponse::default()
        });
        let logged = line(false, true, RANGE, |call| {
            let (first, rest) = message.split_at(7);
            call.record_data(message.len(), [first, rest].into_iter());
        })
        .await;
        assert_eq!(logged["header_revision"], 42);
        assert_eq!(logged["bytes"], message.len());
    }

    #[tokio::test]
    async fn path_that_a_client_makes_up_is_cut() {
        let path = format!("/{}", "p".repeat(5000));
        let logged = line(false, false, &path, |_| {}).await;
        assert_eq!(logged["method"].as_str().map(str::len), Some(MAX_PATH_CHARACTERS));
    }
}
