//! The call to etcd of a stream that memory cannot serve, or cannot serve yet.

use std::task::{Context, Poll, ready};
use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::{Buf as _, Bytes, BytesMut};
use etcd_wire::etcdserverpb::watch_request::RequestUnion;
use etcd_wire::etcdserverpb::{WatchCancelRequest, WatchProgressRequest};
use etcd_wire::grpc::frame::{PREFIX_BYTES, Prefix};
use etcd_wire::grpc::{Status, status::GRPC_STATUS};
use http::{HeaderMap, request::Parts};
use http_body::{Body as _, Frame};
use http_body_util::StreamBody;
use rangecache_base::telemetry::Reason;
use rangecache_edge::limits::{ByteKind, Deadline, Exceeded, HeldBytes, Slot};
use rangecache_mirror::WatchedLoads;
use rangecache_mirror::lineage::{ClusterState, History};
use rangecache_upstream::{BoxError, ConnectionClass, InFlight, Outgoing, UpstreamBody};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::PollSender;

use super::relay::{Relay, RelayAction};
use super::request::{WatchRequest, encode};
use super::returning::Returning;
use super::tap::{Head, Parsed, last_event};
use crate::forward::{RequestBody, SendError, UpstreamResponse};
use crate::handles::Client;

/// Requests of the client that wait for etcd's flow control.
const REQUESTS: usize = 16;
/// Time within which etcd has to continue every watcher.
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest message that is read as a whole, in order to drop it.
const MAX_DROPPED_BYTES: usize = 4 << 20;

/// The call, with the slot of a handover; otherwise why there is none: `None` if etcd's response was late, or what it continues is not
/// known to be of the client's history.
type Opened = Result<(UpstreamResponse, Option<Slot>), Option<SendError>>;

/// Watch call to etcd with the caller's own metadata.
pub(super) struct EtcdStream {
    pub(super) relay: Relay,
    /// Attempts to return to memory.
    pub(super) returning: Returning,
    /// `None` once the client has closed its half.
    requests: Option<PollSender<Bytes>>,
    opening: Option<Pin<Box<dyn Future<Output = Opened> + Send>>>,
    response: Option<(UpstreamBody, InFlight)>,
    /// The slot of a handover, and the time limit for it: until etcd has continued every watcher.
    slot: Option<(Slot, Pin<Box<Sleep>>)>,
    /// Bytes that have arrived from etcd, from the first one that was not decided about.
    buffer: BytesMut,
    /// Bytes of the current message that are still to come, and whether the client gets them.
    rest: (usize, bool),
    /// The current message is dropped unless it has events above this revision.
    drop_through: Option<i64>,
    /// The current message is the last one before the barrier of this revision.
    barrier: Option<i64>,
    /// Counts what etcd has sent, or may send, while the client does not read.
    held: HeldBytes,
    cluster_state: Arc<ClusterState>,
    /// etcd's history when the call began.
    history: Arc<History>,
}

/// Next item of a stream at etcd.
#[derive(Debug)]
pub(super) enum StreamStep {
    /// Bytes for the client.
    Data(Bytes),
    /// A cancel that etcd's refusal becomes.
    Cancel {
        id: i64,
        reason: String,
        compact_revision: i64,
    },
    /// Everything at or below this revision was sent, for every watcher.
    Barrier(i64),
    /// etcd's history was replaced before it has continued a watcher.
    Replaced,
    /// The stream ends with these trailers, or breaks off within a message.
    End(Result<HeaderMap, BoxError>),
}

