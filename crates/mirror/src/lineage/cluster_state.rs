//! State of the etcd cluster as far as it is known here, and the revisions that clients of this process have seen.
//!
//! Two invariants are enforced here. **I4**: revisions never decrease; a decrease means that history was replaced (a
//! restore). **I11**: time never runs backwards for clients; no answer from memory is older than any response that a
//! client of this process has received.
//!
//! The current [`History`] is replaced by one function, [`ClusterState::replace`], on one of these transitions:
//!
//! | what happens | transition | history is replaced if |
//! |---|---|---|
//! | a quorum check ends | [`ClusterState::after_check`] | another cluster, a lower revision, or another raft log |
//! | a feed or a load begins | `Position::continues`, then [`ClusterState::contradict`] | as for a check, or a compaction that is undone |
//! | a feed's member is left out | [`ClusterState::contradict`] | always |
//! | a feed's or a load's contents differ | [`ClusterState::contradict`] | always |
//! | a client's write ends | [`ClusterState::note_write`] | its revision was known before it was sent |
//!
//! The one that replaces it ([`Transition::Replaced`]) drops the mirrors. All that began in the old history and end later
//! prove nothing ([`Transition::Outdated`]), and their notes go to the old history.

use std::sync::atomic::{AtomicU64, Ordering};
use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use etcd_store::cache::ResponseHeader;
use tokio::{sync::Notify, time::Instant};

use super::auth_state::{Auth, AuthChange, AuthState};
use super::known::{Before, History, HistoryId};
use crate::metrics::{Unreadable, UnreadableMetrics};

/// Result of comparing a response with the history in which its call began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// The response is of the same history, at the same or a later revision.
    Continues,
    /// The history was replaced, and this response is the first that shows it: the caller drops the mirrors.
    Replaced,
    /// The history was replaced while the call was in flight: the response belongs to no known history.
    Outdated,
}

/// Known state of the cluster, updated by checks, loads, feeds and forwarded responses. There is no lock.
#[derive(Debug)]
pub struct ClusterState {
    history: ArcSwap<History>,
    /// Number of forwarded responses whose revision could not be read.
    unreadable: AtomicU64,
    /// Value of `unreadable` after the last response that was not of the current history, or not known to be.
    of_other_history: AtomicU64,
    /// Value of `unreadable` before the last quorum check that has ended.
    unreadable_covered: AtomicU64,
    auth: AuthState,
    /// Opening time of the newest connection on which etcd has answered a client's call.
    answered_by: LatestInstant,
    /// Opening time of the newest connection on which etcd has answered a quorum check.
    checked_by: LatestInstant,
    /// Notified when a response to a client has replaced the history: the mirrors are to be dropped.
    contradicted: Notify,
    metrics: Arc<UnreadableMetrics>,
}

/// The latest of several times.
#[derive(Debug)]
struct LatestInstant {
    /// Nanoseconds since `born`.
    nanos: AtomicU64,
    born: Instant,
}

impl LatestInstant {
    fn new(born: Instant) -> LatestInstant {
        LatestInstant {
            nanos: AtomicU64::new(0),
            born,
        }
    }

    fn note(&self, time: Instant) {
        let nanos = time.saturating_duration_since(self.born).as_nanos();
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        // Nearly always nothing changes: a load does not take the cache line away from other cores.
        if self.nanos.load(Ordering::Acquire) < nanos {
            self.nanos.fetch_max(nanos, Ordering::AcqRel);
        }
    }

    fn get(&self) -> Instant {
        self.born + Duration::from_nanos(self.nanos.load(Ordering::Acquire))
    }
}

impl Default for ClusterState {
    fn default() -> Self {
        ClusterState::new(Arc::default())
    }
}

impl ClusterState {
    /// State of which nothing is known. `metrics` count the responses whose revision cannot be read.
    #[must_use]
    pub fn new(metrics: Arc<UnreadableMetrics>) -> ClusterState {
        let born = Instant::now();
        ClusterState {
            history: ArcSwap::from_pointee(History::new(HistoryId::FIRST)),
            unreadable: AtomicU64::new(0),
            of_other_history: AtomicU64::new(0),
            unreadable_covered: AtomicU64::new(0),
            auth: AuthState::default(),
            answered_by: LatestInstant::new(born),
            checked_by: LatestInstant::new(born),
            contradicted: Notify::new(),
            metrics,
        }
    }

