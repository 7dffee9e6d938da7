//! tmp
mod support;
use support::etcd::*; use support::pb::*;
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn smoke() {
    for v in [Version::V3_5, Version::V3_6, Version::V3_7] {
        let t = std::time::Instant::now();
        let mut e = Etcd::start(v).await;
        println!("{v:?} up {:?}", t.elapsed());
        let c = e.client().await;
        c.put("a", "b").await.unwrap();
        println!("{:?}", c.range_raw(&RangeRequest::everything()).await);
        println!("{:?}", c.range_raw(&RangeRequest::one("")).await);
        println!("{:?}", c.range_raw(&RangeRequest{revision: 99, ..RangeRequest::one("a")}).await);
        println!("{:?}", c.range_stream(&RangeRequest::everything()).await);
        let mut w = c.watch(WatchCreate{key: b"a".to_vec(), start_revision: 1, ..Default::default()}).await;
        println!("{:?}", w.next_as::<WatchResponse>(support::wait::SOON).await);
        println!("watchers {}", e.metrics().await.sum("etcd_debugging_mvcc_watcher_total"));
        if v == Version::V3_7 {
            let s = e.save_snapshot().await;
            c.put("a", "c").await.unwrap();
            let t = std::time::Instant::now();
            e.restore(&s, "rangecache", &[]); e.run(); e.ready().await;
            println!("restored {:?}", t.elapsed());
            println!("{:?}", e.client().await.range(&RangeRequest::everything()).await);
        }
        let t = std::time::Instant::now();
        e.restart().await;
        println!("restart {:?}", t.elapsed());
    }
    let t = std::time::Instant::now();
    let c = Cluster::start(Version::V3_7).await;
    println!("cluster {:?}", t.elapsed());
    let k = c.members[0].client().await;
    k.put("x", "y").await.unwrap();
    let r = k.enable_auth("pw").await.unwrap();
    println!("{:?} {:?}", k.get("x").await, r.get("x").await);
    r.disable_auth().await.unwrap();
}
