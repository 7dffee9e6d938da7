//! Sends calls to etcd: chooses connections and decides about retries.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use etcd_wire::grpc::frame::{PREFIX_BYTES, Prefix};
use etcd_wire::grpc::metadata::{grpc_content_type, is_bypassing, is_grpc, remove_own_metadata};
use etcd_wire::grpc::status::GRPC_STATUS;
use etcd_wire::grpc::{Method, Status, written};
use http::{HeaderMap, Request, Response, request::Parts};
use http_body::Frame;
use http_body_util::BodyExt;
use rangecache_edge::limits::{ByteKind, ClientAccount, Gate, HeldBytes, Slot, Slots};
use rangecache_mirror::lineage::{Before, ClusterState};
use rangecache_upstream::{
    Connection, ConnectionClass, InFlight, LimitCovers, MAX_SHORT_BYTES, MessageLimit, Outgoing, SendFailure,
    Upstream, UpstreamBody, WritesTo,
};
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{body::ForwardedBody, error::SendError, http1_pool::Http1Pool, shutdown::StopSignal};
use crate::metrics::ProxyTelemetry;
use crate::response::{CallResult, ResponseBody, status_response};

/// Response to a write up to which it is not refused, however much the connection holds: the write has been executed.
const SHORT_RESPONSE_BYTES: u64 = 1 << 10;
/// Largest frame that etcd sends, in bytes: HTTP/2's default.
const FRAME_BYTES: u64 = 16 << 10;
/// Pause between two attempts to send a call.
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// Forwards calls to etcd.
#[derive(Debug)]
pub(crate) struct Forward {
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) cluster_state: Arc<ClusterState>,
    pub(crate) telemetry: Arc<ProxyTelemetry>,
    /// Members to which writes are sent (`--writes-to`).
    pub(crate) writes_to: WritesTo,
    /// Time in which a call may wait for a connection and be sent again (`--connect-timeout`).
    pub(crate) connect_timeout: Duration,
    /// Time limit for a client's request message (`--request-timeout`).
    pub(crate) request_timeout: Duration,
    /// Longest wait of a read for buffered bytes (`--stream-max-wait`).
    pub(crate) max_wait: Duration,
    /// Slots of small reads, streams and new watches (`--forward-max-small`).
    pub(crate) small: Arc<Slots>,
    /// Slots for HTTP/1 connections to etcd, as many as client connections: file descriptors are divided accordingly.
    pub(crate) http1_connections: Arc<Slots>,
    /// Pool of the HTTP/1 connections to etcd.
    pub(crate) http1_pool: Arc<Http1Pool>,
    /// Owner of the tasks of HTTP/1 connections and WebSockets.
    pub(crate) tasks: TaskTracker,
    /// Cancelled when the process stops, which ends endless calls.
    pub(crate) drain: CancellationToken,
}

/// Body of a request to etcd, by whether it can be sent again.
#[derive(Debug)]
pub(crate) enum RequestBody {
    /// Streamed from the client. Sent again only if the connection reports that nothing of it was sent.
    Once(Outgoing),
    /// Complete message of a read. May be sent again even if etcd may have received it, because reads change nothing.
    Read(Bytes),
}

impl RequestBody {
    /// Whether the whole body is known, and short.
    async fn is_short(&mut self) -> Result<bool, SendError> {
        match self {
            RequestBody::Once(outgoing) => outgoing
                .is_short(MAX_SHORT_BYTES)
                .await
                .map_err(SendError::Request),
            RequestBody::Read(message) => Ok(message.len() <= MAX_SHORT_BYTES),
        }
    }
}

/// Response of etcd whose body has not been read yet.
#[derive(Debug)]
pub(crate) struct UpstreamResponse {
    pub(crate) response: Response<UpstreamBody>,
    /// Counts the call as in flight at its endpoint.
    pub(crate) in_flight: InFlight,
}

/// Attempts to send one call, each on another connection, until etcd responds. A call that may have reached etcd is
/// sent again only if it is a read.
#[derive(Debug)]
pub(super) struct Attempts {
    /// Request of the next attempt; `None` if the call must not be sent again.
    next: Option<(Parts, RequestBody)>,
    /// Whether the client reads around the memory of every rangecache on the way.
    bypasses: bool,
    deadline: Instant,
}

