//! HTTP/1, forwarded: etcd's health, version and metrics, its JSON gateway, and the gateway's WebSockets.

use http::{HeaderValue, Request, Response, StatusCode, Uri, Version, header};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Proxy;
use super::body::ResponseBody;
use super::drain::Stop;
use super::forward::Along;
use crate::grpc::Method;
use crate::net::Url;
use crate::tls::Protocol;
use crate::upstream::{BoxError, ConnectionClass, Outgoing};

/// Passes the request on over a connection of its own: these are few, and some last for ever.
pub(super) async fn pass(
    proxy: &Proxy,
    request: Request<Incoming>,
    method: Method,
) -> Response<ResponseBody> {
    match send(proxy, request, method).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(%error, "an HTTP/1 request was not answered");
            let text = format!("rangecache: etcd did not answer: {error}\n");
            let mut response = Response::new(ResponseBody::whole(text.into(), http::HeaderMap::new()));
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            response
        }
    }
}

async fn send(
    proxy: &Proxy,
    mut request: Request<Incoming>,
    method: Method,
) -> Result<Response<ResponseBody>, BoxError> {
    let url = reachable(proxy).await?;
    let connector = proxy.forward.upstream.connector();
    // The handshake included, which etcd may never answer.
    let connecting = connector.connect(&url, Protocol::Http1);
    let stream = tokio::time::timeout(proxy.forward.connect_timeout, connecting).await??;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the answer's body: hyper alone would not notice a reader that has gone until etcd sends something.
    let alive = CancellationToken::new();
    let gone = alive.clone();
    proxy.tasks.spawn(async move {
        if let Some(Err(error)) = gone.run_until_cancelled(connection.with_upgrades()).await {
            tracing::debug!(%error, "an HTTP/1 connection to etcd ended");
        }
    });
    let mut alive = Some(alive.drop_guard());
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let path = path.parse::<Uri>()?;
    if !request.headers().contains_key(header::HOST) {
        // HTTP/2 says it elsewhere.
        let host = match request.uri().authority() {
            Some(authority) => HeaderValue::from_str(authority.as_str())?,
            None => url.authority().parse()?,
        };
        request.headers_mut().insert(header::HOST, host);
    }
    *request.uri_mut() = path;
    *request.version_mut() = Version::HTTP_11;
    let upgrade = request
        .headers()
        .contains_key(header::UPGRADE)
        .then(|| hyper::upgrade::on(&mut request));
    let mut response = sender.send_request(request.map(Outgoing::incoming)).await?;
    if let Some(client) = upgrade
        && response.status() == StatusCode::SWITCHING_PROTOCOLS
    {
        let etcd = hyper::upgrade::on(&mut response);
        let alive = alive.take();
        let pumping = async move {
            let _alive = alive;
            if let (Ok(client), Ok(etcd)) = (client.await, etcd.await) {
                // Either side may end it at any time: that is no error.
                let _ =
                    tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(etcd)).await;
            }
        };
        // A WebSocket never ends by itself.
        let stop = proxy.drain.clone();
        proxy
            .tasks
            .spawn(async move { stop.run_until_cancelled(pumping).await });
    }
    let cluster_state = &proxy.mirrors.cluster_state;
    let stop = Stop::of(method, &proxy.drain);
    Ok(response.map(|body| {
        ResponseBody::forwarded(body, method, cluster_state, None, Along::default(), stop, false)
            .keeping(alive)
    }))
}

/// An endpoint that is known to be up.
async fn reachable(proxy: &Proxy) -> Result<Url, BoxError> {
    let deadline = Instant::now() + proxy.forward.connect_timeout;
    Ok(proxy
        .forward
        .upstream
        .connection(ConnectionClass::Check, deadline)
        .await?
        .url()
        .clone())
}
