//! What this sidecar knows of etcd's history, and what it has shown of it.
//!
//! Two rules live here. **I4**: revisions never go back; what says otherwise means that history was replaced (a
//! restore). **I11**: time never runs backwards for clients; no answer from memory is older than what any client of
//! this sidecar has already been shown.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering};

use arc_swap::ArcSwapOption;

use crate::cache::ResponseHeader;

const UNKNOWN_GAP: i64 = i64::MIN;

/// Whether etcd's auth is on (I8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auth {
    /// Nobody has asked yet.
    Unknown,
    /// The last check without credentials was answered.
    Off,
    /// The last check without credentials was refused.
    On,
}

/// What was known when a quorum check began.
#[derive(Clone, Copy, Debug)]
pub struct Before {
    revision: i64,
    unreadable: u64,
    identity: Option<(u64, u64)>,
    auth_changes: u64,
    raft_gap: i64,
}

/// What a quorum check says of the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The same history, further on.
    Continues,
    /// Another cluster, an older revision or an older raft term: the history that was known is gone.
    Replaced,
}

/// See the module.
#[derive(Debug)]
pub struct ClusterState {
    /// The highest revision that anything from etcd has mentioned.
    known_revision: AtomicI64,
    /// The highest revision in the header of an answer to a client.
    shown_revision: AtomicI64,
    /// The highest revision up to which etcd is known to have compacted.
    compacted_revision: AtomicI64,
    /// Counts how often history was replaced.
    history: AtomicU64,
    /// Counts answers that passed through whose header could not be read (compressed, or of the JSON gateway).
    unreadable: AtomicU64,
    /// The count of `unreadable` that a later quorum check has covered.
    unreadable_covered: AtomicU64,
    /// What is known at least of raft index less revision ([`UNKNOWN_GAP`] before anything is). A revision takes a raft
    /// entry of its own, so in one history this never shrinks; a restore starts the raft log anew but keeps the
    /// revisions, and however much is written then, the gap of the old history is not reached by writing.
    raft_gap: AtomicI64,
    /// cluster_id, member_id and raft_term of the last quorum check.
    identity: ArcSwapOption<ResponseHeader>,
    auth: AtomicU8,
    /// Counts calls through this sidecar that may have switched auth.
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
    /// A feed, a load or a check mentioned `revision`.
    pub fn note_known(&self, revision: i64) {
        self.known_revision.fetch_max(revision, Ordering::AcqRel);
    }

    /// The highest revision that anything from etcd has mentioned.
    #[must_use]
    pub fn known(&self) -> i64 {
        self.known_revision.load(Ordering::Acquire)
    }

    /// etcd has compacted: it refuses revisions below `revision`.
    pub fn note_compacted(&self, revision: i64) {
        self.compacted_revision.fetch_max(revision, Ordering::AcqRel);
    }

    /// The revision below which etcd is known to refuse.
    #[must_use]
    pub fn compacted(&self) -> i64 {
        self.compacted_revision.load(Ordering::Acquire)
    }

    /// Another number for every history.
    #[must_use]
    pub fn history(&self) -> u64 {
        self.history.load(Ordering::Acquire)
    }

    /// A client is shown `revision` in an answer from memory.
    pub fn record_served(&self, revision: i64) {
        // The common case is no news: a read does not take the cache line away from other cores.
        if self.shown_revision.load(Ordering::Acquire) < revision {
            self.shown_revision.fetch_max(revision, Ordering::AcqRel);
        }
    }

