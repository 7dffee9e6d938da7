//! Forwards HTTP/1 requests: etcd's health, version and metrics, and its JSON gateway with WebSockets.

use std::sync::Arc;
use std::task::{Context, Poll};

use etcd_wire::grpc::Method;
use etcd_wire::grpc::metadata::{is_bypassing, remove_own_metadata, set_bypass};
use http::{HeaderValue, Request, Response, StatusCode, Uri, Version, header};
use http_body::SizeHint;
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_base::{instance::Instance, net::Url, telemetry::outcome::Failure};
use rangecache_edge::limits::{ByteKind, ClientAccount, Exceeded, HeldBytes};
use rangecache_upstream::{BoxError, ConnectionClass, LimitCovers, MessageLimit, NoEndpoint, Outgoing};
use tokio::time::{Instant, timeout_at};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::http1_pool::{Http1Connection, Http1Pool, NextConnection};
use super::upgraded::{UPGRADED_BYTES, Upgrade};
use super::{body::ForwardedBody, send::Forward};
use crate::call::Ended;
use crate::response::{BodySource, Polled, ResponseBody};

/// Bytes of a request and of a response that are buffered, each.
const BUFFER_BYTES: usize = 64 << 10;

/// Forwards the request over a connection that carries nothing else until the response ends. Without a response the
/// client gets 502.
pub(crate) async fn forward_http1(
    forward: &Forward,
    request: Request<Incoming>,
    method: Method,
    account: &Arc<ClientAccount>,
) -> Response<ResponseBody> {
    forward_http1_body(forward, request.map(Outgoing::incoming), method, account).await
}

/// Forwards a request like [`forward_http1`], with a body of which a part may have been read.
pub(crate) async fn forward_http1_body(
    forward: &Forward,
    request: Request<Outgoing>,
    method: Method,
    account: &Arc<ClientAccount>,
) -> Response<ResponseBody> {
    match send(forward, request, method, account).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(%error, "an HTTP/1 request could not be forwarded; responding with 502");
            let text = format!("rangecache: etcd did not respond: {error}\n");
            let mut response = Response::new(ResponseBody::whole(text.into(), http::HeaderMap::new()));
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            response.extensions_mut().insert(Ended(outcome_of(&*error)));
            response
        }
    }
}

/// Outcome of a request that ended with `error`.
fn outcome_of(error: &(dyn std::error::Error + 'static)) -> Outcome {
    if error.is::<Exceeded>() {
        Outcome::Shed(Reason::BufferBytes)
    } else if error.is::<TooManyRequests>() {
        Outcome::Shed(Reason::TooManyWaiting)
    } else if error.is::<NoEndpoint>() {
        Outcome::Failed(Failure::NoEndpoint)
    } else {
        Outcome::Failed(Failure::ConnectionLost)
    }
}

/// The bound on HTTP/1 requests in flight to etcd is reached.
#[derive(Debug, thiserror::Error)]
#[error("too many HTTP/1 requests are in flight; try again")]
struct TooManyRequests;

async fn send(
    forward: &Forward,
    mut request: Request<Outgoing>,
    method: Method,
    account: &Arc<ClientAccount>,
) -> Result<Response<ResponseBody>, BoxError> {
    let mut held = account.hold(ByteKind::Forwarded);
    held.try_grow(2 * BUFFER_BYTES as u64)?;
    let url = reachable_endpoint(forward).await?;
    let instance = forward.upstream.credentials().instance();
    prepare(&mut request, &url, instance)?;
    let upgrade = request
        .headers()
        .contains_key(header::UPGRADE)
        .then(|| hyper::upgrade::on(&mut request));
    let limit = MessageLimit {
        timeout: forward.request_timeout,
        covers: LimitCovers::Body,
        late: CancellationToken::new(),
    };
    let request = request.map(|body| {
        // A stream's request may stay open.
        if method.is_endless() {
            body
        } else {
            body.limited(limit)
        }
    });
    let (mut response, connection) = exchange(forward, &url, request, account).await?;
    // For the trace.
    response.extensions_mut().insert(url);
    let mut lease = Lease {
        connection,
        pool: Arc::clone(&forward.http1_pool),
        tasks: forward.tasks.clone(),
        held,
    };
    if let Some(client) = upgrade
        && response.status() == StatusCode::SWITCHING_PROTOCOLS
    {
        let etcd = hyper::upgrade::on(&mut response).await?;
        lease.held.shrink_to(UPGRADED_BYTES);
        let (upgrade, source) = Upgrade::new(client, etcd, &forward.cluster_state, lease);
        response.extensions_mut().insert(upgrade);
        return Ok(response.map(|_| ResponseBody::from_source(source)));
    }
    Ok(response.map(|body| {
        let body = forward.forwarded_body(body.into(), method, false, None);
        ResponseBody::from_source(LeasedBody {
            body,
            is_complete: false,
            lease: Some(lease),
        })
    }))
}

/// Addresses `request` of this `instance` to `url`.
fn prepare(request: &mut Request<Outgoing>, url: &Url, instance: &Instance) -> Result<(), BoxError> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let path = path.parse::<Uri>()?;
    if !request.headers().contains_key(header::HOST) {
        // An HTTP/2 request has the host in the pseudo-header `:authority`.
        let host = match request.uri().authority() {
            Some(authority) => HeaderValue::from_str(authority.as_str())?,
            None => url.authority().parse()?,
        };
        request.headers_mut().insert(header::HOST, host);
    }
    *request.uri_mut() = path;
    *request.version_mut() = Version::HTTP_11;
    let headers = request.headers_mut();
    let bypasses = is_bypassing(headers);
    remove_own_metadata(headers);
    set_bypass(headers, bypasses);
    instance.sign(headers);
    Ok(())
}