    /// The current history.
    #[must_use]
    pub fn current(&self) -> Arc<History> {
        self.history.load_full()
    }

    /// Id of the current history.
    #[must_use]
    pub fn history(&self) -> HistoryId {
        self.history.load().id
    }

    /// Highest revision of the current history in any message from etcd.
    #[must_use]
    pub fn known(&self) -> i64 {
        self.history.load().known()
    }

    /// Records that etcd has compacted: it refuses revisions below `revision`. Returns whether `history` is still the
    /// current one; otherwise nothing is recorded.
    pub fn note_compacted(&self, history: HistoryId, revision: i64) -> bool {
        let current = self.history.load();
        let is_current = current.id == history;
        if is_current {
            current.note_compacted(revision);
        }
        is_current
    }

    /// Highest known compaction revision; etcd refuses lower revisions.
    #[must_use]
    pub fn compacted(&self) -> i64 {
        self.history.load().compacted()
    }

    /// Records `revision` of an answer from memory that was proven in `history`, before it is sent. Returns whether that
    /// is still the current history; otherwise the answer must not be sent.
    #[must_use]
    pub fn record_served(&self, history: HistoryId, revision: i64) -> bool {
        let current = self.history.load();
        let is_current = current.id == history;
        if is_current {
            current.note_shown(revision);
        }
        is_current
    }

    /// Records `revision` of a forwarded response of the cluster `cluster_id`, which began in `history`.
    pub fn record_forwarded(&self, history: &Arc<History>, cluster_id: u64, revision: i64) {
        let is_same_cluster = history.may_be_of_cluster(cluster_id);
        if is_same_cluster {
            history.note_shown(revision);
            history.note_known(revision);
        }
        // A response of an old history must not raise the new one's minimum, and one of a new history that was
        // requested before it was known must not be forgotten: the next check decides.
        if !is_same_cluster || !self.is_current(history) {
            self.note_unreadable(Unreadable::History);
        }
    }

    /// Records a response whose revision cannot be read. Until a later quorum check has ended, serializable reads
    /// need a proof, too.
    pub fn note_unreadable(&self, cause: Unreadable) {
        self.metrics.record(cause);
        let number = self.unreadable.fetch_add(1, Ordering::AcqRel) + 1;
        if cause == Unreadable::History {
            self.of_other_history.fetch_max(number, Ordering::AcqRel);
        }
    }

    /// Records that etcd has answered a client's call on a connection that was opened at `opened`.
    pub fn note_answered(&self, opened: Instant) {
        self.answered_by.note(opened);
    }

    /// Records that etcd has answered a quorum check on a connection that was opened at `opened`.
    pub(crate) fn note_checked(&self, opened: Instant) {
        self.checked_by.note(opened);
    }

    /// Opening time of the newest connection on which etcd has answered a call of this process: everything that is known
    /// was known on connections that are as old, or older.
    #[must_use]
    pub fn last_heard_on(&self) -> Instant {
        self.answered_by.get().max(self.checked_by.get())
    }

    /// Opening time of the newest connection on which etcd has answered a client's call. What answers on a connection
    /// that was opened after a check may be of another history than the check.
    #[must_use]
    pub fn last_answered_by(&self) -> Instant {
        self.answered_by.get()
    }

    /// Lowest revision that an answer may have (I11); `None` while an unreadable response makes it unknown.
    #[must_use]
    pub fn min_served_revision(&self) -> Option<i64> {
        let covered = self.unreadable_covered.load(Ordering::Acquire);
        (self.unreadable.load(Ordering::Acquire) == covered).then(|| self.history.load().shown())
    }

    /// Highest revision that clients are known to have seen; `None` while a response of another history makes it
    /// meaningless. Unlike [`ClusterState::min_served_revision`], it leaves out what unreadable responses may have shown.
    #[must_use]
    pub fn known_shown_revision(&self) -> Option<i64> {
        let covered = self.unreadable_covered.load(Ordering::Acquire);
        (self.of_other_history.load(Ordering::Acquire) <= covered).then(|| self.history.load().shown())
    }

    /// Header of the last quorum check, for answers without a check of their own.
    #[must_use]
    pub fn identity(&self) -> Option<Arc<ResponseHeader>> {
        self.history.load().identity()
    }

