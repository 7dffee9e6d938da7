//! The revision up to which etcd has compacted, exactly. A quorum check finds no more than that a revision is compacted, while
//! a watch is cancelled with the compaction's own.

use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{FutureExt as _, future::Shared};
use parking_lot::Mutex;
use rangecache_upstream::{ConnectionClass, Upstream, compact_revision};
use tokio::{sync::Notify, time::Instant};

use super::known::HistoryId;

/// Timeout for connecting to etcd.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

type Asking = Pin<Box<dyn Future<Output = Option<i64>> + Send>>;

/// Last compaction whose revision etcd has reported.
#[derive(Default)]
pub(crate) struct Compaction {
    /// The history, and the revision.
    reported: Mutex<(HistoryId, i64)>,
    /// The call that asks etcd, shared by all that wait for it.
    call: Mutex<Option<Shared<Asking>>>,
    /// Wakes the probe: a check has found a compaction, and the probe asks how far it reaches.
    found: Notify,
}

impl fmt::Debug for Compaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compaction").finish_non_exhaustive()
    }
}

impl Compaction {
    /// Wakes [`Compaction::found`]: a check has found that a revision is compacted.
    pub(crate) fn wake(&self) {
        self.found.notify_one();
    }

    /// Waits until a check has found a compaction.
    pub(crate) async fn found(&self) {
        self.found.notified().await;
    }

    /// Records that etcd has reported `revision` in `history`.
    pub(crate) fn record(&self, history: HistoryId, revision: i64) {
        let mut reported = self.reported.lock();
        if reported.0 == history {
            reported.1 = reported.1.max(revision);
        } else {
            *reported = (history, revision);
        }
    }

    /// The revision that etcd has reported in `history`, if it is above `revision`.
    pub(crate) fn reported_above(&self, history: HistoryId, revision: i64) -> Option<i64> {
        let (reported_in, compacted) = *self.reported.lock();
        (reported_in == history && compacted > revision).then_some(compacted)
    }

    /// Asks etcd, which has compacted `revision`, unless a call is in flight: then waits for that. `key` is one that
    /// rangecache may read. `None` without a response.
    pub(crate) async fn ask(&self, upstream: &Arc<Upstream>, key: Bytes, revision: i64) -> Option<i64> {
        let upstream = Arc::clone(upstream);
        let asking = async move {
            let deadline = Instant::now() + CONNECT_TIMEOUT;
            let connection = upstream.connection(ConnectionClass::Check, deadline).await.ok()?;
            compact_revision(&connection, &key, revision).await
        };
        self.share(Box::pin(asking)).await
    }

    /// The call in flight; otherwise `asking` is.
    fn share(&self, asking: Asking) -> Shared<Asking> {
        let mut call = self.call.lock();
        match &*call {
            Some(call) if call.peek().is_none() => call.clone(),
            _ => call.insert(asking.shared()).clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn callers_share_the_call_in_flight_and_begin_another_after_it() {
        let compaction = Compaction::default();
        let (reply, response) = tokio::sync::oneshot::channel::<i64>();
        let first = compaction.share(Box::pin(async move { response.await.ok() }));
        let second = compaction.share(Box::pin(async { None }));
        reply.send(7).unwrap();
        assert_eq!((first.await, second.await), (Some(7), Some(7)));
        let third = compaction.share(Box::pin(async { Some(9) }));
        assert_eq!(third.await, Some(9));
    }

    #[test]
    fn compaction_of_another_history_is_forgotten() {
        let compaction = Compaction::default();
        compaction.record(HistoryId::of(1), 70);
        compaction.record(HistoryId::of(1), 60);
        assert_eq!(compaction.reported_above(HistoryId::of(1), 69), Some(70));
        assert_eq!(compaction.reported_above(HistoryId::of(1), 70), None);
        assert_eq!(compaction.reported_above(HistoryId::of(2), 3), None);
        compaction.record(HistoryId::of(2), 5);
        assert_eq!(compaction.reported_above(HistoryId::of(2), 3), Some(5));
    }
}
