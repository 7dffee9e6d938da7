//! A lean HTTP/2 client for small calls, quorum checks above all.
//!
//! A check is one request of always the same shape, and its response a few hundred bytes. hyper and tonic spend most of a lone read's
//! CPU on it: tasks that wake each other, queues, maps of headers. This client encodes and writes a request within the task of the
//! call, and wakes that once, with the whole response. It has no dynamic table for headers, sends no large bodies, and does not wait for
//! windows: a call that it does not take now goes through hyper. A server that sends what it does not know, or
//! announces so little that calls would wait, is asked through hyper instead for a while.
//!
//! | file | subject |
//! |---|---|
//! | `client` | [`Lean`]: calls in flight, what is written, and the task that reads |
//! | `response` | parts of a response, and whole ones |
//! | `parts` | responses that are read as they arrive |
//! | `frame` | frames, and why a call failed |
//! | `head` | headers in HPACK |

mod client;
mod frame;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzzing;
mod head;
mod parts;
mod response;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use client::{Begun, Lean, PING_INTERVAL};
pub use frame::LeanError;
/// Bound on the body of a request: one frame.
pub use frame::MAX_PAYLOAD_BYTES as MAX_SHORT_BYTES;
pub use parts::Parts;
pub use response::{STREAM_WINDOW_BYTES, Whole};
