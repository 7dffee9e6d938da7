//! Metrics of the mirrors, and of what proves a read of them fresh and allowed.

use std::time::Duration;

use etcd_store::cache::{Summary, TreeMemory};
use parking_lot::Mutex;
use rangecache_base::telemetry::{
    Reason,
    metrics::{Counter, FloatCounter, FloatGauge, Gauge, Latency, gauge, metric_group},
    prefixes::{PrefixCounters, PrefixCounts},
};

/// Causes of loads whose counters begin at zero.
fn load_causes() -> impl Iterator<Item = &'static str> {
    let own = [
        "start",
        "load_failed",
        "may_fit",
        "compacted",
        "unproven",
        "malformed",
    ];
    let behind = Reason::ALL.iter().filter(|reason| reason.is_behind());
    own.into_iter().chain(behind.map(|reason| reason.as_str()))
}

/// Values of the label `source` of what loads did not have to read.
pub const ADOPTION_SOURCES: [&str; 3] = ["memory", "neighbour", "image"];

metric_group! {
    /// Metrics of all mirrors, by the mirror's name in the log.
    pub struct MirrorsMetrics by mirror;
    /// Gauges and counters of one mirror.
    pub struct MirrorMetrics {
        /// 1 while reads may be answered from the mirror, otherwise 0
        ///
        /// Useful when: reads are forwarded
        pub in_service: Gauge = "rangecache_mirror_in_service";
        /// Revision up to which the mirror has every event
        ///
        /// Useful when: comparing rangecaches
        pub revision: Gauge = "rangecache_mirror_revision";
        /// Revisions that the mirror was behind at the last quorum check
        ///
        /// Useful when: reads wait
        pub lag_revisions: Gauge = "rangecache_mirror_lag_revisions";
        /// Age of the oldest revision reported by a quorum check that the mirror had not reached at the last
        /// one
        ///
        /// Useful when: it grows: the feed is behind
        pub lag_seconds: FloatGauge = "rangecache_mirror_lag_seconds";
        /// Keys in the mirror
        ///
        /// Useful when: sizing
        pub keys: Gauge = "rangecache_mirror_keys";
        /// Memory of the mirror, history included
        ///
        /// Useful when: sizing
        pub memory_bytes: Gauge = "rangecache_mirror_memory_bytes";
        /// Memory of the mirror's past revisions, a part of `rangecache_mirror_memory_bytes`
        ///
        /// Useful when: sizing
        pub history_bytes: Gauge = "rangecache_mirror_history_bytes";
        /// Memory of packed keys and values (`--cache-pack`), a part of `rangecache_mirror_memory_bytes`
        ///
        /// Useful when: sizing
        pub packed_bytes: Gauge = "rangecache_mirror_packed_bytes";
        /// Bytes of the packed keys and values as etcd sends them; divided by `rangecache_mirror_packed_bytes`, what packing
        /// saves
        ///
        /// Useful when: sizing
        pub packed_encoded_bytes: Gauge = "rangecache_mirror_packed_encoded_bytes";
        /// Memory of the tree that finds keys, a part of `rangecache_mirror_memory_bytes`
        ///
        /// Useful when: sizing
        pub index_bytes: Gauge = "rangecache_mirror_index_bytes";
        /// Bytes of keys and values, as etcd sends them, that were packed or unpacked while in use; `to` is `packed` or
        /// `plain`. Those that a load packs are not counted
        ///
        /// Useful when: it grows all the time: memory is too scarce, and packing costs CPU
        pub repacked_bytes[to]: Counter = "rangecache_mirror_repacked_bytes_total", from_zero = ["packed", "plain"];
        /// Bytes of keys and values, as etcd sends them, whose values only etcd has, because `--cache-max-bytes` is too small for
        /// all; reads of these values are forwarded
        ///
        /// Useful when: `forwarded{values_not_held}`
        pub not_held_bytes: Gauge = "rangecache_mirror_not_held_bytes";
        /// Memory of replaced entries that only responses in flight keep; counts against `--cache-max-bytes`
        ///
        /// Useful when: slow readers
        pub held_bytes: Gauge = "rangecache_mirror_held_bytes";
        /// Oldest revision that can be answered from the mirror
        ///
        /// Useful when: `forwarded{history_gone}`
        pub oldest_revision: Gauge = "rangecache_mirror_oldest_revision";
        /// Keys read by the current load, or by the last one
        ///
        /// Useful when: a start takes long
        pub load_keys: Gauge = "rangecache_mirror_load_keys";
        /// Bytes read by the current load, or by the last one
        ///
        /// Useful when: the mirror does not fit
        pub load_bytes: Gauge = "rangecache_mirror_load_bytes";
        /// Loads of a mirror by `reason`
        ///
        /// Useful when: more than starts: see
        /// [RangecacheMirrorReloads](../runbooks.md#rangecachemirrorreloads)
        pub reloads[reason]: Counter = "rangecache_mirror_reloads_total", from_zero = load_causes();
        /// Loads that read only what differs, by `source`, which had the rest: `memory`, what the mirror had before it fell
        /// behind a compaction, `neighbour` (`--warm-from`), or `image` (`--image-dir`)
        ///
        /// Useful when: reloads cost etcd much
        pub adopted[source]: Counter = "rangecache_mirror_adopted_total", from_zero = ADOPTION_SOURCES;
        /// Bytes of keys and values that these loads did not have to read
        ///
        /// Useful when: reloads cost etcd much
        pub adopted_bytes[source]: Counter = "rangecache_mirror_adopted_bytes_total", from_zero = ADOPTION_SOURCES;
        /// Bytes of the mirror's image on the disk (`--image-dir`); 0 without one
        ///
        /// Useful when: sizing the disk
        pub image_bytes: Gauge = "rangecache_mirror_image_bytes";
        /// Time at which the image had what the mirror had, in seconds since 1970; 0 without one
        ///
        /// Useful when: a start reads more from etcd than expected
        pub image_written: Gauge = "rangecache_mirror_image_timestamp_seconds";
        /// 1 while the image cannot be written, otherwise 0
        ///
        /// Useful when: the log says why; the next start reads more from etcd
        pub image_failed: Gauge = "rangecache_mirror_image_failed";
        /// Events applied
        ///
        /// Useful when: estimating etcd's write rate
        pub events: Counter = "rangecache_mirror_events_total";
        /// Events dropped because the mirror already had their revision
        ///
        /// Useful when: it grows by more than a few at each resume
        pub events_fenced: Counter = "rangecache_mirror_events_fenced_total";
        /// Progress requests sent on feeds
        ///
        /// Useful when: reads wait
        pub progress_requests: Counter = "rangecache_mirror_progress_requests_total";
        /// Time that reads answered from the mirror waited for their proof
        ///
        /// Useful when: one mirror of several is slow
        pub read_wait: Latency = "rangecache_mirror_read_wait_seconds";
        /// Verifications of the mirror by `result`
        ///
        /// Useful when: `failed` grows
        pub verifications[result]: Counter = "rangecache_verify_rounds_total",
            from_zero = ["same", "out_of_service", "different", "failed"];
        /// Verifications that found the mirror to differ from etcd
        ///
        /// Useful when: **alert on any increase**
        pub mismatches: Counter = "rangecache_verify_mismatch_total";
    }
}

