//! Metrics, logs, traces, outcomes of Range calls, and the slowest calls.
//!
//! No values are recorded here, and keys only as the prefixes that the operator configured, except in the access log,
//! in traces and in lines of level debug, which contain prefixes of requests, and in the access log keys on request (I10). Uses `net` and the table of methods in `grpc`;
//! `otlp`, a room above, exports the spans.
//!
//! | file | contents |
//! |---|---|
//! | `metrics` | declarations of metrics; calls, clients, the process |
//! | `outcome` | outcomes and reasons: label values |
//! | `clients` | clients: who they are, and what they cost |
//! | `prefixes` | reads, writes and watches by prefix |
//! | `calls` | the slowest calls of the last minutes |
//! | `state_changes` | the newest changes of state |
//! | `exposition` | the text formats of `/metrics` |
//! | `access_log` | a line of JSON for each call |
//! | `trace` | sampling and spans |
//! | `log` | the log on standard error |
//! | `flags` | flags of the log, the access log and traces |
//! | `repeated_lines` | bound on repeated log lines |

pub mod access_log;
pub mod calls;
pub mod clients;
pub mod exposition;
mod flags;
pub mod log;
pub mod metrics;
pub mod outcome;
pub mod prefixes;
mod repeated_lines;
pub mod state_changes;
pub mod trace;

use std::sync::Arc;

use access_log::AccessLog;
use calls::Slowest;
use clients::ClientRegistry;
use state_changes::StateChanges;
use trace::Tracer;

pub use flags::{AccessLogConfig, LogConfig, LogFormat, TraceConfig};
pub use metrics::Metrics;
pub use outcome::{Outcome, Reason};

/// The handles of telemetry: metrics, spans, the slowest calls and the clients. Shared behind an `Arc`.
#[derive(Debug, Default)]
pub struct Telemetry {
    /// All metrics.
    pub metrics: Arc<Metrics>,
    /// Begins spans; the default one traces nothing.
    pub tracer: Tracer,
    /// Logs each call; the default one logs nothing.
    pub access_log: AccessLog,
    /// The slowest calls of the last minutes.
    pub slowest: Slowest,
    /// Clients of the proxy.
    pub clients: ClientRegistry,
    /// The newest changes of mirrors and flags.
    pub state_changes: Arc<StateChanges>,
}

impl Telemetry {
    /// Handles over `metrics`, `tracer`, `access_log` and `clients`, without calls so far.
    #[must_use]
    pub fn new(
        metrics: Arc<Metrics>,
        tracer: Tracer,
        access_log: AccessLog,
        clients: ClientRegistry,
    ) -> Telemetry {
        Telemetry {
            metrics,
            tracer,
            access_log,
            slowest: Slowest::default(),
            clients,
            state_changes: Arc::default(),
        }
    }
}
