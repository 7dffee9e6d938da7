//! Starts one watcher: proves the revision after which a watch of the present begins (W7), or that etcd has not compacted
//! the one at which a watch of the past begins (W11), and joins the fan-out. What memory does not serve etcd may refuse, in its
//! own words, without an end of the stream's other watchers, whose rights it has granted (W14).

use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use etcd_wire::etcdserverpb::watch_request::RequestUnion;
use etcd_wire::grpc::frame::{PREFIX_BYTES, RequestMessage, read_message};
use http::{HeaderMap, request::Parts};
use rangecache_base::telemetry::{Reason, trace::SpanContext};
use rangecache_mirror::fan_out::{Join, JoinRefused, Reader, Signal};
use rangecache_mirror::freshness::{Unproven, authorize::Authorization};
use rangecache_mirror::lineage::{Auth, HistoryId};
use rangecache_mirror::view::Mirror;
use rangecache_upstream::{ConnectionClass, Outgoing};
use tokio::time::Instant;

use super::plan::NotServed;
use super::request::{Create, encode};
use super::tap::{Head, MAX_HEAD_BYTES, Parsed};
use crate::{forward::RequestBody, handles::Client};

/// Longest wait for the feed of a mirror that resumes: most resume within it, and etcd need not serve the stream.
const FEED_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for etcd's authorization of a caller.
const AUTHORIZATION_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest wait for the proof of a start revision.
const PROOF_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for etcd's refusal.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);

/// A watcher that has joined its fan-out.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) reader: Reader,
    /// Position of its mirror in [`Mirrors::all`](rangecache_mirror::Mirrors::all).
    pub(super) mirror: usize,
    /// Revision in the header of `created`.
    pub(super) header_revision: i64,
    /// Progress below this revision must not be reported: the start revision, or the one after which the watch began.
    pub(super) since: i64,
    /// Events up to this revision have no previous key-value pair, which etcd had compacted before.
    pub(super) prev_kv_after: i64,
}

/// Answer to a create request.
pub(super) type Answer = Result<Started, NotServed>;

/// Future of an [`Answer`].
pub(super) type Answering = Pin<Box<dyn Future<Output = Answer> + Send>>;

/// Starts the watcher of `create`, whose keys the mirror at this position holds. `signal` wakes its stream. `caller` is
/// the caller's metadata if etcd has to authorize it. `check` receives the span of the quorum check.
pub(super) async fn start(
    client: Arc<Client>,
    signal: Arc<Signal>,
    mirror_position: usize,
    create: Create,
    caller: Option<&HeaderMap>,
    mut check: Option<&mut Option<SpanContext>>,
) -> Answer {
    let mirrors = &client.proxy.mirrors;
    let cluster_state = &mirrors.cluster_state;
    let mirror = mirrors.at(mirror_position).ok_or(Reason::NotMirrored)?;
    let fan_out = mirrors.fan_out(mirror).ok_or(Reason::NotMirrored)?;
    mirror.resumed(Instant::now() + FEED_TIMEOUT).await?;
    let mut past = past_revision(&create, cluster_state.known());
    let mut prev_kv_after = 0;
    let proven = loop {
        let proven = match (caller, create.start_revision) {
            (Some(caller), _) => authorize(&client, caller, &create, past).await.map(Some),
            (None, 0) => Ok(Some(present(&client, mirror, check.as_deref_mut()).await?)),
            (None, _) if past > 0 => prove_past(&client, past, check.as_deref_mut()).await,
            (None, _) => Ok(None),
        };
        match proven {
            Ok(proven) => break proven,
            Err(Unproven::For(reason)) => return Err(reason.into()),
            Err(Unproven::Compacted(_)) => {
                let compacted = mirrors.compaction_above(mirror, past).await;
                let compacted = compacted.ok_or(Reason::HistoryGone)?;
                if create.start_revision < compacted {
                    return Err(NotServed::Compacted(compacted));
                }
                // It may have been reported a while ago: the first revision is proven, too.
                (past, prev_kv_after) = (create.start_revision, compacted);
            }
        }
    };
    let now = proven.filter(|_| create.start_revision == 0);
    let join = Join {
        key: create.key.clone(),
        range_end: create.range_end.clone(),
        first_revision: now.map_or(create.start_revision, |(_, revision)| revision + 1),
        known_revision: cluster_state.known(),
    };
    let history = proven.map(|(history, _)| history);
    let readers = fan_out
        .join(&signal, history, vec![join])
        .await
        .map_err(reason_of)?;
    let reader = readers.into_iter().next().ok_or(Reason::NotFresh)?;
    // Checked after the proof: auth may have been switched on while it was awaited (I8).
    if caller.is_none() && cluster_state.auth() != Auth::Off {
        return Err(Reason::Auth.into());
    }
    let shown = cluster_state.min_served_revision().unwrap_or(0);
    let header_revision = now.map_or_else(|| shown.max(reader.reached()), |(_, revision)| revision);
    if !cluster_state.record_served(reader.history(), header_revision) {
        return Err(Reason::HistoryReplaced.into());
    }
    Ok(Started {
        reader,
        mirror: mirror_position,
        header_revision,
        since: now.map_or(create.start_revision, |(_, revision)| revision),
        prev_kv_after,
    })
}

