//! Prefixes of the mirrored keys: their sizes, and how often they are read, written and watched. Determined again when
//! they are asked for, at most every few seconds.

use std::{collections::HashMap, sync::Arc, time::Duration};

use etcd_store::cache::Summary;
use parking_lot::Mutex;
use rangecache_base::telemetry::prefixes::PrefixCounts;
use rangecache_mirror::{Mirrors, prefix_sizes};
use serde::Serialize;
use tokio::time::Instant;

use super::{memory::prefix_size, metrics::ShownMetrics};

/// Shortest time between two determinations.
const INTERVAL: Duration = Duration::from_secs(5);
/// Longest name that is shown, in characters.
const MAX_NAME_CHARS: usize = 64;
/// Cost of a read or an event, in bytes.
const COST_BYTES: f64 = 65_536.0;

/// Figures of one prefix. Rates are those between the last two determinations.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PrefixStatus {
    /// The prefix; `others` for keys without one.
    pub(crate) prefix: String,
    #[serde(flatten, serialize_with = "prefix_size")]
    pub(crate) size: Summary,
    pub(crate) reads_per_second: f64,
    pub(crate) writes_per_second: f64,
    pub(crate) watches_per_second: f64,
    #[serde(skip)]
    counts: PrefixCounts,
}

impl PrefixStatus {
    /// The figure that prefixes are sorted by.
    #[allow(clippy::cast_precision_loss, reason = "costs show magnitudes")]
    fn cost(&self) -> f64 {
        self.size.encoded_bytes as f64 + (self.reads_per_second + self.writes_per_second) * COST_BYTES
    }
}

/// The prefixes that cost most.
#[derive(Debug)]
pub(super) struct Prefixes {
    /// Their greatest number (`--prefix-metrics-top`).
    top: usize,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    at: Option<Instant>,
    counts: HashMap<Vec<u8>, PrefixCounts>,
    found: Arc<Vec<PrefixStatus>>,
}

impl Prefixes {
    pub(super) fn new(top: u32) -> Prefixes {
        Prefixes {
            top: top as usize,
            last: Mutex::default(),
        }
    }

    /// The prefixes that cost most, the most costly first.
    pub(super) fn top(&self, mirrors: &Mirrors, metrics: &ShownMetrics) -> Arc<Vec<PrefixStatus>> {
        let mut last = self.last.lock();
        let now = Instant::now();
        let since = last.at.map(|at| now.duration_since(at));
        if self.top == 0 || since.is_some_and(|since| since < INTERVAL) {
            return Arc::clone(&last.found);
        }
        let counters = &metrics.prefixes.counters;
        let sizes = prefix_sizes(mirrors.all());
        counters.replace(
            sizes
                .keys()
                .map(|prefix| &prefix[..])
                .filter(|prefix| !prefix.is_empty()),
        );
        let mut counts = HashMap::new();
        let mut found: Vec<_> = sizes
            .into_iter()
            .map(|(prefix, size)| {
                let now = counters.counts(&prefix);
                let before = last.counts.get(&prefix).copied().unwrap_or_default();
                let rate = |now: u64, before: u64| rate(now.saturating_sub(before), since);
                let status = PrefixStatus {
                    prefix: name(&prefix),
                    size,
                    reads_per_second: rate(now.reads, before.reads),
                    writes_per_second: rate(now.writes, before.writes),
                    watches_per_second: rate(now.watches, before.watches),
                    counts: now,
                };
                counts.insert(prefix, now);
                status
            })
            .collect();
        found.sort_by(|one, other| other.cost().total_cmp(&one.cost()));
        found.truncate(self.top);
        *last = Last {
            at: Some(now),
            counts,
            found: Arc::new(found),
        };
        Arc::clone(&last.found)
    }

    /// Exports the prefixes that cost most as metrics.
    pub(super) fn export(&self, mirrors: &Mirrors, metrics: &ShownMetrics) {
        let top = self.top(mirrors, metrics);
        let prefixes = top
            .iter()
            .map(|status| (&*status.prefix, status.size, status.counts));
        metrics.prefixes.export(prefixes);
    }
}

/// A prefix as it is shown.
fn name(prefix: &[u8]) -> String {
    if prefix.is_empty() {
        return "others".to_owned();
    }
    let text = String::from_utf8_lossy(prefix);
    match text.char_indices().nth(MAX_NAME_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}

#[allow(clippy::cast_precision_loss, reason = "rates show magnitudes")]
fn rate(added: u64, since: Option<Duration>) -> f64 {
    since.map_or(0.0, |since| added as f64 / since.as_secs_f64())
}
