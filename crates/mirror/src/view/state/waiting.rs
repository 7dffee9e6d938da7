//! Readers and streams that wait for a mirror, and what they make its feed request.

use std::{sync::atomic::Ordering, time::Duration};

use rangecache_base::telemetry::Reason;
use tokio::{sync::watch, time::Instant};

use super::{Epoch, Mirror, View};
use crate::lineage::HistoryId;

/// A reader that has waited this long in vain shows that the mirror lags. One with a shorter deadline shows nothing.
const OVERDUE_AFTER: Duration = Duration::from_millis(500);

impl Mirror {
    /// Waits until the view is at `revision` of `history`, or later; also returns whether it
    /// had to wait. While the mirror is known to lag, because another reader has waited in vain, no reader waits.
    ///
    /// # Errors
    /// The reason why the mirror is out of service, [`Reason::HistoryReplaced`] if it is of another history, or
    /// [`Reason::NotFresh`] at `deadline` or while the mirror lags.
    pub async fn reach(
        &self,
        history: HistoryId,
        revision: i64,
        deadline: Instant,
    ) -> Result<(View, bool), Reason> {
        let view = self.view_in(history)?;
        if view.revision >= revision {
            return Ok((view, false));
        }
        self.want(history, revision);
        if view.revision < self.overdue.load(Ordering::Acquire) {
            return Err(Reason::NotFresh);
        }
        let (began, epoch) = (Instant::now(), Epoch(*self.replaced.borrow()));
        // Subscribed before the state is read again, so that no change in between is missed.
        let mut changed = self.changed.subscribe();
        loop {
            let view = self.view_in(history)?;
            if view.revision >= revision {
                return Ok((view, true));
            }
            if !matches!(
                tokio::time::timeout_at(deadline, changed.changed()).await,
                Ok(Ok(()))
            ) {
                // Under the lock: a revision of a replaced history must not be waited for.
                if began.elapsed() >= OVERDUE_AFTER
                    && let Ok(_contents) = self.contents_of(epoch)
                {
                    self.overdue.fetch_max(revision, Ordering::AcqRel);
                }
                return Err(Reason::NotFresh);
            }
        }
    }

    /// Waits until the mirror is in service, if it only waits for its feed to resume; returns its revision.
    ///
    /// # Errors
    /// The reason why the mirror is out of service, at `deadline` or before.
    pub async fn resumed(&self, deadline: Instant) -> Result<i64, Reason> {
        // Subscribed before the state is read, so that no change in between is missed.
        let mut changed = self.changed.subscribe();
        loop {
            let revision = self.revision();
            if revision != Err(Reason::FeedLost) {
                return revision;
            }
            if !matches!(
                tokio::time::timeout_at(deadline, changed.changed()).await,
                Ok(Ok(()))
            ) {
                return revision;
            }
        }
    }

    /// The current view, if it is of `history`.
    fn view_in(&self, history: HistoryId) -> Result<View, Reason> {
        let view = self.view()?;
        if view.history == history {
            Ok(view)
        } else {
            Err(Reason::HistoryReplaced)
        }
    }

    /// Makes the feed request progress notifications until the mirror is at `revision`, which was proven in
    /// `history`.
    pub fn want(&self, history: HistoryId, revision: i64) {
        self.wanted.send_if_modified(|wanted| {
            // A late reader of an old history must not make the feed wait for a revision that the new one lacks.
            let higher =
                *wanted < revision && self.wanted_history.load(Ordering::Relaxed) == history.number();
            if higher {
                *wanted = revision;
            }
            higher
        });
    }

    pub(crate) fn wanted(&self) -> watch::Receiver<i64> {
        self.wanted.subscribe()
    }

    /// Makes the feed send one progress request, so that the mirror reaches etcd's revision although it is not known here. The
    /// feed sends at most one per 50 ms for all callers, and none if it receives an event for every revision.
    pub fn nudge(&self) {
        if !self.scope.is_everything() {
            self.nudged.notify_one();
        }
    }

    /// Resolves after [`Mirror::nudge`]. For the feed alone.
    pub(crate) async fn nudged(&self) {
        self.nudged.notified().await;
    }

    /// Records that the feed requests a progress notification now.
    pub(crate) fn record_progress_request(&self) {
        let nanos = u64::try_from(self.now().as_nanos()).unwrap_or(u64::MAX);
        self.progress_requested_nanos
            .store(nanos.max(1), Ordering::Relaxed);
        self.metrics.progress_requests.inc();
    }

    /// Time of the feed's last progress request.
    #[must_use]
    pub fn last_progress_request(&self) -> Option<Instant> {
        match self.progress_requested_nanos.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(self.born + Duration::from_nanos(nanos)),
        }
    }
}
