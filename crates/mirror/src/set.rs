//! The mirrors of this process: their places, their memory together, and what concerns them all, which is etcd's history.
//! Loads that watchers which leave memory have got their events from are noted: etcd may continue them there (W10). A reload adds mirrors and removes others while reads and watches refer to them.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use rangecache_base::{flags::Live, net::Url};
use rangecache_upstream::{Lineage, MAX_MESSAGE_BYTES};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::lineage::{Before, ClusterState, HistoryId, Transition};
use super::neighbours::{Neighbours, UselessNeighbour};
use super::{fan_out::FanOut, flags::MirrorConfig, view::Mirror};

/// Mirrors that reloads may add until the next start. The place of a removed one is not used again.
const MAX_ADDED: usize = 1_024;
/// Message that is read whatever `--cache-max-bytes` is: gRPC's default.
const LEAST_MESSAGE_BYTES: usize = 4 << 20;

/// A mirror with its fan-out.
#[derive(Debug)]
pub(super) struct MirrorSlot {
    pub(super) mirror: Mirror,
    pub(super) fan_out: Arc<FanOut>,
    /// Set once a reload has removed the mirror: what a connection sends that was opened by then, and is still open, is of
    /// the history that the mirror was of.
    removed: OnceLock<Instant>,
    /// A reload has added the mirror.
    pub(super) was_added: bool,
    /// Stops the mirror's task.
    pub(super) stop: CancellationToken,
    /// Cancelled once the task of a removed mirror has ended.
    pub(super) ended: CancellationToken,
}

impl MirrorSlot {
    pub(super) fn new(
        mirror: Mirror,
        fan_out: Arc<FanOut>,
        was_added: bool,
        stop: CancellationToken,
    ) -> MirrorSlot {
        MirrorSlot {
            mirror,
            fan_out,
            removed: OnceLock::new(),
            was_added,
            stop,
            ended: CancellationToken::new(),
        }
    }

    /// Takes the mirror out of the answer to every later read and watch, and stops its task.
    pub(super) fn remove(&self) {
        let is_proven = self.mirror.revision().is_ok();
        // The feed of a mirror that is out of service may have ended because etcd was restored.
        let opened_by = if is_proven {
            Instant::now()
        } else {
            self.mirror.born()
        };
        let _ = self.removed.set(opened_by);
        self.stop.cancel();
    }

    pub(super) fn is_removed(&self) -> bool {
        self.removed.get().is_some()
    }

    /// Of a removed mirror, the time by which a connection must have been opened that continues the mirror's watchers.
    pub(super) fn opened_by(&self) -> Option<Instant> {
        self.removed.get().copied()
    }
}

/// All mirrors, those that were removed included. A mirror keeps its position.
#[derive(Debug)]
pub(super) struct MirrorSet {
    places: Box<[OnceLock<MirrorSlot>]>,
    pub(super) cluster_state: Arc<ClusterState>,
    /// The last answers of neighbours.
    pub(super) neighbours: Neighbours,
    pub(super) live: Live<MirrorConfig>,
}

impl MirrorSet {
    /// Places for `slots`, and for those that reloads add.
    pub(super) fn new(
        slots: Vec<MirrorSlot>,
        cluster_state: Arc<ClusterState>,
        live: Live<MirrorConfig>,
    ) -> MirrorSet {
        let empty = std::iter::repeat_with(OnceLock::new).take(MAX_ADDED);
        MirrorSet {
            places: slots.into_iter().map(OnceLock::from).chain(empty).collect(),
            cluster_state,
            neighbours: Neighbours::default(),
            live,
        }
    }

    /// Number of mirrors that can be added.
    pub(super) fn free(&self) -> usize {
        self.places.len() - self.every().count()
    }

    /// Adds a mirror, and returns its position; `None` without a place.
    pub(super) fn add(&self, slot: MirrorSlot) -> Option<usize> {
        let position = self.every().count();
        self.places.get(position)?.set(slot).ok()?;
        Some(position)
    }

    /// The mirror at `position`, removed or not.
    pub(super) fn get(&self, position: usize) -> Option<&MirrorSlot> {
        self.places.get(position)?.get()
    }

    /// Every slot in use, those of removed mirrors included.
    pub(super) fn every(&self) -> impl Iterator<Item = &MirrorSlot> {
        self.places.iter().map_while(OnceLock::get)
    }

    /// Mirrors that were not removed, with their positions.
    pub(super) fn present(&self) -> impl Iterator<Item = (usize, &MirrorSlot)> {
        self.every().enumerate().filter(|(_, slot)| !slot.is_removed())
    }

    /// Mirrors that were not removed.
    pub(super) fn all(&self) -> impl Iterator<Item = &Mirror> {
        self.present().map(|(_, slot)| &slot.mirror)
    }

