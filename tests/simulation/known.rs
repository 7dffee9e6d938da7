//! State known to clients, and the judge of reads: revisions are in every response, so that each response is compared with
//! the model's own state at its revision, and its revision with those in the responses that came before its request.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use testkit::grpc::{DEADLINE_EXCEEDED, OUT_OF_RANGE, Status, UNAVAILABLE};
use testkit::pb::{RangeRequest, RangeResponse};
use tokio::time::Instant;

use crate::auth::{Identity, Needs, Refusal};
use crate::cluster::Cluster;
use crate::members::From;
use crate::read::Read;
use crate::store::History;

/// A member that has answered within this time is not silent.
const ANSWERED_AGE: Duration = Duration::from_secs(1);
/// Time after an answer in which rangecache may not have read it.
const ANSWERED_MARGIN: Duration = Duration::from_millis(20);

/// Facts about one history that responses have shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Floor {
    /// Highest revision in any response.
    pub revision: i64,
    /// Highest revision up to which a compaction was acknowledged or seen.
    pub compacted: i64,
    /// Highest revision in any response through rangecache.
    pub shown: i64,
    /// Whether a write through rangecache was acknowledged.
    is_written: bool,
    /// Number of raft entries when a call through rangecache that enables auth was acknowledged.
    auth_enabled: usize,
}

/// Known facts about one history.
#[derive(Debug, Default)]
struct KnownHistory {
    floor: Floor,
    /// When a response showed a higher revision than all before, and that revision, in order.
    raised: Vec<(Instant, i64)>,
}

/// State at the begin of a call.
#[derive(Clone, Copy, Debug)]
pub struct Begin {
    /// Number of the history.
    number: usize,
    pub floor: Floor,
    from: From,
    at: Instant,
    /// Reads that rangecache had sent to members.
    reads: usize,
    /// Identity whose token the call has.
    pub identity: Option<Identity>,
    /// Number of raft entries.
    entries: usize,
    /// The least number of them that a member had applied.
    least_applied: usize,
}

impl Begin {
    /// Whether no history has been replaced.
    pub fn is_of_first_history(&self) -> bool {
        self.number == 1
    }
}

/// A right that a response shows.
#[derive(Debug)]
struct Right {
    needs: Needs,
    /// Revision at which etcd has checked it, if that is known.
    at: Option<i64>,
}

/// State known to clients; see the module.
pub struct Known {
    cluster: Arc<Cluster>,
    histories: Mutex<Vec<KnownHistory>>,
    /// Age up to which rangecache may answer while no member does.
    serve_stale: Duration,
    /// Whether hubs answer for members. A local read may then be of the memory of any of them, as of any member.
    has_hubs: bool,
    violations: Mutex<Vec<String>>,
}

impl Known {
    pub fn new(cluster: &Arc<Cluster>, serve_stale: Duration, has_hubs: bool) -> Arc<Self> {
        Arc::new(Self {
            cluster: Arc::clone(cluster),
            histories: Mutex::default(),
            serve_stale,
            has_hubs,
            violations: Mutex::default(),
        })
    }

    /// Begins a call without a token; `from` is [`From::Rangecache`] if it goes through that.
    pub fn begin(&self, from: From) -> Begin {
        self.begin_as(from, None)
    }

    /// Begins a call with the token of `identity`.
    pub fn begin_as(&self, from: From, identity: Option<Identity>) -> Begin {
        let (number, entries, least_applied) = self.cluster.look(|state| {
            let applied = state.members.iter().map(|member| member.applied);
            let least = applied.min().unwrap_or(1);
            (state.histories.len(), state.history().len(), least)
        });
        let mut histories = self.histories.lock();
        histories.resize_with(number, KnownHistory::default);
        Begin {
            number,
            floor: histories[number - 1].floor,
            from,
            at: Instant::now(),
            reads: self.cluster.reads.load(Ordering::Relaxed),
            identity,
            entries,
            least_applied,
        }
    }

    /// Number of the current history.
    pub fn history(&self) -> usize {
        self.cluster.look(|state| state.histories.len())
    }

