//! HTTP/2 connections to one endpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use etcd_wire::grpc::frame::framed;
use http::header::{CONTENT_TYPE, TE};
use http::{HeaderValue, Request, Response, Uri, uri::PathAndQuery};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use lean_h2::{Lean, LeanError, Parts};
use prost::Message;
use rangecache_base::net::Url;
use rangecache_edge::tls::NamedConnection;
use tokio::sync::Semaphore;
use tonic::metadata::MetadataMap;

use super::capabilities::{NoRangeStream, ServerCapabilities};
use super::outgoing::{BoxError, Outgoing};
use super::standing::{Lineage, Peer};
use super::upstream_body::{UpstreamBody, unary_message};
use super::{credentials::Credentials, transport::Transport};

/// Why a call got no response.
#[derive(Debug)]
pub enum SendFailure {
    /// The request was not sent, or the server has said that it has not processed it; it is returned for use on another connection.
    NotSent(Box<Request<Outgoing>>, BoxError),
    /// The connection does not take the request now, which is returned for use on one of [`Unary`](super::ConnectionClass::Unary).
    Full(Box<Request<Outgoing>>),
    /// The request may have reached etcd.
    Lost(BoxError),
}

/// An open connection. A separate task drives it; when that task ends, calls fail.
#[derive(Debug)]
pub struct Connection {
    url: Url,
    /// Scheme and authority of every request.
    origin: Uri,
    transport: Transport,
    in_flight: AtomicUsize,
    /// Peer, and the history that it stands for.
    pub(super) peer: Peer,
    /// The turn of a comparison that finds this out.
    history_turn: Semaphore,
    /// [`Connection::cluster_id`]; 0 before.
    cluster_id: AtomicU64,
    /// The client certificate of the connection has a common name, which etcd may take for a user.
    named: Option<NamedConnection>,
    credentials: Arc<Credentials>,
    /// Shared with the endpoint's other connections.
    server: Arc<ServerCapabilities>,
}

/// Counts a call as in flight until dropped.
#[derive(Debug)]
pub struct InFlight(Arc<Connection>);

impl InFlight {
    /// Endpoint that the call was sent to.
    #[must_use]
    pub fn url(&self) -> &Url {
        self.0.url()
    }

