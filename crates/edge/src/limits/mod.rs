//! **limits**: bounds on calls in flight, on concurrent reads of etcd, and on buffered bytes. Each is one of two: a number of
//! [`Slots`], or bytes of the [`BytesLedger`]; calls in flight are bounded by their count alone.
//!
//! | file | bound |
//! |---|---|
//! | `slots` | calls at once, and calls that wait: reads of etcd (`--forward-max-large`, `--forward-max-small`, `--forward-max-waiting`), costly calls, scans, handovers of watches |
//! | `bytes` | bytes of `--buffer-max-bytes` and `--watch-max-bytes`, by kind, client and connection |
//! | `policy` | the rules by which bytes are given |
//! | `line` | waiting calls by client and by connection, which take turns |
//! | `wait` | the deadline of a call, and why it gets nothing |
//! | `admission` | calls in flight (`--max-calls`) |
//! | `intake` | requests that one connection has read |
//! | `flags`, `client_flags` | the flags |
//!
//! `metrics` declares what this room counts.

mod admission;
mod bytes;
mod client_flags;
mod flags;
mod intake;
mod line;
mod metrics;
mod policy;
mod slots;
mod wait;

pub use admission::Admission;
pub use bytes::{BytesLedger, ClientAccount, HeldBytes};
pub use client_flags::ClientsConfig;
pub use flags::{
    FIXED_BYTES, LimitsConfig, MIN_BUFFER_BYTES, connections_memory, default_buffer_bytes,
    default_connections, default_handshakes,
};
pub use intake::{Intake, Unhandled};
pub use metrics::{
    BufferKindMetrics, BufferMetrics, OpenConnections, ShareMetrics, SlotMetrics, SlotsMetrics,
};
pub use policy::ByteKind;
pub use slots::{Gate, Slot, SlotPolicy, Slots, Waiting};
pub use wait::{Deadline, Exceeded};
