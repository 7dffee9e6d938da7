//! Continuity: whether the history behind a feed is the one that the mirror holds (I4).
//!
//! Recoveries that keep the cluster's id, its term and its raft log (a data directory put back from a disk snapshot,
//! `--force-new-cluster`) show in nothing but the events. So a feed resumes *at* the newest events that it delivered, up
//! to sixty-four, and what is delivered again must be those very events. Others up to the mirror's revision belong to
//! another history, because the mirror would have them. [`Continuity`] is pure, so that every order of responses can be
//! tested. Where etcd cannot send these events any more, and where there were fewer since the load, [`compare`] reads the
//! newest keys at the mirror's revision.
//!
//! Which proof a feed needs (an arrow with "else" is taken if the proof before it shows nothing):
//!
//! ```text
//!   the connection that has loaded the mirror still responds ── yes ──▶ continues
//!     │ else
//!     ▼
//!   the newest events, delivered again ─── another one, or one is missing ──▶ another history
//!     │ all are the same              └── too few of them: the keys are compared, too
//!     ▼
//!   continues
//!     │ else: etcd has compacted them, or there were none
//!     ▼
//!   the newest keys at the mirror's revision, and their number ── differ ──▶ another history
//!     │ are the same                  └── after a delete, or compacted as well ──▶ the mirror is loaded again
//!     ▼
//!   continues
//! ```

use std::collections::HashSet;
use std::sync::Arc;

use super::end::FeedEnd;
use crate::lineage::Keys;
use crate::load::LoadCause;
use crate::view::{Anchor, Epoch, Mirror};
use etcd_store::cache::{Change, ChangeKind, StoredEntry, Tree, Unpacker};
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_upstream::{Connection, header_request, is_compaction, is_future_revision, range};

/// Revisions between an event and the mirror's revision up to which a feed resumes at that event: etcd reads every one of
/// them, and lets writes wait meanwhile (about a microsecond each).
const FIRST_EVENT_MAX_REVISIONS: i64 = 10_000;

/// Events that prove as much as events can. Whole revisions are kept alone, so that there may be fewer than the bound.
const ENOUGH_EVENTS: usize = 32;

/// Method by which a feed is proven to continue the mirror's history.
#[derive(Debug)]
pub(super) enum ContinuityProof {
    /// The mirror was just loaded by this connection, and its member still responds.
    Load(Arc<Connection>),
    /// The newest events, from this revision on, are delivered again.
    FirstEvent(i64),
    /// etcd's newest keys at the mirror's revision are compared.
    Comparison,
}

/// Verdict on a feed by its responses so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// The next response decides.
    Open,
    /// The feed continues the mirror's history.
    Continues,
    /// The feed is of another history, for the reason given.
    Another(&'static str),
}

/// The events that a feed delivers again, compared with what the mirror holds.
#[derive(Debug)]
pub(super) struct Continuity<'a> {
    anchor: &'a Anchor,
    /// Revision at which the feed resumes.
    first: i64,
    /// Revision of the last event that was delivered before.
    last: i64,
    /// Events before that revision that are to be delivered again.
    expected: &'a [Change],
    is_found: bool,
}

