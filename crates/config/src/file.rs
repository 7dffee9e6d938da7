//! The flag that names a file of flags.

use std::path::PathBuf;

use clap::Args;

/// The file with further flags.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "File")]
pub struct FileConfig {
    /// File of settings as `rangecache config` prints them, one RANGECACHE_FLAG=value per line; the command line and the environment win over it. Read again on SIGHUP
    /// and POST /reload [default: none]
    ///
    /// When to change it: flags should change without a restart
    /// (docs/reference/flags.md#changes-without-a-restart), or come from a ConfigMap
    #[arg(long = "flags-file", value_name = "FILE")]
    pub flags_file: Option<PathBuf>,
}
