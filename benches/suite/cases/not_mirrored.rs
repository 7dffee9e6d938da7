//! P16 to P18: cost of lists outside the mirror, paged and as a whole: each becomes one RangeStream.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse};

use super::memory::lists_at_once;
use super::pages::PAGE_KEYS;
use super::puts::put;
use crate::client::Method;
use crate::dataset::{Dataset, fetch_message};
use crate::load::{self, Op, Outcome, Shape};
use crate::measure::{Block, CpuWatch, Series};
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup, Target, connections};
use crate::wire;

/// A prefix that contains none of the listed keys.
const NOT_MIRRORED: [&str; 4] = ["--cache-prefix", "/nothing-here/", "--buffer-max-bytes", "1GiB"];
const KINDS: [Kind; 2] = [Kind::Direct, Kind::Rangecache];
/// Number of P16's clients, each with its own list.
const CLIENTS: usize = 16;
/// Total size of their lists.
const WANTED_BYTES: usize = 1 << 30;
/// Bound on the bytes that rangecache holds for them: a quarter of `--buffer-max-bytes`.
const HELD_BYTES: u32 = 256 << 20;

async fn start(setup: &mut Setup, kind: Kind) -> Result<Target> {
    setup.restart_etcd().await?;
    setup.start_only(kind, &NOT_MIRRORED).await?;
    let target = setup.targets().into_iter().find(|target| target.kind == kind);
    target.context("the target that was just started")
}

/// P17: a whole list in pages, like kube-apiserver reads it.
pub(crate) async fn p17(setup: &mut Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let mut series = Series::new();
    for _ in 0..rounds {
        for kind in KINDS {
            let target = start(setup, kind).await?;
            let block = list_in_pages(&target, data).await?;
            series.entry(kind).or_default().push(block);
        }
        // What etcd itself needs for one stream of the list: a list in pages cannot cost it less.
        let etcd = start(setup, Kind::Direct).await?;
        let block = list_as_stream(&etcd, data).await?;
        series.entry(Kind::Floor).or_default().push(block);
    }
    let what = format!(
        "list of {}k outside the mirror, in pages of {PAGE_KEYS}",
        data.keys / 1000
    );
    let cpu = Row::of_series(
        "P17",
        format!("etcd's CPU per {what}"),
        Unit::Nanoseconds,
        &series,
        |block| block.cpu_etcd_ns as f64,
        &[Check::TimesDirect(20.0)],
    );
    let time = Row::of_series(
        "P17",
        format!("time of a {what}"),
        Unit::Nanoseconds,
        &series,
        |block| block.seconds * 1e9,
        &[],
    );
    Ok(vec![cpu.with_series(series), time])
}

/// The list as one RangeStream.
async fn list_as_stream(etcd: &Target, data: &Dataset) -> Result<Block> {
    let connection = connections(etcd, 1).await?.remove(0);
    let request = wire::frame(&wire::prefix_request(data.prefix));
    let cpu = CpuWatch::start(etcd)?;
    let (mut outcome, start) = (Outcome::default(), Instant::now());
    let read = connection.call(Method::RangeStream, request).await;
    outcome.count(start.elapsed(), read.map_err(|error| error.to_string()));
    outcome.elapsed = start.elapsed();
    cpu.finish(&outcome)
}

async fn list_in_pages(target: &Target, data: &Dataset) -> Result<Block> {
    let connection = connections(target, 1).await?.remove(0);
    let cpu = CpuWatch::start(target)?;
    let (mut outcome, mut read, start) = (Outcome::default(), 0, Instant::now());
    let mut request = RangeRequest {
        limit: PAGE_KEYS,
        ..wire::prefix_request(data.prefix)
    };
    loop {
        let asked = Instant::now();
        let page: RangeResponse = fetch_message(&connection, &Op::range(&request)).await?;
        let bytes = page.kvs.iter().map(|kv| kv.len() as u64).sum();
        outcome.count(asked.elapsed(), Ok(bytes));
        ensure!(
            page.count == i64::try_from(data.keys - read)?,
            "a page counts {} keys; {} are left",
            page.count,
            data.keys - read
        );
        read += page.kvs.len();
        if !page.more {
            break;
        }
        if request.revision == 0 {
            request.revision = page.header.context("a page has a header")?.revision;
        }
        request.key = format!("{}\0", data.key(read - 1)).into();
    }
    ensure!(read == data.keys, "{read} of {} keys were read", data.keys);
    outcome.elapsed = start.elapsed();
    outcome.latencies_ns.sort_unstable();
    cpu.finish(&outcome)
}

