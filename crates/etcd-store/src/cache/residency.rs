//! Values that are not held: of the entries of a prefix everything else stays in the tree, and only etcd has the values.
//!
//! Counts, keys, absence and the bounds of pages are known as before. [`select`](super::select) declines a read of values
//! that are not held. A digest shows whether a value that etcd sends is the one that was left out.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::{
    entry::Entry,
    node::{Body, Node},
    packed::CorruptBlock,
    repack::Repacked,
    tree::Tree,
};

/// Neighbouring entries, some of whose values are not held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NotHeld {
    /// Key of the first.
    pub first: Box<[u8]>,
    /// Key of the last.
    pub last: Box<[u8]>,
    /// Length of those without values as fields `kvs`, in bytes.
    pub bytes: u64,
}

impl Tree {
    /// Leaves out the values of the entries from `start` on and below `end` (empty: to the last key), in leaves from the one
    /// that has `from` on, until the entries of these leaves have `max_bytes` together. This tree does not change; the result
    /// is for [`Store::put_repacked`](super::Store::put_repacked).
    ///
    /// Leaves of which something else has an entry are left alone: their memory would not be freed.
    ///
    /// # Errors
    /// A packed block is damaged.
    pub fn leave_out_values(
        &self,
        (start, end): (&[u8], &[u8]),
        from: &[u8],
        max_bytes: u64,
    ) -> Result<Repacked, CorruptBlock> {
        self.remake(from.max(start), max_bytes, |node, leaf| {
            let is_behind = !end.is_empty() && leaf.first().is_some_and(|first| first.key() >= end);
            if is_behind {
                return Ok(ControlFlow::Break(()));
            }
            if !leaf.has_its_entries_alone() {
                return Ok(ControlFlow::Continue(None));
            }
            leaf.without_values(start, end, node.born)
                .map(ControlFlow::Continue)
        })
    }

    /// Does what [`Tree::leave_out_values`] does of all entries, those that something else has included.
    ///
    /// # Errors
    /// A packed block is damaged.
    #[cfg(debug_assertions)]
    pub fn leave_out_all(&self) -> Result<Repacked, CorruptBlock> {
        self.remake(b"", u64::MAX, |node, leaf| {
            leaf.without_values(b"", b"", node.born)
                .map(ControlFlow::Continue)
        })
    }

    /// Puts the values of `entries`, which are in the order of their keys, where they are not held, if they are those that were
    /// left out; returns what is for [`Store::put_repacked`](super::Store::put_repacked).
    pub fn hold_values(&self, entries: &[Entry]) -> Repacked {
        let from = entries.first().map_or(&b""[..], Entry::key);
        let Ok(held) = self.remake(from, u64::MAX, |node, leaf| {
            let is_behind = |last: &Entry| leaf.first().is_some_and(|first| first.key() > last.key());
            if entries.last().is_none_or(is_behind) {
                return Ok::<_, Infallible>(ControlFlow::Break(()));
            }
            Ok(ControlFlow::Continue(leaf.with_values(entries, node.born)))
        });
        held
    }

    /// The next entries from `from` on of which a value is not held, of one leaf or, as long as they have fewer than `max_bytes`
    /// together, of its neighbours. O(leaves of the result + log n).
    pub fn next_not_held(&self, from: &[u8], max_bytes: u64) -> Option<NotHeld> {
        let mut found = None;
        if let Some(root) = &self.root
            && self.summary().not_held_bytes > 0
        {
            let _ = find_not_held(root, from, max_bytes, &mut found);
        }
        found
    }
}

fn find_not_held(
    node: &Arc<Node>,
    from: &[u8],
    max_bytes: u64,
    found: &mut Option<NotHeld>,
) -> ControlFlow<()> {
    let leaf = match &node.body {
        Body::Leaf(leaf) => leaf,
        Body::Inner(inner) => {
            return inner.slots[inner.slot_of(from)..].iter().try_for_each(|slot| {
                if slot.summary.not_held_bytes > 0 {
                    find_not_held(&slot.node, from, max_bytes, found)
                } else if found.is_some() {
                    // Neighbours only: what lies between is not read in vain.
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            });
        }
    };
    for stored in leaf.iter() {
        if stored.has_value() || stored.key() < from {
            continue;
        }
        let bytes = stored.encoded_len() as u64;
        let range = found.get_or_insert_with(|| NotHeld {
            first: stored.key().into(),
            ..NotHeld::default()
        });
        if range.bytes > 0 && range.bytes + bytes > max_bytes {
            return ControlFlow::Break(());
        }
        range.last = stored.key().into();
        range.bytes += bytes;
    }
    ControlFlow::Continue(())
}

#[cfg(test)]
mod tests;
