//! Flags of the process.

use clap::Args;

use rangecache_base::flags::Switch as _;

/// The process.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Process")]
pub struct ProcessConfig {
    /// Permit core dumps, and tools of the same user that read the process's memory (gdb, strace, perf). Linux alone
    /// forbids them otherwise: memory holds values of etcd, keys and passwords
    ///
    /// When to change it: a crash is to be analysed, or the process profiled or traced by its own user: core dumps,
    /// gdb, strace and perf then see memory, with all that is mirrored
    #[arg(long, switch())]
    pub core_dumps: bool,
}
