//! Files that are replaced while rangecache runs: certificates are short-lived, and must not need a restart.
//! Metrics of TLS: handshakes with clients, and the files of both sides.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rangecache_base::telemetry::metrics::{Counter, Gauge, metric_group};
use rangecache_base::{telemetry::Metrics, unix_time};
use tokio::{sync::watch, time::MissedTickBehavior};

use super::files::{FileError, Files};

/// A value built from files, with the times at which they expire.
pub(super) struct LoadedFiles<T> {
    pub(super) value: T,
    /// Kind of the file (`cert`, `ca`, `crl`), and its expiry in seconds since 1970.
    pub(super) expiries: Vec<(&'static str, i64)>,
}

type LoadFiles<T> = Box<dyn Fn(&Files) -> Result<LoadedFiles<T>, FileError> + Send + Sync>;

/// The value built from the last valid state of some files.
pub(super) struct Watched<T> {
    /// `etcd` or `clients`: the other side of the connections that use these files.
    side: &'static str,
    paths: Vec<(&'static str, PathBuf)>,
    load: LoadFiles<T>,
    current: ArcSwap<T>,
    /// Last state of the files, valid or not, or why they could not be read, so that each broken state is logged once.
    seen: Mutex<Result<u64, String>>,
    metrics: Arc<TlsMetrics>,
}

impl<T: Send + Sync + 'static> Watched<T> {
    /// Reads the files and builds the first value.
    pub(super) fn open(
        side: &'static str,
        paths: Vec<(&'static str, PathBuf)>,
        metrics: &Arc<Metrics>,
        load: LoadFiles<T>,
    ) -> Result<Watched<T>, FileError> {
        let files = Files::read(&paths)?;
        let loaded = load(&files)?;
        let watched = Watched {
            side,
            paths,
            load,
            current: ArcSwap::from_pointee(loaded.value),
            seen: Mutex::new(Ok(files.stamp())),
            metrics: metrics.group(),
        };
        watched.export_expiries(&loaded.expiries);
        Ok(watched)
    }

    /// The value built last.
    pub(super) fn current(&self) -> Arc<T> {
        self.current.load_full()
    }

    /// Checks the files for changes every `interval`, and when `look` changes; never returns.
    pub(super) async fn keep_fresh(self: &Arc<Self>, interval: Duration, mut look: watch::Receiver<()>) {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                Ok(()) = look.changed() => {}
            }
            let watched = Arc::clone(self);
            // On a thread of its own, since reading from a volume may block. A panic is logged by the hook; the next
            // tick tries again.
            let _ = tokio::task::spawn_blocking(move || watched.reload()).await;
        }
    }

    /// Reads the files, and replaces the value if they have changed and are valid.
    pub(super) fn reload(&self) {
        let files = match Files::read(&self.paths) {
            Ok(files) => files,
            Err(error) => {
                if self.is_new_state(Err(error.to_string())) {
                    self.keep_old(&error);
                }
                return;
            }
        };
        if !self.is_new_state(Ok(files.stamp())) {
            return;
        }
        match (self.load)(&files) {
            Ok(loaded) => {
                self.current.store(Arc::new(loaded.value));
                self.metrics.record_reload(self.side, "ok");
                tracing::info!(
                    side = self.side,
                    "certificates were replaced; new connections use the new ones"
                );
                self.export_expiries(&loaded.expiries);
            }
            Err(error) => self.keep_old(&error),
        }
    }

    fn is_new_state(&self, now: Result<u64, String>) -> bool {
        let mut seen = self.seen.lock();
        let is_new = *seen != now;
        *seen = now;
        is_new
    }

    fn keep_old(&self, error: &FileError) {
        self.metrics.record_reload(self.side, "failed");
        tracing::warn!(side = self.side, %error,
            "replaced certificates are invalid; the old ones stay in use");
    }

    fn export_expiries(&self, expiries: &[(&'static str, i64)]) {
        for (file, not_after_seconds) in expiries {
            self.metrics.set_not_after(self.side, file, *not_after_seconds);
            if *not_after_seconds <= unix_time::now_seconds() {
                tracing::warn!(
                    side = self.side,
                    file,
                    not_after_seconds,
                    "certificate or CRL has expired; replace the file, it is reloaded automatically"
                );
            }
        }
    }
}

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
