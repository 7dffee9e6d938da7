//! A Watch stream while memory serves it. It runs inside the body of the response, without a task of its own: whatever it
//! sends is produced when the client has room.

use std::task::{Context, Poll};
use std::{fmt, pin::Pin, sync::Arc, time::Duration};

use bytes::Buf as _;
use etcd_store::cache::{Rope, WatchFields};
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::Reason;
use rangecache_mirror::fan_out::{Picked, Taken};
use rangecache_mirror::{lineage::HistoryId, view::ReaderEnd};
use tokio::time::{Instant, Sleep};

use super::plan::{DUPLICATE_ID, NotServed};
use super::request::{Create, WatchRequest};
use super::start::{Answer, Answering, Started};
use super::watchers::{Watcher, Watchers};
use super::{downstream::Downstream, etcd_stream::EtcdStream, message::EventMessages, progress::Progress};

/// Requests, and watchers without events for the client, that one poll looks at, before other streams get their turn.
const MAX_STEPS: usize = 64;
/// Events of one response: more wait for the next one, unless they are of one revision.
const MAX_EVENTS: usize = 1000;
/// Bytes of one response.
const MAX_RESPONSE_BYTES: u64 = 64 << 10;
/// Time after which a mirror without a feed is looked at again.
const FEED_TIMEOUT: Duration = Duration::from_secs(10);

/// Watch stream, with what each of its sources needs: memory as long as `etcd` is `None`.
pub(super) struct Session {
    pub(super) down: Downstream,
    /// etcd's call, while etcd serves the stream. There are no watchers in memory then.
    pub(super) etcd: Option<Box<EtcdStream>>,
    /// Why etcd has to continue the stream, from the next moment on.
    pub(super) leave: Option<Leave>,
    /// A stream that leaves, and takes no requests, until its mirrors have what they must have, or are late.
    pub(super) leaving: Option<(Leave, Pin<Box<Sleep>>)>,
    pub(super) watchers: Watchers,
    starting: Option<Starting>,
    /// Events that are being sent. Nothing else is sent before their last piece (W4).
    message: Option<EventMessages>,
    /// Watcher whose events were sent last: the others get their turn first.
    last_turn: i64,
    pub(super) progress: Progress,
    /// Waits for the feed of one of the stream's mirrors, while the events of the others wait for it, or for [`FEED_TIMEOUT`].
    resuming: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// History that the watchers were compared with before the last request was answered.
    compared_with: Option<HistoryId>,
    pub(super) has_ended: bool,
}

/// Why etcd has to continue the stream.
pub(super) struct Leave {
    pub(super) reason: Reason,
    /// Create request that was not answered.
    pub(super) create: Option<Create>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

/// A create request whose watcher is being started.
struct Starting {
    create: Create,
    answering: Answering,
    /// etcd decides, which knows the caller's rights.
    is_etcds: bool,
}

impl Session {
    /// A stream without watchers, which memory serves.
    pub(super) fn new(down: Downstream) -> Session {
        let interval = down.stream.client.proxy.watch_progress_interval;
        Session {
            down,
            etcd: None,
            leave: None,
            leaving: None,
            watchers: Watchers::default(),
            starting: None,
            message: None,
            last_turn: 0,
            progress: Progress::new(interval.unwrap_or_default()),
            resuming: None,
            compared_with: None,
            has_ended: false,
        }
    }

    /// Lets memory serve the stream's requests and watchers, until there is something to send, or etcd has to continue the stream.
    /// While it is leaving, it takes no requests, and leaves once its mirrors have what they must have.
    pub(super) fn poll_memory(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.progress.poll_requested(&mut self.down, &self.watchers, cx);
        self.poll_requests(cx);
        if !self.has_output() {
            self.poll_events(cx);
        }
        let is_idle = !self.has_output() && !self.progress.poll_requested(&mut self.down, &self.watchers, cx);
        if is_idle {
            self.progress
                .poll_periodic(&mut self.down, &mut self.watchers, cx);
        }
        match is_idle && !self.has_output() {
            true => Poll::Pending,
            false => Poll::Ready(()),
        }
    }

