//! Clients: who they are, and what they cost.

use serde_json::Value;
use testkit::etcd::{Etcd, Version};
use testkit::pb::{RangeRequest, WatchCreateRequest, prefix_end};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

/// Clients in `/clients`.
async fn clients(rangecache: &Rangecache) -> Vec<Value> {
    let body = rangecache.admin("/clients").await.body;
    let clients: Value = serde_json::from_str(&body).expect("is JSON");
    clients.as_array().expect("a list").clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_is_counted_with_its_calls_lists_and_watches() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let client = rangecache.client().await;
    client.put("/a", vec![b'v'; 5_000]).await.expect("etcd puts");
    let list = RangeRequest {
        key: b"/".to_vec(),
        range_end: prefix_end(b"/"),
        ..Default::default()
    };
    client.range(&list).await.expect("a list");
    let watch = WatchCreateRequest {
        key: b"/a".to_vec(),
        ..Default::default()
    };
    let watch = client.watch(watch).await;
    until(SOON, "the calls are counted", async || {
        let clients = clients(&rangecache).await;
        let [client] = &clients[..] else { return None };
        let count = |name: &str| client[name].as_u64().expect("a count");
        (client["kind"] == "address"
            && client["name"] == "127.0.0.1"
            && count("calls") == 3
            && count("lists") == 1
            && count("watches") == 1
            && count("from_memory") == 1
            && count("from_etcd") == 1
            && count("sent_bytes") > 5_000
            && count("received_bytes") > 5_000)
            .then_some(())
    })
    .await;
    let metrics = rangecache.metrics().await;
    let watches = metrics.sum("rangecache_client_watches");
    assert!((watches - 1.0).abs() < f64::EPSILON, "{watches}");
    drop(watch);
    until(SOON, "the watch is closed", async || {
        let clients = clients(&rangecache).await;
        (clients[0]["watches"] == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_is_named_by_its_token_which_is_shown_nowhere() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let through = rangecache.client().await;
    let root = through.enable_auth("secret").await.expect("auth is on");
    root.put("/a", "v").await.expect("etcd puts");
    let clients = clients(&rangecache).await;
    let user = clients.iter().find(|client| client["kind"] == "user");
    let user = user.unwrap_or_else(|| panic!("{clients:?}"));
    assert_eq!(user["name"], "root");
    assert_eq!(user["calls"], 1);
}
