//! Sends calls to etcd: which connection, and when a call is sent again.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::body::ForwardedBody;
use super::error::SendError;
use super::shutdown::StopSignal;
use crate::grpc::Method;
use crate::grpc::metadata::{BYPASS, grpc_content_type, is_grpc};
use crate::grpc::status::GRPC_STATUS;
use crate::mirror::cluster_state::ClusterState;
use crate::proxy::response::{CallResult, ResponseBody};
use crate::upstream::{Connection, ConnectionClass, InFlight, Outgoing, SendFailure, Upstream};

/// Pause before a call that failed on one connection is sent on another.
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// Forwards calls to etcd.
#[derive(Debug)]
pub(crate) struct Forward {
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) cluster_state: Arc<ClusterState>,
    /// Longest wait of a call for a connection (`--connect-timeout`).
    pub(crate) connect_timeout: Duration,
    /// Joins the tasks of HTTP/1 connections.
    pub(crate) tasks: TaskTracker,
    /// The process stops: endless calls are ended.
    pub(crate) drain: CancellationToken,
}

/// A request's body on its way to etcd.
#[derive(Debug)]
pub(crate) enum RequestBody {
    /// Can be sent only once, and again only while nothing of it has left.
    Once(Outgoing),
    /// The complete message of a read: may be sent again, for reads change nothing.
    Read(Bytes),
}

/// etcd's response, before its body is wrapped.
#[derive(Debug)]
pub(crate) struct UpstreamResponse {
    pub(crate) response: Response<Incoming>,
    /// Counts the call as in flight at its endpoint.
    pub(crate) in_flight: InFlight,
}

/// One call that is sent on connection after connection until etcd responds.
///
/// A call that may have reached etcd is sent again only if it is a read.
#[derive(Debug)]
pub(super) struct Attempts {
    /// What to send next; `None` after the call was sent and cannot be sent again.
    next: Option<(Parts, RequestBody)>,
    deadline: Instant,
}

impl Attempts {
    /// Attempts until `deadline`.
    pub(super) fn new(mut parts: Parts, body: RequestBody, deadline: Instant) -> Attempts {
        // For rangecache, not for etcd.
        parts.headers.remove(BYPASS.0);
        Attempts {
            next: Some((parts, body)),
            deadline,
        }
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Sends the call on `connection`. `None`: it may be tried on another connection, after a pause that this made.
    ///
    /// # Errors
    /// [`SendError`] when the call must not be sent again.
    pub(super) async fn send_on(
        &mut self,
        connection: &Arc<Connection>,
    ) -> Result<Option<UpstreamResponse>, SendError> {
        let Some((parts, body)) = self.next.take() else {
            return Ok(None);
        };
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
                let (parts, outgoing) = request.into_parts();
                self.next.get_or_insert((parts, RequestBody::Once(outgoing)));
                SendError::Lost(error)
            }
            Err(SendFailure::Lost(error)) => SendError::from_hyper(error),
        };
        self.failed(error).await?;
        Ok(None)
    }

    /// Decides about another attempt after `error`, and pauses before it.
    ///
    /// # Errors
    /// [`SendError`] when the call must not be sent again.
    pub(super) async fn failed(&mut self, error: SendError) -> Result<(), SendError> {
        if matches!(error, SendError::Reset(_)) || self.next.is_none() || Instant::now() >= self.deadline {
            return Err(error);
        }
        tokio::time::sleep(RETRY_PAUSE).await;
        Ok(())
    }
}

impl Forward {
    /// Sends the call on connections of its method's class, and passes the response through. No response shows as
    /// `Unavailable`.
    pub(crate) async fn forward(&self, parts: Parts, body: RequestBody, method: Method) -> CallResult {
        self.forward_on(parts, body, method, connection_class(method))
            .await
    }

    /// As [`Forward::forward`], on connections of `class`.
    pub(crate) async fn forward_on(
        &self,
        parts: Parts,
        body: RequestBody,
        method: Method,
        class: ConnectionClass,
    ) -> CallResult {
        let content_type = grpc_content_type(&parts.headers);
        match self.send(parts, body, class).await {
            Ok(answered) => Ok(self.pass_through(answered, method)),
            Err(error) => error.into_result(content_type),
        }
    }

