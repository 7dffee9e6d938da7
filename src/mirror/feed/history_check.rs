//! Whether the member behind a connection is of the known history, before etcd continues on it what memory has begun
//! (W10), and before the first quorum check on it proves a read (I1). A lower revision, another cluster or a shorter raft log is found by quorum checks as well; a rollback whose
//! lost revisions were written again shows only in the events.

use std::sync::Arc;

use tokio::time::Instant;

use super::compare_history;
use super::end::FeedEnd;
use crate::mirror::history::{HistoryId, Position};
use crate::mirror::load::LoadCause;
use crate::mirror::mirrors::Mirrors;
use crate::mirror::view::Mirror;
use crate::upstream::Connection;

impl Mirrors {
    /// Whether the member behind `connection` is of `history`: its events continue those of each mirror.
    /// Where etcd cannot send them any more, and while a mirror is empty, its raft log decides, unless `is_handover`: watchers
    /// whose last event nothing can show do not continue. This is asked once per connection and history; if the history is
    /// another one, every mirror is dropped.
    pub async fn is_of_history(
        &self,
        connection: &Arc<Connection>,
        history: HistoryId,
        is_handover: bool,
    ) -> bool {
        if connection.is_of_history(history.number()) {
            return true;
        }
        // Streams that continue on the same connection wait for one comparison.
        let Ok(_turn) = connection.history_turn().acquire().await else {
            return false;
        };
        if connection.is_of_history(history.number()) {
            return true;
        }
        for mirror in self.all() {
            if let Err(end) = self.compare(mirror, connection, is_handover).await {
                tracing::debug!(mirror = mirror.name, endpoint = %connection.url(), explanation = %end,
                    "a connection is not known to be of the mirror's history");
                return false;
            }
        }
        // A history is never current again.
        let is_current = self.cluster_state.history() == history;
        if is_current {
            connection.set_history(history.number());
        }
        is_current
    }

    /// Time by which a connection must have been opened on which etcd continues watchers of the mirrors at `positions`: a mirror
    /// that was removed since cannot be compared with etcd any more. `None` if none was removed.
    pub fn opened_by(&self, positions: impl Iterator<Item = usize>) -> Option<Instant> {
        positions
            .filter_map(|position| self.slots.get(position)?.opened_by())
            .min()
    }

    /// Whether the history behind `connection`, on which a feed of `mirror` resumes at `revision`, holds what mirrors further
    /// ahead have: the proof of this feed alone concerns lower revisions.
    ///
    /// # Errors
    /// As [`compare_history`], but for what etcd cannot show any more.
    pub(in crate::mirror) async fn others_continue(
        &self,
        mirror: &Mirror,
        revision: i64,
        connection: &Arc<Connection>,
    ) -> Result<(), FeedEnd> {
        for other in self.all().filter(|other| !std::ptr::eq(*other, mirror)) {
            let anchor = other.anchor(other.epoch())?;
            if anchor.is_some_and(|anchor| anchor.revision > revision) {
                self.compare(other, connection, false).await?;
            }
        }
        Ok(())
    }

    /// Compares one mirror; what nothing can show is an error only if `is_handover`.
    async fn compare(
        &self,
        mirror: &Mirror,
        connection: &Arc<Connection>,
        is_handover: bool,
    ) -> Result<(), FeedEnd> {
        if mirror.anchor(mirror.epoch())?.is_none() {
            return self.compare_log(mirror, connection).await;
        }
        match compare_history(self, mirror, connection).await {
            // The raft log was compared before, and etcd refuses watchers of what it has compacted.
            Err(FeedEnd::Reload(LoadCause::Compacted(_), _)) => Ok(()),
            Err(FeedEnd::Reload(LoadCause::Unproven, _)) if !is_handover => Ok(()),
            compared => compared,
        }
    }

    async fn compare_log(&self, mirror: &Mirror, connection: &Arc<Connection>) -> Result<(), FeedEnd> {
        let before = self.cluster_state.before_check();
        let position = Position::read(connection, mirror.scope.key(), &before).await?;
        if position.continues(&before) {
            return Ok(());
        }
        self.replace_history(
            &before,
            position.header.revision,
            "the history behind a connection is not the known one",
        );
        Err(FeedEnd::StaleEpoch)
    }
}
