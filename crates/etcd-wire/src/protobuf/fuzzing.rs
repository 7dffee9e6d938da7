//! Fuzz target of the readers of fields: a message in memory, the same in pieces, and as prost reads it.

use prost::encoding::{WireType, decode_key, decode_varint};

use super::{FieldReader, Fields, Malformed, Value, to_usize};

type Found = Vec<(u64, Value<Vec<u8>>)>;

/// A message of any bytes, which is cut into pieces of a length that its first byte gives.
pub fn fields(data: &[u8]) {
    let Some((cut, message)) = data.split_first() else {
        return;
    };
    let (found, is_whole) = in_memory(message);
    assert_eq!(
        in_pieces(message, usize::from(*cut) + 1),
        (found.clone(), is_whole)
    );
    if let Some(decoded) = decoded(message) {
        assert_eq!((decoded, true), (found, is_whole));
    }
}

/// The fields of `message`, and whether there is nothing after them.
fn in_memory(message: &[u8]) -> (Found, bool) {
    let mut found = Vec::new();
    for field in Fields::new(message) {
        match field {
            Ok((number, value)) => found.push((number, value.map(<[u8]>::to_vec))),
            Err(Malformed) => return (found, false),
        }
    }
    (found, true)
}

fn in_pieces(message: &[u8], cut: usize) -> (Found, bool) {
    let (mut reader, mut found, mut missing) = (FieldReader::default(), Found::new(), 0);
    for mut piece in message.chunks(cut) {
        while !piece.is_empty() {
            if missing > 0
                && let Some((_, Value::Bytes(bytes) | Value::Fixed(bytes))) = found.last_mut()
            {
                let (value, rest) = piece.split_at(piece.len().min(missing));
                bytes.extend(value);
                (piece, missing) = (rest, missing - value.len());
                continue;
            }
            match reader.read(&mut piece) {
                Ok(Some((number, value))) => {
                    let value = value.map(|length| {
                        missing = to_usize(length);
                        Vec::new()
                    });
                    found.push((number, value));
                }
                Ok(None) => {}
                Err(Malformed) => return (found, false),
            }
        }
    }
    (found, missing == 0 && reader.is_empty())
}

/// The fields as prost reads them; `None` if it refuses the message, or there are groups.
fn decoded(mut message: &[u8]) -> Option<Found> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let (number, wire_type) = decode_key(&mut message).ok()?;
        let value = match wire_type {
            WireType::Varint => Value::Number(decode_varint(&mut message).ok()?),
            WireType::SixtyFourBit => Value::Fixed(take(&mut message, 8)?),
            WireType::ThirtyTwoBit => Value::Fixed(take(&mut message, 4)?),
            WireType::LengthDelimited => {
                let length = decode_varint(&mut message).ok()?;
                Value::Bytes(take(&mut message, length)?)
            }
            WireType::StartGroup | WireType::EndGroup => return None,
        };
        found.push((number.into(), value));
    }
    Some(found)
}

fn take(message: &mut &[u8], length: u64) -> Option<Vec<u8>> {
    let (value, rest) = message.split_at_checked(to_usize(length))?;
    *message = rest;
    Some(value.to_vec())
}
