//! MemberList: etcd's own answer, or rangecache as the only member with `--advertise-client-urls`.

use serde_json::Value;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::http;
use testkit::pb::{MemberListRequest, MemberListResponse};
use testkit::process::tool;
use testkit::proxy::Rangecache;

const MEMBER_LIST: &str = "/etcdserverpb.Cluster/MemberList";

async fn members(client: &Client) -> MemberListResponse {
    let request = MemberListRequest { linearizable: true };
    client.unary(MEMBER_LIST, &request).await.expect("the members")
}

async fn members_by_json(url: &str) -> Value {
    let response = http::post(&format!("{url}/v3/cluster/member/list"), "{}").await;
    serde_json::from_str(&response.expect("a response").body).expect("JSON")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_list_is_etcds_unless_urls_are_advertised() {
    for version in [Version::V3_7, Version::V3_6, Version::V3_5] {
        let etcd = Etcd::start(version).await;
        let direct = members(&etcd.client().await).await;
        let transparent = Rangecache::before(&etcd).start().await;
        assert_eq!(members(&transparent.client().await).await, direct);
        assert_eq!(
            members_by_json(transparent.url()).await,
            members_by_json(&etcd.url()).await
        );

        let urls = ["http://rangecache:23790", "http://10.0.0.1:23790"];
        let advertised = Rangecache::before(&etcd)
            .with("--advertise-client-urls", &urls.join(","))
            .start()
            .await;
        let through = members(&advertised.client().await).await;
        assert_eq!(through.header, direct.header, "{version:?}");
        let [only] = through.members.as_slice() else {
            panic!("{through:?}");
        };
        assert_eq!(only.client_urls, urls);
        assert!(!only.name.is_empty());
        let by_json = members_by_json(advertised.url()).await;
        assert_eq!(by_json["header"], members_by_json(&etcd.url()).await["header"]);
        assert_eq!(by_json["members"][0]["clientURLs"], serde_json::json!(urls));
        assert_eq!(by_json["members"].as_array().map(Vec::len), Some(1));
    }
}

/// A client that takes its endpoints from the members, as etcdctl does with `--cluster`, stays with rangecache.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_syncs_members_stays_with_the_advertised_url() {
    let etcd = Etcd::start(Version::V3_7).await;
    let advertised = "http://127.0.0.1:1";
    let rangecache = Rangecache::before(&etcd)
        .with("--advertise-client-urls", advertised)
        .start()
        .await;
    let listed = tokio::process::Command::new(tool("etcdctl"))
        .args([
            "--endpoints",
            rangecache.url(),
            "member",
            "list",
            "--write-out",
            "json",
        ])
        .kill_on_drop(true)
        .output()
        .await
        .expect("etcdctl runs");
    let listed: Value = serde_json::from_slice(&listed.stdout).expect("JSON");
    assert_eq!(
        listed["members"][0]["clientURLs"],
        serde_json::json!([advertised])
    );
}
