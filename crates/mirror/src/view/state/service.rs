//! Changes of a mirror by the task that loads and follows it: contents, and whether they are in service.

use std::collections::HashMap;
use std::sync::{Arc, atomic::Ordering};

use etcd_store::cache::{Applied, Change, NotApplied, Repacked, Tree, TreeMemory};
use etcd_store::keyspace::figure_prefix;
use parking_lot::MutexGuard;
use rangecache_base::telemetry::{Reason, metrics::gauge, state_changes::ChangeKind};
use rangecache_upstream::Lineage;
use tokio::time::Instant;

use super::{Contents, EndedLoad, Epoch, LoadedStore, Mirror, StaleEpoch, State, View};
use crate::lineage::{Anchor, HistoryId};
use crate::view::ReaderEnd;

impl Mirror {
    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.contents.lock().epoch)
    }

    /// Resolves once `epoch` has ended.
    pub(crate) async fn epoch_ended(&self, epoch: Epoch) {
        let mut replaced = self.replaced.subscribe();
        // The sender lives as long as self, so there is no error.
        let _ = replaced.wait_for(|now| *now != epoch.0).await;
    }

    /// Locks the contents, if `epoch` is the current one.
    pub(super) fn contents_of(&self, epoch: Epoch) -> Result<MutexGuard<'_, Contents>, StaleEpoch> {
        let contents = self.contents.lock();
        if contents.epoch == epoch.0 {
            Ok(contents)
        } else {
            Err(StaleEpoch)
        }
    }

    /// Takes in the result of a load, and returns its number. The mirror stays out of service until its feed is established.
    pub(crate) fn fill(&self, epoch: Epoch, loaded: impl Into<LoadedStore>) -> Result<u64, StaleEpoch> {
        let loaded = loaded.into();
        let mut contents = self.contents_of(epoch)?;
        contents.history.note_known(loaded.store.revision());
        self.held_views.record(&loaded.store);
        contents.loaded = Some(loaded);
        contents.generation += 1;
        contents.resumed_at = None;
        Ok(contents.generation)
    }

    /// Bytes of a load that is not in service yet.
    pub(crate) fn loading_bytes(&self) -> u64 {
        self.loading_bytes.load(Ordering::Relaxed)
    }

    /// Records the bytes of a load that is not in service yet.
    pub(crate) fn record_loading(&self, bytes: u64) {
        self.loading_bytes.store(bytes, Ordering::Relaxed);
    }

    /// State of the mirror that a resumed feed is compared with; `None` while nothing is loaded.
    pub(crate) fn anchor(&self, epoch: Epoch) -> Result<Option<Anchor>, StaleEpoch> {
        let contents = self.contents_of(epoch)?;
        Ok(contents.loaded.as_ref().map(|loaded| Anchor {
            revision: loaded.store.revision(),
            key: loaded.newest_key.clone(),
            last_event: loaded.last_event,
            recent: loaded.recent.to_vec(),
            recent_is_full: loaded.recent.is_full(),
            tree: loaded.store.tree().clone(),
            base: match loaded.store.base() {
                Some((tree, revision)) if !loaded.recent.is_full() => Some((tree.clone(), revision)),
                _ => None,
            },
        }))
    }

    /// Records that the contents were loaded, or compared and found the same, in a lineage that raft logs do not show.
    pub(crate) fn note_lineage(&self, epoch: Epoch, lineage: Lineage) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        contents
            .loaded
            .as_mut()
            .ok_or(StaleEpoch)?
            .found_under
            .note(lineage);
        Ok(())
    }

    /// Whether the contents of the load with this number were found in a lineage. What was dropped can be compared no
    /// more, and before the last load that was dropped nothing is known.
    pub(crate) fn was_found_in(&self, generation: u64, lineage: Lineage) -> bool {
        let contents = self.contents.lock();
        match (&contents.loaded, &contents.ended) {
            (Some(loaded), _) if contents.generation == generation => loaded.found_under.contains(lineage),
            (_, Some(ended)) if ended.generation == generation => ended.found_under.contains(lineage),
            _ => false,
        }
    }

    /// Puts the mirror in service with its contents.
    pub(crate) fn put_in_service(&self, epoch: Epoch) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        contents.no_leader_since = None;
        let revision = contents.loaded.as_ref().ok_or(StaleEpoch)?.store.revision();
        contents.resumed_at.get_or_insert(revision);
        if self.revision().is_err() {
            let details = format!("revision {revision}");
            self.changes_of_service
                .record(ChangeKind::MirrorInService, &self.name, details);
        }
        self.publish(&contents)
    }

    /// Applies the events of whole revisions up to `revision`, and shows the result to readers (I3), if the store may apply
    /// them; see [`Store::check_replaced`](etcd_store::cache::Store::check_replaced).
    pub(crate) fn apply_checked(
        &self,
        epoch: Epoch,
        changes: Vec<Change>,
        revision: i64,
        are_brought: bool,
    ) -> Result<Result<Applied, NotApplied>, StaleEpoch> {
        let contents = self.contents_of(epoch)?;
        let store = &contents.loaded.as_ref().ok_or(StaleEpoch)?.store;
        match store.check_replaced(&changes, are_brought) {
            Ok(()) => self.apply_to(contents, changes, revision).map(Ok),
            Err(not_applied) => Ok(Err(not_applied)),
        }
    }

    /// Applies the events of whole revisions up to `revision`, and shows the result to readers (I3).
    #[cfg(test)]
    pub(crate) fn apply(
        &self,
        epoch: Epoch,
        changes: Vec<Change>,
        revision: i64,
    ) -> Result<Applied, StaleEpoch> {
        self.apply_to(self.contents_of(epoch)?, changes, revision)
    }

    fn apply_to(
        &self,
        mut contents: MutexGuard<'_, Contents>,
        changes: Vec<Change>,
        revision: i64,
    ) -> Result<Applied, StaleEpoch> {
        if changes.is_empty() {
            return Err(StaleEpoch);
        }
        if !self.prefixes.is_empty() {
            for prefix in changes.iter().filter_map(|change| figure_prefix(change.key())) {
                self.prefixes.record_write(prefix);
            }
        }
        let now = self.now();
        let loaded = contents.loaded.as_mut().ok_or(StaleEpoch)?;
        let Ok(applied) = loaded.apply(changes, revision, now) else {
            self.drop_damaged(contents);
            return Err(StaleEpoch);
        };
        self.metrics.events.inc_by(applied.applied as u64);
        self.metrics.events_fenced.inc_by(applied.fenced as u64);
        self.publish(&contents)?;
        Ok(applied)
    }

    /// Records that there are no more events up to `revision`, as a progress notification reports.
    pub(crate) fn advance(&self, epoch: Epoch, revision: i64) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        let now = self.now();
        let loaded = contents.loaded.as_mut().ok_or(StaleEpoch)?;
        if revision <= loaded.store.revision() {
            return Ok(());
        }
        loaded.store.advance(revision, now);
        self.publish(&contents)
    }

    /// Takes the mirror out of service but keeps its contents, because its feed was lost; `has_no_leader` if etcd has
    /// ended the feed because it has no leader.
    pub(crate) fn lose_feed(&self, epoch: Epoch, has_no_leader: bool) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        if has_no_leader && contents.no_leader_since.is_none() {
            contents.no_leader_since = Some(Instant::now());
        }
        let last = self.last_view();
        self.set_out(Reason::FeedLost, last);
        Ok(())
    }

    /// Takes the mirror out of service and drops its contents; watchers end by `ended`.
    pub(crate) fn drop_contents(
        &self,
        epoch: Epoch,
        reason: Reason,
        ended: ReaderEnd,
    ) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        self.drop_loaded(&mut contents, ended);
        contents.history = self.cluster_state.current();
        self.reset_wanted(contents.history.id);
        self.set_out(reason, None);
        self.metrics.keys.set(0);
        self.metrics.record_memory((0, 0), TreeMemory::default());
        Ok(())
    }

    /// Forgets what readers wait for: only those of `history` count from now on.
    fn reset_wanted(&self, history: HistoryId) {
        self.wanted.send_modify(|wanted| {
            *wanted = 0;
            self.overdue.store(0, Ordering::Release);
            self.wanted_history.store(history.number(), Ordering::Relaxed);
        });
    }

    /// Drops everything because history was replaced, and ends the epoch. `revision` is one of the new history, 0 if none is
    /// known.
    pub(crate) fn replace_history(&self, revision: i64) {
        let ended = self.ended_by_replacement(revision);
        self.drop_epoch(self.contents.lock(), Reason::HistoryReplaced, ended);
    }

    /// Ends `epoch` and drops its contents, because they cannot be trusted.
    pub(crate) fn end_epoch(&self, epoch: Epoch, reason: Reason) -> Result<(), StaleEpoch> {
        let ended = match reason {
            Reason::Mismatch | Reason::HistoryReplaced => self.ended_by_replacement(0),
            _ => ReaderEnd::Dropped(reason),
        };
        self.drop_epoch(self.contents_of(epoch)?, reason, ended);
        Ok(())
    }

    /// Ends `epoch` and drops its contents once a reader has reported that memory is damaged; returns the reason.
    pub(crate) async fn damage_reported(&self, epoch: Epoch) -> Reason {
        self.held_views.damage_reported().await;
        if let Ok(contents) = self.contents_of(epoch) {
            self.drop_damaged(contents);
        }
        Reason::Damaged
    }

    fn drop_damaged(&self, contents: MutexGuard<'_, Contents>) {
        tracing::error!(
            mirror = self.name,
            "a packed value in memory is damaged; loading its mirror again"
        );
        self.drop_epoch(contents, Reason::Damaged, ReaderEnd::Dropped(Reason::Damaged));
    }

    /// End of watchers whose events were of a replaced history, or wrong.
    fn ended_by_replacement(&self, revision: i64) -> ReaderEnd {
        ReaderEnd::Replaced {
            revision: self.cluster_state.known().max(revision).max(1),
        }
    }

    fn drop_epoch(&self, mut contents: MutexGuard<'_, Contents>, reason: Reason, ended: ReaderEnd) {
        contents.epoch += 1;
        self.drop_loaded(&mut contents, ended);
        self.reset_wanted(self.cluster_state.history());
        self.replaced.send_replace(contents.epoch);
        self.set_out(reason, None);
    }

    /// Drops the contents. Readers may keep their views of them; watchers end by `end`.
    fn drop_loaded(&self, contents: &mut Contents, end: ReaderEnd) {
        if let Some(loaded) = contents.loaded.take() {
            contents.ended = Some(EndedLoad {
                generation: contents.generation,
                end,
                found_under: loaded.found_under,
            });
            self.held_views.record_dropped(&loaded.store);
        }
        self.loading_bytes.store(0, Ordering::Relaxed);
    }

    fn publish(&self, contents: &Contents) -> Result<(), StaleEpoch> {
        let loaded = contents.loaded.as_ref().ok_or(StaleEpoch)?;
        let store = &loaded.store;
        let view = View {
            tree: store.tree().clone(),
            revision: store.revision(),
            history: contents.history.id,
        };
        self.loading_bytes.store(0, Ordering::Relaxed);
        self.record_memory(loaded);
        self.metrics.revision.set(view.revision);
        self.metrics.keys.set(gauge(view.tree.len()));
        self.metrics.oldest_revision.set(store.oldest_revision());
        self.metrics.in_service.set(1);
        contents.history.note_known(view.revision);
        self.state.store(Arc::new(State::In(view)));
        self.was_in_service.store(true, Ordering::Relaxed);
        self.changed.send_replace(());
        Ok(())
    }

    fn record_memory(&self, loaded: &LoadedStore) {
        let store = &loaded.store;
        self.held_views.record(store);
        let (all, history, rebuilt) = (store.memory_bytes(), store.history_bytes(), loaded.past.bytes());
        self.metrics
            .record_memory((all + rebuilt, history + rebuilt), store.tree().memory());
    }

    /// The current keys; `None` while nothing is loaded.
    pub(crate) fn current_tree(&self, epoch: Epoch) -> Result<Option<Tree>, StaleEpoch> {
        let contents = self.contents_of(epoch)?;
        Ok(contents.loaded.as_ref().map(|loaded| loaded.store.tree().clone()))
    }

    /// Reads below each prefix, as far as they are counted.
    pub(crate) fn reads_by_prefix(&self) -> HashMap<Vec<u8>, u64> {
        self.prefixes.reads()
    }

    /// Puts leaves in the place of those that they were made from. Keys, revision and state of
    /// service stay as they are.
    pub(crate) fn put_repacked(&self, epoch: Epoch, repacked: &Repacked) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        let Some(loaded) = &mut contents.loaded else {
            return Ok(());
        };
        loaded.store.put_repacked(repacked);
        loaded.past.clear();
        let tree = || loaded.store.tree().clone();
        let with_tree = |view: &View| View {
            tree: tree(),
            ..view.clone()
        };
        let state = match &**self.state.load() {
            State::In(view) => Some(State::In(with_tree(view))),
            State::Out { reason, last } => last.as_ref().map(|view| State::Out {
                reason: *reason,
                last: Some(with_tree(view)),
            }),
        };
        if let Some(state) = state {
            self.state.store(Arc::new(state));
            self.record_memory(loaded);
        }
        Ok(())
    }

    fn set_out(&self, reason: Reason, last: Option<View>) {
        self.metrics.in_service.set(0);
        if self.revision() != Err(reason) {
            self.changes_of_service
                .record(ChangeKind::MirrorOutOfService, &self.name, reason.as_str());
        }
        self.state.store(Arc::new(State::Out { reason, last }));
        self.changed.send_replace(());
    }

    /// Removes one key, for tests of verification.
    #[cfg(debug_assertions)]
    pub(crate) fn corrupt(&self) {
        let mut contents = self.contents.lock();
        if let Some(loaded) = &contents.loaded {
            let (mut tree, revision) = (loaded.store.tree().clone(), loaded.store.revision());
            if let Some(key) = tree.at(tree.len() / 2).map(|entry| entry.key().to_vec()) {
                tree.remove(&key);
                let limits = *loaded.store.limits();
                let (newest_key, last_event) = (loaded.newest_key.clone(), loaded.last_event);
                let store = etcd_store::cache::Store::new(tree, revision, limits, self.now());
                contents.loaded = Some(LoadedStore {
                    newest_key,
                    last_event,
                    ..store.into()
                });
                let _ = self.publish(&contents);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use etcd_store::cache::{HistoryLimits, Packing, Store, Tree};
    use etcd_store::{cache::testing::KeyValue, keyspace::scope::Scope};
    use rangecache_base::telemetry::Telemetry;

    use super::*;

    /// A mirror of everything, loaded at revision 10, without a feed.
    fn loaded() -> Mirror {
        let mirror = Mirror::new(Scope::prefix(b""), Arc::default(), &Telemetry::default());
        mirror.fill(mirror.epoch(), store(10)).unwrap();
        mirror
    }

    fn serving() -> Mirror {
        let mirror = loaded();
        mirror.put_in_service(mirror.epoch()).unwrap();
        mirror
    }

    fn store(revision: i64) -> Store {
        Store::new(
            Tree::default(),
            revision,
            HistoryLimits::default(),
            Duration::ZERO,
        )
    }

    fn put(key: &str, revision: i64) -> Vec<Change> {
        vec![Change::put(KeyValue::new(key, revision, "value").entry())]
    }

    #[test]
    fn mirror_is_served_once_its_feed_is_proven() {
        let mirror = loaded();
        assert!(mirror.revision().is_err());
        assert!(!mirror.was_in_service());
        mirror.put_in_service(mirror.epoch()).unwrap();
        assert_eq!(mirror.revision(), Ok(10));
    }

    #[test]
    fn late_changes_of_an_ended_epoch_are_rejected() {
        let mirror = serving();
        let old = mirror.epoch();
        mirror.replace_history(0);
        mirror.fill(mirror.epoch(), store(3)).unwrap();
        mirror.put_in_service(mirror.epoch()).unwrap();
        let dropped = ReaderEnd::Dropped(Reason::Loading);
        assert_eq!(mirror.fill(old, store(20)), Err(StaleEpoch));
        assert_eq!(mirror.put_in_service(old), Err(StaleEpoch));
        assert!(mirror.apply(old, put("a", 11), 11).is_err());
        assert_eq!(mirror.advance(old, 12), Err(StaleEpoch));
        assert_eq!(mirror.lose_feed(old, false), Err(StaleEpoch));
        assert!(mirror.anchor(old).is_err());
        assert_eq!(
            mirror.drop_contents(old, Reason::Loading, dropped),
            Err(StaleEpoch)
        );
        assert_eq!(mirror.end_epoch(old, Reason::Panicked), Err(StaleEpoch));
        assert_eq!(mirror.revision(), Ok(3));
    }

    #[test]
    fn change_of_a_damaged_value_ends_the_epoch_and_shows_nothing() {
        let mirror = Mirror::new(Scope::prefix(b""), Arc::default(), &Telemetry::default());
        let entries = ["a", "b"].map(|key| KeyValue::new(key, 10, vec![b'v'; 1000]).entry());
        let mut tree = Tree::load(entries, Packing::Always);
        tree.damage();
        let store = Store::new(tree, 10, HistoryLimits::default(), Duration::ZERO);
        let epoch = mirror.epoch();
        mirror.fill(epoch, store).unwrap();
        mirror.put_in_service(epoch).unwrap();
        assert_eq!(mirror.apply(epoch, put("a", 11), 11), Err(StaleEpoch));
        assert_eq!(mirror.revision(), Err(Reason::Damaged));
    }

    #[test]
    fn progress_at_an_old_revision_changes_nothing() {
        let mirror = serving();
        let mut changes = mirror.changes();
        for (progress, revision, is_change) in
            [(9, 10, false), (10, 10, false), (12, 12, true), (11, 12, false)]
        {
            mirror.advance(mirror.epoch(), progress).unwrap();
            assert_eq!(mirror.revision(), Ok(revision));
            assert_eq!(changes.has_changed().unwrap(), is_change);
            changes.mark_unchanged();
        }
    }

    #[test]
    fn lost_feed_leaves_the_contents_to_the_next_one() {
        let mirror = serving();
        let epoch = mirror.epoch();
        mirror.lose_feed(epoch, false).unwrap();
        assert_eq!(mirror.revision(), Err(Reason::FeedLost));
        assert_eq!(mirror.anchor(epoch).unwrap().unwrap().revision, 10);
        assert_eq!(mirror.last_view().unwrap().revision, 10);
        let dropped = ReaderEnd::Dropped(Reason::Loading);
        mirror.drop_contents(epoch, Reason::Loading, dropped).unwrap();
        assert_eq!(mirror.revision(), Err(Reason::Loading));
        assert!(mirror.anchor(epoch).unwrap().is_none());
        assert!(mirror.last_view().is_none());
        assert_eq!(mirror.put_in_service(epoch), Err(StaleEpoch));
    }

    #[test]
    fn anchor_names_the_last_event_that_has_changed_the_mirror() {
        let mirror = serving();
        let epoch = mirror.epoch();
        let anchor = || mirror.anchor(epoch).unwrap().unwrap();
        mirror.apply(epoch, put("a", 10), 10).unwrap();
        assert_eq!(
            (anchor().last_event, anchor().key),
            (None, None),
            "the load has it"
        );
        mirror.apply(epoch, put("b", 12), 12).unwrap();
        mirror.apply(epoch, put("a", 11), 11).unwrap();
        mirror.advance(epoch, 15).unwrap();
        assert_eq!(anchor().last_event, Some(12));
        assert_eq!(anchor().key.as_deref(), Some(&b"b"[..]));
        assert_eq!(anchor().revision, 15);
    }

    #[test]
    fn watchers_learn_the_first_cause_that_has_dropped_the_contents() {
        let mirror = serving();
        let epoch = mirror.epoch();
        let compacted = ReaderEnd::Compacted { compact_revision: 30 };
        mirror.drop_contents(epoch, Reason::Loading, compacted).unwrap();
        // The load that follows has nothing to drop.
        let dropped = ReaderEnd::Dropped(Reason::Loading);
        mirror.drop_contents(epoch, Reason::Loading, dropped).unwrap();
        let ended = mirror.observe(0, 0).ended;
        assert!(matches!(
            ended,
            Some((1, ReaderEnd::Compacted { compact_revision: 30 }))
        ));
    }

    #[test]
    fn epoch_that_ends_by_wrong_contents_ends_watchers_as_replaced_and_others_do_not() {
        for (reason, is_replaced) in [
            (Reason::Mismatch, true),
            (Reason::HistoryReplaced, true),
            (Reason::Panicked, false),
            (Reason::NotMirrored, false),
        ] {
            let mirror = serving();
            mirror.end_epoch(mirror.epoch(), reason).unwrap();
            assert_eq!(mirror.revision(), Err(reason));
            let (_, ended) = mirror.observe(0, 0).ended.unwrap();
            assert_eq!(matches!(ended, ReaderEnd::Replaced { revision: 10 }), is_replaced);
            assert_eq!(ended == ReaderEnd::Dropped(reason), !is_replaced);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_without_a_leader_begins_at_the_first_lost_feed_and_ends_with_the_next_one() {
        let mirror = serving();
        let (epoch, lost) = (mirror.epoch(), Instant::now());
        for has_no_leader in [true, false, true] {
            mirror.lose_feed(epoch, has_no_leader).unwrap();
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(mirror.observe(0, 0).no_leader_since, Some(lost));
        }
        mirror.put_in_service(epoch).unwrap();
        assert_eq!(mirror.observe(0, 0).no_leader_since, None);
    }

    #[test]
    fn hub_sees_the_lowest_revision_at_which_a_feed_has_resumed_since_it_looked() {
        let mirror = serving();
        let epoch = mirror.epoch();
        mirror.advance(epoch, 15).unwrap();
        mirror.put_in_service(epoch).unwrap();
        assert_eq!(mirror.follow(Some(10), 1).0.resumed_at, Some(10));
        mirror.put_in_service(epoch).unwrap();
        assert_eq!(mirror.follow(Some(15), 1).0.resumed_at, Some(15));
    }

    #[test]
    fn contents_of_a_load_are_found_in_lineages_of_that_load_alone() {
        use etcd_wire::grpc::hub::HubHistory;
        let of_hub = |number| Lineage::Hub(HubHistory { instance: 1, number });
        let mirror = serving();
        let epoch = mirror.epoch();
        assert!(!mirror.was_found_in(1, of_hub(0)), "loaded from etcd");
        mirror.note_lineage(epoch, of_hub(0)).unwrap();
        let load_again = |revision| {
            let dropped = ReaderEnd::Dropped(Reason::Loading);
            mirror.drop_contents(epoch, Reason::Loading, dropped).unwrap();
            assert_eq!(
                mirror.note_lineage(epoch, of_hub(9)),
                Err(StaleEpoch),
                "nothing is loaded"
            );
            mirror.fill(epoch, store(revision)).unwrap();
        };
        load_again(20);
        mirror.note_lineage(epoch, of_hub(1)).unwrap();
        let found = |generation, number| mirror.was_found_in(generation, of_hub(number));
        assert_eq!((found(1, 0), found(1, 1)), (true, false));
        assert_eq!((found(2, 0), found(2, 1)), (false, true));
        load_again(30);
        assert_eq!(
            (found(1, 0), found(2, 1)),
            (false, true),
            "the last one alone is kept"
        );
        assert_eq!((found(3, 1), found(3, 9)), (false, false));
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_an_epoch_is_seen_by_those_that_come_late() {
        let mirror = serving();
        let old = mirror.epoch();
        let waiting = mirror.epoch_ended(old);
        mirror.replace_history(0);
        waiting.await;
        mirror.epoch_ended(old).await;
        let current = mirror.epoch_ended(mirror.epoch());
        assert!(futures_util::FutureExt::now_or_never(current).is_none());
    }
}
