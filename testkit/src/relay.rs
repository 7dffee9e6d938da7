//! Members behind a relay that changes what they say, and behind a balancer: for faults that a real etcd cannot be made
//! to show.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::stream;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use prost::Message;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::kv::{RANGE_STREAM, WATCH};
use crate::pb::{Event, StatusResponse, WatchResponse};

/// Metadata of calls that a relay holds until [`Relay::let_go`]; its value is a name for the call.
pub const HOLD: &str = "relay-hold";

const STATUS: &str = "/etcdserverpb.Maintenance/Status";
/// Tag of field 1 of a message, which is a message.
const FIELD_1: u8 = 0x0a;
/// Type of an event that is a delete.
const DELETE: i32 = 1;
/// gRPC's prefix of a message: a flag and the length.
const PREFIX_BYTES: usize = 5;

type Body = UnsyncBoxBody<Bytes, hyper::Error>;

/// A relay to one member, dropped with its connections' acceptor.
pub struct Relay {
    url: String,
    state: Arc<State>,
    accepting: JoinHandle<()>,
}

/// Connections that are to be closed.
#[derive(Clone, Copy, Default)]
enum Cut {
    /// Connections with an open watch.
    #[default]
    Watches,
    /// Connections that reach another member than the relay's target.
    OldMember,
}

#[derive(Default)]
struct State {
    /// Revision at which watches stand still; 0 while they do not.
    frozen_at: AtomicI64,
    /// Responses with events that watches have got.
    event_responses: AtomicUsize,
    open_watches: AtomicUsize,
    /// Member that connections opened from now on seem to reach.
    old_member: Mutex<Option<OldMember>>,
    /// Changes when connections are to be closed.
    cut: watch::Sender<Cut>,
    held: Held,
    /// Encoded fields that every header has in addition, as of a newer version.
    header_fields: Mutex<Vec<u8>>,
}

/// Calls with the metadata [`HOLD`], which wait for a permit before they reach the member.
struct Held {
    permits: Semaphore,
    calls: Mutex<HeldCalls>,
}

impl Default for Held {
    fn default() -> Self {
        Self {
            permits: Semaphore::new(0),
            calls: Mutex::default(),
        }
    }
}

/// Calls that the relay holds.
#[derive(Clone, Debug, Default)]
pub struct HeldCalls {
    /// Values of [`HOLD`], in the order of arrival.
    pub arrived: Vec<String>,
    /// Calls that wait, or to which the member has not responded.
    pub in_flight: usize,
    /// The most of them at once.
    pub most: usize,
}

