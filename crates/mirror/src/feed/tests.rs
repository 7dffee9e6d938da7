//! Feeds that follow a scripted etcd.

use etcd_wire::etcdserverpb::Event;
use prost::Message as _;
use tonic::codec::Codec as _;

use super::*;
use crate::lineage::HistoryId;
use crate::testing::{Bench, SOON};

/// Follows etcd until the mirror is at `revision`.
async fn follow_until(bench: &Bench, feed: Feed<'_>, revision: i64) {
    let reached = async {
        while bench.mirror().revision() != Ok(revision) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        end = feed.follow() => panic!("{end}"),
        reached = tokio::time::timeout(SOON, reached) => reached.unwrap(),
    }
}

#[tokio::test]
async fn feed_delivers_what_the_mirror_has_missed() {
    let bench = Bench::new().await;
    bench.fill().await;
    let change = bench.etcd.lock().put("d", "new");
    bench.apply(change);
    bench.etcd.lock().put("e", "missed");
    let connection = bench.connect().await;
    let feed = bench.open(&connection, &mut None).await.unwrap();
    follow_until(&bench, feed, 6).await;
    assert!(bench.mirror().view().unwrap().tree.get(b"e").is_some());
}

#[tokio::test]
async fn feed_asks_for_progress_only_once_a_reader_waits_for_a_later_revision() {
    let bench = Bench::new().await;
    let mut loaded_by = bench.fill().await;
    let connection = bench.connect().await;
    let feed = bench.open(&connection, &mut loaded_by).await.unwrap();
    assert_eq!(bench.etcd.lock().progress_requests, 0);
    bench.etcd.lock().revision = 9;
    bench.mirror().want(HistoryId::FIRST, 9);
    follow_until(&bench, feed, 9).await;
    assert!(bench.etcd.lock().progress_requests > 0);
}

/// A watch all of whose responses have arrived, and which has ended.
fn arrived(responses: &[WatchResponse]) -> tonic::Streaming<WatchResponse> {
    let mut frames = Vec::new();
    for response in responses {
        frames.push(0);
        frames.extend(u32::try_from(response.encoded_len()).unwrap().to_be_bytes());
        response.encode(&mut frames).unwrap();
    }
    let decoder = tonic_prost::ProstCodec::<(), WatchResponse>::default().decoder();
    let body = http_body_util::Full::new(bytes::Bytes::from(frames));
    tonic::Streaming::new_response(decoder, body, http::StatusCode::OK, None, None)
}

#[tokio::test]
async fn responses_that_are_there_together_are_applied_together_also_before_an_end() {
    let bench = Bench::new().await;
    let mut loaded_by = bench.fill().await;
    let connection = bench.connect().await;
    let mut feed = bench.open(&connection, &mut loaded_by).await.unwrap();
    let put = || {
        let mut etcd = bench.etcd.lock();
        etcd.put("d", "new");
        WatchResponse {
            events: vec![Event {
                kv: etcd.events.last().unwrap().encode_to_vec().into(),
                ..Event::default()
            }],
            ..WatchResponse::default()
        }
    };
    let responses: Vec<_> = (0..100).map(|_| put()).collect();
    feed.responses = arrived(&responses);
    let end = feed.follow().await;
    assert!(matches!(end, FeedEnd::Lost(_)), "{end}");
    assert_eq!(bench.mirror().revision(), Ok(104));
    let log = bench.mirror().observe(4, usize::MAX).log.unwrap();
    let lengths: Vec<_> = log.batches.iter().map(|batch| batch.changes().len()).collect();
    assert_eq!(lengths, [64, 36], "bounded, too");
}

#[tokio::test]
async fn feed_ends_when_the_mirror_outgrows_its_memory() {
    let bench = Bench::with_memory("1KiB").await;
    let mut loaded_by = bench.fill().await;
    bench.etcd.lock().put("d", &"x".repeat(4096));
    let connection = bench.connect().await;
    let feed = bench.open(&connection, &mut loaded_by).await.unwrap();
    let end = tokio::time::timeout(SOON, feed.follow()).await.unwrap();
    assert!(matches!(end, FeedEnd::OverBudget), "{end}");
}
