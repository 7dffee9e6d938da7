//! Progress notifications of a stream, on request and periodically.

use std::task::Context;

use tokio::time::Instant;

use super::Session;
use crate::cache::WatchFields;
use crate::mirror::watch_hub::Reader;
use crate::proxy::watch::receive::MAX_PROGRESS_RUN;
use crate::proxy::watch::request::NO_WATCHER;
use crate::proxy::watch::watcher::Watcher;

impl Session {
    /// Takes up a progress request of the client, with those that have arrived behind it: a client that asks faster than
    /// the mirrors respond would otherwise fill the connection with its requests.
    pub(super) fn request_progress(&mut self) {
        let count = 1 + self.requests.take_progress(MAX_PROGRESS_RUN - 1);
        let known = self.mirrors().cluster_state.known();
        let reached = self
            .watchers
            .values()
            .filter_map(|watcher| watcher.reader.as_ref());
        let known = reached.map(Reader::reached).fold(known, i64::max);
        let mut target = known.max(self.progress.reported);
        for watcher in self.watchers.values() {
            // Like etcd: no answer before a watcher that waits for the future, and none while one is cancelled.
            if watcher.reader.is_none() || watcher.since > known {
                return self.nudge();
            }
            target = target.max(watcher.last_event);
        }
        if self.watchers.is_empty() {
            return;
        }
        // A client that asks again, though nothing has happened, knows of more.
        if target == self.progress.reported {
            self.nudge();
        }
        self.progress.request(count, target);
        let mut asked = Vec::new();
        for watcher in self.watchers.values() {
            let Some(reader) = &watcher.reader else {
                continue;
            };
            if reader.reached() >= target || asked.contains(&watcher.mirror) {
                continue;
            }
            asked.push(watcher.mirror);
            if let Some(mirror) = self.mirrors().at(watcher.mirror) {
                if let Some(hub) = self.mirrors().watch_hub(mirror) {
                    hub.signal_at(target, &self.stream.signal);
                }
                mirror.want(reader.history(), target);
            }
        }
    }

    /// Makes the mirrors of the stream learn etcd's revision, for a client that has read or written around rangecache.
    pub(super) fn nudge(&self) {
        let is_used = |position: usize| self.watchers.values().any(|watcher| watcher.mirror == position);
        for (position, mirror) in self.mirrors().positions() {
            if is_used(position) {
                mirror.nudge();
            }
        }
    }

    /// Answers the client's progress requests, or drops them; returns whether they are done. Called between messages.
    pub(super) fn poll_requested(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(requested) = &mut self.progress.requested else {
            return false;
        };
        let has_expired = requested.has_expired(cx);
        let (count, target, began) = (requested.count, requested.target, requested.began);
        let revision = self
            .watchers
            .values()
            .map(Watcher::progress)
            .try_fold(i64::MAX, |lowest, revision| Some(lowest.min(revision?)))
            .filter(|revision| *revision < i64::MAX);
        // What all watchers have may be below the start of one that begins later than the others.
        let starts = self.watchers.values().map(|watcher| watcher.since);
        let least = starts.fold(self.last_event.max(self.progress.reported), i64::max);
        let revision = revision.filter(|revision| *revision >= least);
        if !has_expired && revision.is_none_or(|revision| revision < target) {
            return false;
        }
        self.progress.requested = None;
        for _ in 0..count {
            if let Some(revision) = revision
                && self.report(NO_WATCHER, revision)
            {
                self.metrics().record_progress(began.elapsed());
                self.progress.reported = revision;
            }
        }
        true
    }

    /// Sends the periodic progress notification of the next watcher that is owed one.
    pub(super) fn poll_periodic(&mut self, cx: &mut Context<'_>) {
        if self.progress.has_ticked(cx) {
            for (id, watcher) in &mut self.watchers {
                if watcher.create.options.progress_notify
                    && std::mem::replace(&mut watcher.progress_due, true)
                    && !self.progress.owed.contains(id)
                {
                    self.progress.owed.push_back(*id);
                }
            }
        }
        while let Some(id) = self.progress.owed.pop_front() {
            let progress = self.watchers.get(&id).and_then(Watcher::progress);
            if let Some(revision) = progress
                && self.report(id, revision)
            {
                if let Some(watcher) = self.watchers.get_mut(&id) {
                    watcher.quiet_since = Instant::now();
                }
                return;
            }
        }
    }

    /// Sends a progress notification; returns whether it was possible.
    pub(super) fn report(&mut self, id: i64, revision: i64) -> bool {
        let readers = self
            .watchers
            .values()
            .filter_map(|watcher| watcher.reader.as_ref());
        let Some(history) = readers.map(Reader::history).next() else {
            return false;
        };
        // Before a byte leaves (W16).
        if !self.mirrors().cluster_state.record_served(history, revision) {
            return false;
        }
        let header = self.header(revision);
        self.send(&WatchFields {
            header,
            watch_id: id,
            ..WatchFields::default()
        });
        true
    }
}
