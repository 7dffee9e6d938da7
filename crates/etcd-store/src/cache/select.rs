//! Selection of the entries that etcd would return for a query, with their order, count and `more`.

use std::{collections::BinaryHeap, ops::ControlFlow};

use super::{
    entry::{Entry, KeyHead, Pieces},
    packed::CorruptBlock,
    query::{Dialect, RangeQuery, SortOrder, SortTarget},
    stored::{StoredEntry, Unpacker, touch},
    tree::Tree,
};
use crate::keyspace::Interval;
use etcd_wire::protobuf::to_usize;

/// Number of elements up to which Go's sort is an insertion sort, and therefore stable.
const GO_INSERTION_SORT_MAX: u64 = 12;

/// Result of [`select`].
#[derive(Debug)]
pub enum Selected {
    /// The entries that etcd would return.
    Answer(Selection),
    /// Entries have equal sort keys, and their order, or the choice among them, depends on Go's unstable sort: only
    /// etcd can answer.
    TiesAreEtcds,
    /// Values are packed, and the order is that of the values: only etcd can answer without decompressing all of them.
    PackedValues,
    /// Values of the answer are not held: only etcd can answer.
    ValuesNotHeld,
}

/// The entries of an answer, selected from a snapshot but not encoded yet.
#[derive(Clone, Debug)]
pub struct Selection {
    pub(super) entries: Entries,
    /// Number of keys in the interval, regardless of limit and filters.
    pub(super) count: u64,
    /// Whether the limit excluded an entry.
    pub(super) more: bool,
    pub(super) values: Values,
}

#[derive(Clone, Debug)]
pub(super) enum Entries {
    None,
    One(StoredEntry),
    /// Ranks `from..to` of the tree, visited only while they are sent.
    Ranks {
        tree: Tree,
        from: u64,
        to: u64,
    },
    /// Filtered or sorted.
    Picked(Vec<StoredEntry>),
}

/// The part of each entry that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Values {
    Kept,
    Left { keep_lease: bool },
}

impl Selection {
    /// A page in key order, with the number of keys that etcd counts from its first key on.
    pub fn of_page(entries: Vec<Entry>, count: u64, more: bool) -> Selection {
        Selection {
            entries: Entries::Picked(entries.into_iter().map(StoredEntry::from).collect()),
            count,
            more,
            values: Values::Kept,
        }
    }

    /// Whether the values that are sent are held.
    fn has_its_values(&self) -> bool {
        self.values != Values::Kept
            || match &self.entries {
                Entries::None => true,
                Entries::One(entry) => entry.has_value(),
                Entries::Picked(entries) => entries.iter().all(StoredEntry::has_value),
                Entries::Ranks { tree, from, to } => {
                    tree.summary().not_held_bytes == 0
                        || tree.summary_of_ranks(*from, *to).not_held_bytes == 0
                }
            }
    }

    /// Number of entries in the response.
    pub fn len(&self) -> u64 {
        match &self.entries {
            Entries::None => 0,
            Entries::One(_) => 1,
            Entries::Ranks { from, to, .. } => to - from,
            Entries::Picked(entries) => entries.len() as u64,
        }
    }

    /// Removes the first `entries` entries and returns them, without a count. The selection must have more.
    pub(super) fn take_front(&mut self, entries: u64) -> Selection {
        let front = match &mut self.entries {
            Entries::Ranks { tree, from, to } => {
                let start = *from;
                *from = start.saturating_add(entries).min(*to);
                Entries::Ranks {
                    tree: tree.clone(),
                    from: start,
                    to: *from,
                }
            }
            Entries::Picked(picked) => {
                let rest = picked.split_off(to_usize(entries).min(picked.len()));
                Entries::Picked(std::mem::replace(picked, rest))
            }
            whole => std::mem::replace(whole, Entries::None),
        };
        Selection {
            entries: front,
            count: 0,
            more: false,
            values: self.values,
        }
    }

