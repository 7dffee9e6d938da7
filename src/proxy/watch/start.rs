//! Starts one watcher: proves the revision after which a watch of the present begins (W7), and joins the hub.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use tokio::time::Instant;

use super::request::Create;
use crate::mirror::cluster_state::Auth;
use crate::mirror::freshness::Unproven;
use crate::mirror::freshness::authorize::Authorization;
use crate::mirror::state::Mirror;
use crate::mirror::watch_hub::{Join, JoinRefused, Reader, Signal};
use crate::proxy::handles::Client;
use crate::telemetry::Reason;
use crate::telemetry::trace::SpanContext;

/// Longest wait for the feed of a mirror that resumes: most resume within it, and etcd need not serve the stream.
const FEED_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for etcd's authorization of a caller.
const AUTHORIZATION_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest wait for the proof of a start revision.
const PROOF_TIMEOUT: Duration = Duration::from_millis(500);

/// A watcher that has joined its hub.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) reader: Reader,
    /// Position of its mirror in [`Mirrors::all`](crate::mirror::Mirrors::all).
    pub(super) mirror: usize,
    /// Revision in the header of `created`.
    pub(super) header_revision: i64,
    /// Progress below this revision must not be reported: the start revision, or the one after which the watch began.
    pub(super) since: i64,
}

/// Starts the watcher of `create`, whose keys the mirror at this position holds. `signal` wakes its stream. `caller` is
/// the caller's metadata if etcd has to authorize it. `check` receives the span of the quorum check.
///
/// # Errors
/// The reason why etcd must serve the watcher.
pub(super) async fn start(
    client: Arc<Client>,
    signal: Arc<Signal>,
    mirror_position: usize,
    create: Create,
    caller: Option<&HeaderMap>,
    check: Option<&mut Option<SpanContext>>,
) -> Result<Started, Reason> {
    let mirrors = &client.proxy.mirrors;
    let cluster_state = &mirrors.cluster_state;
    let Some(mirror) = mirrors.at(mirror_position) else {
        return Err(Reason::NotMirrored);
    };
    let Some(hub) = mirrors.watch_hub(mirror) else {
        return Err(Reason::NotMirrored);
    };
    mirror.resumed(Instant::now() + FEED_TIMEOUT).await?;
    let authorized = match caller {
        Some(caller) => Some(authorize(&client, caller, &create).await?),
        None => None,
    };
    let now = match (create.start_revision, authorized) {
        (0, Some(authorized)) => Some(authorized),
        (0, None) => Some(present(&client, mirror, check).await?),
        _ => None,
    };
    let join = Join {
        key: create.key.clone(),
        range_end: create.range_end.clone(),
        first_revision: now.map_or(create.start_revision, |(_, revision)| revision + 1),
    };
    let history = now.or(authorized).map(|(history, _)| history);
    let readers = hub.join(&signal, history, vec![join]).await.map_err(reason_of)?;
    let reader = readers.into_iter().next().ok_or(Reason::NotFresh)?;
    // Checked after the proof: auth may have been switched on while it was awaited (I8).
    if authorized.is_none() && cluster_state.auth() != Auth::Off {
        return Err(Reason::Auth);
    }
    let shown = cluster_state.min_served_revision().unwrap_or(0);
    let header_revision = now.map_or_else(|| shown.max(reader.reached()), |(_, revision)| revision);
    if !cluster_state.record_served(reader.history(), header_revision) {
        return Err(Reason::HistoryReplaced);
    }
    Ok(Started {
        reader,
        mirror: mirror_position,
        header_revision,
        since: now.map_or(create.start_revision, |(_, revision)| revision),
    })
}

/// History and revision after which a watch begins that starts now: not below any revision that any client was shown or
/// that any write was acknowledged at before. Without a proof in time the highest revision that is known here.
async fn present(
    client: &Client,
    mirror: &Mirror,
    check: Option<&mut Option<SpanContext>>,
) -> Result<(u64, i64), Reason> {
    let mirrors = &client.proxy.mirrors;
    let proof = tokio::time::timeout(PROOF_TIMEOUT, mirrors.freshness.prove_at(0, check)).await;
    if let Ok(Ok(proof)) = proof {
        return Ok((proof.history, proof.header.revision));
    }
    // Read before the minimum served revision, which belongs to it.
    let history = mirrors.cluster_state.history();
    let shown = mirrors.cluster_state.min_served_revision();
    let shown = shown.ok_or(Reason::CheckFailed)?;
    Ok((history, shown.max(mirror.revision()?)))
}

/// Lets etcd authorize a caller with this metadata to read the range of `create` (I8), with a call of its own; returns
/// the history and revision at which it did. That revision is not below any write acknowledged before.
///
/// # Errors
/// [`Reason::Auth`] if etcd refuses, otherwise why there is no response.
pub(super) async fn authorize(
    client: &Client,
    caller: &HeaderMap,
    create: &Create,
) -> Result<(u64, i64), Reason> {
    let authorization = Authorization {
        key: create.key.clone(),
        range_end: create.range_end.clone(),
        caller: Some(caller),
        trace: None,
        revision: 0,
        serializable: false,
    };
    let deadline = Instant::now() + AUTHORIZATION_TIMEOUT;
    match client
        .proxy
        .mirrors
        .freshness
        .authorize(&authorization, deadline)
        .await
    {
        Ok(proof) => Ok((proof.history, proof.header.revision)),
        Err(Unproven::For(reason)) => Err(reason),
        // Not reached: no revision is checked.
        Err(Unproven::Compacted(_)) => Err(Reason::CheckFailed),
    }
}

/// Reason why a join that was `refused` leaves its watchers to etcd.
pub(super) fn reason_of(refused: JoinRefused) -> Reason {
    match refused {
        JoinRefused::OutOfService(reason) => reason,
        JoinRefused::Trimmed => Reason::HistoryGone,
        JoinRefused::Replaced => Reason::HistoryReplaced,
        JoinRefused::Busy => Reason::NotFresh,
    }
}
