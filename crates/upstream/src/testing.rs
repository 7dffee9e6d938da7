//! Scripted members, and an upstream before them.

use std::{sync::Arc, time::Duration};

use etcd_wire::etcdserverpb::{ResponseHeader, StatusResponse};
use prost::Message as _;
use rangecache_base::net::Url;
use rangecache_edge::tls::Connector;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::{
    connection::Connection, credentials::Credentials, fake::FakeEtcd, opening::open_once, pool::Upstream,
    transport::ConnectError,
};

/// Bound on what a test waits for.
pub(super) const SOON: Duration = Duration::from_secs(20);

/// Status of the member `id` of `cluster`, without a leader if `leader` is 0.
pub(super) fn status(version: &str, cluster: u64, id: u64, leader: u64) -> Vec<u8> {
    let status = StatusResponse {
        header: Some(ResponseHeader {
            cluster_id: cluster,
            member_id: id,
            ..ResponseHeader::default()
        }),
        version: version.to_owned(),
        leader,
        ..StatusResponse::default()
    };
    status.encode_to_vec()
}

/// A member of `cluster`, without a leader if `leader` is 0.
pub(super) async fn member(version: &str, cluster: u64, leader: u64) -> FakeEtcd {
    let status = status(version, cluster, 2, leader);
    FakeEtcd::start(move |_, _| std::future::ready(Ok(status.clone()))).await
}

/// A connection to `url` without credentials.
pub(super) async fn open(url: &Url) -> Result<Arc<Connection>, ConnectError> {
    let (connector, credentials) = (Connector::plaintext(), Credentials::new(None));
    let (tasks, deadline) = (TaskTracker::new(), Instant::now() + SOON);
    let opening = open_once(&connector, url, &credentials, &tasks, deadline);
    opening.await.map(|(connection, _driver)| connection)
}

/// An upstream with these endpoints, until the guard is dropped.
pub(super) fn start(urls: &[&Url], may_stream: bool) -> (Arc<Upstream>, DropGuard) {
    let urls: Vec<_> = urls.iter().copied().cloned().collect();
    let stop = CancellationToken::new();
    let upstream = Upstream::start(
        &urls,
        &Connector::plaintext(),
        may_stream,
        Credentials::new(None),
        &TaskTracker::new(),
        &stop,
    );
    (upstream, stop.drop_guard())
}

/// Waits for a condition.
pub(super) async fn until(holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, waiting)
        .await
        .expect("the condition holds");
}

/// URLs of the endpoints.
pub(super) fn urls(upstream: &Upstream) -> Vec<Url> {
    upstream.endpoints().into_iter().map(|view| view.url).collect()
}
