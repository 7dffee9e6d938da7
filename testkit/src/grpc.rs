//! gRPC client on bare HTTP/2: it can send malformed calls, and returns every byte, header and trailer.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::stream;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::http::without_time;
use crate::wait::{SOON, until};

type Body = UnsyncBoxBody<Bytes, std::convert::Infallible>;

/// Bound on any call; after it the call counts as hung.
const HUNG: Duration = Duration::from_secs(60);
/// gRPC's status code of an error that has no code of its own.
pub const UNKNOWN: i32 = 2;
/// gRPC's status code of a request that is wrong in itself.
pub const INVALID_ARGUMENT: i32 = 3;
/// gRPC's status code of a call whose time is over.
pub const DEADLINE_EXCEEDED: i32 = 4;
/// gRPC's status code of a call that the caller may not make.
pub const PERMISSION_DENIED: i32 = 7;
/// gRPC's status code of a call over a limit.
pub const RESOURCE_EXHAUSTED: i32 = 8;
/// gRPC's status code of a call that the state of the server does not permit.
pub const FAILED_PRECONDITION: i32 = 9;
/// gRPC's status code of a compacted or future revision.
pub const OUT_OF_RANGE: i32 = 11;
/// gRPC's status code of a method or request that the server does not implement.
pub const UNIMPLEMENTED: i32 = 12;
/// gRPC's status code of an unreachable server.
pub const UNAVAILABLE: i32 = 14;
/// gRPC's status code of a caller who is not known.
pub const UNAUTHENTICATED: i32 = 16;

/// Status of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// gRPC's status code.
    pub code: i32,
    /// Status message, percent-decoded.
    pub message: String,
}

/// HTTP/2 connection, and metadata added to every call. Clones share the connection.
#[derive(Clone)]
pub struct Client {
    url: String,
    sender: SendRequest<Body>,
    metadata: HeaderMap,
}

/// A complete response; two replies are equal only if no client could distinguish them.
#[derive(Clone, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status; 0 if the stream was reset before the headers.
    pub http_status: u16,
    /// All headers; `date` is the same at any time.
    pub headers: HeaderMap,
    /// Body, with the length prefixes of its messages.
    pub body: Bytes,
    /// Trailers; empty if the headers were the last frame.
    pub trailers: HeaderMap,
    /// HTTP/2 error code, if the stream was reset.
    pub reset: Option<u32>,
}

impl Client {
    /// Connects to a URL such as `http://127.0.0.1:2379`, retrying until a server listens.
    pub async fn connect(url: &str) -> Self {
        until(SOON, &format!("a connection to {url}"), async || {
            Self::try_connect(url).await.ok()
        })
        .await
        .0
    }

    /// Connects once.
    pub async fn try_connect(url: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let authority = url
            .strip_prefix("http://")
            .ok_or("only http:// is supported")?
            .trim_end_matches('/');
        let tcp = timeout(SOON, TcpStream::connect(authority)).await??;
        tcp.set_nodelay(true)?;
        Self::over(tcp, &format!("http://{authority}")).await
    }

    /// Connects to a URL such as `http://127.0.0.1:2379` from this local address, such as 127.0.0.2: a client of its own.
    pub async fn connect_from(local: IpAddr, url: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let authority = url.strip_prefix("http://").ok_or("only http:// is supported")?;
        let socket = TcpSocket::new_v4()?;
        socket.bind((local, 0).into())?;
        let tcp = timeout(SOON, socket.connect(authority.parse()?)).await??;
        tcp.set_nodelay(true)?;
        Self::over(tcp, url).await
    }

