//! The status of the member behind a connection.

use std::sync::Arc;
use std::time::Duration;

use super::connection::Connection;
use etcd_wire::etcdserverpb::maintenance_client::MaintenanceClient;
use etcd_wire::etcdserverpb::{StatusRequest, StatusResponse};

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
