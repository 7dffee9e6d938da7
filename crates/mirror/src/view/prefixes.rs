//! Sizes of the prefixes of the mirrored keys, from the sums in the tree's nodes: each prefix costs a few look-ups,
//! however many keys it has.

use std::collections::BTreeMap;

use etcd_store::cache::{Summary, Tree};
use etcd_store::keyspace::{figure_prefix, first_part, prefix_end, successor};

use super::state::Mirror;

/// Prefixes that are looked for in one mirror; further keys count as those of no prefix.
const MAX_PREFIXES: usize = 1_024;
/// Keys directly below one first part that are skipped one by one, before the rest of that part counts as a whole.
const MAX_SINGLE_KEYS: usize = 64;

/// Sizes by prefix of the keys of these mirrors, as far as they are in service. A prefix is a key's first two parts, or
/// its first part; it is empty for keys without one.
#[must_use]
pub fn prefix_sizes<'a>(mirrors: impl Iterator<Item = &'a Mirror>) -> BTreeMap<Vec<u8>, Summary> {
    let views: Vec<_> = mirrors.filter_map(|mirror| mirror.view().ok()).collect();
    sizes(views.iter().map(|view| &view.tree))
}

/// Sizes by prefix of the keys of these trees.
pub(crate) fn sizes<'a>(trees: impl IntoIterator<Item = &'a Tree>) -> BTreeMap<Vec<u8>, Summary> {
    let mut sizes: BTreeMap<Vec<u8>, Summary> = BTreeMap::new();
    for tree in trees {
        divide(tree, |prefix, size| match sizes.get_mut(prefix) {
            Some(sum) => *sum += size,
            None => drop(sizes.insert(prefix.to_vec(), size)),
        });
    }
    sizes
}

/// Calls `add` with each prefix and the sums of its keys. A prefix may be added several times.
fn divide(tree: &Tree, mut add: impl FnMut(&[u8], Summary)) {
    let (mut rank, mut single_keys, mut part) = (0, 0, Vec::new());
    for _ in 0..MAX_PREFIXES {
        let Some(key) = tree.at(rank).map(|entry| entry.key()) else {
            return;
        };
        let prefix = figure_prefix(key).unwrap_or_default();
        let first = first_part(key).unwrap_or_default();
        let end = if prefix.len() > first.len() {
            prefix_end(prefix)
        } else {
            if part != first {
                (part, single_keys) = (first.to_vec(), 0);
            }
            single_keys += 1;
            if single_keys > MAX_SINGLE_KEYS && !first.is_empty() {
                prefix_end(first)
            } else {
                Some(successor(key))
            }
        };
        let next = end.map_or(tree.len(), |end| tree.rank(&end));
        add(prefix, tree.summary_of_ranks(rank, next));
        rank = next;
    }
    add(b"", tree.summary_of_ranks(rank, tree.len()));
}

#[cfg(test)]
mod tests {
    use etcd_store::cache::testing::KeyValue;

    use super::*;

    fn tree(keys: impl IntoIterator<Item = String>) -> Tree {
        let mut keys: Vec<_> = keys.into_iter().collect();
        keys.sort();
        let entries = keys
            .iter()
            .map(|key| KeyValue::new(key.as_bytes(), 1, "v").entry());
        Tree::from_sorted(entries)
    }

    fn sizes(tree: &Tree) -> Vec<(String, u64)> {
        let mut sizes = BTreeMap::<String, u64>::new();
        divide(tree, |prefix, summary| {
            *sizes
                .entry(String::from_utf8_lossy(prefix).into_owned())
                .or_default() += summary.count;
        });
        sizes.into_iter().collect()
    }

    #[test]
    fn every_key_counts_in_one_prefix() {
        let keys = [
            "/a/x",
            "/r/pods/a/1",
            "/r/pods/b/1",
            "/r/nodes/1",
            "/r/single",
            "lonely",
        ];
        let tree = tree(keys.map(str::to_owned));
        let expected = [("", 1), ("/a/", 1), ("/r/", 1), ("/r/nodes/", 1), ("/r/pods/", 2)];
        assert_eq!(
            sizes(&tree),
            expected.map(|(prefix, keys)| (prefix.to_owned(), keys))
        );
        let mut bytes = 0;
        divide(&tree, |_, summary| bytes += summary.encoded_bytes);
        assert_eq!(bytes, tree.summary().encoded_bytes);
    }

    #[test]
    fn many_single_keys_count_as_a_whole_and_hide_no_later_prefix() {
        let flat = (0..500).map(|n| format!("/flat/{n:03}"));
        let tree = tree(flat.chain(["/r/pods/1".to_owned()]));
        let expected = [("/flat/", 500), ("/r/pods/", 1)];
        assert_eq!(
            sizes(&tree),
            expected.map(|(prefix, keys)| (prefix.to_owned(), keys))
        );
    }

    #[test]
    fn prefixes_beyond_the_bound_count_as_those_of_none() {
        let keys = (0..2 * MAX_PREFIXES).map(|n| format!("/r/{n:05}/x"));
        let sizes = sizes(&tree(keys));
        assert_eq!(sizes.len(), MAX_PREFIXES + 1);
        assert_eq!(sizes.first(), Some(&(String::new(), MAX_PREFIXES as u64)));
    }
}
