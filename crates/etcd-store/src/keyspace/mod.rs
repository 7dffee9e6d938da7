//! Keys and ranges of keys: which keys a mirror holds, which keys a request names, and the key after a key.
//!
//! | file | subject |
//! |---|---|
//! | `mod` | the keys that a Range or a Watch names; the key after a key, and the end of a prefix; grouping by prefix |
//! | `scope` | the keys that a mirror holds |
//!
//! A leaf: this room imports no other. `cache`, `mirror`, `proxy` and `doctor` import it.

pub mod scope;

use bytes::Bytes;

/// The keys that `key` and `range_end` of a request name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interval<'a> {
    /// A single key.
    Single(&'a [u8]),
    /// From the first key, inclusive, to the second, exclusive; empty if the second is not above the first.
    Range(&'a [u8], &'a [u8]),
    /// From this key to the end of the keyspace.
    From(&'a [u8]),
}

impl<'a> Interval<'a> {
    /// The keys that the fields `key` and `range_end` of a request name.
    #[must_use]
    pub fn from_request(key: &'a [u8], range_end: &'a [u8]) -> Interval<'a> {
        match range_end {
            [] => Interval::Single(key),
            [0] => Interval::From(key),
            end => Interval::Range(key, end),
        }
    }
}

/// The smallest key above `key`: `key` with a zero byte appended. A page that starts there continues after `key`.
#[must_use]
pub fn successor(key: &[u8]) -> Bytes {
    let mut successor = Vec::with_capacity(key.len() + 1);
    successor.extend_from_slice(key);
    successor.push(0);
    successor.into()
}

/// The smallest key above every key that starts with `prefix`; `None` if there is no such key (the prefix is empty or
/// consists of 0xff bytes only).
#[must_use]
pub fn prefix_end(prefix: &[u8]) -> Option<Bytes> {
    let last = prefix.iter().rposition(|byte| *byte < 0xff)?;
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Some(end.into())
}

/// Keys without a further slash that become groups of their own, per range.
const MAX_SINGLE_KEYS: usize = 8;

/// Neighbouring keys with a common prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixGroup {
    /// Common prefix; empty for a remainder whose keys have none.
    pub prefix: Bytes,
    /// First key of the range, inclusive.
    pub start: Bytes,
    /// End of the range as in a request: `\0` is the end of the keyspace.
    pub end: Bytes,
    /// Number of keys.
    pub keys: u64,
    /// Parts of the prefix.
    pub depth: usize,
}

/// Divides a range of keys into groups by the first `depth` parts of their keys. Needs only the first key at or above a
/// position and the number of keys from there on, which one `Range` with `limit` 1 returns; it makes no calls itself.
#[derive(Debug)]
pub struct PrefixGrouper {
    depth: usize,
    max_groups: usize,
    end: Bytes,
    /// Start of the next group; `None` once the range is divided.
    cursor: Option<Bytes>,
    single_keys: usize,
    groups: Vec<PrefixGroup>,
    is_complete: bool,
}

impl PrefixGrouper {
    /// Starts to divide `[start, end)` into at most `max_groups` groups; the last one holds the remainder.
    #[must_use]
    pub fn new(start: Bytes, end: Bytes, depth: usize, max_groups: usize) -> PrefixGrouper {
        PrefixGrouper {
            depth,
            max_groups,
            end,
            cursor: Some(start),
            single_keys: 0,
            groups: Vec::new(),
            is_complete: true,
        }
    }

    /// Position whose first key at or above, and number of keys, [`PrefixGrouper::add`] needs; `None` when done.
    #[must_use]
    pub fn cursor(&self) -> Option<&Bytes> {
        self.cursor.as_ref()
    }

