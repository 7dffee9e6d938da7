//! `POST /forward-all`: an operator switches memory off, and on again.

use ::http::Method;
use serde_json::{Value, json};
use testkit::etcd::{Etcd, Version};
use testkit::http;
use testkit::metrics::Outcomes;
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchResponse, prefix_end};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

async fn switch(rangecache: &Rangecache, method: Method) -> Value {
    serde_json::from_str(&rangecache.forward_all(method).await).unwrap()
}

/// Reads of every kind that memory answers, and what etcd answers to them.
async fn read_all(rangecache: &Rangecache, etcd: &Etcd) -> Outcomes {
    let (client, direct) = (rangecache.client().await, etcd.client().await);
    let before = rangecache.outcomes().await;
    let reads = [
        RangeRequest {
            key: "/a/".into(),
            range_end: prefix_end(b"/a/"),
            ..RangeRequest::default()
        },
        RangeRequest {
            key: "/a/1".into(),
            serializable: true,
            ..RangeRequest::default()
        },
        RangeRequest {
            key: "/a/1".into(),
            revision: 2,
            ..RangeRequest::default()
        },
    ];
    for read in &reads {
        let (cached, expected) = (client.range(read).await, direct.range(read).await);
        assert_eq!(cached.unwrap().kvs, expected.unwrap().kvs);
    }
    let url = format!("{}/v3/kv/range", rangecache.url());
    http::post(&url, r#"{"key":"L2EvMQ=="}"#).await.unwrap();
    rangecache.outcomes_since(&before, 4).await
}

async fn forwards_everything(version: Version) {
    let etcd = Etcd::start(version).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let client = rangecache.client().await;
    for n in 0..3 {
        client.put(format!("/a/{n}"), "v").await.unwrap();
    }
    let answered = read_all(&rangecache, &etcd).await;
    assert_eq!(answered.memory_answers(), 4, "{answered:?}");
    let mut watch = client
        .watch(WatchCreateRequest {
            key: "/a/".into(),
            range_end: prefix_end(b"/a/"),
            ..WatchCreateRequest::default()
        })
        .await;
    let streams = async |source: &str| rangecache.metrics().await.watch_streams(source);
    assert_eq!(streams("memory").await, 1.0);

    assert_eq!(
        switch(&rangecache, Method::POST).await,
        json!({"forward_all": true})
    );
    let answered = read_all(&rangecache, &etcd).await;
    let forwarded = ("forwarded".to_owned(), "forward_all".to_owned());
    assert_eq!(answered.0, [(forwarded, 4)].into(), "{answered:?}");
    until(SOON, "the watch is handed to etcd", async || {
        (streams("etcd").await == 1.0).then_some(())
    })
    .await;
    assert_eq!(rangecache.admin("/readyz").await.status, 200);
    let status: Value = serde_json::from_str(&rangecache.admin("/status").await.body).unwrap();
    assert_eq!(status["forward_all"], true);
    assert!(
        rangecache
            .admin("/")
            .await
            .body
            .contains("memory is switched off")
    );
    assert_eq!(rangecache.metrics().await.sum("rangecache_forward_all"), 1.0);
    assert!(rangecache.log().contains("an operator has switched memory off"));
    client.put("/a/1", "while forwarded").await.unwrap();

    assert_eq!(
        switch(&rangecache, Method::DELETE).await,
        json!({"forward_all": false})
    );
    let answered = read_all(&rangecache, &etcd).await;
    assert_eq!(answered.memory_answers(), 4, "{answered:?}");
    until(SOON, "the watch returns to memory", async || {
        (streams("memory").await == 1.0).then_some(())
    })
    .await;
    client.put("/a/2", "in memory again").await.unwrap();
    let mut values = Vec::new();
    while values.len() < 2 {
        let response = watch.next_as::<WatchResponse>(SOON).await.unwrap();
        for event in response.events {
            values.push(String::from_utf8(event.kv.unwrap().value.to_vec()).unwrap());
        }
    }
    assert_eq!(values, ["while forwarded", "in memory again"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_and_watches_go_to_etcd_while_memory_is_switched_off_3_7() {
    forwards_everything(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn reads_and_watches_go_to_etcd_while_memory_is_switched_off_3_6() {
    forwards_everything(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn reads_and_watches_go_to_etcd_while_memory_is_switched_off_3_5() {
    forwards_everything(Version::V3_5).await;
}
