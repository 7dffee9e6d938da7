//! State of the etcd cluster as far as it is known here, and the revisions that clients of this process have seen.
//!
//! Two invariants are enforced here. **I4**: revisions never decrease; a decrease means that history was replaced (a
//! restore). **I11**: time never runs backwards for clients; no answer from memory is older than any response that a
//! client of this process has received.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering};

use arc_swap::ArcSwapOption;

use crate::cache::ResponseHeader;

/// Value of `raft_gap` before the first status.
const UNKNOWN_GAP: i64 = i64::MIN;

/// Whether etcd's auth is on (I8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auth {
    /// There was no check without credentials yet, or a call may have changed auth since.
    Unknown,
    /// The last check without credentials succeeded.
    Off,
    /// The last check without credentials was refused.
    On,
}

/// State when a quorum check began.
#[derive(Clone, Copy, Debug)]
pub struct Before {
    revision: i64,
    unreadable: u64,
    identity: Option<(u64, u64)>,
    auth_changes: u64,
    raft_gap: i64,
}

/// Result of comparing a response with the known history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The same history, at the same or a later revision.
    Continues,
    /// Another cluster, an older revision or an older raft term: the known history was replaced.
    Replaced,
}

/// Known state of the cluster, updated by checks, loads, feeds and forwarded responses. All fields are atomic; there
/// is no lock.
#[derive(Debug)]
pub struct ClusterState {
    /// Highest revision in any message from etcd.
    known_revision: AtomicI64,
    /// Highest revision in the header of a response to a client.
    shown_revision: AtomicI64,
    /// Highest known compaction revision.
    compacted_revision: AtomicI64,
    /// Number of replacements of history.
    history: AtomicU64,
    /// Number of forwarded responses whose header could not be read (compressed, or of the JSON gateway).
    unreadable: AtomicU64,
    /// Value of `unreadable` before the last quorum check that has ended.
    unreadable_covered: AtomicU64,
    /// Lower bound of the difference between raft index and revision ([`UNKNOWN_GAP`] at first). Each revision takes
    /// a raft entry of its own, so the difference never shrinks in one history. A restore keeps the revisions but
    /// starts a new raft log, and no number of writes brings the old difference back.
    raft_gap: AtomicI64,
    /// cluster_id, member_id and raft_term of the last quorum check.
    identity: ArcSwapOption<ResponseHeader>,
    auth: AtomicU8,
    /// Number of calls through this process that may have changed auth.
    auth_changes: AtomicU64,
}

impl Default for ClusterState {
    fn default() -> Self {
        ClusterState {
            known_revision: AtomicI64::new(0),
            shown_revision: AtomicI64::new(0),
            compacted_revision: AtomicI64::new(0),
            history: AtomicU64::new(0),
            unreadable: AtomicU64::new(0),
            unreadable_covered: AtomicU64::new(0),
            raft_gap: AtomicI64::new(UNKNOWN_GAP),
            identity: ArcSwapOption::empty(),
            auth: AtomicU8::new(0),
            auth_changes: AtomicU64::new(0),
        }
    }
}

impl ClusterState {
    /// Records `revision` of a feed, a load or a check.
    pub fn note_known(&self, revision: i64) {
        self.known_revision.fetch_max(revision, Ordering::AcqRel);
    }

    /// Highest revision in any message from etcd.
    #[must_use]
    pub fn known(&self) -> i64 {
        self.known_revision.load(Ordering::Acquire)
    }

    /// Records that etcd has compacted: it refuses revisions below `revision`.
    pub fn note_compacted(&self, revision: i64) {
        self.compacted_revision.fetch_max(revision, Ordering::AcqRel);
    }

    /// Highest known compaction revision; etcd refuses lower revisions.
    #[must_use]
    pub fn compacted(&self) -> i64 {
        self.compacted_revision.load(Ordering::Acquire)
    }

    /// Number of the current history, increased by each replacement.
    #[must_use]
    pub fn history(&self) -> u64 {
        self.history.load(Ordering::Acquire)
    }

    /// Records `revision` of an answer from memory, before it is sent.
    pub fn record_served(&self, revision: i64) {
        // Nearly always nothing changes: a load does not take the cache line away from other cores.
        if self.shown_revision.load(Ordering::Acquire) < revision {
            self.shown_revision.fetch_max(revision, Ordering::AcqRel);
        }
    }

    /// Records `revision` of a forwarded response of the cluster `cluster_id`.
    pub fn record_forwarded(&self, cluster_id: u64, revision: i64) {
        // A response that was in flight while history was replaced must not raise the new history's minimum.
        if self
            .identity
            .load()
            .as_ref()
            .is_some_and(|identity| identity.cluster_id != cluster_id)
        {
            return;
        }
        self.record_served(revision);
        if self.known_revision.load(Ordering::Acquire) < revision {
            self.note_known(revision);
        }
    }

