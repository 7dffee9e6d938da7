//! P23: many watchers that are created at once, with a thousand events to catch up on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testkit::pb::{WatchCreateRequest, prefix_end};

use super::watches::watched;
use crate::client::Connection;
use crate::dataset::{Dataset, current_revision};
use crate::load::{self, Op, Outcome};
use crate::measure::{Block, CpuWatch, Series};
use crate::report::{Check, Row, Unit};
use crate::targets::{Setup, Target, connections};
use crate::watchers::Watchers;

const WATCHERS: usize = 5_000;
const CONNECTIONS: usize = 16;
/// Events that each watcher catches up on.
const EVENTS: usize = 1_000;
/// Pause between the reads of another client.
const PAUSE: Duration = Duration::from_millis(5);
/// Timeout of a storm.
const DEADLINE: Duration = Duration::from_secs(90);
const PREFIX: &str = "/registry/storm/";

/// P23: time until every watcher has every event, and what reads take meanwhile.
pub(crate) async fn p23(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let etcd = setup.connect().await?;
    for number in 0..EVENTS {
        let put = super::puts::put(&format!("{PREFIX}{number:04}"), 256);
        load::checked_call(&etcd, &put)
            .await
            .map_err(anyhow::Error::msg)?;
    }
    let start = current_revision(&etcd).await? - i64::try_from(EVENTS)? + 1;
    let data = Dataset {
        prefix: PREFIX,
        keys: EVENTS,
        value_bytes: 256,
    };
    let gets = data.gets();
    let mut series = Series::new();
    for _ in 0..rounds {
        for target in watched(setup) {
            let block = storm(&target, start, gets.clone()).await?;
            series.entry(target.kind).or_default().push(block);
        }
    }
    let what = |figure: &str| format!("{WATCHERS} watches {EVENTS} events back: {figure}");
    Ok(vec![
        Row::of_series(
            "P23",
            what("time until all have all"),
            Unit::Nanoseconds,
            &series,
            |block| block.seconds * 1e9,
            &[Check::AtMost(2.5e9), Check::TimesDirect(3.0)],
        )
        .with_series(series.clone()),
        Row::of_series(
            "P23",
            what("etcd's CPU"),
            Unit::Nanoseconds,
            &series,
            |block| block.cpu_etcd_ns as f64,
            &[],
        ),
        Row::of_series(
            "P23",
            what("GET p99 meanwhile"),
            Unit::Nanoseconds,
            &series,
            |block| block.extra.get(GET_P99).copied().unwrap_or(f64::NAN),
            &[],
        ),
    ])
}

const GET_P99: &str = "get_p99_ns";

async fn storm(target: &Target, start_revision: i64, gets: Vec<Op>) -> Result<Block> {
    let carriers = connections(target, CONNECTIONS).await?;
    let reader = connections(target, 1).await?.pop().context("one connection")?;
    let create = WatchCreateRequest {
        key: PREFIX.into(),
        range_end: prefix_end(PREFIX.as_bytes()),
        start_revision,
        ..WatchCreateRequest::default()
    };
    // The values carry no times.
    let mut watchers = Watchers::new(Instant::now());
    let (cpu, start) = (CpuWatch::start(target)?, Instant::now());
    let stop = tokio::sync::watch::Sender::new(false);
    let reads = tokio::spawn(read(reader, gets, stop.subscribe()));
    for number in 0..WATCHERS {
        let carrier = &carriers[number % carriers.len()];
        watchers.open(carrier, vec![create.clone()]).await?;
    }
    let all = watchers.wait_events((WATCHERS * EVENTS) as u64, DEADLINE).await;
    let elapsed = start.elapsed();
    stop.send_replace(true);
    let reads = reads.await?;
    let mut outcome = watchers.finish(start).await?;
    outcome.elapsed = elapsed;
    outcome.latencies_ns.clear();
    if let Err(error) = all {
        outcome.errors += 1;
        outcome.first_error.get_or_insert(format!("{error:#}"));
    }
    outcome.errors += reads.errors;
    outcome.first_error = outcome.first_error.take().or(reads.first_error.clone());
    let mut block = cpu.finish(&outcome)?;
    block.extra.insert(GET_P99, reads.percentile_ns(0.99) as f64);
    Ok(block)
}

/// Reads single keys, with pauses, until `stop`.
async fn read(
    reader: Arc<Connection>,
    gets: Vec<Op>,
    mut stop: tokio::sync::watch::Receiver<bool>,
) -> Outcome {
    let mut outcome = Outcome::default();
    for op in gets.iter().cycle() {
        let begin = Instant::now();
        let result = load::checked_call(&reader, op).await;
        outcome.count(begin.elapsed(), result);
        let stopped = stop.wait_for(|stopped| *stopped);
        if tokio::time::timeout(PAUSE, stopped).await.is_ok() {
            break;
        }
    }
    outcome.latencies_ns.sort_unstable();
    outcome
}