impl MirrorMetrics {
    /// Records the memory of a mirror, and the part of it that history takes, in bytes, and what takes that of its tree.
    pub(super) fn record_memory(&self, (all, history): (u64, u64), tree: TreeMemory) {
        self.memory_bytes.set(gauge(all));
        self.history_bytes.set(gauge(history));
        self.packed_bytes.set(gauge(tree.packed));
        self.packed_encoded_bytes.set(gauge(tree.packed_encoded));
        self.index_bytes.set(gauge(tree.nodes));
        self.not_held_bytes.set(gauge(tree.not_held));
    }

    /// Whether the mirror holds every value.
    pub(super) fn has_all_values(&self) -> bool {
        self.not_held_bytes.get() == 0
    }
}

/// Every reason for which a load or a read went to etcd without RangeStream; docs/consistency.md explains them.
pub const STREAM_FALLBACKS: [&str; 16] = [
    "off",
    "version",
    "unimplemented",
    "shape",
    "busy",
    "budget",
    "too_large",
    "late",
    "broken",
    "malformed",
    "refused",
    "no_endpoint",
    "auth",
    "not_proven",
    "history_replaced",
    "compacted",
];

metric_group! {
    /// All mirrors together.
    pub(super) struct RoomMetrics {
        /// Bytes that verifications read from etcd
        ///
        /// Useful when: etcd's load matters
        pub(super) verify_bytes: Counter = "rangecache_verify_bytes_total";
        /// 1 while an operator has switched memory off and etcd answers everything
        ///
        /// See [switching memory off](../operations.md#switching-memory-off)
        ///
        /// Useful when: 1 for longer than the incident lasts
        pub(super) forward_all: Gauge = "rangecache_forward_all";
    }
}