    /// Whether the history has not changed since.
    pub fn is_current(&self, begin: &Begin) -> bool {
        self.history() == begin.number
    }

    /// Records what a response shows to a call, unless the history has changed meanwhile.
    pub fn show(&self, begin: &Begin, revision: i64, compacted: i64) {
        if self.is_current(begin) {
            let KnownHistory { floor, raised } = &mut self.histories.lock()[begin.number - 1];
            if revision > floor.revision {
                raised.push((Instant::now(), revision));
                floor.revision = revision;
            }
            floor.compacted = floor.compacted.max(compacted);
            if begin.from == From::Rangecache {
                floor.shown = floor.shown.max(revision);
            }
        }
    }

    /// Records the response to a write.
    pub fn written(&self, begin: &Begin, revision: i64) {
        self.show(begin, revision, 0);
        if self.is_current(begin) && begin.from == From::Rangecache {
            self.histories.lock()[begin.number - 1].floor.is_written = true;
        }
    }

    /// Highest revision that a response had shown `age` before `begin`, or that rangecache had shown then.
    fn shown_before(&self, begin: &Begin, age: Duration) -> i64 {
        let histories = self.histories.lock();
        let raised = &histories[begin.number - 1].raised;
        let known = begin
            .at
            .checked_sub(age)
            .map_or(0, |then| raised.partition_point(|(at, _)| *at < then));
        let revision = raised[..known].last().map_or(0, |(_, revision)| *revision);
        revision.max(begin.floor.shown)
    }

    /// The history before `number`, or one further back: those in between were replaced before rangecache showed anything of
    /// them.
    fn oldest_unpassed(&self, number: usize) -> usize {
        let histories = self.histories.lock();
        let mut oldest = (number - 1).max(1);
        while oldest > 1 && histories[oldest - 1].floor.shown == 0 {
            oldest -= 1;
        }
        oldest
    }

    /// Records a violation.
    pub fn violation(&self, what: impl AsRef<str>) {
        self.cluster.trace.line(format!("VIOLATION {}", what.as_ref()));
        self.violations.lock().push(what.as_ref().to_owned());
    }

    /// The violations so far.
    pub fn violations(&self) -> Vec<String> {
        [self.violations.lock().clone(), self.cluster.violations()].concat()
    }

    /// Judges a response to a read; `age` is what it tells if it is of the last view while no member answers. Near the end
    /// of a history it may be of either.
    pub fn judge_read(&self, begin: &Begin, read: &Read, response: &RangeResponse, age: Option<Duration>) {
        let request = &read.request;
        if let Some(age) = age
            && (age > self.serve_stale || !(request.serializable || request.revision > 0))
        {
            self.violation(format!("a view of {age:?} ago: {read:?}"));
        }
        let links = self.cluster.links(From::Rangecache);
        if age.is_some()
            && links
                .iter()
                .any(|link| link.has_answered(ANSWERED_AGE, ANSWERED_MARGIN))
        {
            self.violation(format!(
                "a view of {age:?} ago, though a member answers: {read:?}"
            ));
        }
        // Without a read at a member, the response is memory's, unless it is another call's.
        let is_from_memory =
            begin.from == From::Rangecache && self.cluster.reads.load(Ordering::Relaxed) == begin.reads;
        if read.bypasses && is_from_memory {
            self.violation(format!("memory answers: {read:?}"));
        }
        let is_from_memory = is_from_memory && !self.has_hubs;
        self.judge_read_right(begin, read, response, age, is_from_memory);
        let least = match (age, read.max_staleness, request.serializable) {
            // Rounded down.
            (Some(age), _, _) => self.shown_before(begin, age + Duration::from_millis(1)),
            (None, Some(bound), _) => self.shown_before(begin, bound).max(read.least(begin)),
            (None, None, false) if read.min_revision.is_some() => begin.floor.shown.max(read.least(begin)),
            (None, None, false) => begin.floor.revision,
            (None, None, true) if is_from_memory => begin.floor.shown,
            (None, None, true) => 0,
        };
        // The last view may be of a revision that was compacted since.
        let compacted = if age.is_some() { 0 } else { begin.floor.compacted };
        let floor = Floor {
            revision: least,
            compacted,
            ..begin.floor
        };
        let number = begin.number;
        let verdict = self
            .cluster
            .look(|state| judge(&state.histories[number - 1], floor, request, response));
        let Some(what) = verdict else {
            return self.show(begin, response.revision(), 0);
        };
        // A local read of one member, or of memory, may show the history before, but memory not after it has seen the new one.
        let is_bounded = read.max_staleness.is_some() || read.min_revision.is_some();
        let may_be_older = request.serializable || age.is_some() || is_bounded;
        let has_passed = is_from_memory && begin.floor.is_written;
        let first = if may_be_older && !has_passed {
            self.oldest_unpassed(number)
        } else {
            number
        };
        let is_of_another = self.cluster.look(|state| {
            let others = state.histories.iter().enumerate().skip(first - 1);
            let mut others = others.filter(|(at, _)| at + 1 != number);
            others.any(|(_, history)| judge(history, Floor::default(), request, response).is_none())
        });
        if !is_of_another {
            self.violation(format!(
                "{what}: {read:?}\n    {response:?}\n    {begin:?}, age {age:?}"
            ));
        }
    }