    /// Connection that the call was sent on.
    #[must_use]
    pub fn connection(&self) -> &Arc<Connection> {
        &self.0
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection {
    pub(super) fn new(
        url: &Url,
        server: &Arc<ServerCapabilities>,
        credentials: &Arc<Credentials>,
        transport: Transport,
        named: Option<NamedConnection>,
    ) -> Connection {
        let origin = Uri::builder()
            .scheme(url.scheme())
            .authority(url.authority())
            .path_and_query("/")
            .build()
            .unwrap_or_else(|_| Uri::from_static("http://localhost/"));
        Connection {
            url: url.clone(),
            origin,
            transport,
            in_flight: AtomicUsize::new(0),
            peer: Peer::new(),
            history_turn: Semaphore::new(1),
            cluster_id: AtomicU64::new(0),
            named,
            credentials: Arc::clone(credentials),
            server: Arc::clone(server),
        }
    }

    /// Whether etcd with auth on may attribute a call without a token to a user: rangecache's own, or the one that
    /// the client certificate names.
    #[must_use]
    pub fn may_act_as_user(&self) -> bool {
        self.named.is_some() || self.credentials.is_configured()
    }

    /// Endpoint of the connection.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Number of calls in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Resolves once the connection's endpoint is used no more.
    pub async fn until_removed(&self) {
        self.server.removed().cancelled().await;
    }

    pub(super) fn is_live(&self) -> bool {
        !self.transport.is_closed()
    }

    /// Resolves once the connection takes no more calls, while those in flight continue; never if its driver ends then.
    pub(super) async fn until_closed(&self) {
        self.transport.until_closed().await;
    }

    /// The client for small calls, if the connection has one.
    pub(super) fn lean(&self) -> Option<&Lean> {
        match &self.transport {
            Transport::Hyper(_) => None,
            Transport::Lean(lean) => Some(lean),
        }
    }

    /// A unary call of rangecache's own through `lean` and without tonic: the message of the response, and its lineage, if that is proven.
    pub(super) async fn call_lean<R: Message + Default>(
        self: &Arc<Self>,
        lean: &Lean,
        path: &'static str,
        message: &impl Message,
        metadata: MetadataMap,
    ) -> Result<(R, Option<Lineage>), tonic::Status> {
        let mut headers = metadata.into_headers();
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        self.credentials.instance().sign(&mut headers);
        let _in_flight = self.count();
        let (uri, body) = (
            self.uri_of(Some(PathAndQuery::from_static(path))),
            framed(message),
        );
        let called = lean.call(&uri, &headers, &body).await;
        let mut response = called.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
        self.note_response(&mut response);
        let lineage = self.peer.lineage_of(response.extensions());
        Ok((unary_message(response)?, lineage))
    }

    /// Sends a call of a tonic client through `lean`. Its body may have an end that depends on the response.
    pub(super) async fn send_parts(
        self: &Arc<Self>,
        lean: &Lean,
        request: Request<tonic::body::Body>,
    ) -> Result<Response<Parts>, BoxError> {
        let (mut parts, mut body) = request.into_parts();
        self.credentials.instance().sign(&mut parts.headers);
        let _in_flight = self.count();
        // What a unary call sends is one message, which is there.
        let first = match body.frame().await {
            Some(frame) => frame?.into_data().unwrap_or_default(),
            None => Bytes::new(),
        };
        let is_whole = body.is_end_stream();
        let uri = self.uri_of(parts.uri.path_and_query().cloned());
        let begun = lean.begin(&uri, &parts.headers, &first, is_whole);
        let begun = begun.await?;
        let rest = (!is_whole).then_some(body);
        let mut response = Parts::response(begun, rest).await?;
        self.note_response(&mut response);
        Ok(response)
    }

    /// Sends a client's call through `lean`, if its body is whole and short.
    async fn send_short(
        self: &Arc<Self>,
        lean: &Lean,
        request: Request<Outgoing>,
    ) -> Result<Response<Parts>, SendFailure> {
        let (parts, mut outgoing) = request.into_parts();
        let Some(body) = outgoing.take_whole() else {
            let request = Request::from_parts(parts, outgoing);
            return Err(SendFailure::Full(Box::new(request)));
        };
        match lean.begin(&parts.uri, &parts.headers, &body, true).await {
            Ok(begun) => match Parts::response(begun, None).await {
                Ok(mut response) => {
                    self.note_response(&mut response);
                    Ok(response)
                }
                Err(error) if is_not_processed(&error) => {
                    let request = Request::from_parts(parts, Outgoing::whole(body));
                    Err(SendFailure::NotSent(Box::new(request), error))
                }
                Err(error) => Err(SendFailure::Lost(error)),
            },
            Err(error) => {
                let request = Box::new(Request::from_parts(parts, Outgoing::whole(body)));
                Err(match error {
                    LeanError::Full => SendFailure::Full(request),
                    error => SendFailure::NotSent(request, error.into()),
                })
            }
        }
    }

    /// Counts a call as in flight.
    fn count(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    /// Takes what a response says about its peer.
    fn note_response<B>(&self, response: &mut Response<B>) {
        self.server.record_response();
        self.peer.note_response(&self.server.peer, response);
    }

    /// This endpoint's scheme and authority, and `path`.
    fn uri_of(&self, path: Option<PathAndQuery>) -> Uri {
        let mut uri = self.origin.clone().into_parts();
        uri.path_and_query = path.or(uri.path_and_query);
        Uri::from_parts(uri).unwrap_or_else(|_| self.origin.clone())
    }

    /// Sends `request` with its own path and this endpoint's scheme and authority.
    ///
    /// # Errors
    /// [`SendFailure`], which shows whether etcd may have received the request.
    pub async fn send(
        self: &Arc<Self>,
        mut request: Request<Outgoing>,
    ) -> Result<(Response<UpstreamBody>, InFlight), SendFailure> {
        *request.uri_mut() = self.uri_of(request.uri().path_and_query().cloned());
        self.credentials.instance().sign(request.headers_mut());
        let guard = self.count();
        let sender = match &self.transport {
            Transport::Hyper(sender) => sender,
            Transport::Lean(lean) => {
                let response = self.send_short(lean, request).await?;
                return Ok((response.map(UpstreamBody::from), guard));
            }
        };
        request.body_mut().end_with_data();
        match sender.clone().try_send_request(request).await {
            Ok(mut response) => {
                self.note_response(&mut response);
                Ok((response.map(UpstreamBody::from), guard))
            }
            Err(mut failed) => match failed.take_message() {
                Some(request) => Err(SendFailure::NotSent(
                    Box::new(request),
                    failed.into_error().into(),
                )),
                None => Err(SendFailure::Lost(failed.into_error().into())),
            },
        }
    }

    /// Why a RangeStream on this connection would fail, if that is known.
    #[must_use]
    pub fn lacks_range_stream(&self) -> Option<NoRangeStream> {
        self.server.no_range_stream()
    }

    /// Handles an `Unimplemented` status with this message on a RangeStream call: returns whether it concerns the
    /// request ([`NoRangeStream::Shape`]) or the method. In the latter case RangeStream is not used on the endpoint
    /// until it is connected again or reports another version.
    pub fn refused_range_stream(&self, message: &str) -> NoRangeStream {
        let reason = NoRangeStream::from_unimplemented(message);
        if reason == NoRangeStream::Unimplemented && self.server.record_no_range_stream() {
            tracing::info!(endpoint = %self.url, "RangeStream is not implemented by this endpoint; reading by pages until \
                it is connected again or reports another version");
        }
        reason
    }

    /// Scheme and authority of every request.
    pub(super) fn origin(&self) -> &Uri {
        &self.origin
    }

    /// rangecache's own identity.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Id of the member's cluster, once a status, or a hub's response to a health check, was received on this connection. Behind a
    /// hub, etcd may become another cluster while the connection stays.
    #[must_use]
    pub fn cluster_id(&self) -> Option<u64> {
        Some(self.cluster_id.load(Ordering::Acquire)).filter(|id| *id != 0)
    }

    /// Sets [`Connection::cluster_id`].
    pub(super) fn set_cluster_id(&self, id: u64) {
        self.cluster_id.store(id, Ordering::Release);
    }

    /// The turn of what compares the history behind this connection: one comparison serves all who ask. Each connection has its
    /// own, because a member that does not respond must not delay the others.
    pub fn history_turn(&self) -> &Semaphore {
        &self.history_turn
    }
}

/// Whether the server has said that it has not processed the call that failed with `error`.
fn is_not_processed(error: &BoxError) -> bool {
    matches!(error.downcast_ref::<LeanError>(), Some(LeanError::NotProcessed))
}

#[cfg(test)]
mod tests {
    use std::{task::Poll, time::Duration};

    use bytes::Bytes;
    use lean_h2::testing::{END_HEADERS, GOAWAY, HEADERS, OK, Peer, SETTINGS};
    use rangecache_edge::tls::Connector;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::{task::JoinHandle, time::Instant};
    use tokio_util::either::Either;

    use super::*;
    use crate::class::{Client, Timeouts};
    use crate::fake::{Answer, FakeEtcd};
    use crate::testing::{SOON, open};
    use crate::{ConnectionClass, Lineage, MAX_SHORT_BYTES, upstream_body::is_reset};

    fn call(path: &str) -> Request<Outgoing> {
        let body = Outgoing::whole(Bytes::from_static(b"\0\0\0\0\0"));
        Request::post(path).body(body).unwrap()
    }

    #[tokio::test]
    async fn call_is_in_flight_until_its_guard_is_dropped() {
        let etcd = FakeEtcd::start(async |_, _| Ok(Vec::new())).await;
        let connection = open(&etcd.url).await.unwrap();
        let (_, first) = connection.send(call("/a")).await.unwrap();
        let (_, second) = connection.send(call("/b")).await.unwrap();
        assert_eq!(connection.in_flight(), 2, "the responses may not have ended");
        assert_eq!(first.url(), &etcd.url);
        drop(first);
        assert_eq!(connection.in_flight(), 1);
        drop(second);
        assert_eq!(connection.in_flight(), 0);
        let calls = etcd.calls.lock();
        let paths: Vec<_> = calls.iter().map(|(_, path, _)| path.as_str()).collect();
        assert_eq!(paths, ["/a", "/b"]);
    }

    #[tokio::test]
    async fn call_that_is_given_up_is_not_in_flight() {
        let etcd = FakeEtcd::start(|_, _| std::future::pending::<Answer>()).await;
        let connection = open(&etcd.url).await.unwrap();
        let mut sending = Box::pin(connection.send(call("/a")));
        assert!(std::future::poll_fn(|cx| Poll::Ready(sending.as_mut().poll(cx).is_pending())).await);
        assert_eq!(connection.in_flight(), 1);
        drop(sending);
        assert_eq!(connection.in_flight(), 0);
    }

    #[tokio::test]
    async fn request_on_a_closed_connection_is_returned() {
        let etcd = FakeEtcd::start(async |_, _| Ok(Vec::new())).await;
        let connection = open(&etcd.url).await.unwrap();
        drop(etcd);
        let closed = async {
            while connection.is_live() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(SOON, closed).await.unwrap();
        match connection.send(call("/a")).await {
            Err(SendFailure::NotSent(request, _)) => assert_eq!(request.uri().path(), "/a"),
            other => panic!("{other:?}"),
        }
        assert_eq!(connection.in_flight(), 0);
    }

    /// A connection with the lean client, and what drives it.
    async fn open_lean(url: &Url) -> (Arc<Connection>, JoinHandle<String>) {
        let (connector, credentials) = (Connector::plaintext(), Credentials::new(None));
        let (server, deadline) = (Arc::default(), Instant::now() + SOON);
        let (client, timeouts) = (Client::Lean, Timeouts::CLIENTS);
        let opening = Connection::open(&connector, url, &server, client, timeouts, &credentials, deadline);
        let (connection, driver) = opening.await.unwrap();
        (connection, tokio::spawn(driver))
    }

    #[tokio::test]
    async fn short_call_is_sent_leanly_and_any_other_is_returned() {
        let etcd = FakeEtcd::start(async |_, message| match message.len() {
            0 => Ok(b"answer".to_vec()),
            _ => Err((9, "refused")),
        })
        .await;
        let (connection, driver) = open_lean(&etcd.url).await;
        let (response, in_flight) = connection.send(call("/a")).await.unwrap();
        assert_eq!(connection.in_flight(), 1, "the response may not have ended");
        let collected = response.into_body().collect().await.unwrap();
        assert_eq!(collected.trailers().unwrap()["grpc-status"], "0");
        assert_eq!(collected.to_bytes(), b"\0\0\0\0\x06answer"[..]);
        drop(in_flight);
        assert_eq!(connection.in_flight(), 0);

        let long = Bytes::from(vec![1; MAX_SHORT_BYTES + 1]);
        let long = Request::post("/b").body(Outgoing::whole(long)).unwrap();
        let Err(SendFailure::Full(returned)) = connection.send(long).await else {
            panic!("it does not fit");
        };
        assert_eq!(returned.uri().path(), "/b");
        let body = returned.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body.len(), MAX_SHORT_BYTES + 1);

        driver.abort();
        assert!(driver.await.is_err());
        match connection.send(call("/c")).await {
            Err(SendFailure::NotSent(request, _)) => assert_eq!(request.uri().path(), "/c"),
            other => panic!("{other:?}"),
        }
        let paths: Vec<_> = etcd
            .calls
            .lock()
            .iter()
            .map(|(_, path, _)| path.clone())
            .collect();
        assert_eq!(paths, ["/a"]);
    }

    #[tokio::test]
    async fn short_call_in_flight_is_lost_with_its_connection() {
        let etcd = FakeEtcd::start(|_, _| std::future::pending::<Answer>()).await;
        let (connection, driver) = open_lean(&etcd.url).await;
        let mut sending = Box::pin(connection.send(call("/a")));
        assert!(std::future::poll_fn(|cx| Poll::Ready(sending.as_mut().poll(cx).is_pending())).await);
        driver.abort();
        match sending.await {
            Err(SendFailure::Lost(error)) => assert!(!is_reset(&error), "{error}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(connection.in_flight(), 0);
    }

    /// A connection with the lean client to a peer that the test plays frame by frame.
    async fn open_lean_to_script() -> (Peer<TcpStream>, Arc<Connection>, JoinHandle<String>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url: Url = format!("http://{}", listener.local_addr().unwrap())
            .parse()
            .unwrap();
        let (connection, driver) = open_lean(&url).await;
        let (stream, _) = listener.accept().await.unwrap();
        (Peer::on(stream).await, connection, driver)
    }

    #[tokio::test]
    async fn short_call_that_the_server_has_not_processed_is_returned() {
        let (mut peer, connection, _driver) = open_lean_to_script().await;
        let playing = async move {
            assert_eq!(peer.request().await, 1);
            assert_eq!(peer.request().await, 3);
            // The first one may have been processed. Then the connection ends.
            peer.send(GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 0]).await;
        };
        let (first, second) = (connection.send(call("/a")), connection.send(call("/b")));
        let (first, second, ()) = tokio::join!(first, second, playing);
        assert!(matches!(first, Err(SendFailure::Lost(_))), "{first:?}");
        match second {
            Err(SendFailure::NotSent(returned, _)) => {
                assert_eq!(returned.uri().path(), "/b");
                let body = returned.into_body().collect().await.unwrap().to_bytes();
                assert_eq!(body, b"\0\0\0\0\0"[..]);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(connection.in_flight(), 0);
    }

    /// A connection of `class` to a peer that the test plays, within the process: time can be paused.
    async fn open_to_script(class: ConnectionClass) -> (Peer, Arc<Connection>) {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let stream = Either::Left(Either::Right(Either::Right(ours)));
        let (url, server) = ("http://etcd:2379".parse().unwrap(), Arc::default());
        let beginning = Transport::begin(class.client(), class.timeouts(), &url, stream, &server);
        let (transport, driver) = beginning.await.unwrap();
        tokio::spawn(driver);
        let mut peer = Peer::on(theirs).await;
        peer.send(SETTINGS, 0, 0, &[]).await;
        let credentials = Credentials::new(None);
        let connection = Connection::new(&url, &server, &credentials, transport, None);
        (peer, Arc::new(connection))
    }

    /// A direct client would have waited as long.
    #[tokio::test(start_paused = true)]
    async fn call_of_a_client_waits_for_a_member_that_pauses() {
        for class in [
            ConnectionClass::Unary,
            ConnectionClass::Short,
            ConnectionClass::Stream,
            ConnectionClass::Endless,
        ] {
            for idle_seconds in [0, 3, 9, 11, 60] {
                let (mut peer, connection) = open_to_script(class).await;
                tokio::time::sleep(Duration::from_secs(idle_seconds)).await;
                let playing = async {
                    let stream = peer.request().await;
                    tokio::time::sleep(Duration::from_secs(29)).await;
                    peer.answer(stream, b"answer").await;
                };
                let (sent, ()) = tokio::join!(connection.send(call("/a")), playing);
                let (response, _) =
                    sent.unwrap_or_else(|error| panic!("{class:?}, idle for {idle_seconds} s: {error:?}"));
                let body = response.into_body().collect().await.unwrap().to_bytes();
                assert_eq!(body, b"answer"[..]);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silent_peer_is_given_up_as_long_after_its_last_frame_with_either_client() {
        for (class, seconds) in [
            (ConnectionClass::Check, 15),
            (ConnectionClass::Authorization, 15),
            (ConnectionClass::Short, 40),
            (ConnectionClass::Unary, 40),
        ] {
            for idle_seconds in [0, 3, 9] {
                let (mut peer, connection) = open_to_script(class).await;
                tokio::time::sleep(Duration::from_secs(idle_seconds)).await;
                let playing = async {
                    let stream = peer.request().await;
                    peer.send(HEADERS, END_HEADERS, stream, &OK).await;
                };
                let (sent, ()) = tokio::join!(connection.send(call("/a")), playing);
                let last_frame = Instant::now();
                let collected = sent.unwrap().0.into_body().collect().await;
                assert!(collected.is_err());
                let waited = last_frame.elapsed();
                let expected = Duration::from_secs(seconds);
                assert!(
                    waited >= expected && waited < expected + Duration::from_millis(100),
                    "{class:?}, idle for {idle_seconds} s: {waited:?}"
                );
            }
        }
    }

    #[tokio::test]
    async fn connection_belongs_to_no_history_before_it_was_compared() {
        let etcd = FakeEtcd::start(async |_, _| Ok(Vec::new())).await;
        let connection = open(&etcd.url).await.unwrap();
        assert!(
            !connection.is_of_history(0, Lineage::Member),
            "the number of the first history"
        );
        connection.set_history(0, Lineage::Member);
        assert!(
            connection.is_of_history(0, Lineage::Member) && !connection.is_of_history(1, Lineage::Member)
        );
        connection.set_history(1, Lineage::Member);
        assert!(
            !connection.is_of_history(0, Lineage::Member) && connection.is_of_history(1, Lineage::Member)
        );
    }

    #[tokio::test]
    async fn refused_shape_leaves_range_stream_and_any_other_refusal_ends_it() {
        let etcd = FakeEtcd::start(async |_, _| Ok(Vec::new())).await;
        let connection = open(&etcd.url).await.unwrap();
        let shape = connection.refused_range_stream("RangeStream does not support sorting");
        assert_eq!(
            (shape, connection.lacks_range_stream()),
            (NoRangeStream::Shape, None)
        );
        let method = connection.refused_range_stream("unknown method RangeStream");
        assert_eq!(method, NoRangeStream::Unimplemented);
        assert_eq!(
            connection.lacks_range_stream(),
            Some(NoRangeStream::Unimplemented)
        );
    }
}
