//! Health of a member, requested repeatedly on its check connection, so that calls leave a member that hangs, has
//! lost its leader or does not vote within a second.
//!
//! An unhealthy member is not excluded: it is only used after all others. With one endpoint nothing changes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::calls::{EndpointHealth, endpoint_health};
use super::connection::Connection;
use etcd_wire::etcdserverpb::StatusResponse;

/// Interval of health checks.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);
/// Timeout of a health check and of a status call: with the interval, a member that hangs is left within a second.
pub(super) const HEALTH_TIMEOUT: Duration = Duration::from_millis(400);
/// Status is requested every STATUS_TICKS health checks: an endpoint may be a balancer in front of a rolling upgrade.
const STATUS_TICKS: u32 = 4;
/// Interval behind a hub that answers health checks by itself: it asks its members, and says that it serves only while one votes
/// and knows a leader. Every status of a leaf would be a call of etcd's.
const STATUS_TICKS_BEHIND_HUB: u32 = 60;

/// Health checks of one member.
#[derive(Debug)]
pub(super) struct HealthMonitor<'a> {
    connection: &'a Arc<Connection>,
    interval: Interval,
    /// Ticks since the last one at which the status was due.
    ticks: u32,
    /// Ticks after which it is due.
    status_ticks: u32,
}

/// Result of a status call.
#[derive(Debug)]
pub(super) enum StatusReport {
    /// The member's status.
    Status(Box<StatusResponse>),
    /// etcd, or what is in front of it, refused the call: the peer responds.
    Refused(tonic::Status),
    /// The connection was lost.
    Lost(tonic::Status),
    /// The call timed out. The health check that follows shows whether the member hangs.
    TimedOut,
}

impl<'a> HealthMonitor<'a> {
    pub(super) fn new(connection: &'a Arc<Connection>) -> HealthMonitor<'a> {
        let mut interval = tokio::time::interval(HEALTH_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        HealthMonitor {
            connection,
            interval,
            ticks: STATUS_TICKS_BEHIND_HUB,
            status_ticks: STATUS_TICKS,
        }
    }

    /// Waits for the next tick; returns whether the status is due.
    pub(super) async fn tick(&mut self) -> bool {
        self.interval.tick().await;
        let is_due = self.ticks >= self.status_ticks;
        self.ticks = if is_due { 1 } else { self.ticks + 1 };
        is_due
    }

    /// Requests leader, version and role.
    pub(super) async fn status(&self) -> StatusReport {
        let deadline = Instant::now() + HEALTH_TIMEOUT;
        match tokio::time::timeout_at(deadline, self.connection.member_status()).await {
            Ok(Ok(status)) => StatusReport::Status(Box::new(status)),
            Ok(Err(status)) if std::error::Error::source(&status).is_none() => StatusReport::Refused(status),
            Ok(Err(status)) => StatusReport::Lost(status),
            Err(_) => StatusReport::TimedOut,
        }
    }

    /// Response of the endpoint to a health check; `None` if it does not respond in time.
    pub(super) async fn health(&mut self) -> Option<EndpointHealth> {
        let checking = tokio::time::timeout(HEALTH_TIMEOUT, endpoint_health(self.connection));
        let health = checking.await.ok();
        let behind = health.as_ref().and_then(|health| health.behind.as_ref());
        self.status_ticks = behind.map_or(STATUS_TICKS, |_| STATUS_TICKS_BEHIND_HUB);
        health
    }
}
