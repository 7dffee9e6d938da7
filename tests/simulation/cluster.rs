//! The model of an etcd cluster: what is committed, what each member has applied, and who leads. Handlers of calls wait
//! for its changes, faults make them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use parking_lot::Mutex;
use testkit::grpc::{Status, UNAVAILABLE};
use testkit::pb::ResponseHeader;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::chance::Chance;
use crate::link::Link;
use crate::members::From;
use crate::store::{Entry, History};
use crate::trace::Trace;

/// Number of members.
pub const MEMBERS: usize = 3;
/// Members that can commit, also while one of them is replaced.
const QUORUM: usize = 2;
/// Time after which a member gives up a proposal or a linearizable read.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(7);

/// Member of the cluster.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its id, which is another one once it was replaced.
    pub id: u64,
    /// Whether it does not vote yet, and serves little.
    pub is_learner: bool,
    /// Raft entries that it has applied.
    pub applied: usize,
    /// Its process runs.
    pub is_up: bool,
    /// Whether it and the other members cannot reach each other.
    pub is_isolated: bool,
    /// Its process is suspended.
    pub is_paused: bool,
    /// Whether it takes part in raft, but applies nothing.
    pub is_stuck: bool,
    /// Whether it answers no progress requests.
    pub is_silent: bool,
    /// Milliseconds until it applies the next entry.
    pub lag: Range<u64>,
    /// Milliseconds of the way of a request, and of a response.
    pub delay: Range<u64>,
    /// Milliseconds until a watch stream sends what the member has applied.
    pub watch_delay: Range<u64>,
}

impl Member {
    /// A member without faults that has applied the first entry.
    pub fn new(id: u64) -> Self {
        Self {
            id,
            is_learner: false,
            applied: 1,
            is_up: true,
            is_isolated: false,
            is_paused: false,
            is_stuck: false,
            is_silent: false,
            lag: 0..3,
            delay: 0..3,
            watch_delay: 0..8,
        }
    }

    /// A member with the same id and data, without faults.
    pub fn healed(&self) -> Self {
        Self {
            applied: self.applied,
            ..Self::new(self.id)
        }
    }

    fn is_connected(&self) -> bool {
        self.is_up && !self.is_isolated && !self.is_paused
    }

    fn can_vote(&self) -> bool {
        self.is_connected() && !self.is_learner
    }
}

/// The state of the cluster.
pub struct State {
    /// The histories so far; the last one is the cluster's.
    pub histories: Vec<History>,
    pub term: u64,
    pub leader: Option<usize>,
    pub members: Vec<Member>,
    /// Streams and pages that rangecache reads are broken off between two of them.
    pub breaks_reads: bool,
}

impl State {
    /// The current history.
    pub fn history(&self) -> &History {
        self.histories.last().expect("there is one")
    }

    /// The current history, to be appended to.
    pub fn history_mut(&mut self) -> &mut History {
        self.histories.last_mut().expect("there is one")
    }

    /// Continues in another history, of which each member has applied everything.
    pub fn replace_history(&mut self, history: History) {
        let applied = history.len();
        self.histories.push(history);
        self.members
            .iter_mut()
            .for_each(|member| member.applied = applied);
    }

    /// State that `member` has applied.
    pub fn applied(&self, member: usize) -> Entry {
        self.history().after(self.members[member].applied)
    }

    /// The header of a response of `member`.
    pub fn header(&self, member: usize) -> ResponseHeader {
        let entry = self.applied(member);
        ResponseHeader {
            cluster_id: self.history().cluster_id,
            member_id: self.members[member].id,
            revision: entry.revision,
            raft_term: entry.term,
            ..ResponseHeader::default()
        }
    }

    /// Whether `member` reaches a leader with a quorum.
    pub fn can_commit(&self, member: usize) -> bool {
        let voters = self.members.iter().filter(|member| member.can_vote()).count();
        let leads = |leader: usize| self.members[leader].can_vote();
        self.leader.is_some_and(leads) && self.members[member].is_connected() && voters >= QUORUM
    }
}

