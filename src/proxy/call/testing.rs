//! Records for unit tests.

use std::sync::Arc;

use tokio::time::Instant;

use super::record::CallRecord;
use crate::telemetry::access_log::AccessLog;
use crate::telemetry::clients::{ClientName, ClientRegistry};
use crate::telemetry::trace::Tracer;
use crate::telemetry::{Metrics, Telemetry};

/// Telemetry that neither logs nor traces.
pub(in crate::proxy) fn telemetry() -> Arc<Telemetry> {
    let metrics = Arc::new(Metrics::new());
    Arc::new(Telemetry::new(
        metrics,
        Tracer::default(),
        AccessLog::default(),
        ClientRegistry::default(),
    ))
}

/// The record of a call in `telemetry`.
pub(in crate::proxy) fn record_in(telemetry: &Arc<Telemetry>) -> CallRecord {
    let client = telemetry.clients.connect(&ClientName::of_connection(None, None));
    CallRecord::new(telemetry, client.begin_call(), Instant::now())
}

/// The record of a call.
pub(in crate::proxy) fn record() -> CallRecord {
    record_in(&telemetry())
}