impl Attempts {
    /// Creates the attempts for a call; none starts after `deadline`.
    pub(super) fn new(mut parts: Parts, body: RequestBody, deadline: Instant) -> Attempts {
        let bypasses = is_bypassing(&parts.headers);
        remove_own_metadata(&mut parts.headers);
        Attempts {
            next: Some((parts, body)),
            bypasses,
            deadline,
        }
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Sends the call on `connection`. Returns `None` if the call may be sent on another connection; the pause before
    /// that is over.
    ///
    /// # Errors
    /// [`SendError`] when the call must not be sent again.
    pub(super) async fn send_on(
        &mut self,
        connection: &Arc<Connection>,
    ) -> Result<Option<UpstreamResponse>, SendError> {
        // Always set: `pause_after` returns an error when no attempt is left.
        let Some((mut parts, body)) = self.next.take() else {
            return Ok(None);
        };
        if self.bypasses {
            connection.set_bypass(&mut parts.headers);
        }
        let outgoing = match body {
            RequestBody::Once(outgoing) => outgoing,
            RequestBody::Read(message) => {
                self.next = Some((parts.clone(), RequestBody::Read(message.clone())));
                Outgoing::whole(message)
            }
        };
        let error = match connection.send(Request::from_parts(parts, outgoing)).await {
            Ok((response, in_flight)) => return Ok(Some(UpstreamResponse { response, in_flight })),
            Err(SendFailure::NotSent(request, error)) => {
                tracing::debug!(endpoint = %connection.url(), %error, "a call was not sent; trying another connection");
                self.keep(*request);
                SendError::Lost(error)
            }
            Err(SendFailure::Full(request)) => {
                self.keep(*request);
                return Ok(None);
            }
            Err(SendFailure::Lost(error)) => SendError::of_connection(error),
        };
        self.pause_after(error).await?;
        Ok(None)
    }

    /// Keeps a `request` that was not sent, for the next attempt.
    fn keep(&mut self, request: Request<Outgoing>) {
        let (parts, outgoing) = request.into_parts();
        self.next.get_or_insert((parts, RequestBody::Once(outgoing)));
    }

    /// Pauses before another attempt, if one is allowed after `error`.
    ///
    /// # Errors
    /// [`SendError`] when the call must not be sent again.
    pub(super) async fn pause_after(&mut self, error: SendError) -> Result<(), SendError> {
        if matches!(error, SendError::Reset(_)) || self.next.is_none() || Instant::now() >= self.deadline {
            return Err(error);
        }
        tokio::time::sleep(RETRY_PAUSE).await;
        Ok(())
    }
}

impl Forward {
    /// Sends the call on connections of its method's class, and returns the client's response. If etcd does not
    /// respond, that is status `Unavailable`.
    pub(crate) async fn forward(
        &self,
        parts: Parts,
        body: RequestBody,
        method: Method,
        account: &Arc<ClientAccount>,
    ) -> CallResult {
        let content_type = grpc_content_type(&parts.headers);
        let sent = self.respond(parts, body, method, ConnectionClass::of(method), account, None);
        sent.await.or_else(|error| error.into_result(content_type))
    }

    /// Sends a call whose client is still sending `outgoing`, and refuses it if the message is not complete in time
    /// (`--request-timeout`).
    pub(crate) async fn forward_incoming(
        &self,
        parts: Parts,
        outgoing: Outgoing,
        method: Method,
        account: &Arc<ClientAccount>,
    ) -> CallResult {
        let content_type = grpc_content_type(&parts.headers);
        let late = CancellationToken::new();
        let body = RequestBody::Once(outgoing.limited(MessageLimit {
            timeout: self.request_timeout,
            covers: if method.is_streaming() {
                LimitCovers::BegunMessages
            } else {
                LimitCovers::Messages
            },
            late: late.clone(),
        }));
        let forwarding = self.forward(parts, body, method, account);
        match late.run_until_cancelled(forwarding).await {
            Some(result) if !late.is_cancelled() => result,
            _ => Ok(status_response(&Status::RequestTimeout, content_type)),
        }
    }

    /// Sends the call like [`Forward::forward`], but on connections of `class`, and after waiting for a slot of `gate`,
    /// which it has until etcd's response begins.
    ///
    /// # Errors
    /// [`SendError`] if etcd does not respond.
    pub(crate) async fn respond(
        &self,
        parts: Parts,
        body: RequestBody,
        method: Method,
        class: ConnectionClass,
        account: &Arc<ClientAccount>,
        gate: Option<Gate<'_>>,
    ) -> Result<Response<ResponseBody>, SendError> {
        let mut held = account.hold(ByteKind::Forwarded);
        // As many bytes as etcd may send before its flow control stops it: how long a response is shows only when
        // etcd has sent its beginning. A write is sent anyway, and counted then.
        let window_bytes = u64::from(class.window().stream);
        match method {
            Method::Range => {
                let deadline = Instant::now() + self.max_wait;
                held.grow(window_bytes + FRAME_BYTES, deadline).await?;
            }
            _ if method == Method::Snapshot || method.is_endless() => held.try_grow(window_bytes)?,
            _ => {}
        }
        // After the wait for bytes: a call that waits for other clients to read has no slot.
        let _slot = self.slot(class, gate).await?;
        let before_write = method.may_write_keys().then(|| self.cluster_state.before_check());
        let to_leader = self.writes_to == WritesTo::Leader && method.may_write_keys();
        let upstream_response = self.send_to(parts, body, class, to_leader).await?;
        self.pass_through(upstream_response, method, window_bytes, held, before_write)
            .await
    }

