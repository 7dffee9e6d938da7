//! [`FieldReader`] and [`Fields`]: the fields of a message one after the other, in the order in which they are encoded.

use super::wire::{FIXED_32, FIXED_64, LENGTH_DELIMITED, Malformed, VARINT, VarintReader, to_usize};

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
    use super::*;

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