    /// Lets etcd continue the stream for `reason`. `create` was not answered.
    fn leave(&mut self, reason: Reason, create: Option<Create>) {
        self.leave = Some(Leave { reason, create });
    }

    /// Whether there is something to send, or etcd has to continue the stream.
    fn has_output(&self) -> bool {
        self.message.is_some() || self.leave.is_some() || self.down.has_output()
    }

    /// Forgets what memory has of the stream but for its watchers, which etcd continues; returns them.
    pub(super) fn take_watchers(&mut self) -> Watchers {
        let interval = self.down.stream.client.proxy.watch_progress_interval;
        self.progress = Progress::new(interval.unwrap_or_default());
        (self.leaving, self.starting, self.resuming) = (None, None, None);
        (self.last_turn, self.compared_with) = (0, None);
        std::mem::take(&mut self.watchers)
    }

    /// Next piece of the events that are being sent.
    pub(super) fn next_piece(&mut self) -> Option<Rope> {
        let message = self.message.as_mut()?;
        let piece = message.next_piece();
        let is_last = message.is_complete();
        if is_last {
            self.message = None;
        }
        self.down.bytes.produced(piece.as_ref()?.remaining(), is_last);
        piece
    }

    /// The end of a stream whose client wants a leader, if etcd has none; and of the feed of another rangecache, if the mirror has
    /// lost its feed: as long as a watch lives, a rangecache takes its memory for that of the etcd behind it.
    pub(super) fn ended_by_etcd(&self) -> Option<Status> {
        let has_none = |watcher: &Watcher| watcher.reader.has_no_leader();
        if self.down.stream.metadata.require_leader && self.watchers.all().any(has_none) {
            return Some(Status::NoLeader);
        }
        let is_without_feed = |watcher: &Watcher| watcher.reader.is_without_feed();
        let ends = self.down.stream.metadata.marks.feed && self.watchers.all().any(is_without_feed);
        ends.then_some(Status::MirrorBehind)
    }

    /// Handles the requests that have arrived, until there is something to send.
    fn poll_requests(&mut self, cx: &mut Context<'_>) {
        let mut steps = 0;
        while !self.has_output() && steps < MAX_STEPS && self.poll_request(cx) {
            steps += 1;
        }
        if steps == MAX_STEPS {
            cx.waker().wake_by_ref();
        }
    }

    /// Handles the next request, or what it has to wait for; returns whether there was any.
    fn poll_request(&mut self, cx: &mut Context<'_>) -> bool {
        // A progress request is answered before the next request, as etcd does.
        if self.progress.requested.is_some() || self.leaving.is_some() || self.starting.is_some() {
            self.down.requests.read_ahead(cx);
            return self.progress.requested.is_none() && self.poll_awaited(cx);
        }
        match self.down.next_request(cx) {
            Some(Ok(request)) => self.handle(request),
            Some(Err(_)) => self.leave(Reason::Undecodable, None),
            None => return false,
        }
        true
    }

    /// Whether the stream need not wait any longer before it leaves, or has the answer to a create request.
    fn poll_awaited(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some((Leave { reason, .. }, expires)) = &mut self.leaving {
            let (reason, is_late) = (*reason, expires.as_mut().poll(cx).is_ready());
            if is_late || self.awaited().is_none() {
                self.leave(reason, None);
            }
            return self.leave.is_some();
        }
        let answering = self.starting.as_mut().map(|starting| starting.answering.as_mut());
        if let Some(Poll::Ready(answer)) = answering.map(|answering| answering.poll(cx))
            && let Some(starting) = self.starting.take()
        {
            self.answered(starting.create, answer, starting.is_etcds);
            return true;
        }
        false
    }

    fn handle(&mut self, request: WatchRequest) {
        self.compare_histories();
        match request {
            WatchRequest::Create(create) => self.create(create),
            WatchRequest::Cancel(id) => self.cancel(id),
            WatchRequest::Progress => self.request_progress(),
            WatchRequest::Nothing => {}
        }
    }