/// Lowest revision that etcd reads for the watcher of `create`; 0 if it reads none that is known: in the present, and from
/// the next revision on.
fn past_revision(create: &Create, known: i64) -> i64 {
    match create.start_revision {
        0 => 0,
        start if start > known => 0,
        // The first event may be of the first revision, and replace the state before it.
        start if create.options.prev_kv && start > 1 => start - 1,
        start => start,
    }
}

/// Proves that etcd has not compacted `past`, by a check that is sent after this call, and shared; returns its history and
/// revision. `None` without a check in time: a member of etcd without a quorum serves the watch, too.
async fn prove_past(
    client: &Client,
    past: i64,
    check: Option<&mut Option<SpanContext>>,
) -> Result<Option<(HistoryId, i64)>, Unproven> {
    let proving = client.proxy.mirrors.freshness.prove_at(past, check);
    match tokio::time::timeout(PROOF_TIMEOUT, proving).await {
        Ok(Ok(proof)) => Ok(Some((proof.history, proof.header.revision))),
        Ok(Err(
            unproven @ (Unproven::Compacted(_) | Unproven::For(Reason::Auth | Reason::HistoryReplaced)),
        )) => Err(unproven),
        Ok(Err(Unproven::For(_))) | Err(_) => Ok(None),
    }
}