    /// Bound on the memory of all mirrors together (`--cache-max-bytes`).
    pub(super) fn max_bytes(&self) -> u64 {
        self.live.load().max_bytes()
    }

    /// Largest message that is read into a mirror, in bytes: of `--cache-max-bytes`, if that is less than [`MAX_MESSAGE_BYTES`].
    pub(super) fn max_message_bytes(&self) -> usize {
        let max_bytes = usize::try_from(self.max_bytes()).unwrap_or(usize::MAX);
        max_bytes.clamp(LEAST_MESSAGE_BYTES, MAX_MESSAGE_BYTES)
    }

    /// Bytes that `mirror` may take: `--cache-max-bytes` less the memory of the other mirrors.
    pub(super) fn budget_of(&self, mirror: &Mirror) -> u64 {
        let others = self.all().filter(|other| !std::ptr::eq(*other, mirror));
        self.max_bytes()
            .saturating_sub(others.map(Mirror::memory_bytes).sum())
    }

    pub(super) fn within_budget(&self, mirror: &Mirror) -> bool {
        mirror.memory_bytes() <= self.budget_of(mirror)
    }

    /// `--warm-from`
    pub(super) fn warm_from(&self) -> Vec<Url> {
        self.live.load().warm_from.clone()
    }

    /// Neighbours that `--warm-from` names, and that were of no use when they were asked for a mirror last.
    pub(super) fn useless_neighbours(&self) -> Vec<UselessNeighbour> {
        let (named, mut useless) = (self.warm_from(), self.neighbours.useless());
        useless.retain(|known| {
            named.contains(&known.url) && self.all().any(|mirror| mirror.name == known.mirror)
        });
        useless
    }

    /// Memory of all mirrors, loads in progress included.
    pub(super) fn used_bytes(&self) -> u64 {
        let used = |mirror: &Mirror| mirror.memory_bytes() + mirror.loading_bytes();
        self.all().map(used).sum()
    }

    /// Bytes by which the mirrors, what readers keep of their old views, and loads in progress exceed
    /// `--cache-max-bytes`, as far as giving up readers can help.
    pub(super) fn excess_held_bytes(&self) -> u64 {
        // Readers may keep views of removed mirrors.
        let every = self.every().map(|slot| &slot.mirror);
        let held: u64 = every.map(Mirror::held_bytes).sum();
        (held + self.used_bytes())
            .saturating_sub(self.max_bytes())
            .min(held)
    }

    /// Records that etcd has compacted up to `revision`, unless `history`, the one in which that was found, has been
    /// replaced.
    pub(super) fn compacted(&self, history: HistoryId, revision: i64) {
        if self.cluster_state.note_compacted(history, revision) {
            self.all().for_each(|mirror| mirror.compacted(revision));
        }
    }

    /// Records that etcd's contents or raft log are not those of the history in which a feed or a load began, and drops
    /// every mirror, unless that has been done. `revision` is one of the new history, 0 if none is known; `explanation`
    /// goes to the log.
    pub(super) fn replace_history(&self, before: &Before, revision: i64, explanation: &str) {
        if self.cluster_state.contradict(before) == Transition::Replaced {
            self.drop_all(revision, explanation);
        }
    }

