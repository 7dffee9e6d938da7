//! The way of a stream from etcd back to memory, without a gap and without a repetition (W9).
//!
//! A progress request makes etcd send a barrier: everything at or below its revision R was relayed before it. The
//! watchers join their hubs at R + 1, all or none, while nothing more is read from etcd. If they cannot, etcd's stream is
//! read on, and nothing was lost.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};

use super::Session;
use crate::mirror::cluster_state::Auth;
use crate::mirror::watch_hub::{Join, Reader, Signal};
use crate::proxy::handles::Client;
use crate::proxy::watch::handover::Carried;
use crate::proxy::watch::start::reason_of;
use crate::proxy::watch::watcher::Watcher;
use crate::telemetry::Reason;

/// Pause before the first attempt, and the shortest one between two.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between two attempts.
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// Time limit of an attempt, during which the client's requests wait.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);

/// Attempts of one stream to return.
#[derive(Debug)]
pub(super) struct Returning {
    next: Pin<Box<Sleep>>,
    pause: Duration,
    attempt: Option<Attempt>,
}

/// One attempt.
struct Attempt {
    expires: Pin<Box<Sleep>>,
    /// Revision of the barrier, once etcd has sent it, and the watchers that join memory behind it.
    joining: Option<(i64, Joining)>,
    _turn: OwnedSemaphorePermit,
}

type Joining = Pin<Box<dyn Future<Output = Result<Vec<Joined>, Reason>> + Send>>;

/// A watcher that has joined its hub.
struct Joined {
    watcher: Carried,
    /// Position of its mirror in [`Mirrors::all`](crate::mirror::Mirrors::all).
    mirror: usize,
    reader: Reader,
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt").finish_non_exhaustive()
    }
}

impl Returning {
    /// Attempts of a stream that has left memory for `reason`.
    fn new(reason: Reason) -> Returning {
        // A stream for whose events there was no room in memory does not find it at once.
        let pause = match reason {
            Reason::OverBudget => LAST_PAUSE,
            _ => FIRST_PAUSE,
        };
        Returning {
            next: Box::pin(tokio::time::sleep(pause)),
            pause,
            attempt: None,
        }
    }

    /// Ends an attempt that was in vain.
    fn postpone(&mut self) {
        self.attempt = None;
        self.next.as_mut().reset(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LAST_PAUSE);
    }
}

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
        let can_serve = |create: &_| stream.position(create).is_some() && self.bytes.has_room_for_watcher();
        if !etcd.is_of_current_history() || !etcd.relay.may_return(can_serve) || !etcd.accepts_request(cx) {
            return None;
        }
        let turns = Arc::clone(&stream.client.proxy.watch_returns);
        let turn = turns.try_acquire_owned().ok()?;
        etcd.request_barrier();
        Some(Attempt {
            expires: Box::pin(tokio::time::sleep(ATTEMPT_TIMEOUT)),
            joining: None,
            _turn: turn,
        })
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
        let watchers = watchers.map(|watcher| Some((stream.position(&watcher.create)?, watcher)));
        let watchers: Option<Vec<_>> = watchers.collect();
        let watchers = watchers.filter(|_| etcd.is_of_current_history());
        let (client, signal) = (Arc::clone(&stream.client), Arc::clone(&stream.signal));
        let joining = async move {
            let watchers = watchers.ok_or(Reason::Loading)?;
            join(&client, &signal, history, watchers).await
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
        for Joined {
            watcher,
            mirror,
            reader,
        } in joined
        {
            let since = revision.max(watcher.create.start_revision);
            self.add(watcher.id, Watcher::new(reader, mirror, watcher.create, since));
        }
        if etcd.relay.owes_progress() {
            self.request_progress();
        }
    }
}

/// Joins the hubs of `watchers`, each with the position of its mirror, in `history`.
///
/// # Errors
/// Why etcd must continue to serve all of them.
async fn join(
    client: &Client,
    signal: &Arc<Signal>,
    history: u64,
    mut watchers: Vec<(usize, Carried)>,
) -> Result<Vec<Joined>, Reason> {
    let mirrors = &client.proxy.mirrors;
    let mut joined = Vec::with_capacity(watchers.len());
    watchers.sort_by_key(|(position, watcher)| (*position, watcher.id));
    for of_mirror in watchers.chunk_by(|one, other| one.0 == other.0) {
        let position = of_mirror.first().map_or(0, |(position, _)| *position);
        let mirror = mirrors.all().get(position).ok_or(Reason::NotMirrored)?;
        let hub = mirrors.watch_hub(mirror).ok_or(Reason::NotMirrored)?;
        let joins = of_mirror.iter().map(|(_, watcher)| Join {
            key: watcher.create.key.clone(),
            range_end: watcher.create.range_end.clone(),
            first_revision: watcher.through.saturating_add(1),
        });
        let readers = hub.join(signal, Some(history), joins.collect()).await;
        let readers = readers.map_err(reason_of)?;
        joined.extend(
            of_mirror
                .iter()
                .zip(readers)
                .map(|((_, watcher), reader)| Joined {
                    watcher: watcher.clone(),
                    mirror: position,
                    reader,
                }),
        );
    }
    // Checked last: auth may have been switched on, or history replaced, while the hubs were joined.
    if mirrors.cluster_state.auth() != Auth::Off {
        return Err(Reason::Auth);
    }
    if mirrors.cluster_state.history() != history {
        return Err(Reason::HistoryReplaced);
    }
    Ok(joined)
}
