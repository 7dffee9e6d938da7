//! Calls of every method: what the head of a call says, and what is known of the call when it ends.
//!
//! | file | subject |
//! |---|---|
//! | `record` | one record for each call, from its arrival to the last byte of its response; its end reports it |
//! | `access` | what decides about a call before its message is read; the record in the access log |
//! | `spans` | the record as spans of OpenTelemetry |
//!
//! A [`CallRecord`] is created when the head of the request has arrived, passed to the handler by `&mut`, and moved into the
//! body of the response. Status, bytes and end of a response are found there alone. Dropping it reports the call: to the
//! metrics of calls and clients, the slowest calls, the access log, and the trace.

mod access;
mod record;
mod spans;
#[cfg(test)]
pub(super) mod testing;

pub(super) use access::CallHead;
pub(super) use record::{CallRecord, Ended};
pub(super) use spans::CreateSpans;
