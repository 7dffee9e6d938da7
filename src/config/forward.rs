//! Flags of reads that are forwarded to etcd.

use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::flags::{parse_duration, parse_share};

/// Bounds on reads that are forwarded to etcd.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Forwarded reads")]
pub struct ForwardConfig {
    /// Large Ranges in flight to etcd at once; more wait for their turn
    #[arg(
        long = "forward-max-large",
        value_name = "N",
        default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_large: u32,

    /// Small reads, and watches that etcd has not created yet, in flight to etcd at once; more wait for their turn, until
    /// the client's deadline or for 30 s
    #[arg(
        long = "forward-max-small",
        value_name = "N",
        default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_small: u32,

    /// Calls that may wait for their turn, of large and of small ones each; more are refused with a retryable Unavailable
    #[arg(long = "forward-max-waiting", value_name = "N", default_value_t = 4096)]
    pub max_waiting: u32,

    /// Time limit for a read that waits for memory of --buffer-max-bytes, or for an identical read whose client does not
    /// read; after it a conversion is forwarded unchanged, a RangeStream is refused with ResourceExhausted, and the
    /// identical reads get the next call
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "10s")]
    pub stream_max_wait: Duration,

    /// Time that a RangeStream from etcd is kept open for the next page of a list
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "75s")]
    pub series_ttl: Duration,

    /// Share of the unary Ranges that memory could answer which etcd answers, to compare its response with memory's at the
    /// same revision; from 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = parse_share, default_value = "0")]
    pub shadow: f64,

    /// Answer to reads of a mirror that is loading, lost its watch or is too late: etcd's, or Unavailable at once
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = WhenBehind::Forward)]
    pub when_behind: WhenBehind,
}

/// Answer to reads of a mirror that is behind etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenBehind {
    /// Forwarded, within the bounds
    Forward,
    /// Refused with Unavailable, so that etcd gets none of them
    Fail,
}
