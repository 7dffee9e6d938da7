//! Events during a stream.

use prost::Message;

use super::{NEVER_STREAMED, NOT_MIRRORED, PREFIX, chunk, current, fill, key, list, rest, start};
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Status, Stream, UNAVAILABLE};
use testkit::kv::RANGE_STREAM;
use testkit::pb::{RangeRequest, RangeResponse};
use testkit::streams::merged;
use testkit::wait::{SOON, until};

/// More than one page, limits around page and chunk sizes, pinned revisions, and writes in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_streams_are_of_one_revision_on_every_path() {
    for (version, flags) in [
        (Version::V3_7, &[][..]),
        (Version::V3_7, NOT_MIRRORED),
        (Version::V3_6, &[]),
        (Version::V3_6, NOT_MIRRORED),
        (Version::V3_5, NOT_MIRRORED),
    ] {
        let etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        fill(&direct, 3000, 3000).await;
        let rangecache = start(&etcd, flags).await;
        let through = rangecache.client().await;
        let pinned = current(&direct).await;
        for n in (0..3000).step_by(7) {
            direct.delete(key(n)).await.expect("etcd deletes");
        }
        for limit in [0, 9, 10, 11, 64, 65, 500, 1000, 1001, 2999, 3000, 3001] {
            for revision in [0, pinned] {
                for keys_only in [false, true] {
                    let request = RangeRequest {
                        limit,
                        revision,
                        keys_only,
                        ..list()
                    };
                    let expected = direct.range(&request).await;
                    assert_eq!(
                        through.streamed(&request).await,
                        expected,
                        "{version:?} {flags:?} {request:?}"
                    );
                }
            }
        }

        if version == Version::V3_7 {
            // The layout of chunks is no contract, but is equal nevertheless.
            assert_eq!(
                through.stream_raw(&list()).await,
                direct.stream_raw(&list()).await,
                "{flags:?}"
            );
        }

        // Writes during the stream appear neither in its entries nor in its header; and the header names the store's
        // revision, not the requested one.
        for revision in [0, pinned] {
            let request = RangeRequest { revision, ..list() };
            let expected = direct.range(&request).await.expect("etcd answers");
            let mut stream = through.server_stream(RANGE_STREAM, &request);
            let first = chunk(&mut stream).await.expect("a first chunk");
            assert_eq!(
                (&first.header, first.count),
                (&None, 0),
                "only the last chunk has them"
            );
            for n in (1..3000).step_by(300) {
                direct.put(key(n), "written meanwhile").await.expect("etcd puts");
            }
            let (chunks, end) = rest(&mut stream, first).await;
            assert_eq!(end.code, 0, "{end:?}");
            assert_eq!(merged(chunks), expected, "{version:?} {flags:?} at {revision}");
        }
        assert_eq!(
            through.streamed(&list()).await,
            direct.range(&list()).await,
            "the next stream has the write"
        );
    }
}

/// Values of 1 MB among small ones: a page is bounded by bytes, not only by keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_large_values_stay_bounded() {
    let etcd = Etcd::start(Version::V3_6).await;
    let direct = etcd.client().await;
    for n in 0..300 {
        let bytes = if n % 10 == 9 && n > 100 { 1 << 20 } else { 10 };
        direct.put(key(n), vec![b'v'; bytes]).await.expect("etcd puts");
    }
    for n in 0..20 {
        direct
            .put(format!("{PREFIX}!{n:02}"), vec![b'w'; 1 << 20])
            .await
            .expect("etcd puts");
    }
    let rangecache = start(&etcd, NOT_MIRRORED).await;
    let through = rangecache.client().await;
    let chunks = through.range_stream(&list()).await.expect("it comes");
    let largest = chunks.iter().map(Message::encoded_len).max().expect("chunks");
    assert!(largest < 4 << 20, "a chunk of {largest} bytes");
    assert_eq!(Ok(merged(chunks)), direct.range(&list()).await);
}

/// 30 MB, of which a reader that does not read receives at most its window.
const KEYS: usize = 3000;
const VALUE_BYTES: usize = 10_000;