/// A member of an old version, with a fault of such versions.
#[derive(Clone)]
struct OldMember {
    version: String,
    /// Events that it withholds, but not progress notifications.
    withholds: Withholds,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Withholds {
    /// All events (etcd 15220, 17507).
    All,
    /// Deletes, as if each were at the compaction revision (etcd 18089, 19179).
    Deletes,
}

/// State of a connection through the relay.
struct Carried {
    state: Arc<State>,
    old_member: Option<OldMember>,
    open_watches: AtomicUsize,
}

/// A watch that is open on a connection.
struct OpenWatch(Arc<Carried>);

impl OpenWatch {
    fn on(carried: Arc<Carried>) -> Self {
        carried.open_watches.fetch_add(1, Ordering::SeqCst);
        carried.state.open_watches.fetch_add(1, Ordering::SeqCst);
        Self(carried)
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.0.open_watches.fetch_sub(1, Ordering::SeqCst);
        self.0.state.open_watches.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Relay {
    /// A relay to `url`, such as `http://127.0.0.1:2379`, that changes nothing yet.
    pub async fn to(url: &str) -> Self {
        let target = url.strip_prefix("http://").expect("an http:// URL").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("is bound"));
        let state = Arc::<State>::default();
        let of_task = state.clone();
        let accepting = tokio::spawn(async move {
            loop {
                let Ok((client, _)) = listener.accept().await else {
                    continue;
                };
                tokio::spawn(carry(client, target.clone(), of_task.clone()));
            }
        });
        Self {
            url,
            state,
            accepting,
        }
    }

    /// URL to connect to in place of the member's.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// From now on watches deliver no events behind `revision`, which their progress notifications name: what a member
    /// does that the leader no longer reaches.
    pub fn freeze_watches(&self, revision: i64) {
        self.state.frozen_at.store(revision, Ordering::SeqCst);
    }

    /// From now on every header has these encoded fields behind its own: what a newer member sends.
    pub fn add_to_headers(&self, fields: &[u8]) {
        *self.state.header_fields.lock() = fields.to_vec();
    }

    /// Number of responses with events that watches have got so far.
    pub fn event_responses(&self) -> usize {
        self.state.event_responses.load(Ordering::SeqCst)
    }

    /// Number of watch streams that are open now.
    pub fn open_watches(&self) -> usize {
        self.state.open_watches.load(Ordering::SeqCst)
    }

    /// Connections opened from now on reach another member, as behind a balancer: one of an old `version`, whose
    /// progress notifications are ahead of its events.
    pub fn lead_to_old_member(&self, version: &str) {
        self.lead_to(version, Withholds::All);
    }

    /// Connections opened from now on reach the member itself again; those to another member are closed.
    pub fn lead_to_the_member(&self) {
        *self.state.old_member.lock() = None;
        self.state.cut.send_replace(Cut::OldMember);
    }

    /// Connections opened from now on reach a member of `version` that has lost its deletes by compaction.
    pub fn lead_to_member_without_deletes(&self, version: &str) {
        self.lead_to(version, Withholds::Deletes);
    }

    fn lead_to(&self, version: &str, withholds: Withholds) {
        let version = version.to_owned();
        *self.state.old_member.lock() = Some(OldMember { version, withholds });
    }

    /// Calls with the metadata [`HOLD`] so far.
    pub fn held(&self) -> HeldCalls {
        self.state.held.calls.lock().clone()
    }

    /// Lets the next `calls` of them reach the member.
    pub fn let_go(&self, calls: usize) {
        self.state.held.permits.add_permits(calls);
    }

    /// Closes all connections with an open watch.
    pub fn cut_watches(&self) {
        self.state.cut.send_replace(Cut::Watches);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// A balancer on one URL that leads each new connection, or each call, to the next of its targets.
pub struct Balancer {
    url: String,
    accepting: JoinHandle<()>,
}

impl Balancer {
    /// A balancer over `targets`, such as `http://127.0.0.1:2379`.
    pub async fn over(targets: &[&str]) -> Self {
        let (targets, listener, url) = Self::bind(targets).await;
        let accepting = tokio::spawn(async move {
            for target in targets.iter().cycle() {
                if let (Ok((mut client, _)), Ok(mut server)) =
                    (listener.accept().await, TcpStream::connect(target).await)
                {
                    tokio::spawn(async move {
                        // Either side may close the connection.
                        let _ = copy_bidirectional(&mut client, &mut server).await;
                    });
                }
            }
        });
        Self { url, accepting }
    }

    /// A balancer over `targets` that leads each call to the next of them, as those of service meshes do.
    pub async fn of_calls(targets: &[&str]) -> Self {
        let (targets, listener, url) = Self::bind(targets).await;
        let turn = Arc::<AtomicUsize>::default();
        let accepting = tokio::spawn(async move {
            loop {
                if let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(carry_calls(client, targets.clone(), turn.clone()));
                }
            }
        });
        Self { url, accepting }
    }

    async fn bind(targets: &[&str]) -> (Vec<String>, TcpListener, String) {
        let target = |url: &&str| url.strip_prefix("http://").expect("an http:// URL").to_owned();
        let targets: Vec<_> = targets.iter().map(target).collect();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("is bound"));
        (targets, listener, url)
    }

    /// URL to connect to.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Carries the calls of one connection of a client over one connection to each target.
async fn carry_calls(client: TcpStream, targets: Vec<String>, turn: Arc<AtomicUsize>) {
    let mut drivers = JoinSet::new();
    let mut senders = Vec::new();
    for target in targets {
        let Ok(server) = TcpStream::connect(&target).await else {
            return;
        };
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(server));
        let Ok((sender, driver)) = handshake.await else {
            return;
        };
        drivers.spawn(driver);
        senders.push((sender, target));
    }
    let service = service_fn(move |request| {
        let next = turn.fetch_add(1, Ordering::SeqCst) % senders.len();
        let (sender, target) = senders[next].clone();
        async move {
            let response = pass_on(sender, &target, request).await;
            Ok::<_, Infallible>(response.map_or_else(lost, |response| response.map(BodyExt::boxed_unsync)))
        }
    });
    let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .auto_date_header(false)
        .serve_connection(TokioIo::new(client), service);
    // Either side's end ends all.
    tokio::select! {
        _ = serving => {}
        _ = drivers.join_next() => {}
    }
}

/// Sends a request to the target; `None` if its connection is lost.
async fn pass_on(
    mut sender: SendRequest<Incoming>,
    target: &str,
    mut request: Request<Incoming>,
) -> Option<Response<Incoming>> {
    let path = request.uri().path().to_owned();
    *request.uri_mut() = format!("http://{target}{path}").parse::<Uri>().expect("is one");
    sender.send_request(request).await.ok()
}

/// The response to a request whose target is lost.
fn lost() -> Response<Body> {
    let body = Empty::new()
        .map_err(|never: Infallible| match never {})
        .boxed_unsync();
    let mut lost = Response::new(body);
    *lost.status_mut() = StatusCode::BAD_GATEWAY;
    lost
}

/// Carries one connection of a client over one connection to the target.
async fn carry(client: TcpStream, target: String, state: Arc<State>) {
    let Ok(server) = TcpStream::connect(&target).await else {
        return;
    };
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(server));
    let Ok((sender, driver)) = handshake.await else {
        return;
    };
    let old_member = state.old_member.lock().clone();
    let carried = Arc::new(Carried {
        old_member,
        open_watches: AtomicUsize::new(0),
        state,
    });
    let mut cut = carried.state.cut.subscribe();
    let of_service = carried.clone();
    let service =
        service_fn(move |request| forward(sender.clone(), target.clone(), of_service.clone(), request));
    let cut = async {
        loop {
            let _ = cut.changed().await;
            let is_meant = match *cut.borrow_and_update() {
                Cut::Watches => carried.open_watches.load(Ordering::SeqCst) > 0,
                Cut::OldMember => carried.old_member.is_some(),
            };
            if is_meant {
                return;
            }
        }
    };
    let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .auto_date_header(false)
        .serve_connection(TokioIo::new(client), service);
    // Either side's end ends both.
    tokio::select! {
        _ = serving => {}
        _ = driver => {}
        () = cut => {}
    }
}

async fn forward(
    sender: SendRequest<Incoming>,
    target: String,
    carried: Arc<Carried>,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let state = carried.state.clone();
    let name = request.headers_mut().remove(HOLD);
    let _held = match name {
        Some(name) => {
            let held = HeldCall::new(&state.held, name.to_str().expect("a name"));
            carried
                .state
                .held
                .permits
                .acquire()
                .await
                .expect("is open")
                .forget();
            Some(held)
        }
        None => None,
    };
    let Some(response) = pass_on(sender, &target, request).await else {
        return Ok(lost());
    };
    let header_depth = match path.as_str() {
        RANGE_STREAM => 2,
        _ if path.starts_with("/etcdserverpb.") => 1,
        _ => return Ok(response.map(BodyExt::boxed_unsync)),
    };
    let open_watch = (path == WATCH).then(|| OpenWatch::on(carried.clone()));
    let change = move |message| {
        let _ = &open_watch;
        let message = match path.as_str() {
            WATCH => carried.watch_response(message),
            STATUS => carried.status_response(message),
            _ => message,
        };
        let fields = carried.state.header_fields.lock().clone();
        with_header_fields(message, header_depth, &fields)
    };
    Ok(response.map(|body| rewritten(body, change)))
}

/// A call in flight with the metadata [`HOLD`].
struct HeldCall<'a>(&'a Held);

