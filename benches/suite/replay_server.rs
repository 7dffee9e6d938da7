//! The floor of the measurements: an HTTP/2 server that replays responses. It sends the first request of a kind to
//! etcd and keeps the response; later ones cost one look-up and one write. Its figures are the cost of client, HTTP/2
//! and loopback: no server can be faster.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::{Arc, RwLock};

use anyhow::Result;
use bytes::{Bytes, BytesMut};
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request, Response};
use tokio::net::{TcpListener, TcpStream};

use crate::client::{CallError, Connection, Method, Windows};

/// Request body → complete response, gRPC prefix included.
type Recordings = RwLock<HashMap<Bytes, Bytes>>;

struct ReplayServer {
    recordings: Recordings,
    upstream: Connection,
}

/// Serves until standard input is closed.
pub(crate) async fn run(upstream: SocketAddr) -> Result<()> {
    let replay_server = Arc::new(ReplayServer {
        recordings: Recordings::default(),
        upstream: Connection::open(upstream, Windows::LARGE).await?,
    });
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    writeln!(std::io::stderr(), "listening {}", listener.local_addr()?)?;
    let parent_gone = tokio::task::spawn_blocking(|| {
        let mut nothing = Vec::new();
        std::io::stdin().read_to_end(&mut nothing)
    });
    let serve = async {
        loop {
            let (stream, _) = listener.accept().await?;
            tokio::spawn(connection(replay_server.clone(), stream));
        }
    };
    tokio::select! {
        outcome = serve => outcome,
        _ = parent_gone => Ok(()),
    }
}

async fn connection(replay_server: Arc<ReplayServer>, stream: TcpStream) {
    // Errors are counted by the client.
    let _ = stream.set_nodelay(true);
    let handshake = h2::server::Builder::new()
        .initial_window_size(1 << 20)
        .initial_connection_window_size(64 << 20)
        .max_concurrent_streams(100_000)
        .handshake::<_, Bytes>(stream);
    let Ok(mut connection) = handshake.await else {
        return;
    };
    while let Some(Ok((request, respond))) = connection.accept().await {
        let replay_server = replay_server.clone();
        tokio::spawn(async move {
            let _ = answer(&replay_server, request, respond).await;
        });
    }
}

async fn answer(
    replay_server: &ReplayServer,
    request: Request<h2::RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> Result<()> {
    let path = request.uri().path().to_owned();
    let mut body = request.into_body();
    let mut received = BytesMut::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        body.flow_control().release_capacity(chunk.len())?;
        received.extend_from_slice(&chunk);
    }
    let received = received.freeze();
    let recorded = replay_server
        .recordings
        .read()
        .ok()
        .and_then(|recordings| recordings.get(&received).cloned());
    let recorded = match recorded {
        Some(recorded) => Ok(recorded),
        None => record(replay_server, &path, received).await,
    };
    let mut head = Response::new(());
    head.headers_mut()
        .insert("content-type", HeaderValue::from_static("application/grpc"));
    let mut stream = respond.send_response(head, false)?;
    let mut trailers = HeaderMap::new();
    match recorded {
        Ok(recorded) => {
            stream.send_data(recorded, false)?;
            trailers.insert("grpc-status", HeaderValue::from_static("0"));
        }
        Err(error) => {
            trailers.insert("grpc-status", HeaderValue::from_static("2"));
            trailers.insert("grpc-message", HeaderValue::from_str(&error.to_string())?);
        }
    }
    stream.send_trailers(trailers)?;
    Ok(())
}

async fn record(replay_server: &ReplayServer, path: &str, request: Bytes) -> Result<Bytes, CallError> {
    let method = if path == Method::Put.path() {
        Method::Put
    } else {
        Method::Range
    };
    let answer = replay_server.upstream.fetch(method, request.clone()).await?;
    if let Ok(mut recordings) = replay_server.recordings.write() {
        recordings.insert(request, answer.clone());
    }
    Ok(answer)
}