    /// Records the response to a call that enables auth.
    pub fn auth_enabled(&self, begin: &Begin) {
        if self.is_current(begin) && begin.from == From::Rangecache {
            let entries = self.cluster.look(|state| state.history().len());
            let floor = &mut self.histories.lock()[begin.number - 1].floor;
            floor.auth_enabled = floor.auth_enabled.max(entries);
        }
    }

    /// Judges whether the caller had the right to get this response.
    fn judge_read_right(
        &self,
        begin: &Begin,
        read: &Read,
        response: &RangeResponse,
        age: Option<Duration>,
        is_from_memory: bool,
    ) {
        let is_old = age.is_some() || read.max_staleness.is_some() || read.min_revision.is_some();
        let needs = Needs::to_read(&read.request);
        if read.request.serializable || is_old && begin.identity.is_none() {
            return self.judge_local_right(begin, needs, is_from_memory);
        }
        // The header of a stream at a past revision is that of its last chunk: auth may have been off when it began.
        let is_exact = is_from_memory || read.request.revision == 0;
        let at = begin.identity.filter(|_| is_exact).map(|_| response.revision());
        self.judge_right(begin, &Right { needs, at }, begin.entries);
    }

    /// Judges the right to what one member, or memory, may give without asking the others: its rights may be older. Memory
    /// learns within a second that others have enabled auth, and at once that a client of its own has.
    fn judge_local_right(&self, begin: &Begin, needs: Needs, is_from_memory: bool) {
        let first = match begin.identity {
            Some(_) => begin.least_applied,
            // Later if etcd was restored.
            None if !begin.is_of_first_history() => return,
            // Another hub than the one that has enabled it learns it within a second, too.
            None if self.has_hubs => return,
            None if is_from_memory => begin.floor.auth_enabled,
            None => begin.floor.auth_enabled.min(begin.least_applied),
        };
        self.judge_right(begin, &Right { needs, at: None }, first);
    }

    /// Judges whether etcd gave the caller a right after one of the entries from number `first` on.
    fn judge_right(&self, begin: &Begin, right: &Right, first: usize) {
        let needs = std::slice::from_ref(&right.needs);
        let is_allowed = !self.is_current(begin)
            || self.cluster.look(|state| {
                let mut entries = state.history().since(first);
                entries.any(|entry| {
                    let allowed = entry.auth.allows(begin.identity, begin.number, needs);
                    allowed.is_ok() && right.at.is_none_or(|at| at == entry.revision)
                })
            });
        if !is_allowed {
            let identity = begin.identity;
            self.violation(format!("{identity:?} has no {right:?}"));
        }
    }

    /// Judges the `created` of a watcher, which one member may answer.
    pub fn judge_watch(&self, begin: &Begin, needs: Needs) {
        self.judge_local_right(begin, needs, false);
    }

