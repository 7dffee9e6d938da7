//! Records for unit tests.

use std::sync::Arc;

use tokio::time::Instant;

use super::record::CallRecord;
use crate::proxy::metrics::ProxyTelemetry;
use rangecache_base::telemetry::clients::ClientName;

/// Telemetry that neither logs nor traces.
pub(in crate::proxy) fn telemetry() -> Arc<ProxyTelemetry> {
    Arc::default()
}

/// The record of a call in `telemetry`.
pub(in crate::proxy) fn record_in(telemetry: &Arc<ProxyTelemetry>) -> CallRecord {
    let client = telemetry.clients.connect(&ClientName::of_connection(None, None));
    CallRecord::new(telemetry, client.begin_call(), Instant::now())
}

/// The record of a call.
pub(in crate::proxy) fn record() -> CallRecord {
    record_in(&telemetry())
}
