//! The edge of the process: connections of clients, TLS on both sides, and limits on what clients cost.
//!
//! | module | what it is for |
//! |---|---|
//! | [`server`] | listening sockets and connections |
//! | [`limits`] | bounds on calls in flight, large reads and buffered bytes |
//! | [`tls`] | TLS on both sides: files, handshakes, errors with remedies |
//! | [`write_batching`] | frames that are ready together leave in one write |
//! | [`browser`] | requests that web pages cause |

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod browser;
pub mod limits;
pub mod server;
pub mod tls;
pub mod write_batching;
