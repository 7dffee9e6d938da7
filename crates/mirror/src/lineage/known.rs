//! Known history of etcd: its identity, the revisions that were seen, shown and compacted, and when checks were sent and what they
//! proved.
//!
//! A history is replaced as a whole ([`ClusterState`](super::cluster_state::ClusterState) owns the current one). Each
//! check, feed, load and forwarded response notes its revisions in the history in which it began, so that a late note
//! of an old history cannot change a new one.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::{collections::VecDeque, sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use etcd_store::cache::ResponseHeader;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Value of `raft_gap` before the first status.
const UNKNOWN_GAP: i64 = i64::MIN;

/// Names one history of etcd within this process: the number of replacements of history before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistoryId(u64);

impl HistoryId {
    /// The history in which the process begins.
    pub const FIRST: HistoryId = HistoryId(0);

    /// The history that replaces this one.
    #[must_use]
    pub fn next(self) -> HistoryId {
        HistoryId(self.0 + 1)
    }

    #[cfg(test)]
    pub(crate) const fn of(number: u64) -> HistoryId {
        HistoryId(number)
    }

    /// The number, for marks on connections to etcd, which know no histories.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// Known history of etcd. All fields that a read needs are atomic.
#[derive(Debug)]
pub struct History {
    /// Its name.
    pub id: HistoryId,
    /// Id of the cluster, from the first check or load; 0 before that.
    cluster_id: AtomicU64,
    /// Highest revision in any message from etcd.
    known: AtomicI64,
    /// Highest revision in the header of a response to a client.
    shown: AtomicI64,
    /// Highest known compaction revision.
    compacted: AtomicI64,
    /// Lower bound of the difference between raft index and revision ([`UNKNOWN_GAP`] at first). Each revision takes
    /// a raft entry of its own, so the difference never shrinks in one history. A restore keeps the revisions but
    /// starts a new raft log, and no number of writes brings the old difference back.
    raft_gap: AtomicI64,
    /// Header of the last quorum check; its revision may be older.
    identity: ArcSwapOption<ResponseHeader>,
    /// Written by each check; read only where a response may be older than its request.
    proofs: Mutex<Proofs>,
}

/// State when a check, a feed or a load began.
#[derive(Clone, Debug)]
pub struct Before {
    pub(crate) history: Arc<History>,
    pub(crate) unreadable: u64,
    pub(crate) auth_changes: u64,
    pub(super) revision: i64,
    pub(super) identity: Option<Arc<ResponseHeader>>,
    pub(super) raft_gap: i64,
    compacted: i64,
    /// When the check, feed or load began.
    began: Instant,
}

/// By what a later start tells whether etcd's history is still the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    pub(crate) cluster_id: u64,
    /// Revision of the keys.
    pub(crate) revision: i64,
    /// Highest known compaction revision.
    pub(crate) compacted: i64,
    /// Lower bound of the difference between raft index and revision.
    pub(crate) raft_gap: i64,
}

impl Fingerprint {
    /// Fingerprint as far as the `header` of a response shows it.
    pub(crate) fn of_header(header: &etcd_wire::etcdserverpb::ResponseHeader) -> Fingerprint {
        Fingerprint {
            cluster_id: header.cluster_id,
            revision: header.revision,
            compacted: 0,
            raft_gap: UNKNOWN_GAP,
        }
    }

    /// The state to compare a position with, as before any other check.
    pub(crate) fn before(&self) -> Before {
        Before::new(Arc::new(History::of_fingerprint(self)), 0, 0)
    }
}

impl History {
    /// A history of which nothing is known.
    pub(crate) fn new(id: HistoryId) -> History {
        History {
            id,
            cluster_id: AtomicU64::new(0),
            known: AtomicI64::new(0),
            shown: AtomicI64::new(0),
            compacted: AtomicI64::new(0),
            raft_gap: AtomicI64::new(UNKNOWN_GAP),
            identity: ArcSwapOption::empty(),
            proofs: Mutex::default(),
        }
    }

    /// A history of which no more is known than its fingerprint.
    fn of_fingerprint(fingerprint: &Fingerprint) -> History {
        let history = History::new(HistoryId::FIRST);
        history.note_cluster(fingerprint.cluster_id);
        history.note_known(fingerprint.revision);
        history.note_compacted(fingerprint.compacted);
        raise(&history.raft_gap, fingerprint.raft_gap);
        history
    }