impl EtcdStream {
    /// Opens the call of `client`, and lets etcd continue the watchers of `relay`. `parts` is the head of the client's
    /// request. A handover waits for its slot, and for the proof that etcd may continue what was `watched` in `history` (W10); what
    /// happens meanwhile is sent by etcd later.
    pub(super) fn open(
        client: &Client,
        parts: Parts,
        relay: Relay,
        history: Arc<History>,
        watched: WatchedLoads,
        reason: Reason,
    ) -> EtcdStream {
        let (requests, receiver) = mpsc::channel(REQUESTS);
        let mut first = BytesMut::new();
        for create in relay.creates() {
            first.extend_from_slice(&encode(RequestUnion::CreateRequest(create)));
        }
        let is_handover = !first.is_empty();
        if is_handover {
            // The queue is empty.
            let _ = requests.try_send(first.freeze());
        }
        let frames = futures_util::stream::unfold(receiver, |mut receiver| async {
            let message = receiver.recv().await?;
            Some((Ok::<_, BoxError>(Frame::data(message)), receiver))
        });
        let body = tonic::body::Body::new(StreamBody::new(Box::pin(frames)));
        let proxy = &client.proxy;
        let (forward, slots) = (Arc::clone(&proxy.forward), Arc::clone(&proxy.watch_handovers));
        let account = Arc::clone(&client.account);
        let (mirrors, of) = (Arc::clone(&proxy.mirrors), history.id);
        let opening = async move {
            let slot = match is_handover {
                true => Some(slots.acquire(&account, Deadline::NONE).await.map_err(|_| None)?),
                false => None,
            };
            let body = RequestBody::Once(Outgoing::tonic(body));
            let sending = forward.send(parts, body, ConnectionClass::Endless);
            if !is_handover {
                // etcd's response begins with its first message.
                return Ok((sending.await?, slot));
            }
            let proven = async {
                let sent = sending.await?;
                let connection = sent.in_flight.connection();
                match mirrors.may_continue(connection, of, &watched).await {
                    true => Ok(sent),
                    false => Err(None),
                }
            };
            let opened = tokio::time::timeout(CONTINUE_TIMEOUT, proven).await;
            Ok((opened.unwrap_or(Err(None))?, slot))
        };
        EtcdStream {
            relay,
            returning: Returning::new(reason),
            requests: Some(PollSender::new(requests)),
            opening: Some(Box::pin(opening)),
            response: None,
            slot: None,
            buffer: BytesMut::new(),
            rest: (0, false),
            drop_through: None,
            barrier: None,
            held: client.account.hold(ByteKind::Forwarded),
            cluster_state: Arc::clone(&proxy.forward.cluster_state),
            history,
        }
    }

    /// Whether the next request of the client may be sent; otherwise registers `cx` to be woken once there is room.
    pub(super) fn accepts_request(&mut self, cx: &mut Context<'_>) -> bool {
        let has_room =
            |requests: &mut PollSender<Bytes>| matches!(requests.poll_reserve(cx), Poll::Ready(Ok(())));
        self.relay.accepts_request() && self.requests.as_mut().is_some_and(has_room)
    }

    /// Sends a request of the client.
    pub(super) fn send(&mut self, request: &WatchRequest) {
        let id = self.relay.request(request);
        let union = match request {
            WatchRequest::Create(create) => {
                let id = id.unwrap_or(create.watch_id);
                RequestUnion::CreateRequest(create.to_wire(id, create.start_revision))
            }
            WatchRequest::Cancel(watch_id) => {
                let watch_id = *watch_id;
                RequestUnion::CancelRequest(WatchCancelRequest { watch_id })
            }
            WatchRequest::Progress => RequestUnion::ProgressRequest(WatchProgressRequest {}),
            WatchRequest::Nothing => return,
        };
        self.send_bytes(encode(union));
    }

    /// Sends bytes of the client's requests.
    pub(super) fn send_bytes(&mut self, bytes: Bytes) {
        if let Some(requests) = &mut self.requests {
            // There is room: see `accepts_request`. A lost connection is reported by the response.
            let _ = requests.send_item(bytes);
        }
    }

    /// Requests the barrier at which the stream returns. There must be room for a request.
    pub(super) fn request_barrier(&mut self) {
        self.relay.await_barrier();
        self.send_bytes(encode(RequestUnion::ProgressRequest(WatchProgressRequest {})));
    }

    /// Whether the revisions that the client has are those of etcd's current history.
    pub(super) fn is_of_current_history(&self) -> bool {
        Arc::ptr_eq(&self.cluster_state.current(), &self.history)
    }

    /// Closes the client's half.
    pub(super) fn close_requests(&mut self) {
        self.requests = None;
    }

