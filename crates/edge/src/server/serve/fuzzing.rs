//! HTTP/1 requests on a connection, as its handler sees them.

#![allow(clippy::unwrap_used, reason = "compiled for tests and fuzz targets only")]

use std::convert::Infallible;

use arbitrary::{Arbitrary, Unstructured};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use parking_lot::Mutex;
use rangecache_base::telemetry::metrics::Gauge;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::{net::UnixStream, runtime::Runtime};

use super::{super::connections::ConnectionLimits, *};

#[derive(Arbitrary, Debug)]
struct Sent {
    requests: Vec<Asked>,
    /// Bytes behind the last request.
    garbage: Option<Vec<u8>>,
    piece: u8,
}

#[derive(Arbitrary, Debug)]
struct Asked {
    path: Vec<u8>,
    header: Vec<u8>,
    body: Option<Vec<u8>>,
    is_chunked: bool,
}

/// Request as the handler sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    method: http::Method,
    path: String,
    header: Vec<u8>,
    body: Vec<u8>,
}

impl Asked {
    fn seen(&self) -> Seen {
        let letters = self.path.iter().map(|byte| char::from(b'a' + byte % 26));
        Seen {
            method: if self.body.is_some() {
                http::Method::POST
            } else {
                http::Method::GET
            },
            path: std::iter::once('/').chain(letters).collect(),
            header: self.header.iter().map(|byte| 0x21 + byte % 0x5e).collect(),
            body: self.body.clone().unwrap_or_default(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let Seen {
            method,
            path,
            header,
            body,
        } = self.seen();
        let mut bytes = format!("{method} {path} HTTP/1.1\r\nhost: a\r\nx-fuzz: ").into_bytes();
        bytes.extend(header);
        if self.body.is_some() && self.is_chunked {
            bytes.extend(b"\r\ntransfer-encoding: chunked\r\n\r\n");
            for chunk in body.chunks(7) {
                bytes.extend(format!("{:x}\r\n", chunk.len()).bytes());
                bytes.extend(chunk);
                bytes.extend(b"\r\n");
            }
            bytes.extend(b"0\r\n\r\n");
        } else if self.body.is_some() {
            bytes.extend(format!("\r\ncontent-length: {}\r\n\r\n", body.len()).bytes());
            bytes.extend(body);
        } else {
            bytes.extend(b"\r\n\r\n");
        }
        bytes
    }
}

/// The handler sees each request as it was sent, in order, and the client gets one response for each; what follows the
/// requests is another request, or is refused.
pub(in crate::server) fn check(runtime: &Runtime, data: &[u8]) {
    let Ok(mut sent) = Sent::arbitrary_take_rest(Unstructured::new(data)) else {
        return;
    };
    sent.requests.truncate(6);
    let mut bytes: Vec<u8> = sent.requests.iter().flat_map(Asked::bytes).collect();
    let requests = sent.requests.len();
    // A request after which the server closes the connection.
    let last = b"GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    match &sent.garbage {
        Some(garbage) => bytes.extend(garbage),
        None => bytes.extend(last),
    }
    let piece = usize::from(sent.piece).max(1);
    let (seen, responses) = runtime.block_on(serve(&bytes, piece, requests, sent.garbage.is_none()));
    let expected: Vec<Seen> = sent.requests.iter().map(Asked::seen).collect();
    assert_eq!(seen[..requests], expected);
    let statuses = statuses(&responses);
    if sent.garbage.is_none() {
        assert_eq!(
            (seen.len(), seen[requests].path.as_str()),
            (requests + 1, "/last")
        );
        assert_eq!(statuses, vec![200; requests + 1]);
    } else {
        let answered = statuses.iter().filter(|status| **status == 200).count();
        assert!(
            answered >= requests && statuses.len() <= seen.len() + 1,
            "{statuses:?}"
        );
    }
}

/// Sends the bytes; returns what the handler has seen, and the responses to at least the `requests` that are sound.
async fn serve(bytes: &[u8], piece: usize, requests: usize, is_closed: bool) -> (Vec<Seen>, Vec<u8>) {
    let limits = ConnectionLimits {
        all: 1,
        per_address: 1,
        on_loopback: false,
        replace_oldest: false,
    };
    let config = ServeConfig {
        name: "fuzzed",
        connections: Connections::new(limits, Gauge::default()),
        max_concurrent_streams: 16,
        max_age: None,
        metrics: Arc::default(),
        tasks: TaskTracker::new(),
        closing: CancellationToken::new(),
        drain: CancellationToken::new(),
    };
    let (mut client, stream) = UnixStream::pair().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let by_handler = Arc::clone(&seen);
    let handler = move |_: &Arc<Intake>, _: &ClientName, _: Option<IpAddr>| {
        let seen = Arc::clone(&by_handler);
        let respond = move |request: Request<Incoming>, _: Transport| {
            let seen = Arc::clone(&seen);
            async move {
                let (parts, body) = request.into_parts();
                let header = parts.headers.get("x-fuzz").map(|value| value.as_bytes().to_vec());
                let body = body.collect().await.map(|body| body.to_bytes().to_vec());
                seen.lock().push(Seen {
                    method: parts.method,
                    path: parts.uri.path().to_owned(),
                    header: header.unwrap_or_default(),
                    body: body.unwrap_or_default(),
                });
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"seen"))))
            }
        };
        (respond, None)
    };
    let server = server(&config);
    let place = config.connections.place_now().unwrap();
    let open = admit(&config, None, place).unwrap();
    let unused = open.unused();
    let serving = serve_connection(
        (rangecache_base::net::from_unix(stream), None, open),
        None,
        server,
        handler,
        (config, unused),
    );
    let mut responses = Vec::new();
    let asking = async {
        for piece in bytes.chunks(piece) {
            // The server may have refused the rest already.
            if client.write_all(piece).await.is_err() {
                break;
            }
            tokio::task::yield_now().await;
        }
        while !is_closed && statuses(&responses).len() < requests {
            let mut part = [0; 4096];
            match client.read(&mut part).await {
                Ok(read) if read > 0 => responses.extend_from_slice(&part[..read]),
                _ => break,
            }
        }
        if !is_closed {
            let _ = client.shutdown().await;
        }
        let _ = client.read_to_end(&mut responses).await;
    };
    tokio::join!(serving, asking);
    let seen = seen.lock().clone();
    (seen, responses)
}

/// Statuses of responses, which are well-formed apart from the last, which may be cut off.
fn statuses(responses: &[u8]) -> Vec<u16> {
    let mut statuses = Vec::new();
    let mut rest = responses;
    while let Some(end) = rest.windows(4).position(|end| end == b"\r\n\r\n") {
        let head = String::from_utf8(rest[..end].to_vec()).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap_or_default();
        assert!(status.starts_with("HTTP/1."), "{head}");
        statuses.push(status[9..12].parse().unwrap());
        let length = lines.find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.map_or(0, |length| length.parse().unwrap());
        rest = rest.get(end + 4 + length..).unwrap_or_default();
    }
    statuses
}
