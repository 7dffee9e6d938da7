//! Difference between a tree and the keys of etcd at one revision, by keys and revisions alone unless values are compared, too.
//!
//! An entry of the same key that was created, last written and written as often at the same revisions is the same entry, in one
//! history. Whether it is one history is not shown by keys and revisions: see [`adopt`](super::adopt).

use std::cmp::{Ordering, Reverse};
use std::{collections::BinaryHeap, ops::ControlFlow};

use bytes::Bytes;
use etcd_store::cache::{Entry, StoredEntry, Tree};
use etcd_wire::etcdserverpb::RangeResponse;
use rangecache_upstream::page_limit;

use super::begin::{LoadError, PAGE_TARGET_BYTES};
use super::read::Sink;

/// Unchanged entries whose values are compared: the newest.
pub(super) const COMPARED_ENTRIES: usize = 64;
/// Largest gap between two changed keys that is read with them, in bytes of the tree's entries: a read costs etcd about
/// as much as these.
const READ_GAP_BYTES: usize = 16 << 10;
/// Divisor of the tree's keys: if more of them are read again or gone, a load costs little more than their difference.
const TOO_MANY: u64 = 2;
/// Differences that are never too many.
const ALWAYS_FEW: u64 = 1_000;

/// Consecutive keys that are read again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) first: Bytes,
    pub(super) last: Bytes,
    /// Keys of etcd from the first to the last one.
    pub(super) keys: u64,
}

/// Comparison of a tree with etcd's keys, which arrive in order.
#[derive(Debug)]
pub(super) struct Difference {
    tree: Tree,
    /// Whether values are compared, too.
    with_values: bool,
    /// Rank of the first entry of the tree that was not compared.
    rank: u64,
    last_key: Option<Bytes>,
    /// Keys that are in the tree and no longer in etcd.
    removed: Vec<Bytes>,
    /// Keys of all spans.
    read_keys: u64,
    spans: Vec<Span>,
    /// Unchanged keys behind the last span, and the bytes of their entries.
    gap: (u64, usize),
    /// Revision and rank of the newest unchanged entries.
    newest: BinaryHeap<Reverse<(i64, u64)>>,
}

/// Comparison of all keys.
#[derive(Debug)]
pub(super) struct Compared {
    /// Keys that are in the tree and no longer in etcd.
    pub(super) removed: Vec<Bytes>,
    /// Spans that are read again: every key that is new or was changed, and some of those between.
    pub(super) spans: Vec<Span>,
    /// The newest unchanged entries.
    pub(super) newest: Vec<StoredEntry>,
}

impl Sink for Difference {
    fn last_key(&self) -> Option<Bytes> {
        self.last_key.clone()
    }

    /// Before 3.7 etcd reads the values, too.
    fn page_limit(&self) -> i64 {
        page_limit(PAGE_TARGET_BYTES, self.tree.mean_encoded_bytes())
    }

    async fn add(&mut self, response: RangeResponse) -> Result<(), LoadError> {
        self.compare(&response.kvs)
    }
}

impl Difference {
    /// Compares with `tree`, and with its values if etcd's keys arrive `with_values`.
    pub(super) fn new(tree: Tree, with_values: bool) -> Difference {
        Difference {
            tree,
            with_values,
            rank: 0,
            last_key: None,
            removed: Vec::new(),
            read_keys: 0,
            spans: Vec::new(),
            gap: (0, 0),
            newest: BinaryHeap::with_capacity(COMPARED_ENTRIES + 1),
        }
    }

    /// Compares the next keys of etcd.
    ///
    /// # Errors
    /// [`LoadError::Foreign`] if an entry of the same revisions has another value;
    /// [`LoadError::TooDifferent`] if a load costs little more; [`LoadError::Inconsistent`] if the keys are not in order;
    /// [`LoadError::Malformed`].
    pub(super) fn compare(&mut self, key_values: &[Bytes]) -> Result<(), LoadError> {
        let tree = self.tree.clone();
        let mut theirs = Vec::with_capacity(key_values.len());
        for key_value in key_values {
            let entry = Entry::from_key_value(key_value)?;
            let before = theirs.last().map(Entry::key).or(self.last_key.as_deref());
            if before.is_some_and(|before| before >= entry.key()) {
                return Err(LoadError::Inconsistent);
            }
            theirs.push(entry);
        }
        if self.with_values && tree.contradicts(&theirs) {
            return Err(LoadError::Foreign);
        }
        let mut rest = theirs.iter().peekable();
        tree.for_each_from(self.rank, |ours| {
            while let Some(new) = rest.next_if(|theirs| theirs.key() < ours.key()) {
                self.add_changed(new.key());
            }
            match rest.peek().map(|theirs| theirs.key().cmp(ours.key())) {
                // What follows has not arrived.
                None => return ControlFlow::Break(()),
                Some(Ordering::Equal) => match rest.next() {
                    Some(theirs) if !ours.is_as_old_as(theirs) => {
                        self.add_changed(theirs.key());
                        self.rank += 1;
                    }
                    _ => self.add_unchanged(ours),
                },
                Some(_) => self.add_removed(ours),
            }
            ControlFlow::Continue(())
        });
        for new in rest {
            self.add_changed(new.key());
        }
        if let Some(last) = theirs.last() {
            self.last_key = Some(Bytes::copy_from_slice(last.key()));
        }
        self.check_number()
    }

    /// Ends the comparison: etcd has no more keys.
    ///
    /// # Errors
    /// [`LoadError::TooDifferent`]
    pub(super) fn finish(mut self) -> Result<Compared, LoadError> {
        let tree = self.tree.clone();
        tree.for_each_from(self.rank, |ours| {
            self.add_removed(ours);
            ControlFlow::Continue(())
        });
        self.check_number()?;
        let newest = self.newest.into_sorted_vec().into_iter();
        let newest = newest.filter_map(|Reverse((_, rank))| tree.at(rank).cloned());
        Ok(Compared {
            newest: newest.collect(),
            removed: self.removed,
            spans: self.spans,
        })
    }

    fn check_number(&self) -> Result<(), LoadError> {
        let differences = self.read_keys + self.removed.len() as u64;
        if differences > ALWAYS_FEW.max(self.tree.len() / TOO_MANY) {
            return Err(LoadError::TooDifferent);
        }
        Ok(())
    }

    fn add_unchanged(&mut self, ours: &StoredEntry) {
        self.newest.push(Reverse((ours.mod_revision(), self.rank)));
        if self.newest.len() > COMPARED_ENTRIES {
            self.newest.pop();
        }
        self.rank += 1;
        self.gap.0 += 1;
        self.gap.1 += ours.encoded_len();
    }

    fn add_removed(&mut self, ours: &StoredEntry) {
        self.removed.push(Bytes::copy_from_slice(ours.key()));
        self.rank += 1;
    }

    fn add_changed(&mut self, key: &[u8]) {
        let key = Bytes::copy_from_slice(key);
        let (between, bytes) = std::mem::take(&mut self.gap);
        self.read_keys += match self.spans.last_mut() {
            Some(span) if bytes <= READ_GAP_BYTES => {
                span.keys += between + 1;
                span.last = key;
                between + 1
            }
            _ => {
                self.spans.push(Span {
                    first: key.clone(),
                    last: key,
                    keys: 1,
                });
                1
            }
        };
    }
}

#[cfg(test)]
mod tests;
