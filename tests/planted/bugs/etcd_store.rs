//! Bugs of `etcd-store`.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "06-drop-a-delete",
        what: "deletes are not applied",
        test: "--lib cache::history::tests",
        shows: "panicked at",
        changes: &[Change {
            item: "Change::apply_to",
            find: "ChangeKind::Delete => tree.remove(self.key()),",
            replace: "ChangeKind::Delete => tree.get(self.key()).cloned(),",
        }],
    },
    Bug {
        name: "35-previous-value-is-the-new-one",
        what: "the previous value of a put is the one that replaced it",
        test: "--test end_to_end live_responses_of_watches_equal_etcds_byte_for_byte_3_7",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "WatchEvent::new",
            find: "prev: change.replaced.as_ref().filter(|_| with_prev_kv),",
            replace: "prev: change.replaced.as_ref().map(|_| &change.entry).filter(|_| with_prev_kv),",
        }],
    },
    Bug {
        name: "126-join-entries-of-two-blocks",
        what: "entries that begin where the one before ends are joined, also if they are of another block",
        test: "--lib entry_is_joined_to_none_of_another_block",
        shows: "entry_is_joined_to_none_of_another_block .* FAILED",
        changes: &[Change {
            item: "Rope::push_of_block",
            find: "
if let Some(RopeSegment::Block(last, range)) = self.segments.last_mut()
    && Arc::ptr_eq(last, block)
",
            replace: "if let Some(RopeSegment::Block(_, range)) = self.segments.last_mut()",
        }],
    },
    Bug {
        name: "127-history-holds-blocks",
        what: "history holds the block of an entry that was replaced",
        test: "--lib history_keeps_no_block_for_an_entry_that_was_replaced",
        shows: "history_keeps_no_block_for_an_entry_that_was_replaced .* FAILED",
        changes: &[Change {
            item: "Store::apply",
            find: "Some(old) if old.has_value() => Some(old.detached()?),",
            replace: "Some(old) if old.has_value() => Some(old.read()?),",
        }],
    },
    Bug {
        name: "128-damage-is-not-seen",
        what: "a packed block is answered from though its checksum differs",
        test: "--lib damaged_block_is_never_answered_from",
        shows: "damaged_block_is_never_answered_from .* FAILED",
        changes: &[Change {
            item: "PackedBlock::unpack",
            find: "if bytes.len() != length || crc32fast::hash(&bytes) != *checksum {",
            replace: "if bytes.len() != length || *checksum == 0 && bytes.is_empty() {",
        }],
    },
    Bug {
        name: "129-unpacked-block-is-taken-for-a-checkpoints",
        what: "what was decompressed counts as held by the last checkpoint, in addition to the packed block",
        test: "--lib rest_of_a_packed_block_is_decompressed_and_a_whole_one_stays",
        shows: "rest_of_a_packed_block_is_decompressed_and_a_whole_one_stays .* FAILED",
        changes: &[Change {
            item: "PackedBlock::unpack",
            find: "let born = u64::MAX;",
            replace: "let born = self.born;",
        }],
    },
    Bug {
        name: "130-rest-of-a-packed-block-stays",
        what: "what is left of a packed block stays packed, with the bytes of the entries that have left it",
        test: "--lib rest_of_a_packed_block_is_decompressed_and_a_whole_one_stays",
        shows: "rest_of_a_packed_block_is_decompressed_and_a_whole_one_stays .* FAILED",
        changes: &[Change {
            item: "unpack_rests",
            find: "} else if all < block.len() {",
            replace: "} else if all == 0 {",
        }],
    },
    Bug {
        name: "131-pack-the-current-state-alone",
        what: "leaves are packed in the current state alone: history keeps the plain ones, and does not count them",
        test: "--lib every_state_of_the_history_has_the_same_leaves",
        shows: "every_state_of_the_history_has_the_same_leaves .* FAILED",
        changes: &[Change {
            item: "Store::put_repacked",
            find: "for segment in self.closed.iter_mut().chain([&mut self.open]) {",
            replace: "for segment in self.closed.iter_mut().take(0) {",
        }],
    },
    Bug {
        name: "132-pack-entries-held-elsewhere",
        what: "a leaf is packed though the log or a response has its entries, which then take memory that nothing counts",
        test: "--lib leaf_of_which_something_else_has_an_entry_is_left_alone",
        shows: "leaf_of_which_something_else_has_an_entry_is_left_alone .* FAILED",
        changes: &[Change {
            item: "are_only_here",
            find: "if first.holders() > all {",
            replace: "if first.holders() == 0 {",
        }],
    },
    Bug {
        name: "133-swap-what-was-written-meanwhile",
        what: "a leaf that was written while it was packed is replaced by what it was before",
        test: "--lib leaf_that_was_written_meanwhile_stays_as_it_was_written",
        shows: "leaf_that_was_written_meanwhile_stays_as_it_was_written .* FAILED",
        changes: &[Change {
            item: "replaced",
            find: "Body::Leaf(_) => return repacked.leaves.get(&address(node))?.1.clone(),",
            replace: "
Body::Leaf(_) => {
    let first = node.entries().first()?.key();
    let mut leaves = repacked.leaves.values().filter_map(|(_, leaf)| leaf.clone());
    return leaves.find(|leaf| leaf.new.entries()[0].key() == first);
}
",
        }],
    },
    Bug {
        name: "134-count-packed-values-twice",
        what: "what is packed counts against the budget packed and plain",
        test: "--lib tree_is_an_ordered_map_and_snapshots_are_immutable",
        shows: "tree_is_an_ordered_map_and_snapshots_are_immutable .* FAILED",
        changes: &[Change {
            item: "Tree::put_repacked",
            find: "self.ledger.memory -= removed;",
            replace: "self.ledger.memory.nodes -= removed.nodes;",
        }],
    },
    Bug {
        name: "137-answer-without-values",
        what: "a list is answered from memory though some of its values are not held",
        test: "--lib only_reads_of_values_that_are_not_held_are_declined",
        shows: "only_reads_of_values_that_are_not_held_are_declined .* FAILED",
        changes: &[Change {
            item: "Selection::has_its_values",
            find: "tree.summary_of_ranks(*from, *to).has_all_values()",
            replace: "tree.summary_of_ranks(*from, *from + 1).has_all_values()",
        }],
    },
    Bug {
        name: "138-count-what-is-not-held-once",
        what: "a node above a leaf whose values are left out does not count them",
        test: "--lib only_reads_of_values_that_are_not_held_are_declined",
        shows: "only_reads_of_values_that_are_not_held_are_declined .* FAILED",
        changes: &[Change {
            item: "with_replaced_children",
            find: "*not_held = *not_held + below.added.not_held - below.removed.not_held;",
            replace: "",
        }],
    },
    Bug {
        name: "139-hold-any-value",
        what: "a value that etcd sends is held though it is not the one that was left out",
        test: "--lib values_are_held_again_if_they_are_those_that_were_left_out",
        shows: "values_are_held_again_if_they_are_those_that_were_left_out .* FAILED",
        changes: &[Change {
            item: "Leaf::with_values",
            find: "&& stored.is_same(&values[found])",
            replace: "&& stored.is_same(&values[found]) | (stored.mod_revision() == values[found].mod_revision())",
        }],
    },
    Bug {
        name: "142-trust-the-replaced-value",
        what: "a value that is another one in etcd than the one that was left out is taken for none",
        test: "--lib mirror_whose_value_is_another_one_in_etcd_is_dropped",
        shows: "mirror_whose_value_is_another_one_in_etcd_is_dropped .* FAILED",
        changes: &[Change {
            item: "Store::check_replaced",
            find: "Some(brought) if !old.is_same(brought) =>",
            replace: "Some(brought) if !old.is_same(brought) && false =>",
        }],
    },
    Bug {
        name: "231-previous-value-of-the-same-revision",
        what: "the previous value of a key that its revision changes twice is of that revision",
        test: "--test end_to_end stream_leaves_memory_after_two_events_of_one_key",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Store::apply",
            find: "Some(repeated) => changes[repeated.first].replaced.clone(),",
            replace: "Some(_) => old,",
        }],
    },
];
