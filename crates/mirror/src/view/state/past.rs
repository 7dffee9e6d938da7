//! Past revisions of a mirror.

use std::sync::Arc;

use etcd_store::cache::{AtError, Rebuild, Rebuilt, Snapshot, Tree};
use rangecache_base::telemetry::Reason;

use super::{Epoch, Mirror, StaleEpoch, View, ViewAtError};

impl Mirror {
    /// Keys at a past `revision`. Rebuilds them if necessary, without delaying the feed.
    ///
    /// # Errors
    /// The mirror is out of service, or does not have the revision.
    pub fn view_at(&self, revision: i64) -> Result<Tree, ViewAtError> {
        self.view_at_built_by(self.view()?, revision, Rebuild::run)
    }

    /// Like [`Mirror::view_at`], also while [`Mirror::last_view`] is all that there is.
    ///
    /// # Errors
    /// The mirror has no contents, or does not have the revision.
    pub fn last_view_at(&self, revision: i64) -> Result<Tree, ViewAtError> {
        let view = self.last_view().ok_or(Reason::Loading)?;
        self.view_at_built_by(view, revision, Rebuild::run)
    }

    pub(super) fn view_at_built_by(
        &self,
        view: View,
        revision: i64,
        build: impl FnOnce(&Rebuild) -> Rebuilt,
    ) -> Result<Tree, ViewAtError> {
        if view.revision == revision {
            return Ok(view.tree);
        }
        let (past, rebuild, oldest) = {
            let contents = self.contents.lock();
            let loaded = contents.loaded.as_ref().ok_or(Reason::Loading)?;
            match loaded.store.snapshot_at(revision)? {
                Snapshot::Ready(tree) => return Ok(tree),
                Snapshot::Rebuild(rebuild) => {
                    (Arc::clone(&loaded.past), rebuild, loaded.store.oldest_revision())
                }
            }
        };
        // The lock is free while the state is rebuilt: the feed needs it for every batch of events.
        let tree = past
            .get_or_build(&rebuild, build)
            .ok_or(AtError::Gone { revision, oldest })?;
        // Contents that were dropped meanwhile may be of a replaced history: their state is not served any more.
        let contents = self.contents.lock();
        match &contents.loaded {
            Some(loaded) if Arc::ptr_eq(&loaded.past, &past) => Ok(tree),
            _ => Err(self.view().err().unwrap_or(Reason::Loading).into()),
        }
    }

    /// Lets reads and watches that begin below `revision` go to etcd from now on: memory's state at `revision` was compared with
    /// etcd's, and nothing shows that those before it are the same.
    pub(crate) fn forget_before(&self, epoch: Epoch, revision: i64) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        let loaded = contents.loaded.as_mut().ok_or(StaleEpoch)?;
        loaded.store.forget_before(revision);
        self.metrics.oldest_revision.set(loaded.store.oldest_revision());
        Ok(())
    }

    /// Records that etcd has compacted below `revision`: reads below it get etcd's error from now on.
    pub fn compacted(&self, revision: i64) {
        let kept = {
            let mut contents = self.contents.lock();
            contents.loaded.as_mut().map(|loaded| {
                loaded.store.compact(revision);
                (Arc::clone(&loaded.past), loaded.store.oldest_checkpoint())
            })
        };
        if let Some((past, oldest)) = kept {
            past.drop_below(oldest);
        }
    }

    /// Drops history that has become too old while nothing changed, and rebuilt states that can no longer be requested.
    pub(crate) fn age(&self) {
        let now = self.now();
        let kept = {
            let mut contents = self.contents.lock();
            contents.loaded.as_mut().map(|loaded| {
                loaded.store.advance(loaded.store.revision(), now);
                (Arc::clone(&loaded.past), loaded.store.oldest_checkpoint())
            })
        };
        if let Some((past, oldest)) = kept {
            past.drop_below(oldest);
        }
    }

    /// Oldest revision that can be read; `None` while nothing is loaded.
    #[must_use]
    pub fn oldest_revision(&self) -> Option<i64> {
        let contents = self.contents.lock();
        let loaded = contents.loaded.as_ref()?;
        Some(loaded.store.oldest_revision())
    }
}