    /// Visits the entries, without the first `skipped`. Entries shorter than `copied_below_bytes` are read.
    pub(super) fn visit_from(
        &self,
        skipped: u64,
        copied_below_bytes: usize,
        mut visit: impl FnMut(&StoredEntry) -> ControlFlow<()>,
    ) {
        match &self.entries {
            Entries::None => {}
            Entries::One(entry) => {
                if skipped == 0 {
                    let _ = visit(entry);
                }
            }
            Entries::Picked(entries) => {
                let _ = entries.iter().skip(to_usize(skipped)).try_for_each(visit);
            }
            Entries::Ranks { tree, from, to } => {
                let start = from + skipped;
                let mut left = to - start;
                if left > 0 {
                    tree.for_each_run_from(start, |run| {
                        let run = &run[..run.len().min(to_usize(left))];
                        left -= run.len() as u64;
                        touch(run, copied_below_bytes);
                        run.iter().try_for_each(&mut visit)?;
                        if left == 0 {
                            ControlFlow::Break(())
                        } else {
                            ControlFlow::Continue(())
                        }
                    });
                }
            }
        }
    }

    /// Visits as [`Selection::visit_from`] does, with values: packed ones are decompressed, with what `unpacker` has kept.
    pub(super) fn read_from(
        &self,
        skipped: u64,
        copied_below_bytes: usize,
        unpacker: &mut Unpacker,
        mut visit: impl FnMut(&Entry) -> ControlFlow<()>,
    ) -> Result<(), CorruptBlock> {
        let mut outcome = Ok(());
        self.visit_from(skipped, copied_below_bytes, |stored| match stored.parts() {
            Ok(entry) => visit(entry),
            Err(_) => match unpacker.read(stored) {
                Ok(entry) => visit(&entry),
                Err(corrupt) => {
                    outcome = Err(corrupt);
                    ControlFlow::Break(())
                }
            },
        });
        outcome
    }

    /// Whether the entry after `skipped` ones is in a block, and so most of those that follow.
    pub(super) fn is_in_blocks(&self, skipped: u64) -> bool {
        match &self.entries {
            Entries::Ranks { tree, from, .. } => {
                self.values == Values::Kept && tree.at(from + skipped).is_some_and(StoredEntry::is_in_block)
            }
            _ => false,
        }
    }

