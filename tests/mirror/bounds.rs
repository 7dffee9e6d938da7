//! Reads within the bounds that their caller sets (`rangecache-min-revision`, `rangecache-max-staleness`): never older
//! than asked, while others write and feeds lag.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use testkit::etcd::{Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::{Client, INVALID_ARGUMENT, OUT_OF_RANGE, Reply};
use testkit::http;
use testkit::pb::{RangeRequest, RangeResponse};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::task::JoinSet;

use super::EXCLUSIVE;

const PREFIX: &str = "/bounds/";
const MIN_REVISION: &str = "rangecache-min-revision";
const MAX_STALENESS: &str = "rangecache-max-staleness";
const WRITERS: usize = 3;

/// Acknowledged writes of one key: when etcd's response was there, and its revision.
#[derive(Default)]
struct Log(Mutex<Vec<(Instant, i64)>>);

impl Log {
    /// The last revision that was acknowledged at `time` or before.
    fn at(&self, time: Instant) -> i64 {
        let log = self.0.lock();
        let later = log.partition_point(|(acknowledged, _)| *acknowledged <= time);
        later.checked_sub(1).map_or(0, |last| log[last].1)
    }
}

fn key(writer: usize) -> String {
    format!("{PREFIX}{writer}")
}

async fn write(etcd: &Client, writer: usize, log: &Log, stop: &AtomicBool) {
    let mut n = 0;
    while !stop.load(Ordering::Relaxed) {
        n += 1;
        let revision = etcd.put(key(writer), n.to_string()).await.expect("etcd writes");
        log.0.lock().push((Instant::now(), revision));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Reads with random bounds, and checks each response with what was acknowledged.
async fn read(through: &Client, logs: &[Log; WRITERS], stop: &AtomicBool, seed: u64) -> Result<(), String> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut list = RangeRequest::prefix(PREFIX);
    while !stop.load(Ordering::Relaxed) {
        let staleness = [None, Some(0), Some(20), Some(100), Some(400), Some(2_000)]
            [random.random_range(0..6)]
        .map(Duration::from_millis);
        let back = Duration::from_millis([0, 50, 500][random.random_range(0..3)]);
        let asked = Instant::now();
        let at_least = |time: Instant| logs.each_ref().map(|log| log.at(time));
        let min_revision = (random.random_range(0..2) == 0)
            .then(|| at_least(asked - back).into_iter().max().unwrap_or(0))
            .filter(|revision| *revision > 0);
        let mut client = through.clone();
        if let Some(staleness) = staleness {
            client = client.with_metadata(MAX_STALENESS, &format!("{}ms", staleness.as_millis()));
        }
        if let Some(revision) = min_revision {
            client = client.with_metadata(MIN_REVISION, &revision.to_string());
        }
        // Without a bound on its age, a read need only reach its revision; without any bound it is linearizable.
        let oldest = match (staleness, min_revision) {
            (Some(staleness), _) => at_least(asked - staleness),
            (None, Some(_)) => [0; WRITERS],
            (None, None) => at_least(asked),
        };
        list.keys_only = random.random_range(0..2) == 0;
        let answer = client
            .range(&list)
            .await
            .map_err(|status| format!("{status:?}"))?;
        let context = || format!("staleness {staleness:?}, min revision {min_revision:?}: {answer:?}");
        let lowest = oldest
            .into_iter()
            .max()
            .unwrap_or(0)
            .max(min_revision.unwrap_or(0));
        if answer.revision() < lowest {
            return Err(format!("older than asked, below {lowest}: {}", context()));
        }
        for (writer, oldest) in oldest.into_iter().enumerate() {
            let of_key = answer.kvs.iter().find(|kv| kv.key == key(writer).as_bytes());
            if of_key.map_or(0, |kv| kv.mod_revision) < oldest {
                return Err(format!(
                    "older than asked, {} is not at {oldest}: {}",
                    key(writer),
                    context()
                ));
            }
        }
    }
    Ok(())
}

async fn never_older_than_asked(version: Version) {
    let _exclusive = EXCLUSIVE.lock().await;
    let etcd = Etcd::start(version).await;
    let link = FaultLink::to(&etcd.url(), 1).await;
    let rangecache = Rangecache::at(link.url())
        .with("--cache-prefix", PREFIX)
        .with("--probe-interval", "100ms")
        .start()
        .await;
    let (logs, stop) = (
        Arc::new([(); WRITERS].map(|()| Log::default())),
        Arc::new(AtomicBool::new(false)),
    );
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (etcd, logs, stop) = (etcd.client().await, Arc::clone(&logs), Arc::clone(&stop));
        writers.spawn(async move { write(&etcd, writer, &logs[writer], &stop).await });
    }
    let mut readers = JoinSet::new();
    for seed in 0..4 {
        let (through, logs, stop) = (rangecache.client().await, Arc::clone(&logs), Arc::clone(&stop));
        readers.spawn(async move {
            let read = read(&through, &logs, &stop, seed).await;
            stop.store(true, Ordering::Relaxed);
            read
        });
    }
    for condition in [
        Condition::Normal,
        Condition::SlowFeeds(Duration::from_millis(300)),
        Condition::Slow(Duration::from_millis(150)),
        Condition::SlowFeeds(Duration::from_millis(50)),
        Condition::Normal,
    ] {
        let before = rangecache.outcomes().await;
        link.set(condition);
        // Until many reads were answered without a check under this condition.
        until(SOON, "reads are answered within their bounds", async || {
            let since = rangecache.outcomes().await.since(&before);
            let bounded = since.0.iter().filter(|((_, reason), _)| reason == "bounded");
            let enough = bounded.map(|(_, count)| count).sum::<u64>() >= 40;
            (enough || stop.load(Ordering::Relaxed)).then_some(())
        })
        .await;
    }
    stop.store(true, Ordering::Relaxed);
    for read in readers.join_all().await {
        read.unwrap_or_else(|error| panic!("{error}"));
    }
    writers.join_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounded_read_is_never_older_than_asked_3_7() {
    never_older_than_asked(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn bounded_read_is_never_older_than_asked_3_5() {
    never_older_than_asked(Version::V3_5).await;
}

async fn reason_of<T>(rangecache: &Rangecache, read: impl Future<Output = T>) -> (T, String) {
    let before = rangecache.outcomes().await;
    let result = read.await;
    let since = rangecache.outcomes_since(&before, 1).await;
    let ((outcome, reason), _) = since.0.into_iter().next().expect("it is counted");
    (result, format!("{outcome} {reason}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounds_decide_whether_a_read_is_checked() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let through = rangecache.client().await;
    let request = RangeRequest::one(format!("{PREFIX}a"));
    let revision = direct.put(format!("{PREFIX}a"), "1").await.expect("etcd writes");
    let with = |bounds: &[(&'static str, &str)]| {
        bounds.iter().fold(through.clone(), |client, (name, value)| {
            client.with_metadata(name, value)
        })
    };
    // Its check proves the revision.
    assert_eq!(
        through.range(&request).await.expect("etcd answers").revision(),
        revision
    );
    let (now, later) = (revision.to_string(), (revision + 1).to_string());
    for (bounds, expected) in [
        (&[(MIN_REVISION, now.as_str())][..], "hit bounded"),
        (&[(MAX_STALENESS, "1h")], "hit bounded"),
        (&[(MIN_REVISION, &now), (MAX_STALENESS, "1h")], "hit bounded"),
        (&[(MAX_STALENESS, "0s")], "hit linearizable"),
        (&[(MIN_REVISION, &now), (MAX_STALENESS, "0s")], "hit linearizable"),
        (&[(MIN_REVISION, &now), ("hasleader", "true")], "hit linearizable"),
        (
            &[(MIN_REVISION, &now), ("rangecache-bypass", "true")],
            "forwarded bypass",
        ),
    ] {
        let (answer, reason) = reason_of(&rangecache, with(bounds).range(&request)).await;
        assert_eq!(reason, expected, "{bounds:?}");
        assert_eq!(answer.expect("it is answered").revision(), revision, "{bounds:?}");
    }
    let future = with(&[(MIN_REVISION, &later)]).range(&request).await;
    let future = future.expect_err("etcd has never had the revision");
    assert_eq!(future.code, OUT_OF_RANGE, "{}", future.message);
    assert!(future.message.contains("future revision"), "{}", future.message);
    // A stream has the same rule.
    let before = rangecache.stream_outcomes().await;
    with(&[(MIN_REVISION, &now)])
        .streamed(&RangeRequest::prefix(PREFIX))
        .await
        .expect("it is answered");
    let since = rangecache.stream_outcomes_since(&before, 1).await;
    assert!(
        since.0.contains_key(&("hit".to_owned(), "bounded".to_owned())),
        "{since:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_bounds_are_refused_with_an_explanation() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let through = rangecache.client().await;
    let request = RangeRequest::one("a");
    for (name, value) in [
        (MIN_REVISION, "0"),
        (MIN_REVISION, "soon"),
        (MAX_STALENESS, "5"),
        (MAX_STALENESS, "-1s"),
    ] {
        let client = through.with_metadata(name, value);
        let refused = client.range(&request).await.expect_err(value);
        assert_eq!(refused.code, INVALID_ARGUMENT, "{name}: {value}");
        assert!(refused.message.contains(name), "{}", refused.message);
        let refused = client.streamed(&request).await.expect_err(value);
        assert_eq!(refused.code, INVALID_ARGUMENT, "{name}: {value}");
    }
    let serializable = RangeRequest {
        serializable: true,
        ..request
    };
    let client = through.with_metadata(MIN_REVISION, "1");
    let refused = client
        .range(&serializable)
        .await
        .expect_err("etcd may answer with any older state");
    assert_eq!(refused.code, INVALID_ARGUMENT);
    assert!(
        refused.message.contains("leave serializable out"),
        "{}",
        refused.message
    );
}

async fn post(rangecache: &Rangecache, header: Option<(&str, &str)>) -> http::Response {
    let url = format!("{}/v3/kv/range", rangecache.url());
    http::post_with(&url, header.as_slice(), r#"{"key":"L2JvdW5kcy8="}"#)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounds_are_headers_of_the_json_gateway() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let revision = direct.put(PREFIX, "1").await.expect("etcd writes");
    let rangecache = Rangecache::before(&etcd).start().await;
    until(SOON, "JSON is answered from memory", async || {
        let (_, reason) = reason_of(&rangecache, post(&rangecache, None)).await;
        (reason == "hit linearizable").then_some(())
    })
    .await;
    let min_revision = revision.to_string();
    let bounded = post(&rangecache, Some((MIN_REVISION, &min_revision)));
    let (response, reason) = reason_of(&rangecache, bounded).await;
    assert_eq!(
        (response.status, reason.as_str()),
        (200, "hit bounded"),
        "{}",
        response.body
    );
    let response = post(&rangecache, Some((MAX_STALENESS, "5"))).await;
    assert_eq!(response.status, 400, "{}", response.body);
    assert!(response.body.contains(MAX_STALENESS), "{}", response.body);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounds_of_forwarded_reads_change_nothing() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    direct.put(format!("{PREFIX}a"), "1").await.expect("etcd writes");
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/other/")
        .start()
        .await;
    let client = rangecache
        .client()
        .await
        .with_metadata(MIN_REVISION, "1")
        .with_metadata(MAX_STALENESS, "1h");
    for request in [
        RangeRequest::one(format!("{PREFIX}a")),
        RangeRequest::prefix(PREFIX),
    ] {
        let (forwarded, expected): (Reply, Reply) = (
            client.range_raw(&request).await.expect("it is answered"),
            direct.range_raw(&request).await.expect("it is answered"),
        );
        let (forwarded, expected) = (
            forwarded.answer::<RangeResponse>(),
            expected.answer::<RangeResponse>(),
        );
        assert_eq!(forwarded, expected);
    }
}