impl<'a> Continuity<'a> {
    /// A comparison with `anchor` of a feed that resumes at the event of revision `first`.
    pub(super) fn new(anchor: &'a Anchor, first: i64) -> Continuity<'a> {
        let last = anchor.last_event.unwrap_or(first);
        let end = anchor.recent.partition_point(|change| change.revision() < last);
        let begin = anchor.recent[..end].partition_point(|change| change.revision() < first);
        Continuity {
            anchor,
            first,
            last,
            expected: &anchor.recent[begin..end],
            is_found: false,
        }
    }

    /// Revision of the mirror.
    pub(super) fn revision(&self) -> i64 {
        self.anchor.revision
    }

    /// Judges the events of whole revisions, in order.
    pub(super) fn events(&mut self, changes: &[Change]) -> Judgement {
        if !self.are_held(changes) {
            return Judgement::Another("the mirror's last event is another one");
        }
        // Below: a member that lags sends events from before the start (etcd 20221).
        for change in changes.iter().filter(|change| change.revision() >= self.first) {
            if change.revision() > self.anchor.revision {
                return self.judge_end();
            }
            if change.revision() > self.last {
                return Judgement::Another("it has an event that the mirror does not have");
            }
            if change.revision() < self.last {
                match self.expected.split_first() {
                    Some((ours, rest)) if is_same_event(ours, change) => self.expected = rest,
                    _ => return Judgement::Another("one of the mirror's newest events is another one"),
                }
                continue;
            }
            self.is_found |= Some(change.key()) == self.anchor.key.as_deref();
        }
        // A revision is whole, so nothing more of this one follows.
        let is_past_last = changes.last().is_some_and(|last| last.revision() >= self.last);
        if is_past_last && (!self.is_found || self.anchor.revision <= self.last) {
            return self.judge_end();
        }
        Judgement::Open
    }

    /// Judges a progress notification: every event up to `revision` was delivered.
    pub(super) fn progress(&self, revision: i64) -> Judgement {
        if revision >= self.anchor.revision || (revision >= self.last && !self.is_found) {
            self.judge_end()
        } else {
            Judgement::Open
        }
    }

    /// Judges what was delivered, once that is every event up to the mirror's revision.
    fn judge_end(&self) -> Judgement {
        if self.is_found && self.expected.is_empty() {
            Judgement::Continues
        } else if self.is_found {
            Judgement::Another("it lacks one of the mirror's newest events")
        } else {
            Judgement::Another("it lacks the mirror's last event")
        }
    }

    /// Whether the mirror holds the result of those of `changes` that are of the last revision that changed anything. One
    /// revision may hold several events of a key (nested transactions, etcd 16380): what its own revision supersedes shows
    /// nothing.
    fn are_held(&self, changes: &[Change]) -> bool {
        let mut unpacker = Unpacker::default();
        let mut is_held = |change: &Change| match (change.kind, self.anchor.tree.get(change.key())) {
            (ChangeKind::Put, Some(ours)) => unpacker.is_same(ours, &change.entry),
            (ChangeKind::Delete, None) => true,
            _ => false,
        };
        let of_last = changes.iter().filter(|change| change.revision() == self.last);
        let mut later = HashSet::new();
        of_last
            .rev()
            .all(|change| !later.insert(change.key()) || is_held(change))
    }
}

impl Anchor {
    /// Revision at which a feed resumes to be proven by its first events, of those that etcd still has: from `compacted`
    /// on. Behind the oldest state if that is known, so that it shows every event since. `None` if [`compare`] has to prove
    /// it: since the load there was no event, or the last one is too far behind the mirror's revision.
    pub(super) fn first_event(&self, compacted: i64) -> Option<i64> {
        let has_events_since = |base: &i64| self.last_event.is_some_and(|last| last > *base);
        let base = self.base.iter().map(|(_, revision)| *revision);
        let base = base.filter(has_events_since).map(|base| base + 1);
        let events = base
            .chain(self.recent.iter().map(Change::revision))
            .chain(self.last_event);
        let mut near = events.filter(|event| self.revision - event <= FIRST_EVENT_MAX_REVISIONS);
        near.find(|event| *event >= compacted)
    }

    /// Whether the events from revision `first` on prove as much as events can: all that are kept, which are many.
    pub(super) fn proves_by_events_from(&self, first: i64) -> bool {
        let oldest = self.recent.first().map(Change::revision);
        self.recent_is_full && self.recent.len() >= ENOUGH_EVENTS && oldest >= Some(first)
    }

    /// Whether one of the events from revision `first` on is a delete.
    pub(super) fn has_delete_from(&self, first: i64) -> bool {
        let mut compared = self.recent.iter().filter(|change| change.revision() >= first);
        self.ends_with_a_delete() || compared.any(|change| change.kind == ChangeKind::Delete)
    }

    /// Entry of the key that was changed last, unless it was deleted.
    fn last(&self) -> Option<&StoredEntry> {
        self.key.as_ref().and_then(|key| self.tree.get(key))
    }