/// Opens a stream and reads its first chunk only.
async fn stalled(client: &Client) -> (Stream, RangeResponse) {
    let mut stream = client.server_stream(RANGE_STREAM, &list());
    let first = chunk(&mut stream).await.expect("a first chunk");
    (stream, first)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_during_a_stream_gives_etcds_error() {
    let compacted = Status {
        code: 11,
        message: "etcdserver: mvcc: required revision has been compacted".to_owned(),
    };
    for (version, flags, from_memory) in [
        (Version::V3_7, NOT_MIRRORED, false),
        (Version::V3_6, NOT_MIRRORED, false),
        (Version::V3_7, NEVER_STREAMED, false),
        (Version::V3_6, &[], true),
    ] {
        let etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        fill(&direct, KEYS, VALUE_BYTES).await;
        let rangecache = start(&etcd, flags).await;
        let through = rangecache.client().await;
        let (mut stream, first) = stalled(&through).await;
        let mut etcds = if version == Version::V3_7 {
            Some(stalled(&direct).await)
        } else {
            None
        };
        let revision = direct.put(key(0), "newer").await.expect("etcd puts");
        direct.compact(revision).await.expect("etcd compacts");
        let (chunks, end) = rest(&mut stream, first).await;
        if from_memory {
            // The snapshot is kept as long as a reader needs it.
            assert_eq!(end.code, 0, "{end:?}");
            assert_eq!(merged(chunks).kvs.len(), KEYS);
            continue;
        }
        assert_eq!(end, compacted, "{version:?} {flags:?}");
        if let Some((stream, first)) = &mut etcds {
            assert_eq!(rest(stream, first.clone()).await.1, compacted, "etcd's own");
        }
        let pinned = RangeRequest {
            revision: revision - 1,
            ..list()
        };
        assert_eq!(
            through.streamed(&pinned).await,
            Err(compacted.clone()),
            "the stream from the start fails, too"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_restart_during_a_stream_ends_it_with_an_error() {
    for (version, flags, survives) in [
        (Version::V3_7, NOT_MIRRORED, false),
        (Version::V3_6, NOT_MIRRORED, false),
        (Version::V3_6, &[], true),
        (Version::V3_7, &[], true),
    ] {
        let mut etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        fill(&direct, KEYS, VALUE_BYTES).await;
        let expected = direct.range(&list()).await.expect("etcd answers");
        // For however long the restart takes.
        let flags = [flags, &[("--connect-timeout", "20s")]].concat();
        let rangecache = start(&etcd, &flags).await;
        let through = rangecache.client().await;
        let (mut stream, first) = stalled(&through).await;
        etcd.restart().await;
        let (chunks, end) = rest(&mut stream, first).await;
        if survives {
            // Memory needs no etcd.
            assert_eq!(end.code, 0, "{version:?} {flags:?}: {end:?}");
            assert_eq!(merged(chunks).kvs, expected.kvs);
        } else {
            // Breaks like etcd's own stream. So does one that is assembled from pages: nothing shows that the member which comes back
            // has the history of the first page.
            assert_eq!(end.code, UNAVAILABLE, "{end:?}");
        }
        let again = through.streamed(&list()).await.expect("the next stream succeeds");
        assert_eq!(again.kvs, expected.kvs, "{version:?} {flags:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_stream_stops_the_calls_to_etcd() {
    let in_flight = async |etcd: &Etcd| {
        let metrics = etcd.metrics().await;
        let streams = |counter: &str| metrics.sum_with_label(counter, "grpc_method=\"RangeStream\"");
        streams("grpc_server_started_total") - streams("grpc_server_handled_total")
    };
    // Forwarded: etcd's own call ends.
    let etcd = Etcd::start(Version::V3_7).await;
    fill(&etcd.client().await, KEYS, VALUE_BYTES).await;
    let rangecache = start(&etcd, NOT_MIRRORED).await;
    let through = rangecache.client().await;
    let (stream, _) = stalled(&through).await;
    assert_eq!(in_flight(&etcd).await, 1.0, "the call waits for its reader");
    drop(stream);
    until(SOON, "etcd's call ends", async || {
        (in_flight(&etcd).await == 0.0).then_some(())
    })
    .await;

    // From pages: the page in flight is cancelled although etcd is suspended.
    let etcd = Etcd::start(Version::V3_6).await;
    fill(&etcd.client().await, 10, 10).await;
    let rangecache = start(&etcd, NOT_MIRRORED).await;
    let through = rangecache.client().await;
    etcd.pause();
    let stream = through.server_stream(RANGE_STREAM, &list());
    let reader = tokio::spawn(async move {
        let mut stream = stream;
        stream.next().await
    });
    let pages = async || rangecache.metrics().await.sum("rangecache_forward_large");
    until(SOON, "a page is in flight", async || {
        (pages().await == 1.0).then_some(())
    })
    .await;
    reader.abort();
    until(SOON, "the page is cancelled", async || {
        (pages().await == 0.0).then_some(())
    })
    .await;
    etcd.resume();
}

/// Readers hold only their windows, not whole responses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_stop_reading_hold_little_memory() {
    const READERS: usize = 30;
    // From memory: a chunk each. From pages: one or two pages of up to 8 MB each.
    for (version, flags, most) in [
        (Version::V3_7, &[][..], 200 << 20),
        (Version::V3_6, NOT_MIRRORED, 500 << 20),
    ] {
        let etcd = Etcd::start(version).await;
        // Small values, which are copied when sent.
        fill(&etcd.client().await, 60_000, 500).await;
        let rangecache = start(&etcd, flags).await;
        let through = rangecache.client().await;
        let whole = through.streamed(&list()).await.expect("it comes");
        assert_eq!(whole.kvs.len(), 60_000);
        let before = rangecache.resident_bytes();
        let mut readers = Vec::new();
        for _ in 0..READERS {
            // A connection each: their windows are not shared.
            let client = rangecache.client().await;
            let reader = stalled(&client).await;
            readers.push((client, reader));
        }
        // Once a small call on the same connection is complete, every window is full.
        for (client, _) in &readers {
            client.range(&RangeRequest::one(key(1))).await.expect("answers");
        }
        let grown = rangecache.resident_bytes().saturating_sub(before);
        println!(
            "{version:?} {flags:?}: {READERS} stalled readers take {} MiB",
            grown >> 20
        );
        assert!(
            grown < most,
            "{} MiB for {READERS} readers of 32 MB each",
            grown >> 20
        );
        for (_, (stream, first)) in &mut readers[..3] {
            let (chunks, end) = rest(stream, first.clone()).await;
            assert_eq!((end.code, merged(chunks)), (0, whole.clone()));
        }
    }
}
