//! Protobuf's wire format, as far as generated code does not serve: messages of which only a part is of interest or has
//! arrived, and messages whose bytes are kept as they are.
//!
//! | file | what it is for |
//! |---|---|
//! | `fields` | the fields of a message in memory, or of one that arrives in pieces |
//! | `wire` | wire types, varints and lengths: read leniently, strictly, or as checked before |
//!
//! A leaf: this room imports no other room. Fields of a newer etcd are read like any other field, whatever their wire type;
//! groups, which etcd does not use, are malformed.

mod fields;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzzing;
mod wire;

pub use fields::{FieldReader, Fields, Value};
pub use wire::{
    FIXED_32, FIXED_64, LENGTH_DELIMITED, Malformed, VARINT, lenient_varint, put_varint, strict_bytes,
    strict_varint, to_usize, trusted_varint, varint_len,
};
