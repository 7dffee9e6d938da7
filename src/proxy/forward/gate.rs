//! Turns of calls that etcd answers at once: small reads, the beginnings of streams, new watches. Scans of memory have turns, too.

use std::sync::Arc;

use tokio::time::Instant;

use rangecache_edge::limits::{ClientAccount, NoTurn, Turn, Turns};

/// Access of one call to the turns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gate<'a> {
    pub(crate) turns: &'a Arc<Turns>,
    /// Account of the client's connection.
    pub(crate) account: &'a Arc<ClientAccount>,
    /// Deadline set by the client.
    pub(crate) deadline: Option<Instant>,
}

impl Gate<'_> {
    /// Waits for a turn.
    ///
    /// # Errors
    /// [`NoTurn`] at the deadline, or if too many calls wait.
    pub(crate) async fn acquire(self) -> Result<Turn, NoTurn> {
        self.turns.acquire(self.account, self.deadline).await
    }
}
