//! The way of a stream from memory to etcd, without a gap and without a repetition (W9), and what follows if etcd's
//! history is replaced meanwhile (W10).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::Context;

use tokio::time::Instant;

use super::Session;
use super::departure::Departure;
use crate::grpc::Status;
use crate::mirror::cluster_state::History;
use crate::mirror::watch_hub::Reader;
use crate::proxy::watch::etcd_stream::EtcdStream;
use crate::proxy::watch::handover::Carried;
use crate::proxy::watch::relay::Relay;
use crate::proxy::watch::request::{Create, WatchRequest};
use crate::proxy::watch::watcher::Watcher;
use crate::telemetry::Reason;

impl Session {
    /// Lets etcd continue the stream from the revision up to which each watcher's events were sent. `create` is a
    /// request that was not answered.
    pub(super) fn leave(&mut self, reason: Reason, create: Option<Create>) {
        let waiting = self.leaving.take().and_then(|leaving| leaving.create);
        // Otherwise the mirror has been dropped, and will not reach it, also if a request has waited for that.
        if create.is_some()
            && let Some(awaited) = self.awaited()
        {
            let history = self.mirrors().cluster_state.history();
            for (position, mirror) in self.mirrors().positions() {
                if self.watchers.values().any(|watcher| watcher.mirror == position) {
                    mirror.want(history, awaited);
                    if let Some(hub) = self.mirrors().watch_hub(mirror) {
                        hub.signal_at(awaited, &self.stream.signal);
                    }
                }
            }
            self.leaving = Some(Departure::new(reason, create));
            return;
        }
        self.hand_over(reason, create.or(waiting));
    }

    /// Lets the stream leave once its mirrors have what etcd has compacted, and what its watchers had before they joined;
    /// registers `cx` until then.
    pub(super) fn poll_leaving(&mut self, cx: &mut Context<'_>) {
        let Some(mut leaving) = self.leaving.take() else {
            return;
        };
        if self.awaited().is_some() && leaving.expires.as_mut().poll(cx).is_pending() {
            self.leaving = Some(leaving);
        } else {
            self.hand_over(leaving.reason, leaving.create);
        }
    }

    /// Revision that the mirrors have yet to reach before etcd can continue the watchers: a mirror of few keys reaches etcd's
    /// revision late. Otherwise etcd would cancel a watcher, though it has sent it every event that it has compacted (W11), or
    /// continue one with events that were not compared (W10).
    fn awaited(&self) -> Option<i64> {
        let compacted = self.mirrors().cluster_state.compacted();
        let is_behind_compaction = self.watchers.values().any(|watcher| {
            let reader = watcher.reader.as_ref();
            reader.is_some_and(|reader| covered(reader, watcher.since) + 1 < compacted)
        });
        let behind_compaction = is_behind_compaction.then_some(compacted);
        behind_compaction.max(self.unproven())
    }

    /// Highest revision of a watcher's events that the mirrors have not proven.
    fn unproven(&self) -> Option<i64> {
        self.watchers.values().filter_map(Watcher::unproven).max()
    }

    fn hand_over(&mut self, reason: Reason, create: Option<Create>) {
        tracing::debug!(reason = reason.as_str(), "a watch stream leaves memory");
        // Read before the watchers' histories are compared with it: etcd must continue them in that one.
        let history = self.mirrors().cluster_state.current();
        if self.cancel_replaced() {
            // The other watchers and the request are planned again.
            self.handle_first(create);
            return;
        }
        if self.unproven().is_some() {
            return self.interrupt(Reason::NotFresh);
        }
        let carried: Vec<_> = self
            .watchers
            .iter()
            .filter_map(|(id, watcher)| {
                let reader = watcher.reader.as_ref()?;
                Some(Carried {
                    id: *id,
                    create: watcher.create.clone(),
                    through: covered(reader, watcher.since),
                    quiet_since: watcher
                        .create
                        .options
                        .progress_notify
                        .then_some(watcher.quiet_since),
                })
            })
            .collect();
        let create = create.or_else(|| Some(self.starting.take()?.create));
        if create.is_some() {
            self.metrics().record_created("etcd", reason.as_str());
        }
        self.metrics().record_handover("etcd", reason.as_str());
        let positions = self.watchers.values().filter(|watcher| watcher.reader.is_some());
        let opened_by = self.mirrors().opened_by(positions.map(|watcher| watcher.mirror));
        for watcher in &carried {
            self.remove(watcher.id);
        }
        // The watchers that are left were cancelled for a compaction; etcd would keep their ids, too.
        let taken = self.watchers.keys().copied().collect();
        let shown = self.progress.reported.max(self.last_event);
        let relay = Relay::new(self.ids.clone(), carried, taken, shown);
        self.progress.requested = None;
        self.progress.stop();
        self.handle_first(create);
        self.open_etcd(reason, relay, history, opened_by);
    }

