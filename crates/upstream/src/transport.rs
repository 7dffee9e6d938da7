//! HTTP/2 on a stream to an endpoint: hyper's client, or the lean one. Errors of connecting to etcd.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use lean_h2::{Lean, LeanError, PING_INTERVAL};
use rangecache_base::net::{Stream, Url};
use rangecache_edge::write_batching::{RequestBatching, write_buffer};

use super::class::{Client, ReceiveWindow, Timeouts};
use super::{capabilities::ServerCapabilities, outgoing::Outgoing};

/// Bound on the metadata of a response.
const MAX_HEADER_BYTES: u32 = 1 << 20;

/// Sends the calls of a connection.
#[derive(Debug)]
pub(super) enum Transport {
    Hyper(http2::SendRequest<Outgoing>),
    Lean(Lean),
}

/// Drives a connection until it ends, and returns why it ended.
pub(super) type Driver = Pin<Box<dyn Future<Output = String> + Send>>;

impl Transport {
    /// Begins HTTP/2 on `stream`. The returned future drives it.
    pub(super) async fn begin(
        client: Client,
        timeouts: Timeouts,
        url: &Url,
        stream: Stream,
        server: &Arc<ServerCapabilities>,
    ) -> Result<(Transport, Driver), ConnectError> {
        let windows = match client {
            Client::Hyper(windows) => windows,
            Client::Lean if server.may_be_asked_leanly() => {
                return Ok(begin_lean(timeouts, url, stream, Arc::clone(server)));
            }
            Client::Lean => ReceiveWindow::SMALL,
        };
        begin_hyper(timeouts, url, stream, windows).await
    }

    pub(super) fn is_closed(&self) -> bool {
        match self {
            Transport::Hyper(sender) => sender.is_closed(),
            Transport::Lean(lean) => lean.is_closed(),
        }
    }

    /// Resolves once no call can be made any more, while those in flight continue. Never with hyper, whose driver ends then.
    pub(super) async fn until_closed(&self) {
        match self {
            Transport::Hyper(_) => std::future::pending().await,
            Transport::Lean(lean) => lean.until_closed().await,
        }
    }
}

fn begin_lean(
    timeouts: Timeouts,
    url: &Url,
    stream: Stream,
    server: Arc<ServerCapabilities>,
) -> (Transport, Driver) {
    let (lean, driver) = Lean::new(stream, timeouts.ping);
    let url = url.clone();
    let driver = async move {
        let error = driver.await;
        if matches!(error, LeanError::Unexpected(_)) && server.record_not_lean() {
            tracing::debug!(endpoint = %url, %error, "quorum checks are made through hyper");
        }
        error.to_string()
    };
    (Transport::Lean(lean), Box::pin(driver))
}

async fn begin_hyper(
    timeouts: Timeouts,
    url: &Url,
    stream: Stream,
    windows: ReceiveWindow,
) -> Result<(Transport, Driver), ConnectError> {
    let (stream, buffer) = write_buffer(stream, None);
    let (sender, driver) = http2::Builder::new(RequestBatching::new(buffer))
        .timer(TokioTimer::new())
        .initial_stream_window_size(windows.stream)
        // Only stream windows limit the data in flight: a stream that is not read must not stop the others.
        .initial_connection_window_size((1 << 31) - 1)
        .max_header_list_size(MAX_HEADER_BYTES)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(timeouts.ping)
        .keep_alive_while_idle(false)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|source| ConnectError::Handshake {
            url: url.clone(),
            source,
        })?;
    let driver = async move {
        match driver.await {
            Ok(()) => "the connection was closed".to_owned(),
            Err(error) => with_causes(&error),
        }
    };
    Ok((Transport::Hyper(sender), Box::pin(driver)))
}

/// An error's message with its causes, which hyper's own message leaves out.
fn with_causes(error: &hyper::Error) -> String {
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        message = format!("{message}: {next}");
        cause = next.source();
    }
    message
}

/// No endpoint could be used in time.
#[derive(Clone, Debug, thiserror::Error)]
#[error("no etcd endpoint could be reached within {waited:?}: {causes}")]
pub struct NoEndpoint {
    /// Time spent waiting for a connection.
    pub(super) waited: Duration,
    /// The last error of every endpoint.
    pub(super) causes: String,
}

/// Why a connection could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// TCP, unix socket or TLS.
    #[error("{url}: {source}")]
    Connect {
        /// The endpoint.
        url: Url,
        /// The system's error.
        source: std::io::Error,
    },
    /// HTTP/2.
    #[error("{url}: {source}")]
    Handshake {
        /// The endpoint.
        url: Url,
        /// hyper's error.
        source: hyper::Error,
    },
    /// The connection was opened, and closed before the first response.
    #[error("{url}: {reason}")]
    Refused {
        /// The endpoint.
        url: Url,
        /// Cause and remedy, in words.
        reason: String,
    },
    /// The deadline passed.
    #[error("timed out")]
    TimedOut,
    /// No endpoint is connected.
    #[error(transparent)]
    NoEndpoint(#[from] NoEndpoint),
}
