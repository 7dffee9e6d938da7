//! What rangecache says about itself: metrics, logs, traces, the outcome of every Range and the slowest of them. A leaf: it uses no other room.
//!
//! No value of a key ever comes here, and keys only as the operator's own prefixes (I10).

pub mod calls;
pub mod exposition;
pub mod log;
pub mod metrics;
pub mod outcome;
pub mod trace;

pub use metrics::Metrics;
pub use outcome::{Outcome, Reason};
