//! Loads from a scripted etcd.

use std::sync::atomic::{AtomicU64, Ordering};
use std::{ops::ControlFlow, sync::Arc, time::Duration};

use etcd_store::cache::{Tree, testing::KeyValue};
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse, RangeStreamResponse};
use prost::Message as _;
use rangecache_upstream::fake::{self, FakeEtcd};
use rangecache_upstream::first_page_limit;
use tonic::Code;

use super::{begin::MAX_RESUMES, *};
use crate::lineage::HistoryId;
use crate::testing::{Bench, Then};

fn keys(tree: &Tree) -> String {
    let mut keys = String::new();
    tree.for_each_from(0, |entry| {
        keys += std::str::from_utf8(entry.key()).unwrap();
        ControlFlow::Continue(())
    });
    keys
}

#[tokio::test]
async fn whole_load_keeps_its_connection_as_a_proof() {
    let bench = Bench::new().await;
    let loaded = bench.load().await.unwrap();
    assert_eq!(
        (keys(&loaded.anchor.tree), loaded.anchor.revision),
        ("abc".into(), 4)
    );
    assert!(loaded.connection.is_some());
}

#[tokio::test]
async fn load_resumes_behind_its_last_key_at_its_revision_after_a_break() {
    let bench = Bench::new().await;
    let write: Then = |etcd| drop(etcd.put("bb", "later"));
    bench.etcd.lock().breaks.push_back((2, write));
    let loaded = bench.load().await.unwrap();
    assert_eq!(
        (keys(&loaded.anchor.tree), loaded.anchor.revision),
        ("abc".into(), 4)
    );
    assert!(
        loaded.connection.is_none(),
        "no member has kept the whole history of the load"
    );
    let etcd = bench.etcd.lock();
    let read: Vec<_> = etcd
        .reads
        .iter()
        .map(|read| (&read.key[..], read.revision))
        .collect();
    let compared = (&b"\0"[..], 4);
    assert_eq!(read, [(&b"\0"[..], 4), compared, (&b"b\0"[..], 4)]);
}

#[tokio::test]
async fn load_does_not_resume_in_another_history() {
    let bench = Bench::new().await;
    bench.etcd.lock().breaks.push_back((2, |etcd| etcd.rewrite(3)));
    let error = bench.load().await.unwrap_err();
    assert!(matches!(error, LoadError::HistoryReplaced), "{error}");
    assert_ne!(bench.set.cluster_state.history(), HistoryId::FIRST);
}

#[tokio::test]
async fn load_whose_revision_is_compacted_fails_and_the_next_one_has_a_new_revision() {
    let bench = Bench::new().await;
    let compact: Then = |etcd| {
        etcd.put("d", "later");
        etcd.compacted = etcd.revision;
    };
    bench.etcd.lock().breaks.push_back((2, compact));
    let error = bench.load().await.unwrap_err();
    assert!(
        matches!(&error, LoadError::Status(status) if status.code() == Code::OutOfRange),
        "{error}"
    );
    assert_eq!(bench.set.cluster_state.history(), HistoryId::FIRST);
    assert_eq!(
        bench.etcd.lock().reads.len(),
        2,
        "the comparison is the last read"
    );
    let loaded = bench.load().await.unwrap();
    assert_eq!(
        (keys(&loaded.anchor.tree), loaded.anchor.revision),
        ("abcd".into(), 5)
    );
}

#[tokio::test]
async fn load_that_makes_no_progress_fails() {
    let bench = Bench::new().await;
    let breaks = (0..=MAX_RESUMES).map(|_| -> (usize, Then) { (0, |_| {}) });
    bench.etcd.lock().breaks.extend(breaks);
    let error = bench.load().await.unwrap_err();
    assert!(error.is_broken(), "{error}");
    let reads = bench.etcd.lock().reads.len();
    assert_eq!(reads, 1 + usize::try_from(MAX_RESUMES).unwrap());
}

#[tokio::test]
async fn load_ends_at_the_key_that_exceeds_its_memory() {
    let bench = Bench::with_memory("64").await;
    let error = bench.load().await.unwrap_err();
    assert!(
        matches!(error, LoadError::OverBudget { max_bytes: 64, .. }),
        "{error}"
    );
    assert_eq!(bench.mirror().metrics.load_keys.get(), 2);
}

#[tokio::test]
async fn server_without_a_cluster_id_is_not_loaded_from() {
    let bench = Bench::new().await;
    bench.etcd.lock().cluster_id = 0;
    let error = bench.load().await.unwrap_err();
    assert!(matches!(error, LoadError::NotEtcd), "{error}");
}

#[tokio::test]
async fn etcd_that_does_not_know_range_stream_is_loaded_by_pages() {
    let bench = Bench::new().await;
    bench.etcd.lock().has_range_stream = false;
    let loaded = bench.load().await.unwrap();
    assert_eq!(keys(&loaded.anchor.tree), "abc");
    let etcd = bench.etcd.lock();
    let [_, page] = &etcd.reads[..] else {
        panic!("{:?}", etcd.reads)
    };
    assert_eq!((page.revision, page.limit), (4, first_page_limit()));
}

