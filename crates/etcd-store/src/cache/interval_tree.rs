//! Map of the intervals that watchers name, looked up by key: returns the values of all intervals that contain it.
//!
//! Single keys are in a hash map. Ranges are in a treap ordered by start and end, in which every node holds the largest
//! end of its subtree. Its cost depends on the number of distinct ranges, never on the number of their watchers.

use std::{cmp::Ordering, collections::HashMap};

use crate::keyspace::Interval;

/// Index of a node that does not exist.
const NONE: u32 = u32::MAX;

/// End of a range, exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RangeEnd<'a> {
    Before(&'a [u8]),
    Unbounded,
}

impl RangeEnd<'_> {
    fn is_above(self, key: &[u8]) -> bool {
        match self {
            RangeEnd::Before(end) => key < end,
            RangeEnd::Unbounded => true,
        }
    }
}

impl Ord for RangeEnd<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            (RangeEnd::Before(left), RangeEnd::Before(right)) => left.cmp(right),
            (RangeEnd::Before(_), RangeEnd::Unbounded) => Ordering::Less,
            (RangeEnd::Unbounded, RangeEnd::Before(_)) => Ordering::Greater,
            (RangeEnd::Unbounded, RangeEnd::Unbounded) => Ordering::Equal,
        }
    }
}

impl PartialOrd for RangeEnd<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Start and end of a range, in the order of the tree.
type Bounds<'a> = (&'a [u8], RangeEnd<'a>);

#[derive(Debug)]
struct IntervalNode<V> {
    start: Box<[u8]>,
    /// `None`: unbounded.
    end: Option<Box<[u8]>>,
    value: V,
    priority: u64,
    left: u32,
    right: u32,
    /// Node of this subtree with the largest end.
    largest: u32,
}

impl<V> IntervalNode<V> {
    fn end(&self) -> RangeEnd<'_> {
        self.end.as_deref().map_or(RangeEnd::Unbounded, RangeEnd::Before)
    }

    fn bounds(&self) -> Bounds<'_> {
        (&self.start, self.end())
    }
}

/// Distinct intervals, each with a value. `insert` and `remove` take O(log n) for n distinct ranges, and `stab` as
/// much for each range that it finds, at most.
#[derive(Debug)]
pub struct IntervalTree<V> {
    singles: HashMap<Box<[u8]>, V>,
    /// Arena of the treap. Unused nodes are linked by `left`, from `unused` on.
    nodes: Vec<IntervalNode<V>>,
    unused: u32,
    root: u32,
    ranges: usize,
    /// State of the generator of priorities.
    random: u64,
}

impl<V: Copy> IntervalTree<V> {
    /// An empty map. The shape of the tree depends on `seed`: clients, which choose the intervals, must not know it.
    pub fn new(seed: u64) -> Self {
        Self {
            singles: HashMap::new(),
            nodes: Vec::new(),
            unused: NONE,
            root: NONE,
            ranges: 0,
            random: seed | 1,
        }
    }

    /// Number of distinct intervals.
    pub fn len(&self) -> usize {
        self.singles.len() + self.ranges
    }

    /// Whether there is no interval.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value of exactly this interval.
    pub fn get(&self, interval: &Interval<'_>) -> Option<V> {
        let wanted = match *interval {
            Interval::Single(key) => return self.singles.get(key).copied(),
            Interval::Range(start, end) => (start, RangeEnd::Before(end)),
            Interval::From(start) => (start, RangeEnd::Unbounded),
        };
        let mut at = self.root;
        while at != NONE {
            let node = self.node(at);
            at = match wanted.cmp(&node.bounds()) {
                Ordering::Less => node.left,
                Ordering::Equal => return Some(node.value),
                Ordering::Greater => node.right,
            };
        }
        None
    }

    /// Adds an interval, or changes its value; returns the value that it had.
    pub fn insert(&mut self, interval: &Interval<'_>, value: V) -> Option<V> {
        let (start, end) = match *interval {
            Interval::Single(key) => return self.singles.insert(key.into(), value),
            Interval::Range(start, end) => (start, Some(end)),
            Interval::From(start) => (start, None),
        };
        let old = self.remove(interval);
        let node = IntervalNode {
            start: start.into(),
            end: end.map(Into::into),
            value,
            priority: self.priority(),
            left: NONE,
            right: NONE,
            largest: NONE,
        };
        let added = self.add(node);
        self.root = self.insert_below(self.root, added);
        self.ranges += 1;
        old
    }

    /// Removes exactly this interval; returns its value.
    pub fn remove(&mut self, interval: &Interval<'_>) -> Option<V> {
        let wanted = match *interval {
            Interval::Single(key) => return self.singles.remove(key),
            Interval::Range(start, end) => (start, RangeEnd::Before(end)),
            Interval::From(start) => (start, RangeEnd::Unbounded),
        };
        let (root, removed) = self.remove_below(self.root, wanted);
        self.root = root;
        if removed == NONE {
            return None;
        }
        self.ranges -= 1;
        let unused = self.unused;
        let node = self.node_mut(removed);
        node.left = unused;
        node.start = Box::default();
        node.end = None;
        let value = node.value;
        self.unused = removed;
        if self.ranges == 0 {
            // A burst of watchers must not leave its arena behind.
            self.nodes = Vec::new();
            self.unused = NONE;
        }
        Some(value)
    }

