//! Metrics of what is bounded: buffered bytes, turns, shares of clients.

use rangecache_base::telemetry::metrics::{Counter, Gauge, gauge, metric_group};

use super::line::Exceeded;

/// Every kind of buffered bytes.
const KINDS: [&str; 6] = ["request", "forwarded", "sending", "converted", "shared", "series"];

metric_group! {
    /// Buffered bytes (`--buffer-max-bytes`) by kind.
    pub struct BufferMetrics by kind;
    /// Metrics of one kind of buffered bytes.
    #[derive(Default)]
    pub struct BufferKindMetrics {
        /// Bytes held for calls, by `kind`; bounded by `--buffer-max-bytes`
        ///
        /// See [buffers](flags.md#buffers)
        ///
        /// Useful when: near `--buffer-max-bytes`
        pub used: Gauge = "rangecache_buffer_used_bytes";
        /// Share of `--buffer-max-bytes`, by `kind`; `request`, `forwarded` and `sending` have one share
        /// together
        ///
        /// Useful when: next to the bytes in use
        limit: Gauge = "rangecache_buffer_limit_bytes";
        /// Calls that wait for buffered bytes to be released, by `kind`
        ///
        /// Useful when: it stays above 0
        pub waiting: Gauge = "rangecache_buffer_waiting";
        /// Calls whose bytes did not fit the share of their `kind`
        ///
        /// Useful when: a client does not read, or does not complete its requests
        pub refused: Counter = "rangecache_buffer_refused_total";
    }
}

impl BufferMetrics {
    /// The metrics of `kind`, whose share is `limit_bytes`.
    #[must_use]
    pub fn kind(&self, kind: &'static str, limit_bytes: u64) -> BufferKindMetrics {
        let metrics = self.of(kind);
        metrics.limit.set(gauge(limit_bytes));
        metrics
    }

    /// Bytes of all kinds that are held now.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        let used = KINDS.into_iter().filter_map(|kind| self.used.get(kind));
        used.filter_map(|used| u64::try_from(used.get()).ok()).sum()
    }
}

impl BufferKindMetrics {
    /// Metrics of a budget that `refused` and `waiting` alone show.
    #[must_use]
    pub fn of_budget(used: Gauge, waiting: Gauge, refused: Counter) -> BufferKindMetrics {
        BufferKindMetrics {
            used,
            waiting,
            refused,
            ..BufferKindMetrics::default()
        }
    }
}

metric_group! {
    /// Calls that take turns to be sent to etcd.
    pub struct SlotsMetrics {
        /// Large reads in flight to etcd
        ///
        /// Useful when: it stays at `--forward-max-large`
        large: Gauge = "rangecache_forward_large";
        /// Large reads waiting for their turn or for an identical read
        ///
        /// Useful when: see [RangecacheForwardQueueLong](../runbooks.md#rangecacheforwardqueuelong)
        large_waiting: Gauge = "rangecache_forward_waiting";
        /// Small reads, streams and new watches to which etcd has not responded yet
        ///
        /// Useful when: it stays at `--forward-max-small`
        small: Gauge = "rangecache_forward_small";
        /// Small reads, streams and new watches waiting for their turn
        ///
        /// Useful when: reads from etcd are slow
        small_waiting: Gauge = "rangecache_forward_small_waiting";
        /// Sorted and filtered reads that memory is answering
        ///
        /// Useful when: it stays at `--worker-threads`
        scans: Gauge = "rangecache_scans";
        /// Sorted and filtered reads of many keys waiting for their turn in memory
        ///
        /// Useful when: such reads are slow: see `/clients` for who makes them
        scans_waiting: Gauge = "rangecache_scans_waiting";
        /// Calls that got no turn, by `calls` (`large`, `small`, `scan`) and `reason`: `too_many_waiting`, `late` (30
        /// s without a deadline), `deadline` (the client's)
        ///
        /// Useful when: etcd cannot follow
        refused[calls, reason]: Counter = "rangecache_forward_refused_total", from_zero = [
            ("large", "too_many_waiting"), ("large", "late"), ("large", "deadline"),
            ("small", "too_many_waiting"), ("small", "late"), ("small", "deadline"),
            ("scan", "too_many_waiting"), ("scan", "late"), ("scan", "deadline"),
        ];
    }
}

impl SlotsMetrics {
    /// Large Ranges in flight to etcd, and those that wait for their turn or for an identical one.
    #[must_use]
    pub fn large(&self) -> SlotMetrics {
        self.of("large", &self.large, &self.large_waiting)
    }

    /// Small reads, streams and watches that etcd has not begun to answer, and those that wait for their turn.
    #[must_use]
    pub fn small(&self) -> SlotMetrics {
        self.of("small", &self.small, &self.small_waiting)
    }

    /// Reads for which memory looks at many entries, and those that wait for their turn.
    #[must_use]
    pub fn scans(&self) -> SlotMetrics {
        self.of("scan", &self.scans, &self.scans_waiting)
    }

    fn of(&self, calls: &'static str, in_flight: &Gauge, waiting: &Gauge) -> SlotMetrics {
        SlotMetrics {
            in_flight: in_flight.clone(),
            waiting: waiting.clone(),
            refused: ["too_many_waiting", "late", "deadline"]
                .map(|reason| self.refused.handle((calls, reason))),
        }
    }
}

/// Calls that take turns.
#[derive(Clone, Debug, Default)]
pub struct SlotMetrics {
    /// Calls in flight to etcd.
    pub in_flight: Gauge,
    /// Calls that wait.
    pub waiting: Gauge,
    /// Calls without a slot: because too many waited, too late, and after their deadline.
    refused: [Counter; 3],
}

impl SlotMetrics {
    /// Counts a call that got no slot.
    pub(super) fn record_refused(&self, cause: Exceeded) {
        let [waiting, late, deadline] = &self.refused;
        match cause {
            Exceeded::Bytes | Exceeded::Waiting => waiting.inc(),
            Exceeded::Late => late.inc(),
            Exceeded::Deadline => deadline.inc(),
        };
    }
}

metric_group! {
    /// Calls refused because their client has too many of their kind in flight.
    pub struct ShareMetrics {
        /// Calls refused because two of their client are in flight, by `limit`: `costly` (`Authenticate`, `Hash`, `HashKV`)
        ///
        /// See [fair shares](../operations.md#fair-shares)
        ///
        /// Useful when: a client is noisy: see `/clients`
        refused[limit]: Counter = "rangecache_client_share_refused_total",
            from_zero = ["costly"];
    }
}

impl ShareMetrics {
    /// Calls that are costly for etcd.
    #[must_use]
    pub fn costly(&self) -> SlotMetrics {
        let refused = self.refused.handle("costly");
        SlotMetrics {
            // Those whose deadline has expired are not refused.
            refused: [refused.clone(), refused, Counter::default()],
            ..SlotMetrics::default()
        }
    }
}

metric_group! {
    /// Connections of clients, by which calls are shared out.
    pub struct OpenConnections {
        /// Connections of clients, WebSockets included
        ///
        /// Useful when: near `--max-connections`
        pub open: Gauge = "rangecache_client_connections";
    }
}
