//! Members of scripted etcds, as the examination connects to them.

use std::sync::Arc;

use clap::Parser as _;
use prost::Message as _;
use tokio_util::task::TaskTracker;

use super::members::{Member, connect, read_status};
use etcd_wire::etcdserverpb::{Member as Known, MemberListResponse, ResponseHeader, StatusResponse};
use rangecache_base::telemetry::Metrics;
use rangecache_config::Config;
use rangecache_upstream::Credentials;
use rangecache_upstream::fake::{FakeEtcd, range_at};

/// Status of a member that is well; the member 1 leads.
pub(super) fn status(member_id: u64) -> StatusResponse {
    StatusResponse {
        header: Some(ResponseHeader {
            cluster_id: 7,
            member_id,
            ..ResponseHeader::default()
        }),
        version: "3.7.3".to_owned(),
        leader: 1,
        raft_index: 10,
        db_size: 4 << 20,
        db_size_in_use: 1 << 20,
        ..StatusResponse::default()
    }
}

/// An etcd with this status, which answers reads, and knows these members.
pub(super) async fn etcd(status: StatusResponse, known: &[Known]) -> FakeEtcd {
    let list = MemberListResponse {
        members: known.to_vec(),
        ..MemberListResponse::default()
    };
    FakeEtcd::start(move |path, _| {
        let answer = match path.rsplit('/').next() {
            Some("Status") => Ok(status.encode_to_vec()),
            Some("MemberList") => Ok(list.encode_to_vec()),
            Some("Range") => range_at(7, 5, 2),
            _ => Err((12, "unknown method")),
        };
        async move { answer }
    })
    .await
}

/// The members at `endpoints`, with their statuses.
pub(super) async fn connected(endpoints: &[String], flags: &[&str]) -> (Config, Vec<Member>) {
    let named = format!("--endpoints={}", endpoints.join(","));
    let config = Config::try_parse_from(["rangecache", &named].iter().chain(flags)).unwrap();
    let connector = config.connector(&Arc::new(Metrics::new())).unwrap();
    let credentials = Credentials::open(&config.etcd, &connector).unwrap();
    let mut members = connect(&config, &connector, &credentials, &TaskTracker::new()).await;
    read_status(&mut members).await;
    (config, members)
}

/// An address at which nothing listens.
pub(super) fn nothing() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}
