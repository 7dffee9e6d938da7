//! **plan** and **prove**: whether a read is answered from memory, and at which revision. The result knows no wire protocol, so
//! that both methods share it.

use http::HeaderMap;
use tokio::time::Instant;

use super::answer::{Decision, Proven, answer};
use super::authorize::Authorized;
use super::plan::{Plan, PlanInputs, plan};
use crate::cache::{RangeQuery, ResponseHeader};
use crate::grpc::{CallMetadata, Status};
use crate::mirror::cluster_state::Auth;
use crate::mirror::state::Mirror;
use crate::proxy::handles::Proxy;
use crate::proxy::recorder::Recorder;
use crate::proxy::spans::Trace;
use crate::telemetry::outcome::Read;
use crate::telemetry::{Outcome, Reason};

/// Until when a read may wait for its proof.
#[derive(Clone, Copy)]
struct Deadlines {
    /// The client's, if it sent a timeout.
    client: Option<Instant>,
    /// `--freshness-timeout`.
    own: Instant,
}

impl Deadlines {
    fn first(self) -> Instant {
        self.client.map_or(self.own, |client| client.min(self.own))
    }
}

/// Decides how `query` is completed. `metadata` was read from `headers`.
pub(super) async fn decide<'a>(
    proxy: &'a Proxy,
    query: &RangeQuery,
    metadata: &CallMetadata,
    headers: &HeaderMap,
    recorder: &mut Recorder<'a>,
) -> Decision {
    recorder.revisions.asked = query.revision;
    if metadata.bypass {
        return Decision::Forward(Reason::Bypass);
    }
    let deadlines = Deadlines {
        client: recorder.deadline(metadata.timeout),
        own: recorder.arrived() + proxy.freshness_timeout,
    };
    if deadlines
        .client
        .is_some_and(|deadline| deadline <= Instant::now())
    {
        return Decision::Error(Status::DeadlineExceeded, Outcome::Cancelled(Reason::Deadline));
    }
    let mirror = proxy.mirrors.holding(&query.interval());
    recorder.mirror = mirror;
    let inputs = inputs(proxy, mirror, metadata);
    let plan = plan(query, &inputs);
    tracing::debug!(?plan, "planned");
    recorder.begin_prove();
    let decided = match plan {
        Plan::Refuse(error) => {
            let status = Status::InvalidArgument(error.to_string());
            return Decision::Error(status, Outcome::Hit(Read::Refused));
        }
        Plan::Forward(reason) => return Decision::Forward(reason),
        Plan::AtOrAbove(floor) => answer_at(proxy, query, &inputs, mirror, floor, deadlines, recorder).await,
        Plan::Prove => match quorum_check(proxy, deadlines, recorder).await {
            Ok(revision) => answer_at(proxy, query, &inputs, mirror, revision, deadlines, recorder).await,
            Err(reason) => Err(reason),
        },
        Plan::Authorize { serializable, floor } => {
            let authorized = Authorized {
                query,
                metadata: headers,
                inputs: &inputs,
                serializable,
                floor,
                deadline: deadlines.first(),
            };
            // Boxed, so that the future of a read that needs no authorisation stays small.
            Box::pin(authorized.decide(proxy, mirror, recorder)).await
        }
    };
    decided.unwrap_or_else(|reason| not_proven(reason, deadlines, recorder))
}

fn inputs(proxy: &Proxy, mirror: Option<&Mirror>, metadata: &CallMetadata) -> PlanInputs {
    let cluster_state = &proxy.mirrors.cluster_state;
    let upstream = &proxy.forward.upstream;
    let auth = cluster_state.auth();
    PlanInputs {
        mirror: mirror.map(Mirror::revision),
        version: upstream.lowest_version(),
        auth,
        own_identity: auth == Auth::On && upstream.credentials().are_valid(),
        floor: cluster_state.min_served_revision(),
        credentials: metadata.has_credentials,
        require_leader: metadata.require_leader,
    }
}

/// The revision that a quorum check proves to be current.
async fn quorum_check(
    proxy: &Proxy,
    deadlines: Deadlines,
    recorder: &mut Recorder<'_>,
) -> Result<i64, Reason> {
    let link = recorder.trace.as_deref_mut().map(Trace::check_context);
    let proving = proxy.mirrors.freshness.prove_for(link);
    // The check keeps to its own deadline; only an earlier one takes a timer.
    let proof = if deadlines.first() < deadlines.own {
        match Box::pin(tokio::time::timeout_at(deadlines.first(), proving)).await {
            Ok(proof) => proof?,
            Err(_) => return Err(Reason::CheckFailed),
        }
    } else {
        proving.await?
    };
    Ok(proof.header.revision)
}

/// Answers from a mirror once it is at `revision` or later.
///
/// # Errors
/// Why the mirror did not get there.
async fn answer_at<'a>(
    proxy: &'a Proxy,
    query: &RangeQuery,
    inputs: &PlanInputs,
    mirror: Option<&'a Mirror>,
    revision: i64,
    deadlines: Deadlines,
    recorder: &mut Recorder<'a>,
) -> Result<Decision, Reason> {
    // The plan made sure that there is one.
    let Some(mirror) = mirror else {
        return Ok(Decision::Forward(Reason::NotMirrored));
    };
    recorder.record_required_revision(revision);
    let (view, waited) = mirror.reach(revision, deadlines.first()).await?;
    recorder.record_proven(mirror, view.revision, waited);
    tracing::debug!(at_or_above = revision, revision = view.revision, waited, "proven");
    let cluster_state = &proxy.mirrors.cluster_state;
    // Cluster, member and raft term are those of the last check; auth was off then, and must be off still.
    let Some(identity) = cluster_state
        .identity()
        .filter(|_| cluster_state.auth() == Auth::Off)
    else {
        return Ok(Decision::Forward(Reason::Auth));
    };
    let header = ResponseHeader {
        revision: view.revision,
        ..*identity
    };
    let proven = Proven {
        mirror,
        view,
        header,
        waited,
    };
    Ok(answer(query, &proven, inputs.version, cluster_state))
}

/// A wait that the client's own timeout ended gets the client's error; any other is forwarded.
fn not_proven(reason: Reason, deadlines: Deadlines, recorder: &mut Recorder<'_>) -> Decision {
    recorder.record_not_proven(reason);
    match deadlines.client {
        Some(client) if Instant::now() >= client => {
            Decision::Error(Status::DeadlineExceeded, Outcome::Cancelled(Reason::Deadline))
        }
        _ => Decision::Forward(reason),
    }
}
