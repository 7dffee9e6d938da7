//! gRPC client on HTTP/2 for encoded requests: it counts the bytes of responses and checks their status, and decodes
//! nothing. Its windows are as large as grpc-go's grow, so that slow responses are due to the server; frames are of
//! 16 KB, the size that grpc-go's clients accept.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use bytes::{Bytes, BytesMut};
use h2::client::SendRequest;
use http::{HeaderMap, Method as HttpMethod, Request, Uri};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::tls::Tls;

/// Methods that the suite calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// `KV/Range`.
    Range = 0,
    /// `KV/Put`.
    Put = 1,
    /// `KV/Txn`.
    Txn = 2,
    /// `KV/RangeStream`.
    RangeStream = 3,
    /// `Watch/Watch`.
    Watch = 4,
}

impl Method {
    const ALL: [Method; 5] = [
        Method::Range,
        Method::Put,
        Method::Txn,
        Method::RangeStream,
        Method::Watch,
    ];

    /// Path of the method.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Method::Range => "/etcdserverpb.KV/Range",
            Method::Put => "/etcdserverpb.KV/Put",
            Method::Txn => "/etcdserverpb.KV/Txn",
            Method::RangeStream => "/etcdserverpb.KV/RangeStream",
            Method::Watch => "/etcdserverpb.Watch/Watch",
        }
    }
}

/// Receive windows of a connection, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    /// Per stream.
    pub(crate) stream_bytes: u32,
    /// Of the whole connection.
    pub(crate) connection_bytes: u32,
}

impl Windows {
    /// The size to which grpc-go's estimate grows on a fast link.
    pub(crate) const LARGE: Windows = Windows {
        stream_bytes: 16 << 20,
        connection_bytes: 256 << 20,
    };
}

/// Reason of a failed call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The connection or the stream broke.
    #[error("HTTP/2: {0}")]
    Transport(#[from] h2::Error),
    /// The response is not gRPC.
    #[error("HTTP status {0}")]
    Http(u16),
    /// A gRPC status other than OK, or no status.
    #[error("gRPC status {status}: {message}")]
    Grpc {
        /// The code as sent; empty without one.
        status: String,
        /// The message as sent.
        message: String,
    },
}

/// HTTP/2 connection to a target; dropping it closes it.
pub(crate) struct Connection {
    send: SendRequest<Bytes>,
    requests: [Request<()>; 5],
    driver: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    /// Connects without TLS.
    pub(crate) async fn open(address: SocketAddr, windows: Windows) -> Result<Self> {
        Self::open_with(address, None, windows).await
    }

    /// Connects, and completes the TLS handshake if `tls` is given.
    pub(crate) async fn open_with(address: SocketAddr, tls: Option<&Tls>, windows: Windows) -> Result<Self> {
        let stream = TcpStream::connect(address)
            .await
            .with_context(|| format!("connecting to {address}"))?;
        stream.set_nodelay(true)?;
        match tls {
            None => Self::over(stream, address, "http", windows).await,
            Some(tls) => Self::over(tls.handshake(stream).await?, address, "https", windows).await,
        }
    }

    async fn over<S>(stream: S, address: SocketAddr, scheme: &str, windows: Windows) -> Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (send, connection) = h2::client::Builder::new()
            .initial_window_size(windows.stream_bytes)
            .initial_connection_window_size(windows.connection_bytes)
            .initial_max_send_streams(4096)
            .handshake::<_, Bytes>(stream)
            .await
            .with_context(|| format!("HTTP/2 handshake with {address}"))?;
        // A broken connection fails every call on it, which reports it.
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        let mut requests = Vec::new();
        for method in Method::ALL {
            let uri: Uri = format!("{scheme}://{address}{}", method.path()).parse()?;
            requests.push(
                Request::builder()
                    .method(HttpMethod::POST)
                    .uri(uri)
                    .header("content-type", "application/grpc")
                    .header("te", "trailers")
                    .body(())?,
            );
        }
        let requests = requests
            .try_into()
            .map_err(|_| anyhow::anyhow!("one request per method"))?;
        Ok(Connection {
            send,
            requests,
            driver,
        })
    }

    /// Makes a call, discards the response and returns its size in bytes, gRPC prefixes included.
    pub(crate) async fn call(&self, method: Method, body: Bytes) -> Result<u64, CallError> {
        let mut received_bytes = 0;
        self.exchange(method, body, |chunk| received_bytes += chunk.len() as u64)
            .await?;
        Ok(received_bytes)
    }

    /// Makes a call and returns the complete response.
    pub(crate) async fn fetch(&self, method: Method, body: Bytes) -> Result<Bytes, CallError> {
        let mut answer = BytesMut::new();
        self.exchange(method, body, |chunk| answer.extend_from_slice(chunk))
            .await?;
        Ok(answer.freeze())
    }

    /// Starts a call, and leaves the body of its response unread.
    pub(crate) async fn begin(&self, method: Method, body: Bytes) -> Result<h2::RecvStream, CallError> {
        let mut send = self.send.clone().ready().await?;
        let (response, mut stream) = send.send_request(self.requests[method as usize].clone(), false)?;
        stream.send_data(body, true)?;
        let response = response.await?;
        if response.status() != http::StatusCode::OK {
            return Err(CallError::Http(response.status().as_u16()));
        }
        // A response without a body carries its status in the headers.
        if response.headers().contains_key("grpc-status") {
            check_status(response.headers())?;
        }
        Ok(response.into_body())
    }

    /// Starts a call whose requests the caller sends. The response may not start before the first request.
    pub(crate) async fn start(
        &self,
        method: Method,
    ) -> Result<(h2::SendStream<Bytes>, h2::client::ResponseFuture), CallError> {
        let mut send = self.send.clone().ready().await?;
        let (response, stream) = send.send_request(self.requests[method as usize].clone(), false)?;
        Ok((stream, response))
    }

    /// Makes a call, and passes every chunk of the response to `each` when it arrives.
    pub(crate) async fn exchange(
        &self,
        method: Method,
        body: Bytes,
        mut on_chunk: impl FnMut(&Bytes),
    ) -> Result<(), CallError> {
        let mut answer = self.begin(method, body).await?;
        while let Some(chunk) = answer.data().await {
            let chunk = chunk?;
            answer.flow_control().release_capacity(chunk.len())?;
            on_chunk(&chunk);
        }
        match answer.trailers().await? {
            Some(trailers) => check_status(&trailers),
            None => Err(CallError::Grpc {
                status: String::new(),
                message: "no trailers".into(),
            }),
        }
    }
}

fn check_status(headers: &HeaderMap) -> Result<(), CallError> {
    let text = |name: &str| {
        headers
            .get(name)
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
            .unwrap_or_default()
    };
    let status = text("grpc-status");
    if status == "0" {
        Ok(())
    } else {
        Err(CallError::Grpc {
            status,
            message: text("grpc-message"),
        })
    }
}
