//! P9 and P12: memory of lists and mirrors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::dataset::Dataset;
use crate::load::{self, Op, Shape};
use crate::measure::{Block, CpuWatch, Series};
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup, Target, connections};
use crate::usage;

/// Number of concurrent lists.
const CONCURRENT_LISTS: usize = 8;
/// Sampling interval of etcd's heap.
const HEAP_SAMPLE: Duration = Duration::from_millis(25);
/// Memory counts as settled when it has changed by less than this …
const SETTLED_BYTES: u64 = 256 << 10;
/// … for this long.
const SETTLED: Duration = Duration::from_secs(2);
/// Deadline for settling: allocators release memory late.
const SETTLE_DEADLINE: Duration = Duration::from_secs(20);
const HEAP_IN_USE: &str = "go_memstats_heap_inuse_bytes";

/// P9: eight concurrent lists, each on its own connection. Go releases memory late, so etcd and the target are
/// restarted before each measurement, and etcd collects its garbage.
pub(crate) async fn p9(setup: &mut Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    // Size measured once, before: a LIST would grow the new heaps.
    let mut lists = data.list();
    load::learn(&*setup.connect().await?, &mut lists).await?;
    let lists = Arc::new(lists);
    let mut series = Series::new();
    for _ in 0..rounds {
        for kind in [Kind::Direct, Kind::GrpcProxy, Kind::Rangecache] {
            if kind == Kind::Rangecache && setup.without_rangecache.is_some() {
                continue;
            }
            setup.restart_etcd().await?;
            setup.start_only(kind, &[]).await?;
            let target = setup.targets().into_iter().find(|target| target.kind == kind);
            let target = target.context("the target that was just started")?;
            series
                .entry(kind)
                .or_default()
                .push(lists_at_once(setup, &target, &lists, CONCURRENT_LISTS).await?);
        }
    }
    let growth = |name: &'static str, what: String, bound: f64| {
        Row::of_series(
            "P9",
            what,
            Unit::Bytes,
            &series,
            |block| block.extra.get(name).copied().unwrap_or(f64::NAN),
            &[Check::AtMost(bound)],
        )
    };
    let size_mb = data.keys * data.value_bytes / 1_000_000;
    let what = format!("{CONCURRENT_LISTS} LISTs of {size_mb} MB at once: growth of memory");
    let rss = growth("rss_growth_bytes", what, f64::from(64 << 20));
    let heap = growth(
        "etcd_heap_growth_bytes",
        "the same: growth of etcd's heap".into(),
        f64::from(32 << 20),
    );
    Ok(vec![rss.with_series(series.clone()), heap])
}

/// Sends this many concurrent lists, each on its own connection, while sampling the target's memory and etcd's heap.
pub(crate) async fn lists_at_once(
    setup: &Setup,
    target: &Target,
    lists: &Arc<Vec<Op>>,
    count: usize,
) -> Result<Block> {
    let pid = target.proxy_pid.unwrap_or(target.etcd_pid);
    let connections = connections(target, count).await?;
    settled_rss(pid).await?;
    setup.collect_etcd_garbage().await?;
    let heap_before = setup.etcd_metric(HEAP_IN_USE).await?;
    let before = usage::memory(pid)?;
    usage::reset_peak(pid)?;
    let shape = Shape {
        connections: count,
        in_flight: count,
        duration: Duration::ZERO,
        min_calls: 1,
    };
    let cpu = CpuWatch::start(target)?;
    let mut heap_peak = heap_before;
    let load = load::closed_loop(&connections, shape, lists);
    tokio::pin!(load);
    let outcome = loop {
        tokio::select! {
            outcome = &mut load => break outcome?,
            () = tokio::time::sleep(HEAP_SAMPLE) => {
                heap_peak = heap_peak.max(setup.etcd_metric(HEAP_IN_USE).await?);
            }
        }
    };
    heap_peak = heap_peak.max(setup.etcd_metric(HEAP_IN_USE).await?);
    let mut block = cpu.finish(&outcome)?;
    let peak = usage::memory(pid)?;
    block.extra = BTreeMap::from([
        ("rss_before_bytes", before.rss_bytes as f64),
        ("rss_after_bytes", peak.rss_bytes as f64),
        (
            "rss_growth_bytes",
            peak.peak_bytes.saturating_sub(before.rss_bytes) as f64,
        ),
        ("etcd_heap_growth_bytes", heap_peak - heap_before),
    ]);
    Ok(block)
}

/// Waits until a process's memory has settled, and returns it.
pub(super) async fn settled_rss(pid: u32) -> Result<u64> {
    let start = Instant::now();
    let mut still_since = Instant::now();
    let mut last = usage::memory(pid)?.rss_bytes;
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = usage::memory(pid)?.rss_bytes;
        if now.abs_diff(last) > SETTLED_BYTES {
            (last, still_since) = (now, Instant::now());
        }
        if still_since.elapsed() > SETTLED || start.elapsed() > SETTLE_DEADLINE {
            return Ok(now);
        }
    }
}

/// P12: memory of a mirror, above a rangecache that mirrors nothing, per byte of the encoded response to a LIST of
/// all keys.
pub(crate) async fn p12(
    setup: &Setup,
    data: &Dataset,
    rounds: usize,
    what: &str,
    at_most: f64,
) -> Result<Vec<Row>> {
    let etcd = setup.connect().await?;
    let mut encoded_bytes = 0;
    for op in data.list() {
        encoded_bytes += load::checked_call(&etcd, &op).await.map_err(anyhow::Error::msg)?;
    }
    let empty = setup
        .start_rangecache(&["--cache-prefix", "/nothing-here/"])
        .await?;
    let empty_bytes = settled_rss(empty.pid()).await?;
    drop(empty);
    let mut factors = Vec::new();
    for _ in 0..rounds {
        let full = setup.start_rangecache(&["--cache-prefix", data.prefix]).await?;
        let full_bytes = settled_rss(full.pid()).await?;
        factors.push(full_bytes.saturating_sub(empty_bytes) as f64 / encoded_bytes as f64);
    }
    let what = format!(
        "memory per encoded byte, {what} ({} MB)",
        encoded_bytes / 1_000_000
    );
    Ok(vec![Row::of_figures(
        "P12",
        what,
        Unit::Factor,
        [(Kind::Rangecache, factors)],
        &[Check::AtMost(at_most)],
    )])
}
