//! Responses of RangeStream: equal to etcd's chunk by chunk, or merged equal to the unary response.

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::{NEVER_STREAMED, NOT_MIRRORED, current, start, start_before};
use testkit::effort::part_of;
use testkit::etcd::{Etcd, Version};
use testkit::pb::{BY_KEY, RangeRequest};
use testkit::shapes::{Revisions, at_random, by_hand, order_is_open, write_first_part, write_second_part};
use testkit::streams::{chunks_of, is_refused, merged};

/// Random requests, per case, with full effort.
const AT_RANDOM: u64 = 500;

/// Expected source of the responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Memory,
    EtcdsStream,
    Pages,
}

/// Whether etcd 3.7's own stream differs from the unary response, or is undefined: it sorts chunk by chunk, and reads
/// a negative limit in one piece.
fn is_not_etcds(request: &RangeRequest) -> bool {
    request.sort_target != BY_KEY || request.limit < 0
}

async fn streams_are_etcds(version: Version, flags: &[(&str, &str)], from: From) {
    streams_through_rangecaches_are_etcds(version, &[flags], from).await;
}

/// With one rangecache or several, one before the other. The first of them is next to etcd; `from` is where the last one's
/// responses come from.
async fn streams_through_rangecaches_are_etcds(version: Version, chain: &[&[(&str, &str)]], from: From) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    // Requests whose refusals are expected, whatever the version.
    let newest = Etcd::start(Version::V3_7).await;
    let judge = newest.client().await;
    write_first_part(&direct).await;
    let compacted = current(&direct).await - 20;
    direct.compact(compacted).await.expect("etcd compacts");
    let mut rangecache = start(&etcd, chain[0]).await;
    for flags in &chain[1..] {
        rangecache = start_before(rangecache, flags).await;
    }
    let through = rangecache.client().await;
    let loaded = current(&direct).await;
    write_second_part(&direct).await;
    let at = Revisions {
        compacted,
        loaded,
        current: current(&direct).await,
    };
    // Serializable reads are answered at the mirror's revision; a linearizable one first brings it up to date.
    through
        .range(&RangeRequest::everything())
        .await
        .expect("rangecache answers");
    let seed =
        std::env::var("ORACLE_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().expect("a number"));
    println!("to replay: ORACLE_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut shapes: Vec<_> = by_hand(at);
    shapes.extend((0..part_of(AT_RANDOM)).map(|_| at_random(&mut random, at)));

    let before = rangecache.stream_outcomes().await;
    let mut byte_for_byte = 0;
    for shape in &shapes {
        let reply = through.stream_raw(shape).await.expect("rangecache answers");
        let unknown_sort = !(0..=2).contains(&shape.sort_order);
        if is_refused(shape) || unknown_sort {
            let expected = judge.stream_raw(shape).await.expect("etcd 3.7 answers");
            assert_eq!(reply, expected, "{shape:?}");
            continue;
        }
        if version >= Version::V3_7 && !is_not_etcds(shape) && from != From::Pages {
            let expected = direct.stream_raw(shape).await.expect("etcd answers");
            assert_eq!(reply, expected, "{shape:?}");
            byte_for_byte += 1;
        }
        let unary = direct.range(shape).await;
        match unary {
            Ok(mut expected) => {
                assert_eq!(reply.status().code, 0, "{shape:?}: {reply:?}");
                let mut got = merged(chunks_of(&reply));
                let whole = RangeRequest {
                    revision: shape.revision,
                    ..RangeRequest::range(&shape.key, &shape.range_end)
                };
                if shape.sort_target != BY_KEY
                    && order_is_open(shape, &direct.range(&whole).await.expect("etcd answers").kvs)
                {
                    // The order of equal sort keys is undefined in etcd itself.
                    (got.kvs, expected.kvs) = (Vec::new(), Vec::new());
                }
                assert_eq!(got, expected, "{shape:?}");
            }
            Err(expected) => assert_eq!(reply.status(), expected, "{shape:?}"),
        }
    }
    let outcomes = rangecache
        .stream_outcomes_since(&before, shapes.len() as u64)
        .await;
    println!(
        "{} shapes, {byte_for_byte} compared byte for byte: {outcomes:?}",
        shapes.len()
    );
    assert_eq!(outcomes.total(), shapes.len() as u64, "each is counted once");
    let refused = outcomes.0[&("hit".to_owned(), "refused".to_owned())];
    let expected_refusals = shapes.iter().filter(|shape| is_refused(shape)).count() as u64;
    assert!(refused >= expected_refusals, "{refused} of {expected_refusals}");
    match from {
        From::Memory => {
            let elsewhere = |reason: &str| !["history_gone", "sort_ties"].contains(&reason);
            let odd: Vec<_> = outcomes
                .0
                .iter()
                .filter(|((outcome, reason), _)| {
                    !["hit", "waited"].contains(&outcome.as_str()) && elsewhere(reason)
                })
                .collect();
            assert!(odd.is_empty(), "not from memory: {odd:?}");
            assert!(outcomes.memory_answers() > outcomes.total() / 2, "{outcomes:?}");
        }
        From::EtcdsStream => assert!(outcomes.of("forwarded") > outcomes.of("paged"), "{outcomes:?}"),
        From::Pages => assert_eq!(outcomes.of("paged") + refused, outcomes.total(), "{outcomes:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_from_memory_equal_etcds_3_7() {
    streams_are_etcds(Version::V3_7, &[], From::Memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn streams_from_memory_equal_unary_responses_3_6() {
    streams_are_etcds(Version::V3_6, &[], From::Memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn streams_from_memory_equal_unary_responses_3_5() {
    streams_are_etcds(Version::V3_5, &[], From::Memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forwarded_streams_equal_etcds_3_7() {
    streams_are_etcds(Version::V3_7, NOT_MIRRORED, From::EtcdsStream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_from_pages_equal_unary_responses_3_6() {
    streams_are_etcds(Version::V3_6, NOT_MIRRORED, From::Pages).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn streams_from_pages_equal_unary_responses_3_5() {
    streams_are_etcds(Version::V3_5, NOT_MIRRORED, From::Pages).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_from_pages_equal_unary_responses_3_7() {
    streams_are_etcds(Version::V3_7, NEVER_STREAMED, From::Pages).await;
}

/// Two rangecaches: from the memory of the second, from that of the first, from etcd's stream through both, and from pages
/// that the second reads from the first one's memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_through_two_rangecaches_equal_etcds_3_7() {
    for (first, second, from) in [
        (&[][..], &[][..], From::Memory),
        (&[], NOT_MIRRORED, From::EtcdsStream),
        (NOT_MIRRORED, NOT_MIRRORED, From::EtcdsStream),
        (&[], NEVER_STREAMED, From::Pages),
    ] {
        println!("{first:?}, and before it {second:?}");
        streams_through_rangecaches_are_etcds(Version::V3_7, &[first, second], from).await;
    }
}

/// etcd 3.6 has no RangeStream: the first rangecache has it all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn streams_through_two_rangecaches_equal_unary_responses_3_6() {
    for (first, second, from) in [
        (&[][..], &[][..], From::Memory),
        (&[], NOT_MIRRORED, From::Pages),
        (NOT_MIRRORED, NOT_MIRRORED, From::Pages),
    ] {
        println!("{first:?}, and before it {second:?}");
        streams_through_rangecaches_are_etcds(Version::V3_6, &[first, second], from).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "make test-other-etcds"]
async fn streams_from_memory_equal_etcds_3_8() {
    streams_are_etcds(Version::V3_8, &[], From::Memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "make test-other-etcds"]
async fn forwarded_streams_equal_etcds_3_8() {
    streams_are_etcds(Version::V3_8, NOT_MIRRORED, From::EtcdsStream).await;
}
