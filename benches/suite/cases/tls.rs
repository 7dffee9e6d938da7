//! P19 and P20: TLS on every connection, from client to target and from proxy to etcd.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::client::{Connection, Windows};
use crate::dataset::Dataset;
use crate::load::{self, Op, Outcome, Shape};
use crate::measure::{BLOCK, Block, CpuWatch, Series, interleave};
use crate::report::{Check, Row, Unit};
use crate::targets::{Setup, Target};

/// Number of clients that connect concurrently.
const CONNECTING: usize = 8;

/// Clients that reconnect at the same moment.
const STORM: usize = 1_000;
/// Time for all of them; each that takes longer is an error.
const STORM_TIMEOUT: Duration = Duration::from_secs(60);

/// P19: connections with a full handshake, for one GET each.
pub(crate) async fn p19(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let mut ops = data.gets();
    load::learn(&*setup.connect().await?, &mut ops).await?;
    let ops = Arc::new(ops);
    let mut series = Series::new();
    // The first round is for warming up.
    for round in 0..=rounds {
        for target in setup.targets() {
            let cpu = CpuWatch::start(&target)?;
            let block = cpu.finish(&connect_over_and_over(target, &ops).await?)?;
            if round > 0 {
                series.entry(target.kind).or_default().push(block);
            }
        }
    }
    let rate = Row::of_series(
        "P19",
        "TLS connections with one GET each, 8 concurrently",
        Unit::PerSecond,
        &series,
        Block::rate,
        &[],
    );
    let cpu = Row::of_series(
        "P19",
        "the same: servers' CPU per connection",
        Unit::Nanoseconds,
        &series,
        Block::server_cpu_per_call_ns,
        &[],
    );
    let mut rows = vec![rate.with_series(series), cpu];
    rows.extend(storm(setup, &ops, rounds).await?);
    Ok(rows)
}

/// P19: all clients connect at once, as after a restart of the server, with a GET each.
async fn storm(setup: &Setup, ops: &Arc<Vec<Op>>, rounds: usize) -> Result<Vec<Row>> {
    let mut series = Series::new();
    for round in 0..=rounds {
        for target in setup.targets() {
            let cpu = CpuWatch::start(&target)?;
            let block = cpu.finish(&connect_at_once(target, ops).await?)?;
            if round > 0 {
                series.entry(target.kind).or_default().push(block);
            }
        }
    }
    let slowest = Row::of_series(
        "P19",
        "1,000 clients that connect at once over TLS with one GET each, p99",
        Unit::Nanoseconds,
        &series,
        Block::p99_ns,
        &[Check::TimesDirect(1.0 / 3.0)],
    );
    let failed = Row::of_series(
        "P19",
        "the same: clients that were not served",
        Unit::Count,
        &series,
        |block| block.errors as f64,
        &[Check::AtMost(0.0)],
    );
    Ok(vec![slowest.with_series(series), failed])
}

async fn connect_at_once(target: Target, ops: &Arc<Vec<Op>>) -> Result<Outcome> {
    let start = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..STORM {
        let ops = Arc::clone(ops);
        clients.spawn(async move {
            let op = &ops[client % ops.len()];
            let served = tokio::time::timeout(STORM_TIMEOUT, one_connection(&target, op)).await;
            let result = served.unwrap_or_else(|_| Err("was not served in time".to_owned()));
            (start.elapsed(), result)
        });
    }
    let mut outcome = Outcome::default();
    while let Some(client) = clients.join_next().await {
        let (latency, result) = client?;
        outcome.count(latency, result);
    }
    outcome.elapsed = start.elapsed();
    outcome.latencies_ns.sort_unstable();
    Ok(outcome)
}

async fn connect_over_and_over(target: Target, ops: &Arc<Vec<Op>>) -> Result<Outcome> {
    let start = Instant::now();
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..CONNECTING {
        let ops = Arc::clone(ops);
        workers.spawn(async move {
            let mut outcome = Outcome::default();
            let mut next = worker * ops.len() / CONNECTING;
            while start.elapsed() < BLOCK && outcome.errors == 0 {
                let begin = Instant::now();
                let result = one_connection(&target, &ops[next % ops.len()]).await;
                outcome.count(begin.elapsed(), result);
                next += 1;
            }
            outcome.elapsed = start.elapsed();
            outcome
        });
    }
    let mut sum = Outcome::default();
    while let Some(outcome) = workers.join_next().await {
        sum.merge(outcome?);
    }
    sum.latencies_ns.sort_unstable();
    Ok(sum)
}

async fn one_connection(target: &Target, op: &Op) -> Result<u64, String> {
    let connection = Connection::open_with(target.address, target.tls, Windows::LARGE).await;
    let connection = connection.map_err(|error| format!("{error:#}"))?;
    load::checked_call(&connection, op).await
}

/// P20: effect of encryption on a LIST and on many GETs.
pub(crate) async fn p20(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let list = Shape {
        connections: 1,
        in_flight: 1,
        duration: BLOCK,
        min_calls: 3,
    };
    let series = interleave(setup, list, data.list(), rounds).await?;
    let lists = Row::of_series(
        "P20",
        "LIST 20k × 1 KB over TLS, p50",
        Unit::Nanoseconds,
        &series,
        Block::p50_ns,
        &[Check::TimesDirect(1.0)],
    )
    .with_series(series);
    let gets = Shape {
        in_flight: 64,
        duration: Duration::from_millis(1500),
        min_calls: 1,
        ..list
    };
    let series = interleave(setup, gets, data.gets(), rounds).await?;
    let gets = Row::of_series(
        "P20",
        "GET over TLS, 64 in flight",
        Unit::PerSecond,
        &series,
        Block::rate,
        &[Check::TimesDirect(1.0)],
    )
    .with_series(series);
    Ok(vec![lists, gets])
}