    /// Whether bytes of a message have been sent, but not its last.
    pub(super) fn is_in_message(&self) -> bool {
        self.rest.0 > 0 && self.rest.1
    }

    /// Polls for the next bytes or the end. The client has room for them.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<StreamStep> {
        self.held.shrink_to(0);
        loop {
            if !self.count_window() {
                return Poll::Ready(self.unread());
            }
            if let Some(next) = self.next_buffered() {
                return Poll::Ready(next);
            }
            if self.relay.has_continued() {
                self.slot = None;
            } else if let Some((_, late)) = &mut self.slot
                && late.as_mut().poll(cx).is_ready()
            {
                return Poll::Ready(interrupted());
            }
            match self.poll_response(cx) {
                Poll::Ready(None) => {}
                Poll::Ready(Some(end)) => return Poll::Ready(end),
                Poll::Pending => {
                    self.held.shrink_to(self.buffer.len() as u64);
                    return Poll::Pending;
                }
            }
        }
    }

    /// Receives what etcd has sent next; returns the end if there is nothing more.
    fn poll_response(&mut self, cx: &mut Context<'_>) -> Poll<Option<StreamStep>> {
        if let Some(opening) = &mut self.opening {
            let opened = ready!(opening.as_mut().poll(cx));
            self.opening = None;
            return Poll::Ready(self.begin(opened));
        }
        let Some((body, _)) = &mut self.response else {
            return Poll::Ready(Some(interrupted()));
        };
        let frame = ready!(Pin::new(body).poll_frame(cx));
        let end = match frame.map(|frame| frame.map(Frame::into_data)) {
            Some(Ok(Ok(data))) => {
                self.buffer.extend_from_slice(&data);
                return Poll::Ready(None);
            }
            Some(Ok(Err(frame))) => Ok(status_in(&frame.into_trailers().unwrap_or_default())),
            Some(Err(error)) if self.is_in_message() => Err(error),
            Some(Err(error)) => Ok(Status::ConnectionLost(error.to_string()).trailers()),
            None => Ok(Status::WatchInterrupted.trailers()),
        };
        Poll::Ready(Some(StreamStep::End(end)))
    }

    /// Begins to read the response; returns the end if there is none.
    fn begin(&mut self, opened: Opened) -> Option<StreamStep> {
        let trailers = match opened {
            Err(None) if !self.is_of_current_history() => return Some(StreamStep::Replaced),
            Err(None) => Status::WatchInterrupted.trailers(),
            Err(Some(error)) => error.status().trailers(),
            Ok((opened, _)) if opened.response.headers().contains_key(GRPC_STATUS) => {
                status_in(opened.response.headers())
            }
            Ok((opened, slot)) => {
                let late = || Box::pin(tokio::time::sleep(CONTINUE_TIMEOUT));
                self.slot = slot.map(|slot| (slot, late()));
                self.response = Some((opened.response.into_body(), opened.in_flight));
                return None;
            }
        };
        Some(StreamStep::End(Ok(trailers)))
    }

    /// Counts what has arrived, and what etcd may send while the client does not read; returns whether it fits.
    fn count_window(&mut self) -> bool {
        let window = u64::from(ConnectionClass::Endless.window().stream);
        let bytes = match self.buffer.len() as u64 {
            0 => 0,
            arrived => window.max(arrived),
        };
        let more = bytes.saturating_sub(self.held.bytes());
        more == 0 || self.held.try_grow(more).is_ok()
    }

    /// The end of a stream that its client reads too slowly. etcd's clients connect again, and resume.
    fn unread(&self) -> StreamStep {
        StreamStep::End(match self.is_in_message() {
            true => Err(Exceeded::Bytes.into()),
            false => Ok(Status::UnreadStream.trailers()),
        })
    }

    /// The next thing in the bytes that have arrived; `None` if more are needed.
    fn next_buffered(&mut self) -> Option<StreamStep> {
        loop {
            let (rest, passes) = self.rest;
            if rest == 0
                && let Some(revision) = self.barrier.take()
            {
                self.relay.stay();
                return Some(StreamStep::Barrier(revision));
            }
            if self.buffer.is_empty() {
                return None;
            }
            if rest > 0 {
                let taken = rest.min(self.buffer.len());
                self.rest.0 -= taken;
                let bytes = self.buffer.split_to(taken);
                if passes {
                    return Some(StreamStep::Data(bytes.freeze()));
                }
                continue;
            }
            let prefix = Prefix::parse(&self.buffer)?;
            if prefix.is_compressed {
                return Some(interrupted());
            }
            let length = prefix.length_bytes as usize;
            let arrived = length.min(self.buffer.len() - PREFIX_BYTES);
            let message = &self.buffer[PREFIX_BYTES..PREFIX_BYTES + arrived];
            let is_whole = arrived == length;
            if let Some(through) = self.drop_through {
                if length > MAX_DROPPED_BYTES {
                    return Some(interrupted());
                }
                if !is_whole {
                    return None;
                }
                self.drop_through = None;
                if last_event(message).is_none_or(|last| last > through) {
                    return Some(interrupted());
                }
                self.buffer.advance(PREFIX_BYTES + length);
                continue;
            }
            let (verdict, head) = match Head::parse(message, is_whole) {
                Parsed::Incomplete => return None,
                Parsed::Malformed => return Some(interrupted()),
                Parsed::Head(head) => (self.relay.response(&head), head),
                Parsed::LongKey(head) => (self.relay.long_key(&head), head),
            };
            if let Some(next) = self.apply(verdict, &head, PREFIX_BYTES + length) {
                return Some(next);
            }
        }
    }

    /// Does with the message of `framed_bytes` at the front of the buffer what was decided.
    fn apply(&mut self, verdict: RelayAction, head: &Head, framed_bytes: usize) -> Option<StreamStep> {
        if let RelayAction::Barrier { revision, .. } = verdict {
            self.barrier = Some(revision);
        }
        match verdict {
            RelayAction::Pass | RelayAction::Barrier { is_owed: true, .. } => {
                if head.revision > 0 {
                    // Before a byte leaves (I11).
                    let (cluster_id, revision) = (head.cluster_id, head.revision);
                    self.cluster_state
                        .record_forwarded(&self.history, cluster_id, revision);
                }
                self.relay.record_sent(head.watch_id, Instant::now());
                self.rest = (framed_bytes, true);
            }
            RelayAction::Drop | RelayAction::Barrier { is_owed: false, .. } => {
                self.rest = (framed_bytes, false)
            }
            RelayAction::DropThrough(through) => self.drop_through = Some(through),
            RelayAction::Cancel {
                id,
                reason,
                compact_revision,
            } => {
                self.rest = (framed_bytes, false);
                return Some(StreamStep::Cancel {
                    id,
                    reason,
                    compact_revision,
                });
            }
            RelayAction::End => return Some(interrupted()),
        }
        None
    }
}