    /// Records a response whose revision cannot be read. Until a later quorum check has ended, serializable reads
    /// need a proof, too.
    pub fn note_unreadable(&self) {
        self.unreadable.fetch_add(1, Ordering::AcqRel);
    }

    /// Lowest revision that an answer may have (I11); `None` while an unreadable response makes it unknown.
    #[must_use]
    pub fn min_served_revision(&self) -> Option<i64> {
        let covered = self.unreadable_covered.load(Ordering::Acquire);
        (self.unreadable.load(Ordering::Acquire) == covered)
            .then(|| self.shown_revision.load(Ordering::Acquire))
    }

    /// Header of the last quorum check, for answers without a check of their own.
    #[must_use]
    pub fn identity(&self) -> Option<Arc<ResponseHeader>> {
        self.identity.load_full()
    }

    /// Whether etcd's auth is on.
    #[must_use]
    pub fn auth(&self) -> Auth {
        match self.auth.load(Ordering::Acquire) {
            0 => Auth::Unknown,
            1 => Auth::Off,
            _ => Auth::On,
        }
    }

    /// Records that a check without credentials succeeded, unless a call may have changed auth since the check began.
    /// Returns the previous state.
    pub fn auth_seems_off(&self, before: Before) -> Auth {
        let previous = self.auth();
        if self.auth_changes.load(Ordering::Acquire) == before.auth_changes {
            self.auth.store(Auth::Off as u8, Ordering::Release);
        }
        previous
    }

    /// Records that a check without credentials was refused; returns the previous state.
    pub fn auth_is_on(&self) -> Auth {
        let previous = self.auth();
        self.auth.store(Auth::On as u8, Ordering::Release);
        previous
    }

    /// Records that a call through this process may have changed auth: it is unknown until the next check.
    pub fn auth_may_have_changed(&self) {
        self.auth_changes.fetch_add(1, Ordering::AcqRel);
        self.auth.store(Auth::Unknown as u8, Ordering::Release);
    }

    /// State to compare a quorum check with; to be read before the check is sent.
    #[must_use]
    pub fn before_check(&self) -> Before {
        Before {
            revision: self.known_revision.load(Ordering::Acquire),
            unreadable: self.unreadable.load(Ordering::Acquire),
            identity: self
                .identity
                .load()
                .as_ref()
                .map(|identity| (identity.cluster_id, identity.raft_term)),
            auth_changes: self.auth_changes.load(Ordering::Acquire),
            raft_gap: self.raft_gap.load(Ordering::Acquire),
        }
    }

    /// Compares a quorum check's header with the state when the check began. On [`Verdict::Replaced`] the known state
    /// is reset; the caller drops the mirrors.
    pub fn after_check(&self, before: Before, header: ResponseHeader) -> Verdict {
        let replaced = header.revision < before.revision
            || before.identity.is_some_and(|(cluster_id, raft_term)| {
                header.cluster_id != cluster_id || header.raft_term < raft_term
            });
        self.unreadable_covered
            .fetch_max(before.unreadable, Ordering::AcqRel);
        if replaced {
            self.forget();
            self.note_known(header.revision);
            self.identity.store(Some(Arc::new(header)));
            return Verdict::Replaced;
        }
        self.note_known(header.revision);
        // Compared first: nearly always only the revision changes, and a store would slow down readers.
        let same = self.identity.load().as_ref().is_some_and(|identity| {
            (identity.cluster_id, identity.member_id, identity.raft_term)
                == (header.cluster_id, header.member_id, header.raft_term)
        });
        if !same {
            self.identity.store(Some(Arc::new(header)));
        }
        Verdict::Continues
    }
}

impl ClusterState {
    /// Records a member's `raft_index`, and the `revision` of a linearizable read that began after that status.
    pub fn note_raft_index(&self, raft_index: u64, revision: i64) {
        self.raft_gap
            .fetch_max(gap(raft_index, revision), Ordering::AcqRel);
    }

    /// Compares a member's history with the state `before`, given the `revision` of a linearizable read and the
    /// `raft_index` of a later status. On [`Verdict::Replaced`] the known state is reset; the caller drops the
    /// mirrors.
    pub fn after_status(&self, before: Before, revision: i64, raft_index: u64) -> Verdict {
        // A server that implements etcd's API without raft reports 0.
        if raft_index == 0 || gap(raft_index, revision) >= before.raft_gap {
            return Verdict::Continues;
        }
        self.forget();
        Verdict::Replaced
    }

    /// Resets the known state because history was replaced.
    pub fn forget(&self) {
        self.history.fetch_add(1, Ordering::AcqRel);
        self.known_revision.store(0, Ordering::Release);
        self.compacted_revision.store(0, Ordering::Release);
        self.shown_revision.store(0, Ordering::Release);
        self.raft_gap.store(UNKNOWN_GAP, Ordering::Release);
    }
}

