//! Attempts of a stream to return from etcd to memory, and how its watchers join their fan-outs.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use http::HeaderMap;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};

use super::carried::Carried;
use super::plan::ServingMirror;
use super::start::{authorize, reason_of};
use crate::proxy::handles::Client;
use rangecache_base::telemetry::Reason;
use rangecache_mirror::fan_out::{Join, Reader, Signal};
use rangecache_mirror::freshness::Unproven;
use rangecache_mirror::lineage::{Auth, HistoryId};

/// Pause before the first attempt, and the shortest one between two.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between two attempts.
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// Time limit of an attempt, during which the client's requests wait.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);
/// Authorizations of one stream in flight.
const AUTHORIZATIONS: usize = 16;

/// Attempts of one stream to return.
#[derive(Debug)]
pub(super) struct Returning {
    pub(super) next: Pin<Box<Sleep>>,
    pause: Duration,
    pub(super) attempt: Option<Attempt>,
}

/// Attempt of a stream to return to memory.
pub(super) struct Attempt {
    pub(super) expires: Pin<Box<Sleep>>,
    /// Revision of the barrier, once etcd has sent it, and the watchers that join memory behind it.
    pub(super) joining: Option<(i64, Joining)>,
    _turn: OwnedSemaphorePermit,
}

pub(super) type Joining = Pin<Box<dyn Future<Output = Result<Vec<Joined>, Reason>> + Send>>;

/// A watcher that has joined its fan-out.
pub(super) struct Joined {
    pub(super) watcher: Carried,
    /// Position of its mirror in [`Mirrors::at`](rangecache_mirror::Mirrors::at).
    pub(super) mirror: usize,
    pub(super) reader: Reader,
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt").finish_non_exhaustive()
    }
}

impl Attempt {
    /// An attempt whose barrier was requested; `turn` is one of those that the process has.
    pub(super) fn new(turn: OwnedSemaphorePermit) -> Attempt {
        Attempt {
            expires: Box::pin(tokio::time::sleep(ATTEMPT_TIMEOUT)),
            joining: None,
            _turn: turn,
        }
    }
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
            next: Box::pin(tokio::time::sleep(pause)),
            pause,
            attempt: None,
        }
    }

    /// Ends an attempt that was in vain.
    pub(super) fn postpone(&mut self) {
        self.attempt = None;
        self.next.as_mut().reset(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LAST_PAUSE);
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
