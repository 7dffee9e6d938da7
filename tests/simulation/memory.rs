//! The judge of memory: what rangecache holds for watches and calls is within its budgets, and nothing once no client is
//! left.

use std::time::Duration;

use testkit::metrics::Metrics;
use tokio::time::{Instant, sleep};

use crate::known::Known;
use crate::proxy::{Rangecache, Settings};

/// Time until what no client uses is given back: lists that may be continued are kept for a while.
const RELEASED_TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes that rangecache holds for calls, by kind.
const BUFFERS: &str = "rangecache_buffer_used_bytes";
/// Bytes that it holds for watches, by kind.
const WATCHES: &str = "rangecache_watch_bytes";

/// Judges what rangecache holds while clients use it.
pub fn judge(known: &Known, settings: &Settings, rangecache: &Rangecache) {
    let metrics = rangecache.metrics();
    // What streams and topics grow by counts without a question, and may exceed the bound by as much.
    let held = metrics.sum(WATCHES);
    let max = 2.0 * settings.watch_max_bytes as f64;
    if held > max {
        known.violation(format!(
            "watches hold {held} bytes, more than {max}: {:?}",
            of(&metrics, WATCHES)
        ));
    }
    for (kind, used) in of(&metrics, BUFFERS) {
        let limit = metrics.sum_with_label("rangecache_buffer_limit_bytes", &kind);
        if used > limit {
            known.violation(format!("{kind}: {used} bytes are buffered, more than {limit}"));
        }
    }
}

/// Waits until rangecache holds nothing for clients, all of which are gone.
pub async fn judge_end(known: &Known, settings: &Settings, rangecache: &Rangecache) {
    let deadline = Instant::now() + RELEASED_TIMEOUT;
    loop {
        judge(known, settings, rangecache);
        let metrics = rangecache.metrics();
        let held: Vec<_> = [BUFFERS, WATCHES]
            .iter()
            .flat_map(|name| of(&metrics, name))
            .filter(|(_, bytes)| *bytes > 0.0)
            .collect();
        if held.is_empty() {
            return;
        }
        if Instant::now() > deadline {
            return known.violation(format!("without clients, {held:?} bytes are held"));
        }
        sleep(Duration::from_secs(1)).await;
    }
}

/// Values of a metric, each with its labels.
fn of(metrics: &Metrics, name: &str) -> Vec<(String, f64)> {
    let samples = metrics.0.iter().filter_map(|(sample, value)| {
        let (of, labels) = sample.split_once('{')?;
        (of == name).then(|| (labels.trim_end_matches('}').to_owned(), *value))
    });
    samples.collect()
}
