//! Pace of reads in the background, which no client waits for. A leaf.

use std::time::Duration;

/// Highest rate of such a reader.
const BYTES_PER_SECOND: u64 = 8 << 20;
/// Pause after each read, in multiples of etcd's response time: a reader takes at most a tenth of one core of etcd.
const REST: u32 = 9;

/// Pause after a read of `bytes` to which etcd has responded in `took`.
pub(super) fn pause_after(bytes: u64, took: Duration) -> Duration {
    let paced = Duration::from_millis(bytes * 1000 / BYTES_PER_SECOND);
    paced.max(took * REST)
}