    /// Fingerprint by which a later start recognizes this history, for keys at `revision`.
    pub(crate) fn fingerprint(&self, revision: i64) -> Fingerprint {
        Fingerprint {
            cluster_id: self.cluster_id.load(Ordering::Acquire),
            revision,
            compacted: self.compacted(),
            raft_gap: self.raft_gap.load(Ordering::Acquire),
        }
    }

    /// Records the cluster of a member that was read from. Returns whether it is the history's: the first one decides. A
    /// server that is not etcd may send 0.
    pub(crate) fn note_cluster(&self, cluster_id: u64) -> bool {
        if cluster_id == 0 {
            return true;
        }
        // Loaded first: nearly always it is known, and an exchange would take the cache line away from other cores.
        let mut known = self.cluster_id.load(Ordering::Acquire);
        if known == 0 {
            let exchanged =
                self.cluster_id
                    .compare_exchange(0, cluster_id, Ordering::AcqRel, Ordering::Acquire);
            known = exchanged.err().unwrap_or(cluster_id);
        }
        known == cluster_id
    }

    /// Whether a response of the cluster `cluster_id` is not known to be of another cluster than the history's.
    pub(crate) fn may_be_of_cluster(&self, cluster_id: u64) -> bool {
        let known = self.cluster_id.load(Ordering::Acquire);
        known == 0 || known == cluster_id
    }

    /// Records `revision` of a feed, a load or a check.
    pub fn note_known(&self, revision: i64) {
        raise(&self.known, revision);
    }

    pub(crate) fn known(&self) -> i64 {
        self.known.load(Ordering::Acquire)
    }

    /// Records that a client gets a response at `revision`, before it does.
    pub(crate) fn note_shown(&self, revision: i64) {
        raise(&self.shown, revision);
    }

    pub(crate) fn shown(&self) -> i64 {
        self.shown.load(Ordering::Acquire)
    }

    pub(crate) fn note_compacted(&self, revision: i64) {
        raise(&self.compacted, revision);
    }

    pub(crate) fn compacted(&self) -> i64 {
        self.compacted.load(Ordering::Acquire)
    }

    pub(crate) fn note_raft_index(&self, raft_index: u64, revision: i64) {
        raise(&self.raft_gap, gap(raft_index, revision));
    }

    pub(crate) fn note_identity(&self, header: ResponseHeader) {
        // Compared first: nearly always only the revision changes, and a store would slow down readers.
        let same = self.identity.load().as_ref().is_some_and(|identity| {
            let revision = identity.revision;
            **identity == ResponseHeader { revision, ..header }
        });
        if !same {
            self.identity.store(Some(Arc::new(header)));
        }
    }

    pub(crate) fn identity(&self) -> Option<Arc<ResponseHeader>> {
        self.identity.load_full()
    }

    /// Records that a check which was sent at `sent` proved `revision`.
    pub(crate) fn note_proof(&self, sent: Instant, revision: i64) {
        self.proofs.lock().record(SentAt::new(sent), revision);
    }

    /// Time at which a view of this history at `revision` is proven to have lacked no acknowledged write: the last check
    /// that proves it was sent then. `None` if there was none.
    #[must_use]
    pub fn proven_at(&self, revision: i64) -> Option<SentAt> {
        self.proofs.lock().of(revision)
    }
}

impl Before {
    pub(crate) fn new(history: Arc<History>, unreadable: u64, auth_changes: u64) -> Before {
        Before {
            revision: history.known(),
            identity: history.identity(),
            raft_gap: history.raft_gap.load(Ordering::Acquire),
            compacted: history.compacted(),
            began: Instant::now(),
            history,
            unreadable,
            auth_changes,
        }
    }

    /// Time before which the check was not sent.
    #[must_use]
    pub fn began(&self) -> Instant {
        self.began
    }

    /// Highest compaction revision that was known.
    pub(crate) fn compacted(&self) -> i64 {
        self.compacted
    }

    /// The history in which the check began.
    #[must_use]
    pub fn history_id(&self) -> HistoryId {
        self.history.id
    }

    /// Records the cluster of a member that was read from. Returns whether it is the history's.
    pub(crate) fn note_cluster(&self, cluster_id: u64) -> bool {
        self.history.note_cluster(cluster_id)
    }
}

/// Raises a watermark.
fn raise(mark: &AtomicI64, value: i64) {
    // Nearly always nothing changes: a load does not take the cache line away from other cores.
    if mark.load(Ordering::Acquire) < value {
        mark.fetch_max(value, Ordering::AcqRel);
    }
}

pub(super) fn gap(raft_index: u64, revision: i64) -> i64 {
    i64::try_from(raft_index)
        .unwrap_or(i64::MAX)
        .saturating_sub(revision)
}

