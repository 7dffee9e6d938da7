//! Queues whose owners take turns.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

/// Queue of one owner, which is forgotten while it is empty.
pub(super) trait Queue: Default {
    /// Number of waiting calls.
    fn len(&self) -> usize;
}

/// Calls of one owner by their numbers: the lowest is the oldest.
impl<T> Queue for BTreeMap<u64, T> {
    fn len(&self) -> usize {
        BTreeMap::len(self)
    }
}

/// Queues by their owner `K`.
#[derive(Debug)]
pub(super) struct RoundRobin<K, Q> {
    /// Queues that are not empty, each with its owner's position.
    queues: HashMap<K, (u64, Q)>,
    /// Owners by their position: the lowest is next.
    positions: BTreeMap<u64, K>,
    /// Length of each queue, and its owner.
    lengths: BTreeSet<(usize, K)>,
    last_position: u64,
    /// Sum of the lengths.
    len: usize,
}

impl<K, Q> Default for RoundRobin<K, Q> {
    fn default() -> RoundRobin<K, Q> {
        RoundRobin {
            queues: HashMap::new(),
            positions: BTreeMap::new(),
            lengths: BTreeSet::new(),
            last_position: 0,
            len: 0,
        }
    }
}

impl<K, Q> Queue for RoundRobin<K, Q> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<K: Copy + Eq + Hash + Ord, Q: Queue> RoundRobin<K, Q> {
    /// Owner that is next among those that `may` be.
    pub(super) fn next(&self, may: impl Fn(K) -> bool) -> Option<K> {
        self.positions.values().copied().find(|owner| may(*owner))
    }

    /// Queue of an owner; `None` if it is empty.
    pub(super) fn get(&self, owner: K) -> Option<&Q> {
        self.queues.get(&owner).map(|(_, queue)| queue)
    }

    /// Length of an owner's queue.
    pub(super) fn len_of(&self, owner: K) -> usize {
        self.get(owner).map_or(0, Q::len)
    }

    /// Length and owner of the longest queue.
    pub(super) fn longest(&self) -> Option<(usize, K)> {
        self.lengths.last().copied()
    }

    /// Changes the queue of an owner, which is behind all others if it was empty.
    pub(super) fn change<R>(&mut self, owner: K, change: impl FnOnce(&mut Q) -> R) -> R {
        let (mut position, mut queue) = self.queues.remove(&owner).unwrap_or_default();
        let before = queue.len();
        let changed = change(&mut queue);
        let after = queue.len();
        self.len = self.len + after - before;
        self.lengths.remove(&(before, owner));
        if after == 0 {
            self.positions.remove(&position);
            return changed;
        }
        if before == 0 {
            position = self.new_position(owner);
        }
        self.lengths.insert((after, owner));
        self.queues.insert(owner, (position, queue));
        changed
    }

    /// Changes the queue of an owner that has its turn and is then behind all others.
    pub(super) fn take_turn<R>(&mut self, owner: K, change: impl FnOnce(&mut Q) -> R) -> R {
        let position = self.new_position(owner);
        match self.queues.get_mut(&owner) {
            Some((former, _)) => self.positions.remove(&std::mem::replace(former, position)),
            None => self.positions.remove(&position),
        };
        self.change(owner, change)
    }

    /// Position behind all others.
    fn new_position(&mut self, owner: K) -> u64 {
        self.last_position += 1;
        self.positions.insert(self.last_position, owner);
        self.last_position
    }

    /// Whether nothing is kept of any owner.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.positions.is_empty() && self.lengths.is_empty() && self.len == 0
    }
}
