//! Selection of the entries that etcd would return for a query, with their order, count and `more`.

use std::{collections::BinaryHeap, ops::ControlFlow};

use etcd_wire::protobuf::to_usize;

use super::entry::{KeyHead, Pieces};
use super::query::{Dialect, RangeQuery, SortOrder, SortTarget};
use super::selection::{Entries, Order, Selected, Selection, Values};
use super::{stored::StoredEntry, tree::Tree};
use crate::keyspace::Interval;

/// Number of elements up to which Go's sort is an insertion sort, and therefore stable.
const GO_INSERTION_SORT_MAX: u64 = 12;

/// Entries that can be visited while one of the first ones is put in its place.
const ENTRIES_PER_PLACE: u64 = 8;

/// Beginning of a selection.
#[derive(Debug)]
pub enum Selecting<'a> {
    /// The result: no entry had to be looked at.
    Done(Selected),
    /// Every entry of the interval has to be looked at.
    Scan(Scan<'a>),
}

/// A selection by filters or in another order than that of the keys, made in steps.
pub struct Scan<'a> {
    tree: &'a Tree,
    query: &'a RangeQuery,
    values: Values,
    /// Number of keys in the interval.
    count: u64,
    /// Ranks that are not visited yet.
    next: u64,
    to: u64,
    found: Found<'a>,
}

/// Entries that a scan has found.
enum Found<'a> {
    /// The first `limit` in key order.
    Filtered {
        order: Order,
        limit: u64,
        more: bool,
    },
    Sorted(Top<'a>),
}

/// Selects the entries that etcd would return from `tree`, the state at the revision that `query` names.
///
/// [`RangeQuery::check`] must have succeeded: an invalid sort order or target is ignored here.
pub fn select(tree: &Tree, query: &RangeQuery, dialect: &Dialect) -> Selected {
    match begin_select(tree, query, dialect) {
        Selecting::Done(selected) => selected,
        Selecting::Scan(scan) => scan.run(),
    }
}

/// Begins what [`select`] does. Without a scan, it is done at once.
pub fn begin_select<'a>(tree: &'a Tree, query: &'a RangeQuery, dialect: &Dialect) -> Selecting<'a> {
    let by_value = query.sort_target == SortTarget::Value as i32;
    let values = if query.keys_only {
        Values::Left {
            keep_lease: dialect.keys_only_has_lease || by_value,
        }
    } else {
        Values::Kept
    };
    let done = |entries, count, more| Selecting::Done(selected(entries, count, more, values));

    let (from, to) = match query.interval() {
        Interval::Single(key) => {
            // One entry at most: neither sort order nor limit matter.
            let found = tree.get(key);
            let count = u64::from(found.is_some());
            let kept = found.filter(|entry| !query.count_only && passes(query, entry));
            let entries = kept.cloned().map_or(Entries::None, Entries::One);
            return done(entries, count, false);
        }
        Interval::From(key) => (tree.rank(key), tree.len()),
        Interval::Range(key, end) if end <= key => return done(Entries::None, 0, false),
        Interval::Range(key, end) => (tree.rank(key), tree.rank(end)),
    };
    let count = to - from;
    if query.count_only || count == 0 {
        return done(Entries::None, count, false);
    }

    let limit = u64::try_from(query.limit)
        .ok()
        .filter(|limit| *limit > 0)
        .unwrap_or(u64::MAX);
    let filtered = query.has_revision_filter();
    let sort = Sort::of(query);
    if sort.is_none() && !filtered {
        let end = to.min(from.saturating_add(limit));
        let entries = Entries::Ranks {
            tree: tree.clone(),
            from,
            to: end,
        };
        return done(entries, count, end < to);
    }
    // With order NONE and a sort target, etcd sorts, but only the first limit + 1 keys.
    let unlimited_fetch = filtered || query.sort_order != SortOrder::None as i32;
    let fetched = if unlimited_fetch {
        to
    } else {
        to.min(from.saturating_add(limit).saturating_add(1))
    };
    let found = match sort {
        None => Found::Filtered {
            order: Order::default(),
            limit,
            more: false,
        },
        Some(sort) => Found::Sorted(Top::new(sort, limit.min(fetched - from))),
    };
    Selecting::Scan(Scan {
        tree,
        query,
        values,
        count,
        next: from,
        to: fetched,
        found,
    })
}

fn selected(entries: Entries, count: u64, more: bool, values: Values) -> Selected {
    let selection = Selection {
        entries,
        count,
        more,
        values,
    };
    if selection.has_its_values() {
        Selected::Answer(selection)
    } else {
        Selected::ValuesNotHeld
    }
}

