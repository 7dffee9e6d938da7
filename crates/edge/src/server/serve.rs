//! Connections of clients: HTTP/2 (by ALPN or prior knowledge) and HTTP/1 on one port, as etcd has it; their metrics.

use std::{future::Future, io, net::IpAddr, sync::Arc, time::Duration};

use futures_util::FutureExt;
use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::{rt::Executor, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rangecache_base::net::{Plain, Stream, Transport};
use rangecache_base::telemetry::metrics::{Counter, metric_group};
use rangecache_base::{panics::restarting, telemetry::clients::ClientName, wake_gated::wake_gated};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::{either::Either, sync::CancellationToken, task::TaskTracker};

use super::connections::{Connections, Open, Unused};
use super::listener::{Listener, PING_TIMEOUT};
use super::pace::Handling;
use super::preface::{Prefaced, read_preface};
use crate::limits::{HeldBytes, Intake};
use crate::tls::{Acceptor, client_common_name};
use crate::write_batching::{Room, batch_responses, write_buffer};

/// Response bytes queued per stream, in addition to one frame, although its client's window would take more (I5).
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// Bound on a request's metadata: tokens and trace state are far below. It fits one frame of HTTP/2. A head counts in the
/// buffers once it is complete.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Time for the head of an HTTP/1 request, from the end of the response before it on.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Streams that a client may reset before they were handled, before hyper takes it for an attacker and closes the
/// connection.
const MAX_PENDING_RESETS: usize = 128;
/// Frames for calls that were answered before their request was complete, before the HTTP/2 library closes the
/// connection: each is answered by a reset. The library's 1,024 would close the connection of an honest client most of
/// whose calls were refused while buffers were full.
const MAX_LATE_FRAMES: usize = 16_384;
/// Interval of HTTP/2 pings to a silent client, so that half-open connections are closed.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time for the last bytes to a client whose connection is being closed for its age.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(5);

/// An executor for hyper that spawns tasks where they are counted and joined.
#[derive(Clone, Debug)]
struct TrackedExecutor(TaskTracker);

impl<F> Executor<F> for TrackedExecutor
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

/// Bytes of a connection's responses that were collected and not sent.
#[derive(Debug)]
struct SendRoom(HeldBytes);

impl Room for SendRoom {
    fn take(&mut self, bytes: usize) -> bool {
        self.0.grow_if_free(bytes as u64)
    }

    fn give_back(&mut self) {
        self.0.shrink_to(0);
    }
}

/// Settings with which [`Listener::serve`] serves connections; equal for all listeners of one kind.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Value of the metrics' label `listener`.
    pub name: &'static str,
    /// Open connections, and bounds on them.
    pub connections: Arc<Connections>,
    /// Bound on the calls in flight per HTTP/2 connection.
    pub max_concurrent_streams: u32,
    /// Age at which a connection is closed; `None` for no bound.
    pub max_age: Option<Duration>,
    /// Metrics of closed connections.
    pub metrics: Arc<ConnectionMetrics>,
    /// Counts and joins the tasks of connections and calls.
    pub tasks: TaskTracker,
    /// No more connections are taken, and the port is closed.
    pub closing: CancellationToken,
    /// No more calls are taken; calls in flight may finish.
    pub drain: CancellationToken,
}

impl Listener {
    /// Serves each connection by a new handler, which is made for its intake, its client and the client's address once the handshake is
    /// complete, until `closing`, then also those that the kernel has queued by then. A handler gets each request of its
    /// connection, and how it came. What is returned with it counts the bytes that the connection has collected to send several
    /// frames at once; without it, it sends them one by one. The port is closed when this returns; calls in flight continue in `tasks`.
    pub async fn serve<N, H, F, B, E>(mut self, new_handler: N, config: ServeConfig)
    where
        N: Fn(&Arc<Intake>, &ClientName, Option<IpAddr>) -> (H, Option<HeldBytes>) + Clone + Send + 'static,
        H: Fn(Request<Incoming>, Transport) -> F + Clone + Send + 'static,
        F: Future<Output = Result<Response<B>, E>> + Send + 'static,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
        E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    {
        self.keep_file();
        let server = server(&config);
        let start = |(stream, peer), place| {
            if let Some(open) = admit(&config, peer, place) {
                let (tls, server, new_handler) = (self.tls(), server.clone(), new_handler.clone());
                let config_of_one = config.clone();
                let (metrics, name) = (Arc::clone(&config.metrics), config.name);
                let (replaced, unused) = (open.replaced().clone(), open.unused());
                config.tasks.spawn(async move {
                    let connection = serve_connection(
                        (stream, peer, open),
                        tls,
                        server,
                        new_handler,
                        (config_of_one, unused),
                    );
                    tokio::select! {
                        () = connection => {}
                        () = wake_gated(replaced.cancelled()) => {
                            metrics.record_closed(name, "replaced");
                        }
                    }
                });
            }
        };
        let accepting = restarting("listener", async || {
            loop {
                // Also if there is no descriptor for one more: the oldest gives up its own.
                let accepted = self.accept(|| config.connections.replace_oldest()).await;
                if let Some(place) = config.connections.place().await {
                    start(accepted, place);
                }
            }
        });
        config.closing.run_until_cancelled(accepting).await;
        while let Some(place) = config.connections.place_now()
            && let Some(accepted) = self.accept(|| {}).now_or_never()
        {
            start(accepted, place);
        }
    }
}