metric_group! {
    /// Loads of mirrors, and reads of clients, that could not use RangeStream.
    pub struct StreamFallbacks {
        /// Loads and reads that could not use etcd's RangeStream, by `reason`
        ///
        /// Useful when: etcd is 3.7 and it grows
        fallbacks[reason]: Counter = "rangecache_range_stream_fallback_total", from_zero = STREAM_FALLBACKS;
    }
}

impl StreamFallbacks {
    /// Counts a load or a read.
    pub fn record(&self, reason: &'static str) {
        self.fallbacks.of(reason).inc();
    }
}

metric_group! {
    /// Prefixes that cost most at the last scrape.
    pub struct PrefixMetrics {
        /// Mirrored keys below the prefixes that cost most, by `prefix`: the first two parts of keys, such as
        /// `/registry/pods/`, or the first part; `others` for keys without one
        ///
        /// `--prefix-metrics-top` sets their number
        ///
        /// Useful when: sizing: what takes the memory
        keys[prefix]: Gauge = "rangecache_prefix_keys";
        /// Bytes of the mirrored keys and values below these prefixes
        ///
        /// Useful when: sizing
        bytes[prefix]: Gauge = "rangecache_prefix_bytes";
        /// The part of `rangecache_prefix_bytes` whose values only etcd has
        ///
        /// Useful when: `forwarded{values_not_held}`
        not_held_bytes[prefix]: Gauge = "rangecache_prefix_not_held_bytes";
        /// Ranges and RangeStreams below these prefixes, since the scrape that first found them
        ///
        /// Useful when: to see what is read
        reads[prefix]: Counter = "rangecache_prefix_reads_total";
        /// Reads among these that had a proof
        ///
        /// Useful when: with `rangecache_prefix_read_wait_seconds_total`
        proven_reads[prefix]: Counter = "rangecache_prefix_proven_reads_total";
        /// Time that these reads waited for their proof; divided by `rangecache_prefix_proven_reads_total`, the mean
        ///
        /// Useful when: reads of one resource wait
        read_wait[prefix]: FloatCounter = "rangecache_prefix_read_wait_seconds_total";
        /// Events below these prefixes, since they were found
        ///
        /// Useful when: to see what is written
        writes[prefix]: Counter = "rangecache_prefix_writes_total";
        /// Watchers created below these prefixes, since they were found
        ///
        /// Useful when: to see what is watched
        watches[prefix]: Counter = "rangecache_prefix_watches_total";
        /// Counts of all prefixes.
        pub counters: PrefixCounters;
        /// Excludes other scrapes while series are replaced.
        exporting: Mutex<()>;
    }
}

impl PrefixMetrics {
    /// Replaces the exported prefixes by these: name, size and counts.
    pub fn export<'a>(&self, prefixes: impl Iterator<Item = (&'a str, Summary, PrefixCounts)>) {
        let _exporting = self.exporting.lock();
        self.keys.clear();
        self.bytes.clear();
        self.not_held_bytes.clear();
        self.reads.clear();
        self.proven_reads.clear();
        self.read_wait.clear();
        self.writes.clear();
        self.watches.clear();
        for (prefix, size, counts) in prefixes {
            let prefix = || prefix.to_owned();
            self.keys.of(prefix()).set(gauge(size.count));
            self.bytes.of(prefix()).set(gauge(size.encoded_bytes));
            self.not_held_bytes.of(prefix()).set(gauge(size.not_held_bytes));
            self.reads.of(prefix()).inc_by(counts.reads);
            self.proven_reads.of(prefix()).inc_by(counts.proven_reads);
            self.read_wait.of(prefix()).inc_by(counts.wait.as_secs_f64());
            self.writes.of(prefix()).inc_by(counts.writes);
            self.watches.of(prefix()).inc_by(counts.watches);
        }
    }
}

/// Why the revision that a response shows its client is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// The message is compressed.
    Compressed,
    /// The header is not encoded as any known etcd encodes it.
    Header,
    /// JSON without a header that can be read, or data of a WebSocket.
    Json,
    /// The response is of another cluster, or of another history than the one in which its call began.
    History,
}

