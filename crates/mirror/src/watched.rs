//! Loads that watchers which leave memory have got their events from: where etcd may continue them (W10).

use std::collections::BTreeSet;

use tokio::time::Instant;

use super::set::MirrorSet;
use rangecache_upstream::Lineage;

/// Loads of mirrors that watchers have got their events from.
#[derive(Clone, Debug, Default)]
pub struct WatchedLoads {
    /// Positions of the mirrors, and the numbers of their loads.
    loads: BTreeSet<(usize, u64)>,
    /// Time by which a connection must have been opened on which etcd continues the watchers: a mirror that was removed since cannot be
    /// compared with etcd any more. `None` if none was removed.
    opened_by: Option<Instant>,
}

impl WatchedLoads {
    /// Loads with these numbers, each of the mirror of `set` at the position before it.
    pub(super) fn new(set: &MirrorSet, loads: impl Iterator<Item = (usize, u64)>) -> WatchedLoads {
        let loads: BTreeSet<_> = loads.collect();
        let opened_by = loads
            .iter()
            .filter_map(|(position, _)| set.get(*position)?.opened_by())
            .min();
        WatchedLoads { loads, opened_by }
    }

    /// Whether a connection that has led to the same history since `since` is old enough.
    pub(super) fn began_after(&self, since: Instant) -> bool {
        self.opened_by.is_none_or(|latest| since <= latest)
    }

    /// Whether the contents of each were found in `lineage`, or raft logs show it.
    pub(super) fn were_found_in(&self, set: &MirrorSet, lineage: Lineage) -> bool {
        lineage == Lineage::Member
            || self.loads.iter().all(|(position, generation)| {
                let slot = set.get(*position);
                slot.is_some_and(|slot| slot.mirror.was_found_in(*generation, lineage))
            })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::{Bench, serve};
    use etcd_wire::grpc::hub::HubHistory;

    const SCOPES: [&str; 4] = ["--cache-prefix", "/a/", "--cache-prefix", "/b/"];

    #[tokio::test(start_paused = true)]
    async fn connection_has_to_be_older_than_the_first_removal_among_its_mirrors() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&SCOPES);
        let set = &mirrors.set;
        let watched =
            |positions: &[usize]| WatchedLoads::new(set, positions.iter().map(|position| (*position, 1)));
        assert!(watched(&[0, 1]).began_after(Instant::now()), "none was removed");
        let mut removed = Vec::new();
        for position in [1, 0] {
            tokio::time::advance(Duration::from_millis(1)).await;
            serve(mirrors.at(position).unwrap(), 10);
            set.get(position).unwrap().remove();
            removed.push(Instant::now());
        }
        assert!(watched(&[0, 1]).began_after(removed[0]) && !watched(&[0, 1]).began_after(removed[1]));
        assert!(watched(&[0]).began_after(removed[1]));
    }

    #[tokio::test]
    async fn each_load_has_to_be_found_under_the_number_of_the_hub() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&SCOPES);
        let set = &mirrors.set;
        let of_hub = Lineage::Hub(HubHistory {
            instance: 1,
            number: 2,
        });
        for position in [0, 1] {
            let mirror = mirrors.at(position).unwrap();
            serve(mirror, 10);
            let watched = |positions: std::ops::Range<usize>| {
                WatchedLoads::new(set, positions.map(|position| (position, 1)))
            };
            assert!(!watched(0..2).were_found_in(set, of_hub));
            assert!(watched(0..position).were_found_in(set, of_hub));
            mirror.note_lineage(mirror.epoch(), of_hub).unwrap();
        }
        let watched = |generation| WatchedLoads::new(set, [(0, 1), (1, generation)].into_iter());
        assert!(watched(1).were_found_in(set, of_hub));
        assert!(!watched(2).were_found_in(set, of_hub), "another load");
    }
}
