//! Log reads of the fan-out: new batches of a mirror's log, and whether the contents are still the same.

use etcd_store::cache::{Batch, Missed};
use rangecache_base::telemetry::Reason;
use tokio::{sync::watch, time::Instant};

use super::{Contents, Mirror};
use crate::{lineage::HistoryId, view::ReaderEnd};

/// Part of the log of a loaded mirror.
#[derive(Debug)]
pub(crate) struct LogRead {
    /// Number of the load.
    pub(crate) generation: u64,
    /// The history of etcd that the events belong to.
    pub(crate) history: HistoryId,
    /// Revision of the mirror.
    pub(crate) revision: i64,
    /// Revision after which the log has every event.
    pub(crate) complete_after: i64,
    /// Batches with events above the revision asked for, oldest first.
    pub(crate) batches: Vec<Batch>,
}

/// State of a mirror as its fan-out sees it.
#[derive(Debug)]
pub(crate) struct Observed {
    /// `None` while nothing is loaded.
    pub(crate) log: Option<LogRead>,
    /// The last load whose contents were dropped, and why.
    pub(crate) ended: Option<(u64, ReaderEnd)>,
    /// Why the mirror is out of service.
    pub(crate) out: Option<Reason>,
    /// Since when the mirror has had no feed because etcd has no leader.
    pub(crate) no_leader_since: Option<Instant>,
    /// Lowest revision at which a feed has resumed since the last [`Mirror::follow`].
    pub(crate) resumed_at: Option<i64>,
}

impl Mirror {
    /// Reads at most `max_batches` of the log behind `revision`. Under the lock that the feed needs, so nothing but
    /// references is cloned.
    pub(crate) fn observe(&self, revision: i64, max_batches: usize) -> Observed {
        let contents = self.contents.lock();
        self.observed(&contents, revision, max_batches)
    }

    /// Reads at most `max_batches` of the log after `taken`, like [`Mirror::observe`], for the follower of the log: it has
    /// all events up to `taken`, and takes those that are returned. `taken` is `None` while it follows nothing.
    pub(crate) fn follow(&self, taken: Option<i64>, max_batches: usize) -> (Observed, Option<Missed>) {
        let mut contents = self.contents.lock();
        let after = taken.unwrap_or(i64::MAX);
        let observed = self.observed(&contents, after, max_batches);
        contents.resumed_at = None;
        let last = observed.log.as_ref().map(|log| match log.batches.last() {
            Some(last) if log.batches.len() == max_batches => last.last_revision(),
            _ => log.revision,
        });
        let taken = taken.and(last);
        let loaded = contents.loaded.as_mut();
        let missed = loaded.and_then(|loaded| loaded.store.follow_log(after, taken));
        (observed, missed)
    }

    fn observed(&self, contents: &Contents, revision: i64, max_batches: usize) -> Observed {
        let log = contents.loaded.as_ref().map(|loaded| LogRead {
            generation: contents.generation,
            history: contents.history.id,
            revision: loaded.store.revision(),
            complete_after: loaded.store.log_complete_after(),
            batches: loaded
                .store
                .log()
                .batches_after(revision)
                .take(max_batches)
                .cloned()
                .collect(),
        });
        Observed {
            log,
            ended: contents.ended.as_ref().map(|ended| (ended.generation, ended.end)),
            out: self.revision().err(),
            no_leader_since: contents.no_leader_since,
            resumed_at: contents.resumed_at,
        }
    }

    /// Changes of the mirror: every one that [`Mirror::observe`] would show.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }
}
