//! The ways of a stream from one source to the other, without a gap and without a repetition (W9), and what follows if
//! etcd's history is replaced meanwhile (W10). Nothing else changes the source of a stream.
//!
//! ```text
//!            cannot serve a create;          the mirrors have what
//!            they lack what etcd has         etcd needs, or it is late
//!            compacted
//! memory ───────────────────────▶ leaving ───────────────────────▶ etcd
//!   │ ▲                                                            ▲ │
//!   │ └────────── a barrier was reached, and all watchers joined ──┼─┘
//!   │             or their history was replaced: they are cancelled│
//!   └──────────── cannot serve the stream ─────────────────────────┘
//! ```

use std::{sync::Arc, time::Duration};

use rangecache_base::telemetry::Reason;
use rangecache_mirror::lineage::History;

use super::memory::{Leave, Session};
use super::{etcd_stream::EtcdStream, relay::Relay, returning::Joined, watchers::Watcher};

/// Longest wait for a mirror that is behind etcd's compaction, or behind a watcher, before the stream leaves memory.
const MIRROR_TIMEOUT: Duration = Duration::from_millis(500);

impl Session {
    /// Lets etcd continue a stream that memory cannot serve any longer, at once or when the mirrors have what they must have.
    pub(super) fn leave_memory(&mut self, leave: Leave) {
        match (self.leaving.take(), self.awaited()) {
            // Without a request the mirror has been dropped, and will not reach it.
            (None, Some(awaited)) if leave.create.is_some() => {
                self.watchers.want(&self.down.stream, awaited, |_| true);
                self.leaving = Some((leave, Box::pin(tokio::time::sleep(MIRROR_TIMEOUT))));
            }
            (leaving, _) => {
                let earlier = leaving.and_then(|(leave, _)| leave.create);
                self.hand_over(Leave {
                    create: leave.create.or(earlier),
                    ..leave
                });
            }
        }
    }

    /// Lets etcd continue the stream from the revision up to which each watcher's events were sent.
    fn hand_over(&mut self, leave: Leave) {
        let Leave { reason, create } = leave;
        tracing::debug!(reason = reason.as_str(), "a watch stream leaves memory");
        // Read before the watchers' histories are compared with it: etcd must continue them in that one.
        let history = self.down.mirrors().cluster_state.current();
        if self.cancel_replaced() {
            // The other watchers and the request are planned again.
            return self.down.handle_first(create);
        }
        if self.watchers.unproven().is_some() {
            return self.down.interrupt(Reason::NotFresh);
        }
        let create = create.or_else(|| self.take_starting());
        if create.is_some() {
            self.down.metrics().record_created("etcd", reason.as_str());
        }
        self.down.metrics().record_handover("etcd", reason.as_str());
        self.down.handle_first(create);
        self.open_etcd(reason, history);
    }

    /// Opens the call to etcd that continues the stream, whose watchers are of `history`, because memory cannot serve it for
    /// `reason`.
    pub(super) fn open_etcd(&mut self, reason: Reason, history: Arc<History>) {
        let watchers = self.take_watchers();
        let down = &mut self.down;
        let readers = watchers.all().map(|watcher| (watcher.mirror, &watcher.reader));
        let watched = down.mirrors().watched(readers);
        for watcher in watchers.all() {
            down.bytes.remove_watcher(&watcher.create);
        }
        // Watchers that were cancelled for a compaction keep their ids, as at etcd.
        let taken = down.cancelled_ids().collect();
        let shown = down.reported.max(down.last_event);
        let relay = Relay::new(down.ids.clone(), watchers.carried(), taken, shown);
        down.bytes.set_relayed(relay.held_bytes());
        down.serve_from_etcd(reason);
        let (client, parts) = (&down.stream.client, down.stream.parts.clone());
        let etcd = EtcdStream::open(client, parts, relay, history, watched, reason);
        self.etcd = Some(Box::new(etcd));
    }

    /// Continues the stream from memory: `joined` have every event above `revision`.
    pub(super) fn return_to_memory(&mut self, revision: i64, joined: Vec<Joined>) {
        tracing::debug!(revision, "a watch stream returns to memory");
        let owes_progress = self.close_etcd().is_some_and(|relay| relay.owes_progress());
        self.down.metrics().record_handover("memory", "mirrored");
        self.down.reported = self.down.reported.max(revision);
        for Joined {
            watcher,
            mirror,
            reader,
        } in joined
        {
            let (id, open) = (watcher.id, self.down.open_watcher(mirror));
            self.add(id, Watcher::returned(watcher, revision, reader, mirror, open));
        }
        if owes_progress {
            self.request_progress();
        }
    }

    /// Cancels the watchers that memory has handed over to etcd, because the history of their revisions was replaced. If etcd
    /// has created others on the same stream, it ends, and the client resumes it.
    pub(super) fn cancel_handed_over(&mut self) {
        let etcd = self.etcd.as_mut();
        let Some(abandoned) = etcd.and_then(|etcd| etcd.relay.abandon()) else {
            return self.down.interrupt(Reason::HistoryReplaced);
        };
        self.close_etcd();
        self.down.handle_first(abandoned.unanswered);
        for (id, create) in abandoned.watchers {
            if abandoned.cancelled.contains(&id) {
                self.down.send_cancelled(id);
            } else {
                self.down.bytes.add_watcher(&create);
                self.down.cancel_of_replaced(id, create);
            }
        }
    }

    /// Lets memory serve the stream, without watchers; returns what the relay knows.
    fn close_etcd(&mut self) -> Option<Relay> {
        let relay = self.etcd.take()?.relay;
        self.down.ids = relay.ids().clone();
        self.down.serve_from_memory();
        Some(relay)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::request::{Create, WatchRequest};
    use super::{super::testing::downstream, *};
    use crate::testing::Scene;

    #[tokio::test]
    async fn stream_that_has_waited_leaves_with_the_request_for_which_it_waited() {
        let scene = Scene::new(&[]);
        let mut session = Session::new(downstream(&scene, &[], Bytes::new()));
        let leave = |reason, create| Leave { reason, create };
        let earlier = leave(Reason::Auth, Some(Create::default()));
        session.leaving = Some((earlier, Box::pin(tokio::time::sleep(MIRROR_TIMEOUT))));
        session.leave_memory(leave(Reason::FeedLost, None));
        assert!(session.etcd.is_some() && session.leaving.is_none());
        assert_eq!(session.down.unsent, [WatchRequest::Create(Create::default())]);
    }
}