    /// Calls `found` with the value of each interval that contains `key`, in no particular order.
    pub fn stab(&self, key: &[u8], mut found: impl FnMut(V)) {
        if let Some(value) = self.singles.get(key) {
            found(*value);
        }
        self.stab_below(self.root, key, &mut found);
    }

    fn stab_below(&self, at: u32, key: &[u8], found: &mut impl FnMut(V)) {
        let mut at = at;
        while at != NONE {
            let node = self.node(at);
            if !self.node(node.largest).end().is_above(key) {
                return;
            }
            if *node.start > *key {
                at = node.left;
                continue;
            }
            if node.end().is_above(key) {
                found(node.value);
            }
            self.stab_below(node.left, key, found);
            at = node.right;
        }
    }

    /// Puts the node `added` into the subtree at `at`; returns the subtree's root.
    fn insert_below(&mut self, at: u32, added: u32) -> u32 {
        if at == NONE {
            self.update(added);
            return added;
        }
        if self.node(added).priority > self.node(at).priority {
            let (left, right) = self.split(at, added);
            let node = self.node_mut(added);
            (node.left, node.right) = (left, right);
            self.update(added);
            return added;
        }
        if self.node(added).bounds() < self.node(at).bounds() {
            let left = self.insert_below(self.node(at).left, added);
            self.node_mut(at).left = left;
        } else {
            let right = self.insert_below(self.node(at).right, added);
            self.node_mut(at).right = right;
        }
        self.update(at);
        at
    }

    /// Divides the subtree at `at` into the ranges below that of the node `by`, and those above it.
    fn split(&mut self, at: u32, by: u32) -> (u32, u32) {
        if at == NONE {
            return (NONE, NONE);
        }
        if self.node(at).bounds() < self.node(by).bounds() {
            let (below, above) = self.split(self.node(at).right, by);
            self.node_mut(at).right = below;
            self.update(at);
            (at, above)
        } else {
            let (below, above) = self.split(self.node(at).left, by);
            self.node_mut(at).left = above;
            self.update(at);
            (below, at)
        }
    }

    /// Takes the range out of the subtree at `at`; returns the subtree's root, and the node, `NONE` if there is none.
    fn remove_below(&mut self, at: u32, wanted: Bounds<'_>) -> (u32, u32) {
        if at == NONE {
            return (NONE, NONE);
        }
        let (left, right) = (self.node(at).left, self.node(at).right);
        let removed = match wanted.cmp(&self.node(at).bounds()) {
            Ordering::Equal => return (self.merge(left, right), at),
            Ordering::Less => {
                let (left, removed) = self.remove_below(left, wanted);
                self.node_mut(at).left = left;
                removed
            }
            Ordering::Greater => {
                let (right, removed) = self.remove_below(right, wanted);
                self.node_mut(at).right = right;
                removed
            }
        };
        self.update(at);
        (at, removed)
    }

    /// Joins two subtrees of which the first lies below the second.
    fn merge(&mut self, left: u32, right: u32) -> u32 {
        if left == NONE {
            return right;
        }
        if right == NONE {
            return left;
        }
        if self.node(left).priority > self.node(right).priority {
            let merged = self.merge(self.node(left).right, right);
            self.node_mut(left).right = merged;
            self.update(left);
            left
        } else {
            let merged = self.merge(left, self.node(right).left);
            self.node_mut(right).left = merged;
            self.update(right);
            right
        }
    }

    /// Recomputes the largest end of the subtree.
    fn update(&mut self, at: u32) {
        let node = self.node(at);
        let below = [node.left, node.right].into_iter().filter(|child| *child != NONE);
        let largest = below
            .map(|child| self.node(child).largest)
            .fold(at, |largest, other| {
                if self.node(other).end() > self.node(largest).end() {
                    other
                } else {
                    largest
                }
            });
        self.node_mut(at).largest = largest;
    }

    fn add(&mut self, node: IntervalNode<V>) -> u32 {
        if self.unused != NONE {
            let at = self.unused;
            self.unused = self.node(at).left;
            *self.node_mut(at) = node;
            return at;
        }
        self.nodes.push(node);
        // Watchers are bounded far below 4 billion.
        u32::try_from(self.nodes.len() - 1).unwrap_or(NONE)
    }

    fn node(&self, at: u32) -> &IntervalNode<V> {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut IntervalNode<V> {
        &mut self.nodes[at as usize]
    }

    /// The next priority (xorshift64).
    fn priority(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

#[cfg(test)]
mod tests;
