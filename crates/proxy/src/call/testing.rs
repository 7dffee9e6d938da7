//! Records for unit tests.

use std::sync::Arc;

use rangecache_base::telemetry::clients::ClientName;
use rangecache_edge::limits::{BufferMetrics, ByteKind, BytesLedger, ClientAccount};
use tokio::time::Instant;

use super::record::CallRecord;
use crate::metrics::ProxyTelemetry;

/// Telemetry that neither logs nor traces.
pub(crate) fn telemetry() -> Arc<ProxyTelemetry> {
    Arc::default()
}

/// The account of a connection with so many bytes for buffers.
pub(crate) fn account(max_bytes: u64) -> Arc<ClientAccount> {
    let metrics = BufferMetrics::default();
    BytesLedger::new(max_bytes, max_bytes, &metrics, Default::default()).account(0, Arc::default())
}

/// The record of a call in `telemetry`.
pub(crate) fn record_in(telemetry: &Arc<ProxyTelemetry>) -> CallRecord {
    let client = telemetry.clients.connect(&ClientName::of_connection(None, None));
    CallRecord::new(
        telemetry,
        client.begin_call(),
        account(2 << 20).hold(ByteKind::Request),
        Instant::now(),
    )
}

/// The record of a call.
pub(crate) fn record() -> CallRecord {
    record_in(&telemetry())
}
