//! The flag of traces. OpenTelemetry's own variables set everything else.

use clap::Args;

use crate::flags::parse_share;

/// How many traces there are.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Log")]
pub struct TraceConfig {
    /// Share of the traces that begin here, from 0 to 1; a caller's decision counts for its calls. Takes the place of
    /// OTEL_TRACES_SAMPLER, and changes without a restart [default: none]
    #[arg(long = "trace-sample", value_name = "SHARE", value_parser = parse_share)]
    pub trace_sample: Option<f64>,
}
