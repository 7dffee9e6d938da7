//! P22 and P26: idle watchers, and progress requests.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testkit::pb::{WatchCreateRequest, WatchProgressRequest, WatchRequest, prefix_end};

use super::memory::settled_rss;
use super::watches::watched;
use crate::client::Method;
use crate::load::Outcome;
use crate::measure::{Block, CpuWatch, Series};
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup, Target, connections};
use crate::usage;
use crate::watchers::{Stream, Watchers, create_frame};
use crate::wire;

/// Idle watchers.
const WATCHERS: usize = 10_000;
/// Streams of one connection, at most.
const STREAMS_PER_CONNECTION: usize = 500;
/// Time over which CPU is measured while nothing happens.
const IDLE: Duration = Duration::from_secs(5);
/// Progress requests per block.
const REQUESTS: usize = 200;
/// Timeout of a progress request.
const ANSWER: Duration = Duration::from_secs(3);

/// Streams and ranges of the idle watchers.
#[derive(Clone, Copy)]
struct Layout {
    name: &'static str,
    watchers_per_stream: usize,
    has_distinct_ranges: bool,
    /// Goal for rangecache, in bytes per watcher.
    at_most: f64,
}

const LAYOUTS: [Layout; 3] = [
    Layout {
        name: "a stream each",
        watchers_per_stream: 1,
        has_distinct_ranges: false,
        at_most: 6_000.0,
    },
    Layout {
        name: "100 per stream",
        watchers_per_stream: 100,
        has_distinct_ranges: false,
        at_most: 500.0,
    },
    Layout {
        name: "100 per stream, distinct ranges",
        watchers_per_stream: 100,
        has_distinct_ranges: true,
        at_most: 1_000.0,
    },
];

/// P22: memory and CPU of 10,000 watchers that get no events. Processes are fresh for each measurement.
pub(crate) async fn p22(setup: &mut Setup, rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for layout in LAYOUTS {
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
                let block = idle(&target, layout)
                    .await
                    .with_context(|| format!("{kind:?}, {}", layout.name))?;
                series.entry(kind).or_default().push(block);
            }
        }
        let extra =
            |name: &'static str| move |block: &Block| block.extra.get(name).copied().unwrap_or(f64::NAN);
        let what = |figure: &str| format!("{WATCHERS} idle watchers, {}: {figure}", layout.name);
        let memory = Row::of_series(
            "P22",
            what("memory of each, of the target"),
            Unit::Bytes,
            &series,
            extra("target_bytes"),
            &[Check::AtMost(layout.at_most)],
        );
        let of_etcd = Row::of_series(
            "P22",
            what("memory of each, of etcd"),
            Unit::Bytes,
            &series,
            extra("etcd_bytes"),
            &[],
        );
        let cpu = |block: &Block| (block.cpu_proxy_ns + block.cpu_etcd_ns) as f64 / block.seconds;
        let cpu = Row::of_series(
            "P22",
            what("servers' CPU/s, with progress_notify"),
            Unit::Nanoseconds,
            &series,
            cpu,
            &[],
        );
        rows.extend([memory.with_series(series.clone()), of_etcd, cpu]);
    }
    Ok(rows)
}

/// Opens idle watchers, and measures memory per watcher and CPU.
async fn idle(target: &Target, layout: Layout) -> Result<Block> {
    let streams = WATCHERS / layout.watchers_per_stream;
    let carriers = connections(target, streams.div_ceil(STREAMS_PER_CONNECTION)).await?;
    let pid = target.proxy_pid.unwrap_or(target.etcd_pid);
    let before = (settled_rss(pid).await?, usage::memory(target.etcd_pid)?.rss_bytes);
    let mut watchers = Watchers::new(Instant::now());
    for stream in 0..streams {
        let first = stream * layout.watchers_per_stream;
        let creates = (first..first + layout.watchers_per_stream).map(|number| {
            let prefix = match layout.has_distinct_ranges {
                true => format!("/registry/idle/{number:05}/"),
                false => "/registry/idle/".to_owned(),
            };
            WatchCreateRequest {
                range_end: prefix_end(prefix.as_bytes()),
                key: prefix.into(),
                progress_notify: true,
                ..WatchCreateRequest::default()
            }
        });
        let carrier = &carriers[stream % carriers.len()];
        watchers.open(carrier, creates.collect()).await?;
    }
    // grpc-proxy does not create all that ask at once; the figures are of those that it has created.
    let all = watchers.wait_created().await;
    let created = watchers.created().max(1);
    let after = (settled_rss(pid).await?, usage::memory(target.etcd_pid)?.rss_bytes);
    let (cpu, start) = (CpuWatch::start(target)?, Instant::now());
    tokio::time::sleep(IDLE).await;
    let mut outcome = watchers.finish(start).await?;
    if let Err(error) = all {
        outcome.errors += 1;
        outcome.first_error.get_or_insert(format!("{error:#}"));
    }
    let mut block = cpu.finish(&outcome)?;
    let each = |before: u64, after: u64| after.saturating_sub(before) as f64 / created as f64;
    block.extra = BTreeMap::from([
        ("target_bytes", each(before.0, after.0)),
        ("etcd_bytes", each(before.1, after.1)),
    ]);
    Ok(block)
}

/// P26: progress requests on one stream of a quiet store, one after another. grpc-proxy does not answer them.
pub(crate) async fn p26(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let mut series = Series::new();
    for _ in 0..rounds {
        for target in watched(setup) {
            if target.kind != Kind::GrpcProxy {
                let block = request_progress(&target).await?;
                series.entry(target.kind).or_default().push(block);
            }
        }
    }
    let row = |what: &str, of: fn(&Block) -> f64, checks: &[Check]| {
        let what = format!("progress request, {what}");
        Row::of_series("P26", what, Unit::Nanoseconds, &series, of, checks)
    };
    Ok(vec![
        row("p50", Block::p50_ns, &[Check::AtMost(1e6)]).with_series(series.clone()),
        row("p99", Block::p99_ns, &[]),
    ])
}

async fn request_progress(target: &Target) -> Result<Block> {
    let carrier = connections(target, 1).await?.pop().context("one connection")?;
    let (mut send, response) = carrier.start(Method::Watch).await?;
    let create = WatchCreateRequest {
        key: b"/registry/quiet/".to_vec(),
        range_end: b"/registry/quiet0".to_vec(),
        ..WatchCreateRequest::default()
    };
    send.send_data(create_frame(create), false)?;
    let mut stream = Stream::new(send, response.await?.into_body());
    stream.next().await?.context("the watcher is created")?;
    let request = wire::frame(&WatchRequest {
        progress_request: Some(WatchProgressRequest {}),
        ..WatchRequest::default()
    });
    let (cpu, start) = (CpuWatch::start(target)?, Instant::now());
    let mut outcome = Outcome::default();
    for _ in 0..REQUESTS {
        let begin = Instant::now();
        stream.send.send_data(request.clone(), false)?;
        let answer = tokio::time::timeout(ANSWER, stream.next()).await;
        let result = match answer {
            Ok(message) => Ok(message?.map_or(0, |message| message.len() as u64)),
            Err(_) => Err(format!("no progress within {ANSWER:?}")),
        };
        outcome.count(begin.elapsed(), result);
    }
    outcome.elapsed = start.elapsed();
    outcome.latencies_ns.sort_unstable();
    cpu.finish(&outcome)
}