    /// Takes up a progress request of the client.
    pub(super) fn request_progress(&mut self) {
        self.progress.take_up(&mut self.down, &self.watchers);
    }

    /// Begins to create a watcher.
    fn create(&mut self, create: Create) {
        let is_taken = create.watch_id != 0
            && (self.watchers.contains(create.watch_id) || self.down.is_cancelled(create.watch_id));
        match self.down.stream.plan(&create, is_taken) {
            Err(not_served) => self.answered(create, Err(not_served), false),
            Ok(_) if !self.down.bytes.has_room_for_watcher(&create) => {
                self.down.bytes.record_refusal();
                self.leave(Reason::OverBudget, Some(create));
            }
            Ok(place) => {
                self.starting = Some(Starting {
                    answering: self.down.stream.start(place, &create),
                    create,
                    is_etcds: false,
                });
            }
        }
    }

    /// Answers `create`, or lets etcd do so. If the caller's rights count, etcd first gets the request alone: what it refuses must
    /// not make the other watchers depend again on a token that may have expired since. `is_etcds` says that it has had it.
    pub(super) fn answered(&mut self, create: Create, answer: Answer, is_etcds: bool) {
        let history = self.compare_histories();
        match answer {
            // History was replaced a moment ago: the watcher begins again in the new one.
            Ok(started) if started.reader.history() != history => self.down.handle_first(Some(create)),
            Ok(started) => self.created(create, started),
            Err(NotServed::Refuse(cancel_reason)) => self.down.refuse(cancel_reason),
            Err(NotServed::Refused(response)) => self.down.pass_refusal(response),
            Err(NotServed::Compacted(revision)) => self.created_compacted(&create, revision),
            Err(NotServed::Etcd(reason)) if !is_etcds && self.down.stream.needs_right() => {
                self.starting = Some(Starting {
                    answering: self.down.stream.ask_etcd(&create, reason),
                    create,
                    is_etcds: true,
                });
            }
            Err(NotServed::Etcd(reason)) => self.leave(reason, Some(create)),
            Err(NotServed::End(status)) => self.down.end_with(&status),
        }
    }

    /// Create request whose watcher is being started, for etcd.
    pub(super) fn take_starting(&mut self) -> Option<Create> {
        self.starting.take().map(|starting| starting.create)
    }

    /// Answers a create request whose watcher has joined its hub.
    fn created(&mut self, create: Create, started: Started) {
        let kind = match create.start_revision {
            0 => "now",
            _ => "revision",
        };
        self.down.metrics().record_created("memory", kind);
        if let Some(id) = self.send_created(&create, started.header_revision) {
            let open = self.down.open_watcher(started.mirror);
            self.add(id, Watcher::started(create, started, open));
        }
    }

    /// Answers a create request whose start revision etcd has compacted: created, then cancelled.
    fn created_compacted(&mut self, create: &Create, compact_revision: i64) {
        self.down.metrics().record_created("memory", "compacted");
        if let Some(id) = self.send_created(create, self.down.shown()) {
            self.down.bytes.add_watcher(create);
            self.down
                .cancel_compacted(id, create.clone(), compact_revision, "compacted");
        }
    }

    /// Sends the `created` of a watcher; returns its id, unless it is taken.
    fn send_created(&mut self, create: &Create, revision: i64) -> Option<i64> {
        let watchers = &self.watchers;
        let id = self.down.allocate_id(create.watch_id, |id| watchers.contains(id));
        let Some(id) = id else {
            self.down.refuse(DUPLICATE_ID);
            return None;
        };
        let header = self.down.header(revision);
        self.down.send(&WatchFields {
            header,
            watch_id: id,
            created: true,
            ..WatchFields::default()
        });
        Some(id)
    }

    /// Adds a watcher whose `created` the client has, or gets next.
    pub(super) fn add(&mut self, id: i64, watcher: Watcher) {
        if watcher.create.options.progress_notify {
            self.progress.begin(watcher.quiet_since);
        }
        self.down.bytes.add_watcher(&watcher.create);
        self.watchers.insert(id, watcher);
    }

