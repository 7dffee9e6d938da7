//! Size and rate of the pages in which a large range is read: by loads, by `doctor`, and for a RangeStream that is
//! served from pages; and the pauses of reads in the background.

use std::time::Duration;

use tokio::time::Instant;

#[cfg(debug_assertions)]
use rangecache_base::simulated;

/// Number of keys on a first page, when the size of values is unknown.
const FIRST_PAGE_KEYS: i64 = 64;
/// Largest number of keys in a page: etcd copies the metadata of each.
const MAX_KEYS: i64 = 10_000;

/// Largest number of keys in a page of this process.
fn max_keys() -> i64 {
    #[cfg(debug_assertions)]
    if let Some(keys) = simulated::max_page_keys() {
        return keys;
    }
    MAX_KEYS
}

/// Limit for a first page.
#[must_use]
pub fn first_page_limit() -> i64 {
    FIRST_PAGE_KEYS.min(max_keys())
}

/// Limit for a page of about `target_bytes` whose entries take `mean_bytes` each: 1 to 10,000 keys.
#[must_use]
pub fn page_limit(target_bytes: u64, mean_bytes: u64) -> i64 {
    i64::try_from(target_bytes / mean_bytes.max(1))
        .unwrap_or(i64::MAX)
        .clamp(1, max_keys())
}

/// Waits until `bytes` read since `began` are at most `bytes_per_second` on average.
pub async fn pace(began: Instant, bytes: u64, bytes_per_second: f64) {
    #[allow(clippy::cast_precision_loss, reason = "fewer than 2^53 bytes")]
    let due = Duration::from_secs_f64(bytes as f64 / bytes_per_second);
    tokio::time::sleep_until(began + due).await;
}

/// Highest rate of a reader in the background, for which no client waits.
const BYTES_PER_SECOND: u64 = 8 << 20;
/// Pause after each of its reads, in multiples of etcd's response time: it takes at most a tenth of one core of etcd.
const REST: u32 = 9;

/// Pause of a reader in the background after a read of `bytes` to which etcd has responded in `took`.
#[must_use]
pub fn pause_after(bytes: u64, took: Duration) -> Duration {
    let paced = Duration::from_millis(bytes * 1000 / BYTES_PER_SECOND);
    paced.max(took * REST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_limit_is_between_one_and_ten_thousand_keys() {
        assert_eq!(page_limit(4 << 20, 1 << 10), 4096);
        assert_eq!(page_limit(4 << 20, 8 << 20), 1);
        assert_eq!(page_limit(4 << 20, 1), MAX_KEYS);
        assert_eq!(page_limit(4 << 20, 0), MAX_KEYS);
    }

    #[tokio::test(start_paused = true)]
    async fn pace_waits_for_the_mean_rate_and_no_longer() {
        let began = Instant::now();
        pace(began, 500, 1000.0).await;
        assert_eq!(began.elapsed(), Duration::from_millis(500));
        tokio::time::advance(Duration::from_secs(1)).await;
        let before = Instant::now();
        pace(began, 1000, 1000.0).await;
        assert_eq!(before.elapsed(), Duration::ZERO);
    }
}
