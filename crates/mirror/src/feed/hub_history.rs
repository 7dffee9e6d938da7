//! Histories of a hub: which of its numbers are those of the mirrors' history. A raft log cannot be compared through a hub, so that
//! only contents show that the history is the same under another number. Watchers continue under a known one alone.

use super::member::Feeding;
use crate::history::Before;
use etcd_wire::grpc::hub::HubHistory;
use rangecache_upstream::Connection;

impl Feeding<'_> {
    /// Records that the mirror's contents were found on the connection since the hub has proven `first` on it, if that was one. While
    /// other numbers are known, that needs contents that show one (`shows_hub`).
    pub(super) fn note_compared(&self, before: &Before, first: Option<HubHistory>, shows_hub: bool) {
        if let Some(now) = self.connection.proven_by_hub() {
            let is_unchanged = first.map_or(now.is_first, |first| first == now.history);
            let is_shown = shows_hub || before.history.knows_hub(now.history).is_none();
            if is_unchanged && is_shown {
                before.history.note_hub(now.history);
            }
        }
    }

    /// Records that the mirror was loaded by a connection, unless the number of its hub is another one than those that are known:
    /// what the mirror had before, and who watched it, may be of another history.
    pub(super) fn note_loaded(&self, before: &Before, loaded_by: &Connection) {
        if let Some(of_hub) = loaded_by.hub_history()
            && before.history.knows_hub(of_hub).is_none()
        {
            before.history.note_hub(of_hub);
        }
    }
}
