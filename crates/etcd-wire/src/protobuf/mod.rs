//! Protobuf's wire format, as far as generated code does not serve: messages of which only a part is of interest or has
//! arrived, and messages whose bytes are kept as they are.
//!
//! Varints and lengths are read leniently, strictly, or as checked before. [`FieldReader`] and [`Fields`] read the fields of a message
//! one after the other, in the order in which they are encoded.
//!
//! A leaf: this room imports no other room. Fields of a newer etcd are read like any other field, whatever their wire type;
//! groups, which etcd does not use, are malformed.

#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzzing;

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

/// Value of a field. `T` stands for the bytes of values that are not varints: a slice, or their number alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<T> {
    /// A varint.
    Number(u64),
    /// Bytes, text or a message.
    Bytes(T),
    /// Four or eight bytes. No message of etcd's has such a field today.
    Fixed(T),
}

impl<T> Value<T> {
    /// Returns the value with other bytes.
    pub fn map<U>(self, bytes: impl FnOnce(T) -> U) -> Value<U> {
        match self {
            Value::Number(number) => Value::Number(number),
            Value::Bytes(value) => Value::Bytes(bytes(value)),
            Value::Fixed(value) => Value::Fixed(bytes(value)),
        }
    }
}

/// Reads the fields of a message whose bytes arrive in pieces, but for the bytes of values: those are the caller's to take
/// or to skip before it reads on.
#[derive(Debug, Default)]
pub struct FieldReader {
    /// Tag of the current field, once it is complete.
    tag: Option<u64>,
    varint: VarintReader,
}

impl FieldReader {
    /// Takes bytes off the front of `data`, up to the end of a varint or the beginning of another value; returns the field's
    /// number, and the value or its length in bytes. `None` if `data` ends before.
    ///
    /// # Errors
    /// [`Malformed`]; the reader is of no use afterwards.
    #[inline]
    pub fn read(&mut self, data: &mut &[u8]) -> Result<Option<(u64, Value<u64>)>, Malformed> {
        let tag = match self.tag {
            Some(tag) => tag,
            None => {
                let Some(tag) = self.varint.read(data)? else {
                    return Ok(None);
                };
                match tag & 7 {
                    VARINT | LENGTH_DELIMITED => self.tag = Some(tag),
                    FIXED_64 => return Ok(Some((tag >> 3, Value::Fixed(8)))),
                    FIXED_32 => return Ok(Some((tag >> 3, Value::Fixed(4)))),
                    _ => return Err(Malformed),
                }
                tag
            }
        };
        let Some(number) = self.varint.read(data)? else {
            return Ok(None);
        };
        self.tag = None;
        let value = if tag & 7 == VARINT {
            Value::Number(number)
        } else {
            Value::Bytes(number)
        };
        Ok(Some((tag >> 3, value)))
    }

    /// Whether no byte of the next field has been read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tag.is_none() && self.varint.is_empty()
    }
}

/// Fields of a message in memory. The end of the message may be missing: a value that is cut off is returned as far as it is
/// there, and is followed by an error.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    rest: &'a [u8],
    is_cut_off: bool,
}

impl<'a> Fields<'a> {
    /// The fields of `message`.
    #[must_use]
    pub fn new(message: &'a [u8]) -> Fields<'a> {
        Fields {
            rest: message,
            is_cut_off: false,
        }
    }

    /// Whether the end of the value that was returned last is missing.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        self.is_cut_off
    }

    fn take(&mut self, length: u64) -> &'a [u8] {
        let length = to_usize(length);
        self.is_cut_off = length > self.rest.len();
        let (value, rest) = self.rest.split_at(length.min(self.rest.len()));
        self.rest = rest;
        value
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<&'a [u8]>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return std::mem::take(&mut self.is_cut_off).then_some(Err(Malformed));
        }
        let Ok(Some((number, value))) = FieldReader::default().read(&mut self.rest) else {
            self.rest = &[];
            return Some(Err(Malformed));
        };
        Some(Ok((number, value.map(|length| self.take(length)))))
    }
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

    /// Message with a field of each kind: a number, bytes, 8 bytes, 4 bytes, and a number whose field's tag takes two bytes.
    const MESSAGE: &[u8] = &[
        0x08, 0x96, 0x01, 0x12, 2, b'a', b'b', 0x19, 1, 2, 3, 4, 5, 6, 7, 8, 0x25, 1, 2, 3, 4, 0x80, 0x01,
        0x05,
    ];
    const FIELDS: [(u64, Value<&[u8]>); 5] = [
        (1, Value::Number(150)),
        (2, Value::Bytes(b"ab")),
        (3, Value::Fixed(&[1, 2, 3, 4, 5, 6, 7, 8])),
        (4, Value::Fixed(&[1, 2, 3, 4])),
        (16, Value::Number(5)),
    ];

    #[test]
    fn fields_of_every_wire_type_are_returned_in_order() {
        let fields: Vec<_> = Fields::new(MESSAGE).map(Result::unwrap).collect();
        assert_eq!(fields, FIELDS);
    }

    #[test]
    fn value_that_is_cut_off_is_returned_as_far_as_it_is_there_and_followed_by_an_error() {
        let mut fields = Fields::new(&MESSAGE[..6]);
        assert_eq!(fields.next(), Some(Ok((1, Value::Number(150)))));
        assert!(!fields.is_cut_off());
        assert_eq!(fields.next(), Some(Ok((2, Value::Bytes(&b"a"[..])))));
        assert!(fields.is_cut_off());
        assert_eq!(fields.next(), Some(Err(Malformed)));
        assert_eq!(fields.next(), None);
    }

    #[test]
    fn groups_long_varints_and_incomplete_fields_are_malformed() {
        let long = [&[0x08][..], &[0x80; 10], &[0]].concat();
        for message in [
            &[0x0b][..],
            &[0x0c],
            &[0x0e],
            &[0x08],
            &[0x80],
            &[0x0a, 0x80],
            &long,
        ] {
            let mut fields = Fields::new(message);
            assert_eq!(fields.next(), Some(Err(Malformed)), "{message:?}");
            assert_eq!(fields.next(), None, "{message:?}");
        }
    }

    #[test]
    fn field_that_arrives_byte_by_byte_is_returned_with_its_last_byte() {
        let mut reader = FieldReader::default();
        for (byte, found) in [
            (0x82, None),
            (0x01, None),
            (0x83, None),
            (0x01, Some(Value::Bytes(131))),
        ] {
            assert_eq!(reader.read(&mut &[byte][..]), Ok(found.map(|value| (16, value))));
            assert_eq!(reader.is_empty(), found.is_some());
        }
    }
}
