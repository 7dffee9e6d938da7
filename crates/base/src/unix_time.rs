//! The present time in seconds since 1970, as metrics, certificates and files have it. A leaf.

use std::time::SystemTime;

/// Seconds since 1970; 0 with a clock that is set to before.
#[must_use]
pub fn now_seconds() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX))
}