    /// Whether etcd's auth is on.
    #[must_use]
    pub fn auth(&self) -> Auth {
        self.auth.get()
    }

    /// Records that a check without credentials succeeded, unless auth may have changed since the check began. Returns the
    /// previous state.
    pub fn auth_seems_off(&self, before: &Before) -> Auth {
        self.auth.seems_off(before.auth_changes)
    }

    /// Records that a check without credentials was refused; returns the previous state.
    pub fn auth_is_on(&self) -> Auth {
        self.auth.is_on()
    }

    /// Records that a call through this process may have changed auth: it is unknown until the next check.
    pub fn auth_may_have_changed(&self) -> AuthChange {
        self.auth.may_have_changed()
    }

    /// Records that etcd has refused the call of `change`: unless there was another one since, auth is known as before.
    /// A client that repeats a refused call would otherwise have every read forwarded.
    pub fn auth_was_refused(&self, change: AuthChange) {
        self.auth.was_refused(change);
    }
}

impl ClusterState {
    /// State to compare a quorum check, a feed or a load with; to be read before it begins.
    #[must_use]
    pub fn before_check(&self) -> Before {
        let unreadable = self.unreadable.load(Ordering::Acquire);
        Before::new(self.current(), unreadable, self.auth.changes())
    }

    /// Compares a quorum check's `header` with the state when the check began, and with the `raft_index` of a later
    /// status of the same member if it was read ([`Before::needs_raft_index`]).
    pub fn after_check(
        &self,
        before: &Before,
        header: ResponseHeader,
        raft_index: Option<u64>,
    ) -> Transition {
        let history = &before.history;
        if !before.continues_with(&header, raft_index) {
            let next = History::new(history.id.next());
            next.note_known(header.revision);
            next.note_cluster(header.cluster_id);
            next.note_identity(header);
            return self.replace(before, next);
        }
        if !self.is_current(history) {
            return Transition::Outdated;
        }
        history.note_known(header.revision);
        history.note_identity(header);
        history.note_proof(before.began(), header.revision);
        if self.unreadable_covered.load(Ordering::Acquire) < before.unreadable {
            // The unreadable responses may have shown any revision up to this one. Raised before they count as covered.
            history.note_shown(header.revision);
            self.unreadable_covered
                .fetch_max(before.unreadable, Ordering::AcqRel);
        }
        Transition::Continues
    }

    /// Records a member's `raft_index`, and the `revision` of a linearizable read that began after that status. Both
    /// belong to the history of `before`, the state before the status.
    pub fn note_raft_index(&self, before: &Before, raft_index: u64, revision: i64) {
        before.history.note_raft_index(raft_index, revision);
    }

    /// Records that etcd's contents or raft log are not those of the history in which a feed or a load began.
    pub fn contradict(&self, before: &Before) -> Transition {
        self.replace(before, History::new(before.history.id.next()))
    }

    /// Compares a write's response with the state before the write was sent ([`Before::write_continues`]). If the history was replaced,
    /// [`ClusterState::until_contradicted`] returns.
    pub fn note_write(&self, before: &Before, cluster_id: u64, revision: i64, has_changed: bool) {
        if before.write_continues(cluster_id, revision, has_changed) {
            return;
        }
        let next = History::new(before.history.id.next());
        next.note_known(revision);
        if self.replace(before, next) == Transition::Replaced {
            self.contradicted.notify_one();
        }
    }

    /// Waits until the response to a write has shown that the history was replaced: the mirrors are to be dropped.
    pub(crate) async fn until_contradicted(&self) {
        self.contradicted.notified().await;
    }

    /// Replaces the history of `before`, unless that has happened already.
    fn replace(&self, before: &Before, next: History) -> Transition {
        let previous = self.history.compare_and_swap(&before.history, Arc::new(next));
        if !Arc::ptr_eq(&previous, &before.history) {
            return Transition::Outdated;
        }
        // What was shown before the replacement was shown before the new history is loaded.
        self.unreadable_covered
            .fetch_max(before.unreadable, Ordering::AcqRel);
        Transition::Replaced
    }

