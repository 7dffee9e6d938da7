//! How a member is: asked over and over on its check connection, so that calls leave a member that hangs, stands still,
//! has lost its leader or does not vote within a second of its doing so.
//!
//! A member that is unwell is not excluded: it only comes after all others. With one endpoint nothing changes.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};
use tonic::Code;

use super::connection::Connection;
use super::endpoint::{Endpoint, Role};
use super::{Upstream, Version};
use crate::etcdserverpb::StatusResponse;
use crate::grpc_health::HealthCheckRequest;
use crate::grpc_health::health_check_response::ServingStatus;
use crate::grpc_health::health_client::HealthClient;

/// How often it is asked whether it serves.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);
/// How long it may take to say so: with the interval, a member that hangs is left within a second.
const HEALTH_TIMEOUT: Duration = Duration::from_millis(400);
/// At every so manieth beat it is asked for its leader and its version, too: an endpoint may be a balancer in front of a
/// rolling upgrade.
const STATUS_BEATS: u32 = 4;

/// Asks for as long as the connection stands. `answered` is set with the first answer: until then nobody knows whether it is
/// etcd that was connected to.
pub(super) async fn watch(
    endpoint: &Endpoint,
    connection: &Arc<Connection>,
    upstream: &Upstream,
    answered: &AtomicBool,
) -> Infallible {
    let mut beat = tokio::time::interval(HEALTH_INTERVAL);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // How it leads, votes and knows a leader; judged when it told so last.
    let mut sound = true;
    let mut n = 0_u32;
    loop {
        beat.tick().await;
        let deadline = Instant::now() + HEALTH_TIMEOUT;
        if endpoint.version().is_none() || !answered.load(Ordering::Relaxed) || n.is_multiple_of(STATUS_BEATS)
        {
            let told = tokio::time::timeout_at(deadline, connection.ask_own_status()).await;
            // A refusal is an answer too; one with a source is a lost connection.
            let is_answer = match &told {
                Ok(Ok(_)) => true,
                Ok(Err(status)) => std::error::Error::source(status).is_none(),
                Err(_) => false,
            };
            if is_answer && !answered.swap(true, Ordering::Relaxed) {
                tracing::info!(endpoint = %endpoint.url, "connected to etcd");
            }
            match told {
                Ok(Ok(status)) => {
                    let role = Role::of(&status);
                    endpoint.set_role(role);
                    sound = is_sound(role);
                    learn_version(endpoint, &status, upstream);
                }
                Ok(Err(status)) => {
                    tracing::debug!(endpoint = %endpoint.url, code = ?status.code(), message_of_etcd = status.message(),
                        "etcd did not tell its status");
                }
                // The next question shows whether it hangs.
                Err(_) => {}
            }
        }
        let serves = tokio::time::timeout(HEALTH_TIMEOUT, serves(connection)).await;
        endpoint.set_well(sound && serves.unwrap_or(false));
        n = n.wrapping_add(1);
    }
}

/// What gRPC's health service says; a server without it is taken to serve.
pub async fn serves(connection: &Arc<Connection>) -> bool {
    let (channel, origin) = connection.channel();
    let mut client = HealthClient::with_origin(channel, origin);
    match client.check(HealthCheckRequest::default()).await {
        Ok(answer) => answer.get_ref().status() == ServingStatus::Serving,
        Err(status) => matches!(
            status.code(),
            // With auth on, or where a proxy in between knows no such service: it answers, and that is what was asked.
            Code::Unimplemented | Code::NotFound | Code::Unauthenticated | Code::PermissionDenied
        ),
    }
}

/// Whether its answers to linearizable reads will come: it votes, and knows a leader. Before 3.4 neither is told; a balancer
/// may hide them. No version tells a leader of 0 while it has one.
fn is_sound(role: Role) -> bool {
    !matches!(role, Role::Learner | Role::Leaderless)
}

fn learn_version(endpoint: &Endpoint, status: &StatusResponse, upstream: &Upstream) {
    match status.version.parse::<Version>() {
        Ok(version) if endpoint.set_version(version) => {
            tracing::info!(endpoint = %endpoint.url, %version, "etcd told its version");
            upstream.version_learned();
        }
        Ok(_) => {}
        Err(error) => {
            tracing::debug!(endpoint = %endpoint.url, %error, "etcd told no version");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcdserverpb::ResponseHeader;

    #[test]
    fn learners_and_members_without_a_leader_are_not_sound() {
        let voter = StatusResponse {
            leader: 7,
            ..StatusResponse::default()
        };
        let judged = |status: &StatusResponse| (Role::of(status), is_sound(Role::of(status)));
        assert_eq!(judged(&voter), (Role::Follower, true));
        let leader = StatusResponse {
            header: Some(ResponseHeader {
                member_id: 7,
                ..ResponseHeader::default()
            }),
            ..voter.clone()
        };
        assert_eq!(judged(&leader), (Role::Leader, true));
        let leaderless = StatusResponse {
            leader: 0,
            ..voter.clone()
        };
        assert_eq!(judged(&leaderless), (Role::Leaderless, false));
        let learner = StatusResponse {
            is_learner: true,
            ..voter
        };
        assert_eq!(judged(&learner), (Role::Learner, false));
    }
}