impl Scan<'_> {
    /// Entries that are not visited yet.
    pub fn entries(&self) -> u64 {
        self.to - self.next
    }

    /// Memory that the scan takes with its next step, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        match &self.found {
            // Growth doubles it.
            Found::Filtered { order, .. } => 2 * order.memory_bytes(),
            Found::Sorted(top) => {
                let candidate_bytes = size_of::<Candidate<'_>>() as u64;
                (top.limit + 1) * (candidate_bytes + Order::RUN_BYTES)
            }
        }
    }

    /// Continues by about as much work as `entries` entries take. Returns the result once there is one.
    pub fn step(&mut self, entries: u64) -> Option<Selected> {
        let (from, to) = (self.next, self.to.min(self.next.saturating_add(entries)));
        self.next = to;
        let visited = self.found.visit(self.tree, from, to, self.query);
        match &mut self.found {
            Found::Filtered { order, more, .. } => {
                if visited.is_continue() && to < self.to {
                    return None;
                }
                let entries = std::mem::take(order).into_entries(self.tree);
                Some(selected(entries, self.count, *more, self.values))
            }
            Found::Sorted(_) if visited.is_break() => Some(Selected::PackedValues),
            Found::Sorted(_) if from < self.to => None,
            Found::Sorted(top) => {
                if !top.put_in_order(entries.div_ceil(ENTRIES_PER_PLACE)) {
                    return None;
                }
                if top.ambiguous() {
                    return Some(Selected::TiesAreEtcds);
                }
                let more = top.total > top.limit;
                let entries = std::mem::take(&mut top.order)
                    .unwrap_or_default()
                    .into_entries(self.tree);
                Some(selected(entries, self.count, more, self.values))
            }
        }
    }

    /// Continues to the end.
    pub fn run(mut self) -> Selected {
        loop {
            if let Some(selected) = self.step(u64::MAX) {
                return selected;
            }
        }
    }
}

impl std::fmt::Debug for Scan<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scan")
            .field("entries", &self.entries())
            .finish_non_exhaustive()
    }
}

impl<'a> Found<'a> {
    /// Visits the ranks `from..to`. Breaks if no further entry has to be visited: the limit is reached, or a sort key is a packed
    /// value.
    fn visit(&mut self, tree: &'a Tree, from: u64, to: u64, query: &RangeQuery) -> ControlFlow<()> {
        match self {
            Found::Filtered { order, limit, more } => {
                for_each_passing(tree, from, to, query, |rank, entry| {
                    if order.len() == *limit {
                        *more = true;
                        return ControlFlow::Break(());
                    }
                    order.push(rank, entry);
                    ControlFlow::Continue(())
                })
            }
            Found::Sorted(top) => {
                for_each_passing(tree, from, to, query, |rank, entry| top.consider(rank, entry))
            }
        }
    }
}

fn passes(query: &RangeQuery, entry: &StoredEntry) -> bool {
    if !query.has_revision_filter() {
        return true;
    }
    let KeyHead {
        mod_revision,
        create_revision,
        ..
    } = entry.head();
    (query.max_mod_revision == 0 || mod_revision <= query.max_mod_revision)
        && (query.min_mod_revision == 0 || mod_revision >= query.min_mod_revision)
        && (query.max_create_revision == 0 || create_revision <= query.max_create_revision)
        && (query.min_create_revision == 0 || create_revision >= query.min_create_revision)
}

/// Visits the entries of the ranks `from..to` that pass the filters, with their ranks, until `visit` breaks.
fn for_each_passing<'a>(
    tree: &'a Tree,
    from: u64,
    to: u64,
    query: &RangeQuery,
    mut visit: impl FnMut(u64, &'a StoredEntry) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let mut rank = from;
    let mut outcome = ControlFlow::Continue(());
    tree.for_each_from(from, |entry| {
        if rank == to {
            return ControlFlow::Break(());
        }
        if passes(query, entry) {
            outcome = visit(rank, entry);
        }
        rank += 1;
        outcome
    });
    outcome
}

/// A sort order other than ascending by key, in which entries are stored.
#[derive(Clone, Copy)]
struct Sort {
    target: SortTarget,
    descending: bool,
}

impl Sort {
    fn of(query: &RangeQuery) -> Option<Sort> {
        let target = SortTarget::from_number(query.sort_target)?;
        let descending = match SortOrder::from_number(query.sort_order)? {
            SortOrder::None | SortOrder::Ascend if target == SortTarget::Key => return None,
            SortOrder::None | SortOrder::Ascend => false,
            SortOrder::Descend => true,
        };
        Some(Sort { target, descending })
    }