/// The contents of a neighbour are known before a start needs them: memory that has the keys, of the same cluster.
#[tokio::test]
async fn neighbour_is_of_use_while_its_memory_counts_the_keys() {
    let bench = Bench::new().await;
    let cluster_id = Arc::new(AtomicU64::new(7));
    let answered = Arc::clone(&cluster_id);
    let neighbour = FakeEtcd::start(move |_, message| {
        let request = RangeRequest::decode(&message[..]).unwrap();
        assert!(request.count_only && request.serializable && request.key[..] == *b"\0");
        std::future::ready(fake::range_at(answered.load(Ordering::Relaxed), 4, 2))
    })
    .await;
    let mirrors = bench.mirrors(&["--warm-from", &format!("http://127.0.0.1:1,{}", neighbour.url)]);
    let useless = async || {
        neighbour::check_each(&mirrors.set, &mirrors.upstream).await;
        let useless = mirrors.useless_neighbours();
        let of_neighbour = useless.iter().find(|known| known.url == neighbour.url);
        assert_eq!(
            useless.len(),
            1 + usize::from(of_neighbour.is_some()),
            "{useless:?}"
        );
        of_neighbour.map(|known| known.reason.clone())
    };
    mirrors.cluster_state.before_check().note_cluster(7);
    *neighbour.outcome.lock() = Some("hit; linearizable");
    assert_eq!(useless().await, None);
    *neighbour.outcome.lock() = Some("forwarded; loading");
    assert_eq!(useless().await.unwrap(), "it does not have the keys in memory");
    *neighbour.outcome.lock() = Some("hit; linearizable");
    cluster_id.store(8, Ordering::Relaxed);
    assert_eq!(useless().await.unwrap(), "it is of another etcd cluster");
    cluster_id.store(7, Ordering::Relaxed);
    assert_eq!(useless().await, None);
}

#[tokio::test]
async fn long_message_of_a_neighbour_is_refused_before_it_is_read() {
    let bench = Bench::new().await;
    let taken = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&taken);
    let neighbour = FakeEtcd::start_with_streams(
        |_, _| std::future::ready(Err((12, "unknown method"))),
        move |stream| {
            let taken = Arc::clone(&counted);
            async move {
                stream.send_long(&taken).await;
                Ok(())
            }
        },
    )
    .await;
    *neighbour.outcome.lock() = Some("hit; linearizable");
    let mirrors = bench.mirrors(&["--warm-from", &neighbour.url.to_string()]);
    let loaded = bench.load_of(&mirrors.set, &mut None).await.unwrap();
    assert_eq!((keys(&loaded.anchor.tree), loaded.adopted), ("abc".into(), None));
    assert_few(&taken);
    let reason = &mirrors.useless_neighbours()[0].reason;
    assert!(reason.contains("message length too large"), "{reason}");
}

/// Fails if more of a message was taken than windows and sockets hold.
fn assert_few(taken: &AtomicU64) {
    let taken = taken.load(Ordering::Relaxed);
    assert!(taken <= 16 << 20, "{taken} bytes");
}

#[tokio::test]
async fn long_message_of_etcd_is_refused_before_it_is_read_and_pages_have_fewer_keys() {
    let bench = Bench::with_memory("8MiB").await;
    let taken = Arc::<AtomicU64>::default();
    for n in 0..9 {
        bench.etcd.lock().put(&format!("k{n}"), &"v".repeat(1 << 20));
    }
    bench.etcd.lock().long_message = Some(Arc::clone(&taken));
    let loaded = bench.load().await;
    assert!(matches!(loaded, Err(LoadError::OverBudget { .. })), "{loaded:?}");
    assert_few(&taken);
    let pages: Vec<_> = bench.etcd.lock().reads.iter().map(|page| page.limit).collect();
    assert_eq!(pages, [64, 32, 16, 8, 12]);
}

#[tokio::test]
async fn message_of_etcd_that_is_larger_than_memory_fails_the_load() {
    let bench = Bench::with_memory("1MiB").await;
    bench.etcd.lock().put("a", &"v".repeat(5 << 20));
    let error = bench.load().await.unwrap_err();
    assert!(error.to_string().contains("message length too large"), "{error}");
    assert!(!error.is_broken(), "{error}");
}

/// A neighbour that sends a key now and then, and never ends: its keys are etcd's.
#[tokio::test]
async fn neighbour_that_sends_more_slowly_than_etcd_is_given_up() {
    let bench = Bench::new().await;
    let neighbour = FakeEtcd::start_with_streams(
        |_, _| std::future::ready(Err((12, "unknown method"))),
        async |stream| {
            for n in 0.. {
                let key_value = KeyValue::new(format!("k{n:06}"), 2, "v").encode_to_vec();
                stream.send(&RangeStreamResponse {
                    range_response: Some(RangeResponse {
                        kvs: vec![key_value.into()],
                        ..RangeResponse::default()
                    }),
                });
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Ok(())
        },
    )
    .await;
    *neighbour.outcome.lock() = Some("hit; linearizable");
    let mirrors = bench.mirrors(&["--warm-from", &neighbour.url.to_string()]);
    let loaded = bench.load_of(&mirrors.set, &mut None).await.unwrap();
    assert_eq!((keys(&loaded.anchor.tree), loaded.adopted), ("abc".into(), None));
    let useless = mirrors.useless_neighbours();
    assert_eq!(useless[0].reason, "it sends less than 8388608 bytes per second");
}
