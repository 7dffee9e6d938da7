//! Rebuilt past revisions of one mirror's contents, kept for the next page of the same list.

use std::time::Duration;

use etcd_store::cache::{Rebuild, Rebuilt, Tree, WeakTree};
use moka::{policy::EvictionPolicy, sync::Cache};
use parking_lot::Mutex;

/// Weight of a rebuilt revision in addition to its nodes, in bytes: moka's bookkeeping and the tree's root (estimate).
const OVERHEAD_BYTES: u64 = 256;
/// Bytes of rebuilt revisions that may be held in any case.
const MIN_HELD_BYTES: u64 = 256 << 10;
/// Time after its last read for which a rebuilt revision is kept. Clients that page ask for the next page at once.
const TIME_TO_IDLE: Duration = Duration::from_secs(60);

/// Rebuilt past revisions by [`Rebuild::revision`], bounded in bytes; the least recently read is evicted first.
///
/// Belongs to one load of a mirror and is dropped with it, so that a state of replaced history cannot be found here.
pub(crate) struct PastRevisions {
    cache: Cache<i64, Rebuilt>,
    max_held_bytes: u64,
    /// Rebuilt states, with their bytes, until neither the cache nor a reader holds them.
    held: Mutex<Vec<(WeakTree, u64)>>,
}

impl PastRevisions {
    /// Caches at most `max_bytes`; a larger state is rebuilt for each read. Readers together may hold as much, and
    /// [`MIN_HELD_BYTES`] in any case.
    pub(crate) fn new(max_bytes: u64) -> PastRevisions {
        let weight = |_: &i64, rebuilt: &Rebuilt| u32::try_from(bytes_of(rebuilt)).unwrap_or(u32::MAX);
        let cache = Cache::builder()
            .max_capacity(max_bytes)
            .weigher(weight)
            // Not moka's default, which may refuse a new entry: the newest state is the one that the next page needs.
            .eviction_policy(EvictionPolicy::lru())
            .time_to_idle(TIME_TO_IDLE)
            .build();
        PastRevisions {
            cache,
            max_held_bytes: max_bytes.saturating_mul(2).max(MIN_HELD_BYTES),
            held: Mutex::default(),
        }
    }

    /// The state that `rebuild` describes, built by `build` unless it is here; `None` if readers hold too many others. Concurrent
    /// callers of one revision wait for the first one's `build`: a millisecond or less, because few events lie between two checkpoints
    /// ([`HistoryLimits`](etcd_store::cache::HistoryLimits)).
    pub(crate) fn get_or_build(
        &self,
        rebuild: &Rebuild,
        build: impl FnOnce(&Rebuild) -> Rebuilt,
    ) -> Option<Tree> {
        let revision = rebuild.revision();
        if !self.cache.contains_key(&revision) && self.held_bytes() > self.max_held_bytes {
            return None;
        }
        let rebuilt = self.cache.get_with(revision, || {
            let rebuilt = build(rebuild);
            let held = (rebuilt.tree.downgrade(), bytes_of(&rebuilt));
            self.held.lock().push(held);
            rebuilt
        });
        Some(rebuilt.tree)
    }

    /// Memory of the states that the cache or readers hold, in bytes.
    fn held_bytes(&self) -> u64 {
        let mut held = self.held.lock();
        held.retain(|(tree, _)| tree.is_held());
        held.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Drops the states below `revision`, and those that have expired.
    pub(crate) fn drop_below(&self, revision: i64) {
        for (rebuilt, _) in &self.cache {
            if *rebuilt < revision {
                self.cache.invalidate(&*rebuilt);
            }
        }
        // moka drops entries only during other operations or here.
        self.cache.run_pending_tasks();
    }

    /// Drops all states: they share leaves that the mirror has no longer.
    pub(crate) fn clear(&self) {
        self.cache.invalidate_all();
        self.cache.run_pending_tasks();
    }

    /// Memory of all states, in bytes; a state that was just built or dropped may not be included yet.
    pub(crate) fn bytes(&self) -> u64 {
        self.cache.weighted_size()
    }
}

fn bytes_of(rebuilt: &Rebuilt) -> u64 {
    OVERHEAD_BYTES.saturating_add(rebuilt.bytes)
}