    /// Adds the group of `first_key`, the first key at or above the cursor (`None` if there is none); `remaining`
    /// keys are at or above the cursor. With `may_divide` false the group holds all of them.
    pub fn add(&mut self, first_key: Option<&[u8]>, remaining: u64, may_divide: bool) {
        let Some(start) = self.cursor.take() else {
            return;
        };
        if let Some(last) = self.groups.last_mut() {
            last.keys -= remaining.min(last.keys);
        }
        let Some(key) = first_key else {
            return;
        };
        let fits = may_divide && self.groups.len() + 1 < self.max_groups;
        let (prefix, next) = match prefix_of(key, self.depth) {
            _ if !fits => (&b""[..], None),
            Some(prefix) => (prefix, prefix_end(prefix)),
            None if self.single_keys < MAX_SINGLE_KEYS => {
                self.single_keys += 1;
                (key, Some(successor(key)))
            }
            None => (&b""[..], None),
        };
        let next = next.filter(|next| self.end.as_ref() == b"\0" || *next < self.end);
        self.is_complete &= !prefix.is_empty();
        self.groups.push(PrefixGroup {
            prefix: Bytes::copy_from_slice(prefix),
            start,
            end: next.clone().unwrap_or_else(|| self.end.clone()),
            keys: remaining,
            depth: self.depth,
        });
        self.cursor = next;
    }

    /// Whether every group has a prefix: none is a remainder.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Groups in key order.
    #[must_use]
    pub fn into_groups(self) -> Vec<PrefixGroup> {
        self.groups
    }
}

/// Prefix of at most `depth` parts, ending with a slash, that all keys of a Range have; empty if they have none.
#[must_use]
pub fn common_prefix<'a>(key: &'a [u8], range_end: &[u8], depth: usize) -> &'a [u8] {
    let lead = usize::from(key.first() == Some(&b'/'));
    let slashes = key.iter().enumerate().skip(lead);
    let ends: Vec<usize> = slashes
        .filter(|(_, byte)| **byte == b'/')
        .take(depth)
        .map(|(at, _)| at)
        .collect();
    let prefixes = ends.iter().rev().map(|at| &key[..=*at]);
    let is_common = |prefix: &&[u8]| {
        range_end.is_empty()
            || (range_end != b"\0" && prefix_end(prefix).is_none_or(|end| *range_end <= *end))
    };
    prefixes.into_iter().find(is_common).unwrap_or_default()
}

/// Prefix under which figures of a key are summed up: its first two parts, such as `/registry/pods/`, otherwise its first
/// part; `None` for a key without a slash that ends a part.
#[must_use]
pub fn figure_prefix(key: &[u8]) -> Option<&[u8]> {
    prefix_of(key, 2).or_else(|| first_part(key))
}

/// First part of a key with the slash that ends it; `None` without such a slash.
#[must_use]
pub fn first_part(key: &[u8]) -> Option<&[u8]> {
    prefix_of(key, 1).filter(|prefix| prefix.len() > 1 && prefix.ends_with(b"/"))
}