/// Counts an accepted connection; `None` if its address has too many.
fn admit(config: &ServeConfig, peer: Option<IpAddr>, place: OwnedSemaphorePermit) -> Option<Open> {
    let open = config.connections.admit(peer, place);
    if open.is_none() {
        config.metrics.record_closed(config.name, "address");
        let address = peer.map(tracing::field::display);
        tracing::warn!(
            listener = config.name,
            address,
            "an address has too many connections open; its new ones are closed"
        );
    }
    open
}

/// Whether a connection comes from this host: through a unix socket, or from a loopback address.
fn is_local(peer: Option<IpAddr>) -> bool {
    peer.is_none_or(|peer| peer.to_canonical().is_loopback())
}

/// Serves one connection until it is closed, or until its last call has ended after `drain`. Its place lasts longer if it is
/// upgraded.
async fn serve_connection<N, H, F, B, E>(
    (stream, peer, place): (Plain, Option<IpAddr>, Open),
    tls: Option<Arc<Acceptor>>,
    mut server: auto::Builder<TrackedExecutor>,
    new_handler: N,
    (config, unused): (ServeConfig, Unused),
) where
    N: Fn(&Arc<Intake>, &ClientName, Option<IpAddr>) -> (H, Option<HeldBytes>) + Send + 'static,
    H: Fn(Request<Incoming>, Transport) -> F + Clone + Send + 'static,
    F: Future<Output = Result<Response<B>, E>> + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let drain = &config.drain;
    let transport = Transport {
        tls: tls.is_some(),
        unix: matches!(stream, Either::Right(_)),
        local: is_local(peer),
    };
    let intake = Arc::new(Intake::default());
    let Some((mut stream, client)) = begin(stream, peer, tls, Arc::clone(&intake), &config).await else {
        return;
    };
    stream.keep(place);
    let (handler, unsent) = new_handler(&intake, &client, peer);
    let room = unsent.map(|unsent| Box::new(SendRoom(unsent)) as Box<dyn Room>);
    let flooded = stream.flooded();
    // Boxed: hyper and tokio move a call several times before it runs, and once more when it ends.
    let service = service_fn(move |request| {
        unused.record_request();
        Box::pin(Handling::new(intake.begin(), handler(request, transport)))
    });
    // Until the connection ends.
    let window = stream.is_http2().then(|| config.connections.window());
    if let Some(window) = &window {
        let mut http2 = server.http2();
        http2.initial_stream_window_size(window.stream_bytes());
        http2.initial_connection_window_size(window.connection_bytes());
    }
    let (stream, buffer) = write_buffer(stream, room);
    let connection = server.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let stopping_or_aged = wake_gated(async {
        tokio::select! {
            () = drain.cancelled() => true,
            () = expired(config.max_age) => false,
        }
    });
    let closed = tokio::select! {
        closed = batch_responses(connection.as_mut(), &buffer) => closed,
        is_stopping = stopping_or_aged => {
            connection.as_mut().graceful_shutdown();
            let rest = batch_responses(connection.as_mut(), &buffer);
            if is_stopping {
                rest.await
            } else {
                within_farewell(rest).await
            }
        }
    };
    if flooded.is_cancelled() {
        config.metrics.record_closed(config.name, "flood");
        tracing::warn!(
            listener = config.name,
            "a client sent too many HTTP/2 control frames; its connection is closed"
        );
    }
    if let Err(error) = closed {
        tracing::debug!(error, "a client's connection was closed");
    }
}

