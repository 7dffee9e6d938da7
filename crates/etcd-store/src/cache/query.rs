//! Decoding and validation of a RangeRequest, by etcd's rules.

use bytes::Bytes;
use etcd_wire::{
    etcdserverpb::RangeRequest,
    protobuf::{FIXED_32, FIXED_64, LENGTH_DELIMITED, VARINT, lenient_varint, strict_varint, to_usize},
};

use crate::keyspace::Interval;

/// Limit from which on a query over many keys counts as large.
const LARGE_LIMIT: i64 = 1000;

/// Wire types of the groups of earlier versions of protobuf, which may be in an unknown field.
const GROUP_START: u64 = 3;
const GROUP_END: u64 = 4;

/// etcd's RangeRequest. An absent field is zero or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeQuery {
    /// The only key, or the first key of an interval.
    pub key: Bytes,
    /// Empty for one key, `\0` for every key from `key` on, otherwise the exclusive end of the interval.
    pub range_end: Bytes,
    /// Largest number of entries to return; unlimited at or below 0.
    pub limit: i64,
    /// Revision to read; the current one at or below 0.
    pub revision: i64,
    /// Number of a [`SortOrder`].
    pub sort_order: i32,
    /// Number of a [`SortTarget`].
    pub sort_target: i32,
    /// Whether one member's local state suffices, without a quorum.
    pub serializable: bool,
    /// Whether values are omitted.
    pub keys_only: bool,
    /// Whether only the count is returned.
    pub count_only: bool,
    /// Lowest mod_revision to return; 0 for no filter, like in the other three.
    pub min_mod_revision: i64,
    /// Highest mod_revision to return.
    pub max_mod_revision: i64,
    /// Lowest create_revision to return.
    pub min_create_revision: i64,
    /// Highest create_revision to return.
    pub max_create_revision: i64,
}

/// etcd's SortOrder, with its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum SortOrder {
    /// In stored order, which is by key.
    None = 0,
    /// Ascending.
    Ascend = 1,
    /// Descending.
    Descend = 2,
}

/// etcd's SortTarget, with its numbers.
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

/// Rejection of a message that the cache must not interpret; it is forwarded to etcd unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a RangeRequest in plain form")]
pub struct Undecodable;

/// Reason why etcd refuses a request before it reads: `InvalidArgument`, with etcd's own message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// The key is empty.
    #[error("etcdserver: key is not provided")]
    EmptyKey,
    /// The sort order or target does not exist.
    #[error("etcdserver: invalid sort option")]
    InvalidSortOption,
}

/// Differences between etcd's versions in responses to a Range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// A keys_only response has leases. True up to 3.6; from 3.7 on etcd takes it from the index, which has none.
    pub keys_only_has_lease: bool,
    /// An unknown sort order is refused. True from 3.6 on; before, the response is unsorted, but like a sorted one in
    /// all other respects.
    pub unknown_sort_is_refused: bool,
}

impl Dialect {
    /// Dialect of etcd's version `major.minor`.
    pub fn of_version(major: u32, minor: u32) -> Dialect {
        let version = (major, minor);
        Dialect {
            keys_only_has_lease: version < (3, 7),
            unknown_sort_is_refused: version >= (3, 6),
        }
    }
}

impl SortOrder {
    /// Names in the order of their numbers.
    pub const NAMES: [&str; 3] = ["NONE", "ASCEND", "DESCEND"];

    /// `None` for a number that etcd does not know.
    pub fn from_number(number: i32) -> Option<SortOrder> {
        [SortOrder::None, SortOrder::Ascend, SortOrder::Descend]
            .into_iter()
            .find(|order| *order as i32 == number)
    }
}

impl SortTarget {
    /// Names in the order of their numbers.
    pub const NAMES: [&str; 5] = ["KEY", "VERSION", "CREATE", "MOD", "VALUE"];

    /// `None` for a number that etcd does not know.
    pub fn from_number(number: i32) -> Option<SortTarget> {
        use SortTarget::{Create, Key, Mod, Value, Version};
        [Key, Version, Create, Mod, Value]
            .into_iter()
            .find(|target| *target as i32 == number)
    }
}

