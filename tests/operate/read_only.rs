//! Listeners on which clients may only read.

use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, PERMISSION_DENIED};
use testkit::http;
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchResponse};
use testkit::proxy::Rangecache;
use testkit::wait::SOON;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_and_watches_are_served_on_a_read_only_listener() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--read-only-listen-client-urls", "http://127.0.0.1:0")
        .start()
        .await;
    let (writer, reader) = (
        rangecache.client().await,
        Client::connect(&rangecache.read_only_url()).await,
    );
    let create = WatchCreateRequest {
        key: b"/a".to_vec(),
        ..WatchCreateRequest::default()
    };
    let mut watch = reader.watch(create).await;
    writer
        .put("/a", "v")
        .await
        .expect("the other listener permits writes");
    let read = reader.range(&RangeRequest::one("/a")).await.expect("a read");
    assert_eq!(read.kvs[0].value, b"v");
    let event: WatchResponse = watch.next_as(SOON).await.expect("an event");
    assert_eq!(event.events.len(), 1);
    reader.status().await.expect("the status of a member");
    let version = http::get(&format!("{}/version", rangecache.read_only_url())).await;
    assert_eq!(version.expect("a response").status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_and_unknown_calls_are_refused_on_a_read_only_listener() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--read-only-listen-client-urls", "http://127.0.0.1:0")
        .start()
        .await;
    let before = etcd.client().await.put("/a", "v").await.expect("etcd puts");
    let reader = Client::connect(&rangecache.read_only_url()).await;
    let refused = [
        "/etcdserverpb.KV/Put",
        "/etcdserverpb.KV/DeleteRange",
        "/etcdserverpb.KV/Txn",
        "/etcdserverpb.KV/Compact",
        "/etcdserverpb.KV/Range?a=b",
        "/etcdserverpb.Lease/LeaseGrant",
        "/etcdserverpb.Lease/LeaseKeepAlive",
        "/etcdserverpb.Auth/AuthEnable",
        "/etcdserverpb.Cluster/MemberAdd",
        "/etcdserverpb.Maintenance/Defragment",
        "/etcdserverpb.Maintenance/Snapshot",
        "/v3lockpb.Lock/Lock",
        "/unknown.Service/Method",
    ];
    for path in refused {
        let reply = reader.raw(path, b"").await.expect("a response");
        let status = reply.status();
        assert_eq!(status.code, PERMISSION_DENIED, "{path}: {status:?}");
        assert!(status.message.contains("read-only"), "{path}: {status:?}");
    }
    for path in ["/v3/kv/put", "/v3/kv/txn", "/v3/kv/range/../put", "/debug/vars"] {
        let response = http::get(&format!("{}{path}", rangecache.read_only_url())).await;
        let response = response.expect("a response");
        assert_eq!(response.status, 403, "{path}: {response:?}");
    }
    let metrics = rangecache.metrics().await;
    let counted = metrics.sum("rangecache_read_only_refused_total");
    assert!((counted - 17.0).abs() < f64::EPSILON, "{counted}");
    let after = etcd.client().await.put("/b", "v").await.expect("etcd puts");
    assert_eq!(after, before + 1, "nothing was written meanwhile");
}