    /// Answers a cancel request. etcd does not answer one for an unknown id.
    fn cancel(&mut self, id: i64) {
        match self.watchers.remove(id) {
            Some(watcher) => {
                self.down.bytes.remove_watcher(&watcher.create);
                self.down.send_cancelled(id);
            }
            None => self.down.release(id),
        }
    }

    /// Takes events of the next watcher that has any, or handles its end.
    fn poll_events(&mut self, cx: &mut Context<'_>) {
        match self.down.bytes.poll_room(cx) {
            Poll::Pending => {}
            Poll::Ready(Err(_)) => self.leave(Reason::OverBudget, None),
            Poll::Ready(Ok(())) => {
                self.take_events(cx);
                if self.message.is_none() {
                    self.down.bytes.release_room();
                }
            }
        }
    }

    fn take_events(&mut self, cx: &mut Context<'_>) {
        let awaits_feed = self.awaits_feed(cx);
        for _ in 0..MAX_STEPS {
            let next = self.next_turn(awaits_feed);
            let Some((id, watcher)) = next.and_then(|id| Some((id, self.watchers.get_mut(id)?))) else {
                return;
            };
            self.last_turn = id;
            let max_events = match self.progress.requested {
                Some(_) => 1,
                None => MAX_EVENTS,
            };
            let is_feed = self.down.stream.metadata.marks.feed;
            let bytes = &mut self.down.bytes;
            let has_room = |picked: &Picked| bytes.admit(picked.bytes(), is_feed);
            match watcher.reader.take_if(max_events, MAX_RESPONSE_BYTES, has_room) {
                Taken::Nothing { .. } => {}
                // Polled again, so that the room wakes the stream.
                Taken::Refused => break,
                Taken::Ended(ended) => self.ended(id, ended),
                Taken::Events(picked) => self.message = self.message_of(id, picked),
            }
            if self.has_output() {
                return;
            }
        }
        cx.waker().wake_by_ref();
    }

    /// Message with the events that the watcher `id` has taken; `None` if it gets none of them, or their history was replaced.
    fn message_of(&mut self, id: i64, picked: Picked) -> Option<EventMessages> {
        let watcher = self.watchers.get_mut(id)?;
        let revision = EventMessages::last_revision(&picked, watcher.create.options)?;
        watcher.last_event = revision;
        watcher.progress_due = false;
        watcher.quiet_since = Instant::now();
        let (options, prev_kv_after) = (watcher.create.options, watcher.prev_kv_after);
        // Before a byte leaves (W16). A history that was replaced ends its readers in the same moment.
        let history = watcher.reader.history();
        let down = &mut self.down;
        if !down.mirrors().cluster_state.record_served(history, revision) {
            return None;
        }
        down.last_event = down.last_event.max(revision);
        let fields = WatchFields {
            header: down.header(revision),
            watch_id: id,
            ..WatchFields::default()
        };
        let events = EventMessages::new(picked, options, prev_kv_after, fields);
        down.metrics().record_events(events.events());
        Some(events)
    }

    /// Whether the events of the stream wait, because another of its mirrors has lost its feed: the history of that mirror's
    /// keys may have been replaced without a trace in those of the others, and no stream shows two histories (W10). Registers
    /// `cx` until the mirror has a feed again.
    fn awaits_feed(&mut self, cx: &mut Context<'_>) -> bool {
        loop {
            let Some(position) = self.lost_feed() else {
                self.resuming = None;
                return false;
            };
            let mirrors = Arc::clone(&self.down.stream.client.proxy.mirrors);
            let resuming = self.resuming.get_or_insert_with(|| {
                Box::pin(async move {
                    if let Some(mirror) = mirrors.at(position) {
                        let _ = mirror.resumed(Instant::now() + FEED_TIMEOUT).await;
                    }
                })
            });
            if resuming.as_mut().poll(cx).is_pending() {
                return true;
            }
            self.resuming = None;
        }
    }