/// Bound on the checks that are kept; the oldest are dropped.
const MAX_PROOFS: usize = 128;
/// Distance within which at most two checks are kept, so that those of a second fit into [`MAX_PROOFS`] under any load.
const DISTANCE: Duration = Duration::from_millis(20);

/// Time at which a check was sent.
#[derive(Clone, Copy, Debug)]
pub struct SentAt {
    /// By the clock that stands still while the machine is suspended.
    pub instant: Instant,
    /// Total time for which the machine had been suspended since its start.
    suspended: Duration,
}

impl SentAt {
    /// A check that was sent at `instant`, a moment ago.
    pub(super) fn new(instant: Instant) -> SentAt {
        SentAt {
            instant,
            suspended: suspended(),
        }
    }

    /// Time since then, in which the machine may have been suspended.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.instant.elapsed() + suspended().saturating_sub(self.suspended)
    }
}

/// Time for which the machine has been suspended since its start: a view is as old as its clients are, not as the clock
/// that tokio uses. A virtual machine that is continued from a copy of its memory does not know how long that lay.
#[cfg(target_os = "linux")]
fn suspended() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let read = |clock| Duration::try_from(clock_gettime(clock)).unwrap_or_default();
    // In this order: what passes between the two reads must not count as suspended.
    let boot = read(ClockId::Boottime);
    boot.saturating_sub(read(ClockId::Monotonic))
}

#[cfg(not(target_os = "linux"))]
fn suspended() -> Duration {
    Duration::ZERO
}

/// Checks of one history: each was sent later than the one before it, and proved a higher revision.
///
/// A check that was sent at some time and reported revision P proves that every write acknowledged before that time is
/// at or below P. A view at P or later therefore lacks nothing that was acknowledged before the check was **sent**. When
/// its response arrived proves nothing: etcd may have been written since. A progress notification proves nothing
/// either, not even as the response to a request: a member reports its own revision, which lags behind the cluster's
/// while the member is slow or cut off.
#[derive(Debug, Default)]
pub(super) struct Proofs(VecDeque<(SentAt, i64)>);

impl Proofs {
    /// Records that a check which was sent at `sent` proved `revision`.
    pub(super) fn record(&mut self, sent: SentAt, revision: i64) {
        let mut newest_first = self.0.iter().rev();
        if newest_first.any(|(later, lower)| later.instant >= sent.instant && *lower <= revision) {
            return;
        }
        self.0
            .retain(|(earlier, higher)| earlier.instant > sent.instant || *higher < revision);
        let place = self
            .0
            .partition_point(|(earlier, _)| earlier.instant < sent.instant);
        self.0.insert(place, (sent, revision));
        let count = self.0.len();
        if count > 2 && self.0[count - 1].0.instant - self.0[count - 3].0.instant < DISTANCE {
            self.0.remove(count - 2);
        }
        if self.0.len() > MAX_PROOFS {
            self.0.pop_front();
        }
    }

