use std::collections::{BTreeMap, HashMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::cache::event_log::ChangeKind;
use crate::cache::node::{Body, Node};
use crate::cache::testing::{KeyValue, Remaking, key, remaking};
use crate::cache::tree::model::{check, holds};
use crate::cache::{Entry, Packing, StoredEntry};

type State = BTreeMap<Vec<u8>, KeyValue>;

const UNBOUNDED: HistoryLimits = HistoryLimits {
    max_age: Duration::from_secs(1 << 30),
    max_bytes: 1 << 40,
    checkpoint_every_events: 128,
};

fn second(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn put(index: usize, revision: i64, value_bytes: usize) -> Change {
    Change::put(KeyValue::new(key(index), revision, vec![0; value_bytes]).entry())
}

fn delete(index: usize, mod_revision: i64) -> Change {
    Change::delete(KeyValue::deleted(key(index), mod_revision).entry())
}

fn state_of(tree: &Tree) -> State {
    let mut state = State::new();
    tree.for_each_from(0, |entry| {
        state.insert(entry.key().to_vec(), KeyValue::from(entry));
        std::ops::ControlFlow::Continue(())
    });
    state
}

/// The state at every revision so far.
struct Model {
    states: Vec<(i64, State)>,
    /// Time at which each revision of `states` was replaced by the next one.
    replaced: Vec<Duration>,
    compacted: i64,
    events: Vec<Event>,
}

/// An event as a watch has to deliver it, with what the key held at the revision before: nothing if the event creates the key.
#[derive(Clone, Debug, PartialEq)]
struct Event {
    revision: i64,
    kind: ChangeKind,
    key_value: KeyValue,
    replaced: Option<KeyValue>,
}

impl From<&Change> for Event {
    fn from(change: &Change) -> Event {
        Event {
            revision: change.revision(),
            kind: change.kind,
            key_value: KeyValue::from(&change.entry),
            replaced: change.replaced.as_ref().map(KeyValue::from),
        }
    }
}

impl Model {
    fn at(&self, revision: i64) -> Option<&State> {
        let after = self.states.partition_point(|(known, _)| *known <= revision);
        Some(&self.states.get(after.checked_sub(1)?)?.1)
    }

    /// Whether the state at `revision` was current at `since` or later.
    fn current_since(&self, revision: i64, since: Duration) -> bool {
        let after = self.states.partition_point(|(known, _)| *known <= revision);
        after == self.states.len() || self.replaced[after - 1] >= since
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Keys, each put (with the size of its value) or deleted, in this order, also the same one again; number of revisions to skip
    /// before and after.
    Txn {
        keys: Vec<(usize, Option<usize>)>,
        before: i64,
        after: i64,
    },
    /// Several transactions in one batch.
    Batch {
        keys: Vec<usize>,
    },
    Stale,
    Advance(i64),
    Compact(i64),
    Wait(u64),
    Read(prop::sample::Index),
    /// Replaces leaves by the others that the last one has made, and makes others.
    Remake {
        from: usize,
        what: Remaking,
        max_bytes: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let put = prop_oneof![3 => (0..900_usize).prop_map(Some), 1 => Just(None)];
    prop_oneof![
        8 => (prop::collection::vec((prop_oneof![3 => 0..60_usize, 1 => 0..3_usize], put), 1..12), 0..3_i64, 0..3_i64)
            .prop_map(|(keys, before, after)| Op::Txn { keys, before, after }),
        4 => prop::collection::vec(0..60_usize, 0..20).prop_map(|keys| Op::Batch { keys }),
        1 => Just(Op::Stale),
        1 => (-2..4_i64).prop_map(Op::Advance),
        1 => (0..30_i64).prop_map(Op::Compact),
        3 => (0..30_u64).prop_map(Op::Wait),
        6 => any::<prop::sample::Index>().prop_map(Op::Read),
        3 => (0..400_usize, remaking(400), prop_oneof![Just(1 << 20), 0..40_000_u64])
            .prop_map(|(from, what, max_bytes)| Op::Remake { from, what, max_bytes }),
    ]
}

struct Run {
    store: Store,
    model: Model,
    now: Duration,
    limits: HistoryLimits,
    repacked: Option<Repacked>,
}

impl Run {
    fn start(loaded: usize, limits: HistoryLimits) -> Run {
        Run::load(
            (0..loaded).map(|index| KeyValue::new(key(index), 5, "loaded").entry()),
            Packing::Never,
            limits,
        )
    }

    fn start_packed(loaded: usize, limits: HistoryLimits) -> Run {
        let entries = (0..loaded).map(|index| KeyValue::new(key(index), 5, vec![b'v'; 300]).entry());
        Run::load(entries, Packing::Always, limits)
    }

    fn load(entries: impl Iterator<Item = Entry>, packing: Packing, limits: HistoryLimits) -> Run {
        let tree = Tree::load(entries, packing);
        let model = Model {
            states: vec![(10, state_of(&tree))],
            replaced: Vec::new(),
            compacted: 0,
            events: Vec::new(),
        };
        Run {
            store: Store::new(tree, 10, limits, second(1000)),
            model,
            now: second(1000),
            limits,
            repacked: None,
        }
    }

    fn commit(&mut self, mut changes: Vec<Change>, revision: i64) {
        let mut seen = HashSet::new();
        for change in &mut changes {
            let old = self.store.tree().get(change.key());
            if old.is_some_and(|old| !old.has_value()) && seen.insert(change.key().to_vec()) {
                let old = self.model.states.last().unwrap().1.get(change.key());
                change.replaced = Some(old.unwrap().entry());
            }
        }
        assert_eq!(self.store.check_replaced(&changes, false), Ok(()));
        for (index, change) in changes.iter().enumerate() {
            let of_change = change.revision();
            let (last, mut state) = self.model.states.last().unwrap().clone();
            match change.kind {
                ChangeKind::Put => state.insert(change.key().to_vec(), KeyValue::from(&change.entry)),
                ChangeKind::Delete => state.remove(change.key()),
            };
            let before = self.model.at(of_change - 1).unwrap().get(change.key());
            let is_same = |other: &Change| other.revision() == of_change && other.key() == change.key();
            let is_first = !changes[..index].iter().any(is_same);
            let replaced = before.filter(|_| is_first || !change.is_creation()).cloned();
            self.model.events.push(Event {
                revision: of_change,
                kind: change.kind,
                key_value: KeyValue::from(&change.entry),
                replaced,
            });
            if last == of_change {
                self.model.states.last_mut().unwrap().1 = state;
            } else {
                self.model.replaced.push(self.now);
                self.model.states.push((of_change, state));
            }
        }
        let applied = changes.len();
        assert_eq!(
            self.store.apply(changes, revision, self.now),
            Ok(Applied { applied, fenced: 0 })
        );
        assert_eq!(self.store.revision(), revision);
    }

    fn apply(&mut self, op: Op) {
        let current = self.store.revision();
        match op {
            Op::Remake {
                from,
                what,
                max_bytes,
            } => {
                if let Some(repacked) = self.repacked.take() {
                    self.store.put_repacked(&repacked);
                    check(self.store.tree(), &self.model.states.last().unwrap().1);
                }
                let held = self.model.states.last().unwrap().1.values();
                self.repacked = Some(what.of(self.store.tree(), &key(from), max_bytes, held));
            }
            Op::Txn { keys, before, after } => {
                let revision = current + 1 + before;
                let mut state = self.model.states.last().unwrap().1.clone();
                let change = |(index, value): (usize, Option<usize>)| match value {
                    Some(value_bytes) => {
                        let mut new = KeyValue::new(key(index), revision, vec![0; value_bytes]);
                        if let Some(old) = state.get(&new.key) {
                            (new.create_revision, new.version) = (old.create_revision, old.version + 1);
                        }
                        state.insert(new.key.clone(), new.clone());
                        Change::put(new.entry())
                    }
                    None => {
                        state.remove(&key(index)[..]);
                        delete(index, revision)
                    }
                };
                self.commit(keys.into_iter().map(change).collect(), revision + after);
            }
            Op::Batch { keys } => {
                let changes = keys
                    .into_iter()
                    .zip(current + 1..)
                    .map(|(index, revision)| put(index, revision, 10));
                let changes: Vec<_> = changes.collect();
                let last = current + changes.len() as i64;
                self.commit(changes, last);
            }
            Op::Stale => {
                let outcome = self.store.apply(
                    vec![put(1, current, 1), delete(2, current - 1)],
                    current,
                    self.now,
                );
                assert_eq!(
                    outcome,
                    Ok(Applied {
                        applied: 0,
                        fenced: 2
                    })
                );
            }
            Op::Advance(by) => {
                self.store.advance(current + by, self.now);
                assert_eq!(self.store.revision(), current.max(current + by));
            }
            Op::Compact(below) => {
                self.store.compact(current - below);
                self.model.compacted = self.model.compacted.max(current - below);
            }
            Op::Wait(seconds) => self.now += second(seconds),
            Op::Read(index) => {
                let first = self.store.oldest_revision();
                let revision = first + index.index((current - first + 1) as usize) as i64;
                let state = self.store.snapshot_at(revision).unwrap().into_tree();
                assert!(holds(&state, self.model.at(revision).unwrap()), "at {revision}");
            }
        }
        self.check_bounds();
    }

    fn check_bounds(&self) {
        let bytes = self.store.history_bytes();
        let segments = || self.store.closed.iter().chain([&self.store.open]);
        assert_eq!(bytes, segments().map(|segment| segment.bytes).sum::<u64>());
        assert_eq!(
            self.store.log().events().count(),
            segments().map(|segment| segment.events).sum::<usize>()
        );
        assert_eq!(
            self.store.memory_bytes(),
            self.store.tree().memory_bytes() + bytes
        );
    }

    fn check_every_revision(&mut self) {
        let (oldest, current) = (self.store.oldest_revision(), self.store.revision());
        assert!(holds(self.store.tree(), &self.model.states.last().unwrap().1));
        for revision in 0..current + 4 {
            let compacted = self.model.compacted;
            let expected = if revision < compacted {
                Err(AtError::Compacted { revision, compacted })
            } else if revision > current {
                Err(AtError::Future { revision, current })
            } else if revision < oldest {
                Err(AtError::Gone { revision, oldest })
            } else {
                Ok(())
            };
            let snapshot = self.store.snapshot_at(revision).map(Snapshot::into_tree);
            if let Ok(state) = &snapshot {
                assert!(holds(state, self.model.at(revision).unwrap()), "at {revision}");
            }
            assert_eq!(snapshot.map(|_| ()), expected, "at {revision}");
            let bound_by_bytes = self.limits.max_bytes < UNBOUNDED.max_bytes;
            let since = self.now.saturating_sub(self.limits.max_age);
            if !bound_by_bytes && revision >= compacted.max(10) && self.model.current_since(revision, since) {
                assert!(revision >= oldest, "{revision} was current within the window");
            }
        }
        let known = self.model.events.iter().filter(|event| event.revision > oldest);
        let kept: Vec<_> = self.store.log().events().map(Event::from).collect();
        let after_oldest = kept.iter().skip_while(|event| event.revision <= oldest);
        assert!(
            known.eq(after_oldest),
            "the log has every event since {oldest}, with what it replaced"
        );
    }

    /// Memory that history keeps alive, determined by visiting every node and entry.
    fn kept_alive(&self) -> u64 {
        let mut seen = Reached::default();
        seen.tree(self.store.tree());
        let current: HashSet<_> = seen.0.keys().copied().collect();
        let segments = || self.store.closed.iter().chain([&self.store.open]);
        segments().for_each(|segment| seen.tree(&segment.checkpoint));
        for change in self.store.log().events() {
            // The entries of deletes are counted with the log.
            if change.kind == ChangeKind::Put {
                seen.entry(&change.entry.clone().into());
            }
            change
                .replaced
                .iter()
                .for_each(|entry| seen.entry(&entry.clone().into()));
        }
        let only_here: u64 = seen
            .0
            .iter()
            .filter(|(at, _)| !current.contains(*at))
            .map(|(_, bytes)| bytes)
            .sum();
        only_here
            + self
                .store
                .log()
                .batches_after(0)
                .map(Batch::log_bytes)
                .sum::<u64>()
    }
}

#[derive(Default)]
struct Reached(HashMap<usize, u64>);

impl Reached {
    fn tree(&mut self, tree: &Tree) {
        if let Some(root) = tree.root.as_deref() {
            self.node(root);
        }
    }

    /// The nodes of `tree`, and its entries in blocks.
    fn nodes_and_blocks_of(&mut self, tree: &Tree) {
        self.tree(tree);
        let mut entries = Reached::default();
        tree.for_each_from(0, |entry| {
            if !entry.is_in_block() {
                entries.entry(entry);
            }
            std::ops::ControlFlow::Continue(())
        });
        self.0.retain(|at, _| !entries.0.contains_key(at));
    }

    fn node(&mut self, node: &Node) {
        if self
            .0
            .insert(std::ptr::from_ref(node).addr(), node.memory_bytes())
            .is_some()
        {
            return;
        }
        match &node.body {
            Body::Leaf(entries) => entries.iter().for_each(|entry| self.entry(entry)),
            Body::Inner(inner) => inner.slots.iter().for_each(|slot| self.node(&slot.node)),
        }
    }

    fn entry(&mut self, entry: &StoredEntry) {
        self.0.insert(entry.key().as_ptr().addr(), entry.memory_bytes());
    }
}

prop_compose! {
    fn limits()(
        max_age in prop_oneof![Just(UNBOUNDED.max_age), (0..200_u64).prop_map(second)],
        max_bytes in prop_oneof![2 => Just(UNBOUNDED.max_bytes), 1 => 0..60_000_u64],
        checkpoint_every_events in 0..30_usize,
    ) -> HistoryLimits {
        HistoryLimits { max_age, max_bytes, checkpoint_every_events }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn every_revision_of_the_window_equals_the_model(
        loaded in 0..400_usize,
        limits in limits(),
        is_packed: bool,
        ops in prop::collection::vec(op(), 0..80),
    ) {
        let start = if is_packed { Run::start_packed } else { Run::start };
        let mut run = start(loaded, limits);
        let mut held = Vec::new();
        for (number, op) in ops.into_iter().enumerate() {
            run.apply(op);
            if number % 20 == 0 {
                held.push((run.store.tree().clone(), run.model.states.last().unwrap().1.clone()));
            }
        }
        run.check_every_revision();
        run.check_bounds();
        prop_assert!(run.store.history_bytes() <= limits.max_bytes || run.store.closed.is_empty());
        for (tree, state) in held {
            prop_assert!(holds(&tree, &state));
        }
    }

    #[test]
    fn history_accounts_for_what_it_keeps_alive(
        loaded in 0..2000_usize,
        checkpoint_every_events in 1..60_usize,
        max_age in prop_oneof![Just(UNBOUNDED.max_age), (0..200_u64).prop_map(second)],
        is_packed: bool,
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let start = if is_packed { Run::start_packed } else { Run::start };
        let mut run = start(loaded, HistoryLimits { checkpoint_every_events, max_age, ..UNBOUNDED });
        for op in ops {
            run.apply(op);
        }
        let (kept, accounted) = (run.kept_alive(), run.store.history_bytes());
        // Copied nodes have other spare room than their originals, and that of the log is not counted.
        prop_assert!(accounted + accounted / 4 + 4000 >= kept, "{} accounted, {} kept", accounted, kept);
        prop_assert!(kept + kept / 4 + 4000 >= accounted, "{} accounted, {} kept", accounted, kept);
    }
}

#[test]
fn history_expires_with_time() {
    let mut run = Run::start(
        1000,
        HistoryLimits {
            max_age: second(60),
            checkpoint_every_events: 10,
            ..UNBOUNDED
        },
    );
    for round in 0..100 {
        run.commit(vec![put(round, 11 + round as i64, 500)], 11 + round as i64);
        run.now += second(1);
    }
    let oldest = run.store.oldest_revision();
    assert!((20..=50).contains(&oldest), "{oldest}");
    run.now += second(200);
    let current = run.store.revision();
    run.store.advance(current, run.now);
    run.now += second(200);
    run.store.advance(current, run.now);
    assert_eq!(
        (run.store.oldest_revision(), run.store.history_bytes()),
        (current, 0)
    );
    assert_eq!(run.store.log().events().count(), 0);
}

#[test]
fn bytes_bound_history_even_within_one_segment() {
    let limits = HistoryLimits {
        max_bytes: 100_000,
        checkpoint_every_events: 1_000_000,
        ..UNBOUNDED
    };
    let mut run = Run::start(1000, limits);
    for revision in 11..400 {
        run.commit(vec![put(3, revision, 5000)], revision);
        assert!(run.store.history_bytes() <= limits.max_bytes);
    }
    let window = run.store.revision() - run.store.oldest_revision();
    assert!((5..=20).contains(&window), "{window} revisions of 5 kB in 100 kB");
}

#[test]
fn rebuild_is_independent_of_the_store_and_counts_its_own_nodes() {
    let limits = HistoryLimits {
        checkpoint_every_events: 50,
        ..UNBOUNDED
    };
    let mut run = Run::start(3000, limits);
    let changes = (0..100).map(|round| put(round, 11 + round as i64, 5)).collect();
    run.commit(changes, 110);
    let Snapshot::Rebuild(rebuild) = run.store.snapshot_at(60).unwrap() else {
        panic!("revision 60 is between two checkpoints");
    };
    assert_eq!(rebuild.revision(), 60);
    let expected = run.model.at(60).unwrap().clone();
    run.store.compact(110);
    assert_eq!(
        run.store.log().last_revision(),
        Some(110),
        "a watch may begin at the compaction"
    );
    run.commit(vec![put(1, 111, 5)], 111);
    run.store.compact(111);
    assert_eq!(
        run.store.log().events().count(),
        1,
        "the store has dropped the events"
    );
    let rebuilt = rebuild.run();
    assert_eq!(state_of(&rebuilt.tree), expected);
    let mut checkpoint = Reached::default();
    checkpoint.tree(&rebuild.checkpoint);
    let mut all = Reached::default();
    all.nodes_and_blocks_of(&rebuilt.tree);
    let own: u64 = all
        .0
        .iter()
        .filter(|(at, _)| !checkpoint.0.contains_key(at))
        .map(|(_, bytes)| bytes)
        .sum();
    assert!(
        own > 0 && rebuilt.bytes.abs_diff(own) * 4 <= own,
        "{} for {own}",
        rebuilt.bytes
    );
}

#[test]
fn revisions_without_an_event_of_their_own_share_a_rebuild() {
    let mut run = Run::start(100, UNBOUNDED);
    run.commit(vec![put(1, 20, 5)], 25);
    run.commit(vec![put(1, 30, 5)], 35);
    let rebuilt_at = |revision| match run.store.snapshot_at(revision).unwrap() {
        Snapshot::Rebuild(rebuild) => Some(rebuild.revision()),
        Snapshot::Ready(_) => None,
    };
    assert_eq!([19, 20, 29].map(rebuilt_at), [None, Some(20), Some(20)]);
    assert_eq!(rebuilt_at(30), None, "the current state");
}

#[test]
fn compacted_revisions_are_distinguished_from_those_older_than_the_window() {
    let mut run = Run::start(
        10,
        HistoryLimits {
            checkpoint_every_events: 1,
            ..UNBOUNDED
        },
    );
    for revision in 11..20 {
        run.commit(vec![put(1, revision, 1)], revision);
    }
    assert!(matches!(
        run.store.snapshot_at(9),
        Err(AtError::Gone { oldest: 10, .. })
    ));
    run.store.compact(15);
    assert_eq!(run.store.oldest_revision(), 15);
    assert!(matches!(
        run.store.snapshot_at(14),
        Err(AtError::Compacted { compacted: 15, .. })
    ));
    assert!(run.store.snapshot_at(15).is_ok());
    run.store.compact(12);
    assert_eq!(run.store.oldest_revision(), 15, "a lower compaction is ignored");
}

#[test]
fn history_keeps_no_block_for_an_entry_that_was_replaced() {
    let mut run = Run::start(100, UNBOUNDED);
    let in_block = |tree: &Tree| {
        let mut count = 0;
        tree.for_each_from(0, |entry| {
            count += usize::from(entry.is_in_block());
            std::ops::ControlFlow::Continue(())
        });
        count
    };
    assert_eq!(in_block(run.store.tree()), 100, "a loaded tree is gathered");
    run.commit(vec![put(1, 20, 5), put(2, 20, 5)], 20);
    for change in run.store.log().events() {
        assert!(change.replaced.as_ref().is_some_and(|old| old.block().is_none()));
    }
    let before = run.store.history_bytes();
    assert!(before >= run.kept_alive(), "{before} for {}", run.kept_alive());
}

#[test]
fn change_of_an_entry_in_a_damaged_block_is_refused() {
    let mut run = Run::start_packed(100, UNBOUNDED);
    run.store.tree.damage();
    assert_eq!(
        run.store.apply(vec![put(1, 20, 5)], 20, run.now),
        Err(MemoryError)
    );
}
