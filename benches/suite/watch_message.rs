//! WatchResponses read without decoding them as a whole: the load generator shares the servers' cores.

/// WatchResponse, decoded only in part.
#[derive(Debug, Default)]
pub(crate) struct Response<'a> {
    /// Revision in its header.
    pub(crate) revision: i64,
    /// Id of the watcher.
    pub(crate) watch_id: i64,
    /// Whether it answers a create.
    pub(crate) created: bool,
    /// Whether it ends the watcher.
    pub(crate) canceled: bool,
    /// Revision up to which etcd has compacted what the watcher needs; 0 unless that ends it.
    pub(crate) compact_revision: i64,
    message: &'a [u8],
}

/// Parts of an event that the soak and the cases need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event<'a> {
    /// The event's key.
    pub(crate) key: &'a [u8],
    /// `mod_revision`.
    pub(crate) revision: i64,
    /// The first eight bytes of the value: the time of the put.
    pub(crate) made_ns: u64,
    /// The next eight bytes of the value; 0 without them.
    pub(crate) number: u64,
}

impl<'a> Response<'a> {
    /// Reads what is not about events.
    pub(crate) fn of(message: &'a [u8]) -> Response<'a> {
        let mut response = Response {
            message,
            ..Response::default()
        };
        for (tag, field) in fields(message) {
            match (tag, field) {
                (1, Field::Bytes(header)) => response.revision = number_in(header, 3),
                (2, Field::Number(id)) => response.watch_id = id.cast_signed(),
                (3, Field::Number(created)) => response.created = created == 1,
                (4, Field::Number(canceled)) => response.canceled = canceled == 1,
                (5, Field::Number(revision)) => response.compact_revision = revision.cast_signed(),
                _ => {}
            }
        }
        response
    }

    /// Its events; `None` for one whose value is shorter than eight bytes.
    pub(crate) fn events(&self) -> impl Iterator<Item = Option<Event<'a>>> {
        fields(self.message).filter_map(|(tag, field)| match field {
            Field::Bytes(event) if tag == 11 => Some(event_of(event)),
            _ => None,
        })
    }
}

fn event_of(event: &[u8]) -> Option<Event<'_>> {
    let kv = fields(event).find_map(|(tag, field)| match field {
        Field::Bytes(kv) if tag == 2 => Some(kv),
        _ => None,
    })?;
    let (mut key, mut revision, mut value): (&[u8], _, &[u8]) = (&[], 0, &[]);
    for (tag, field) in fields(kv) {
        match (tag, field) {
            (1, Field::Bytes(bytes)) => key = bytes,
            (3, Field::Number(number)) => revision = number.cast_signed(),
            (5, Field::Bytes(bytes)) => value = bytes,
            _ => {}
        }
    }
    let (made, rest) = value.split_first_chunk()?;
    Some(Event {
        key,
        revision,
        made_ns: u64::from_le_bytes(*made),
        number: rest.first_chunk().map_or(0, |number| u64::from_le_bytes(*number)),
    })
}

/// Number in the field of a message; 0 without the field.
fn number_in(message: &[u8], wanted: u64) -> i64 {
    let number = fields(message).find_map(|(tag, field)| match field {
        Field::Number(number) if tag == wanted => Some(number.cast_signed()),
        _ => None,
    });
    number.unwrap_or(0)
}

/// A protobuf field of the kinds that etcd's watch uses.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// Fields of a message with their tags, up to the first that is malformed.
fn fields(mut message: &[u8]) -> impl Iterator<Item = (u64, Field<'_>)> {
    std::iter::from_fn(move || {
        let key = varint(&mut message)?;
        let number = varint(&mut message)?;
        let field = match key & 7 {
            0 => Field::Number(number),
            2 => {
                let (bytes, rest) = message.split_at_checked(usize::try_from(number).ok()?)?;
                message = rest;
                Field::Bytes(bytes)
            }
            _ => return None,
        };
        Some((key >> 3, field))
    })
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}
