//! Choice of the reads that etcd answers although memory could, so that both can be compared (`--shadow`).

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Reads whose responses are compared at once; others are answered from memory.
const MAX_READS: usize = 64;

/// Chooses the reads to compare.
#[derive(Debug)]
pub(super) struct ShadowReads {
    /// Share of the reads, of 2^32.
    threshold: AtomicU64,
    reads: AtomicU64,
    hasher: RandomState,
    turns: Arc<Semaphore>,
}

impl ShadowReads {
    /// Chooses this `share` of the reads, from 0 to 1.
    pub(super) fn new(share: f64) -> ShadowReads {
        ShadowReads {
            threshold: AtomicU64::new(threshold(share)),
            reads: AtomicU64::new(0),
            hasher: RandomState::new(),
            turns: Arc::new(Semaphore::new(MAX_READS)),
        }
    }

    /// Chooses another share from now on.
    pub(super) fn set(&self, share: f64) {
        self.threshold.store(threshold(share), Ordering::Relaxed);
    }

    /// Whether the next read is one to compare, and its turn.
    pub(super) fn choose(&self) -> Option<OwnedSemaphorePermit> {
        let threshold = self.threshold.load(Ordering::Relaxed);
        if threshold == 0 {
            return None;
        }
        let number = self.reads.fetch_add(1, Ordering::Relaxed);
        let is_chosen = self.hasher.hash_one(number) >> 32 < threshold;
        is_chosen.then(|| Arc::clone(&self.turns).try_acquire_owned().ok())?
    }
}

/// A share from 0 to 1, of 2^32.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share is between 0 and 1"
)]
fn threshold(share: f64) -> u64 {
    (share * 2_f64.powi(32)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_the_reads_is_chosen_up_to_the_bound() {
        assert!(ShadowReads::new(0.0).choose().is_none());
        let all = ShadowReads::new(1.0);
        let turns: Vec<_> = (0..MAX_READS).map(|_| all.choose().unwrap()).collect();
        assert!(all.choose().is_none(), "over the bound");
        drop(turns);
        let tenth = ShadowReads::new(0.1);
        let chosen = (0..10_000).filter(|_| tenth.choose().is_some()).count();
        assert!((800..1200).contains(&chosen), "{chosen}");
    }
}
