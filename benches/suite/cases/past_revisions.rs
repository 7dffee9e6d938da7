//! PAST: lists at past revisions while the store is written, compared with lists of the newest revision, and how late a
//! watcher gets its events meanwhile, which shows whether the feed of the mirror is slowed.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use etcd_wire::etcdserverpb::RangeRequest;
use testkit::pb::{PutRequest, PutResponse, WatchCreateRequest, prefix_end};

use crate::client::{Connection, Method};
use crate::dataset::Dataset;
use crate::load::{self, Op, Outcome};
use crate::measure::{Block, CpuWatch, Series};
use crate::open_loop::open_loop;
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup, Target, connections};
use crate::watchers::{Watchers, stamp};
use crate::wire;

/// Lists of each kind; those of the past are at as many revisions.
const LISTS: usize = 100;
const PUTS_PER_SECOND: u32 = 500;
/// Time in which the past is made.
const PAST: Duration = Duration::from_secs(2);
/// Longest time for all lists of a kind.
const LISTS_DEADLINE: Duration = Duration::from_secs(60);
/// grpc-proxy answers reads of the past from its cache; the floor has no past.
const KINDS: [Kind; 2] = [Kind::Direct, Kind::Rangecache];

const NEWEST_P50: &str = "newest_p50_ns";
const NEWEST_P99: &str = "newest_p99_ns";
const EVENTS_P50: &str = "events_p50_ns";
const EVENTS_P99: &str = "events_p99_ns";
const EVENTS_P50_NEWEST: &str = "events_p50_newest_ns";
const EVENTS_P99_NEWEST: &str = "events_p99_newest_ns";

/// Puts of a data set's keys by one client, straight to etcd.
#[derive(Clone)]
struct Writer {
    etcd: Arc<Connection>,
    data: Dataset,
    epoch: Instant,
    /// Revisions that were acknowledged.
    revisions: Arc<Mutex<Vec<i64>>>,
}

impl Writer {
    async fn put(self, number: usize) -> Result<u64, String> {
        let request = PutRequest {
            key: self.data.key(number * 617 % self.data.keys).into(),
            value: stamp(self.epoch, self.data.value_bytes),
            ..PutRequest::default()
        };
        let answer = self.etcd.fetch(Method::Put, wire::frame(&request)).await;
        let answer = answer.map_err(|error| error.to_string())?;
        let response: PutResponse = wire::unframe(&answer).map_err(|error| error.to_string())?;
        let revision = response.header.map_or(0, |header| header.revision);
        if let Ok(mut revisions) = self.revisions.lock() {
            revisions.push(revision);
        }
        Ok(answer.len() as u64)
    }

    /// Puts at a fixed rate.
    async fn run(&self, duration: Duration) -> Result<Outcome> {
        let this = self.clone();
        open_loop(PUTS_PER_SECOND, duration, move |number| this.clone().put(number)).await
    }
}

/// PAST: p99 of the lists, and of the events of one watcher.
pub(crate) async fn run(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let data = Dataset {
        prefix: "/registry/configmaps/",
        keys: 20_000,
        value_bytes: 500,
    };
    data.fill(&setup.connect().await?, 0).await?;
    let mut series = Series::new();
    for _ in 0..rounds {
        for target in setup.targets() {
            if KINDS.contains(&target.kind) {
                let block = measure(setup, &target, &data).await?;
                series.entry(target.kind).or_default().push(block);
            }
        }
    }
    let extra = |name: &'static str| move |block: &Block| block.extra.get(name).copied().unwrap_or(f64::NAN);
    let time = |what: &str, of: &dyn Fn(&Block) -> f64| {
        Row::of_series("PAST", what, Unit::Nanoseconds, &series, of, &[])
    };
    let ratio = |what: &str, of: &dyn Fn(&Block) -> f64, bound: f64| {
        Row::of_series("PAST", what, Unit::Factor, &series, of, &[Check::AtMost(bound)])
    };
    let what =
        format!("{LISTS} LISTs of 20k × 500 B at different past revisions under {PUTS_PER_SECOND} puts/s");
    Ok(vec![
        time(&format!("{what}, p50"), &Block::p50_ns).with_series(series.clone()),
        time("the same: p99", &Block::p99_ns),
        time("as many of the newest revision: p50", &extra(NEWEST_P50)),
        time("the same: p99", &extra(NEWEST_P99)),
        ratio(
            "p99 of the past, relative to the newest",
            &|block| block.p99_ns() / extra(NEWEST_P99)(block),
            2.0,
        ),
        time(
            "from put to event, beside LISTs of the past: p50",
            &extra(EVENTS_P50),
        ),
        time("the same: p99", &extra(EVENTS_P99)),
        time(
            "from put to event, beside LISTs of the newest: p50",
            &extra(EVENTS_P50_NEWEST),
        ),
        time("the same: p99", &extra(EVENTS_P99_NEWEST)),
    ])
}

