//! Keys and ranges of keys: which keys a mirror holds, which keys a request names, and the key after a key.
//!
//! | file | subject |
//! |---|---|
//! | `mod` | the keys that a Range or a Watch names; the key after a key, and the end of a prefix |
//! | `scope` | the keys that a mirror holds |
//! | `prefix` | grouping of a key range by prefix |
//!
//! A leaf: this room imports no other. `cache`, `mirror`, `proxy` and `doctor` import it.

mod prefix;
pub mod scope;

use bytes::Bytes;

pub use prefix::{PrefixGroup, PrefixGrouper, common_prefix, figure_prefix, first_part};

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
}