    /// Whether the last event that was delivered is a delete.
    pub(super) fn ends_with_a_delete(&self) -> bool {
        self.last_event.is_some() && self.last().map(StoredEntry::mod_revision) != self.last_event
    }
}

/// Whether the member that has just loaded the mirror still responds on the same connection: its history, and so the
/// one of every member in its quorum, has not been replaced since.
///
/// # Errors
/// [`FeedEnd::Reload`] if it does not respond, which proves nothing, or if the mirror's revision was compacted.
pub(super) async fn still_responds(
    mirror: &Mirror,
    anchor: &Anchor,
    loaded_by: &Arc<Connection>,
) -> Result<bool, FeedEnd> {
    let request = RangeRequest {
        revision: anchor.revision,
        ..header_request(mirror.scope.key())
    };
    let has_responded = range(loaded_by, request).await;
    if !loaded_by.has_one_lineage().await {
        return Err(FeedEnd::Reload(
            LoadCause::Unproven,
            "the hub that has sent the mirror's keys may have another history now".into(),
        ));
    }
    match has_responded {
        Ok(_) => Ok(true),
        Err(status) if is_future_revision(&status) => Ok(false),
        Err(status) if is_compaction(&status) => Err(compacted(anchor)),
        Err(status) => Err(FeedEnd::Reload(
            LoadCause::Unproven,
            FeedEnd::from(status).to_string(),
        )),
    }
}

/// Whether etcd holds the keys of `mirror` at the mirror's revision, as far as its newest keys and their number show. If it
/// does, memory forgets its older states: they may be others.
///
/// # Errors
/// [`FeedEnd::Reload`] if etcd has compacted the revision, [`FeedEnd::Lost`] if it does not respond.
pub(super) async fn compare(
    mirror: &Mirror,
    epoch: Epoch,
    anchor: &Anchor,
    connection: &Arc<Connection>,
) -> Result<bool, FeedEnd> {
    let keys = keys_of(mirror, anchor.tree.clone(), anchor.revision);
    let is_held = keys.are_held_by(connection).await.map_err(|status| {
        if is_compaction(&status) {
            compacted(anchor)
        } else {
            status.into()
        }
    })?;
    if is_held {
        mirror.forget_before(epoch, anchor.revision)?;
    }
    Ok(is_held)
}

/// Whether etcd holds the oldest state that memory has, `base` with its revision, as far as its newest keys and their number
/// show.
///
/// # Errors
/// [`FeedEnd::Reload`] if etcd has compacted the revision, [`FeedEnd::Lost`] if it does not respond.
pub(super) async fn compare_base(
    mirror: &Mirror,
    (tree, revision): &(Tree, i64),
    connection: &Arc<Connection>,
) -> Result<bool, FeedEnd> {
    let keys = keys_of(mirror, tree.clone(), *revision);
    keys.are_held_by(connection).await.map_err(|status| {
        if is_compaction(&status) {
            // Events from the next revision on would be compared with this state.
            FeedEnd::Reload(
                LoadCause::Compacted(revision + 2),
                "etcd has compacted past the mirror's oldest state".into(),
            )
        } else {
            status.into()
        }
    })
}

fn keys_of(mirror: &Mirror, tree: Tree, revision: i64) -> Keys {
    Keys {
        tree,
        from: mirror.scope.key(),
        end: mirror.scope.range_end(),
        revision,
    }
}

fn compacted(anchor: &Anchor) -> FeedEnd {
    // At least this revision: the response does not name it.
    let cause = LoadCause::Compacted(anchor.revision + 1);
    FeedEnd::Reload(cause, "etcd has compacted past the mirror".into())
}

fn is_same_event(ours: &Change, theirs: &Change) -> bool {
    ours.kind == theirs.kind && ours.entry == theirs.entry
}

#[cfg(test)]
mod tests {
    use super::*;
    use etcd_store::cache::Tree;
    use etcd_store::cache::testing::KeyValue;

    fn put(key: &str, revision: i64, value: &str) -> Change {
        Change::put(KeyValue::new(key, revision, value).entry())
    }

    fn delete(key: &str, mod_revision: i64) -> Change {
        Change::delete(KeyValue::deleted(key, mod_revision).entry())
    }