/// Sends `request` on a kept connection to `url`, or on a new one. One that was closed before anything of the request was
/// sent is replaced.
async fn exchange(
    forward: &Forward,
    url: &Url,
    mut request: Request<Outgoing>,
    account: &ClientAccount,
) -> Result<(Response<Incoming>, Http1Connection), BoxError> {
    let deadline = Instant::now() + forward.connect_timeout;
    loop {
        match timeout_at(deadline, forward.http1_pool.next(url, account)).await? {
            NextConnection::Kept(mut connection) => match connection.sender.try_send_request(request).await {
                Ok(response) => return Ok((response, connection)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(error.into_error().into()),
                },
            },
            NextConnection::Open(place) => {
                // The timeout covers the TLS handshake, too, to which an endpoint may not respond.
                let mut connection = timeout_at(deadline, open(forward, url, account)).await??;
                drop(place);
                let response = connection.sender.send_request(request).await?;
                return Ok((response, connection));
            }
        }
    }
}

/// Opens a connection to `url`.
async fn open(forward: &Forward, url: &Url, account: &ClientAccount) -> Result<Http1Connection, BoxError> {
    let slot = forward
        .http1_connections
        .try_acquire(account)
        .ok_or(TooManyRequests)?;
    let stream = forward.upstream.open_http1(url).await?;
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(BUFFER_BYTES)
        .handshake(TokioIo::new(stream))
        .await?;
    let close = CancellationToken::new();
    let closed = close.clone();
    forward.tasks.spawn(async move {
        if let Some(Err(error)) = closed.run_until_cancelled(connection.with_upgrades()).await {
            tracing::debug!(%error, "an HTTP/1 connection to etcd was closed");
        }
    });
    Ok(Http1Connection {
        url: url.clone(),
        sender,
        since: Instant::now(),
        _slot: slot,
        _close: close.drop_guard(),
    })
}

/// Connection of a response that is being read.
#[derive(Debug)]
struct Lease {
    connection: Http1Connection,
    pool: Arc<Http1Pool>,
    tasks: TaskTracker,
    /// Counts the buffers of the response.
    held: HeldBytes,
}

/// Body of etcd's response. Its connection is kept if the body is read to its end; otherwise it is closed, also when the
/// client disconnects.
#[derive(Debug)]
struct LeasedBody {
    body: ForwardedBody,
    is_complete: bool,
    lease: Option<Lease>,
}

