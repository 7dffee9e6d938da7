//! Fuzz target of the lean client: any bytes of a server, and what hyper makes of them.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "compiled for tests and fuzz targets only"
)]

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rangecache_base::net::from_unix;
use tokio::{io::AsyncWriteExt as _, net::UnixStream};
use tokio_util::either::Either;

use super::client::Lean;

type Answer = (StatusCode, HeaderMap, Bytes, HeaderMap);

/// The answer of a server to one call, in pieces: a response that both clients take is the same.
pub fn lean(data: &[u8]) {
    let [piece, sent @ ..] = data else { return };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let of_lean = runtime.block_on(async { by_lean(answering(sent, *piece)).await });
    let of_hyper = runtime.block_on(async { by_hyper(answering(sent, *piece)).await });
    if let (Some(ours), Some(theirs)) = (of_lean, of_hyper) {
        assert_eq!(ours, theirs);
    }
}

/// A client's side of a connection whose server sends `sent`, and ends.
fn answering(sent: &[u8], piece: u8) -> UnixStream {
    let (client, mut server) = UnixStream::pair().unwrap();
    let (sent, piece) = (sent.to_vec(), usize::from(piece) + 1);
    tokio::spawn(async move {
        for piece in sent.chunks(piece) {
            tokio::task::yield_now().await;
            if server.write_all(piece).await.is_err() {
                return;
            }
        }
        let _ = server.shutdown().await;
        // What the client still sends has somewhere to go.
        let _ = tokio::io::copy(&mut server, &mut tokio::io::sink()).await;
    });
    client
}

async fn by_lean(client: UnixStream) -> Option<Answer> {
    let (lean, driver) = Lean::new(Either::Left(from_unix(client)), Duration::from_secs(5));
    tokio::spawn(driver);
    let uri = Uri::from_static("http://etcd/path");
    let response = lean.call(&uri, &HeaderMap::new(), b"").await.ok()?;
    let (parts, (body, trailers)) = response.into_parts();
    Some((parts.status, parts.headers, body, trailers.unwrap_or_default()))
}

async fn by_hyper(client: UnixStream) -> Option<Answer> {
    let builder = http2::Builder::new(TokioExecutor::new());
    let (mut sender, driver) = builder.handshake(TokioIo::new(client)).await.ok()?;
    tokio::spawn(driver);
    let request = Request::post("http://etcd/path").body(Full::new(Bytes::new()));
    let (parts, body) = sender.send_request(request.unwrap()).await.ok()?.into_parts();
    let collected = body.collect().await.ok()?;
    let trailers = collected.trailers().cloned().unwrap_or_default();
    Some((parts.status, parts.headers, collected.to_bytes(), trailers))
}
