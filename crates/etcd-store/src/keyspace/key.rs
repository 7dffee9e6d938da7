//! The keys that bound a page or a prefix.

use bytes::Bytes;

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
