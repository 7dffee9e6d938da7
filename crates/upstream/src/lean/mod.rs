//! A lean HTTP/2 client for quorum checks: one small call at a time on a connection of its own.
//!
//! A check is one request of always the same shape, and its response a few hundred bytes. hyper and tonic spend most of a lone read's
//! CPU on it: tasks that wake each other, queues, maps of headers. This client reads and writes the frames itself, within the task
//! of the check. Each connection is an ordinary [`Connection`](crate::Connection) with its own proof of its history; what this client does
//! not expect closes it, and the check is made on the ordinary check connection.
//!
//! | file | subject |
//! |---|---|
//! | `client` | [`Lean`]: one call after the other |
//! | `frame` | frames |
//! | `head`, `huffman` | headers in HPACK |
//! | `error` | why a connection cannot be used any more |

mod client;
mod error;
mod frame;
mod head;
mod huffman;
#[cfg(test)]
mod tests;

pub(super) use client::{Lean, Whole};
