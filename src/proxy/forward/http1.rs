//! Forwards HTTP/1: etcd's health, version and metrics, its JSON gateway, and the gateway's WebSockets.

use http::{HeaderValue, Request, Response, StatusCode, Uri, Version, header};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::send::Forward;
use crate::grpc::Method;
use crate::net::Url;
use crate::proxy::response::ResponseBody;
use crate::upstream::{BoxError, ConnectionClass, Outgoing};

/// Forwards the request over a connection of its own: such requests are few, and some last for ever.
pub(crate) async fn forward_http1(
    forward: &Forward,
    request: Request<Incoming>,
    method: Method,
) -> Response<ResponseBody> {
    match send(forward, request, method).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(%error, "an HTTP/1 request failed");
            let text = format!("rangecache: etcd did not respond: {error}\n");
            let mut response = Response::new(ResponseBody::whole(text.into(), http::HeaderMap::new()));
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            response
        }
    }
}

async fn send(
    forward: &Forward,
    mut request: Request<Incoming>,
    method: Method,
) -> Result<Response<ResponseBody>, BoxError> {
    let url = reachable_endpoint(forward).await?;
    // Includes the handshake, to which etcd may never respond.
    let connecting = forward.upstream.open_http1(&url);
    let stream = tokio::time::timeout(forward.connect_timeout, connecting).await??;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Closed with the response's body: hyper alone would not notice a client that has left until etcd sends something.
    let alive = CancellationToken::new();
    let closed = alive.clone();
    forward.tasks.spawn(async move {
        if let Some(Err(error)) = closed.run_until_cancelled(connection.with_upgrades()).await {
            tracing::debug!(%error, "an HTTP/1 connection to etcd was closed");
        }
    });
    let mut alive = Some(alive.drop_guard());
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let path = path.parse::<Uri>()?;
    if !request.headers().contains_key(header::HOST) {
        // HTTP/2 has it in a pseudo header.
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
        let copying = async move {
            let _alive = alive;
            if let (Ok(client), Ok(etcd)) = (client.await, etcd.await) {
                // Either side may close it at any time: that is no error.
                let _ =
                    tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(etcd)).await;
            }
        };
        // A WebSocket lasts until one side closes it.
        let stop = forward.drain.clone();
        forward
            .tasks
            .spawn(async move { stop.run_until_cancelled(copying).await });
    }
    Ok(response.map(|body| {
        let body = ResponseBody::from_source(forward.forwarded_body(body, method, false, None));
        match alive {
            Some(alive) => body.holding(alive),
            None => body,
        }
    }))
}

/// The URL of an endpoint with a live connection.
async fn reachable_endpoint(forward: &Forward) -> Result<Url, BoxError> {
    let deadline = Instant::now() + forward.connect_timeout;
    Ok(forward
        .upstream
        .connection(ConnectionClass::Check, deadline)
        .await?
        .url()
        .clone())
}
