//! One Watch stream that is served from memory. It runs inside the body of its response, without a task of its own:
//! whatever it sends is produced when the client has room.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Bound;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use http::request::Parts;
use http_body::Frame;
use tokio::time::{Instant, Sleep};

use super::etcd_stream::EtcdStream;
use super::message::{EventMessages, control};
use super::plan::{Plan, PlanInputs, Refusal, plan};
use super::progress::Progress;
use super::receive::{Received, Requests};
use super::request::{Create, Ids, NO_WATCHER, WatchRequest};
use super::start::{Started, start};
use super::watcher::Watcher;
use crate::cache::{ResponseHeader, Rope, WatchFields};
use crate::grpc::Status;
use crate::mirror::watch_hub::{Ended, Reader, Signal, Taken};
use crate::proxy::forward::StopSignal;
use crate::proxy::handles::Client;
use crate::proxy::response::{BodySource, Polled};
use crate::telemetry::Reason;

mod leaving;

/// Events of one response: more wait for the next one, unless they are of one revision.
const MAX_EVENTS: usize = 1000;
/// Bytes of one response.
const MAX_RESPONSE_BYTES: u64 = 64 << 10;
/// Requests and filtered responses that one poll looks at, before other streams get their turn.
const MAX_STEPS: usize = 64;

/// A stream as far as it does not change.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) client: Arc<Client>,
    /// Wakes the stream.
    pub(super) signal: Arc<Signal>,
    /// Head of the client's request, for a call to etcd that continues the stream.
    pub(super) parts: Parts,
    pub(super) has_credentials: bool,
    /// The client asked for a member that has a leader.
    pub(super) require_leader: bool,
}

/// A create request whose watcher is being started.
struct Starting {
    create: Create,
    started: Pin<Box<dyn Future<Output = Result<Started, Reason>> + Send>>,
}

impl fmt::Debug for Starting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Starting").finish_non_exhaustive()
    }
}

/// What a create request needs next.
pub(super) enum Planned {
    Refuse(Refusal),
    Compacted(i64),
    /// The watcher is started from the mirror at this position.
    Start(usize),
    Etcd(Reason),
}

/// One stream.
#[derive(Debug)]
pub(super) struct Session {
    stream: Stream,
    stop: Option<StopSignal>,
    /// Deadline of the client's `grpc-timeout`.
    expires: Option<Pin<Box<Sleep>>>,
    requests: Requests,
    ids: Ids,
    watchers: BTreeMap<i64, Watcher>,
    starting: Option<Starting>,
    /// Responses without events, to be sent next.
    control: VecDeque<Rope>,
    /// Events that are being sent. Nothing else is sent before their last piece (W4).
    message: Option<EventMessages>,
    /// Watcher whose events were sent last: the others get their turn first.
    last_turn: i64,
    /// Revision of the last event on the stream.
    last_event: i64,
    progress: Progress,
    /// Header fields of the last response.
    identity: ResponseHeader,
    /// Set once etcd serves the stream.
    etcd: Option<EtcdStream>,
    /// Request of the client that etcd answers next.
    unsent: Option<WatchRequest>,
    /// Status with which the stream ends.
    end: Option<Status>,
    has_ended: bool,
}

impl Stream {
    /// Plans the answer to `create`; `is_id_taken` says whether a watcher has the id that the client chose.
    pub(super) fn plan(&self, create: &Create, is_id_taken: bool) -> Planned {
        let mirrors = &self.client.proxy.mirrors;
        let interval = create.interval();
        let position = mirrors
            .all()
            .iter()
            .position(|mirror| mirror.scope.contains(&interval));
        let mirror = position.and_then(|position| mirrors.all().get(position));
        let inputs = PlanInputs {
            is_id_taken,
            auth: mirrors.cluster_state.auth(),
            has_credentials: self.has_credentials,
            mirror_revision: mirror.map(|mirror| mirror.revision()),
            version: self.client.proxy.forward.upstream.lowest_version(),
            compacted: mirrors.cluster_state.compacted(),
        };
        match (plan(create, &inputs), position) {
            (Plan::Refuse(refusal), _) => Planned::Refuse(refusal),
            (Plan::Compacted(revision), _) => Planned::Compacted(revision),
            (Plan::FromNow | Plan::From(_), Some(position)) => Planned::Start(position),
            (Plan::Etcd(reason), _) => Planned::Etcd(reason),
            // Not reached: the plan leaves what no mirror holds to etcd.
            (Plan::FromNow | Plan::From(_), None) => Planned::Etcd(Reason::NotMirrored),
        }
    }