    /// Sends the call on one connection after the other until etcd responds.
    ///
    /// # Errors
    /// [`SendError`].
    pub(crate) async fn send(
        &self,
        parts: Parts,
        body: RequestBody,
        class: ConnectionClass,
    ) -> Result<UpstreamResponse, SendError> {
        let mut attempts = Attempts::new(parts, body, Instant::now() + self.connect_timeout);
        loop {
            let connection = self.upstream.connection(class, attempts.deadline()).await?;
            if let Some(answered) = attempts.send_on(&connection).await? {
                self.avoid_if_unavailable(&connection, answered.response.headers());
                return Ok(answered);
            }
        }
    }

    /// The client's response, whose body passes through.
    fn pass_through(&self, answered: UpstreamResponse, method: Method) -> Response<ResponseBody> {
        let UpstreamResponse { response, in_flight } = answered;
        let is_grpc = is_grpc(response.headers());
        response.map(|body| {
            ResponseBody::from_source(self.forwarded_body(body, method, is_grpc, Some(in_flight)))
        })
    }

    /// `body` as the body of a client's response.
    pub(super) fn forwarded_body(
        &self,
        body: Incoming,
        method: Method,
        is_grpc: bool,
        in_flight: Option<InFlight>,
    ) -> ForwardedBody {
        let stop = StopSignal::new(method, &self.drain);
        ForwardedBody::new(body, method, is_grpc, &self.cluster_state, in_flight, stop)
    }

    /// Sends the next calls elsewhere for a moment if the member responds with `Unavailable`: it may be cut off from the others.
    pub(super) fn avoid_if_unavailable(&self, connection: &Connection, headers: &HeaderMap) {
        if headers
            .get(GRPC_STATUS)
            .is_some_and(|status| status.as_bytes() == b"14")
        {
            self.upstream.avoid(connection.url());
        }
    }
}

/// The class of connections that calls of `method` use.
fn connection_class(method: Method) -> ConnectionClass {
    if method.is_streaming() {
        ConnectionClass::Stream
    } else {
        ConnectionClass::Unary
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::net::TcpListener;

    use super::*;

    /// An etcd that closes the connection on the first KV call; also returns the number of KV calls.
    async fn lossy() -> (Forward, Arc<AtomicUsize>, tokio_util::sync::DropGuard) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let calls = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&calls);
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
                &crate::tls::Connector::plaintext(),
                true,
                crate::upstream::Credentials::new(None),
                &TaskTracker::new(),
                &stop,
            ),
            cluster_state: Arc::default(),
            connect_timeout: Duration::from_secs(2),
            tasks: TaskTracker::new(),
            drain: CancellationToken::new(),
        };
        (forward, seen, stop.drop_guard())
    }

    async fn send(forward: &Forward, path: &str, body: RequestBody) -> Result<UpstreamResponse, SendError> {
        let (parts, ()) = Request::post(path).body(()).unwrap().into_parts();
        forward.send(parts, body, ConnectionClass::Unary).await
    }

    #[tokio::test]
    async fn call_that_may_have_reached_etcd_is_sent_again_only_if_it_is_a_read() {
        let message = Bytes::from_static(b"\0\0\0\0\0");
        let (forward, calls, _stop) = lossy().await;
        let write = RequestBody::Once(Outgoing::whole(message.clone()));
        let lost = send(&forward, "/etcdserverpb.KV/Put", write).await;
        assert!(
            matches!(lost, Err(SendError::Lost(_))),
            "the client gets the error"
        );
        assert_eq!(calls.load(Ordering::SeqCst), 1);

        let lost = send(&forward, "/etcdserverpb.KV/Range", RequestBody::Read(message)).await;
        assert!(lost.is_err(), "it never responds");
        assert!(calls.load(Ordering::SeqCst) > 2, "until the deadline");
    }
}