    /// A client is shown `revision` in an answer of the cluster `cluster_id` that passes through.
    pub fn record_forwarded(&self, cluster_id: u64, revision: i64) {
        // An answer that was under way while history was replaced must not raise the floor of the new one.
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

    /// A client is shown an answer whose revision cannot be read: until a later quorum check has proven where etcd is,
    /// serializable reads are proven too.
    pub fn note_unreadable(&self) {
        self.unreadable.fetch_add(1, Ordering::AcqRel);
    }

    /// The revision below which nothing may be answered (I11); `None` while an unreadable answer makes it unknown.
    #[must_use]
    pub fn min_served_revision(&self) -> Option<i64> {
        let covered = self.unreadable_covered.load(Ordering::Acquire);
        (self.unreadable.load(Ordering::Acquire) == covered)
            .then(|| self.shown_revision.load(Ordering::Acquire))
    }

    /// The last quorum check's header: what answers without a check of their own carry.
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

    /// A check without credentials was answered; returns what was believed before. A call that may have switched auth
    /// since the check began leaves it open.
    pub fn auth_seems_off(&self, before: Before) -> Auth {
        let believed = self.auth();
        if self.auth_changes.load(Ordering::Acquire) == before.auth_changes {
            self.auth.store(Auth::Off as u8, Ordering::Release);
        }
        believed
    }

    /// A check without credentials was refused; returns what was believed before.
    pub fn auth_is_on(&self) -> Auth {
        let believed = self.auth();
        self.auth.store(Auth::On as u8, Ordering::Release);
        believed
    }

    /// A call through this sidecar may have switched auth: until the next check, nobody knows.
    pub fn auth_may_have_changed(&self) {
        self.auth_changes.fetch_add(1, Ordering::AcqRel);
        self.auth.store(Auth::Unknown as u8, Ordering::Release);
    }

    /// To be called before a quorum check is sent.
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

    /// Holds a quorum check's header against what was known when the check began. On [`Verdict::Replaced`] all that
    /// was known is forgotten; the caller drops the mirrors.
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
        // Compared first: the header is the same but for the revision nearly always, and a store costs readers.
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
    /// A member told `raft_index`, and a linearizable read that began after that found `revision`.
    pub fn note_raft_index(&self, raft_index: u64, revision: i64) {
        self.raft_gap
            .fetch_max(gap(raft_index, revision), Ordering::AcqRel);
    }

    /// Holds a member's history against what was known before: it answered a linearizable read at `revision`, and then
    /// told `raft_index`. On [`Verdict::Replaced`] all that was known is forgotten; the caller drops the mirrors.
    pub fn after_status(&self, before: Before, revision: i64, raft_index: u64) -> Verdict {
        // What is no etcd, but speaks as one, may have no raft log at all.
        if raft_index == 0 || gap(raft_index, revision) >= before.raft_gap {
            return Verdict::Continues;
        }
        self.forget();
        Verdict::Replaced
    }

    /// History was replaced: what is known of the old one says nothing of the new one.
    pub fn forget(&self) {
        self.history.fetch_add(1, Ordering::AcqRel);
        self.known_revision.store(0, Ordering::Release);
        self.compacted_revision.store(0, Ordering::Release);
        self.shown_revision.store(0, Ordering::Release);
        self.raft_gap.store(UNKNOWN_GAP, Ordering::Release);
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
    fn history_continues_or_was_replaced() {
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
                "the old history's floor must not bind the new one"
            );
            assert_eq!(
                cluster_state.after_check(cluster_state.before_check(), replaced),
                Verdict::Continues
            );
        }
    }

    #[test]
    fn a_raft_log_that_was_begun_anew_is_another_history_however_much_is_written() {
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
    fn a_revision_learned_while_the_check_ran_is_no_regression() {
        let cluster_state = ClusterState::default();
        let before = cluster_state.before_check();
        cluster_state.note_known(11);
        assert_eq!(
            cluster_state.after_check(before, header(1, 10, 2)),
            Verdict::Continues
        );
    }

    #[test]
    fn the_floor_is_the_highest_revision_shown() {
        let cluster_state = ClusterState::default();
        cluster_state.after_check(cluster_state.before_check(), header(1, 10, 2));
        assert_eq!(
            cluster_state.min_served_revision(),
            Some(0),
            "a check shows nobody anything"
        );
        cluster_state.record_forwarded(1, 12);
        cluster_state.record_served(11);
        assert_eq!(cluster_state.min_served_revision(), Some(12));
        cluster_state.record_forwarded(9, 99);
        assert_eq!(
            cluster_state.min_served_revision(),
            Some(12),
            "an answer of another cluster"
        );
    }

    #[test]
    fn a_check_that_began_before_auth_was_switched_does_not_say_that_it_is_off() {
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
    fn an_unreadable_answer_hides_the_floor_until_a_later_check() {
        let cluster_state = ClusterState::default();
        let early = cluster_state.before_check();
        cluster_state.note_unreadable();
        assert_eq!(cluster_state.min_served_revision(), None);
        cluster_state.after_check(early, header(1, 10, 2));
        assert_eq!(
            cluster_state.min_served_revision(),
            None,
            "the check began before the answer was shown"
        );
        cluster_state.after_check(cluster_state.before_check(), header(1, 10, 2));
        assert_eq!(cluster_state.min_served_revision(), Some(0));
    }
}