    /// Starts the watcher of `create` from the mirror at `position`.
    pub(super) fn start(
        &self,
        position: usize,
        create: &Create,
    ) -> Pin<Box<dyn Future<Output = Result<Started, Reason>> + Send>> {
        let (client, signal) = (Arc::clone(&self.client), Arc::clone(&self.signal));
        Box::pin(start(client, signal, position, create.clone()))
    }
}

impl Session {
    /// A stream whose first request was received and not answered yet. `identity` has the header fields of etcd's last
    /// response.
    pub(super) fn new(
        stream: Stream,
        requests: Requests,
        stop: Option<StopSignal>,
        deadline: Option<Instant>,
        progress: Progress,
        identity: ResponseHeader,
    ) -> Session {
        Session {
            stream,
            stop,
            expires: deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline))),
            requests,
            ids: Ids::default(),
            watchers: BTreeMap::new(),
            starting: None,
            control: VecDeque::new(),
            message: None,
            last_turn: 0,
            last_event: 0,
            progress,
            identity,
            etcd: None,
            unsent: None,
            end: None,
            has_ended: false,
        }
    }

    /// Handles the requests that have arrived, until there is something to send.
    fn poll_requests(&mut self, cx: &mut Context<'_>) {
        for _ in 0..MAX_STEPS {
            // A progress request is answered before the next request, as etcd does.
            if !self.control.is_empty()
                || self.end.is_some()
                || self.etcd.is_some()
                || self.progress.requested.is_some()
            {
                return;
            }
            if let Some(mut starting) = self.starting.take() {
                match starting.started.as_mut().poll(cx) {
                    Poll::Pending => {
                        self.starting = Some(starting);
                        return;
                    }
                    Poll::Ready(Ok(started)) => self.created(&starting.create, started),
                    Poll::Ready(Err(reason)) => self.leave(reason, Some(starting.create)),
                }
                continue;
            }
            match self.requests.poll_next(cx) {
                Poll::Pending | Poll::Ready(Received::End) => return,
                Poll::Ready(Received::Late) => self.end = Some(Status::RequestTimeout),
                Poll::Ready(Received::Message(Ok(request))) => self.handle(request),
                Poll::Ready(Received::Message(Err(_))) => {
                    self.stream.client.forwards_watches.store(true, Ordering::Relaxed);
                    self.interrupt(Reason::Undecodable);
                }
            }
        }
        cx.waker().wake_by_ref();
    }

    fn handle(&mut self, request: WatchRequest) {
        match request {
            WatchRequest::Create(create) => self.create(create),
            WatchRequest::Cancel(id) => self.cancel(id),
            WatchRequest::Progress => self.request_progress(),
            WatchRequest::Nothing => {}
        }
    }

    /// Begins to create a watcher.
    fn create(&mut self, create: Create) {
        let is_taken = create.watch_id != 0 && self.watchers.contains_key(&create.watch_id);
        match self.stream.plan(&create, is_taken) {
            Planned::Refuse(refusal) => self.refuse(refusal),
            Planned::Compacted(revision) => self.created_compacted(&create, revision),
            Planned::Etcd(reason) => self.leave(reason, Some(create)),
            Planned::Start(position) => {
                self.starting = Some(Starting {
                    started: self.stream.start(position, &create),
                    create,
                });
            }
        }
    }

    /// Answers a create request that etcd refuses.
    pub(super) fn refuse(&mut self, refusal: Refusal) {
        self.metrics().record_created("memory", "refused");
        let header = self.header(self.shown());
        self.send(&WatchFields {
            header,
            watch_id: NO_WATCHER,
            created: true,
            canceled: true,
            cancel_reason: refusal.as_str(),
            ..WatchFields::default()
        });
    }

    /// Answers a create request whose watcher has joined its hub.
    pub(super) fn created(&mut self, create: &Create, started: Started) {
        let Started {
            reader,
            mirror,
            header_revision,
            since,
        } = started;
        let kind = if create.start_revision == 0 {
            "now"
        } else {
            "revision"
        };
        self.metrics().record_created("memory", kind);
        self.insert(
            create,
            header_revision,
            Watcher {
                reader: Some(reader),
                mirror,
                create: create.clone(),
                since,
                last_event: 0,
                progress_due: true,
            },
        );
    }

    /// Answers a create request whose start revision etcd has compacted: created, then cancelled.
    pub(super) fn created_compacted(&mut self, create: &Create, compact_revision: i64) {
        self.metrics().record_created("memory", "compacted");
        let watcher = Watcher {
            reader: None,
            mirror: 0,
            create: create.clone(),
            since: create.start_revision,
            last_event: 0,
            progress_due: false,
        };
        if let Some(id) = self.insert(create, self.shown(), watcher) {
            self.cancel_compacted(id, compact_revision);
        }
    }

    /// Adds a watcher and sends its `created`; returns its id.
    fn insert(&mut self, create: &Create, revision: i64, watcher: Watcher) -> Option<i64> {
        let watchers = &self.watchers;
        let Some(id) = self
            .ids
            .allocate(create.watch_id, |id| watchers.contains_key(&id))
        else {
            self.refuse(Refusal::DuplicateId);
            return None;
        };
        if watcher.create.options.progress_notify {
            self.progress.begin();
        }
        if let Some(mirror) = self.mirrors().all().get(watcher.mirror) {
            self.metrics().add_watchers(&mirror.name, 1);
        }
        self.watchers.insert(id, watcher);
        let header = self.header(revision);
        self.send(&WatchFields {
            header,
            watch_id: id,
            created: true,
            ..WatchFields::default()
        });
        Some(id)
    }

    /// Cancels the watcher `id` because etcd has compacted what it needs, or because its history was replaced (W10).
    fn cancel_compacted(&mut self, id: i64, compact_revision: i64) {
        if let Some(watcher) = self.watchers.get_mut(&id) {
            watcher.reader = None;
        }
        self.metrics().record_cancelled("compacted");
        let header = self.header(0);
        self.send(&WatchFields {
            header,
            watch_id: id,
            canceled: true,
            compact_revision,
            ..WatchFields::default()
        });
    }

    /// Removes a watcher; returns whether there was one.
    fn remove(&mut self, id: i64) -> bool {
        let Some(watcher) = self.watchers.remove(&id) else {
            return false;
        };
        if let Some(mirror) = self.mirrors().all().get(watcher.mirror) {
            self.metrics().add_watchers(&mirror.name, -1);
        }
        true
    }

    /// Answers a cancel request. etcd does not answer one for an unknown id.
    fn cancel(&mut self, id: i64) {
        if !self.remove(id) {
            return;
        }
        self.metrics().record_cancelled("client");
        let header = self.header(self.shown());
        self.send(&WatchFields {
            header,
            watch_id: id,
            canceled: true,
            ..WatchFields::default()
        });
    }

    /// Takes events of the next watcher that has any, or handles its end.
    fn poll_events(&mut self, cx: &mut Context<'_>) {
        for _ in 0..MAX_STEPS {
            let Some(id) = self.next_turn() else {
                return;
            };
            self.last_turn = id;
            let Some(watcher) = self.watchers.get_mut(&id) else {
                return;
            };
            let Some(reader) = &mut watcher.reader else {
                return;
            };
            let max_events = if self.progress.requested.is_some() {
                1
            } else {
                MAX_EVENTS
            };
            match reader.take(max_events, MAX_RESPONSE_BYTES) {
                Taken::Nothing { .. } => {}
                Taken::Ended(ended) => return self.ended(id, ended),
                Taken::Events(picked) => {
                    let Some(revision) = EventMessages::last_revision(&picked, watcher.create.options) else {
                        continue;
                    };
                    // Before a byte leaves (W16). A history that was replaced ends its readers in the same moment.
                    let history = reader.history();
                    watcher.last_event = revision;
                    watcher.progress_due = false;
                    let options = watcher.create.options;
                    if !self.mirrors().cluster_state.record_served(history, revision) {
                        continue;
                    }
                    self.last_event = self.last_event.max(revision);
                    let fields = WatchFields {
                        header: self.header(revision),
                        watch_id: id,
                        ..WatchFields::default()
                    };
                    let events = EventMessages::new(picked, options, fields);
                    self.metrics().record_events(events.events());
                    self.message = Some(events);
                    return;
                }
            }
        }
        cx.waker().wake_by_ref();
    }

    /// Id of the next watcher, after the one of the last turn, that has events or an end to take.
    fn next_turn(&self) -> Option<i64> {
        let after = self
            .watchers
            .range((Bound::Excluded(self.last_turn), Bound::Unbounded));
        let before = self.watchers.range(..=self.last_turn);
        let mut in_turn = after.chain(before);
        let found = in_turn.find(|(_, watcher)| watcher.is_pending() && !self.is_held(watcher));
        found.map(|(id, _)| *id)
    }

    /// Whether the next events of `watcher` wait for a progress notification, which must not be below them. Only so can
    /// a stream over several mirrors, which advance on their own, find a revision for all of them.
    fn is_held(&self, watcher: &Watcher) -> bool {
        let Some(requested) = &self.progress.requested else {
            return false;
        };
        let covered = watcher.reader.as_ref().map_or(0, Reader::covered);
        covered >= requested.target && self.has_several_mirrors()
    }

    fn has_several_mirrors(&self) -> bool {
        let mut mirrors = self.watchers.values().map(|watcher| watcher.mirror);
        let first = mirrors.next();
        mirrors.any(|mirror| Some(mirror) != first)
    }

    /// Handles the end of a watcher's events.
    fn ended(&mut self, id: i64, ended: Ended) {
        let next = self
            .watchers
            .get(&id)
            .and_then(|watcher| watcher.reader.as_ref())
            .map_or(0, |reader| reader.covered() + 1);
        match ended {
            Ended::Compacted { compact_revision } if next < compact_revision => {
                self.cancel_compacted(id, compact_revision);
            }
            Ended::Replaced { revision } => self.cancel_compacted(id, revision.max(1)),
            Ended::Compacted { .. } => self.leave(Reason::Loading, None),
            Ended::Trimmed => self.leave(Reason::NotFresh, None),
            Ended::FeedLost => self.leave(Reason::FeedLost, None),
            Ended::Dropped(reason) => {
                tracing::debug!(reason = reason.as_str(), "the mirror of a watch was dropped");
                self.leave(Reason::Loading, None);
            }
        }
    }

    /// Takes up a progress request of the client.
    fn request_progress(&mut self) {
        let known = self.mirrors().cluster_state.known();
        let reached = self
            .watchers
            .values()
            .filter_map(|watcher| watcher.reader.as_ref());
        let known = reached.map(Reader::reached).fold(known, i64::max);
        let mut target = known.max(self.progress.reported);
        for watcher in self.watchers.values() {
            // Like etcd: no answer before a watcher that waits for the future, and none while one is cancelled.
            if watcher.reader.is_none() || watcher.since > known {
                return self.nudge();
            }
            target = target.max(watcher.last_event);
        }
        if self.watchers.is_empty() {
            return;
        }
        // A client that asks again, though nothing has happened, knows of more.
        if target == self.progress.reported {
            self.nudge();
        }
        self.progress.request(target);
        let mut asked = Vec::new();
        for watcher in self.watchers.values() {
            let Some(reader) = &watcher.reader else {
                continue;
            };
            if reader.reached() >= target || asked.contains(&watcher.mirror) {
                continue;
            }
            asked.push(watcher.mirror);
            if let Some(mirror) = self.mirrors().all().get(watcher.mirror) {
                if let Some(hub) = self.mirrors().watch_hub(mirror) {
                    hub.signal_at(target, &self.stream.signal);
                }
                mirror.want(reader.history(), target);
            }
        }
    }

    /// Makes the mirrors of the stream learn etcd's revision, for a client that has read or written around rangecache.
    fn nudge(&self) {
        let is_used = |position: usize| self.watchers.values().any(|watcher| watcher.mirror == position);
        for (position, mirror) in self.mirrors().all().iter().enumerate() {
            if is_used(position) {
                mirror.nudge();
            }
        }
    }

    /// Answers the client's progress request, or drops it; returns whether it is done. Called between messages.
    fn poll_requested(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(requested) = &mut self.progress.requested else {
            return false;
        };
        let has_expired = requested.has_expired(cx);
        let target = requested.target;
        let revision = self
            .watchers
            .values()
            .map(Watcher::progress)
            .try_fold(i64::MAX, |lowest, revision| Some(lowest.min(revision?)))
            .filter(|revision| *revision < i64::MAX);
        let revision = revision.filter(|revision| *revision >= self.last_event.max(self.progress.reported));
        if !has_expired && revision.is_none_or(|revision| revision < target) {
            return false;
        }
        self.progress.requested = None;
        if let Some(revision) = revision
            && self.report(NO_WATCHER, revision)
        {
            self.progress.reported = revision;
        }
        true
    }

    /// Sends the periodic progress notification of the next watcher that is owed one.
    fn poll_periodic(&mut self, cx: &mut Context<'_>) {
        if self.progress.has_ticked(cx) {
            for (id, watcher) in &mut self.watchers {
                if watcher.create.options.progress_notify
                    && std::mem::replace(&mut watcher.progress_due, true)
                    && !self.progress.owed.contains(id)
                {
                    self.progress.owed.push_back(*id);
                }
            }
        }
        while let Some(id) = self.progress.owed.pop_front() {
            let progress = self.watchers.get(&id).and_then(Watcher::progress);
            if let Some(revision) = progress
                && self.report(id, revision)
            {
                return;
            }
        }
    }

    /// Sends a progress notification; returns whether it was possible.
    fn report(&mut self, id: i64, revision: i64) -> bool {
        let readers = self
            .watchers
            .values()
            .filter_map(|watcher| watcher.reader.as_ref());
        let Some(history) = readers.map(Reader::history).next() else {
            return false;
        };
        // Before a byte leaves (W16).
        if !self.mirrors().cluster_state.record_served(history, revision) {
            return false;
        }
        let header = self.header(revision);
        self.send(&WatchFields {
            header,
            watch_id: id,
            ..WatchFields::default()
        });
        true
    }

    /// Revision in the header of a response that is about no event: the highest that was shown to a client, or that a
    /// mirror is at.
    fn shown(&self) -> i64 {
        let cluster_state = &self.mirrors().cluster_state;
        let history = cluster_state.history();
        let shown = cluster_state.min_served_revision().unwrap_or(0);
        let views = self
            .mirrors()
            .all()
            .iter()
            .filter_map(|mirror| mirror.view().ok());
        let of_history = views.filter(|view| view.history == history);
        let revision = of_history.map(|view| view.revision).fold(shown, i64::max);
        // Before a byte leaves (W16).
        if cluster_state.record_served(history, revision) {
            revision
        } else {
            shown
        }
    }

    /// Header with this revision.
    fn header(&mut self, revision: i64) -> ResponseHeader {
        if let Some(identity) = self.mirrors().cluster_state.identity() {
            self.identity = *identity;
        }
        ResponseHeader {
            revision,
            ..self.identity
        }
    }

    fn send(&mut self, fields: &WatchFields<'_>) {
        self.metrics().record_response();
        self.control.push_back(control(fields));
    }

    fn mirrors(&self) -> &crate::mirror::Mirrors {
        &self.stream.client.proxy.mirrors
    }

    fn metrics(&self) -> &crate::telemetry::metrics::WatchMetrics {
        &self.stream.client.proxy.telemetry.metrics.watches
    }

    /// Status with which the stream ends now, between two messages.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Option<Status> {
        if self.stop.as_mut().is_some_and(|stop| stop.is_stopping(cx)) {
            return Some(Status::StoppingReconnect);
        }
        if let Some(expires) = &mut self.expires
            && expires.as_mut().poll(cx).is_ready()
        {
            return Some(Status::DeadlineExceeded);
        }
        let mut readers = self
            .watchers
            .values()
            .filter_map(|watcher| watcher.reader.as_ref());
        if self.stream.require_leader && readers.any(Reader::has_no_leader) {
            return Some(Status::NoLeader);
        }
        None
    }

    /// Next frame; `None` while there is nothing to send.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Option<Frame<Rope>> {
        loop {
            if self.etcd.is_some() {
                return self.poll_etcd(cx);
            }
            if let Some(message) = &mut self.message {
                let piece = message.next_piece();
                if message.is_complete() {
                    self.message = None;
                }
                if let Some(piece) = piece {
                    return Some(Frame::data(piece));
                }
            }
            if let Some(status) = self.poll_end(cx) {
                self.has_ended = true;
                return Some(Frame::trailers(status.trailers()));
            }
            self.poll_requested(cx);
            self.poll_requests(cx);
            if let Some(response) = self.control.pop_front() {
                return Some(Frame::data(response));
            }
            if self.etcd.is_some() {
                continue;
            }
            if let Some(status) = self.end.take() {
                self.has_ended = true;
                return Some(Frame::trailers(status.trailers()));
            }
            self.poll_events(cx);
            if self.message.is_some() || !self.control.is_empty() || self.end.is_some() || self.etcd.is_some()
            {
                continue;
            }
            if self.poll_requested(cx) {
                continue;
            }
            self.poll_periodic(cx);
            let response = self.control.pop_front()?;
            return Some(Frame::data(response));
        }
    }
}

impl BodySource for Session {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        if self.has_ended {
            return Poll::Ready(None);
        }
        // What arrives during the poll wakes the stream again (W17).
        let signal = Arc::clone(&self.stream.signal);
        signal
            .look(cx, |cx| self.poll_next(cx))
            .map_or(Poll::Pending, |frame| Poll::Ready(Some(Ok(frame))))
    }

    fn may_be_idle(&self) -> bool {
        true
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for watcher in self.watchers.values() {
            if let Some(mirror) = self.mirrors().all().get(watcher.mirror) {
                self.metrics().add_watchers(&mirror.name, -1);
            }
        }
        self.metrics().add_streams(-1);
    }
}
