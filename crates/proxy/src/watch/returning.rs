//! Attempts of a stream to return from etcd to memory, and how its watchers join their fan-outs.

use std::task::{Context, Poll};
use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::future::try_join_all;
use http::HeaderMap;
use rangecache_base::telemetry::Reason;
use rangecache_edge::limits::Slot;
use rangecache_mirror::fan_out::{Join, Reader, Signal};
use rangecache_mirror::freshness::Unproven;
use rangecache_mirror::lineage::{Auth, HistoryId};
use tokio::time::{Instant, Sleep};

use super::start::{authorize, reason_of};
use super::{plan::ServingMirror, request::Carried};
use crate::handles::Client;

/// Pause before the first attempt, and the shortest one between two.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between two attempts.
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// Time limit of an attempt, during which the client's requests wait.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);
/// Authorizations of one stream in flight.
const AUTHORIZATIONS: usize = 16;

/// Attempts of one stream to return.
pub(super) struct Returning {
    /// Expires when the next attempt is due, or the present one is late.
    timer: Pin<Box<Sleep>>,
    pause: Duration,
    /// The turn of the present attempt, one of those that the process has.
    turn: Option<Slot>,
    /// The watchers that join memory behind the barrier, once etcd has sent it.
    joining: Option<Joining>,
}

/// Revision of the barrier, and the watchers that have joined memory behind it; otherwise why the stream stays at etcd.
type JoinResult = Result<(i64, Vec<Joined>), Reason>;

type Joining = Pin<Box<dyn Future<Output = JoinResult> + Send>>;

/// A watcher that has joined its fan-out.
pub(super) struct Joined {
    pub(super) watcher: Carried,
    /// Position of its mirror in [`Mirrors::at`](rangecache_mirror::Mirrors::at).
    pub(super) mirror: usize,
    pub(super) reader: Reader,
}

impl Returning {
    /// Attempts of a stream that has left memory for `reason`.
    pub(super) fn new(reason: Reason) -> Returning {
        // A stream for whose events there was no room in memory does not find it at once.
        let pause = match reason {
            Reason::OverBudget => LAST_PAUSE,
            _ => FIRST_PAUSE,
        };
        Returning {
            timer: Box::pin(tokio::time::sleep(pause)),
            pause,
            turn: None,
            joining: None,
        }
    }

    /// Begins an attempt whose barrier was requested.
    pub(super) fn begin(&mut self, turn: Slot, cx: &mut Context<'_>) {
        self.turn = Some(turn);
        self.restart(ATTEMPT_TIMEOUT, cx);
    }

    /// Ends an attempt that was in vain, or could not begin.
    pub(super) fn postpone(&mut self, cx: &mut Context<'_>) {
        (self.turn, self.joining) = (None, None);
        self.restart(self.pause, cx);
        self.pause = (self.pause * 2).min(LAST_PAUSE);
    }

    fn restart(&mut self, after: Duration, cx: &mut Context<'_>) {
        self.timer.as_mut().reset(Instant::now() + after);
        // Registers the task.
        let _ = self.timer.as_mut().poll(cx);
    }

    pub(super) fn is_attempting(&self) -> bool {
        self.turn.is_some()
    }

    pub(super) fn is_joining(&self) -> bool {
        self.joining.is_some()
    }

    /// Whether an attempt is due, or the present one is late; otherwise registers `cx`.
    pub(super) fn is_due(&mut self, cx: &mut Context<'_>) -> bool {
        self.timer.as_mut().poll(cx).is_ready()
    }

    /// Lets the watchers join.
    pub(super) fn join(&mut self, joining: impl Future<Output = JoinResult> + Send + 'static) {
        self.joining = Some(Box::pin(joining));
    }

    /// Result of the attempt, once the watchers have joined or could not.
    pub(super) fn poll_joining(&mut self, cx: &mut Context<'_>) -> Option<JoinResult> {
        match self.joining.as_mut()?.as_mut().poll(cx) {
            Poll::Ready(joined) => Some(joined),
            Poll::Pending => None,
        }
    }
}

/// Joins the fan-outs of `watchers` in `history`. `caller` is the caller's metadata if etcd has to authorize it.
///
/// # Errors
/// Why etcd must continue to serve all of them.
pub(super) async fn join(
    client: &Client,
    signal: &Arc<Signal>,
    history: HistoryId,
    caller: Option<&HeaderMap>,
    mut watchers: Vec<(ServingMirror, Carried)>,
) -> Result<Vec<Joined>, Reason> {
    if let Some(caller) = caller {
        authorize_all(client, caller, &watchers).await?;
    }
    let mirrors = &client.proxy.mirrors;
    let mut joined = Vec::with_capacity(watchers.len());
    watchers.sort_by_key(|(place, watcher)| (place.mirror, watcher.id));
    for of_mirror in watchers.chunk_by(|one, other| one.0.mirror == other.0.mirror) {
        let position = of_mirror.first().map_or(0, |(place, _)| place.mirror);
        let mirror = mirrors.at(position).ok_or(Reason::NotMirrored)?;
        let fan_out = mirrors.fan_out(mirror).ok_or(Reason::NotMirrored)?;
        let known_revision = mirrors.cluster_state.known();
        let joins = of_mirror.iter().map(|(_, watcher)| Join {
            key: watcher.create.key.clone(),
            range_end: watcher.create.range_end.clone(),
            first_revision: watcher.through.saturating_add(1),
            known_revision,
        });
        let readers = fan_out.join(signal, Some(history), joins.collect()).await;
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
    // Checked last: auth may have been switched on, or history replaced, while the fan-outs were joined.
    if caller.is_none() && mirrors.cluster_state.auth() != Auth::Off {
        return Err(Reason::Auth);
    }
    if mirrors.cluster_state.history() != history {
        return Err(Reason::HistoryReplaced);
    }
    Ok(joined)
}

/// Lets etcd authorize a caller with this metadata for every watcher again: no authorization is kept.
async fn authorize_all(
    client: &Client,
    caller: &HeaderMap,
    watchers: &[(ServingMirror, Carried)],
) -> Result<(), Reason> {
    for some in watchers.chunks(AUTHORIZATIONS) {
        let creates = some.iter().map(|(_, watcher)| &watcher.create);
        let authorized = try_join_all(creates.map(|create| authorize(client, caller, create, 0))).await;
        authorized.map_err(|unproven| match unproven {
            Unproven::For(reason) => reason,
            // Not reached: no revision is checked.
            Unproven::Compacted(_) => Reason::CheckFailed,
        })?;
    }
    Ok(())
}