    /// Waits for a slot of `gate`, if there is one. A call that waits for a connection has no slot, so that calls which
    /// wait for one while no endpoint is connected do not wait longer than that takes to show.
    ///
    /// # Errors
    /// [`SendError`] if there is no slot, or no connection.
    pub(crate) async fn slot(
        &self,
        class: ConnectionClass,
        gate: Option<Gate<'_>>,
    ) -> Result<Option<Slot>, SendError> {
        let Some(gate) = gate else {
            return Ok(None);
        };
        loop {
            let deadline = Instant::now() + self.connect_timeout;
            self.upstream.connection(class, deadline).await?;
            let slot = gate.acquire().await?;
            // All connections may have been lost meanwhile.
            if self.upstream.connection(class, Instant::now()).await.is_ok() {
                return Ok(Some(slot));
            }
        }
    }

    /// Sends the call on one connection after the other until etcd responds.
    ///
    /// # Errors
    /// [`SendError`] if no endpoint is connected, the call must not be sent again, or `--connect-timeout` has expired.
    pub(crate) async fn send(
        &self,
        parts: Parts,
        body: RequestBody,
        class: ConnectionClass,
    ) -> Result<UpstreamResponse, SendError> {
        self.send_to(parts, body, class, false).await
    }

    /// [`Forward::send`], to the leader if `to_leader`, and if it is not too busy.
    async fn send_to(
        &self,
        parts: Parts,
        mut body: RequestBody,
        class: ConnectionClass,
        to_leader: bool,
    ) -> Result<UpstreamResponse, SendError> {
        let mut class_of_attempt = class;
        if class == ConnectionClass::Unary && parts.method == http::Method::POST && body.is_short().await? {
            class_of_attempt = ConnectionClass::Short;
        }
        let mut attempts = Attempts::new(parts, body, Instant::now() + self.connect_timeout);
        loop {
            let deadline = attempts.deadline();
            let connection = if to_leader {
                self.upstream
                    .connection_to_leader(class_of_attempt, deadline)
                    .await?
            } else {
                self.upstream.connection(class_of_attempt, deadline).await?
            };
            if let Some(upstream_response) = attempts.send_on(&connection).await? {
                self.cluster_state.note_answered(connection.opened());
                self.avoid_if_unavailable(&connection, upstream_response.response.headers());
                return Ok(upstream_response);
            }
            class_of_attempt = class;
        }
    }

    /// Turns etcd's response into the client's, whose body passes through. `held` counts the bytes that etcd has sent,
    /// or may send before its flow control stops it after `window_bytes`. `before_write` is the
    /// state before a write was sent.
    ///
    /// # Errors
    /// [`SendError::Exceeded`] if the bytes do not fit; other errors if the response breaks off before its first frame.
    async fn pass_through(
        &self,
        upstream_response: UpstreamResponse,
        method: Method,
        window_bytes: u64,
        mut held: HeldBytes,
        before_write: Option<Before>,
    ) -> Result<Response<ResponseBody>, SendError> {
        let UpstreamResponse { response, in_flight } = upstream_response;
        let is_grpc = is_grpc(response.headers());
        let (head, mut body) = response.into_parts();
        let mut first = None;
        // This delays no client: etcd sends the head of a unary response together with the first frame.
        if is_grpc && !method.is_streaming() && !head.headers.contains_key(GRPC_STATUS) {
            first = body.frame().await.transpose().map_err(SendError::of_connection)?;
            // Behind another proxy the status of a response without a message comes in trailers.
            if let Some(trailers) = first.as_ref().and_then(Frame::trailers_ref) {
                self.avoid_if_unavailable(in_flight.connection(), trailers);
            }
            if let (Some(before), Some(frame)) = (&before_write, &first)
                && let Some(written) = frame.data_ref().and_then(|data| written(method, data))
            {
                self.cluster_state.note_write(
                    before,
                    written.cluster_id,
                    written.revision,
                    written.has_changed,
                );
            }
            let bytes = first
                .as_ref()
                .map_or(0, |first| bytes_to_receive(first, window_bytes));
            if method == Method::Range {
                // The first frame has been received, and its bytes may be sent again.
                held.force_grow(bytes.saturating_sub(held.bytes()));
                held.shrink_to(bytes);
            } else if bytes <= SHORT_RESPONSE_BYTES {
                held.force_grow(bytes);
            } else {
                held.try_grow(bytes)?;
            }
        }
        let body = self
            .forwarded_body(body, method, is_grpc, Some(in_flight))
            .with_first(first);
        let body = if method.is_endless() {
            body.with_window(held, window_bytes)
        } else {
            body.with_held(held)
        };
        Ok(Response::from_parts(head, ResponseBody::from_source(body)))
    }