/// Reads the start of a connection, and determines who its client is. `None` if there is none in time.
async fn begin(
    stream: Plain,
    peer: Option<IpAddr>,
    tls: Option<Arc<Acceptor>>,
    intake: Arc<Intake>,
    config: &ServeConfig,
) -> Option<(Prefaced<Stream>, ClientName)> {
    let stream = secured(stream, peer, tls, config).await?;
    let client = ClientName::of_connection(client_common_name(&stream).as_deref(), peer);
    match config
        .drain
        .run_until_cancelled(read_preface(stream, intake))
        .await?
    {
        Ok(stream) => Some((stream, client)),
        Err(error) => {
            if error.kind() == io::ErrorKind::TimedOut {
                config.metrics.record_closed(config.name, "silent");
            }
            tracing::debug!(%error, "a client did not send the start of a request; its connection is closed");
            None
        }
    }
}

/// Ends at `max_age`; never without one.
async fn expired(max_age: Option<Duration>) {
    match max_age {
        Some(max_age) => tokio::time::sleep(max_age).await,
        None => std::future::pending().await,
    }
}

/// The outcome of a connection that is being closed; it is dropped if its client does not take the last bytes in time.
async fn within_farewell<E>(closing: impl Future<Output = Result<(), E>>) -> Result<(), E> {
    let closed = tokio::time::timeout(FAREWELL_TIMEOUT, closing).await;
    closed.unwrap_or(Ok(()))
}

/// The connection after its TLS handshake, if it has one. `None` if the handshake has no place, loses it, fails, or is cut
/// off because the process stops.
async fn secured(
    stream: Plain,
    peer: Option<IpAddr>,
    tls: Option<Arc<Acceptor>>,
    config: &ServeConfig,
) -> Option<Stream> {
    let Some(tls) = tls else {
        return Some(Either::Left(stream));
    };
    let shaking = async {
        if let Some(place) = config.connections.begin_handshake(peer).await {
            let accepting = tls.accept(stream);
            if let Some(accepted) = place.replaced().run_until_cancelled(accepting).await {
                return accepted;
            }
        }
        config.metrics.record_closed(config.name, "handshake");
        tracing::warn!(
            listener = config.name,
            "too many TLS handshakes are not complete; that of a client is given up"
        );
        None
    };
    Box::pin(config.drain.run_until_cancelled(shaking)).await?
}

fn server(config: &ServeConfig) -> auto::Builder<TrackedExecutor> {
    let mut server = auto::Builder::new(TrackedExecutor(config.tasks.clone()));
    server
        .http2()
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .max_concurrent_streams(config.max_concurrent_streams)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_header_list_size(MAX_HEADER_BYTES)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_local_error_reset_streams(MAX_LATE_FRAMES)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    server
        .http1()
        .timer(TokioTimer::new())
        .max_buf_size(MAX_HEADER_BYTES as usize)
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(true);
    server
}

metric_group! {
    /// Closed connections of clients.
    pub struct ConnectionMetrics {
        /// Connections closed because of their client's behaviour, by `listener` (`clients`, `metrics`) and
        /// `reason`: `address`, `flood`, `handshake`, `replaced`, `silent`
        ///
        /// `address`: `--max-connections-per-address`; `flood`: control frames, or a header list in parts;
        /// `handshake`: too many are not complete; `replaced`: the oldest of the metrics listener, for a new
        /// one or for pages that are not read, or the oldest client that has sent no request, for a new one;
        /// `silent`: no first bytes
        ///
        /// Useful when: any increase: a client leaks connections or is hostile
        closed[listener, reason]: Counter = "rangecache_client_connections_closed_total", from_zero = [
            ("clients", "address"), ("clients", "flood"), ("clients", "handshake"), ("clients", "replaced"),
            ("clients", "silent"), ("metrics", "flood"), ("metrics", "replaced"), ("metrics", "silent"),
        ];
    }
}

impl ConnectionMetrics {
    /// Counts a connection of `listener` that was closed because of its client's behaviour.
    pub fn record_closed(&self, listener: &'static str, reason: &'static str) {
        self.closed.of((listener, reason)).inc();
    }
}

#[cfg(any(test, fuzzing, feature = "testing"))]
pub(super) mod fuzzing;
#[cfg(test)]
mod tests;