    fn is_current(&self, history: &Arc<History>) -> bool {
        Arc::ptr_eq(&self.history.load(), history)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(cluster_id: u64, revision: i64, raft_term: u64) -> ResponseHeader {
        ResponseHeader {
            cluster_id,
            member_id: 1,
            revision,
            raft_term,
            leader_id: 0,
        }
    }

    /// State after a check of cluster 1 at revision 100 and term 5, and a status at raft index 120.
    fn checked() -> ClusterState {
        let state = ClusterState::default();
        let before = state.before_check();
        assert_eq!(
            state.after_check(&before, header(1, 100, 5), None),
            Transition::Continues
        );
        state.note_raft_index(&before, 120, 100);
        assert!(state.record_served(HistoryId::FIRST, 100));
        state
    }

    #[test]
    fn history_is_replaced_by_each_contradiction_and_by_nothing_else() {
        let continues = [
            ("the same", header(1, 100, 5), None),
            ("later", header(1, 101, 6), None),
            ("raft log of the known history", header(1, 300, 5), Some(320)),
            ("entries without a revision", header(1, 300, 5), Some(900)),
            (
                "lower term after a snapshot was installed",
                header(1, 100, 4),
                Some(120),
            ),
            ("server without raft", header(1, 101, 5), Some(0)),
        ];
        let replaced = [
            ("lower revision", header(1, 99, 5), None),
            ("lower revision in a later term", header(1, 99, 9), Some(119)),
            ("another cluster", header(2, 101, 5), None),
            ("shorter raft log", header(1, 300, 5), Some(319)),
            ("shorter raft log in a lower term", header(1, 300, 2), Some(204)),
            ("lower term without raft", header(1, 300, 4), Some(0)),
        ];
        let expected = continues
            .map(|case| (case, Transition::Continues))
            .into_iter()
            .chain(replaced.map(|case| (case, Transition::Replaced)));
        for ((what, header, raft_index), expected) in expected {
            let state = checked();
            let (before, concurrent) = (state.before_check(), state.before_check());
            assert_eq!(state.after_check(&before, header, raft_index), expected, "{what}");
            let is_replaced = expected == Transition::Replaced;
            assert_eq!(state.history().number(), u64::from(is_replaced), "{what}");
            assert_eq!(
                state.min_served_revision(),
                Some(if is_replaced { 0 } else { 100 }),
                "{what}: an old history's minimum must not apply to the new one"
            );
            if is_replaced {
                assert_eq!(
                    state.after_check(&concurrent, header, raft_index),
                    Transition::Outdated,
                    "{what}: replaced once"
                );
                assert_eq!(state.contradict(&concurrent), Transition::Outdated, "{what}");
                assert_eq!(state.history().number(), 1, "{what}");
                assert_eq!(
                    state.after_check(&state.before_check(), header, raft_index),
                    Transition::Continues,
                    "{what}: the new history"
                );
            }
        }
        let state = checked();
        assert_eq!(state.contradict(&state.before_check()), Transition::Replaced);
        assert_eq!(
            (state.history().number(), state.known(), state.compacted()),
            (1, 0, 0)
        );
        assert_eq!(state.identity(), None);
    }

    #[test]
    fn lower_term_needs_a_raft_index() {
        let before = checked().before_check();
        assert!(before.needs_raft_index(&header(1, 100, 4)));
        assert!(!before.needs_raft_index(&header(1, 100, 5)));
        let nothing_known = ClusterState::default().before_check();
        assert!(!nothing_known.needs_raft_index(&header(1, 100, 1)));
        assert!(nothing_known.log_continues(100, 5));
        assert!(before.log_continues(400, 420));
        assert!(!before.log_continues(400, 419));
    }

    #[test]
    fn late_note_of_an_old_history_does_not_change_the_new_one() {
        let state = checked();
        let (old, number) = (state.current(), state.history());
        let before = state.before_check();
        state.after_check(&before, header(1, 60, 6), None);
        old.note_known(1_000);
        state.note_raft_index(&before, 9_000, 10);
        assert!(!state.note_compacted(number, 1_000));
        assert!(!state.record_served(number, 1_000), "its answer must not be sent");
        assert_eq!((state.known(), state.compacted()), (60, 0));
        assert_eq!(state.min_served_revision(), Some(0));
        state.record_forwarded(&old, 1, 1_000);
        assert_eq!(state.known(), 60);
        assert_eq!(
            state.min_served_revision(),
            None,
            "it may have been a response of the new history"
        );
        let check = state.after_check(&state.before_check(), header(1, 61, 6), Some(70));
        assert_eq!(check, Transition::Continues);
        assert_eq!(state.min_served_revision(), Some(61));
    }

    #[test]
    fn revision_recorded_during_a_check_is_no_regression() {
        let state = ClusterState::default();
        let before = state.before_check();
        state.current().note_known(11);
        assert_eq!(
            state.after_check(&before, header(1, 10, 2), None),
            Transition::Continues
        );
    }

    #[test]
    fn check_of_another_cluster_than_the_load_replaces_the_history() {
        for (loaded, checked, expected) in [
            (1, 1, Transition::Continues),
            (1, 2, Transition::Replaced),
            (0, 2, Transition::Continues),
            (1, 0, Transition::Continues),
        ] {
            let state = ClusterState::default();
            assert!(state.before_check().note_cluster(loaded));
            assert_eq!(
                state.after_check(&state.before_check(), header(checked, 10, 2), None),
                expected,
                "loaded from {loaded}, checked at {checked}"
            );
        }
    }

    #[test]
    fn min_served_revision_is_the_highest_revision_in_a_response() {
        let state = ClusterState::default();
        state.after_check(&state.before_check(), header(1, 10, 2), None);
        assert_eq!(
            state.min_served_revision(),
            Some(0),
            "a check is no response to a client"
        );
        state.record_forwarded(&state.current(), 1, 12);
        assert!(state.record_served(HistoryId::FIRST, 11));
        assert_eq!(state.min_served_revision(), Some(12));
        state.record_forwarded(&state.current(), 9, 99);
        assert_eq!(
            state.min_served_revision(),
            None,
            "a response of another cluster: a check decides"
        );
        assert_eq!(state.known(), 12);
    }

    #[test]
    fn write_at_a_revision_that_was_known_before_replaces_the_history() {
        for (revision, has_changed, expected) in [
            (101, true, 0),
            (100, false, 0),
            (100, true, 1),
            (99, false, 1),
            (0, true, 0),
        ] {
            let state = checked();
            let before = state.before_check();
            // Later than the write: nothing follows from it.
            state.current().note_known(200);
            state.note_write(&before, 1, revision, has_changed);
            assert_eq!(state.history().number(), expected, "{revision} {has_changed}");
        }
        let state = checked();
        state.note_write(&state.before_check(), 2, 5, true);
        assert_eq!(state.history().number(), 0, "another cluster: a check decides");
    }

    #[test]
    fn check_that_covers_an_unreadable_response_raises_the_minimum_to_its_revision() {
        let state = ClusterState::default();
        let early = state.before_check();
        state.note_unreadable(Unreadable::Json);
        assert_eq!(state.min_served_revision(), None);
        state.after_check(&early, header(1, 10, 2), None);
        assert_eq!(
            state.min_served_revision(),
            None,
            "the check began before the response"
        );
        state.after_check(&state.before_check(), header(1, 12, 2), None);
        assert_eq!(
            state.min_served_revision(),
            Some(12),
            "the response may have shown revision 12"
        );
        state.after_check(&state.before_check(), header(1, 20, 2), None);
        assert_eq!(
            state.min_served_revision(),
            Some(12),
            "a check that covers nothing shows nothing"
        );
    }

    #[test]
    fn unreadable_response_hides_no_shown_revision_but_one_of_another_history_does() {
        let state = ClusterState::default();
        state.after_check(&state.before_check(), header(1, 10, 2), None);
        state.record_forwarded(&state.current(), 1, 12);
        state.note_unreadable(Unreadable::Json);
        assert_eq!(
            (state.min_served_revision(), state.known_shown_revision()),
            (None, Some(12))
        );
        state.record_forwarded(&state.current(), 9, 99);
        assert_eq!(state.known_shown_revision(), None);
        state.note_unreadable(Unreadable::Header);
        assert_eq!(state.known_shown_revision(), None, "until a check");
        state.after_check(&state.before_check(), header(1, 13, 2), None);
        assert_eq!(
            (state.min_served_revision(), state.known_shown_revision()),
            (Some(13), Some(13))
        );
    }

    #[test]
    fn identity_follows_the_leader() {
        let state = ClusterState::default();
        for leader_id in [7, 0, 9] {
            let header = ResponseHeader {
                leader_id,
                ..header(1, 10, 2)
            };
            state.after_check(&state.before_check(), header, None);
            assert_eq!(
                state.identity().map(|identity| identity.leader_id),
                Some(leader_id)
            );
        }
    }
}