    /// `None` for the value of a packed entry.
    fn key<'a>(self, entry: &'a StoredEntry) -> Option<SortKey<'a>> {
        let head = entry.head();
        let target = match self.target {
            SortTarget::Key => Target::Bytes(Pieces::from(head.key)),
            SortTarget::Value => Target::Bytes(entry.plain()?.fields().value),
            SortTarget::Version => Target::Number(head.version),
            SortTarget::Create => Target::Number(head.create_revision),
            SortTarget::Mod => Target::Number(head.mod_revision),
        };
        Some(if self.descending {
            SortKey::Descending(std::cmp::Reverse(target))
        } else {
            SortKey::Ascending(target)
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Target<'a> {
    Number(i64),
    Bytes(Pieces<'a>),
}

/// Compares in the direction of the sort. All keys of one sort are of the same variant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SortKey<'a> {
    Ascending(Target<'a>),
    Descending(std::cmp::Reverse<Target<'a>>),
}

/// The first limit + 1 entries in sorted order, found in one pass with O(limit) memory.
struct Top<'a> {
    sort: Sort,
    limit: u64,
    /// The first limit + 1 of the entries so far: the greatest is replaced by each smaller one.
    heap: BinaryHeap<Candidate<'a>>,
    /// Number of entries to sort.
    total: u64,
    /// Whether the entries were sorted already; equal neighbours are allowed.
    in_order: bool,
    /// Sort key of the last entry that was visited.
    last: Option<SortKey<'a>>,
    /// The first entries in the order of a stable sort, from the last on; `None` while entries are visited.
    order: Option<Order>,
    /// Sort key of the last entry that was put in its place.
    last_placed: Option<SortKey<'a>>,
    /// Whether two of the first limit + 1 entries have equal sort keys.
    has_ties: bool,
}

/// Ordered by sort key, then by rank: the order of a stable sort.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate<'a> {
    key: SortKey<'a>,
    rank: u64,
    entry: ByRank<'a>,
}

/// The entry of a candidate, ignored in comparisons: ranks are unique.
struct ByRank<'a>(&'a StoredEntry);

impl PartialEq for ByRank<'_> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for ByRank<'_> {}

impl PartialOrd for ByRank<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByRank<'_> {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl<'a> Top<'a> {
    /// `limit` is not above the number of entries.
    fn new(sort: Sort, limit: u64) -> Top<'a> {
        Top {
            sort,
            limit,
            heap: BinaryHeap::new(),
            total: 0,
            in_order: true,
            last: None,
            order: None,
            last_placed: None,
            has_ties: false,
        }
    }

    /// Breaks if the sort key is a packed value.
    fn consider(&mut self, rank: u64, entry: &'a StoredEntry) -> ControlFlow<()> {
        let Some(key) = self.sort.key(entry) else {
            return ControlFlow::Break(());
        };
        self.in_order = self.in_order && self.last.is_none_or(|last| last <= key);
        self.last = Some(key);
        let candidate = Candidate {
            key,
            rank,
            entry: ByRank(entry),
        };
        let wanted = to_usize(self.limit).saturating_add(1);
        if self.total == 0 {
            // No more than the limit, so that growth does not take twice as much.
            self.heap.reserve_exact(wanted);
        }
        self.total += 1;
        if self.heap.len() < wanted {
            self.heap.push(candidate);
        } else if let Some(mut greatest) = self.heap.peek_mut()
            && candidate < *greatest
        {
            *greatest = candidate;
        }
        ControlFlow::Continue(())
    }

    /// Puts the last `entries` of those that are not yet in order in their places. Returns whether all are.
    fn put_in_order(&mut self, entries: u64) -> bool {
        let places = self.heap.len().min(to_usize(self.limit));
        let order = self.order.get_or_insert_with(|| Order::of_places(places));
        for _ in 0..entries {
            let Some(Candidate { key, rank, entry }) = self.heap.pop() else {
                break;
            };
            self.has_ties |= self.last_placed.replace(key) == Some(key);
            order.put(self.heap.len(), rank, entry.0);
        }
        self.heap.is_empty()
    }

    /// Whether the first limit + 1 entries have equal sort keys whose order, or choice, depends on Go's sort. That is
    /// stable for few elements, and does not change sorted input.
    fn ambiguous(&self) -> bool {
        self.total > GO_INSERTION_SORT_MAX && !self.in_order && self.has_ties
    }
}

#[cfg(any(test, fuzzing, feature = "testing"))]
pub(super) mod model;
#[cfg(test)]
mod tests;
