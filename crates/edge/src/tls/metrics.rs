//! Metrics of TLS: handshakes with clients, and the files of both sides.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use rangecache_base::telemetry::metrics::{Counter, Gauge, metric_group};

metric_group! {
    /// Handshakes with clients, and certificate files. `side` is `clients` or `etcd`.
    pub struct TlsMetrics {
        /// TLS handshakes of clients in progress or waiting, of clients that have sent nothing, too
        ///
        /// Useful when: it stays high: clients connect and stop, or more connect than `--tls-max-handshakes`
        /// are computed
        pub handshaking: Gauge = "rangecache_tls_handshaking";
        /// TLS handshakes with clients by `result`
        ///
        /// Useful when: clients cannot connect
        handshakes[result]: Counter = "rangecache_tls_handshakes_total", from_zero = ["ok", "refused", "timed_out"];
        /// When the first certificate or CA of a file expires, or its revocation list is due, by `side` and
        /// `file`, in seconds since 1970
        ///
        /// Useful when: less than some weeks are left
        not_after_seconds[side, file]: Gauge = "rangecache_tls_not_after_timestamp_seconds";
        /// Reloads of replaced TLS files by `side` and `result`
        ///
        /// Useful when: `failed` grows
        reloads[side, result]: Counter = "rangecache_tls_reloads_total",
            from_zero = [("clients", "ok"), ("clients", "failed"), ("etcd", "ok"), ("etcd", "failed")];
        /// Expiry of each file by side and flag, in seconds since 1970.
        files: Mutex<BTreeMap<(&'static str, &'static str), i64>>;
    }
}

impl TlsMetrics {
    /// Counts a client's handshake.
    pub fn record_handshake(&self, result: &'static str) {
        self.handshakes.of(result).inc();
    }

    /// Counts a reload of the files of `side`.
    pub fn record_reload(&self, side: &'static str, result: &'static str) {
        self.reloads.of((side, result)).inc();
    }

    /// Sets the expiry of a file, in seconds since 1970.
    pub fn set_not_after(&self, side: &'static str, file: &'static str, seconds: i64) {
        self.not_after_seconds.of((side, file)).set(seconds);
        self.files.lock().insert((side, file), seconds);
    }

    /// Expiry of each file by side and flag, in seconds since 1970.
    #[must_use]
    pub fn not_after(&self) -> Vec<((&'static str, &'static str), i64)> {
        let files = self.files.lock();
        files.iter().map(|(file, seconds)| (*file, *seconds)).collect()
    }
}