/// Whether the last sort target in `message` does not exist in etcd. Parsed as leniently as etcd's own decoder: fields
/// in any order, repeated, padded, among unknown ones. Such a request crashes etcd 3.5, so it must be detected even
/// where [`RangeQuery::decode`] rejects the message. False for messages that etcd refuses anyway, or without a key.
pub fn names_unknown_sort_target(message: &[u8]) -> bool {
    let (mut target, mut has_key, mut rest) = (0_u64, false, message);
    // Groups that have begun: etcd skips them, and what is in them.
    let mut groups = 0_u32;
    while !rest.is_empty() {
        let Some(tag) = lenient_varint(&mut rest) else {
            return false;
        };
        let length = match tag & 7 {
            VARINT => {
                let Some(number) = lenient_varint(&mut rest) else {
                    return false;
                };
                if tag >> 3 == 6 && groups == 0 {
                    target = number;
                }
                0
            }
            LENGTH_DELIMITED => {
                let Some(length) = lenient_varint(&mut rest) else {
                    return false;
                };
                if tag >> 3 == 1 && groups == 0 {
                    has_key = length > 0;
                }
                length
            }
            FIXED_64 => 8,
            FIXED_32 => 4,
            GROUP_START => {
                groups += 1;
                0
            }
            GROUP_END if groups > 0 => {
                groups -= 1;
                0
            }
            _ => return false,
        };
        let Some(after) = rest.get(to_usize(length)..) else {
            return false;
        };
        rest = after;
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "protobuf truncates an int32 on the wire to its low 32 bits"
    )]
    let number = target as i32;
    groups == 0 && has_key && SortTarget::from_number(number).is_none()
}

impl RangeQuery {
    /// Decodes a RangeRequest. Key and range_end reference the message's bytes.
    ///
    /// # Errors
    /// The message might be decoded differently by some version of etcd: it has a field that is unknown, repeated or of
    /// another wire type, an overlong varint, or an *explicitly empty* range_end, which means "every key from `key` on"
    /// up to etcd 3.6 and "this one key" in 3.7.
    pub fn decode(message: Bytes) -> Result<RangeQuery, Undecodable> {
        let mut query = RangeQuery::default();
        let mut seen = 0_u32;
        let mut at = 0;
        while at < message.len() {
            let tag = strict_varint(&message, &mut at).ok_or(Undecodable)?;
            let (field, wire_type) = (tag >> 3, tag & 7);
            let expected_type = if field <= 2 { LENGTH_DELIMITED } else { VARINT };
            // Fields beyond the bits of `seen` are rejected here, other unknown ones by `set`.
            let in_bounds = (1..32).contains(&field);
            if !in_bounds || wire_type != expected_type || seen & (1 << field) != 0 {
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
                query.set(field, number)?;
            }
        }
        Ok(query)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "protobuf truncates an int32 on the wire to its low 32 bits"
    )]
    fn set(&mut self, field: u64, number: u64) -> Result<(), Undecodable> {
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
            13 => self.max_create_revision = signed,
            // An option of a newer etcd: ignored here, it would be answered wrongly.
            _ => return Err(Undecodable),
        }
        Ok(())
    }

    /// Returns etcd's message with every field of the query. A new field of either is an error of the compiler here: a
    /// read is neither sent nor logged without what its client asked for.
    pub fn to_request(&self) -> RangeRequest {
        let RangeQuery {
            key,
            range_end,
            limit,
            revision,
            sort_order,
            sort_target,
            serializable,
            keys_only,
            count_only,
            min_mod_revision,
            max_mod_revision,
            min_create_revision,
            max_create_revision,
        } = self;
        RangeRequest {
            key: key.clone(),
            range_end: range_end.clone(),
            limit: *limit,
            revision: *revision,
            sort_order: *sort_order,
            sort_target: *sort_target,
            serializable: *serializable,
            keys_only: *keys_only,
            count_only: *count_only,
            min_mod_revision: *min_mod_revision,
            max_mod_revision: *max_mod_revision,
            min_create_revision: *min_create_revision,
            max_create_revision: *max_create_revision,
        }
    }

    /// Keys that the query names.
    pub fn interval(&self) -> Interval<'_> {
        Interval::from_request(&self.key, &self.range_end)
    }

    /// Checks what etcd checks before it reads. To be called before [`select`](super::select).
    ///
    /// Refuses an unknown sort target in every dialect, because etcd before 3.6 would crash on it.
    ///
    /// # Errors
    /// The error with which etcd refuses the request.
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

    /// Whether any of the four revision filters is set, including to a negative value.
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
        // Without `..`, so that a new field does not compile until it is decided here.
        let RangeQuery {
            key: _,
            range_end,
            limit: _,
            revision: _,
            sort_order,
            sort_target,
            serializable: _,
            keys_only: _,
            count_only,
            // By `has_revision_filter`.
            min_mod_revision: _,
            max_mod_revision: _,
            min_create_revision: _,
            max_create_revision: _,
        } = self;
        let by_key = *sort_target == SortTarget::Key as i32
            && matches!(
                SortOrder::from_number(*sort_order),
                Some(SortOrder::None | SortOrder::Ascend)
            );
        !range_end.is_empty() && !count_only && by_key && !self.has_revision_filter()
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
