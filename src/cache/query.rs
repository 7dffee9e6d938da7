//! A RangeRequest, decoded and checked as etcd does it.

use bytes::Bytes;

use crate::keyspace::Interval;

use super::wire::{LENGTH_DELIMITED, VARINT, lenient_varint, strict_varint};

/// Limit from which on a query over many keys counts as large.
const LARGE_LIMIT: i64 = 1000;

/// etcd's RangeRequest. An absent field is zero or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeQuery {
    /// The key, or the first key of an interval.
    pub key: Bytes,
    /// Empty: one key. `\0`: every key from `key` on. Else the end of the interval, which is not part of it.
    pub range_end: Bytes,
    /// Entries to return at most; no bound at or below 0.
    pub limit: i64,
    /// The revision to read; the current one at or below 0.
    pub revision: i64,
    /// See [`SortOrder`].
    pub sort_order: i32,
    /// See [`SortTarget`].
    pub sort_target: i32,
    /// May be answered without a quorum.
    pub serializable: bool,
    /// Leave the values out.
    pub keys_only: bool,
    /// Return the count alone.
    pub count_only: bool,
    /// Leave out entries with a lower mod_revision; 0 for no such filter, as with the other three.
    pub min_mod_revision: i64,
    /// Leave out entries with a higher mod_revision.
    pub max_mod_revision: i64,
    /// Leave out entries with a lower create_revision.
    pub min_create_revision: i64,
    /// Leave out entries with a higher create_revision.
    pub max_create_revision: i64,
}

/// The numbers of etcd's SortOrder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum SortOrder {
    /// As stored, which is by key.
    None = 0,
    /// Ascending.
    Ascend = 1,
    /// Descending.
    Descend = 2,
}

/// The numbers of etcd's SortTarget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum SortTarget {
    /// By key.
    Key = 0,
    /// By version.
    Version = 1,
    /// By create_revision.
    Create = 2,
    /// By mod_revision.
    Mod = 3,
    /// By value.
    Value = 4,
}

/// The message is none that the cache may interpret; etcd can answer it from its own bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a RangeRequest in plain form")]
pub struct Undecodable;

/// What etcd refuses before it reads anything; both are `InvalidArgument`, in etcd's own words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// No key.
    #[error("etcdserver: key is not provided")]
    EmptyKey,
    /// A sort order or target that does not exist.
    #[error("etcdserver: invalid sort option")]
    InvalidSortOption,
}

/// In what etcd's versions answer a Range differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// A keys_only answer carries leases: up to 3.6. From 3.7 on it comes from the index, which has none.
    pub keys_only_has_lease: bool,
    /// An unknown sort order is refused: from 3.6 on. Before, it means: unsorted, but as if sorted in all else.
    pub unknown_sort_is_refused: bool,
}

impl Dialect {
    /// The dialect of etcd's version `major.minor`.
    pub fn of_version(major: u32, minor: u32) -> Dialect {
        let version = (major, minor);
        Dialect {
            keys_only_has_lease: version < (3, 7),
            unknown_sort_is_refused: version >= (3, 6),
        }
    }
}

impl SortOrder {
    /// `None` for a number that etcd does not know.
    pub fn from_number(number: i32) -> Option<SortOrder> {
        [SortOrder::None, SortOrder::Ascend, SortOrder::Descend]
            .into_iter()
            .find(|order| *order as i32 == number)
    }
}

impl SortTarget {
    /// `None` for a number that etcd does not know.
    pub fn from_number(number: i32) -> Option<SortTarget> {
        use SortTarget::{Create, Key, Mod, Value, Version};
        [Key, Version, Create, Mod, Value]
            .into_iter()
            .find(|target| *target as i32 == number)
    }
}

/// Whether the last sort target in `message` is one that etcd does not know, read as carelessly as etcd itself reads:
/// in whatever order, repeated, padded, among unknown fields. Such a request crashes etcd 3.5, so it must be known
/// even where [`RangeQuery::decode`] gives up. A message that etcd refuses anyway, or one without a key, is none.
pub fn names_unknown_sort_target(message: &[u8]) -> bool {
    let (mut target, mut has_key, mut at) = (0_u64, false, 0);
    while at < message.len() {
        let Some(tag) = lenient_varint(message, &mut at) else {
            return false;
        };
        let length = match tag & 7 {
            VARINT => {
                let Some(number) = lenient_varint(message, &mut at) else {
                    return false;
                };
                if tag >> 3 == 6 {
                    target = number;
                }
                0
            }
            LENGTH_DELIMITED => {
                let Some(length) = lenient_varint(message, &mut at) else {
                    return false;
                };
                if tag >> 3 == 1 {
                    has_key = length > 0;
                }
                length
            }
            1 => 8,
            5 => 4,
            // Groups: etcd skips them, and what is in them.
            3 | 4 => 0,
            _ => return false,
        };
        at = match usize::try_from(length)
            .ok()
            .and_then(|length| at.checked_add(length))
        {
            Some(end) if end <= message.len() => end,
            _ => return false,
        };
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "protobuf truncates an int32 on the wire to its low 32 bits"
    )]
    let number = target as i32;
    has_key && SortTarget::from_number(number).is_none()
}