impl Unreadable {
    const ALL: [Unreadable; 4] = [
        Unreadable::Compressed,
        Unreadable::Header,
        Unreadable::Json,
        Unreadable::History,
    ];

    fn label(self) -> &'static str {
        match self {
            Unreadable::Compressed => "compressed",
            Unreadable::Header => "header",
            Unreadable::Json => "json",
            Unreadable::History => "history",
        }
    }
}

metric_group! {
    /// Messages and pieces of responses whose revision could not be read.
    pub struct UnreadableMetrics {
        /// Forwarded messages whose revision could not be read, by `cause`: `compressed`, `header`, `json`,
        /// `history`
        ///
        /// `header`: an encoding that no known etcd has; `json`: WebSockets, and text without a header;
        /// `history`: of another cluster or history. Until the next quorum check serializable reads are
        /// proven, too
        ///
        /// Useful when: `header` grows: etcd is newer than this rangecache
        messages[cause]: Counter = "rangecache_unreadable_responses_total",
            from_zero = Unreadable::ALL.map(Unreadable::label);
    }
}

impl UnreadableMetrics {
    /// Counts a message.
    pub fn record(&self, cause: Unreadable) {
        self.messages.of(cause.label()).inc();
    }
}

/// Quorum checks and the reads that they served, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuorumChecks {
    /// Checks that proved a revision.
    pub proven: u64,
    /// Checks that did not.
    pub failed: u64,
    /// Reads that waited for a check.
    pub reads: u64,
}

/// Value of the label `result` of a quorum check.
fn check_label(result: Result<(), Reason>) -> &'static str {
    result.map_or_else(Reason::as_str, |()| "proven")
}

metric_group! {
    /// Quorum checks and authorizations.
    pub struct FreshnessMetrics {
        /// Quorum checks by `result`
        ///
        /// Useful when: results other than `proven` grow
        checks[result]: Counter = "rangecache_quorum_checks_total",
            from_zero = [Ok(()), Err(Reason::CheckFailed), Err(Reason::NotFresh), Err(Reason::Auth)].map(check_label);
        /// Reads served by quorum checks; divided by the checks: reads per check
        ///
        /// Useful when: etcd receives too many checks
        check_reads: Counter = "rangecache_quorum_check_reads_total";
        /// Round trip of quorum checks
        ///
        /// Useful when: to separate etcd's and the network's share of a read
        check_duration: Latency = "rangecache_quorum_check_duration_seconds";
        /// Calls that asked etcd whether a caller may read a range, by `result`
        ///
        /// Useful when: etcd's auth is on
        authorizations[result]: Counter = "rangecache_authorizations_total",
            from_zero = ["granted", Reason::Auth.as_str(), Reason::CheckFailed.as_str()];
        /// Round trip of authorizations
        ///
        /// Useful when: etcd's auth is on
        authorization_duration: Latency = "rangecache_authorization_duration_seconds";
    }
}

impl FreshnessMetrics {
    /// Counts one quorum check that served `reads` reads.
    pub fn record_check(&self, result: Result<(), Reason>, reads: u64, took: Duration) {
        self.checks.of(check_label(result)).inc();
        self.check_reads.inc_by(reads);
        self.check_duration.observe(took);
    }

    /// Quorum checks so far, and the reads that they served.
    #[must_use]
    pub fn checks(&self) -> QuorumChecks {
        let count = |result| {
            self.checks
                .get(check_label(result))
                .map_or(0, |counter| counter.get())
        };
        QuorumChecks {
            proven: count(Ok(())),
            failed: Reason::ALL.iter().map(|reason| count(Err(*reason))).sum(),
            reads: self.check_reads.get(),
        }
    }

    /// Counts one authorization by etcd.
    pub fn record_authorization(&self, result: &'static str, took: Duration) {
        self.authorizations.of(result).inc();
        self.authorization_duration.observe(took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_read_back_by_result() {
        let metrics = FreshnessMetrics::default();
        metrics.record_check(Ok(()), 5, Duration::ZERO);
        metrics.record_check(Err(Reason::CheckFailed), 2, Duration::ZERO);
        metrics.record_check(Err(Reason::Auth), 1, Duration::ZERO);
        let expected = QuorumChecks {
            proven: 1,
            failed: 2,
            reads: 8,
        };
        assert_eq!(metrics.checks(), expected);
    }
}
