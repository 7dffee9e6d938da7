//! What rangecache says about itself: metrics, logs and the outcome of every Range. A leaf: it uses no other room.
//!
//! No value of a key ever comes here, and keys only as the operator's own prefixes (I10).

pub mod log;
pub mod metrics;
pub mod outcome;

pub use metrics::Metrics;
pub use outcome::{Outcome, Why};
