//! Protobuf's wire format, as far as generated code does not serve: messages of which only a part is of interest or has
//! arrived, and messages whose bytes are kept as they are.
//!
//! | file | what it is for |
//! |---|---|
//! | `fields` | the fields of a message in memory, or of one that arrives in pieces |
//! | `varint` | varints and lengths: leniently, strictly, or trusted because they were checked before |
//!
//! A leaf: this room imports no other room. Fields of a newer etcd are read like any other field, whatever their wire type;
//! groups, which etcd does not use, are malformed.

mod fields;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod varint;

pub use fields::{FieldReader, Fields, Value};
pub use varint::{
    lenient_varint, put_varint, strict_bytes, strict_varint, to_usize, trusted_varint, varint_len,
};

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
