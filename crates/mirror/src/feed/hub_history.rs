//! Histories of a hub: under which of its numbers the contents of a mirror were loaded, or found. A raft log cannot be compared through
//! a hub, so that only contents show that the history is the same under another number. Watchers continue under a number of their
//! load's contents alone.

use super::member::Feeding;
use crate::view::StaleEpoch;
use etcd_wire::grpc::hub::HubHistory;
use rangecache_upstream::Connection;

impl Feeding<'_> {
    /// Records that the mirror's contents were found on the connection since hubs have proven what is in `first` on it.
    pub(super) fn note_compared(&self, first: &[HubHistory]) -> Result<(), StaleEpoch> {
        let Some(now) = self.connection.proven_by_hub() else {
            return Ok(());
        };
        if first.contains(&now.history) || first.is_empty() && now.is_first {
            self.mirror.note_hub(self.epoch, now.history)?;
        }
        Ok(())
    }

    /// Records that the mirror was loaded by a connection on which the hub has never proven another history.
    pub(super) fn note_loaded(&self, loaded_by: &Connection) -> Result<(), StaleEpoch> {
        match loaded_by.hub_history() {
            Some(of_hub) => self.mirror.note_hub(self.epoch, of_hub),
            None => Ok(()),
        }
    }
}
