//! A member's watch streams: each sends what the member has applied at its own pace, so that streams are reordered
//! against each other and against reads.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use testkit::pb::{Event, ResponseHeader, WatchCreateRequest, WatchRequest, WatchResponse};
use testkit::watch_rules::{DELETE, NO_ID, names};
use tokio::time::{Instant, sleep_until};

use crate::auth::Needs;
use crate::cluster::{Cluster, unavailable};
use crate::kv::Caller;
use crate::send_loop::SendLoop;
use crate::server::{Messages, Requests};

/// Time without a leader after which streams that require one end.
const LEADERLESS: Duration = Duration::from_millis(1_500);
/// Interval of progress notifications that a create asks for.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(4);

struct Watcher {
    create: WatchCreateRequest,
    /// Revision from which events have not been sent.
    next: i64,
    /// Cancelled by a compaction. It gets nothing more, and its stream no progress, until the client cancels it.
    is_compacted: bool,
}

impl Watcher {
    /// Whether it waits for events up to `revision`.
    fn is_behind(&self, revision: i64) -> bool {
        !self.is_compacted && self.next <= revision
    }

    /// Whether it has all events up to `revision`, and begins at or below it.
    fn is_synced(&self, revision: i64) -> bool {
        !self.is_compacted && self.next == revision + 1 && self.create.start_revision <= revision
    }

    fn wants(&self, event: &Event) -> bool {
        let kv = event.kv.as_ref().expect("an event has a kv");
        let filter = i32::from(event.r#type == DELETE);
        names(&self.create, &kv.key) && !self.create.filters.contains(&filter)
    }
}

/// A stream; see the module.
pub struct Stream {
    cluster: Arc<Cluster>,
    caller: Caller,
    needs_leader: bool,
    messages: Messages,
    /// Responses that the stream sends.
    responses: SendLoop,
    watchers: BTreeMap<i64, Watcher>,
    next_id: i64,
    /// When the `created` of a watcher is determined, which has been registered before. No request is read until then.
    created_at: Option<(Instant, i64)>,
    /// When events that the member has applied are queued.
    collect_at: Option<Instant>,
    /// When the next response is sent.
    send_at: Option<Instant>,
    progress_at: Instant,
    leaderless_since: Option<Instant>,
}

impl Stream {
    /// A stream without watchers.
    pub fn new(cluster: Arc<Cluster>, caller: Caller, needs_leader: bool, messages: Messages) -> Self {
        Self {
            cluster,
            caller,
            needs_leader,
            responses: SendLoop::new(messages.clone()),
            messages,
            watchers: BTreeMap::new(),
            next_id: 0,
            created_at: None,
            collect_at: None,
            send_at: None,
            progress_at: Instant::now() + PROGRESS_INTERVAL,
            leaderless_since: None,
        }
    }

    /// Serves the stream until its client has closed it.
    pub async fn run(mut self, mut requests: Requests) {
        let mut changes = self.cluster.changes();
        let mut is_open = true;
        while !self.messages.is_closed() {
            if self.lost_leader() {
                let _ = self.messages.send(Err(unavailable("etcdserver: no leader")));
                return;
            }
            if self.collect_at.is_none() && self.is_behind() {
                self.schedule();
            }
            if self.send_at.is_none() && !self.responses.is_empty() {
                self.send_at = Some(Instant::now() + self.pause());
            }
            let closed = self.messages.clone();
            tokio::select! {
                biased;
                () = closed.closed() => return,
                request = requests.next(), if is_open && self.created_at.is_none() => match request {
                    Some(request) => {
                        self.cluster.travel(self.caller.member).await;
                        self.request(WatchRequest::decode(request).expect("a watch request"));
                    }
                    None => is_open = false,
                },
                _ = changes.changed() => {}
                () = at(self.created_at.map(|(due, _)| due)) => {
                    self.cluster.until_running(self.caller.member).await;
                    if let Some((_, id)) = self.created_at.take() {
                        self.created(id);
                    }
                }
                () = at(self.collect_at) => {
                    self.cluster.until_running(self.caller.member).await;
                    self.collect_at = None;
                    self.collect();
                }
                () = at(self.send_at) => {
                    self.cluster.until_running(self.caller.member).await;
                    self.send_at = None;
                    self.responses.send_next(&self.cluster.chance);
                }
                () = sleep_until(self.progress_at) => {
                    self.cluster.until_running(self.caller.member).await;
                    self.progress_at += PROGRESS_INTERVAL;
                    self.notify();
                }
                () = at(self.leaderless_since.map(|since| since + LEADERLESS)) => {}
            }
        }
    }

    fn lost_leader(&mut self) -> bool {
        let member = self.caller.member;
        let reaches =
            |state: &crate::cluster::State| state.leader.is_some() && !state.members[member].is_isolated;
        if !self.needs_leader || self.cluster.look(reaches) {
            self.leaderless_since = None;
            return false;
        }
        let since = *self.leaderless_since.get_or_insert_with(Instant::now);
        since.elapsed() >= LEADERLESS
    }

    fn header(&self) -> ResponseHeader {
        self.cluster.look(|state| state.header(self.caller.member))
    }

    fn is_behind(&self) -> bool {
        let applied = self.header().revision;
        self.watchers.values().any(|watcher| watcher.is_behind(applied))
    }

    fn schedule(&mut self) {
        let delay = self
            .cluster
            .look(|state| state.members[self.caller.member].watch_delay.clone());
        let mut delay = self.cluster.chance.millis(delay);
        if self.cluster.chance.one_in(30) {
            delay += self.cluster.chance.millis(5..600);
        }
        self.collect_at = Some(Instant::now() + delay);
    }