/// The cluster; see the module.
pub struct Cluster {
    state: Mutex<State>,
    changed: watch::Sender<()>,
    pub chance: Chance,
    pub trace: Trace,
    /// Version that the members report.
    pub version: &'static str,
    /// Open connections to each member.
    links: Mutex<Vec<Arc<Link>>>,
    /// Reads of keys that rangecache has sent.
    pub reads: AtomicUsize,
    /// Chunks and pages for rangecache behind which more keys follow.
    pub parts: AtomicUsize,
    /// Rules that a request of rangecache violates.
    violations: Mutex<Vec<String>>,
}

impl Cluster {
    /// A cluster without keys, all of whose members serve once their tasks run.
    pub fn new(seed: u64, version: &'static str, trace: &Trace) -> Arc<Self> {
        let state = State {
            histories: vec![History::new(0xc1, version < "3.7")],
            term: 1,
            leader: Some(0),
            members: (1..=MEMBERS as u64).map(Member::new).collect(),
            breaks_reads: false,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            changed: watch::Sender::new(()),
            chance: Chance::new(seed, 1),
            trace: trace.clone(),
            version,
            links: Mutex::default(),
            reads: AtomicUsize::new(0),
            parts: AtomicUsize::new(0),
            violations: Mutex::default(),
        })
    }

    /// Looks at the state.
    pub fn look<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.state.lock())
    }

    /// Changes the state, and wakes all that wait for changes.
    pub fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.state.lock());
        self.changed.send_replace(());
        changed
    }

    /// Notified of every change.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Waits until `look` finds something.
    pub async fn until<T>(&self, mut look: impl FnMut(&State) -> Option<T>) -> T {
        let mut changes = self.changes();
        loop {
            let found = self.look(&mut look);
            if let Some(found) = found {
                return found;
            }
            // The sender lives as long as self.
            let _ = changes.changed().await;
        }
    }

    /// Waits while the process of `member` is suspended.
    pub async fn until_running(&self, member: usize) {
        self.until(|state| (!state.members[member].is_paused).then_some(()))
            .await;
    }

    /// Waits for the way of a request to `member`, or of a response from it.
    pub async fn travel(&self, member: usize) {
        let delay = self.look(|state| state.members[member].delay.clone());
        let mut delay = self.chance.millis(delay);
        if self.chance.one_in(40) {
            delay += self.chance.millis(5..400);
        }
        if !delay.is_zero() {
            sleep(delay).await;
        }
        self.until_running(member).await;
    }

    /// Appends an entry by way of `member`, and returns what `append` did once the member has applied it.
    pub async fn propose<T>(
        &self,
        member: usize,
        append: impl FnOnce(&mut History) -> T,
    ) -> Result<T, Status> {
        self.in_time(async {
            self.until(|state| state.can_commit(member).then_some(())).await;
            let (done, number, index) = self.change(|state| {
                let done = append(state.history_mut());
                (done, state.histories.len(), state.history().len())
            });
            self.until_applied(member, number, index).await.map(|()| done)
        })
        .await
    }

    /// Waits until `member` may answer a linearizable read that has just arrived.
    pub async fn read_index(&self, member: usize) -> Result<(), Status> {
        self.in_time(async {
            let (number, index) = self
                .until(|state| {
                    let now = (state.histories.len(), state.history().len());
                    state.can_commit(member).then_some(now)
                })
                .await;
            self.until_applied(member, number, index).await
        })
        .await
    }

    async fn in_time<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        let result = timeout(REQUEST_TIMEOUT, call).await;
        result.unwrap_or_else(|_| Err(unavailable("etcdserver: request timed out")))
    }

    /// Waits until `member` has applied `index` entries of history `number`.
    async fn until_applied(&self, member: usize, number: usize, index: usize) -> Result<(), Status> {
        self.until(|state| {
            if state.histories.len() != number {
                return Some(Err(unavailable("etcdserver: server stopped")));
            }
            (state.members[member].applied >= index).then_some(Ok(()))
        })
        .await
    }

    /// Applies committed entries on `member`, one after the other or some at once.
    pub async fn apply(self: Arc<Self>, member: usize) {
        loop {
            let lag = self
                .until(|state| {
                    let of = &state.members[member];
                    let is_behind = of.applied < state.history().len() && of.is_connected() && !of.is_stuck;
                    is_behind.then(|| of.lag.clone())
                })
                .await;
            sleep(self.chance.millis(lag)).await;
            let many = if self.chance.one_in(3) { usize::MAX } else { 1 };
            self.change(|state| {
                let newest = state.history().len();
                let of = &mut state.members[member];
                if of.is_connected() && !of.is_stuck {
                    of.applied = of.applied.saturating_add(many).min(newest);
                }
            });
        }
    }

    /// Elects leaders, each some time after the last one was lost.
    pub async fn elect(self: Arc<Self>) {
        loop {
            self.until(|state| {
                let has_leader = state.leader.is_some_and(|leader| state.can_commit(leader));
                (!has_leader).then_some(())
            })
            .await;
            sleep(self.chance.millis(100..2_000)).await;
            let first = self.chance.below(MEMBERS);
            self.change(|state| {
                let candidates = (0..MEMBERS).map(|next| (first + next) % MEMBERS);
                state.leader = None;
                for candidate in candidates {
                    state.leader = Some(candidate);
                    if state.can_commit(candidate) {
                        state.term += 1;
                        let term = state.term;
                        return state.history_mut().elect(term);
                    }
                }
                state.leader = None;
            });
        }
    }

    /// Registers a connection to `member`.
    pub fn connected(&self, member: usize, from: From) -> Arc<Link> {
        let link = Arc::new(Link::new(member, from));
        self.links.lock().push(Arc::clone(&link));
        link
    }

    /// Removes a connection that was closed.
    pub fn disconnected(&self, link: &Arc<Link>) {
        self.links.lock().retain(|open| !Arc::ptr_eq(open, link));
    }

    /// Cuts connections to `member`: each with the chance of one in `times`.
    pub fn cut(&self, member: usize, from: From, times: u32) {
        self.links.lock().retain(|link| {
            let is_cut = link.is_of(member, from) && self.chance.one_in(times);
            if is_cut {
                link.cut.cancel();
            }
            !is_cut
        });
    }

    /// The open connections of `from`.
    pub fn links(&self, from: From) -> Vec<Arc<Link>> {
        let mut links = self.links.lock().clone();
        links.retain(|link| link.from == from);
        links
    }

    /// Whether a read in several parts breaks off here.
    pub fn breaks_off(&self, from: From) -> bool {
        from == From::Rangecache && self.look(|state| state.breaks_reads) && self.chance.one_in(3)
    }

    /// Records a violation.
    pub fn violation(&self, what: impl AsRef<str>) {
        self.trace.line(format!("VIOLATION {}", what.as_ref()));
        self.violations.lock().push(what.as_ref().to_owned());
    }

    /// The violations so far.
    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    /// Revokes leases once they have expired.
    pub async fn expire_leases(self: Arc<Self>) {
        loop {
            let (due, _) = self.until(|state| state.history().first_to_expire()).await;
            sleep_until(due).await;
            self.until(|state| state.leader.filter(|leader| state.can_commit(*leader)))
                .await;
            self.change(|state| {
                // Another history may have others.
                let expired = state.history().first_to_expire();
                if let Some((_, id)) = expired.filter(|(due, _)| *due <= Instant::now()) {
                    state.history_mut().revoke(id);
                }
            });
        }
    }
}

/// The status of a call that a member cannot serve.
pub fn unavailable(message: &str) -> Status {
    Status {
        code: UNAVAILABLE,
        message: message.to_owned(),
    }
}
