//! Selected entries of a snapshot, with their order, count and `more`, not encoded yet.

use std::{ops::ControlFlow, sync::Arc};

use etcd_wire::protobuf::to_usize;

use super::stored::{EntryReader, MemoryError, StoredEntry, touch};
use super::{entry::Entry, node::Summary, tree::Tree};

/// Result of [`select`](super::select).
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
    /// Filtered or sorted: places `from..to` of the order, visited only while they are sent.
    Ordered {
        tree: Tree,
        order: Arc<Order>,
        from: u64,
        to: u64,
    },
    /// A page that was received from etcd.
    Page(Vec<StoredEntry>),
}

/// Entries of a tree, as runs of consecutive ranks.
#[derive(Clone, Debug, Default)]
pub(super) struct Order {
    /// In the order of their places.
    runs: Vec<Run>,
    /// Totals over all entries.
    summary: Summary,
}

/// Entries of consecutive ranks, up to the place of the next run.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    /// Place of the first entry in the order.
    place: u64,
    /// Its rank in the tree.
    rank: u64,
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
            entries: Entries::Page(entries.into_iter().map(StoredEntry::from).collect()),
            count,
            more,
            values: Values::Kept,
        }
    }

    /// Whether the values that are sent are held.
    pub(super) fn has_its_values(&self) -> bool {
        self.values != Values::Kept
            || match &self.entries {
                Entries::None => true,
                Entries::One(entry) => entry.has_value(),
                Entries::Page(entries) => entries.iter().all(StoredEntry::has_value),
                Entries::Ordered { order, .. } => order.summary.has_all_values(),
                Entries::Ranks { tree, from, to } => {
                    tree.summary().has_all_values() || tree.summary_of_ranks(*from, *to).has_all_values()
                }
            }
    }

    /// Number of entries in the response.
    pub fn len(&self) -> u64 {
        match &self.entries {
            Entries::None => 0,
            Entries::One(_) => 1,
            Entries::Ranks { from, to, .. } | Entries::Ordered { from, to, .. } => to - from,
            Entries::Page(entries) => entries.len() as u64,
        }
    }

    /// Memory of a filtered or sorted selection, in bytes; 0 of any other, whose entries are its tree's.
    pub fn order_bytes(&self) -> u64 {
        match &self.entries {
            Entries::Ordered { order, .. } => order.memory_bytes(),
            _ => 0,
        }
    }

    /// Totals over the entries.
    pub(super) fn summary(&self) -> Summary {
        match &self.entries {
            Entries::None => Summary::default(),
            Entries::One(entry) => Summary::of(entry),
            Entries::Page(entries) => Summary::of_all(entries),
            Entries::Ranks { tree, from, to } => tree.summary_of_ranks(*from, *to),
            Entries::Ordered {
                order, from: 0, to, ..
            } if *to == order.summary.count => order.summary,
            Entries::Ordered { .. } => {
                let mut sum = Summary::default();
                self.visit_from(0, 0, |entry| {
                    sum += Summary::of(entry);
                    ControlFlow::Continue(())
                });
                sum
            }
        }
    }

    /// Removes the first `entries` entries and returns them, without a count. The selection must have more.
    pub(super) fn take_front(&mut self, entries: u64) -> Selection {
        let mut front = match &mut self.entries {
            Entries::Page(page) => {
                let rest = page.split_off(to_usize(entries).min(page.len()));
                Entries::Page(std::mem::replace(page, rest))
            }
            whole @ (Entries::None | Entries::One(_)) => std::mem::replace(whole, Entries::None),
            shared @ (Entries::Ranks { .. } | Entries::Ordered { .. }) => shared.clone(),
        };
        if let Entries::Ranks { from, to, .. } | Entries::Ordered { from, to, .. } = &mut self.entries {
            let middle = from.saturating_add(entries).min(*to);
            *from = middle;
            if let Entries::Ranks { to, .. } | Entries::Ordered { to, .. } = &mut front {
                *to = middle;
            }
        }
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
            Entries::Page(entries) => {
                let _ = entries.iter().skip(to_usize(skipped)).try_for_each(visit);
            }
            Entries::Ranks { tree, from, to } => {
                let _ = visit_ranks(tree, from + skipped, *to, copied_below_bytes, &mut visit);
            }
            Entries::Ordered {
                tree,
                order,
                from,
                to,
            } => {
                for (from, to) in order.ranks(from + skipped, *to) {
                    if visit_ranks(tree, from, to, copied_below_bytes, &mut visit).is_break() {
                        break;
                    }
                }
            }
        }
    }

    /// Visits as [`Selection::visit_from`] does, with values: packed ones are decompressed, with what `reader` has kept.
    pub(super) fn read_from(
        &self,
        skipped: u64,
        copied_below_bytes: usize,
        reader: &mut EntryReader,
        mut visit: impl FnMut(&Entry) -> ControlFlow<()>,
    ) -> Result<(), MemoryError> {
        let mut outcome = Ok(());
        self.visit_from(skipped, copied_below_bytes, |stored| match stored.parts() {
            Ok(entry) => visit(entry),
            Err(_) => match reader.read(stored) {
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

impl Order {
    /// Memory of one run, in bytes.
    pub(super) const RUN_BYTES: u64 = size_of::<Run>() as u64;

    /// An order of `entries` entries, each to be put in its place.
    pub(super) fn of_places(entries: usize) -> Order {
        Order {
            runs: vec![Run::default(); entries],
            summary: Summary::default(),
        }
    }

    /// Puts the entry at `rank` in its `place`.
    pub(super) fn put(&mut self, place: usize, rank: u64, entry: &StoredEntry) {
        if let Some(run) = self.runs.get_mut(place) {
            *run = Run {
                place: place as u64,
                rank,
            };
            self.summary += Summary::of(entry);
        }
    }

    /// Adds the entry at `rank` behind all others.
    pub(super) fn push(&mut self, rank: u64, entry: &StoredEntry) {
        let place = self.summary.count;
        let continues = |run: &Run| run.rank + (place - run.place) == rank;
        if !self.runs.last().is_some_and(continues) {
            self.runs.push(Run { place, rank });
        }
        self.summary += Summary::of(entry);
    }

    /// Memory of the runs, in bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.runs.capacity() as u64 * Order::RUN_BYTES
    }

    /// Number of entries.
    pub(super) fn len(&self) -> u64 {
        self.summary.count
    }

    /// The entries of `tree` in this order.
    pub(super) fn into_entries(mut self, tree: &Tree) -> Entries {
        let tree = tree.clone();
        match *self.runs {
            [] => Entries::None,
            [Run { rank, .. }] => Entries::Ranks {
                tree,
                from: rank,
                to: rank + self.len(),
            },
            _ => {
                self.runs.shrink_to_fit();
                Entries::Ordered {
                    tree,
                    from: 0,
                    to: self.len(),
                    order: Arc::new(self),
                }
            }
        }
    }

    /// The ranks of the places `from..to`, by runs.
    fn ranks(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
        let first = self
            .runs
            .partition_point(|run| run.place <= from)
            .saturating_sub(1);
        let runs = &self.runs[first.min(self.runs.len())..];
        let ends = runs.iter().skip(1).map(|run| run.place).chain([self.len()]);
        runs.iter()
            .zip(ends)
            .map(move |(run, end)| (run, run.place.max(from), end.min(to)))
            .take_while(|(_, begin, end)| begin < end)
            .map(|(run, begin, end)| (run.rank + (begin - run.place), run.rank + (end - run.place)))
    }
}

/// Visits the entries of the ranks `from..to`. Entries shorter than `copied_below_bytes` are read.
fn visit_ranks(
    tree: &Tree,
    from: u64,
    to: u64,
    copied_below_bytes: usize,
    visit: &mut impl FnMut(&StoredEntry) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let mut left = to - from;
    let mut outcome = ControlFlow::Continue(());
    if left > 0 {
        tree.for_each_run_from(from, |run| {
            let run = &run[..run.len().min(to_usize(left))];
            left -= run.len() as u64;
            touch(run, copied_below_bytes);
            outcome = run.iter().try_for_each(&mut *visit);
            outcome?;
            if left == 0 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
    }
    outcome
}