    /// Puts a create request that was not answered before the requests behind it.
    fn handle_first(&mut self, create: Option<Create>) {
        if let Some(create) = create {
            self.unsent.push_front(WatchRequest::Create(create));
        }
    }

    /// Serves a stream without watchers from etcd, which memory may serve once `reason` has passed.
    pub(in crate::proxy::watch) fn begin_at_etcd(&mut self, reason: Reason) {
        let history = self.mirrors().cluster_state.current();
        let relay = Relay::new(self.ids.clone(), Vec::new(), BTreeSet::new(), 0);
        self.open_etcd(reason, relay, history, None);
    }

    fn open_etcd(&mut self, reason: Reason, relay: Relay, history: Arc<History>, opened_by: Option<Instant>) {
        let (client, parts) = (&self.stream.client, self.stream.parts.clone());
        self.bytes.set_relayed(relay.held_bytes());
        self.open = self.metrics().open_etcd(reason.as_str());
        self.etcd = Some(EtcdStream::open(client, parts, relay, history, opened_by));
        self.expect_return(reason);
    }

    /// Cancels the watchers whose events were of a history that was replaced (W10); returns whether there were any.
    fn cancel_replaced(&mut self) -> bool {
        let number = self.mirrors().cluster_state.history();
        let is_replaced = |reader: &Reader| reader.history() != number;
        let replaced: Vec<i64> = self
            .watchers
            .iter()
            .filter(|(_, watcher)| watcher.reader.as_ref().is_some_and(is_replaced))
            .map(|(id, _)| *id)
            .collect();
        for id in &replaced {
            self.cancel_of_replaced(*id);
        }
        !replaced.is_empty()
    }

    /// Cancels the watchers that memory has handed over, because the history of their revisions was replaced. If etcd
    /// has created others on the same stream, it ends, and the client resumes it.
    pub(super) fn cancel_handed_over(&mut self) {
        let Some(etcd) = &mut self.etcd else {
            return;
        };
        if !etcd.relay.has_watchers_of_memory() {
            // etcd ends them as it sees fit. The stream does not return.
            return;
        }
        let Some(abandoned) = etcd.relay.abandon() else {
            return self.interrupt(Reason::HistoryReplaced);
        };
        self.ids = etcd.relay.ids().clone();
        self.etcd = None;
        self.returning = None;
        self.bytes.set_relayed(0);
        self.open = self.metrics().open_memory();
        self.handle_first(abandoned.unanswered);
        for (id, create) in abandoned.watchers {
            self.add(id, Watcher::cancelled(create));
            if abandoned.cancelled.contains(&id) {
                self.cancel(id);
            } else {
                self.cancel_of_replaced(id);
            }
        }
    }

    /// Cancels the watcher `id` with a revision of the history that has replaced its own.
    fn cancel_of_replaced(&mut self, id: i64) {
        let revision = self.mirrors().cluster_state.known().max(1);
        self.cancel_compacted(id, revision, "replaced");
    }

    /// Ends the stream; its client connects again and resumes.
    pub(super) fn interrupt(&mut self, reason: Reason) {
        self.metrics().record_created("interrupted", reason.as_str());
        self.end = Some(Status::WatchInterrupted);
    }
}

/// Revision up to which a watcher's events were sent, or there was none. Not below the revision after which it begins.
fn covered(reader: &Reader, since: i64) -> i64 {
    reader.covered().max(since.saturating_sub(1))
}
