//! The way of a stream from etcd back to memory, without a gap and without a repetition (W9).
//!
//! A progress request makes etcd send a barrier: everything at or below its revision R was relayed before it. The
//! watchers join their hubs at R + 1, all or none, while nothing more is read from etcd. If they cannot, etcd's stream is
//! read on, and nothing was lost.

use std::sync::Arc;
use std::task::{Context, Poll};

use super::Session;
use super::attempts::{Attempt, Joined, Returning, join};
use crate::proxy::watch::watcher::Watcher;
use crate::telemetry::Reason;

impl Session {
    /// Begins the attempts of a stream that has left memory for `reason`.
    pub(super) fn expect_return(&mut self, reason: Reason) {
        self.returning = Some(Returning::new(reason));
    }

    /// Whether the stream has left etcd's at a barrier, and memory has not taken it over yet.
    pub(super) fn is_joining(&self) -> bool {
        let attempt = self
            .returning
            .as_ref()
            .and_then(|returning| returning.attempt.as_ref());
        attempt.is_some_and(|attempt| attempt.joining.is_some())
    }

    /// Begins, continues or gives up an attempt to return to memory. Called between two messages.
    pub(super) fn poll_return(&mut self, cx: &mut Context<'_>) {
        let Some(mut returning) = self.returning.take() else {
            return;
        };
        loop {
            let Some(attempt) = &mut returning.attempt else {
                if returning.next.as_mut().poll(cx).is_pending() {
                    break;
                }
                returning.attempt = self.begin_return(cx);
                if returning.attempt.is_none() {
                    returning.postpone();
                }
                continue;
            };
            let failed = match &mut attempt.joining {
                Some((revision, joining)) => match joining.as_mut().poll(cx) {
                    Poll::Ready(Ok(joined)) => return self.return_to_memory(*revision, joined),
                    Poll::Ready(Err(reason)) => Some(reason),
                    Poll::Pending => None,
                },
                None => None,
            };
            let is_late = attempt.expires.as_mut().poll(cx).is_ready();
            let Some(reason) = failed.or(is_late.then_some(Reason::NotFresh)) else {
                break;
            };
            tracing::debug!(reason = reason.as_str(), "a watch stream stays at etcd");
            if let Some(etcd) = &mut self.etcd {
                etcd.relay.stay();
            }
            returning.postpone();
        }
        self.returning = Some(returning);
    }

    /// Requests a barrier, if memory can serve every watcher.
    fn begin_return(&mut self, cx: &mut Context<'_>) -> Option<Attempt> {
        let (etcd, stream) = (self.etcd.as_mut()?, &self.stream);
        // Their bytes are counted already.
        let can_serve = |create: &_| stream.place(create).is_some();
        if !etcd.is_of_current_history() || !etcd.relay.may_return(can_serve) || !etcd.accepts_request(cx) {
            return None;
        }
        let turns = Arc::clone(&stream.client.proxy.watch_returns);
        let turn = turns.try_acquire_owned().ok()?;
        etcd.request_barrier();
        Some(Attempt::new(turn))
    }

    /// Lets the watchers join memory behind the barrier of `revision`.
    pub(super) fn join_at(&mut self, revision: i64) {
        let attempt = self
            .returning
            .as_mut()
            .and_then(|returning| returning.attempt.as_mut());
        // Without an attempt it was given up while the barrier was on its way to the client.
        let (Some(attempt), Some(etcd)) = (attempt, &self.etcd) else {
            return;
        };
        let stream = &self.stream;
        let cluster_state = &stream.client.proxy.mirrors.cluster_state;
        // Read first: a number belongs to the current history if that is current afterwards.
        let history = cluster_state.history();
        let watchers = etcd.relay.carried(revision).into_iter();
        let watchers = watchers.map(|watcher| Some((stream.place(&watcher.create)?, watcher)));
        let watchers: Option<Vec<_>> = watchers.collect();
        let watchers = watchers.filter(|_| etcd.is_of_current_history());
        let mut places = watchers.iter().flatten().map(|(place, _)| *place);
        let caller = places.find_map(|place| stream.caller(place));
        let (client, signal) = (Arc::clone(&stream.client), Arc::clone(&stream.signal));
        let joining = async move {
            let watchers = watchers.ok_or(Reason::Loading)?;
            join(&client, &signal, history, caller.as_ref(), watchers).await
        };
        attempt.joining = Some((revision, Box::pin(joining)));
    }

    /// Continues the stream from memory: `joined` have every event above `revision`.
    fn return_to_memory(&mut self, revision: i64, joined: Vec<Joined>) {
        tracing::debug!(revision, "a watch stream returns to memory");
        // What etcd has sent behind the barrier was never read.
        let Some(etcd) = self.etcd.take() else {
            return;
        };
        self.ids = etcd.relay.ids().clone();
        self.open = self.metrics().open_memory();
        self.metrics().record_handover("memory", "mirrored");
        self.progress.reported = self.progress.reported.max(revision);
        self.bytes.set_relayed(0);
        for Joined {
            watcher,
            mirror,
            reader,
        } in joined
        {
            let since = revision.max(watcher.create.start_revision);
            let mut returned = Watcher::new(reader, mirror, watcher.create, since);
            returned.etcd_through = revision.min(watcher.through);
            if let Some(quiet_since) = watcher.quiet_since {
                returned.quiet_since = quiet_since;
            }
            self.add(watcher.id, returned);
        }
        if etcd.relay.owes_progress() {
            self.request_progress();
        }
    }
}