    /// Wraps etcd's `body` as the body of the client's response.
    pub(super) fn forwarded_body(
        &self,
        body: UpstreamBody,
        method: Method,
        is_grpc: bool,
        in_flight: Option<InFlight>,
    ) -> ForwardedBody {
        let stop = StopSignal::new(method, &self.drain);
        ForwardedBody::new(body, method, is_grpc, &self.cluster_state, in_flight, stop)
    }

    /// Prefers other endpoints for two seconds if this one responds with `Unavailable`: its member may be cut off from
    /// the cluster.
    pub(super) fn avoid_if_unavailable(&self, connection: &Connection, headers: &HeaderMap) {
        if headers
            .get(GRPC_STATUS)
            .is_some_and(|status| status.as_bytes() == b"14")
        {
            self.upstream.avoid(connection.url());
        }
    }
}

/// Bytes of a unary response, by its first frame, that may have to be kept until the client reads: the frame, and the
/// rest of the message as far as etcd may send it before its flow control stops it after `window_bytes`.
fn bytes_to_receive(first: &Frame<Bytes>, window_bytes: u64) -> u64 {
    let Some(data) = first.data_ref() else {
        return 0;
    };
    let whole = Prefix::parse(data).map_or(0, |prefix| PREFIX_BYTES as u64 + u64::from(prefix.length_bytes));
    let received = data.len() as u64;
    received + whole.saturating_sub(received).min(window_bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rangecache_edge::limits::{SlotMetrics, SlotPolicy};
    use tokio::net::TcpListener;

    use super::*;

    /// Starts a server that closes each connection on its first KV call; also returns the number of KV calls.
    async fn forward_to_lossy_server() -> (Forward, Arc<AtomicUsize>, tokio_util::sync::DropGuard) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let calls = Arc::new(AtomicUsize::new(0));
        let kv_calls = Arc::clone(&calls);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let calls = Arc::clone(&calls);
                tokio::spawn(async move {
                    let mut connection = h2::server::handshake(stream).await.ok()?;
                    while let Some(Ok((request, _respond))) = connection.accept().await {
                        if request.uri().path().starts_with("/etcdserverpb.KV/") {
                            calls.fetch_add(1, Ordering::SeqCst);
                            return None;
                        }
                    }
                    Some(())
                });
            }
        });
        let stop = CancellationToken::new();
        let url = format!("http://127.0.0.1:{port}").parse().unwrap();
        let forward = Forward {
            upstream: Upstream::start(
                &[url],
                &rangecache_edge::tls::Connector::plaintext(),
                true,
                rangecache_upstream::Credentials::new(None),
                &TaskTracker::new(),
                &stop,
            ),
            cluster_state: Arc::default(),
            telemetry: Arc::default(),
            writes_to: WritesTo::Any,
            connect_timeout: Duration::from_secs(2),
            request_timeout: Duration::from_secs(30),
            max_wait: Duration::from_secs(10),
            small: Slots::new(SlotPolicy::Any, 1, 0, None, SlotMetrics::default()),
            http1_connections: Slots::new(SlotPolicy::Any, 1, 0, None, SlotMetrics::default()),
            http1_pool: Arc::new(Http1Pool::new(1)),
            tasks: TaskTracker::new(),
            drain: CancellationToken::new(),
        };
        (forward, kv_calls, stop.drop_guard())
    }

    async fn send(forward: &Forward, path: &str, body: RequestBody) -> Result<UpstreamResponse, SendError> {
        let (parts, ()) = Request::post(path).body(()).unwrap().into_parts();
        forward.send(parts, body, ConnectionClass::Unary).await
    }

    #[tokio::test]
    async fn call_that_may_have_reached_etcd_is_sent_again_only_if_it_is_a_read() {
        let message = Bytes::from_static(b"\0\0\0\0\0");
        let (forward, calls, _stop) = forward_to_lossy_server().await;
        let write = RequestBody::Once(Outgoing::whole(message.clone()));
        let lost = send(&forward, "/etcdserverpb.KV/Put", write).await;
        assert!(
            matches!(lost, Err(SendError::Lost(_))),
            "the client gets the error"
        );
        assert_eq!(calls.load(Ordering::SeqCst), 1);

        let lost = send(&forward, "/etcdserverpb.KV/Range", RequestBody::Read(message)).await;
        assert!(lost.is_err(), "the server never responds");
        assert!(
            calls.load(Ordering::SeqCst) > 2,
            "reads are sent again until the deadline"
        );
    }
}