impl BodySource for LeasedBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        let polled = self.body.poll_frame(cx);
        self.is_complete |= matches!(polled, Poll::Ready(None));
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    fn may_be_idle(&self) -> bool {
        self.body.may_be_idle()
    }
}

impl Drop for LeasedBody {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take()
            && (self.is_complete || self.body.is_end_stream())
        {
            lease.pool.give_back(lease.connection, &lease.tasks);
        }
    }
}

/// Returns the URL of an endpoint that is connected; waits for one for at most `--connect-timeout`.
async fn reachable_endpoint(forward: &Forward) -> Result<Url, BoxError> {
    let deadline = Instant::now() + forward.connect_timeout;
    Ok(forward
        .upstream
        .connection(ConnectionClass::Check, deadline)
        .await?
        .url()
        .clone())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn prepared(request: http::request::Builder) -> http::request::Parts {
        let mut request = request.body(Outgoing::whole(Bytes::new())).unwrap();
        let url = "http://etcd.example:2379".parse().unwrap();
        prepare(&mut request, &url, &Instance::of_process()).unwrap();
        request.into_parts().0
    }

    #[test]
    fn request_reaches_etcd_with_its_path_and_the_host_that_the_client_named() {
        let own = prepared(Request::get("/health?serializable=true").header("host", "client.example"));
        assert_eq!(own.uri, "/health?serializable=true");
        assert_eq!(own.headers["host"], "client.example");
        let http2 = Request::get("https://proxy.example:1/version").version(Version::HTTP_2);
        let http2 = prepared(http2);
        assert_eq!(
            (http2.uri.to_string(), http2.version),
            ("/version".to_owned(), Version::HTTP_11)
        );
        assert_eq!(http2.headers["host"], "proxy.example:1");
        let none = prepared(Request::get("/metrics"));
        assert_eq!(none.headers["host"], "etcd.example:2379");
        assert!(
            none.headers.contains_key(rangecache_base::instance::HEADER),
            "a loop is found by it"
        );
    }

    #[test]
    fn request_says_to_another_rangecache_only_that_its_client_reads_around_the_cache() {
        let headers = |name, value| {
            let mut headers = prepared(Request::post("/v3/kv/range").header(name, value)).headers;
            headers.remove(rangecache_base::instance::HEADER);
            headers
        };
        assert_eq!(headers("rangecache-check", "true").len(), 1, "the host");
        assert_eq!(headers("rangecache-bypass", "true")["rangecache-bypass"], "true");
    }

    #[test]
    fn request_without_a_response_has_the_outcome_of_its_cause() {
        let outcome = |error: BoxError| outcome_of(&*error);
        assert_eq!(
            outcome(Exceeded::Bytes.into()),
            Outcome::Shed(Reason::BufferBytes)
        );
        assert_eq!(
            outcome(TooManyRequests.into()),
            Outcome::Shed(Reason::TooManyWaiting)
        );
        assert_eq!(outcome("reset".into()), Outcome::Failed(Failure::ConnectionLost));
    }

    #[tokio::test(start_paused = true)]
    async fn client_of_an_etcd_that_is_not_there_gets_502_with_the_cause() {
        let scene = crate::testing::Scene::new(&[]);
        let (forward, account) = (&scene.proxy.forward, &scene.client().account);
        let request = Request::get("/health")
            .body(Outgoing::whole(Bytes::new()))
            .unwrap();
        let response = forward_http1_body(forward, request, Method::Other, account).await;
        assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
        let ended = response.extensions().get::<Ended>().map(|ended| ended.0);
        assert_eq!(ended, Some(Outcome::Failed(Failure::NoEndpoint)));
        let body = http_body_util::BodyExt::collect(response.into_body())
            .await
            .unwrap();
        let text = body.to_bytes();
        assert!(
            text.starts_with(b"rangecache: etcd did not respond: "),
            "{text:?}"
        );
    }
}
