//! **forward**: opaque bytes to etcd and back.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::body::Incoming;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::{self, ResponseBody};
use super::drain::Stop;
use super::large::Permit;
use super::series::PageWatch;
use crate::grpc::metadata::{self, grpc_content_type};
use crate::grpc::status::GRPC_STATUS;
use crate::grpc::{Method, Status};
use crate::mirror::cluster_state::ClusterState;
use crate::upstream::{
    BoxError, Connection, ConnectionClass, InFlight, NoEndpoint, Outgoing, SendFailure, Upstream,
};

/// Pause before another connection is tried for a call that did not leave on the first.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// Passes calls on.
#[derive(Debug)]
pub(super) struct Forward {
    pub(super) upstream: Arc<Upstream>,
    pub(super) cluster_state: Arc<ClusterState>,
    /// How long a call waits for a connection.
    pub(super) connect_timeout: Duration,
    /// A stop has begun.
    pub(super) drain: CancellationToken,
}

/// A request's body on its way to etcd.
#[derive(Debug)]
pub(super) enum Body {
    /// It can be sent once only, and only while nothing of it has left.
    Once(Outgoing),
    /// All of a read's message: it may be sent again, for reads change nothing.
    Read(Bytes),
}

/// What etcd answered, before its body is wrapped.
pub(super) struct Answered {
    pub(super) response: Response<Incoming>,
    pub(super) in_flight: InFlight,
}

/// What goes along with an answer that passes through.
#[derive(Debug, Default)]
pub(super) struct Along {
    /// The turn of a large read, which ends with the answer.
    pub(super) _permit: Option<Permit>,
    /// Who looks at a page.
    pub(super) watch: Option<Box<PageWatch>>,
}

/// Why etcd did not answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotAnswered {
    #[error("rangecache: {0}")]
    NoEndpoint(#[from] NoEndpoint),
    #[error("rangecache: the connection to etcd was lost: {0}")]
    Lost(hyper::Error),
    /// etcd itself reset the stream: that is its answer.
    #[error("etcd reset the stream: {0}")]
    Reset(hyper::Error),
}

/// A response, or the error with which etcd reset the stream: hyper resets the caller's with the same reason.
pub(super) type Outcome = Result<Response<ResponseBody>, BoxError>;

impl NotAnswered {
    /// What the caller gets.
    pub(super) fn outcome(self, content_type: HeaderValue) -> Outcome {
        match self {
            NotAnswered::Reset(error) => Err(error.into()),
            other => Ok(body::status(&other.status(), content_type)),
        }
    }

    pub(super) fn status(&self) -> Status {
        match self {
            NotAnswered::NoEndpoint(error) => Status::NoEndpoint(error.to_string()),
            NotAnswered::Lost(error) => Status::ConnectionLost(error.to_string()),
            NotAnswered::Reset(error) => Status::StreamReset(error.to_string()),
        }
    }
}

impl Forward {
    /// Sends the request and hands the answer back as it comes. No answer shows as `Unavailable`.
    pub(super) async fn pass(&self, parts: Parts, body: Body, method: Method) -> Outcome {
        let class = connection_class(method);
        self.pass_with(parts, body, method, class, Along::default()).await
    }

    /// As [`Forward::pass`], with something that goes along with the answer.
    pub(super) async fn pass_with(
        &self,
        parts: Parts,
        body: Body,
        method: Method,
        class: ConnectionClass,
        along: Along,
    ) -> Outcome {
        let content_type = grpc_content_type(&parts.headers);
        match self.send(parts, body, class).await {
            Ok(answered) => Ok(self.wrap(answered, method, along)),
            Err(not) => not.outcome(content_type),
        }
    }

    /// Wraps an answer that passes through.
    pub(super) fn wrap(&self, answered: Answered, method: Method, along: Along) -> Response<ResponseBody> {
        let Answered { response, in_flight } = answered;
        let is_grpc = metadata::is_grpc(response.headers());
        response.map(|body| {
            let stop = Stop::of(method, &self.drain);
            ResponseBody::forwarded(
                body,
                method,
                &self.cluster_state,
                Some(in_flight),
                along,
                stop,
                is_grpc,
            )
        })
    }

