//! Files that are replaced while rangecache runs: certificates are short-lived, and nobody restarts a proxy for them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::time::MissedTickBehavior;

use super::files::{FileError, Files};
use crate::telemetry::Metrics;

/// Something made of files, with the times at which they end.
pub(super) struct Made<T> {
    pub(super) value: T,
    /// Which file (`cert`, `ca`, `crl`), and its end in seconds since 1970.
    pub(super) ends: Vec<(&'static str, i64)>,
}

type Make<T> = Box<dyn Fn(&Files) -> Result<Made<T>, FileError> + Send + Sync>;

/// The newest thing that could be made of some files.
pub(super) struct Watched<T> {
    /// `etcd` or `clients`: whom these files are shown to, or judge.
    side: &'static str,
    paths: Vec<(&'static str, PathBuf)>,
    make: Make<T>,
    current: ArcSwap<T>,
    /// What was seen last, usable or not, so that what is broken is said once.
    seen: Mutex<Seen>,
    metrics: Arc<Metrics>,
}

#[derive(PartialEq, Eq)]
enum Seen {
    Files(u64),
    Unreadable(String),
}

impl<T: Send + Sync + 'static> Watched<T> {
    /// Reads the files; what is wrong with them is the error.
    pub(super) fn open(
        side: &'static str,
        paths: Vec<(&'static str, PathBuf)>,
        metrics: &Arc<Metrics>,
        make: Make<T>,
    ) -> Result<Watched<T>, FileError> {
        let files = Files::read(&paths)?;
        let made = make(&files)?;
        let watched = Watched {
            side,
            paths,
            make,
            current: ArcSwap::from_pointee(made.value),
            seen: Mutex::new(Seen::Files(files.stamp())),
            metrics: Arc::clone(metrics),
        };
        watched.report(&made.ends);
        Ok(watched)
    }

    /// What was made last.
    pub(super) fn current(&self) -> Arc<T> {
        self.current.load_full()
    }

    /// Looks at the files every `interval`; never returns.
    pub(super) async fn keep_fresh(self: &Arc<Self>, interval: Duration) {
        let mut beat = tokio::time::interval(interval);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beat.tick().await;
            let watched = Arc::clone(self);
            // A volume that hangs must not hold a serving thread. An error would be a panic in there: the next look tells.
            let _ = tokio::task::spawn_blocking(move || watched.look()).await;
        }
    }

    fn look(&self) {
        let files = match Files::read(&self.paths) {
            Ok(files) => files,
            Err(error) => {
                if self.is_news(Seen::Unreadable(error.to_string())) {
                    self.keep_old(&error);
                }
                return;
            }
        };
        if !self.is_news(Seen::Files(files.stamp())) {
            return;
        }
        match (self.make)(&files) {
            Ok(made) => {
                self.current.store(Arc::new(made.value));
                self.metrics.tls.record_reload(self.side, "ok");
                tracing::info!(
                    side = self.side,
                    "certificates were replaced: new connections use the new ones"
                );
                self.report(&made.ends);
            }
            Err(error) => self.keep_old(&error),
        }
    }

    fn is_news(&self, now: Seen) -> bool {
        let mut seen = self.seen.lock();
        let news = *seen != now;
        *seen = now;
        news
    }

    fn keep_old(&self, error: &FileError) {
        self.metrics.tls.record_reload(self.side, "failed");
        tracing::warn!(side = self.side, %error,
            "certificates were replaced by something that cannot be used; the old ones stay in use");
    }

    fn report(&self, ends: &[(&'static str, i64)]) {
        for (file, not_after_seconds) in ends {
            self.metrics
                .tls
                .set_not_after(self.side, file, *not_after_seconds);
            if *not_after_seconds <= now_seconds() {
                tracing::warn!(
                    side = self.side,
                    file,
                    not_after_seconds,
                    "a certificate or a revocation list is past its end: replace the file, it is picked up by itself"
                );
            }
        }
    }
}

fn now_seconds() -> i64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_secs()).ok())
        .unwrap_or(0)
}
