//! The status of the member behind a connection, and the health of a member, requested repeatedly on its check connection, so that
//! calls leave a member that hangs, has lost its leader or does not vote within a second.
//!
//! An unhealthy member is not excluded: it is only used after all others. With one endpoint nothing changes.

use std::{sync::Arc, time::Duration};

use etcd_wire::etcdserverpb::maintenance_client::MaintenanceClient;
use etcd_wire::etcdserverpb::{StatusRequest, StatusResponse};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::calls::{EndpointHealth, endpoint_health};
use super::connection::Connection;

/// Timeout of a status request.
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);
/// Attempts at a status of one member.
const STATUS_ATTEMPTS: u32 = 16;

impl Connection {
    /// Calls Maintenance.Status as rangecache's own user: with auth on, etcd permits it only to users.
    ///
    /// # Errors
    /// etcd's status, or `DeadlineExceeded` after [`STATUS_TIMEOUT`].
    pub async fn member_status(self: &Arc<Self>) -> Result<StatusResponse, tonic::Status> {
        let (channel, origin) = self.own_channel();
        let mut client = MaintenanceClient::with_origin(channel, origin);
        let status = tokio::time::timeout(STATUS_TIMEOUT, client.status(StatusRequest {})).await;
        let status = status
            .map_err(|_| tonic::Status::deadline_exceeded("no response to a status request in time"))?;
        let status = status?.into_inner();
        if let Some(header) = &status.header {
            self.set_cluster_id(header.cluster_id);
        }
        Ok(status)
    }

    /// Status of the member with this id: a balancer may send each call to another one. `None` if others have responded to
    /// each of [`STATUS_ATTEMPTS`]. A server that is not etcd may have no id, 0.
    ///
    /// # Errors
    /// Those of [`Connection::member_status`].
    pub async fn status_of(
        self: &Arc<Self>,
        member_id: u64,
    ) -> Result<Option<StatusResponse>, tonic::Status> {
        for _ in 0..STATUS_ATTEMPTS {
            let status = self.member_status().await?;
            let responded = status.header.as_ref().map_or(0, |header| header.member_id);
            if member_id == 0 || responded == member_id {
                return Ok(Some(status));
            }
        }
        Ok(None)
    }
}

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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::fake::{FakeEtcd, status_of_member};
    use crate::testing::open;

    /// An etcd whose status calls are answered by the members in turn, as a balancer does.
    async fn balancer(members: &'static [u64]) -> FakeEtcd {
        let turn = AtomicU64::new(0);
        FakeEtcd::start(move |_, _| {
            let turn = usize::try_from(turn.fetch_add(1, Ordering::Relaxed)).unwrap();
            std::future::ready(status_of_member(members[turn % members.len()], "3.6.0", 1))
        })
        .await
    }

    #[tokio::test]
    async fn status_is_requested_until_the_member_has_responded_or_the_attempts_are_used_up() {
        let etcd = balancer(&[1, 2, 3]).await;
        let connection = open(&etcd.url).await.unwrap();
        let status = connection.status_of(3).await.unwrap().expect("the third attempt");
        assert_eq!(status.header.unwrap().member_id, 3);
        let any = connection.status_of(0).await.unwrap().expect("any member");
        assert_eq!(any.header.unwrap().member_id, 1);
        let before = etcd.calls.lock().len();
        assert!(connection.status_of(4).await.unwrap().is_none());
        assert_eq!(etcd.calls.lock().len() - before, STATUS_ATTEMPTS as usize);
    }
}