    /// Position of a mirror that has lost its feed, if the stream has watchers of it and of others.
    fn lost_feed(&self) -> Option<usize> {
        let mut lost = self
            .down
            .mirrors()
            .positions()
            .filter(|(_, mirror)| mirror.revision() == Err(Reason::FeedLost));
        let watched = lost.find(|(position, _)| self.watchers.are_of(*position));
        watched
            .filter(|_| self.watchers.have_several_mirrors())
            .map(|(position, _)| position)
    }

    /// Id of the next watcher that has events or an end to take; only an end if it `awaits_feed`.
    fn next_turn(&self, awaits_feed: bool) -> Option<i64> {
        self.watchers
            .next_turn(self.last_turn, |watcher| match awaits_feed {
                true => watcher.reader.has_ended(),
                false => watcher.reader.is_pending() && !self.is_held(watcher),
            })
    }

    /// Whether the next events of `watcher` wait for a progress notification, which must not be below them. Mirrors advance
    /// independently: holding events back gives a stream over several of them one revision that holds for all.
    fn is_held(&self, watcher: &Watcher) -> bool {
        let Some(requested) = &self.progress.requested else {
            return false;
        };
        watcher.reader.covered() >= requested.target && self.watchers.have_several_mirrors()
    }

    /// Handles the end of a watcher's events.
    fn ended(&mut self, id: i64, ended: ReaderEnd) {
        let watcher = self.watchers.get(id);
        let next = watcher.map_or(0, |watcher| watcher.reader.covered() + 1);
        let reason = match ended {
            ReaderEnd::Compacted { compact_revision } if next < compact_revision => {
                return self.cancel_compacted(id, compact_revision, "compacted");
            }
            ReaderEnd::Replaced { revision } => {
                return self.cancel_compacted(id, revision.max(1), "replaced");
            }
            // Its client can use another endpoint.
            ReaderEnd::FeedLost => return self.down.interrupt(Reason::FeedLost),
            ReaderEnd::Compacted { .. } => Reason::Loading,
            ReaderEnd::Trimmed => Reason::NotFresh,
            ReaderEnd::Dropped(reason) => {
                tracing::debug!(reason = reason.as_str(), "the mirror of a watch was dropped");
                match reason {
                    Reason::ForwardAll | Reason::NotMirrored => reason,
                    _ => Reason::Loading,
                }
            }
        };
        self.leave(reason, None);
    }

    fn cancel_compacted(&mut self, id: i64, revision: i64, reason: &'static str) {
        if let Some(watcher) = self.watchers.remove(id) {
            self.down.cancel_compacted(id, watcher.create, revision, reason);
        }
    }

    /// Cancels the watchers of a history that was replaced, before an answer shows the new one on the same stream (W10): a
    /// mirror that was dropped before ends none of them as replaced, and their own end may wait for room. Returns the history.
    fn compare_histories(&mut self) -> HistoryId {
        let history = self.down.mirrors().cluster_state.history();
        if self.compared_with != Some(history) {
            self.compared_with = Some(history);
            self.cancel_replaced();
        }
        history
    }

    /// Cancels the watchers whose events were of a history that was replaced (W10); returns whether there were any.
    pub(super) fn cancel_replaced(&mut self) -> bool {
        let history = self.down.mirrors().cluster_state.history();
        let replaced = self.watchers.take_replaced(history);
        let is_any = !replaced.is_empty();
        for (id, watcher) in replaced {
            self.down.cancel_of_replaced(id, watcher.create);
        }
        is_any
    }

