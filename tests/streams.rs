//! RangeStream through rangecache is etcd's: from memory whatever etcd's version, passed on where etcd has it, put together
//! from pages where it has not. Merged it is the unary answer, and nobody who streams ever sees `Unimplemented`.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "so a test fails"
)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::large_futures,
    reason = "small numbers, and no load"
)]

mod support;

use std::convert::Infallible;
use std::process::Command;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use rand::SeedableRng;
use rand::rngs::StdRng;
use support::etcd::{Cluster, Etcd, Version, free_port};
use support::grpc::{Client, Status, Stream, UNAVAILABLE, frame};
use support::kv::{PUT, RANGE, RANGE_STREAM};
use support::pb::{BY_KEY, Header, KeyValue, RangeRequest, RangeResponse, RangeStreamResponse, RequestOp};
use support::process::{Process, tool};
use support::proxy::{Outcomes, Rangecache};
use support::shapes::{Revisions, at_random, by_hand, order_is_open, write_first_part, write_second_part};
use support::streams::{UNIMPLEMENTED, chunks_of, is_refused, merged};
use support::wait::{SOON, until};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Requests made up at random, per case.
const AT_RANDOM: usize = 500;

/// Where the answers have to come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Memory,
    EtcdsStream,
    Pages,
}

async fn current(etcd: &Client) -> i64 {
    etcd.range(&RangeRequest::one("any"))
        .await
        .expect("etcd answers")
        .revision()
}

/// Whether etcd 3.7's own stream is not the unary answer, or not one that can be told: what it sorts chunk by chunk, and
/// what it reads in one piece because of a negative limit.
fn is_not_etcds(request: &RangeRequest) -> bool {
    request.sort_target != BY_KEY || request.limit < 0
}