    /// Time of the last check that proves that a view at `revision` lacked nothing when the check was sent.
    pub(super) fn of(&self, revision: i64) -> Option<SentAt> {
        let mut newest_first = self.0.iter().rev();
        newest_first
            .find(|(_, proven)| *proven <= revision)
            .map(|(sent, _)| *sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(cluster_id: u64, revision: i64, raft_term: u64) -> ResponseHeader {
        ResponseHeader {
            cluster_id,
            revision,
            raft_term,
            ..ResponseHeader::default()
        }
    }

    /// A history of cluster 7, at revision 10 and raft term 3, with a raft index 100 above the revision.
    fn history() -> Arc<History> {
        let history = History::new(HistoryId::FIRST);
        assert!(history.note_cluster(7));
        history.note_known(10);
        history.note_identity(header(7, 10, 3));
        history.note_raft_index(110, 10);
        Arc::new(history)
    }

    fn before(history: &Arc<History>) -> Before {
        Before::new(Arc::clone(history), 0, 0)
    }

    #[test]
    fn first_cluster_that_has_an_id_decides() {
        let history = History::new(HistoryId::FIRST);
        assert!(history.note_cluster(0));
        assert!(history.may_be_of_cluster(8));
        assert!(history.note_cluster(7));
        assert!(!history.note_cluster(8));
        assert!(!history.may_be_of_cluster(8));
        assert!(history.note_cluster(7) && history.may_be_of_cluster(7));
        assert!(history.note_cluster(0), "a server that is not etcd");
    }

    #[test]
    fn late_note_of_a_lower_revision_changes_nothing() {
        let history = history();
        for (revision, expected) in [(12, 12), (11, 12), (13, 13)] {
            history.note_known(revision);
            history.note_shown(revision);
            history.note_compacted(revision);
            assert_eq!(history.known(), expected);
            assert_eq!(history.shown(), expected);
            assert_eq!(history.compacted(), expected);
        }
    }

    #[test]
    fn check_continues_at_no_lower_revision_and_in_no_other_cluster() {
        let before = before(&history());
        assert!(before.continues_with(&header(7, 10, 3), None));
        assert!(before.continues_with(&header(7, 11, 3), None));
        assert!(!before.continues_with(&header(7, 9, 3), None));
        assert!(!before.continues_with(&header(8, 11, 3), None));
    }

    #[test]
    fn check_is_compared_with_what_was_known_when_it_began() {
        let history = history();
        let before = before(&history);
        history.note_known(20);
        history.note_raft_index(520, 20);
        history.note_identity(header(7, 20, 4));
        let shown = header(7, 10, 3);
        assert!(!before.needs_raft_index(&shown));
        assert!(before.continues_with(&shown, Some(110)));
    }

    #[test]
    fn raft_index_that_is_nearer_to_the_revision_is_of_another_log() {
        let history = history();
        // A lower bound: a member that lags shows a smaller difference than was seen.
        history.note_raft_index(111, 12);
        let before = before(&history);
        assert!(before.log_continues(20, 120));
        assert!(before.log_continues(20, 500));
        assert!(!before.log_continues(20, 119));
        assert!(!before.continues_with(&header(7, 20, 2), Some(119)));
        assert!(before.continues_with(&header(7, 20, 2), Some(120)));
    }

    #[test]
    fn raft_term_alone_decides_where_there_is_no_raft_index() {
        let before = before(&history());
        assert!(before.needs_raft_index(&header(7, 20, 2)));
        assert!(!before.needs_raft_index(&header(7, 20, 3)));
        assert!(!before.continues_with(&header(7, 20, 2), Some(0)));
        assert!(before.continues_with(&header(7, 20, 3), Some(0)));
    }

    #[test]
    fn view_is_as_old_as_the_last_check_that_reported_its_revision_or_a_lower_one() {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let mut proofs = Proofs::default();
        assert!(proofs.of(10).is_none());
        for (sent, revision) in [(0, 10), (100, 10), (200, 12), (300, 15)] {
            proofs.record(SentAt::new(at(sent)), revision);
        }
        let expected = [
            (9, None),
            (10, Some(100)),
            (11, Some(100)),
            (12, Some(200)),
            (14, Some(200)),
            (15, Some(300)),
            (99, Some(300)),
        ];
        for (revision, sent) in expected {
            let of = proofs.of(revision).map(|sent| sent.instant);
            assert_eq!(of, sent.map(at), "{revision}");
        }
    }

    #[test]
    fn checks_that_end_out_of_order_prove_the_same() {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let mut proofs = Proofs::default();
        for (sent, revision) in [(300, 15), (100, 10), (200, 12), (250, 12), (50, 11)] {
            proofs.record(SentAt::new(at(sent)), revision);
        }
        let kept: Vec<_> = proofs
            .0
            .iter()
            .map(|(sent, revision)| (sent.instant, *revision))
            .collect();
        assert_eq!(kept, [(at(100), 10), (at(250), 12), (at(300), 15)]);
    }

    #[test]
    fn thousands_of_checks_take_a_bounded_place_and_the_newest_is_kept() {
        let start = Instant::now();
        let mut proofs = Proofs::default();
        for n in 0..10_000_u64 {
            proofs.record(
                SentAt::new(start + Duration::from_millis(n)),
                i64::try_from(n).unwrap(),
            );
        }
        assert_eq!(proofs.0.len(), MAX_PROOFS);
        let of = |revision| proofs.of(revision).unwrap().instant;
        assert_eq!(of(9_999), start + Duration::from_millis(9_999));
        for millis in [9_998, 8_500] {
            let sent = of(i64::try_from(millis).unwrap());
            let late = start + Duration::from_millis(millis) - sent;
            assert!(late <= DISTANCE, "{millis}: {late:?}");
        }
    }

    #[test]
    fn suspended_time_counts() {
        let sent = SentAt::new(Instant::now());
        let before_suspension = SentAt {
            suspended: sent.suspended.saturating_sub(Duration::from_secs(3600)),
            ..sent
        };
        let suspended = sent.suspended - before_suspension.suspended;
        assert!(before_suspension.elapsed() >= suspended);
        assert!(sent.elapsed() < Duration::from_secs(3600));
    }
}