    /// Sends the request on one connection after the other until etcd answers. A request that may have reached etcd is
    /// sent again only if it is a read.
    pub(super) async fn send(
        &self,
        mut parts: Parts,
        mut body: Body,
        class: ConnectionClass,
    ) -> Result<Answered, NotAnswered> {
        // Said to rangecache, not to etcd.
        parts.headers.remove(metadata::BYPASS.0);
        let deadline = Instant::now() + self.connect_timeout;
        loop {
            let connection = self.upstream.connection(class, deadline).await?;
            let (again, outgoing) = match body {
                Body::Once(outgoing) => (None, outgoing),
                Body::Read(message) => (Some((parts.clone(), message.clone())), Outgoing::whole(message)),
            };
            match connection.send(Request::from_parts(parts, outgoing)).await {
                Ok((response, in_flight)) => {
                    self.judge(&connection, response.headers());
                    return Ok(Answered { response, in_flight });
                }
                Err(SendFailure::NotSent(request, error)) => {
                    tracing::debug!(endpoint = %connection.url(), %error, "a call did not leave; trying another connection");
                    let (its_parts, outgoing) = request.into_parts();
                    parts = its_parts;
                    body = match again {
                        Some((_, message)) => Body::Read(message),
                        None => Body::Once(outgoing),
                    };
                    if Instant::now() >= deadline {
                        return Err(NotAnswered::Lost(error));
                    }
                }
                Err(SendFailure::Lost(error)) if is_reset(&error) => return Err(NotAnswered::Reset(error)),
                Err(SendFailure::Lost(error)) => match again {
                    Some((its_parts, message)) if Instant::now() < deadline => {
                        parts = its_parts;
                        body = Body::Read(message);
                    }
                    _ => return Err(NotAnswered::Lost(error)),
                },
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// A member that answers "unavailable" may be cut off from the others: the next calls go elsewhere for a moment.
    pub(super) fn judge(&self, connection: &Connection, headers: &HeaderMap) {
        if headers
            .get(GRPC_STATUS)
            .is_some_and(|status| status.as_bytes() == b"14")
        {
            self.upstream.avoid(connection.url());
        }
    }
}

/// Whether etcd itself reset the stream, which is its answer, and no lost connection.
pub(super) fn is_reset(error: &hyper::Error) -> bool {
    std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<h2::Error>())
        .is_some_and(|h2| h2.is_reset() && h2.is_remote())
}

/// The class of connections that calls of `method` use.
pub(super) fn connection_class(method: Method) -> ConnectionClass {
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
    use tokio_util::task::TaskTracker;

    use super::*;

    /// An etcd that takes calls and then is lost; also how many calls to KV it has seen.
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
            drain: CancellationToken::new(),
        };
        (forward, seen, stop.drop_guard())
    }

    async fn send(forward: &Forward, path: &str, body: Body) -> Result<Answered, NotAnswered> {
        let (parts, ()) = Request::post(path).body(()).unwrap().into_parts();
        forward.send(parts, body, ConnectionClass::Unary).await
    }

    #[tokio::test]
    async fn what_may_have_reached_etcd_is_sent_again_only_if_it_is_a_read() {
        let message = Bytes::from_static(b"\0\0\0\0\0");
        let (forward, calls, _stop) = lossy().await;
        let write = Body::Once(Outgoing::whole(message.clone()));
        let lost = send(&forward, "/etcdserverpb.KV/Put", write).await;
        assert!(matches!(lost, Err(NotAnswered::Lost(_))), "the caller is told");
        assert_eq!(calls.load(Ordering::SeqCst), 1);

        let lost = send(&forward, "/etcdserverpb.KV/Range", Body::Read(message)).await;
        assert!(lost.is_err(), "it never answers");
        assert!(calls.load(Ordering::SeqCst) > 2, "until the deadline");
    }
}