async fn streams_are_etcds(version: Version, flags: &[(&str, &str)], from: From) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    // Whose refusals are expected, whatever the version.
    let newest = Etcd::start(Version::V3_7).await;
    let judge = newest.client().await;
    write_first_part(&direct).await;
    let compacted = current(&direct).await - 20;
    direct.compact(compacted).await.expect("etcd compacts");
    let rangecache = start(&etcd, flags).await;
    let through = rangecache.client().await;
    let loaded = current(&direct).await;
    write_second_part(&direct).await;
    let at = Revisions {
        compacted,
        loaded,
        current: current(&direct).await,
    };
    // Serializable reads answer from wherever the mirror is; a linearizable one first brings it to the present.
    through
        .range(&RangeRequest::everything())
        .await
        .expect("rangecache answers");
    let seed =
        std::env::var("ORACLE_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().expect("a number"));
    println!("to replay: ORACLE_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut shapes: Vec<_> = by_hand(at);
    shapes.extend((0..AT_RANDOM).map(|_| at_random(&mut random, at)));

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
        if version == Version::V3_7 && !is_not_etcds(shape) && from != From::Pages {
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
                    // Which of several equal ones come, and in which order, etcd itself does not say.
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
    assert_eq!(outcomes.total(), shapes.len() as u64, "each counts once");
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

const NOT_MIRRORED: &[(&str, &str)] = &[("--cache-prefix", "/elsewhere/")];
const NEVER_STREAMED: &[(&str, &str)] = &[("--cache-prefix", "/elsewhere/"), ("--range-stream", "off")];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_from_memory_are_etcds_3_7() {
    streams_are_etcds(Version::V3_7, &[], From::Memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_from_memory_are_the_unary_answers_3_6() {
    streams_are_etcds(Version::V3_6, &[], From::Memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_from_memory_are_the_unary_answers_3_5() {
    streams_are_etcds(Version::V3_5, &[], From::Memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_pass_are_etcds_3_7() {
    streams_are_etcds(Version::V3_7, NOT_MIRRORED, From::EtcdsStream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_put_together_from_pages_are_the_unary_answers_3_6() {
    streams_are_etcds(Version::V3_6, NOT_MIRRORED, From::Pages).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_put_together_from_pages_are_the_unary_answers_3_5() {
    streams_are_etcds(Version::V3_5, NOT_MIRRORED, From::Pages).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_put_together_from_pages_are_the_unary_answers_3_7() {
    streams_are_etcds(Version::V3_7, NEVER_STREAMED, From::Pages).await;
}

const PREFIX: &str = "/streams/";

/// Writes `keys` keys of `bytes` each under [`PREFIX`].
async fn fill(etcd: &Client, keys: usize, bytes: usize) {
    let at_once = (1 << 20) / bytes.max(1);
    for start in (0..keys).step_by(at_once.clamp(1, 100)) {
        let end = keys.min(start + at_once.clamp(1, 100));
        let puts = (start..end).map(|n| RequestOp::put(key(n), vec![b'a' + (n % 26) as u8; bytes]));
        etcd.transact(puts.collect()).await.expect("etcd writes");
    }
}

fn key(number: usize) -> String {
    format!("{PREFIX}{number:06}")
}

fn list() -> RangeRequest {
    RangeRequest::prefix(PREFIX)
}

/// How many calls of a method etcd has begun.
async fn started(etcd: &Etcd, method: &str) -> f64 {
    let metrics = etcd.metrics().await;
    let of_method = |name: &str| {
        name.starts_with("grpc_server_started_total") && name.contains(&format!("grpc_method=\"{method}\""))
    };
    metrics
        .0
        .iter()
        .filter(|(name, _)| of_method(name))
        .map(|(_, count)| count)
        .sum()
}

/// Reads one chunk.
async fn chunk(stream: &mut Stream) -> Option<RangeResponse> {
    let chunk: RangeStreamResponse = stream.next_as(SOON).await?;
    chunk.range_response
}

/// Reads what is left behind `first`, and how it ends.
async fn rest(stream: &mut Stream, first: RangeResponse) -> (Vec<RangeResponse>, Status) {
    let mut chunks = vec![first];
    while let Some(next) = chunk(stream).await {
        chunks.push(next);
    }
    (chunks, stream.end().expect("it has ended").clone())
}

/// More than one page, limits around pages and chunks, pinned revisions, and writes in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_streams_are_one_moment_wherever_they_come_from() {
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
            // The layout is no contract, and yet the same.
            assert_eq!(
                through.stream_raw(&list()).await,
                direct.stream_raw(&list()).await,
                "{flags:?}"
            );
        }

        // What is written while it is read is not in it, not even in its header; and the caller's own revision is not
        // what the header names.
        for revision in [0, pinned] {
            let request = RangeRequest { revision, ..list() };
            let expected = direct.range(&request).await.expect("etcd answers");
            let mut stream = through.server_stream(RANGE_STREAM, &request);
            let first = chunk(&mut stream).await.expect("a first chunk");
            assert_eq!((&first.header, first.count), (&None, 0), "it is not the last");
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
            "and the next one has it"
        );
    }
}

async fn start(etcd: &Etcd, flags: &[(&str, &str)]) -> Rangecache {
    let mut builder = Rangecache::before(etcd);
    for (flag, value) in flags {
        builder = builder.with(flag, value);
    }
    builder.start().await
}

/// Values of 1 MB among small ones: a page is bounded by its bytes, not only by its keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_bounded_though_values_are_large() {
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

/// 30 MB, of which a reader that does not read gets at most its window.
const KEYS: usize = 3000;
const VALUE_BYTES: usize = 10_000;

/// Opens a stream and reads its first chunk alone.
async fn stalled(client: &Client) -> (Stream, RangeResponse) {
    let mut stream = client.server_stream(RANGE_STREAM, &list());
    let first = chunk(&mut stream).await.expect("a first chunk");
    (stream, first)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compaction_in_mid_stream_is_etcds_error() {
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
            // The snapshot is there for as long as somebody reads it.
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
            "and from the start"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_in_mid_stream() {
    for (version, flags, survives) in [
        (Version::V3_7, NOT_MIRRORED, false),
        (Version::V3_6, NOT_MIRRORED, true),
        (Version::V3_6, &[], true),
        (Version::V3_7, &[], true),
    ] {
        let mut etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        fill(&direct, KEYS, VALUE_BYTES).await;
        let expected = direct.range(&list()).await.expect("etcd answers");
        // However long the restart takes.
        let flags = [flags, &[("--connect-timeout", "20s")]].concat();
        let rangecache = start(&etcd, &flags).await;
        let through = rangecache.client().await;
        let (mut stream, first) = stalled(&through).await;
        etcd.restart().await;
        let (chunks, end) = rest(&mut stream, first).await;
        if survives {
            // Memory needs no etcd, and a page can be asked for again; the member's term moves on.
            assert_eq!(end.code, 0, "{version:?} {flags:?}: {end:?}");
            assert_eq!(merged(chunks).kvs, expected.kvs);
        } else {
            // As etcd's own stream breaks.
            assert_eq!(end.code, UNAVAILABLE, "{end:?}");
        }
        let again = through.streamed(&list()).await.expect("the next one comes");
        assert_eq!(again.kvs, expected.kvs, "{version:?} {flags:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_goes_away_ends_the_work() {
    let under_way = async |etcd: &Etcd| {
        let metrics = etcd.metrics().await;
        let of = |what: &str| -> f64 {
            let name = format!("grpc_server_{what}_total");
            let is =
                |sample: &str| sample.starts_with(&name) && sample.contains("grpc_method=\"RangeStream\"");
            metrics
                .0
                .iter()
                .filter(|(sample, _)| is(sample))
                .map(|(_, count)| count)
                .sum()
        };
        of("started") - of("handled")
    };
    // Passed on: etcd's own call ends.
    let etcd = Etcd::start(Version::V3_7).await;
    fill(&etcd.client().await, KEYS, VALUE_BYTES).await;
    let rangecache = start(&etcd, NOT_MIRRORED).await;
    let through = rangecache.client().await;
    let (stream, _) = stalled(&through).await;
    assert_eq!(under_way(&etcd).await, 1.0, "it waits for its reader");
    drop(stream);
    until(SOON, "etcd's call ends", async || {
        (under_way(&etcd).await == 0.0).then_some(())
    })
    .await;

    // Put together: the page under way is given up though etcd stands still.
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
    until(SOON, "a page is under way", async || {
        (pages().await == 1.0).then_some(())
    })
    .await;
    reader.abort();
    until(SOON, "it is given up", async || {
        (pages().await == 0.0).then_some(())
    })
    .await;
    etcd.resume();
}

/// The readers' windows alone are held, not the answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_do_not_read_hold_little() {
    const READERS: usize = 30;
    // Memory: a piece each. Pages: one or two of up to 8 MB each.
    for (version, flags, most) in [
        (Version::V3_7, &[][..], 200 << 20),
        (Version::V3_6, NOT_MIRRORED, 500 << 20),
    ] {
        let etcd = Etcd::start(version).await;
        // Small values, which are copied on their way out.
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
        // Every window is full when a small call on the same connection has come and gone.
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_operator_can_keep_etcds_range_stream_out() {
    for (setting, used) in [("off", false), ("auto", true)] {
        let etcd = Etcd::start(Version::V3_7).await;
        let direct = etcd.client().await;
        fill(&direct, 100, 10).await;
        let flags = [("--range-stream", setting), ("--cache-prefix", "/elsewhere/")];
        let rangecache = start(&etcd, &flags).await;
        let through = rangecache.client().await;
        assert_eq!(through.streamed(&list()).await, direct.range(&list()).await);
        assert_eq!(started(&etcd, "RangeStream").await > 0.0, used, "{setting}");
        let fallbacks = rangecache.metrics().await.0;
        let off = fallbacks.get("rangecache_range_stream_fallback_total{reason=\"off\"}");
        // The load, and the read.
        assert_eq!(off, if used { None } else { Some(&2.0) }, "{setting}");
    }
}

/// What kube-apiserver asks: whole lists, and pages of 500 at the first page's revision. Its client stops streaming for
/// ten minutes at one `Unimplemented`; this one stops for good.
struct KubeStyle {
    client: Client,
    calls: usize,
}

impl KubeStyle {
    /// Lists whole and in pages; `Err` is anything but an answer, and `Unimplemented` is none.
    async fn lists(&mut self) -> Result<usize, Status> {
        self.calls += 1;
        let whole = self.watched(list()).await?;
        let mut page = RangeRequest { limit: 500, ..list() };
        let mut read = 0;
        loop {
            self.calls += 1;
            let answer = self.watched(page.clone()).await?;
            read += answer.kvs.len();
            let (true, Some(last)) = (answer.more, answer.kvs.last()) else {
                break;
            };
            page.key = [&last.key[..], b"\0"].concat();
            if page.revision == 0 {
                page.revision = answer.revision();
            }
        }
        assert_eq!(read, whole.kvs.len(), "nothing is written meanwhile");
        Ok(read)
    }

    async fn watched(&self, request: RangeRequest) -> Result<RangeResponse, Status> {
        let answer = self.client.streamed(&request).await;
        if let Err(status) = &answer {
            assert_ne!(
                status.code, UNIMPLEMENTED,
                "streaming is off for ten minutes: {status:?}"
            );
        }
        answer
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kube_style_client_never_stops_to_stream() {
    for version in [Version::V3_5, Version::V3_6, Version::V3_7] {
        for flags in [&[][..], NOT_MIRRORED] {
            let etcd = Etcd::start(version).await;
            fill(&etcd.client().await, 1200, 20).await;
            let rangecache = start(&etcd, flags).await;
            let mut kube = KubeStyle {
                client: rangecache.client().await,
                calls: 0,
            };
            while kube.calls < 2000 {
                assert_eq!(kube.lists().await, Ok(1200), "{version:?} {flags:?}");
            }
        }
    }
}

/// Before the first load, and over a real upgrade and the way back, behind one port.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_and_a_downgrade_behind_one_port_are_noticed() {
    let mut etcd = Etcd::start(Version::V3_6).await;
    fill(&etcd.client().await, 1200, 20).await;
    let backup = etcd.save_snapshot().await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/elsewhere/")
        .start_cold()
        .await;
    let mut kube = KubeStyle {
        client: rangecache.client().await,
        calls: 0,
    };
    // A read fails for as long as etcd is away, but never so that streaming stops; returns when it is answered as `way`.
    let until_answered = async |kube: &mut KubeStyle, way: &str| {
        until(SOON * 3, &format!("streams are {way}"), async || {
            let before = rangecache.stream_outcomes().await;
            let answered = kube.lists().await;
            let since = rangecache.stream_outcomes().await.since(&before);
            (answered == Ok(1200) && since.total() == since.of(way)).then_some(())
        })
        .await;
    };
    for turn in 0..2 {
        until_answered(&mut kube, "paged").await;
        etcd.switch(Version::V3_7);
        etcd.run();
        until_answered(&mut kube, "forwarded").await;
        assert!(started(&etcd, "RangeStream").await > 0.0);
        etcd.switch(Version::V3_6);
        etcd.restore(&backup, "rangecache", &[]);
        etcd.run();
        println!("turn {turn}: {} calls", kube.calls);
    }
    until_answered(&mut kube, "paged").await;
}

/// Both versions among the endpoints: those that have RangeStream are found, and memory answers as the lowest would.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_of_mixed_versions() {
    let cluster = Cluster::start_mixed([Version::V3_6, Version::V3_7, Version::V3_6]).await;
    let direct = cluster.members[0].client().await;
    fill(&direct, 1200, 20).await;
    for flags in [&[][..], NOT_MIRRORED] {
        let mut builder = Rangecache::at(&cluster.endpoints());
        for (flag, value) in flags {
            builder = builder.with(flag, value);
        }
        let rangecache = builder.start().await;
        let mut kube = KubeStyle {
            client: rangecache.client().await,
            calls: 0,
        };
        while kube.calls < 300 {
            assert_eq!(kube.lists().await, Ok(1200), "{flags:?}");
        }
    }
    assert!(
        started(&cluster.members[1], "RangeStream").await > 100.0,
        "the member that has it is asked"
    );
}

/// A proxy that tells the version of the etcd behind it, and has no RangeStream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_that_lies_about_its_version() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    fill(&direct, 1200, 20).await;
    let (_grpc_proxy, url) = GrpcProxy::start(&etcd).await;
    let rangecache = Rangecache::at(&url)
        .with("--cache-prefix", "/elsewhere/")
        .start_cold()
        .await;
    let mut kube = KubeStyle {
        client: rangecache.client().await,
        calls: 0,
    };
    while kube.calls < 100 {
        assert_eq!(kube.lists().await, Ok(1200));
    }
    let metrics = rangecache.metrics().await.0;
    let learned = metrics.get("rangecache_range_stream_fallback_total{reason=\"unimplemented\"}");
    assert!(learned.is_some_and(|count| *count >= 100.0), "{learned:?}");
    assert_eq!(started(&etcd, "RangeStream").await, 0.0);
}

struct GrpcProxy(
    #[expect(dead_code, reason = "ends with it")] Process,
    #[expect(dead_code, reason = "its log")] TempDir,
);

impl GrpcProxy {
    async fn start(etcd: &Etcd) -> (Self, String) {
        let dir = TempDir::with_prefix("rangecache-grpc-proxy-").expect("a directory");
        let port = free_port();
        let mut command = Command::new(tool("etcd-3.7"));
        command
            .args(["grpc-proxy", "start", "--endpoints", &etcd.url()])
            .args(["--listen-addr", &format!("127.0.0.1:{port}")])
            .current_dir(dir.path());
        let process = Process::spawn("grpc-proxy", &mut command, &dir.path().join("log"));
        let url = format!("http://127.0.0.1:{port}");
        let client = Client::connect(&url).await;
        let refused = client.range_stream(&list()).await.expect_err("it has none");
        assert_eq!(refused.code, UNIMPLEMENTED);
        (Self(process, dir), url)
    }
}

const BYPASS: &str = "rangecache-bypass";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_asks_for_it_reads_around_the_cache() {
    for version in [Version::V3_7, Version::V3_6] {
        let etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        fill(&direct, 1200, 20).await;
        let rangecache = start(&etcd, &[]).await;
        let through = rangecache.client().await;
        let around = through.with_metadata(BYPASS, "true");
        let requests = [
            list(),
            RangeRequest::one(key(7)),
            RangeRequest { limit: 3, ..list() },
            RangeRequest {
                serializable: true,
                ..list()
            },
        ];
        for (client, from_memory) in [
            (&around, false),
            (&through, true),
            (&through.with_metadata(BYPASS, "false"), true),
        ] {
            for request in &requests {
                let (ranges, streams) = (rangecache.outcomes().await, rangecache.stream_outcomes().await);
                assert_eq!(client.range_raw(request).await, direct.range_raw(request).await);
                assert_eq!(client.streamed(request).await, direct.range(request).await);
                let ranges = rangecache.outcomes_since(&ranges, 1).await;
                let streams = rangecache.stream_outcomes_since(&streams, 1).await;
                let around = |outcomes: &Outcomes, way: &str| {
                    outcomes
                        .0
                        .get(&(way.to_owned(), "bypass".to_owned()))
                        .copied()
                        .unwrap_or(0)
                };
                if from_memory {
                    assert_eq!((ranges.memory_answers(), streams.memory_answers()), (1, 1));
                } else {
                    let way = if version == Version::V3_7 {
                        "forwarded"
                    } else {
                        "paged"
                    };
                    assert_eq!(
                        (around(&ranges, "forwarded"), around(&streams, way)),
                        (1, 1),
                        "{ranges:?} {streams:?}"
                    );
                }
            }
        }
    }
}

/// What an etcd by script answers: a message or none, a status, and whether headers go before that.
#[derive(Clone)]
struct Scripted {
    message: Option<Vec<u8>>,
    code: &'static str,
    text: &'static str,
    head_first: bool,
}

impl Scripted {
    fn refusal(code: &'static str, text: &'static str) -> Self {
        Self {
            message: None,
            code,
            text,
            head_first: false,
        }
    }
}

/// Answers by `script`, and tells what was asked, with which headers.
async fn scripted(
    script: fn(&str) -> Scripted,
) -> (String, mpsc::UnboundedReceiver<(String, HeaderMap)>, AbortOnDrop) {
    let (seen, calls) = mpsc::unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let server = tokio::spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.expect("accepts");
            let seen = seen.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let _ = seen.send((request.uri().path().to_owned(), request.headers().clone()));
                let answer = script(request.uri().path());
                async move { Ok::<_, Infallible>(response(answer)) }
            });
            connections.spawn(
                hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service),
            );
        }
    });
    (url, calls, AbortOnDrop(server))
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn response(answer: Scripted) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let status = [("grpc-status", answer.code), ("grpc-message", answer.text)];
    let status = status.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
    let mut response = Response::builder().header("content-type", "application/grpc");
    let mut frames = Vec::new();
    if answer.message.is_some() || answer.head_first {
        frames.extend(answer.message.map(|message| Ok(Frame::data(frame(&message)))));
        frames.push(Ok(Frame::trailers(status.into_iter().collect())));
    } else {
        response.headers_mut().expect("no error so far").extend(status);
    }
    let body = StreamBody::new(futures_util::stream::iter(frames));
    response.body(body.boxed_unsync()).expect("a response")
}

/// `Unimplemented` can be the answer of the very call that finds out: trailers only, or a head and then trailers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_call_that_finds_no_range_stream_is_answered_all_the_same() {
    fn answer(path: &str, head_first: bool) -> Scripted {
        match path {
            RANGE => Scripted {
                message: Some(found().encode_to_vec()),
                ..Scripted::refusal("0", "")
            },
            RANGE_STREAM => Scripted {
                head_first,
                ..Scripted::refusal("12", "unknown method RangeStream for service etcdserverpb.KV")
            },
            // Without a status there is no version, and no load that would find out first.
            _ => Scripted::refusal("2", "not now"),
        }
    }
    let scripts: [fn(&str) -> Scripted; 2] = [|path| answer(path, false), |path| answer(path, true)];
    for script in scripts {
        let (url, mut calls, _server) = scripted(script).await;
        let rangecache = Rangecache::at(&url).start_cold().await;
        let through = rangecache.client().await;
        for _ in 0..20 {
            assert_eq!(through.streamed(&list()).await, Ok(found()));
        }
        let mut tried = 0;
        while let Ok((path, _)) = calls.try_recv() {
            tried += usize::from(path == RANGE_STREAM);
        }
        // It is remembered, until one of the endpoint's five connections comes up.
        assert!((1..=6).contains(&tried), "{tried}");
        let metrics = rangecache.metrics().await.0;
        let fallbacks = metrics.get("rangecache_range_stream_fallback_total{reason=\"unimplemented\"}");
        assert_eq!(fallbacks, Some(&20.0));
    }
}

fn found() -> RangeResponse {
    RangeResponse {
        header: Some(Header {
            cluster_id: 1,
            member_id: 2,
            revision: 3,
            raft_term: 4,
        }),
        kvs: vec![KeyValue {
            key: key(1).into_bytes(),
            create_revision: 2,
            mod_revision: 3,
            version: 2,
            value: b"found".to_vec(),
            lease: 0,
        }],
        more: false,
        count: 1,
    }
}

/// The key is rangecache's: etcd does not see it, with whatever call it comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_that_reads_around_is_not_passed_on() {
    let (url, mut calls, _server) = scripted(|_| Scripted::refusal("2", "not now")).await;
    let rangecache = Rangecache::at(&url).start_cold().await;
    let client = rangecache
        .client()
        .await
        .with_metadata(BYPASS, "true")
        .with_metadata("x-mine", "kept");
    for path in [RANGE, RANGE_STREAM, PUT] {
        let reply = client.raw(path, &list().encode_to_vec()).await.expect("answers");
        assert_eq!(reply.status().code, 2, "{path}");
        let headers = until(SOON, "the call is seen", async || {
            while let Ok((seen, headers)) = calls.try_recv() {
                if seen == path && headers.contains_key("x-mine") {
                    return Some(headers);
                }
            }
            None
        })
        .await
        .0;
        assert!(!headers.contains_key(BYPASS), "{path}: {headers:?}");
    }
}