impl RangeQuery {
    /// Decodes a RangeRequest; key and range_end share the message's bytes.
    ///
    /// # Errors
    /// On whatever some etcd might read in another way than this does: a field that is unknown, of another wire type
    /// or there twice, a varint that is longer than need be, and an *explicitly empty* range_end, which etcd up to
    /// 3.6 takes for "every key from there on" and 3.7 for "this one key".
    pub fn decode(message: Bytes) -> Result<RangeQuery, Undecodable> {
        let mut query = RangeQuery::default();
        let mut seen = 0_u32;
        let mut at = 0;
        while at < message.len() {
            let tag = strict_varint(&message, &mut at).ok_or(Undecodable)?;
            let (field, wire_type) = (tag >> 3, tag & 7);
            let known =
                (1..=13).contains(&field) && wire_type == if field <= 2 { LENGTH_DELIMITED } else { VARINT };
            if !known || seen & (1 << field) != 0 {
                return Err(Undecodable);
            }
            seen |= 1 << field;
            let number = strict_varint(&message, &mut at).ok_or(Undecodable)?;
            if wire_type == LENGTH_DELIMITED {
                let end = usize::try_from(number)
                    .ok()
                    .and_then(|length| at.checked_add(length));
                let end = end.filter(|end| *end <= message.len()).ok_or(Undecodable)?;
                let bytes = message.slice(at..end);
                at = end;
                if field == 1 {
                    query.key = bytes;
                } else if bytes.is_empty() {
                    return Err(Undecodable);
                } else {
                    query.range_end = bytes;
                }
            } else {
                query.set(field, number);
            }
        }
        Ok(query)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "protobuf truncates an int32 on the wire to its low 32 bits"
    )]
    fn set(&mut self, field: u64, number: u64) {
        let signed = number as i64;
        match field {
            3 => self.limit = signed,
            4 => self.revision = signed,
            5 => self.sort_order = signed as i32,
            6 => self.sort_target = signed as i32,
            7 => self.serializable = number != 0,
            8 => self.keys_only = number != 0,
            9 => self.count_only = number != 0,
            10 => self.min_mod_revision = signed,
            11 => self.max_mod_revision = signed,
            12 => self.min_create_revision = signed,
            _ => self.max_create_revision = signed,
        }
    }

    /// Which keys the query is about.
    pub fn interval(&self) -> Interval<'_> {
        match &*self.range_end {
            [] => Interval::Single(&self.key),
            [0] => Interval::From(&self.key),
            end => Interval::Range(&self.key, end),
        }
    }

    /// What etcd checks before it reads. To be asked before [`select`](super::select).
    ///
    /// An unknown sort target is refused in every dialect: etcd before 3.6 would crash on it.
    ///
    /// # Errors
    /// In the words with which etcd refuses it.
    pub fn check(&self, dialect: &Dialect) -> Result<(), QueryError> {
        if self.key.is_empty() {
            return Err(QueryError::EmptyKey);
        }
        let unknown_order = SortOrder::from_number(self.sort_order).is_none();
        let unknown_target = SortTarget::from_number(self.sort_target).is_none();
        if unknown_target || (unknown_order && dialect.unknown_sort_is_refused) {
            return Err(QueryError::InvalidSortOption);
        }
        Ok(())
    }

    /// Whether any of the four revision filters is set. A negative one is.
    pub fn has_revision_filter(&self) -> bool {
        let filters = [
            self.min_mod_revision,
            self.max_mod_revision,
            self.min_create_revision,
            self.max_create_revision,
        ];
        filters != [0; 4]
    }

    /// Whether etcd may have to send or count many keys: an interval without a limit, or with one of at least 1000.
    pub fn is_large(&self) -> bool {
        !self.range_end.is_empty() && (self.limit <= 0 || self.limit >= LARGE_LIMIT)
    }

    /// Whether etcd's RangeStream returns the same as its Range. It refuses sort orders other than by key, or sorts chunk by
    /// chunk; a count alone needs no stream.
    pub fn is_streamable(&self) -> bool {
        let by_key = self.sort_target == SortTarget::Key as i32
            && matches!(
                SortOrder::from_number(self.sort_order),
                Some(SortOrder::None | SortOrder::Ascend)
            );
        !self.range_end.is_empty() && !self.count_only && by_key && !self.has_revision_filter()
    }

    /// Whether the response may be a page of a list in key order, which a later page continues.
    pub fn is_page(&self) -> bool {
        self.limit > 0 && self.is_streamable()
    }

    /// Whether the query may be read in pages: a sorted one is sorted as a whole.
    pub fn may_page(&self) -> bool {
        self.sort_target == SortTarget::Key as i32
    }
}

#[cfg(test)]
mod tests;
