//! Whether the member behind a connection is of the known history, before etcd continues on it what memory has begun
//! (W10). A lower revision, another cluster or a shorter raft log is found by quorum checks as well; a rollback whose
//! lost revisions were written again shows only in the events.

use std::sync::Arc;

use super::cluster_state::History;
use super::feed::compare_history;
use super::feed_end::FeedEnd;
use super::mirrors::Mirrors;
use super::position::Position;
use super::state::Mirror;
use crate::upstream::Connection;

impl Mirrors {
    /// Whether the member behind `connection` is of `history`: its events continue those of each mirror. Where etcd
    /// cannot send them any more, and while a mirror is empty, its raft log decides. This is asked once per connection
    /// and history; if the history is another one, every mirror is dropped.
    pub async fn is_of_history(&self, connection: &Arc<Connection>, history: &Arc<History>) -> bool {
        let number = history.number;
        if connection.is_of_history(number) {
            return true;
        }
        // Streams that continue on the same connection wait for one comparison.
        let Ok(_turn) = self.history_checks.acquire().await else {
            return false;
        };
        if connection.is_of_history(number) {
            return true;
        }
        for mirror in self.all() {
            if let Err(end) = self.compare(mirror, connection).await {
                tracing::debug!(mirror = mirror.name, endpoint = %connection.url(), explanation = %end,
                    "a connection is not known to be of the mirror's history");
                return false;
            }
        }
        // A history is never current again.
        let is_current = self.cluster_state.history() == number;
        if is_current {
            connection.set_history(number);
        }
        is_current
    }

    /// Whether the history behind `connection`, on which a feed of `mirror` resumes at `revision`, holds what mirrors further
    /// ahead have: the proof of this feed alone concerns lower revisions.
    ///
    /// # Errors
    /// As [`compare_history`], but for what etcd cannot show any more.
    pub(super) async fn others_continue(
        &self,
        mirror: &Mirror,
        revision: i64,
        connection: &Arc<Connection>,
    ) -> Result<(), FeedEnd> {
        for other in self.all().filter(|other| !std::ptr::eq(*other, mirror)) {
            let anchor = other.anchor(other.epoch())?;
            if anchor.is_some_and(|anchor| anchor.revision > revision) {
                self.compare(other, connection).await?;
            }
        }
        Ok(())
    }

    async fn compare(&self, mirror: &Mirror, connection: &Arc<Connection>) -> Result<(), FeedEnd> {
        if mirror.anchor(mirror.epoch())?.is_none() {
            return self.compare_log(mirror, connection).await;
        }
        match compare_history(self, mirror, connection).await {
            // The raft log was compared before.
            Err(FeedEnd::Reload(..)) => Ok(()),
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