    /// Whether the response has no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Selects the entries that etcd would return from `tree`, the state at the revision that `query` names.
///
/// [`RangeQuery::check`] must have succeeded: an invalid sort order or target is ignored here.
pub fn select(tree: &Tree, query: &RangeQuery, dialect: &Dialect) -> Selected {
    let by_value = query.sort_target == SortTarget::Value as i32;
    let values = if query.keys_only {
        Values::Left {
            keep_lease: dialect.keys_only_has_lease || by_value,
        }
    } else {
        Values::Kept
    };
    let answer = |entries, count, more| {
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
    };

    let (from, to) = match query.interval() {
        Interval::Single(key) => {
            // One entry at most: neither sort order nor limit matter.
            let found = tree.get(key);
            let count = u64::from(found.is_some());
            let kept = found.filter(|entry| !query.count_only && passes(query, entry));
            let entries = kept.cloned().map_or(Entries::None, Entries::One);
            return answer(entries, count, false);
        }
        Interval::From(key) => (tree.rank(key), tree.len()),
        Interval::Range(key, end) if end <= key => return answer(Entries::None, 0, false),
        Interval::Range(key, end) => (tree.rank(key), tree.rank(end)),
    };
    let count = to - from;
    if query.count_only || count == 0 {
        return answer(Entries::None, count, false);
    }

    let limit = u64::try_from(query.limit)
        .ok()
        .filter(|limit| *limit > 0)
        .unwrap_or(u64::MAX);
    let filtered = query.has_revision_filter();
    let Some(sort) = Sort::of(query) else {
        if filtered {
            let mut kept = Vec::new();
            let more = for_each_passing(tree, from, to, query, |entry| {
                if kept.len() as u64 == limit {
                    return ControlFlow::Break(());
                }
                kept.push(entry.clone());
                ControlFlow::Continue(())
            });
            return answer(Entries::Picked(kept), count, more.is_break());
        }
        let end = to.min(from.saturating_add(limit));
        return answer(
            Entries::Ranks {
                tree: tree.clone(),
                from,
                to: end,
            },
            count,
            end < to,
        );
    };

    // With order NONE and a sort target, etcd sorts, but only the first limit + 1 keys.
    let unlimited_fetch = filtered || query.sort_order != SortOrder::None as i32;
    let fetched = if unlimited_fetch {
        to
    } else {
        to.min(from.saturating_add(limit).saturating_add(1))
    };
    let Some(top) = Top::of(tree, from, fetched, query, sort, limit) else {
        return Selected::PackedValues;
    };
    if top.ambiguous() {
        return Selected::TiesAreEtcds;
    }
    let more = top.total > limit;
    answer(Entries::Picked(top.into_entries(limit)), count, more)
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

/// Visits the entries of the ranks `from..to` that pass the filters, until `visit` breaks.
fn for_each_passing<'a>(
    tree: &'a Tree,
    from: u64,
    to: u64,
    query: &RangeQuery,
    mut visit: impl FnMut(&'a StoredEntry) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let mut left = to - from;
    let mut outcome = ControlFlow::Continue(());
    tree.for_each_from(from, |entry| {
        if left == 0 {
            return ControlFlow::Break(());
        }
        left -= 1;
        if passes(query, entry) {
            outcome = visit(entry);
        }
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
    /// Entries in the order of a stable sort.
    sorted: Vec<Candidate<'a>>,
    /// Number of entries to sort.
    total: u64,
    /// Whether the entries were sorted already; equal neighbours are allowed.
    in_order: bool,
}

/// Ordered by sort key, then by place: the order of a stable sort.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate<'a> {
    key: SortKey<'a>,
    place: u64,
    entry: ByPlace<'a>,
}

/// The entry of a candidate, ignored in comparisons: places are unique.
struct ByPlace<'a>(&'a StoredEntry);

impl PartialEq for ByPlace<'_> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for ByPlace<'_> {}

impl PartialOrd for ByPlace<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByPlace<'_> {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl<'a> Top<'a> {
    /// `None` if a sort key is a packed value.
    fn of(tree: &'a Tree, from: u64, to: u64, query: &RangeQuery, sort: Sort, limit: u64) -> Option<Top<'a>> {
        let wanted = to_usize(limit).saturating_add(1);
        // A heap whose greatest element is replaced by each smaller one.
        let mut heap = BinaryHeap::new();
        let mut total = 0;
        let mut in_order = true;
        let mut last = None;
        let outcome = for_each_passing(tree, from, to, query, |entry| {
            let Some(key) = sort.key(entry) else {
                return ControlFlow::Break(());
            };
            in_order = in_order && last.is_none_or(|last| last <= key);
            last = Some(key);
            let candidate = Candidate {
                key,
                place: total,
                entry: ByPlace(entry),
            };
            total += 1;
            if heap.len() < wanted {
                heap.push(candidate);
            } else if let Some(mut greatest) = heap.peek_mut()
                && candidate < *greatest
            {
                *greatest = candidate;
            }
            ControlFlow::Continue(())
        });
        outcome.is_continue().then(|| Top {
            sorted: heap.into_sorted_vec(),
            total,
            in_order,
        })
    }

    /// Whether the first limit + 1 entries have equal sort keys whose order, or choice, depends on Go's sort. That is
    /// stable for few elements, and does not change sorted input.
    fn ambiguous(&self) -> bool {
        self.total > GO_INSERTION_SORT_MAX
            && !self.in_order
            && self
                .sorted
                .windows(2)
                .any(|pair| matches!(pair, [left, right] if left.key == right.key))
    }

    fn into_entries(self, limit: u64) -> Vec<StoredEntry> {
        let wanted = to_usize(limit);
        self.sorted
            .into_iter()
            .take(wanted)
            .map(|candidate| candidate.entry.0.clone())
            .collect()
    }
}

#[cfg(any(test, fuzzing, feature = "testing"))]
pub(super) mod model;
#[cfg(test)]
mod tests;