    /// Judges a call that etcd refused for rights, if `refusal` is one. `is_local` if one member may have done so.
    pub fn judge_refusal(&self, begin: &Begin, needs: &[Needs], is_local: bool, refusal: Refusal) {
        let first = if is_local {
            begin.least_applied
        } else {
            begin.entries
        };
        let is_possible = !self.is_current(begin)
            || self.cluster.look(|state| {
                let mut entries = state.history().since(first).map(|entry| entry.auth).peekable();
                let revision = entries.peek().map(|auth| auth.revision);
                entries.any(|auth| match refusal {
                    Refusal::OldRevision => Some(auth.revision) != revision,
                    Refusal::NotEnabled => !auth.is_on,
                    // The token does not count if auth was off when the call began.
                    Refusal::NoToken if begin.identity.is_some() => !auth.is_on,
                    _ => auth.allows(begin.identity, begin.number, needs) == Err(refusal),
                })
            });
        if !is_possible {
            let identity = begin.identity;
            self.violation(format!("{refusal:?} in response to {identity:?}: {needs:?}"));
        }
    }

    /// Highest revision that a client may compact.
    pub fn compactable(&self) -> i64 {
        self.cluster.look(|state| state.history().compactable)
    }

    /// Judges an error in response to a RangeStream, which etcd ends if the revision of its first chunk is compacted.
    pub fn judge_refused_stream(&self, begin: &Begin, read: &Read, status: &Status) {
        let is_compacted = status.code == OUT_OF_RANGE && status.message.ends_with("has been compacted");
        if !is_compacted {
            self.judge_refused_read(begin, read, status);
        }
    }

    /// Judges an error in response to a read.
    pub fn judge_refused_read(&self, begin: &Begin, read: &Read, status: &Status) {
        let request = &read.request;
        if let Some(refusal) = Refusal::of(status) {
            let is_local = request.serializable || refusal == Refusal::OldRevision;
            return self.judge_refusal(begin, &[Needs::to_read(request)], is_local, refusal);
        }
        let is_future = status.message.ends_with("is a future revision");
        let is_above = read
            .min_revision
            .is_some_and(|least| least > begin.floor.revision);
        if status.code == OUT_OF_RANGE && is_future && (is_above || !self.is_current(begin)) {
            // A revision that etcd does not have.
        } else if status.code == OUT_OF_RANGE && request.revision > 0 {
            let compacted = self.cluster.look(|state| state.history().newest().compacted);
            let is_wrong = if is_future {
                !request.serializable && request.revision <= begin.floor.revision
            } else {
                !status.message.ends_with("has been compacted") || request.revision >= compacted
            };
            if is_wrong && self.is_current(begin) {
                self.violation(format!("{status:?} in response to {request:?}, {begin:?}"));
            }
            if !is_future && !request.serializable {
                self.show(begin, 0, request.revision + 1);
            }
        } else if !is_unavailable(status) {
            self.violation(format!("{status:?} in response to {request:?}"));
        }
    }
}

/// Whether a status is one that clients of etcd get while members fail.
pub fn is_unavailable(status: &Status) -> bool {
    status.code == UNAVAILABLE || status.code == DEADLINE_EXCEEDED
}

/// Violation by a response to a read of this history, whose header may not be below `floor`.
fn judge(
    history: &History,
    floor: Floor,
    request: &RangeRequest,
    response: &RangeResponse,
) -> Option<&'static str> {
    let revision = response.revision();
    let newest = history.newest().revision;
    if revision > newest {
        return Some("a header ahead of the store");
    }
    if revision < floor.revision {
        return Some("stale");
    }
    if !request.serializable && request.revision > 0 && request.revision < floor.compacted {
        return Some("a compacted revision was read");
    }
    if request.revision > revision {
        return Some("a revision above the header was read");
    }
    let at = if request.revision > 0 {
        request.revision
    } else {
        revision
    };
    let expected = history.range(request, at);
    let found = (&response.kvs, response.count, response.more);
    (found != (&expected.kvs, expected.count, expected.more)).then_some("wrong contents")
}
