//! The keys that one request names.

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
