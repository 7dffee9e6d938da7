//! Rebuilt past revisions of one mirror's contents, kept for the next page of the same list.

use moka::policy::EvictionPolicy;
use moka::sync::Cache;

use std::time::Duration;

use etcd_store::cache::{Rebuild, Rebuilt, Tree};

/// Weight of a rebuilt revision in addition to its nodes, in bytes: moka's bookkeeping and the tree's root (estimate).
const OVERHEAD_BYTES: u64 = 256;
/// Time after its last read for which a rebuilt revision is kept. Clients that page ask for the next page at once.
const TIME_TO_IDLE: Duration = Duration::from_secs(60);

/// Rebuilt past revisions by [`Rebuild::revision`], bounded in bytes; the least recently read is evicted first.
///
/// Belongs to one load of a mirror and is dropped with it, so that a state of replaced history cannot be found here.
pub(crate) struct PastRevisions(Cache<i64, Rebuilt>);

impl PastRevisions {
    /// Holds at most `max_bytes`; a larger state is rebuilt for each read.
    pub(crate) fn new(max_bytes: u64) -> PastRevisions {
        let weight = |_: &i64, rebuilt: &Rebuilt| {
            u32::try_from(OVERHEAD_BYTES.saturating_add(rebuilt.bytes)).unwrap_or(u32::MAX)
        };
        let cache = Cache::builder()
            .max_capacity(max_bytes)
            .weigher(weight)
            // Not moka's default, which may refuse a new entry: the newest state is the one that the next page needs.
            .eviction_policy(EvictionPolicy::lru())
            .time_to_idle(TIME_TO_IDLE)
            .build();
        PastRevisions(cache)
    }

    /// The state that `rebuild` describes, built by `build` unless it is here. Concurrent callers of one revision
    /// wait for the first one's `build`: a millisecond or less, because few events lie between two checkpoints
    /// ([`HistoryLimits`](etcd_store::cache::HistoryLimits)).
    pub(crate) fn get_or_build(&self, rebuild: &Rebuild, build: impl FnOnce(&Rebuild) -> Rebuilt) -> Tree {
        self.0.get_with(rebuild.revision(), || build(rebuild)).tree
    }

    /// Drops the states below `revision`, and those that have expired.
    pub(crate) fn drop_below(&self, revision: i64) {
        for (rebuilt, _) in &self.0 {
            if *rebuilt < revision {
                self.0.invalidate(&*rebuilt);
            }
        }
        // moka drops entries only during other operations or here.
        self.0.run_pending_tasks();
    }

    /// Drops all states: they share leaves that the mirror has no longer.
    pub(crate) fn clear(&self) {
        self.0.invalidate_all();
        self.0.run_pending_tasks();
    }

    /// Memory of all states, in bytes; a state that was just built or dropped may not be included yet.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.weighted_size()
    }
}
