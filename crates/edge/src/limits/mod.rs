//! **limits**: bounds on calls in flight, on concurrent reads of etcd, and on buffered bytes.
//!
//! | file | bound |
//! |---|---|
//! | `admission` | calls in flight (`--max-calls`) |
//! | `turns` | reads that call etcd at once (`--forward-max-large`, `--forward-max-small`), and that wait (`--forward-max-waiting`) |
//! | `waiters`, `round_robin` | waiting calls by client and by connection, which take turns |
//! | `costly` | calls of one client that are costly for etcd |
//! | `buffers` | all buffered bytes (`--buffer-max-bytes`), in shares |
//! | `call_bytes`, `client_bytes` | bytes of single calls, by connection and by client |
//! | `room_queue` | calls that wait until others release bytes |
//! | `intake` | requests that one connection has read |
//! | `byte_budget` | buffered bytes of several responses |
//! | `flags`, `client_flags` | the flags |
//!
//! `metrics` declares what this room counts.

mod admission;
mod buffers;
mod byte_budget;
mod call_bytes;
mod client_bytes;
mod client_flags;
mod costly;
mod flags;
mod intake;
mod metrics;
mod room_queue;
mod round_robin;
mod turns;
mod waiters;

pub use admission::Admission;
pub use buffers::Buffers;
pub use byte_budget::{BudgetExceeded, ByteBudget, HeldBytes};
pub use call_bytes::{CallBuffers, CallBytes, CallKind, ClientAccount};
pub use client_flags::ClientsConfig;
pub use costly::CostlyCalls;
pub use flags::{
    FIXED_BYTES, LimitsConfig, MIN_BUFFER_BYTES, connections_memory, default_buffer_bytes,
    default_connections, default_handshakes,
};
pub use intake::{Intake, Unhandled};
pub use metrics::{
    BufferKindMetrics, BufferMetrics, OpenConnections, ShareMetrics, TurnMetrics, TurnsMetrics,
};
pub use turns::{NoTurn, Turn, Turns, Waiting};
