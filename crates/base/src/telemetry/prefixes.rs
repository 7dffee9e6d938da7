//! Reads, writes and watches by prefix. Only prefixes that a scrape has found are counted, in a bounded number.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use std::{collections::HashMap, time::Duration};

use arc_swap::ArcSwap;

/// Counters of the known prefixes. Cloning it copies a reference.
#[derive(Clone, Debug, Default)]
pub struct PrefixCounters(Arc<ArcSwap<Vec<Arc<Counters>>>>);

#[derive(Debug)]
struct Counters {
    prefix: Box<[u8]>,
    reads: AtomicU64,
    proven_reads: AtomicU64,
    wait_nanos: AtomicU64,
    writes: AtomicU64,
    watches: AtomicU64,
}

/// Counts of one prefix since it was first found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    /// Ranges and RangeStreams.
    pub reads: u64,
    /// Reads among them that had a proof.
    pub proven_reads: u64,
    /// Time that these waited for it.
    pub wait: Duration,
    /// Events.
    pub writes: u64,
    /// Watchers that were created.
    pub watches: u64,
}

impl PrefixCounters {
    /// Counts a read below a prefix.
    pub fn record_read(&self, prefix: &[u8]) {
        self.with(prefix, |counters| counters.reads.fetch_add(1, Relaxed));
    }

    /// Counts a read below a prefix that has waited for its proof.
    pub fn record_wait(&self, prefix: &[u8], waited: Duration) {
        let nanos = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        self.with(prefix, |counters| {
            counters.proven_reads.fetch_add(1, Relaxed);
            counters.wait_nanos.fetch_add(nanos, Relaxed);
        });
    }

    /// Counts an event below a prefix.
    pub fn record_write(&self, prefix: &[u8]) {
        self.with(prefix, |counters| counters.writes.fetch_add(1, Relaxed));
    }

    /// Counts a watcher below a prefix.
    pub fn record_watch(&self, prefix: &[u8]) {
        self.with(prefix, |counters| counters.watches.fetch_add(1, Relaxed));
    }

    /// Whether no prefix is counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.load().is_empty()
    }

    /// Counts of a prefix; 0 if it is not known.
    #[must_use]
    pub fn counts(&self, prefix: &[u8]) -> PrefixCounts {
        self.with(prefix, |counters| PrefixCounts {
            reads: counters.reads.load(Relaxed),
            proven_reads: counters.proven_reads.load(Relaxed),
            wait: Duration::from_nanos(counters.wait_nanos.load(Relaxed)),
            writes: counters.writes.load(Relaxed),
            watches: counters.watches.load(Relaxed),
        })
        .unwrap_or_default()
    }

    /// Reads of each known prefix.
    #[must_use]
    pub fn reads(&self) -> HashMap<Vec<u8>, u64> {
        let known = self.0.load();
        let of = |counters: &Arc<Counters>| (counters.prefix.to_vec(), counters.reads.load(Relaxed));
        known.iter().map(of).collect()
    }

    /// Counts exactly these prefixes from now on; those that were known keep their counts.
    pub fn replace<'a>(&self, prefixes: impl Iterator<Item = &'a [u8]>) {
        let known = self.0.load();
        let mut counters: Vec<_> = prefixes
            .map(|prefix| match find(&known, prefix) {
                Some(counters) => Arc::clone(counters),
                None => Arc::new(Counters {
                    prefix: prefix.into(),
                    reads: AtomicU64::new(0),
                    proven_reads: AtomicU64::new(0),
                    wait_nanos: AtomicU64::new(0),
                    writes: AtomicU64::new(0),
                    watches: AtomicU64::new(0),
                }),
            })
            .collect();
        counters.sort_by(|one, other| one.prefix.cmp(&other.prefix));
        self.0.store(Arc::new(counters));
    }

    fn with<R>(&self, prefix: &[u8], change: impl FnOnce(&Counters) -> R) -> Option<R> {
        let known = self.0.load();
        find(&known, prefix).map(|counters| change(counters))
    }
}

fn find<'a>(known: &'a [Arc<Counters>], prefix: &[u8]) -> Option<&'a Arc<Counters>> {
    let at = known.binary_search_by(|counters| (*counters.prefix).cmp(prefix));
    known.get(at.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_that_stay_keep_their_counts_and_unknown_ones_are_not_counted() {
        let counters = PrefixCounters::default();
        counters.record_read(b"/a/b/");
        assert!(counters.is_empty());
        counters.replace([&b"/b/c/"[..], b"/a/b/"].into_iter());
        counters.record_read(b"/a/b/");
        counters.record_wait(b"/a/b/", Duration::from_millis(3));
        counters.record_wait(b"/a/b/", Duration::from_millis(4));
        counters.record_write(b"/a/b/");
        counters.record_watch(b"/b/c/");
        counters.record_read(b"/x/y/");
        counters.replace([&b"/a/b/"[..], b"/x/y/"].into_iter());
        let counts = |prefix: &[u8]| counters.counts(prefix);
        let expected = PrefixCounts {
            reads: 1,
            proven_reads: 2,
            wait: Duration::from_millis(7),
            writes: 1,
            watches: 0,
        };
        assert_eq!(counts(b"/a/b/"), expected);
        assert_eq!(counts(b"/b/c/"), PrefixCounts::default());
        assert_eq!(counts(b"/x/y/"), PrefixCounts::default());
    }
}