    /// Starts HTTP/2 on a connected stream; `url` is scheme and authority of every request.
    pub async fn over<S>(stream: S, url: &str) -> Result<Self, Box<dyn Error + Send + Sync>>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .initial_connection_window_size(32 << 20)
            .initial_stream_window_size(8 << 20);
        let (sender, connection) = timeout(SOON, builder.handshake(TokioIo::new(stream))).await??;
        tokio::spawn(connection);
        Ok(Self {
            url: url.to_owned(),
            sender,
            metadata: HeaderMap::new(),
        })
    }

    /// Returns a client on the same connection with one more metadata entry on every call.
    pub fn with_metadata(&self, name: &'static str, value: &str) -> Self {
        let mut client = self.clone();
        client.metadata.append(
            HeaderName::from_static(name),
            HeaderValue::from_str(value).unwrap(),
        );
        client
    }

    /// Whether the connection is still usable.
    pub fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    /// Headers of a gRPC request to `path`, with this client's metadata.
    pub fn request(&self, path: &str) -> http::request::Builder {
        let mut request = Request::post(format!("{}{path}", self.url))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        request.headers_mut().unwrap().extend(self.metadata.clone());
        request
    }

    /// Sends `body` unchanged under `request`'s headers. `Err` means that the connection was lost, or that no
    /// response came.
    pub async fn send(&self, request: http::request::Builder, body: Bytes) -> Result<Reply, String> {
        let request = request.body(Full::new(body).boxed_unsync()).unwrap();
        let mut sender = self.sender.clone();
        let call = async {
            sender.ready().await.map_err(describe)?;
            collect(sender.send_request(request).await).await
        };
        timeout(HUNG, call)
            .await
            .unwrap_or_else(|_| Err(format!("no response within {HUNG:?}")))
    }

    /// Calls `path` with one encoded message.
    pub async fn raw(&self, path: &str, message: &[u8]) -> Result<Reply, String> {
        self.send(self.request(path), frame(message)).await
    }

    /// Calls `path` with one message. A lost connection is reported as [`UNAVAILABLE`], like in etcd's own clients.
    pub async fn reply(&self, path: &str, question: &impl Message) -> Result<Reply, Status> {
        let lost = |message| Status {
            code: UNAVAILABLE,
            message,
        };
        self.raw(path, &question.encode_to_vec()).await.map_err(lost)
    }

    /// Calls a unary method, as [`Client::reply`] does.
    pub async fn unary<A: Message + Default>(
        &self,
        path: &str,
        question: &impl Message,
    ) -> Result<A, Status> {
        self.reply(path, question).await?.answer()
    }

    /// Opens a bidirectional streaming call.
    pub fn open(&self, path: &str) -> Stream {
        let (requests, receiver) = mpsc::unbounded_channel::<Bytes>();
        let frames = stream::unfold(receiver, async |mut receiver| {
            let message = receiver.recv().await?;
            Some((Ok(Frame::data(message)), receiver))
        });
        let request = self
            .request(path)
            .body(StreamBody::new(Box::pin(frames)).boxed_unsync())
            .unwrap();
        let mut sender = self.sender.clone();
        let head = Box::pin(async move {
            sender.ready().await?;
            sender.send_request(request).await
        });
        Stream {
            requests: Some(requests),
            head: Some(head),
            body: None,
            buffer: BytesMut::new(),
            end: None,
        }
    }

    /// Calls a server-streaming method.
    pub fn server_stream(&self, path: &str, question: &impl Message) -> Stream {
        let mut stream = self.open(path);
        stream.send(question);
        stream.close_send();
        stream
    }
}

type Head = Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>;

/// A call in flight. Dropping it cancels it.
pub struct Stream {
    requests: Option<mpsc::UnboundedSender<Bytes>>,
    head: Option<Head>,
    body: Option<Incoming>,
    buffer: BytesMut,
    end: Option<Status>,
}

impl Stream {
    /// Sends one message.
    pub fn send(&self, message: &impl Message) {
        // A connection closed by the server is reported by `next`, with its reason.
        let _ = self
            .requests
            .as_ref()
            .expect("not yet closed")
            .send(frame(&message.encode_to_vec()));
    }

    /// Closes the sending side.
    pub fn close_send(&mut self) {
        self.requests = None;
    }

    /// Returns the next message; `None` at the end, whose status is [`Stream::end`]. Cancel safe.
    pub async fn next(&mut self) -> Option<Bytes> {
        while self.end.is_none() {
            if let Some(message) = take_message(&mut self.buffer) {
                return Some(message);
            }
            if let Err(end) = self.receive().await {
                self.end = Some(end);
            }
        }
        None
    }

    async fn receive(&mut self) -> Result<(), Status> {
        let lost = |e| Status {
            code: UNAVAILABLE,
            message: describe(e),
        };
        if let Some(head) = &mut self.head {
            let head = head.as_mut().await;
            self.head = None;
            let response = head.map_err(lost)?;
            if let Some(end) = status_of(response.headers()) {
                return Err(end);
            }
            self.body = Some(response.into_body());
        }
        match self.body.as_mut().expect("set above").frame().await {
            None => Err(Status {
                code: UNAVAILABLE,
                message: "ended without trailers".to_owned(),
            }),
            Some(Err(e)) => Err(lost(e)),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => {
                    self.buffer.extend_from_slice(&data);
                    Ok(())
                }
                Err(frame) => Err(frame
                    .trailers_ref()
                    .and_then(status_of)
                    .expect("trailers hold a status")),
            },
        }
    }

    /// Returns the next message, decoded. Panics if none arrives within `deadline`.
    pub async fn next_as<A: Message + Default>(&mut self, deadline: Duration) -> Option<A> {
        let next = timeout(deadline, self.next()).await;
        let next = next.unwrap_or_else(|_| panic!("no message on the stream within {deadline:?}"))?;
        Some(A::decode(next).expect("decodes"))
    }

    /// Status of the ended stream, gRPC's OK included; `None` while it is open.
    pub fn end(&self) -> Option<&Status> {
        self.end.as_ref()
    }
}