/// etcd keeps the raft log since its last snapshot in memory, so that the writes of the fill count as live, and Go's
/// heap grows in proportion to live data. Small writes push them out, as in an etcd that has run for a while.
async fn turn_raft_log_over(setup: &Setup) -> Result<()> {
    let puts: Vec<_> = (0..64)
        .map(|number| put(&format!("/elsewhere/{number}"), 16))
        .collect();
    let shape = Shape {
        connections: 1,
        in_flight: 64,
        duration: Duration::ZERO,
        // etcd takes a snapshot every 10,000 writes.
        min_calls: 200,
    };
    load::closed_loop(&[setup.connect().await?], shape, &Arc::new(puts)).await?;
    Ok(())
}

/// P16: a gigabyte of concurrent LISTs, all different.
pub(crate) async fn p16(setup: &mut Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let keys = (WANTED_BYTES / CLIENTS / data.value_bytes).min(data.keys - CLIENTS);
    let mut lists: Vec<_> = (0..CLIENTS)
        .map(|client| {
            Op::range(&RangeRequest {
                key: data.key(client).into(),
                range_end: data.key(client + keys).into(),
                ..RangeRequest::default()
            })
        })
        .collect();
    load::learn(&*setup.connect().await?, &mut lists).await?;
    let lists = Arc::new(lists);
    let mut series = Series::new();
    for _ in 0..rounds {
        for kind in KINDS {
            let target = start(setup, kind).await?;
            let block = lists_at_once(setup, &target, &lists, CLIENTS).await?;
            series.entry(kind).or_default().push(block);
        }
    }
    let what = format!(
        "{CLIENTS} different LISTs of {} MB at once, not mirrored",
        keys * data.value_bytes / 1_000_000
    );
    let extra = |name: &'static str| move |block: &Block| block.extra.get(name).copied().unwrap_or(f64::NAN);
    let memory = Row::of_series(
        "P16",
        format!("{what}: growth of the target's memory"),
        Unit::Bytes,
        &series,
        extra("rss_growth_bytes"),
        &[Check::AtMost(f64::from(HELD_BYTES))],
    );
    let heap = Row::of_series(
        "P16",
        "the same: growth of etcd's heap",
        Unit::Bytes,
        &series,
        extra("etcd_heap_growth_bytes"),
        &[],
    );
    let time = Row::of_series(
        "P16",
        "the same: time until all are complete",
        Unit::Nanoseconds,
        &series,
        |block| block.seconds * 1e9,
        &[],
    );
    Ok(vec![memory.with_series(series), heap, time])
}

/// P18: one unary LIST, and the growth of etcd's heap and of rangecache's memory.
pub(crate) async fn p18(setup: &mut Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    turn_raft_log_over(setup).await?;
    let mut lists = data.list();
    load::learn(&*setup.connect().await?, &mut lists).await?;
    let lists = Arc::new(lists);
    let mut series = Series::new();
    for _ in 0..rounds {
        for kind in KINDS {
            let target = start(setup, kind).await?;
            let block = lists_at_once(setup, &target, &lists, 1).await?;
            series.entry(kind).or_default().push(block);
        }
    }
    let size_mb = data.keys * data.value_bytes / 1_000_000;
    let extra = |name: &'static str| move |block: &Block| block.extra.get(name).copied().unwrap_or(f64::NAN);
    let heap = Row::of_series(
        "P18",
        format!("LIST of {size_mb} MB outside the mirror: growth of etcd's heap"),
        Unit::Bytes,
        &series,
        extra("etcd_heap_growth_bytes"),
        &[Check::AtMost(f64::from(32 << 20))],
    );
    let memory = Row::of_series(
        "P18",
        "the same: growth of the target's memory",
        Unit::Bytes,
        &series,
        extra("rss_growth_bytes"),
        &[],
    );
    Ok(vec![heap.with_series(series), memory])
}