    /// A mirror at revision 20 that holds `a` of revision 5 and `b` of revision 10.
    fn anchor(key: &str, last_event: i64) -> Anchor {
        let keys = [("a", 5), ("b", 10)];
        Anchor {
            revision: 20,
            key: Some(key.as_bytes().to_vec().into()),
            last_event: Some(last_event),
            recent: Vec::new(),
            recent_is_full: false,
            base: None,
            tree: Tree::from_sorted(keys.map(|(key, revision)| KeyValue::new(key, revision, "v").entry())),
        }
    }

    const ANOTHER_EVENT: Judgement = Judgement::Another("the mirror's last event is another one");
    const MORE_EVENTS: Judgement = Judgement::Another("it has an event that the mirror does not have");
    const NO_EVENT: Judgement = Judgement::Another("it lacks the mirror's last event");

    #[test]
    fn first_event_and_nothing_up_to_the_revision_continue_the_history() {
        let anchor = anchor("b", 10);
        let mut feed = Continuity::new(&anchor, 10);
        assert_eq!(
            feed.events(&[put("a", 9, "old")]),
            Judgement::Open,
            "a lagging member"
        );
        assert_eq!(feed.events(&[put("b", 10, "v")]), Judgement::Open);
        assert_eq!(feed.progress(19), Judgement::Open);
        assert_eq!(feed.progress(20), Judgement::Continues);
        let mut feed = Continuity::new(&anchor, 10);
        assert_eq!(
            feed.events(&[put("b", 10, "v"), put("a", 21, "new")]),
            Judgement::Continues
        );
    }

    #[test]
    fn other_or_missing_first_event_is_another_history() {
        let anchor = anchor("b", 10);
        for (changes, expected) in [
            (vec![put("b", 10, "w")], ANOTHER_EVENT),
            (vec![delete("b", 10)], ANOTHER_EVENT),
            (vec![put("c", 10, "v")], ANOTHER_EVENT),
            (vec![put("b", 10, "v"), put("c", 20, "v")], MORE_EVENTS),
            (vec![put("c", 11, "v")], MORE_EVENTS),
            (vec![put("c", 21, "v")], NO_EVENT),
        ] {
            assert_eq!(
                Continuity::new(&anchor, 10).events(&changes),
                expected,
                "{changes:?}"
            );
        }
        assert_eq!(Continuity::new(&anchor, 10).progress(9), Judgement::Open);
        assert_eq!(Continuity::new(&anchor, 10).progress(10), NO_EVENT);
    }

    #[test]
    fn last_event_may_be_a_delete() {
        let anchor = anchor("gone", 20);
        let judge = |changes: &[Change]| Continuity::new(&anchor, 20).events(changes);
        assert_eq!(judge(&[delete("gone", 20)]), Judgement::Continues);
        assert_eq!(judge(&[delete("other", 20)]), NO_EVENT);
        assert_eq!(judge(&[put("gone", 20, "v")]), ANOTHER_EVENT);
    }

    #[test]
    fn every_event_of_the_last_revision_is_compared() {
        let anchor = anchor("b", 10);
        let judge = |changes: &[Change]| Continuity::new(&anchor, 10).events(changes);
        assert_eq!(judge(&[delete("c", 10), put("b", 10, "v")]), Judgement::Open);
        assert_eq!(judge(&[delete("a", 10), put("b", 10, "v")]), ANOTHER_EVENT);
        assert_eq!(judge(&[put("b", 10, "v"), put("c", 10, "v")]), ANOTHER_EVENT);
    }

    /// A nested transaction may put, delete and put one key.
    #[test]
    fn event_that_its_own_revision_supersedes_shows_nothing() {
        let anchor = anchor("b", 10);
        let judge = |changes: &[Change]| Continuity::new(&anchor, 10).events(changes);
        let result = put("b", 10, "v");
        for changes in [
            vec![put("b", 10, "w"), result.clone()],
            vec![delete("b", 10), result.clone()],
            vec![put("c", 10, "w"), result.clone(), delete("c", 10)],
        ] {
            assert_eq!(judge(&changes), Judgement::Open, "{changes:?}");
        }
        for changes in [
            vec![result.clone(), put("b", 10, "w")],
            vec![result.clone(), delete("b", 10)],
            vec![delete("c", 10), result.clone(), put("c", 10, "w")],
        ] {
            assert_eq!(judge(&changes), ANOTHER_EVENT, "{changes:?}");
        }
    }