/// The first `depth` parts of `key` with the slash that ends them; `None` if the key has no further part. At depth 1,
/// a key without a slash belongs to the keys that start with the same character.
fn prefix_of(key: &[u8], depth: usize) -> Option<&[u8]> {
    let lead = usize::from(key.first() == Some(&b'/'));
    let slashes = key
        .iter()
        .enumerate()
        .skip(lead)
        .filter(|(_, byte)| **byte == b'/');
    match slashes.map(|(at, _)| at).nth(depth - 1) {
        Some(at) => Some(&key[..=at]),
        None if depth == 1 => key.get(..=lead).or(Some(key)),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_lies_between_a_key_and_its_successor() {
        assert_eq!(successor(b"/a"), Bytes::from_static(b"/a\0"));
        assert_eq!(successor(b""), Bytes::from_static(b"\0"));
        assert!(b"/a".as_slice() < successor(b"/a") && successor(b"/a") < Bytes::from_static(b"/a\0\0"));
    }

    #[test]
    fn prefix_end_increments_the_last_byte_below_0xff() {
        assert_eq!(prefix_end(b"a\xff\xff"), Some(Bytes::from_static(b"b")));
        assert_eq!(prefix_end(b"\xff\xff"), None);
        assert_eq!(prefix_end(b""), None);
    }

    #[test]
    fn prefixes_end_with_a_slash_where_the_key_has_one() {
        for (key, depth, prefix) in [
            ("/registry/pods/a/b", 1, Some("/registry/")),
            ("/registry/pods/a/b", 2, Some("/registry/pods/")),
            ("/registry/pods", 2, None),
            ("cilium/state/x", 1, Some("cilium/")),
            ("/health", 1, Some("/h")),
            ("lonely", 1, Some("l")),
            ("/", 1, Some("/")),
            ("//x", 1, Some("//")),
            ("a", 2, None),
        ] {
            let found = prefix_of(key.as_bytes(), depth);
            assert_eq!(found, prefix.map(str::as_bytes), "{key} {depth}");
        }
    }

    #[test]
    fn common_prefix_holds_every_key_of_the_range() {
        for (key, range_end, prefix) in [
            ("/registry/pods/a/b", "", "/registry/pods/"),
            ("/registry/pods/", "/registry/pods0", "/registry/pods/"),
            ("/registry/pods/a\0", "/registry/pods0", "/registry/pods/"),
            ("/registry/pods/", "/registry/q", "/registry/"),
            ("/registry/", "/registry0", "/registry/"),
            ("/registry/pods/", "\0", ""),
            ("/a/b/", "/z", ""),
            ("lonely", "", ""),
            ("apisix/routes/1", "", "apisix/routes/"),
            ("", "", ""),
        ] {
            let found = common_prefix(key.as_bytes(), range_end.as_bytes(), 2);
            assert_eq!(String::from_utf8_lossy(found), prefix, "{key} {range_end}");
        }
    }

    #[test]
    fn figures_of_a_key_are_summed_up_under_at_most_two_parts() {
        for (key, prefix) in [
            ("/registry/pods/a/b", Some("/registry/pods/")),
            ("/registry/pods", Some("/registry/")),
            ("cilium/x", Some("cilium/")),
            ("/health", None),
            ("lonely", None),
            ("/", None),
        ] {
            assert_eq!(figure_prefix(key.as_bytes()), prefix.map(str::as_bytes), "{key}");
        }
    }

    /// Groups of sorted `keys`, with the number of reads that were needed.
    fn group(keys: &[&str], depth: usize, max_groups: usize) -> (PrefixGrouper, usize) {
        let everything = Bytes::from_static(b"\0");
        let mut grouper = PrefixGrouper::new(everything.clone(), everything, depth, max_groups);
        let mut reads = 0;
        while let Some(cursor) = grouper.cursor().cloned() {
            reads += 1;
            let left: Vec<_> = keys.iter().filter(|key| key.as_bytes() >= &cursor[..]).collect();
            let first = left.first().map(|key| key.as_bytes());
            grouper.add(first, left.len() as u64, true);
        }
        (grouper, reads)
    }

    fn sizes(grouper: PrefixGrouper) -> Vec<(String, u64)> {
        let name = |group: &PrefixGroup| String::from_utf8_lossy(&group.prefix).into_owned();
        grouper
            .into_groups()
            .iter()
            .map(|group| (name(group), group.keys))
            .collect()
    }

    #[test]
    fn every_key_is_counted_in_one_group_with_one_read_each() {
        let keys = ["/a/1", "/a/2", "/b/1", "c", "d/1", "d/2"];
        let (grouper, reads) = group(&keys, 1, 128);
        assert!(grouper.is_complete() && reads == 5, "{reads} {grouper:?}");
        let expected = [("/a/", 2), ("/b/", 1), ("c", 1), ("d/", 2)];
        assert_eq!(
            sizes(grouper),
            expected.map(|(name, keys)| (name.to_owned(), keys))
        );
    }

    #[test]
    fn last_group_holds_the_remainder_when_there_are_too_many() {
        let (grouper, _) = group(&["/a/1", "/b/1", "/c/1", "/d/1"], 1, 3);
        assert!(!grouper.is_complete());
        let expected = [("/a/", 1), ("/b/", 1), ("", 2)];
        assert_eq!(
            sizes(grouper),
            expected.map(|(name, keys)| (name.to_owned(), keys))
        );
    }

    #[test]
    fn single_keys_are_groups_up_to_a_bound() {
        let keys: Vec<String> = (0..12).map(|n| format!("/r/{n:02}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let (grouper, _) = group(&keys, 2, 128);
        assert!(!grouper.is_complete());
        let groups = sizes(grouper);
        assert_eq!(groups.len(), MAX_SINGLE_KEYS + 1);
        assert_eq!(groups.last(), Some(&(String::new(), 4)));
    }
}
