//! Wire types, and the reading and writing of varints and lengths.

/// Wire type of a varint.
pub const VARINT: u64 = 0;
/// Wire type of a value of 8 bytes.
pub const FIXED_64: u64 = 1;
/// Wire type of a length and as many bytes.
pub const LENGTH_DELIMITED: u64 = 2;
/// Wire type of a value of 4 bytes.
pub const FIXED_32: u64 = 5;

/// Refusal of bytes that are not protobuf, or end within a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a protobuf message, or a part of one")]
pub struct Malformed;

/// A count or length as an index; saturates where memory cannot hold that many items anyway.
#[must_use]
pub fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Length of `value` as a varint, in bytes: 1 to 10.
#[must_use]
pub fn varint_len(value: u64) -> usize {
    let bits = u64::BITS - (value | 1).leading_zeros();
    bits.div_ceil(7) as usize
}

/// Appends `value` as a varint.
#[expect(clippy::cast_possible_truncation, reason = "seven bits at a time")]
pub fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push((value as u8) | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Reads a varint at `*at` and advances `*at`. `None` if it is truncated, longer than necessary, or beyond 64 bits.
///
/// Strict, because accepted bytes are stored and sent again as etcd's own.
pub fn strict_varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
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

/// Reads one varint after the other from bytes that arrive in pieces, like protobuf libraries: padding is allowed, bits
/// beyond the 64th are dropped.
#[derive(Debug, Default)]
pub(super) struct VarintReader {
    value: u64,
    /// Bits of the current varint that have been read, 0 to 63.
    shift: u32,
}

impl VarintReader {
    /// Takes bytes off the front of `data`; returns the number once its last byte is there.
    ///
    /// # Errors
    /// The varint has more than 10 bytes.
    #[inline]
    pub(super) fn read(&mut self, data: &mut &[u8]) -> Result<Option<u64>, Malformed> {
        let (mut value, mut shift) = (self.value, self.shift);
        for (index, byte) in data.iter().enumerate() {
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                *data = &data[index + 1..];
                *self = VarintReader::default();
                return Ok(Some(value));
            }
            shift += 7;
            if shift >= 70 {
                return Err(Malformed);
            }
        }
        *data = &[];
        (self.value, self.shift) = (value, shift);
        Ok(None)
    }

    /// Whether no byte of the next varint has been read.
    pub(super) fn is_empty(&self) -> bool {
        self.shift == 0
    }
}

/// Takes a varint off the front of `bytes`, as leniently as protobuf libraries. `None` if it is truncated or longer than
/// 10 bytes.
pub fn lenient_varint(bytes: &mut &[u8]) -> Option<u64> {
    VarintReader::default().read(bytes).ok().flatten()
}

/// Reads a varint that [`strict_varint`] has accepted before. Skips validation.
pub fn trusted_varint(bytes: &[u8], at: &mut usize) -> u64 {
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
pub fn strict_bytes<'a>(bytes: &'a [u8], at: &mut usize) -> Option<&'a [u8]> {
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