impl Reply {
    /// gRPC status of the reply; code 2 (unknown) if it carries none.
    pub fn status(&self) -> Status {
        let none = || Status {
            code: 2,
            message: format!("no grpc-status in {self:?}"),
        };
        status_of(&self.trailers)
            .or_else(|| status_of(&self.headers))
            .unwrap_or_else(none)
    }

    /// The only message of a successful reply.
    pub fn message(&self) -> Result<Bytes, Status> {
        let status = self.status();
        if status.code != 0 {
            return Err(status);
        }
        let mut body = BytesMut::from(&self.body[..]);
        let message = take_message(&mut body).expect("a whole message");
        assert!(body.is_empty(), "more than one message in {self:?}");
        Ok(message)
    }

    /// The only message of a successful reply, decoded.
    pub fn answer<A: Message + Default>(&self) -> Result<A, Status> {
        Ok(A::decode(self.message()?).expect("decodes"))
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.body[..self.body.len().min(300)];
        write!(
            f,
            "HTTP {} {:?}\n  {} B: ",
            self.http_status,
            self.headers,
            self.body.len()
        )?;
        write!(
            f,
            "{}\n  trailers {:?}, reset {:?}",
            shown.escape_ascii(),
            self.trailers,
            self.reset
        )
    }
}

/// Message with gRPC's length prefix, not compressed.
pub fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(message.len() + 5);
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap());
    framed.extend_from_slice(message);
    framed.freeze()
}

fn take_message(buffer: &mut BytesMut) -> Option<Bytes> {
    let prefix = buffer.get(..5)?;
    assert_eq!(
        prefix[0], 0,
        "a compressed message, though this client accepts none"
    );
    let length = u32::from_be_bytes(prefix[1..].try_into().unwrap()) as usize;
    if buffer.len() < 5 + length {
        return None;
    }
    buffer.advance(5);
    Some(buffer.split_to(length).freeze())
}

async fn collect(response: hyper::Result<Response<Incoming>>) -> Result<Reply, String> {
    let nothing = || Reply {
        http_status: 0,
        headers: HeaderMap::new(),
        body: Bytes::new(),
        trailers: HeaderMap::new(),
        reset: None,
    };
    let (head, mut body) = match response {
        Ok(response) => response.into_parts(),
        Err(e) => {
            return Ok(Reply {
                reset: Some(reset_reason(e)?),
                ..nothing()
            });
        }
    };
    let mut reply = Reply {
        http_status: head.status.as_u16(),
        headers: head.headers,
        ..nothing()
    };
    without_time(&mut reply.headers);
    let mut data = BytesMut::new();
    while let Some(frame) = body.frame().await {
        match frame {
            Err(e) => reply.reset = Some(reset_reason(e)?),
            Ok(frame) => match frame.into_data() {
                Ok(piece) => data.extend_from_slice(&piece),
                Err(frame) => reply.trailers = frame.into_trailers().unwrap_or_default(),
            },
        }
        if reply.reset.is_some() {
            break;
        }
    }
    reply.body = data.freeze();
    Ok(reply)
}

/// HTTP/2 error code of a reset stream; `Err` describes a failure of the connection.
fn reset_reason(error: hyper::Error) -> Result<u32, String> {
    let h2 = error
        .source()
        .and_then(|source| source.downcast_ref::<h2::Error>());
    match h2 {
        Some(h2) if h2.is_reset() => Ok(h2.reason().map_or(u32::MAX, u32::from)),
        _ => Err(describe(error)),
    }
}

fn describe(error: hyper::Error) -> String {
    let cause = error
        .source()
        .map(|source| format!(": {source}"))
        .unwrap_or_default();
    format!("no response: {error}{cause}")
}

fn status_of(headers: &HeaderMap) -> Option<Status> {
    let code = headers.get("grpc-status")?.to_str().ok()?.parse().ok()?;
    let message = headers
        .get("grpc-message")
        .map(|m| percent_decoded(m.as_bytes()))
        .unwrap_or_default();
    Some(Status { code, message })
}

fn percent_decoded(text: &[u8]) -> String {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let escaped = (*first == b'%').then(|| after.get(..2)).flatten();
        let byte = escaped.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        decoded.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&decoded).into_owned()
}
