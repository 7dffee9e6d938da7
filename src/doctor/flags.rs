//! Flags of `rangecache doctor`: those of serving, and its own.

use clap::Args;

use crate::config::Config;
use crate::report::ReportFormat;

/// Flags of `rangecache doctor`.
#[derive(Args, Debug, Clone)]
pub struct DoctorConfig {
    /// The flags of `serve`.
    #[command(flatten)]
    pub config: Config,

    /// Form of the report
    ///
    /// When to change it: `json` for scripts
    #[arg(
        long,
        value_name = "FORMAT",
        value_enum,
        default_value = "text",
        help_heading = "Report"
    )]
    pub output: ReportFormat,

    /// Measure every key instead of a sample: reads the whole keyspace once, at 32 MiB/s
    ///
    /// When to change it: samples are not precise enough
    #[arg(long, help_heading = "Report")]
    pub deep: bool,
}
