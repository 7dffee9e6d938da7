//! Events of a stream: whose are sent next, and what follows their end.

use std::ops::Bound;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::Instant;

use super::resuming::Resuming;
use super::{MAX_STEPS, Session};
use crate::cache::WatchFields;
use crate::mirror::watch_hub::{Ended, Reader, Taken};
use crate::proxy::watch::message::EventMessages;
use crate::proxy::watch::watcher::Watcher;
use crate::telemetry::Reason;

/// Events of one response: more wait for the next one, unless they are of one revision.
const MAX_EVENTS: usize = 1000;
/// Bytes of one response.
const MAX_RESPONSE_BYTES: u64 = 64 << 10;

impl Session {
    /// Takes events of the next watcher that has any, or handles its end.
    pub(super) fn poll_events(&mut self, cx: &mut Context<'_>) {
        match self.bytes.poll_room(cx) {
            Poll::Pending => return,
            Poll::Ready(Err(_)) => return self.leave(Reason::OverBudget, None),
            Poll::Ready(Ok(())) => {}
        }
        self.take_events(cx);
        if self.message.is_none() {
            self.bytes.release_room();
        }
    }

    fn take_events(&mut self, cx: &mut Context<'_>) {
        let awaits_feed = self.awaits_feed(cx);
        for _ in 0..MAX_STEPS {
            let Some(id) = self.next_turn(awaits_feed) else {
                return;
            };
            self.last_turn = id;
            let Some(watcher) = self.watchers.get_mut(&id) else {
                return;
            };
            let Some(reader) = &mut watcher.reader else {
                return;
            };
            let max_events = if self.progress.requested.is_some() {
                1
            } else {
                MAX_EVENTS
            };
            let bytes = &mut self.bytes;
            match reader.take_if(max_events, MAX_RESPONSE_BYTES, |picked| {
                bytes.admit(picked.bytes())
            }) {
                Taken::Nothing { .. } => {}
                // Polled again, so that the room wakes the stream.
                Taken::Refused => return cx.waker().wake_by_ref(),
                Taken::Ended(ended) => return self.ended(id, ended),
                Taken::Events(picked) => {
                    let Some(revision) = EventMessages::last_revision(&picked, watcher.create.options) else {
                        continue;
                    };
                    // Before a byte leaves (W16). A history that was replaced ends its readers in the same moment.
                    let history = reader.history();
                    watcher.last_event = revision;
                    watcher.progress_due = false;
                    watcher.quiet_since = Instant::now();
                    let (options, prev_kv_after) = (watcher.create.options, watcher.prev_kv_after);
                    if !self.mirrors().cluster_state.record_served(history, revision) {
                        continue;
                    }
                    self.last_event = self.last_event.max(revision);
                    let fields = WatchFields {
                        header: self.header(revision),
                        watch_id: id,
                        ..WatchFields::default()
                    };
                    let events = EventMessages::new(picked, options, prev_kv_after, fields);
                    self.metrics().record_events(events.events());
                    self.message = Some(events);
                    return;
                }
            }
        }
        cx.waker().wake_by_ref();
    }

    /// Whether the events of the stream wait, because another of its mirrors has lost its feed: the history of that mirror's
    /// keys may have been replaced without a trace in those of the others, and no stream shows two histories (W10). Registers
    /// `cx` until the mirror has a feed again.
    fn awaits_feed(&mut self, cx: &mut Context<'_>) -> bool {
        loop {
            let Some(position) = self.lost_feed() else {
                self.resuming = None;
                return false;
            };
            let mirrors = &self.stream.client.proxy.mirrors;
            let waiting = || Resuming::of(Arc::clone(mirrors), position);
            if self.resuming.get_or_insert_with(waiting).poll(cx).is_pending() {
                return true;
            }
            self.resuming = None;
        }
    }

    /// Position of a mirror that has lost its feed, if the stream has watchers of it and of others.
    fn lost_feed(&self) -> Option<usize> {
        let mut lost = self
            .mirrors()
            .positions()
            .filter(|(_, mirror)| mirror.revision() == Err(Reason::FeedLost));
        let watched = lost.find(|(position, _)| {
            let mut watchers = self.watchers.values();
            watchers.any(|watcher| watcher.mirror == *position)
        });
        watched
            .filter(|_| self.has_several_mirrors())
            .map(|(position, _)| position)
    }

    /// Id of the next watcher, after the one of the last turn, that has events or an end to take; only an end if it
    /// `awaits_feed`.
    fn next_turn(&self, awaits_feed: bool) -> Option<i64> {
        let after = self
            .watchers
            .range((Bound::Excluded(self.last_turn), Bound::Unbounded));
        let before = self.watchers.range(..=self.last_turn);
        let mut in_turn = after.chain(before);
        let found = in_turn.find(|(_, watcher)| match awaits_feed {
            true => watcher.has_ended(),
            false => watcher.is_pending() && !self.is_held(watcher),
        });
        found.map(|(id, _)| *id)
    }

    /// Whether the next events of `watcher` wait for a progress notification, which must not be below them. Only so can
    /// a stream over several mirrors, which advance on their own, find a revision for all of them.
    pub(super) fn is_held(&self, watcher: &Watcher) -> bool {
        let Some(requested) = &self.progress.requested else {
            return false;
        };
        let covered = watcher.reader.as_ref().map_or(0, Reader::covered);
        covered >= requested.target && self.has_several_mirrors()
    }

    pub(super) fn has_several_mirrors(&self) -> bool {
        let mut mirrors = self.watchers.values().map(|watcher| watcher.mirror);
        let first = mirrors.next();
        mirrors.any(|mirror| Some(mirror) != first)
    }

    /// Handles the end of a watcher's events.
    pub(super) fn ended(&mut self, id: i64, ended: Ended) {
        let next = self
            .watchers
            .get(&id)
            .and_then(|watcher| watcher.reader.as_ref())
            .map_or(0, |reader| reader.covered() + 1);
        match ended {
            Ended::Compacted { compact_revision } if next < compact_revision => {
                self.cancel_compacted(id, compact_revision, "compacted");
            }
            Ended::Replaced { revision } => self.cancel_compacted(id, revision.max(1), "replaced"),
            Ended::Compacted { .. } => self.leave(Reason::Loading, None),
            Ended::Trimmed => self.leave(Reason::NotFresh, None),
            // Its client can use another endpoint.
            Ended::FeedLost => self.interrupt(Reason::FeedLost),
            Ended::Dropped(reason) => {
                tracing::debug!(reason = reason.as_str(), "the mirror of a watch was dropped");
                let reason = match reason {
                    Reason::ForwardAll | Reason::NotMirrored => reason,
                    _ => Reason::Loading,
                };
                self.leave(reason, None);
            }
        }
    }
}