    /// Time until the next response is sent.
    fn pause(&self) -> Duration {
        let mut pause = self.cluster.chance.millis(0..2);
        if self.cluster.chance.one_in(20) {
            pause += self.cluster.chance.millis(5..300);
        }
        pause
    }

    fn request(&mut self, request: WatchRequest) {
        if let Some(create) = request.create_request {
            self.create(create);
        }
        if let Some(cancel) = request.cancel_request
            && self.watchers.remove(&cancel.watch_id).is_some()
        {
            let header = self.header();
            self.responses.control(WatchResponse {
                header: Some(header),
                watch_id: cancel.watch_id,
                canceled: true,
                ..WatchResponse::default()
            });
        }
        if request.progress_request.is_some()
            && !self
                .cluster
                .look(|state| state.members[self.caller.member].is_silent)
        {
            // Determined now, though others are sent before it.
            self.answer();
        }
    }

    fn create(&mut self, create: WatchCreateRequest) {
        let needs = [Needs::to_watch(&create)];
        if let Err(status) = self.cluster.look(|state| self.caller.allowed(state, &needs)) {
            let header = self.header();
            return self.responses.control(WatchResponse {
                header: Some(header),
                watch_id: NO_ID,
                created: true,
                canceled: true,
                cancel_reason: status.message,
                ..WatchResponse::default()
            });
        }
        let id = if create.watch_id == 0 {
            while self.watchers.contains_key(&self.next_id) {
                self.next_id += 1;
            }
            self.next_id += 1;
            self.next_id - 1
        } else {
            create.watch_id
        };
        let next = if create.start_revision == 0 {
            self.header().revision + 1
        } else {
            create.start_revision
        };
        let is_compacted = false;
        let watcher = Watcher {
            create,
            next,
            is_compacted,
        };
        self.watchers.insert(id, watcher);
        self.cancel_compacted();
        let delay = if self.cluster.chance.one_in(3) {
            self.cluster.chance.millis(1..5)
        } else {
            Duration::ZERO
        };
        self.created_at = Some((Instant::now() + delay, id));
    }

    /// Responds to the create of `id`, with the revision of now: that of its registration may be lower.
    fn created(&mut self, id: i64) {
        let header = self.header();
        self.responses.control(WatchResponse {
            header: Some(header),
            watch_id: id,
            created: true,
            ..WatchResponse::default()
        });
    }

    fn cancel_compacted(&mut self) {
        let (applied, header) = self.cluster.look(|state| {
            (
                state.applied(self.caller.member),
                state.header(self.caller.member),
            )
        });
        let mut compacted = Vec::new();
        for (id, watcher) in &mut self.watchers {
            if !watcher.is_compacted && watcher.next < applied.compacted {
                watcher.is_compacted = true;
                compacted.push(*id);
            }
        }
        for watch_id in compacted {
            self.responses.watch(vec![WatchResponse {
                header: Some(ResponseHeader {
                    revision: 0,
                    ..header
                }),
                watch_id,
                canceled: true,
                compact_revision: applied.compacted,
                ..WatchResponse::default()
            }]);
        }
    }

    /// Queues events of watchers that are behind: for some of them all that the member has applied, for others a part.
    fn collect(&mut self) {
        self.cancel_compacted();
        let header = self.header();
        let chance = &self.cluster.chance;
        for (id, watcher) in &mut self.watchers {
            if !watcher.is_behind(header.revision) || chance.one_in(6) {
                continue;
            }
            let behind = usize::try_from(header.revision - watcher.next).unwrap();
            let last = if chance.one_in(3) {
                watcher.next + i64::try_from(chance.below(behind + 1)).unwrap()
            } else {
                header.revision
            };
            let revisions = watcher.next..=last;
            let compacted = self
                .cluster
                .look(|state| state.applied(self.caller.member).compacted);
            let mut events: Vec<Event> = self.cluster.look(|state| {
                let history = state.history();
                let events = revisions.flat_map(|revision| history.events_at(revision));
                events.filter(|event| watcher.wants(event)).cloned().collect()
            });
            for event in &mut events {
                let revision = event.kv.as_ref().map_or(0, |kv| kv.mod_revision);
                if !watcher.create.prev_kv || revision <= compacted {
                    event.prev_kv = None;
                }
            }
            watcher.next = last + 1;
            if events.is_empty() {
                continue;
            }
            let cut = if watcher.create.fragment && events.len() > 1 && chance.one_in(3) {
                1 + chance.below(events.len() - 1)
            } else {
                events.len()
            };
            let rest = events.split_off(cut);
            let response = |events, fragment| WatchResponse {
                header: Some(header),
                watch_id: *id,
                events,
                fragment,
                ..WatchResponse::default()
            };
            let mut fragments = vec![response(events, !rest.is_empty())];
            if !rest.is_empty() {
                fragments.push(response(rest, false));
            }
            self.responses.watch(fragments);
        }
    }

    /// Answers a progress request, unless a watcher is behind.
    fn answer(&mut self) {
        let header = self.header();
        if self
            .watchers
            .values()
            .all(|watcher| watcher.is_synced(header.revision))
        {
            self.responses.watch(vec![WatchResponse {
                header: Some(header),
                watch_id: NO_ID,
                ..WatchResponse::default()
            }]);
        }
    }

    /// Queues the periodic progress of each watcher that asked for it.
    fn notify(&mut self) {
        let header = self.header();
        for (id, watcher) in &self.watchers {
            if watcher.create.progress_notify && watcher.is_synced(header.revision) {
                self.responses.watch(vec![WatchResponse {
                    header: Some(header),
                    watch_id: *id,
                    ..WatchResponse::default()
                }]);
            }
        }
    }
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => pending().await,
    }
}