/// The end after which etcd's clients connect again and resume.
fn interrupted() -> StreamStep {
    StreamStep::End(Ok(Status::WatchInterrupted.trailers()))
}

/// The fields of a status.
fn status_in(headers: &HeaderMap) -> HeaderMap {
    let fields = headers.iter();
    fields
        .filter(|(name, _)| name.as_str().starts_with("grpc-"))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, future::poll_fn};

    use etcd_wire::etcdserverpb::{ResponseHeader, WatchResponse};
    use etcd_wire::grpc::{WATCH, frame::framed, metadata::kept_head};
    use rangecache_upstream::fake::{self, FakeEtcd, Stream, StreamEnd};

    use super::super::request::{Carried, Create, Ids};
    use super::{super::testing::headers, *};
    use crate::testing::Scene;

    fn created(revision: i64) -> WatchResponse {
        WatchResponse {
            header: Some(ResponseHeader {
                cluster_id: 7,
                revision,
                ..ResponseHeader::default()
            }),
            created: true,
            ..WatchResponse::default()
        }
    }

    /// An etcd whose watches run `script` once they have a request.
    async fn etcd(script: fn(&Stream) -> StreamEnd) -> FakeEtcd {
        let unary = async |path: String, _| match path.ends_with("/Status") {
            true => fake::status_of("3.7.3", 100),
            false => Err((12, "unknown method")),
        };
        let streams = move |mut stream: Stream| async move {
            stream.requests.recv().await;
            script(&stream)
        };
        FakeEtcd::start_with_streams(unary, streams).await
    }

    fn open(scene: &Scene, carried: Vec<Carried>) -> EtcdStream {
        let relay = Relay::new(Ids::default(), carried, BTreeSet::new(), 0);
        let history = scene.mirrors.cluster_state.current();
        let parts = kept_head(WATCH, &headers(&[]));
        EtcdStream::open(
            &scene.client(),
            parts,
            relay,
            history,
            WatchedLoads::default(),
            Reason::Loading,
        )
    }

    async fn create(stream: &mut EtcdStream) {
        assert!(poll_fn(|cx| Poll::Ready(stream.accepts_request(cx))).await);
        let create = Create {
            key: "k".into(),
            ..Create::default()
        };
        stream.send(&WatchRequest::Create(create));
    }

    async fn next(stream: &mut EtcdStream) -> StreamStep {
        poll_fn(|cx| stream.poll_next(cx)).await
    }

    #[tokio::test]
    async fn response_passes_unchanged_once_its_revision_is_recorded_and_the_end_is_etcds() {
        let etcd = etcd(|stream| {
            stream.send(&created(9));
            Err((14, "etcdserver: no leader"))
        })
        .await;
        let scene = Scene::before(&etcd.url.to_string(), &[]);
        let mut stream = open(&scene, Vec::new());
        create(&mut stream).await;
        let StreamStep::Data(data) = next(&mut stream).await else {
            panic!("no response");
        };
        assert_eq!(scene.mirrors.cluster_state.min_served_revision(), Some(9));
        assert_eq!(data, framed(&created(9)));
        assert!(!stream.is_in_message());
        let StreamStep::End(Ok(trailers)) = next(&mut stream).await else {
            panic!("no end");
        };
        assert_eq!(trailers["grpc-status"], "14");
        assert_eq!(trailers["grpc-message"], "etcdserver: no leader");
    }

    #[tokio::test]
    async fn status_cannot_follow_a_part_of_a_message() {
        let scene = Scene::new(&[]);
        let mut stream = open(&scene, Vec::new());
        stream.buffer.extend_from_slice(&[0; PREFIX_BYTES - 1]);
        assert!(stream.next_buffered().is_none(), "its length is not known");
        stream.buffer.clear();
        stream.rest = (7, true);
        stream.buffer.extend_from_slice(b"part");
        assert!(matches!(stream.next_buffered(), Some(StreamStep::Data(data)) if data == "part"));
        assert!(stream.is_in_message() && stream.next_buffered().is_none());
        assert!(matches!(stream.unread(), StreamStep::End(Err(_))));
        stream.buffer.extend_from_slice(b"endnext");
        assert!(matches!(stream.next_buffered(), Some(StreamStep::Data(data)) if data == "end"));
        assert!(!stream.is_in_message());
        assert!(matches!(stream.unread(), StreamStep::End(Ok(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn handover_without_a_turn_in_time_interrupts_the_stream_or_says_that_history_was_replaced() {
        let scene = Scene::new(&[]);
        let (slots, client) = (&scene.proxy.watch_handovers, scene.client());
        let _taken: Vec<_> = std::iter::from_fn(|| slots.try_acquire(&client.account)).collect();
        let carried = || {
            vec![Carried {
                id: 0,
                create: Create::default(),
                through: 5,
                quiet_since: None,
            }]
        };
        let mut stream = open(&scene, carried());
        assert!(matches!(next(&mut stream).await, StreamStep::End(Ok(_))));
        let mut stream = open(&scene, carried());
        let cluster_state = &scene.mirrors.cluster_state;
        cluster_state.contradict(&cluster_state.before_check());
        assert!(matches!(next(&mut stream).await, StreamStep::Replaced));
    }

    #[test]
    fn only_the_fields_of_a_status_reach_the_client() {
        let mut trailers = Status::WatchInterrupted.trailers();
        let expected = trailers.clone();
        trailers.insert("server", http::HeaderValue::from_static("etcd"));
        assert_eq!(status_in(&trailers), expected);
    }
}
