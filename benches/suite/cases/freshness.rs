//! P14: linearizable reads during writes, and the number of stale responses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use super::puts;
use crate::client::{Connection, Method};
use crate::load::{self, Op, Outcome};
use crate::measure::{Block, CpuWatch, Series, with_and_without};
use crate::open_loop::open_loop;
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup, Target, connections};
use crate::wire;
use testkit::pb::PutResponse;

/// Keys that are written and read.
const KEYS: usize = 1000;
const VALUE_BYTES: usize = 100;
const READS_PER_SECOND: u32 = 1000;
const PUTS_PER_SECOND: u32 = 2000;
/// Enough reads for a 99.9th percentile of 4,000.
const ROUND: Duration = Duration::from_secs(4);

/// Acknowledged revisions, which every later read must return.
struct Acknowledged {
    /// The highest of all.
    revision: AtomicI64,
    /// The highest per key.
    keys: Vec<AtomicI64>,
    /// Reads that returned an older revision.
    stale: AtomicU64,
}

/// P14: puts go directly to etcd, so that a proxy can notice them only by asking etcd; reads go to the target.
pub(crate) async fn p14(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let writer = setup.connect().await?;
    for op in (0..KEYS).map(|number| puts::put(&key(number), VALUE_BYTES)) {
        load::checked_call(&writer, &op)
            .await
            .map_err(anyhow::Error::msg)?;
    }
    let mut series = Series::new();
    for _ in 0..rounds {
        for target in setup.targets() {
            let measure = async || read_while_writing(&writer, &target).await;
            let block = with_and_without(setup.watchers_beside, &target, measure).await?;
            series.entry(target.kind).or_default().push(block);
        }
    }
    let row = |what: &str, percentile: usize, bound_ms: f64| {
        Row::of_series(
            "P14",
            format!("linearizable reads, 1k/s under 2k puts/s, {what}"),
            Unit::Nanoseconds,
            &series,
            |block| block.percentiles_ns[percentile],
            &[Check::AtMost(bound_ms * 1e6)],
        )
    };
    // A sum, not a median: one stale response in one round is a failure.
    let sums = series.iter().map(|(kind, blocks)| {
        let beside = blocks.iter().filter_map(|block| block.beside.as_deref());
        let all = blocks.iter().chain(beside);
        (
            *kind,
            vec![all.filter_map(|block| block.extra.get("stale")).sum::<f64>()],
        )
    });
    let stale = Row::of_figures(
        "P14",
        "stale responses, all rounds (the floor's are stale, and must be detected)",
        Unit::Count,
        sums,
        &[Check::AtMost(0.0)],
    );
    let caught = |block: &Block| block.extra.get("stale").is_some_and(|stale| *stale > 0.0);
    let floor = series.get(&Kind::Floor).map_or(&[][..], Vec::as_slice);
    anyhow::ensure!(
        !floor.is_empty() && floor.iter().all(caught),
        "the check did not detect the replay server's stale responses"
    );
    Ok(vec![
        row("p50", 0, 1.0).with_series(series.clone()),
        row("p99", 1, 4.0),
        row("p99.9", 2, 10.0),
        stale,
    ])
}

async fn read_while_writing(writer: &Arc<Connection>, target: &Target) -> Result<Block> {
    let reader = connections(target, 1).await?.pop().context("one connection")?;
    let puts: Arc<Vec<Op>> = Arc::new(
        (0..KEYS)
            .map(|number| puts::put(&key(number), VALUE_BYTES))
            .collect(),
    );
    let reads: Arc<Vec<Op>> = Arc::new(
        (0..KEYS)
            .map(|number| Op::range(&wire::get_request(key(number))))
            .collect(),
    );
    let acknowledged = Arc::new(Acknowledged {
        revision: AtomicI64::new(0),
        keys: (0..KEYS).map(|_| AtomicI64::new(0)).collect(),
        stale: AtomicU64::new(0),
    });
    let write = {
        let (writer, acknowledged) = (writer.clone(), acknowledged.clone());
        move |number: usize| {
            let (writer, acknowledged, puts) = (writer.clone(), acknowledged.clone(), puts.clone());
            async move {
                let number = number % KEYS;
                let answer = writer.fetch(Method::Put, puts[number].body.clone()).await;
                let answer = answer.map_err(|error| error.to_string())?;
                let response: PutResponse = wire::unframe(&answer).map_err(|error| error.to_string())?;
                let revision = response.header.map_or(0, |header| header.revision);
                acknowledged.keys[number].fetch_max(revision, Ordering::SeqCst);
                acknowledged.revision.fetch_max(revision, Ordering::SeqCst);
                Ok(answer.len() as u64)
            }
        }
    };
    let read = {
        let acknowledged = acknowledged.clone();
        move |number: usize| {
            let (reader, acknowledged, reads) = (reader.clone(), acknowledged.clone(), reads.clone());
            async move {
                // Scattered, so that reads meet keys written just now and long ago.
                let number = number * 617 % KEYS;
                let before = acknowledged.revision.load(Ordering::SeqCst);
                let key_before = acknowledged.keys[number].load(Ordering::SeqCst);
                let answer = reader.fetch(Method::Range, reads[number].body.clone()).await;
                let answer = answer.map_err(|error| error.to_string())?;
                let (revision, key_revision) =
                    wire::revisions_of_get(&answer).map_err(|error| error.to_string())?;
                if revision < before || key_revision < key_before {
                    acknowledged.stale.fetch_add(1, Ordering::SeqCst);
                }
                Ok(answer.len() as u64)
            }
        }
    };
    let cpu = CpuWatch::start(target)?;
    let (reads, writes) = tokio::join!(
        open_loop(READS_PER_SECOND, ROUND, read),
        open_loop(PUTS_PER_SECOND, ROUND, write)
    );
    let (mut reads, writes): (Outcome, Outcome) = (reads?, writes?);
    reads.errors += writes.errors;
    reads.first_error = reads.first_error.or(writes.first_error);
    let mut block = cpu.finish(&reads)?;
    block.extra = BTreeMap::from([
        ("stale", acknowledged.stale.load(Ordering::SeqCst) as f64),
        ("puts", writes.calls as f64),
    ]);
    Ok(block)
}

fn key(number: usize) -> String {
    format!("/registry/events/object-{number:07}")
}