    /// Revision that the mirrors have yet to reach before etcd can continue the watchers: a mirror of few keys reaches etcd's
    /// revision late. Otherwise etcd would cancel a watcher, though it has sent it every event that it has compacted (W11), or
    /// continue one with events that were not compared (W10).
    pub(super) fn awaited(&self) -> Option<i64> {
        let compacted = self.down.mirrors().cluster_state.compacted();
        let behind_compaction = self.watchers.are_behind(compacted).then_some(compacted);
        behind_compaction.max(self.watchers.unproven())
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use bytes::Bytes;
    use etcd_wire::etcdserverpb::{WatchCancelRequest, WatchCreateRequest, watch_request::RequestUnion};
    use rangecache_edge::limits::ByteKind;

    use super::super::testing::{downstream, message, take_control};
    use super::*;
    use crate::testing::Scene;

    fn create(watch_id: i64) -> Bytes {
        message(RequestUnion::CreateRequest(WatchCreateRequest {
            key: Bytes::from_static(b"/registry/a"),
            watch_id,
            ..WatchCreateRequest::default()
        }))
    }

    fn cancel(watch_id: i64) -> Bytes {
        message(RequestUnion::CancelRequest(WatchCancelRequest { watch_id }))
    }

    fn session(scene: &Scene, messages: impl Into<Bytes>) -> Session {
        Session::new(downstream(scene, &[], messages))
    }

    /// Why etcd has to continue the stream, once it is polled.
    fn poll(session: &mut Session) -> Option<Leave> {
        let polled = session.poll_memory(&mut Context::from_waker(Waker::noop()));
        assert_eq!(polled.is_ready(), session.has_output());
        session.leave.take()
    }

    #[tokio::test]
    async fn create_request_that_memory_cannot_serve_leaves_with_the_stream() {
        let scene = Scene::new(&[]);
        scene.switch_auth_off();
        let mut session = session(&scene, [create(5), cancel(9)].concat());
        let leave = poll(&mut session).unwrap();
        assert_eq!(leave.create.map(|create| create.watch_id), Some(5));
        assert!(!session.down.has_output(), "it is not answered");
        // The requests behind it are still there.
        assert!(poll(&mut session).is_none());
        assert!(!session.down.has_output(), "nor is a cancel of no watcher");
    }

    #[tokio::test]
    async fn message_that_is_not_understood_is_etcds_to_answer() {
        let scene = Scene::new(&[]);
        let leave = poll(&mut session(&scene, &b"\0\0\0\0\x02\xff\xff"[..])).unwrap();
        assert_eq!(leave.reason, Reason::Undecodable);
        assert!(leave.create.is_none());
    }

    #[tokio::test]
    async fn watcher_that_starts_below_a_compaction_is_created_and_then_cancelled() {
        let scene = Scene::new(&[]);
        let mut session = session(&scene, Bytes::new());
        let used = || scene.proxy.ledger.used_bytes(ByteKind::WatchStream);
        let (own, of_watcher) = (used(), Create::default().watcher_bytes());
        session.created_compacted(&Create::default(), 30);
        let sent = take_control(&mut session.down);
        let of = |index: usize| (sent[index].watch_id, sent[index].created, sent[index].canceled);
        assert_eq!((of(0), of(1)), ((0, true, false), (0, false, true)));
        assert_eq!(sent[1].compact_revision, 30);
        assert_eq!(used(), own + of_watcher, "it counts until it is released");
        session.cancel(0);
        assert_eq!(take_control(&mut session.down).len(), 1);
        assert_eq!(used(), own);
        let again = Create {
            watch_id: 4,
            ..Create::default()
        };
        session.created_compacted(&again, 30);
        session.created_compacted(&again, 30);
        let refused = take_control(&mut session.down).pop().unwrap();
        assert_eq!(refused.cancel_reason, DUPLICATE_ID);
    }

    #[tokio::test(start_paused = true)]
    async fn stream_that_leaves_takes_no_further_requests() {
        let scene = Scene::new(&[]);
        let mut session = session(&scene, create(5));
        let leave = Leave {
            reason: Reason::FeedLost,
            create: None,
        };
        session.leaving = Some((leave, Box::pin(tokio::time::sleep(FEED_TIMEOUT))));
        let left = poll(&mut session).unwrap();
        assert_eq!(left.reason, Reason::FeedLost, "no mirror has to reach anything");
        assert!(left.create.is_none());
    }
}