async fn measure(setup: &Setup, target: &Target, data: &Dataset) -> Result<Block> {
    let writer = Writer {
        etcd: setup.connect().await?,
        data: data.clone(),
        epoch: Instant::now(),
        revisions: Arc::default(),
    };
    let made = writer.run(PAST).await?;
    ensure!(made.errors == 0, "a put failed: {:?}", made.first_error);
    let revisions = writer
        .revisions
        .lock()
        .map_err(|_| anyhow::anyhow!("a put panicked"))?
        .clone();
    ensure!(revisions.len() >= LISTS, "{} puts succeeded", revisions.len());
    let mut past = Vec::new();
    for number in 0..LISTS {
        let mut op = Op::range(&RangeRequest {
            revision: revisions[number * revisions.len() / LISTS],
            ..wire::prefix_request(data.prefix)
        });
        op.expected_bytes = Some(writer.etcd.call(op.method, op.body.clone()).await?);
        past.push(op);
    }
    let newest = vec![Op::range(&wire::prefix_request(data.prefix)); LISTS];
    let (newest, newest_events) = lists(&writer, target, &newest).await?;
    let cpu = CpuWatch::start(target)?;
    let (outcome, events) = lists(&writer, target, &past).await?;
    let mut block = cpu.finish(&outcome)?;
    for (name, of, share) in [
        (NEWEST_P50, &newest, 0.5),
        (NEWEST_P99, &newest, 0.99),
        (EVENTS_P50, &events, 0.5),
        (EVENTS_P99, &events, 0.99),
        (EVENTS_P50_NEWEST, &newest_events, 0.5),
        (EVENTS_P99_NEWEST, &newest_events, 0.99),
    ] {
        block.extra.insert(name, of.percentile_ns(share) as f64);
    }
    block.errors += newest.errors + newest_events.errors + events.errors;
    Ok(block)
}

/// Makes these calls one after another while puts and their events pass. Returns their outcome, and that of the watcher.
async fn lists(writer: &Writer, target: &Target, ops: &[Op]) -> Result<(Outcome, Outcome)> {
    let [lister, watching] =
        <[_; 2]>::try_from(connections(target, 2).await?).map_err(|_| anyhow::anyhow!("two connections"))?;
    let mut watchers = Watchers::new(writer.epoch);
    let key = writer.data.prefix.as_bytes();
    let create = WatchCreateRequest {
        key: key.to_vec(),
        range_end: prefix_end(key),
        ..WatchCreateRequest::default()
    };
    watchers.open(&watching, vec![create]).await?;
    watchers.wait_created().await?;
    watchers.begin();
    let start = Instant::now();
    let listing = async {
        let mut outcome = Outcome::default();
        for op in ops {
            let began = Instant::now();
            let result = load::checked_call(&lister, op).await;
            outcome.count(began.elapsed(), result);
        }
        outcome.elapsed = start.elapsed();
        outcome.latencies_ns.sort_unstable();
        outcome
    };
    let outcome = tokio::select! {
        outcome = listing => outcome,
        ended = writer.run(LISTS_DEADLINE) => {
            ended.context("the puts failed")?;
            anyhow::bail!("the lists took longer than {LISTS_DEADLINE:?}");
        }
    };
    Ok((outcome, watchers.finish(start).await?))
}
