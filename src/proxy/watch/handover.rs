//! The ways of a stream from one source to the other, without a gap and without a repetition (W9), and what follows if
//! etcd's history is replaced meanwhile (W10). Nothing else makes one source from another.
//!
//! ```text
//!            cannot serve a create;          the mirrors have what
//!            they lack what etcd has         etcd needs, or it is late
//!            compacted
//! Memory ───────────────────────▶ Leaving ───────────────────────▶ Etcd
//!   │ ▲                                                            ▲ │
//!   │ └────────── a barrier was reached, and all watchers joined ──┼─┘
//!   │             or their history was replaced: they are cancelled│
//!   └──────────── cannot serve the stream ─────────────────────────┘
//! ```

use std::collections::BTreeSet;

use super::downstream::Downstream;
use super::etcd::EtcdSource;
use super::memory::{Leave, MemorySource, PendingLeave};
use super::relay::Relay;
use super::returning::Joined;
use super::watchers::Watcher;
use rangecache_base::telemetry::Reason;
use rangecache_mirror::WatchedLoads;

/// Serves a stream.
#[derive(Debug)]
pub(super) enum ServedBy {
    Memory(Box<MemorySource>),
    /// Memory, which takes no requests, until its mirrors have what they must have.
    Leaving(Box<MemorySource>, PendingLeave),
    Etcd(Box<EtcdSource>),
}

/// A stream without watchers, which memory may serve once `reason` has passed.
pub(super) fn begin_at_etcd(down: &mut Downstream, reason: Reason) -> ServedBy {
    let history = down.mirrors().cluster_state.current();
    let relay = Relay::new(down.ids.clone(), Vec::new(), BTreeSet::new(), 0);
    ServedBy::Etcd(Box::new(EtcdSource::open(
        down,
        reason,
        relay,
        history,
        WatchedLoads::default(),
    )))
}

/// Lets etcd continue a stream that `memory` cannot serve any longer, at once or when the mirrors have what they must have.
pub(super) fn leave(memory: Box<MemorySource>, leave: Leave, down: &mut Downstream) -> ServedBy {
    // Without a request the mirror has been dropped, and will not reach it.
    match memory.awaited(down) {
        Some(awaited) if leave.create.is_some() => {
            memory.watchers.want(&down.stream, awaited, |_| true);
            ServedBy::Leaving(memory, PendingLeave::new(leave))
        }
        _ => hand_over(memory, leave, down),
    }
}

/// Lets etcd continue the stream from the revision up to which each watcher's events were sent.
pub(super) fn hand_over(mut memory: Box<MemorySource>, leave: Leave, down: &mut Downstream) -> ServedBy {
    let Leave { reason, create } = leave;
    tracing::debug!(reason = reason.as_str(), "a watch stream leaves memory");
    // Read before the watchers' histories are compared with it: etcd must continue them in that one.
    let history = down.mirrors().cluster_state.current();
    if memory.cancel_replaced(down) {
        // The other watchers and the request are planned again.
        down.handle_first(create);
        return ServedBy::Memory(memory);
    }
    if memory.watchers.unproven().is_some() {
        down.interrupt(Reason::NotFresh);
        return ServedBy::Memory(memory);
    }
    let create = create.or_else(|| memory.take_starting());
    if create.is_some() {
        down.metrics().record_created("etcd", reason.as_str());
    }
    down.metrics().record_handover("etcd", reason.as_str());
    let readers = memory
        .watchers
        .all()
        .map(|watcher| (watcher.mirror, &watcher.reader));
    let watched = down.mirrors().watched(readers);
    memory
        .watchers
        .all()
        .for_each(|watcher| down.bytes.remove_watcher(&watcher.create));
    // Watchers that were cancelled for a compaction keep their ids, as at etcd.
    let taken = down.cancelled_ids().collect();
    let shown = down.reported.max(down.last_event);
    let relay = Relay::new(down.ids.clone(), memory.watchers.carried(), taken, shown);
    down.handle_first(create);
    ServedBy::Etcd(Box::new(EtcdSource::open(down, reason, relay, history, watched)))
}

/// Continues the stream of `etcd` from memory: `joined` have every event above `revision`.
pub(super) fn return_to_memory(
    mut etcd: Box<EtcdSource>,
    revision: i64,
    joined: Vec<Joined>,
    down: &mut Downstream,
) -> ServedBy {
    tracing::debug!(revision, "a watch stream returns to memory");
    let mut memory = memory_after(&mut etcd, down);
    down.metrics().record_handover("memory", "mirrored");
    down.reported = down.reported.max(revision);
    for Joined {
        watcher,
        mirror,
        reader,
    } in joined
    {
        let (id, open) = (watcher.id, down.open_watcher(mirror));
        let watcher = Watcher::returned(watcher, revision, reader, mirror, open);
        memory.add(down, id, watcher);
    }
    if etcd.relay().owes_progress() {
        memory.request_progress(down);
    }
    ServedBy::Memory(memory)
}

/// Cancels the watchers that memory has handed over to `etcd`, because the history of their revisions was replaced. If etcd
/// has created others on the same stream, it ends, and the client resumes it.
pub(super) fn cancel_handed_over(mut etcd: Box<EtcdSource>, down: &mut Downstream) -> ServedBy {
    let Some(abandoned) = etcd.relay().abandon() else {
        down.interrupt(Reason::HistoryReplaced);
        return ServedBy::Etcd(etcd);
    };
    let memory = memory_after(&mut etcd, down);
    down.handle_first(abandoned.unanswered);
    for (id, create) in abandoned.watchers {
        if abandoned.cancelled.contains(&id) {
            down.send_cancelled(id);
        } else {
            down.bytes.add_watcher(&create);
            down.cancel_of_replaced(id, create);
        }
    }
    ServedBy::Memory(memory)
}

/// Memory without watchers, which serves the stream of `etcd` from now on.
fn memory_after(etcd: &mut EtcdSource, down: &mut Downstream) -> Box<MemorySource> {
    down.ids = etcd.relay().ids().clone();
    down.serve_from_memory();
    Box::new(MemorySource::new(down))
}