impl From<crate::etcdserverpb::ResponseHeader> for ResponseHeader {
    fn from(header: crate::etcdserverpb::ResponseHeader) -> ResponseHeader {
        ResponseHeader {
            cluster_id: header.cluster_id,
            member_id: header.member_id,
            revision: header.revision,
            raft_term: header.raft_term,
        }
    }
}

fn gap(raft_index: u64, revision: i64) -> i64 {
    i64::try_from(raft_index)
        .unwrap_or(i64::MAX)
        .saturating_sub(revision)
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
        }
    }

    #[test]
    fn older_revision_or_term_or_another_cluster_is_a_replaced_history() {
        let cluster_state = ClusterState::default();
        assert_eq!(
            cluster_state.after_check(cluster_state.before_check(), header(1, 10, 2)),
            Verdict::Continues
        );
        for replaced in [header(1, 9, 2), header(2, 11, 2), header(1, 11, 1)] {
            let cluster_state = ClusterState::default();
            cluster_state.after_check(cluster_state.before_check(), header(1, 10, 2));
            cluster_state.record_served(10);
            assert_eq!(
                cluster_state.after_check(cluster_state.before_check(), replaced),
                Verdict::Replaced,
                "{replaced:?}"
            );
            assert_eq!(
                cluster_state.min_served_revision(),
                Some(0),
                "the old history's minimum must not apply to the new one"
            );
            assert_eq!(
                cluster_state.after_check(cluster_state.before_check(), replaced),
                Verdict::Continues
            );
        }
    }

    #[test]
    fn restored_raft_log_is_a_replaced_history_despite_later_writes() {
        let cluster_state = ClusterState::default();
        assert_eq!(
            cluster_state.after_status(cluster_state.before_check(), 100, 5),
            Verdict::Continues,
            "nothing is known"
        );
        cluster_state.note_raft_index(108, 101);
        cluster_state.note_raft_index(300, 295);
        assert_eq!(
            cluster_state.after_status(cluster_state.before_check(), 400, 407),
            Verdict::Continues
        );
        assert_eq!(
            cluster_state.after_status(cluster_state.before_check(), 400, 420),
            Verdict::Continues,
            "lease grants"
        );
        cluster_state.note_raft_index(0, 401);
        assert_eq!(
            cluster_state.after_status(cluster_state.before_check(), 402, 0),
            Verdict::Continues,
            "no raft log"
        );
        // Restored at revision 90, then written up to revision 500.
        assert_eq!(
            cluster_state.after_status(cluster_state.before_check(), 500, 4 + 410),
            Verdict::Replaced
        );
        assert_eq!(
            cluster_state.after_status(cluster_state.before_check(), 500, 4 + 410),
            Verdict::Continues
        );
    }

    #[test]
    fn revision_recorded_during_a_check_is_no_regression() {
        let cluster_state = ClusterState::default();
        let before = cluster_state.before_check();
        cluster_state.note_known(11);
        assert_eq!(
            cluster_state.after_check(before, header(1, 10, 2)),
            Verdict::Continues
        );
    }

    #[test]
    fn min_served_revision_is_the_highest_revision_in_a_response() {
        let cluster_state = ClusterState::default();
        cluster_state.after_check(cluster_state.before_check(), header(1, 10, 2));
        assert_eq!(
            cluster_state.min_served_revision(),
            Some(0),
            "a check is no response to a client"
        );
        cluster_state.record_forwarded(1, 12);
        cluster_state.record_served(11);
        assert_eq!(cluster_state.min_served_revision(), Some(12));
        cluster_state.record_forwarded(9, 99);
        assert_eq!(
            cluster_state.min_served_revision(),
            Some(12),
            "a response of another cluster"
        );
    }

    #[test]
    fn check_that_began_before_auth_changed_does_not_show_that_it_is_off() {
        let cluster_state = ClusterState::default();
        assert_eq!(cluster_state.auth(), Auth::Unknown);
        let before = cluster_state.before_check();
        cluster_state.auth_may_have_changed();
        cluster_state.auth_seems_off(before);
        assert_eq!(cluster_state.auth(), Auth::Unknown);
        cluster_state.auth_seems_off(cluster_state.before_check());
        assert_eq!(cluster_state.auth(), Auth::Off);
    }

    #[test]
    fn unreadable_response_hides_the_minimum_until_a_later_check() {
        let cluster_state = ClusterState::default();
        let early = cluster_state.before_check();
        cluster_state.note_unreadable();
        assert_eq!(cluster_state.min_served_revision(), None);
        cluster_state.after_check(early, header(1, 10, 2));
        assert_eq!(
            cluster_state.min_served_revision(),
            None,
            "the check began before the response"
        );
        cluster_state.after_check(cluster_state.before_check(), header(1, 10, 2));
        assert_eq!(cluster_state.min_served_revision(), Some(0));
    }
}