impl HeldCall<'_> {
    fn new<'a>(held: &'a Held, name: &str) -> HeldCall<'a> {
        let mut calls = held.calls.lock();
        calls.arrived.push(name.to_owned());
        calls.in_flight += 1;
        calls.most = calls.most.max(calls.in_flight);
        HeldCall(held)
    }
}

impl Drop for HeldCall<'_> {
    fn drop(&mut self) {
        self.0.calls.lock().in_flight -= 1;
    }
}

impl Carried {
    fn watch_response(&self, message: Bytes) -> Bytes {
        let frozen_at = self.state.frozen_at.load(Ordering::SeqCst);
        let mut response = WatchResponse::decode(message.clone()).expect("a watch's response");
        let revision = |event: &Event| event.kv.as_ref().map_or(0, |kv| kv.mod_revision);
        let is_passed = |event: &Event| frozen_at == 0 || revision(event) <= frozen_at;
        if response.events.iter().any(is_passed) {
            self.state.event_responses.fetch_add(1, Ordering::SeqCst);
        }
        let withholds = self.old_member.as_ref().map(|member| member.withholds);
        if withholds.is_some() && !response.events.is_empty() {
            response
                .events
                .retain(|event| withholds == Some(Withholds::Deletes) && event.r#type != DELETE);
            if response.events.is_empty() {
                return Bytes::new();
            }
            return response.encode_to_vec().into();
        }
        if frozen_at == 0 || response.created || response.canceled {
            return message;
        }
        response.events.retain(is_passed);
        response.header.as_mut().expect("has a header").revision = frozen_at;
        response.encode_to_vec().into()
    }

    fn status_response(&self, message: Bytes) -> Bytes {
        let Some(member) = self.old_member.clone() else {
            return message;
        };
        let mut response = StatusResponse::decode(message).expect("a status");
        response.version = member.version;
        response.encode_to_vec().into()
    }
}

/// `message` with these encoded fields at the end of its header, which lies `depth` messages deep.
fn with_header_fields(message: Bytes, depth: u32, fields: &[u8]) -> Bytes {
    if depth == 0 {
        return [&*message, fields].concat().into();
    }
    if fields.is_empty() || message.first() != Some(&FIELD_1) {
        return message;
    }
    let mut rest = message.slice(1..);
    let length = prost::encoding::decode_varint(&mut rest).expect("a length");
    let inner = rest.split_to(usize::try_from(length).expect("is short"));
    let inner = with_header_fields(inner, depth - 1, fields);
    let mut changed = vec![FIELD_1];
    prost::encoding::encode_varint(inner.len() as u64, &mut changed);
    changed.extend_from_slice(&inner);
    changed.extend_from_slice(&rest);
    changed.into()
}

/// `body` with every message changed by `change`.
fn rewritten(body: Incoming, change: impl Fn(Bytes) -> Bytes + Send + 'static) -> Body {
    let begun = (body, BytesMut::new(), change);
    let frames = stream::unfold(begun, async |(mut body, mut buffer, change)| {
        loop {
            let mut messages = BytesMut::new();
            while let Some(message) = next_message(&mut buffer) {
                let message = change(message);
                if message.is_empty() {
                    // Withheld.
                    continue;
                }
                messages.put_u8(0);
                messages.put_u32(u32::try_from(message.len()).expect("is small"));
                messages.extend_from_slice(&message);
            }
            if !messages.is_empty() {
                return Some((Ok(Frame::data(messages.freeze())), (body, buffer, change)));
            }
            match body.frame().await? {
                Ok(frame) => match frame.into_data() {
                    Ok(data) => buffer.extend_from_slice(&data),
                    Err(trailers) => return Some((Ok(trailers), (body, buffer, change))),
                },
                Err(error) => return Some((Err(error), (body, buffer, change))),
            }
        }
    });
    BodyExt::boxed_unsync(StreamBody::new(Box::pin(frames)))
}

/// Takes a whole message off the front of `buffer`.
fn next_message(buffer: &mut BytesMut) -> Option<Bytes> {
    let length = buffer.get(1..PREFIX_BYTES)?;
    let length = u32::from_be_bytes(length.try_into().expect("four bytes")) as usize;
    if buffer.len() < PREFIX_BYTES + length {
        return None;
    }
    buffer.advance(PREFIX_BYTES);
    Some(buffer.split_to(length).freeze())
}
