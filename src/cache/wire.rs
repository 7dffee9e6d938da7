//! Parsing and writing of protobuf's varints and lengths.

/// Wire type of a varint field.
pub(super) const VARINT: u64 = 0;
/// Wire type of a length-delimited field.
pub(super) const LENGTH_DELIMITED: u64 = 2;

/// A count or length as an index; saturates where memory cannot hold that many items anyway.
pub(super) fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Length of `value` as a varint, in bytes: 1 to 10.
pub(super) fn varint_len(value: u64) -> usize {
    let bits = u64::BITS - (value | 1).leading_zeros();
    bits.div_ceil(7) as usize
}

/// Appends `value` as a varint.
#[expect(clippy::cast_possible_truncation, reason = "seven bits at a time")]
pub(super) fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push((value as u8) | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Reads a varint at `*at` and advances `*at`. `None` if it is truncated, longer than necessary, or beyond 64 bits.
///
/// Strict, because accepted bytes are stored and sent again as etcd's own.
pub(super) fn strict_varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0_u64;
    for length in 0..10_u32 {
        let byte = *bytes.get(*at)?;
        *at += 1;
        if length == 9 && byte > 1 {
            return None; // more than 64 bits
        }
        value |= u64::from(byte & 0x7f) << (7 * length);
        if byte & 0x80 == 0 {
            let overlong = byte == 0 && length > 0;
            return (!overlong).then_some(value);
        }
    }
    None
}

/// Reads a varint at `*at` like protobuf libraries: padding is allowed, bits beyond the 64th are dropped.
pub(super) fn lenient_varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0_u64;
    for length in 0..10_u32 {
        let byte = *bytes.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << (7 * length);
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Reads a varint that [`strict_varint`] has accepted before. Skips validation.
pub(super) fn trusted_varint(bytes: &[u8], at: &mut usize) -> u64 {
    let first = bytes[*at];
    *at += 1;
    if first < 0x80 {
        return u64::from(first);
    }
    let mut value = u64::from(first & 0x7f);
    let mut shift = 7;
    loop {
        let byte = bytes[*at];
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return value;
        }
        shift += 7;
    }
}

/// Reads a length at `*at` and returns that many bytes after it, advancing `*at`.
pub(super) fn strict_bytes<'a>(bytes: &'a [u8], at: &mut usize) -> Option<&'a [u8]> {
    let length = usize::try_from(strict_varint(bytes, at)?).ok()?;
    let end = at.checked_add(length)?;
    let covered = bytes.get(*at..end)?;
    *at = end;
    Some(covered)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn varints_round_trip_and_have_the_computed_length(value in any::<u64>(), shift in 0..64_u32) {
            let value = value >> shift;
            let mut bytes = Vec::new();
            put_varint(value, &mut bytes);
            prop_assert_eq!(bytes.len(), varint_len(value));
            prop_assert_eq!(bytes.len(), prost::length_delimiter_len(usize::try_from(value).unwrap()));
            let (mut strict, mut trusted) = (0, 0);
            prop_assert_eq!(strict_varint(&bytes, &mut strict), Some(value));
            prop_assert_eq!(trusted_varint(&bytes, &mut trusted), value);
            prop_assert_eq!((strict, trusted), (bytes.len(), bytes.len()));
        }
    }

    #[test]
    fn overlong_truncated_and_too_large_varints_are_refused() {
        let refused: [&[u8]; 6] = [
            &[],
            &[0x80],
            &[0x80, 0x00],
            &[0xff, 0x80, 0x00],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x80, 0x01],
        ];
        for bytes in refused {
            assert_eq!(strict_varint(bytes, &mut 0), None, "{bytes:x?}");
        }
        let largest = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(strict_varint(&largest, &mut 0), Some(u64::MAX));
    }
}
