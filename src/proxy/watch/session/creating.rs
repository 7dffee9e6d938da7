//! Watchers of a stream: created, refused and cancelled.

use std::sync::Arc;

use bytes::Bytes;

use super::{NotStarted, Session, Starting};
use crate::cache::WatchFields;
use crate::proxy::watch::plan::Refusal;
use crate::proxy::watch::refusal::refusal;
use crate::proxy::watch::request::{Create, NO_WATCHER};
use crate::proxy::watch::start::Started;
use crate::proxy::watch::stream::Planned;
use crate::proxy::watch::watcher::Watcher;
use crate::telemetry::Reason;

impl Session {
    /// Begins to create a watcher.
    pub(super) fn create(&mut self, create: Create) {
        let is_taken = create.watch_id != 0 && self.watchers.contains_key(&create.watch_id);
        match self.stream.plan(&create, is_taken) {
            Planned::Refuse(refusal) => self.refuse(refusal),
            Planned::Compacted(revision) => self.created_compacted(&create, revision),
            Planned::Etcd(reason) => self.not_started(create, reason),
            Planned::Start(_) if !self.bytes.has_room_for_watcher(&create) => {
                self.bytes.record_refusal();
                self.leave(Reason::OverBudget, Some(create));
            }
            Planned::Start(place) => {
                let starting = self.stream.start(place, &create);
                let started = Box::pin(async move { starting.await.map_err(NotStarted::For) });
                self.starting = Some(Starting { create, started });
            }
        }
    }

    /// Lets etcd decide about `create`. If the caller's rights count, etcd first gets the request alone: what it refuses
    /// must not make the other watchers depend again on a token that may have expired since.
    pub(super) fn not_started(&mut self, create: Create, reason: Reason) {
        if !self.stream.needs_right() {
            return self.leave(reason, Some(create));
        }
        let (client, parts) = (Arc::clone(&self.stream.client), self.stream.parts.clone());
        let refusal = refusal(client, parts, create.clone());
        let started = Box::pin(async move {
            let response = refusal.await;
            Err(response.map_or(NotStarted::NotRefused(reason), NotStarted::Refused))
        });
        self.starting = Some(Starting { create, started });
    }

    /// Passes on etcd's refusal of a create request.
    pub(super) fn refused(&mut self, response: Bytes) {
        self.metrics().record_created("etcd", Reason::Auth.as_str());
        self.metrics().record_response();
        self.control.push_back(response.into());
    }

    /// Answers a create request that etcd refuses.
    pub(super) fn refuse(&mut self, refusal: Refusal) {
        self.metrics().record_created("memory", "refused");
        let header = self.header(self.shown());
        self.send(&WatchFields {
            header,
            watch_id: NO_WATCHER,
            created: true,
            canceled: true,
            cancel_reason: refusal.as_str(),
            ..WatchFields::default()
        });
    }

    /// Answers a create request whose watcher has joined its hub.
    pub(super) fn created(&mut self, create: &Create, started: Started) {
        let Started {
            reader,
            mirror,
            header_revision,
            since,
            prev_kv_after,
        } = started;
        let kind = if create.start_revision == 0 {
            "now"
        } else {
            "revision"
        };
        self.metrics().record_created("memory", kind);
        let mut watcher = Watcher::new(reader, mirror, create.clone(), since);
        watcher.prev_kv_after = prev_kv_after;
        self.insert(create, header_revision, watcher);
    }

    /// Answers a create request whose start revision etcd has compacted: created, then cancelled.
    pub(super) fn created_compacted(&mut self, create: &Create, compact_revision: i64) {
        self.metrics().record_created("memory", "compacted");
        let watcher = Watcher::cancelled(create.clone());
        if let Some(id) = self.insert(create, self.shown(), watcher) {
            self.cancel_compacted(id, compact_revision, "compacted");
        }
    }

    /// Adds a watcher and sends its `created`; returns its id.
    pub(super) fn insert(&mut self, create: &Create, revision: i64, watcher: Watcher) -> Option<i64> {
        let watchers = &self.watchers;
        let Some(id) = self
            .ids
            .allocate(create.watch_id, |id| watchers.contains_key(&id))
        else {
            self.refuse(Refusal::DuplicateId);
            return None;
        };
        self.add(id, watcher);
        let header = self.header(revision);
        self.send(&WatchFields {
            header,
            watch_id: id,
            created: true,
            ..WatchFields::default()
        });
        Some(id)
    }

    /// Adds a watcher whose `created` the client has, or gets next.
    pub(super) fn add(&mut self, id: i64, watcher: Watcher) {
        if watcher.create.options.progress_notify {
            self.progress.begin(watcher.quiet_since);
        }
        if let Some(mirror) = self.mirrors().at(watcher.mirror) {
            self.metrics().add_watchers(&mirror.name, 1);
        }
        self.bytes.add_watcher(&watcher.create);
        self.watchers.insert(id, watcher);
    }

    /// Cancels the watcher `id` because etcd has compacted what it needs, or because its history was replaced (W10).
    pub(super) fn cancel_compacted(&mut self, id: i64, compact_revision: i64, reason: &'static str) {
        if let Some(watcher) = self.watchers.get_mut(&id) {
            watcher.reader = None;
        }
        self.metrics().record_cancelled(reason);
        let header = self.header(0);
        self.send(&WatchFields {
            header,
            watch_id: id,
            canceled: true,
            compact_revision,
            ..WatchFields::default()
        });
    }

    /// Removes a watcher; returns whether there was one.
    pub(super) fn remove(&mut self, id: i64) -> bool {
        let Some(watcher) = self.watchers.remove(&id) else {
            return false;
        };
        self.bytes.remove_watcher(&watcher.create);
        if let Some(mirror) = self.mirrors().at(watcher.mirror) {
            self.metrics().add_watchers(&mirror.name, -1);
        }
        true
    }

    /// Answers a cancel request. etcd does not answer one for an unknown id.
    pub(super) fn cancel(&mut self, id: i64) {
        if !self.remove(id) {
            return;
        }
        self.metrics().record_cancelled("client");
        let header = self.header(self.shown());
        self.send(&WatchFields {
            header,
            watch_id: id,
            canceled: true,
            ..WatchFields::default()
        });
    }
}