/// History and revision after which a watch begins that starts now: not below any revision that any client was shown or
/// that any write was acknowledged at before. Without a proof in time the highest revision that is known here.
async fn present(
    client: &Client,
    mirror: &Mirror,
    check: Option<&mut Option<SpanContext>>,
) -> Result<(HistoryId, i64), Reason> {
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
/// the history and revision at which it did. That revision is not below any write acknowledged before. Unless `past` is 0,
/// also proves that etcd has not compacted that revision.
///
/// # Errors
/// [`Reason::Auth`] if etcd refuses, otherwise why there is no proof.
pub(super) async fn authorize(
    client: &Client,
    caller: &HeaderMap,
    create: &Create,
    past: i64,
) -> Result<(HistoryId, i64), Unproven> {
    let authorization = Authorization {
        key: create.key.clone(),
        range_end: create.range_end.clone(),
        caller: Some(caller),
        trace: None,
        revision: past,
        serializable: false,
    };
    let deadline = Instant::now() + AUTHORIZATION_TIMEOUT;
    let freshness = &client.proxy.mirrors.freshness;
    let proof = freshness.authorize(&authorization, deadline).await?;
    Ok((proof.history, proof.header.revision))
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

/// Sends `create`, which memory does not serve for `reason`, to etcd on a stream of its own, with the head `parts` of the client's
/// request: etcd refuses it, or creates a watcher that ends with this stream, and has to serve the client's.
pub(super) async fn refusal(client: Arc<Client>, parts: Parts, create: Create, reason: Reason) -> NotServed {
    let refused = tokio::time::timeout(REFUSAL_TIMEOUT, refused(&client, parts, &create)).await;
    let refused = refused.ok().flatten();
    refused.map_or(NotServed::Etcd(reason), NotServed::Refused)
}

/// etcd's response to `create` if it is a refusal.
async fn refused(client: &Client, parts: Parts, create: &Create) -> Option<Bytes> {
    let forward = &client.proxy.forward;
    let history = forward.cluster_state.current();
    let request = create.to_wire(create.watch_id, create.start_revision);
    let request = Outgoing::whole(encode(RequestUnion::CreateRequest(request)));
    let sending = forward.send(parts, RequestBody::Once(request), ConnectionClass::Endless);
    let opened = sending.await.ok()?;
    let message = read_message(opened.response.into_body(), MAX_HEAD_BYTES, |_| true).await;
    let RequestMessage::Whole { framed, .. } = message else {
        return None;
    };
    let Parsed::Head(head) = Head::parse(framed.get(PREFIX_BYTES..)?, true) else {
        return None;
    };
    if head.created && head.canceled {
        // Before a byte leaves (I11).
        let (cluster_id, revision) = (head.cluster_id, head.revision);
        forward
            .cluster_state
            .record_forwarded(&history, cluster_id, revision);
        return Some(framed);
    }
    None
}

#[cfg(test)]
mod tests {
    use rangecache_mirror::Unreadable;

    use super::*;
    use crate::{testing::Scene, watch::request::Options};

    #[test]
    fn only_what_etcd_reads_from_the_past_has_to_be_proven() {
        let past = |start_revision, prev_kv| {
            let options = Options {
                prev_kv,
                ..Options::default()
            };
            let create = Create {
                start_revision,
                options,
                ..Create::default()
            };
            past_revision(&create, 10)
        };
        assert_eq!([past(0, false), past(0, true)], [0, 0], "from now on");
        assert_eq!(
            [past(11, false), past(11, true)],
            [0, 0],
            "from the next revision on"
        );
        assert_eq!([past(10, false), past(4, false)], [10, 4]);
        assert_eq!(
            [past(10, true), past(4, true)],
            [9, 3],
            "the state before is read"
        );
        assert_eq!(past(1, true), 1, "there is none before the first revision");
    }

    #[tokio::test(start_paused = true)]
    async fn watch_of_the_present_without_a_proof_needs_a_revision_and_a_mirror() {
        let scene = Scene::new(&[]);
        let (client, mirror) = (scene.client(), scene.mirrors.at(0).unwrap());
        assert_eq!(present(&client, mirror, None).await, Err(Reason::Loading));
        scene.mirrors.cluster_state.note_unreadable(Unreadable::Header);
        assert_eq!(present(&client, mirror, None).await, Err(Reason::CheckFailed));
    }

    #[tokio::test(start_paused = true)]
    async fn watch_of_the_past_is_etcds_to_decide_only_if_there_was_no_check_in_time() {
        let scene = Scene::new(&[]);
        let proven = prove_past(&scene.client(), 3, None).await;
        assert!(matches!(proven, Ok(None)), "{proven:?}");
    }

    #[tokio::test]
    async fn watcher_of_a_mirror_that_was_removed_is_etcds() {
        let scene = Scene::new(&[]);
        let signal = Arc::new(Signal::new(0));
        let started = start(scene.client(), signal, 99, Create::default(), None, None).await;
        assert!(
            matches!(started, Err(NotServed::Etcd(Reason::NotMirrored))),
            "{started:?}"
        );
    }
}
