//! The budget of bytes that are held for calls (`--buffer-max-bytes`), divided into shares, so that no kind of bytes
//! can use up what the others need.

use std::sync::Arc;

use super::byte_budget::ByteBudget;
use super::call_bytes::CallBuffers;
use super::metrics::BufferMetrics;
use rangecache_base::telemetry::Metrics;

/// Shares of the budget: a half for the bytes of single calls, a quarter for conversions, an eighth each for shared
/// responses and page series.
#[derive(Debug)]
pub struct Buffers {
    /// Requests, forwarded responses and frames that wait for their client.
    pub calls: Arc<CallBuffers>,
    /// RangeStreams that become unary responses, and pages that become RangeStreams.
    pub converted: Arc<ByteBudget>,
    /// Responses that several reads share.
    pub shared: Arc<ByteBudget>,
    /// Open page series with their entries.
    pub series: Arc<ByteBudget>,
    /// Share of the page series.
    pub series_max_bytes: u64,
}

impl Buffers {
    /// Divides a budget of `max_bytes`.
    #[must_use]
    pub fn new(max_bytes: u64, all_metrics: &Metrics) -> Buffers {
        let metrics = &*all_metrics.group::<BufferMetrics>();
        let (calls, converted, eighth) = (max_bytes / 2, max_bytes / 4, max_bytes / 8);
        Buffers {
            calls: CallBuffers::new(calls, metrics),
            converted: ByteBudget::with_fair_growth(converted, metrics.kind("converted", converted)),
            shared: ByteBudget::first_come(eighth, metrics.kind("shared", eighth)),
            series: ByteBudget::first_come(eighth, metrics.kind("series", eighth)),
            series_max_bytes: eighth,
        }
    }
}
