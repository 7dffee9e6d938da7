//! The newest events of a mirror, and comparison of the events that a resumed feed delivers again with them. Pure, so that every order
//! of responses can be tested.

use std::collections::{HashSet, VecDeque};

use etcd_store::cache::{Change, ChangeKind};

use super::judge::{Anchor, Verdict};

/// The events that a feed delivers again, compared with what the mirror holds.
#[derive(Debug)]
pub(crate) struct EventComparison<'a> {
    anchor: &'a Anchor,
    /// Revision at which the feed resumes.
    first: i64,
    /// Revision of the last event that was delivered before.
    last: i64,
    /// Events before that revision that are to be delivered again.
    expected: &'a [Change],
    is_found: bool,
}

impl<'a> EventComparison<'a> {
    /// A comparison with `anchor` of a feed that resumes at the event of revision `first`.
    pub(crate) fn new(anchor: &'a Anchor, first: i64) -> EventComparison<'a> {
        let last = anchor.last_event.unwrap_or(first);
        let end = anchor.recent.partition_point(|change| change.revision() < last);
        let begin = anchor.recent[..end].partition_point(|change| change.revision() < first);
        EventComparison {
            anchor,
            first,
            last,
            expected: &anchor.recent[begin..end],
            is_found: false,
        }
    }

    /// Revision of the mirror.
    pub(crate) fn revision(&self) -> i64 {
        self.anchor.revision
    }

    /// Judges the events of whole revisions, in order.
    pub(crate) fn events(&mut self, changes: &[Change]) -> Option<Verdict> {
        if !self.are_held(changes) {
            return Some(Verdict::Another("the mirror's last event is another one"));
        }
        // Below: a member that lags sends events from before the start (etcd 20221).
        for change in changes.iter().filter(|change| change.revision() >= self.first) {
            if change.revision() > self.anchor.revision {
                return self.judge_end();
            }
            if change.revision() > self.last {
                return Some(Verdict::Another("it has an event that the mirror does not have"));
            }
            if change.revision() < self.last {
                match self.expected.split_first() {
                    Some((ours, rest)) if is_same_event(ours, change) => self.expected = rest,
                    expected => {
                        let explanation = "one of the mirror's newest events is another one";
                        let lacking = expected.map(|(ours, _)| ours);
                        let lacking = lacking.filter(|ours| comes_before(ours, change));
                        return Some(
                            lacking.map_or(Verdict::Another(explanation), |ours| missing(ours, explanation)),
                        );
                    }
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
        None
    }

    /// Judges a progress notification: every event up to `revision` was delivered.
    pub(crate) fn progress(&self, revision: i64) -> Option<Verdict> {
        if revision >= self.anchor.revision || (revision >= self.last && !self.is_found) {
            self.judge_end()
        } else {
            None
        }
    }

    /// Judges what was delivered, once that is every event up to the mirror's revision.
    fn judge_end(&self) -> Option<Verdict> {
        Some(match self.expected.first() {
            Some(ours) => missing(ours, "it lacks one of the mirror's newest events"),
            None if self.is_found => Verdict::Continues,
            None if self.anchor.ends_with_a_delete() => Verdict::LacksDelete(self.last),
            None => Verdict::Another("it lacks the mirror's last event"),
        })
    }

    /// Whether the mirror holds the result of those of `changes` that are of the last revision that changed anything. One
    /// revision may hold several events of a key (nested transactions, etcd 16380): what its own revision supersedes shows
    /// nothing.
    fn are_held(&self, changes: &[Change]) -> bool {
        let is_held = |change: &Change| match (change.kind, self.anchor.tree.get(change.key())) {
            (ChangeKind::Put, Some(ours)) => ours.is_same(&change.entry),
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

fn is_same_event(ours: &Change, theirs: &Change) -> bool {
    ours.kind == theirs.kind && ours.entry == theirs.entry
}

/// Whether `theirs` can follow `ours`, which is then missing.
fn comes_before(ours: &Change, theirs: &Change) -> bool {
    ours.revision() < theirs.revision()
        || (ours.revision() == theirs.revision() && ours.key() != theirs.key())
}

/// Verdict on a feed that lacks the event `ours`.
fn missing(ours: &Change, explanation: &'static str) -> Verdict {
    match ours.kind {
        ChangeKind::Put => Verdict::Another(explanation),
        ChangeKind::Delete => Verdict::LacksDelete(ours.revision()),
    }
}

/// Events that are kept. One alone may be the same in two histories: the delete of the same key at the same revision.
pub(super) const MAX_EVENTS: usize = 64;
/// Bound on the memory of the events that are kept.
pub(super) const MAX_BYTES: u64 = 1 << 20;

/// The newest events of a mirror since its load: whole revisions, oldest first. What they replaced is not kept.
#[derive(Debug, Default)]
pub(crate) struct RecentEvents {
    events: VecDeque<Change>,
    bytes: u64,
    /// Whether there were more events since the load than are kept.
    is_full: bool,
}

impl RecentEvents {
    /// The events of [`RecentEvents::to_vec`], and whether there were more.
    pub(crate) fn restored(events: &[Change], is_full: bool) -> RecentEvents {
        let mut recent = RecentEvents::default();
        recent.push(events);
        recent.is_full |= is_full;
        recent
    }

    /// Adds the events of whole revisions, all of them above those that were added before.
    pub(crate) fn push(&mut self, changes: &[Change]) {
        let skipped = changes.len().saturating_sub(MAX_EVENTS);
        let (skipped, added) = changes.split_at(skipped);
        let divided = skipped.last().map(Change::revision);
        if divided.is_some() {
            *self = RecentEvents {
                is_full: true,
                ..RecentEvents::default()
            };
        }
        for change in added.iter().filter(|change| Some(change.revision()) != divided) {
            self.bytes += change.entry.memory_bytes();
            self.events.push_back(Change {
                kind: change.kind,
                entry: change.entry.clone(),
                replaced: None,
            });
        }
        while self.events.len() > MAX_EVENTS || self.bytes > MAX_BYTES {
            self.drop_oldest_revision();
            self.is_full = true;
        }
    }

    /// Whether there were more events since the load than are kept, so that those prove as much as events can.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full
    }

    /// The events, oldest first.
    pub(crate) fn to_vec(&self) -> Vec<Change> {
        self.events.iter().cloned().collect()
    }

    fn drop_oldest_revision(&mut self) {
        let oldest = self.events.front().map(Change::revision);
        while self.events.front().map(Change::revision) == oldest
            && let Some(change) = self.events.pop_front()
        {
            self.bytes -= change.entry.memory_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use etcd_store::cache::{Tree, testing::KeyValue};

    use super::super::judge::{Evidence, MAX_REVISIONS_BACK};
    use super::*;

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

    const ANOTHER_EVENT: Option<Verdict> = Some(Verdict::Another("the mirror's last event is another one"));
    const MORE_EVENTS: Option<Verdict> =
        Some(Verdict::Another("it has an event that the mirror does not have"));
    const NO_EVENT: Option<Verdict> = Some(Verdict::Another("it lacks the mirror's last event"));

    #[test]
    fn first_event_and_nothing_up_to_the_revision_continue_the_history() {
        let anchor = anchor("b", 10);
        let mut feed = EventComparison::new(&anchor, 10);
        assert_eq!(feed.events(&[put("a", 9, "old")]), None, "a lagging member");
        assert_eq!(feed.events(&[put("b", 10, "v")]), None);
        assert_eq!(feed.progress(19), None);
        assert_eq!(feed.progress(20), Some(Verdict::Continues));
        let mut feed = EventComparison::new(&anchor, 10);
        assert_eq!(
            feed.events(&[put("b", 10, "v"), put("a", 21, "new")]),
            Some(Verdict::Continues)
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
                EventComparison::new(&anchor, 10).events(&changes),
                expected,
                "{changes:?}"
            );
        }
        assert_eq!(EventComparison::new(&anchor, 10).progress(9), None);
        assert_eq!(EventComparison::new(&anchor, 10).progress(10), NO_EVENT);
    }

    #[test]
    fn last_event_may_be_a_delete() {
        let anchor = anchor("gone", 20);
        let judge = |changes: &[Change]| EventComparison::new(&anchor, 20).events(changes);
        assert_eq!(judge(&[delete("gone", 20)]), Some(Verdict::Continues));
        assert_eq!(judge(&[delete("other", 20)]), Some(Verdict::LacksDelete(20)));
        assert_eq!(judge(&[put("gone", 20, "v")]), ANOTHER_EVENT);
    }

    #[test]
    fn every_event_of_the_last_revision_is_compared() {
        let anchor = anchor("b", 10);
        let judge = |changes: &[Change]| EventComparison::new(&anchor, 10).events(changes);
        assert_eq!(judge(&[delete("c", 10), put("b", 10, "v")]), None);
        assert_eq!(judge(&[delete("a", 10), put("b", 10, "v")]), ANOTHER_EVENT);
        assert_eq!(judge(&[put("b", 10, "v"), put("c", 10, "v")]), ANOTHER_EVENT);
    }

    /// A nested transaction may put, delete and put one key.
    #[test]
    fn event_that_its_own_revision_supersedes_shows_nothing() {
        let anchor = anchor("b", 10);
        let judge = |changes: &[Change]| EventComparison::new(&anchor, 10).events(changes);
        let result = put("b", 10, "v");
        for changes in [
            vec![put("b", 10, "w"), result.clone()],
            vec![delete("b", 10), result.clone()],
            vec![put("c", 10, "w"), result.clone(), delete("c", 10)],
        ] {
            assert_eq!(judge(&changes), None, "{changes:?}");
        }
        for changes in [
            vec![result.clone(), put("b", 10, "w")],
            vec![result.clone(), delete("b", 10)],
            vec![delete("c", 10), result.clone(), put("c", 10, "w")],
        ] {
            assert_eq!(judge(&changes), ANOTHER_EVENT, "{changes:?}");
        }
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
        let mut feed = EventComparison::new(&anchor, 6);
        assert_eq!(feed.events(&[put("c", 6, "v")]), None);
        assert_eq!(feed.events(&[delete("c", 8), delete("d", 8)]), None);
        assert_eq!(feed.events(&[put("b", 10, "v")]), None);
        assert_eq!(feed.progress(20), Some(Verdict::Continues));
        let mut feed = EventComparison::new(&anchor, 8);
        let rest = [
            delete("c", 8),
            delete("d", 8),
            put("b", 10, "v"),
            put("e", 21, "v"),
        ];
        assert_eq!(feed.events(&rest), Some(Verdict::Continues));
    }

    #[test]
    fn same_last_event_after_others_is_another_history() {
        let anchor = with_recent();
        const OTHER: Option<Verdict> = Some(Verdict::Another(
            "one of the mirror's newest events is another one",
        ));
        const LACKING: Option<Verdict> = Some(Verdict::LacksDelete(8));
        for (changes, expected) in [
            (vec![put("c", 6, "w"), put("b", 10, "v")], OTHER),
            (vec![put("c", 6, "v"), put("c", 8, "v")], OTHER),
            (vec![put("c", 6, "v"), delete("d", 8)], LACKING),
            (vec![put("c", 6, "v"), put("c", 7, "v")], OTHER),
            (vec![delete("c", 8), delete("d", 8)], OTHER),
        ] {
            let mut feed = EventComparison::new(&anchor, 6);
            assert_eq!(feed.events(&changes), expected, "{changes:?}");
        }
        let mut feed = EventComparison::new(&anchor, 6);
        assert_eq!(feed.events(&[put("c", 6, "v"), put("b", 10, "v")]), None);
        assert_eq!(feed.progress(20), LACKING);
    }

    #[test]
    fn every_event_since_the_oldest_state_is_compared() {
        let anchor = Anchor {
            base: Some((Tree::from_sorted([]), 3)),
            ..with_recent()
        };
        assert_eq!(evidence(&anchor), [4, 6, 8, 10]);
        let mut feed = EventComparison::new(&anchor, 4);
        assert_eq!(feed.events(&[put("c", 6, "v")]), None);
        let mut feed = EventComparison::new(&anchor, 4);
        let other = feed.events(&[put("e", 4, "v"), put("c", 6, "v")]);
        assert!(matches!(other, Some(Verdict::Another(_))), "{other:?}");
        let unchanged = Anchor {
            base: Some((Tree::from_sorted([]), 10)),
            ..with_recent()
        };
        assert_eq!(evidence(&unchanged), [6, 8, 10], "there is no event since");
    }

    /// Revisions of the events that are asked for before the keys, in order.
    fn evidence(anchor: &Anchor) -> Vec<i64> {
        let mut evidence = anchor.evidence(None);
        assert!(matches!(evidence.pop(), Some(Evidence::Keys)));
        let events = evidence.into_iter().map(|evidence| match evidence {
            Evidence::Events(first) => first,
            evidence => panic!("{evidence:?}"),
        });
        events.collect()
    }

    #[test]
    fn each_revision_of_the_newest_events_is_evidence_unless_it_is_far_behind() {
        let near = with_recent();
        assert_eq!(evidence(&near), [6, 8, 10]);
        let far = Anchor {
            revision: 8 + MAX_REVISIONS_BACK,
            ..near
        };
        assert_eq!(evidence(&far), [8, 10]);
        let alone = anchor("b", 10);
        assert_eq!(evidence(&alone), [10]);
        let far = Anchor {
            revision: 11 + MAX_REVISIONS_BACK,
            ..alone
        };
        assert_eq!(evidence(&far), [0; 0]);
    }

    fn put_k(revision: i64, value: &str) -> Change {
        put("k", revision, value)
    }

    fn revisions(recent: &RecentEvents) -> Vec<i64> {
        recent.to_vec().iter().map(Change::revision).collect()
    }

    #[test]
    fn newest_whole_revisions_are_kept() {
        let mut recent = RecentEvents::default();
        recent.push(&[put_k(1, "a"), put_k(2, "a"), put_k(2, "b")]);
        assert_eq!(revisions(&recent), [1, 2, 2]);
        assert!(!recent.is_full());
        let next: Vec<_> = (3..3 + MAX_EVENTS as i64 - 2).map(|n| put_k(n, "c")).collect();
        recent.push(&next);
        assert_eq!(revisions(&recent)[..2], [2, 2]);
        recent.push(&[put_k(100, "d")]);
        assert_eq!(revisions(&recent)[0], 3, "no revision is divided");
        assert!(recent.is_full());
        let many: Vec<_> = (0..MAX_EVENTS as i64 + 4)
            .map(|n| put_k(200 + n / 3, "e"))
            .collect();
        recent.push(&many);
        assert_eq!(
            revisions(&recent)[0],
            202,
            "the first two revisions are not whole"
        );
    }

    #[test]
    fn bytes_are_bounded() {
        let mut recent = RecentEvents::default();
        let value = "v".repeat(400 << 10);
        recent.push(&[put_k(1, &value), put_k(2, &value), put_k(3, &value)]);
        assert_eq!(revisions(&recent), [2, 3]);
        recent.push(&[put_k(4, &"v".repeat(2 << 20))]);
        assert_eq!((revisions(&recent), recent.bytes), (Vec::new(), 0));
    }
}