    /// Drops every mirror, because etcd's history was replaced; the parameters are those of
    /// [`MirrorSet::replace_history`].
    pub(super) fn drop_all(&self, revision: i64, explanation: &str) {
        tracing::warn!(
            explanation,
            "etcd's history was replaced (restored from a backup?); dropping and reloading every mirror"
        );
        self.all().for_each(|mirror| mirror.replace_history(revision));
    }
}

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

    use etcd_store::cache::{HistoryLimits, Store, Tree};
    use etcd_store::{cache::testing::KeyValue, keyspace::scope::Scope};
    use etcd_wire::grpc::hub::HubHistory;
    use rangecache_base::telemetry::{Reason, Telemetry};

    use super::*;
    use crate::testing::{Bench, live, serve as serve_at};

    const MAX_BYTES: u64 = 1 << 20;

    fn slot(prefix: &str, cluster_state: &Arc<ClusterState>) -> MirrorSlot {
        let scope = Scope::prefix(prefix.as_bytes());
        let mirror = Mirror::new(scope, Arc::clone(cluster_state), &Telemetry::default());
        MirrorSlot::new(mirror, Arc::default(), false, CancellationToken::new())
    }

    /// Mirrors of `/a/` and `/b/` with 1 MiB.
    fn set() -> MirrorSet {
        let cluster_state = Arc::<ClusterState>::default();
        let slots = ["/a/", "/b/"].map(|prefix| slot(prefix, &cluster_state));
        let live = live(&["--cache-max-bytes", "1MiB"]);
        MirrorSet::new(slots.into(), cluster_state, live)
    }

    /// Puts the mirror in service with one value of this size.
    fn serve(mirror: &Mirror, bytes: usize) {
        let tree = Tree::from_sorted(std::iter::once(
            KeyValue::new("/a/key", 9, "x".repeat(bytes)).entry(),
        ));
        let store = Store::new(tree, 10, HistoryLimits::default(), Duration::ZERO);
        mirror.fill(mirror.epoch(), store).unwrap();
        mirror.put_in_service(mirror.epoch()).unwrap();
    }

    #[test]
    fn mirror_may_take_what_the_others_leave_and_removed_ones_leave_all() {
        let set = set();
        let [one, other] = [0, 1].map(|position| set.get(position).unwrap());
        serve(&one.mirror, 700_000);
        assert_eq!(
            set.budget_of(&one.mirror),
            MAX_BYTES,
            "its own bytes do not count"
        );
        let left = MAX_BYTES - one.mirror.memory_bytes();
        assert!(left < 400_000);
        assert_eq!(set.budget_of(&other.mirror), left);
        assert!(set.within_budget(&one.mirror));
        serve(&other.mirror, 400_000);
        assert!(!set.within_budget(&one.mirror) && !set.within_budget(&other.mirror));
        one.remove();
        assert!(set.within_budget(&other.mirror));
    }

    #[test]
    fn largest_message_is_of_memory_within_bounds() {
        for (memory, expected) in [("1MiB", 4), ("8MiB", 8), ("64MiB", 64), ("1GiB", 64)] {
            let live = live(&["--cache-max-bytes", memory]);
            let set = MirrorSet::new(Vec::new(), Arc::default(), live);
            assert_eq!(set.max_message_bytes(), expected << 20, "{memory}");
        }
    }

    #[test]
    fn removed_mirror_keeps_its_place() {
        let set = set();
        let free = set.free();
        set.get(0).unwrap().remove();
        let added = set.add(slot("/c/", &set.cluster_state)).unwrap();
        assert_eq!(added, 2);
        assert_eq!(set.free(), free - 1);
        assert_eq!(set.get(0).unwrap().mirror.scope, Scope::prefix(b"/a/"));
        let present: Vec<_> = set.present().map(|(position, _)| position).collect();
        assert_eq!(present, [1, 2]);
        assert_eq!(set.every().count(), 3);
    }

    #[test]
    fn mirror_without_a_place_is_not_added() {
        let set = set();
        for _ in 0..MAX_ADDED {
            assert!(set.add(slot("/c/", &set.cluster_state)).is_some());
        }
        assert_eq!(set.free(), 0);
        assert_eq!(set.add(slot("/d/", &set.cluster_state)), None);
        assert_eq!(set.every().count(), 2 + MAX_ADDED);
    }

    #[tokio::test(start_paused = true)]
    async fn watchers_of_a_removed_mirror_without_a_feed_need_a_connection_as_old_as_the_mirror() {
        let set = set();
        let [serving, other] = [0, 1].map(|position| set.get(position).unwrap());
        serve(&serving.mirror, 1);
        tokio::time::advance(Duration::from_secs(5)).await;
        let removed = Instant::now();
        serving.remove();
        other.remove();
        tokio::time::advance(Duration::from_secs(5)).await;
        serving.remove();
        assert_eq!(serving.opened_by(), Some(removed));
        assert_eq!(other.opened_by(), Some(other.mirror.born()));
        assert!(serving.stop.is_cancelled());
    }

    #[test]
    fn replaced_history_drops_every_mirror_once() {
        let set = set();
        let before = set.cluster_state.before_check();
        let serve_all = || set.all().for_each(|mirror| serve(mirror, 1));
        let revisions = || set.all().map(Mirror::revision).collect::<Vec<_>>();
        serve_all();
        set.replace_history(&before, 3, "as a feed has found");
        assert_eq!(revisions(), [Err(Reason::HistoryReplaced); 2]);
        serve_all();
        set.replace_history(&before, 3, "as another feed has found");
        assert_eq!(revisions(), [Ok(10); 2]);
    }

    #[test]
    fn compaction_of_a_replaced_history_is_not_noted() {
        let set = set();
        set.compacted(HistoryId::FIRST.next(), 9);
        assert_eq!(set.cluster_state.current().compacted(), 0);
        set.compacted(HistoryId::FIRST, 9);
        assert_eq!(set.cluster_state.current().compacted(), 9);
    }

    #[test]
    fn memory_that_no_reader_holds_is_no_excess_that_readers_can_help() {
        let set = set();
        serve(&set.get(0).unwrap().mirror, 2 << 20);
        assert_eq!(set.excess_held_bytes(), 0);
    }

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
            serve_at(mirrors.at(position).unwrap(), 10);
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
            serve_at(mirror, 10);
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