    #[test]
    fn event_far_behind_the_revision_is_not_asked_for() {
        let near = anchor("b", 10);
        assert_eq!(near.first_event(0), Some(10));
        let far = Anchor {
            revision: 10 + FIRST_EVENT_MAX_REVISIONS + 1,
            ..near
        };
        assert_eq!(far.first_event(0), None);
    }

    /// A mirror at revision 20 whose newest events are those of 6 to 10.
    fn with_recent() -> Anchor {
        Anchor {
            recent: vec![
                put("c", 6, "v"),
                delete("c", 8),
                delete("d", 8),
                put("b", 10, "v"),
            ],
            ..anchor("b", 10)
        }
    }

    #[test]
    fn each_of_the_newest_events_is_delivered_again() {
        let anchor = with_recent();
        let mut feed = Continuity::new(&anchor, 6);
        assert_eq!(feed.events(&[put("c", 6, "v")]), Judgement::Open);
        assert_eq!(feed.events(&[delete("c", 8), delete("d", 8)]), Judgement::Open);
        assert_eq!(feed.events(&[put("b", 10, "v")]), Judgement::Open);
        assert_eq!(feed.progress(20), Judgement::Continues);
        let mut feed = Continuity::new(&anchor, 8);
        let rest = [
            delete("c", 8),
            delete("d", 8),
            put("b", 10, "v"),
            put("e", 21, "v"),
        ];
        assert_eq!(feed.events(&rest), Judgement::Continues);
    }

    #[test]
    fn same_last_event_after_others_is_another_history() {
        let anchor = with_recent();
        const OTHER: Judgement = Judgement::Another("one of the mirror's newest events is another one");
        const LACKING: Judgement = Judgement::Another("it lacks one of the mirror's newest events");
        for (changes, expected) in [
            (vec![put("c", 6, "w"), put("b", 10, "v")], OTHER),
            (vec![put("c", 6, "v"), put("c", 8, "v")], OTHER),
            (vec![put("c", 6, "v"), delete("d", 8)], OTHER),
            (vec![put("c", 6, "v"), put("c", 7, "v")], OTHER),
        ] {
            let mut feed = Continuity::new(&anchor, 6);
            assert_eq!(feed.events(&changes), expected, "{changes:?}");
        }
        let mut feed = Continuity::new(&anchor, 6);
        assert_eq!(
            feed.events(&[put("c", 6, "v"), put("b", 10, "v")]),
            Judgement::Open
        );
        assert_eq!(feed.progress(20), LACKING);
    }

    #[test]
    fn every_event_since_the_oldest_state_is_compared() {
        let anchor = Anchor {
            base: Some((Tree::from_sorted([]), 3)),
            ..with_recent()
        };
        let from = |compacted| anchor.first_event(compacted);
        assert_eq!([from(0), from(4), from(5)], [Some(4), Some(4), Some(6)]);
        let mut feed = Continuity::new(&anchor, 4);
        assert_eq!(feed.events(&[put("c", 6, "v")]), Judgement::Open);
        let mut feed = Continuity::new(&anchor, 4);
        let other = feed.events(&[put("e", 4, "v"), put("c", 6, "v")]);
        assert!(matches!(other, Judgement::Another(_)), "{other:?}");
        let unchanged = Anchor {
            base: Some((Tree::from_sorted([]), 10)),
            ..with_recent()
        };
        assert_eq!(unchanged.first_event(0), Some(6), "there is no event since");
    }

    #[test]
    fn compared_are_the_events_that_etcd_still_has() {
        let anchor = with_recent();
        let from = |compacted| anchor.first_event(compacted);
        assert_eq!(
            [from(0), from(6), from(7), from(9)],
            [Some(6), Some(6), Some(8), Some(10)]
        );
        assert_eq!(from(11), None);
        assert!(anchor.has_delete_from(6) && !anchor.has_delete_from(10));
    }
}
