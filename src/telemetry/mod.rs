//! What rangecache says about itself: metrics, logs, traces, the outcome of every Range and the slowest of them. A leaf: it uses no other room.
//!
//! No value of a key ever comes here, and keys only as the operator's own prefixes (I10).

pub mod calls;
pub mod exposition;
pub mod log;
pub mod metrics;
pub mod otlp;
pub mod outcome;
pub mod trace;

use std::sync::Arc;

use calls::Slowest;
pub use metrics::Metrics;
pub use outcome::{Outcome, Reason};
use trace::Tracer;

/// The handles of telemetry: metrics, spans and the slowest calls. Shared behind an `Arc`.
#[derive(Debug, Default)]
pub struct Telemetry {
    /// All metrics.
    pub metrics: Arc<Metrics>,
    /// Begins spans; the default one traces nothing.
    pub tracer: Tracer,
    /// The slowest calls of the last minutes.
    pub slowest: Slowest,
}

impl Telemetry {
    /// Handles over `metrics` and `tracer`, without calls so far.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>, tracer: Tracer) -> Telemetry {
        Telemetry {
            metrics,
            tracer,
            slowest: Slowest::default(),
        }
    }
}
