//! A list read in pages is of one revision, whatever is written meanwhile and whichever rangecache serves the pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::pb::{KeyValue, RangeRequest, RequestOp, prefix_end};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

const KEYS: usize = 10_000;
const PAGE: i64 = 500;
const PREFIX: &str = "/pages/";

fn key(number: usize) -> String {
    format!("{PREFIX}{number:05}")
}

/// Rewrites and deletes keys all over the prefix and adds new ones, until `stop`; counts its transactions.
async fn rewrite(etcd: Client, stop: Arc<AtomicBool>, written: Arc<AtomicU64>) {
    for turn in 0_usize.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let operations = (0..40).map(|n| {
            let number = (turn * 40 + n) * 7_919 % KEYS;
            match n % 4 {
                0 => RequestOp::delete(key(number)),
                1 => RequestOp::put(format!("{}-new", key(number)), "made since"),
                _ => RequestOp::put(key(number), format!("rewritten in turn {turn}")),
            }
        });
        etcd.transact(operations.collect()).await.expect("etcd writes");
        written.fetch_add(1, Ordering::SeqCst);
    }
}

async fn pages_are_of_one_revision(version: Version) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    for start in (0..KEYS).step_by(100) {
        let batch = (start..start + 100).map(|n| RequestOp::put(key(n), format!("first value of {n}")));
        direct.transact(batch.collect()).await.expect("etcd writes");
    }
    let sidecars = [
        Rangecache::before(&etcd).start().await,
        Rangecache::before(&etcd).start().await,
    ];
    let clients = [sidecars[0].client().await, sidecars[1].client().await];
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));

    let first = RangeRequest {
        limit: PAGE,
        ..RangeRequest::prefix(PREFIX)
    };
    let mut page = clients[0].range(&first).await.expect("the first page");
    let revision = page.revision();
    assert_eq!((page.count, page.more), (KEYS as i64, true));
    let writer = tokio::spawn(rewrite(etcd.client().await, stop.clone(), written.clone()));

    let mut read: Vec<KeyValue> = Vec::new();
    let mut pages = 1;
    loop {
        let last = page.kvs.last().expect("no page is empty").key.clone();
        read.append(&mut page.kvs);
        if !page.more {
            break;
        }
        // The store must have changed between any two pages.
        let so_far = written.load(Ordering::SeqCst);
        until(SOON, "the writer writes", async || {
            (written.load(Ordering::SeqCst) >= so_far + 5).then_some(())
        })
        .await;

        let key = [&last[..], b"\0"].concat();
        let next = RangeRequest {
            limit: PAGE,
            revision,
            ..RangeRequest::range(key, prefix_end(PREFIX.as_bytes()))
        };
        page = clients[pages % 2].range(&next).await.expect("a page");
        let expected = direct.range(&next).await.expect("etcd's own page");
        assert_eq!(page.kvs, expected.kvs, "page {pages}");
        assert_eq!(
            (page.count, page.more),
            (expected.count, expected.more),
            "page {pages}"
        );
        assert!(page.revision() >= revision, "the header has the current revision");
        pages += 1;
    }
    stop.store(true, Ordering::Relaxed);
    writer.await.expect("the writer succeeds");
    println!(
        "{pages} pages over {} transactions",
        written.load(Ordering::SeqCst)
    );

    assert_eq!(pages, KEYS / PAGE as usize);
    assert_eq!(read.len(), KEYS);
    for (number, kv) in read.iter().enumerate() {
        let value = format!("first value of {number}");
        assert_eq!(
            (&kv.key, &kv.value),
            (&key(number).into_bytes(), &value.into_bytes())
        );
        assert_eq!(kv.version, 1);
    }
    let whole = RangeRequest {
        revision,
        ..RangeRequest::prefix(PREFIX)
    };
    let count = RangeRequest {
        count_only: true,
        ..whole.clone()
    };
    for (sidecar, client) in sidecars.iter().zip(&clients) {
        assert_eq!(
            client.range(&whole).await.expect("the list at that revision").kvs,
            read
        );
        assert_eq!(
            client
                .range(&count)
                .await
                .expect("the count at that revision")
                .count,
            KEYS as i64
        );
        let now = RangeRequest::prefix(PREFIX);
        assert_eq!(
            client.range_raw(&now).await,
            direct.range_raw(&now).await,
            "the present, at rest"
        );
        let outcomes = sidecar
            .outcomes_since(&Default::default(), pages as u64 / 2 + 3)
            .await;
        assert_eq!(
            outcomes.memory_answers(),
            outcomes.total(),
            "all pages come from memory: {outcomes:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_of_one_revision_3_7() {
    pages_are_of_one_revision(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn pages_are_of_one_revision_3_5() {
    pages_are_of_one_revision(Version::V3_5).await;
}
