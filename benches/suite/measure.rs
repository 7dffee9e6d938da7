//! Drives the targets in turns, round by round, so that disturbances of the machine affect all of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use crate::beside::Beside;
use crate::client::Connection;
use crate::load::{self, Op, Outcome, Shape};
use crate::targets::{Kind, Setup, Target, connections};
use crate::usage::CpuSample;

/// Duration per target and round.
pub(crate) const BLOCK: Duration = Duration::from_millis(1000);

/// Name of the share of a block's Range calls that rangecache answered from memory.
pub(crate) const FROM_MEMORY: &str = "from_memory";

/// Result of one target in one round.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Successful calls with the expected size.
    pub(crate) calls: u64,
    /// Bytes of responses.
    pub(crate) bytes: u64,
    /// Failed calls.
    pub(crate) errors: u64,
    /// Message of the first failure.
    pub(crate) first_error: Option<String>,
    /// Wall-clock seconds.
    pub(crate) seconds: f64,
    /// Latencies in nanoseconds: median, 99th and 99.9th percentile.
    pub(crate) percentiles_ns: [f64; 3],
    /// CPU nanoseconds of the client.
    pub(crate) cpu_client_ns: u64,
    /// CPU nanoseconds of the process in front of etcd.
    pub(crate) cpu_proxy_ns: u64,
    /// CPU nanoseconds of etcd.
    pub(crate) cpu_etcd_ns: u64,
    /// Figures specific to one case, by name.
    pub(crate) extra: BTreeMap<&'static str, f64>,
    /// Result with watchers open next to the load.
    pub(crate) beside: Option<Box<Block>>,
}

impl Block {
    /// A block with an error and no figures.
    fn failed(error: &anyhow::Error) -> Block {
        Block {
            calls: 0,
            bytes: 0,
            errors: 1,
            first_error: Some(format!("{error:#}")),
            seconds: 0.0,
            percentiles_ns: [f64::NAN; 3],
            cpu_client_ns: 0,
            cpu_proxy_ns: 0,
            cpu_etcd_ns: 0,
            extra: BTreeMap::new(),
            beside: None,
        }
    }

    /// Whether a call failed, without watchers or beside them.
    pub(crate) fn has_failed(&self) -> bool {
        self.errors > 0 || self.beside.as_ref().is_some_and(|beside| beside.has_failed())
    }

    /// Median latency, in nanoseconds.
    pub(crate) fn p50_ns(&self) -> f64 {
        self.percentiles_ns[0]
    }

    /// 99th percentile of the latency, in nanoseconds.
    pub(crate) fn p99_ns(&self) -> f64 {
        self.percentiles_ns[1]
    }

    /// Calls per second.
    pub(crate) fn rate(&self) -> f64 {
        self.calls as f64 / self.seconds
    }

    /// Bytes of responses per second.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// CPU nanoseconds of etcd per call.
    pub(crate) fn etcd_cpu_per_call_ns(&self) -> f64 {
        self.cpu_etcd_ns as f64 / self.calls as f64
    }

    /// CPU nanoseconds of etcd and of the proxy in front of it, per call.
    pub(crate) fn server_cpu_per_call_ns(&self) -> f64 {
        (self.cpu_etcd_ns + self.cpu_proxy_ns) as f64 / self.calls as f64
    }
}

/// Rounds of every target.
pub(crate) type Series = BTreeMap<Kind, Vec<Block>>;

/// CPU times of client, proxy and etcd.
pub(crate) struct CpuWatch {
    target: Target,
    client: CpuSample,
    proxy: Option<CpuSample>,
    etcd: CpuSample,
}

impl CpuWatch {
    /// Starts the measurement.
    pub(crate) fn start(target: &Target) -> Result<Self> {
        Ok(CpuWatch {
            target: *target,
            client: CpuSample::of(std::process::id())?,
            proxy: target.proxy_pid.map(CpuSample::of).transpose()?,
            etcd: CpuSample::of(target.etcd_pid)?,
        })
    }

    /// Ends the measurement, and returns the block.
    pub(crate) fn finish(self, outcome: &Outcome) -> Result<Block> {
        let now = CpuWatch::start(&self.target)?;
        let proxy = now
            .proxy
            .zip(self.proxy)
            .map_or(0, |(now, before)| now.since(&before));
        Ok(Block {
            calls: outcome.calls,
            bytes: outcome.bytes,
            errors: outcome.errors,
            first_error: outcome.first_error.clone(),
            seconds: outcome.elapsed.as_secs_f64(),
            percentiles_ns: [0.5, 0.99, 0.999].map(|share| match outcome.calls {
                // No call succeeded: there is no latency, and zero would look good.
                0 => f64::NAN,
                _ => outcome.percentile_ns(share) as f64,
            }),
            cpu_client_ns: now.client.since(&self.client),
            cpu_proxy_ns: proxy,
            cpu_etcd_ns: now.etcd.since(&self.etcd),
            extra: BTreeMap::new(),
            beside: None,
        })
    }
}

/// Measures the expected responses on etcd, warms up every target with each call, then drives the targets in turns. A
/// target that fails counts an error, and the others are still measured.
pub(crate) async fn interleave(
    setup: &Setup,
    shape: Shape,
    mut ops: Vec<Op>,
    rounds: usize,
) -> Result<Series> {
    let etcd = setup.connect().await?;
    // Responses to writes carry a growing revision: only reads have a fixed size.
    if ops.iter().all(|op| op.method == crate::client::Method::Range) {
        load::learn(&etcd, &mut ops).await?;
    }
    let ops = Arc::new(ops);
    let mut series = Series::new();
    let mut driven = Vec::new();
    for target in setup.targets() {
        match warm_up(&target, shape, &ops).await {
            Ok(connections) => driven.push((target, connections)),
            Err(error) => series.entry(target.kind).or_default().push(Block::failed(&error)),
        }
    }
    for _ in 0..rounds {
        for (target, connections) in &driven {
            let drive = async || drive(target, connections, shape, &ops).await;
            let block = with_and_without(setup.watchers_beside, target, drive).await;
            let block = block.unwrap_or_else(|error| Block::failed(&error));
            series.entry(target.kind).or_default().push(block);
        }
    }
    Ok(series)
}

/// Measures a target, and again with this number of watchers open beside the load, unless it is 0.
pub(crate) async fn with_and_without(
    watchers: usize,
    target: &Target,
    measure: impl AsyncFn() -> Result<Block>,
) -> Result<Block> {
    let mut block = measure().await?;
    // The replay server does not watch.
    if watchers > 0 && target.kind != Kind::Floor {
        let _beside = Beside::open(target, watchers).await?;
        block.beside = Some(Box::new(measure().await?));
    }
    Ok(block)
}

/// Connects to a target, and makes every call at least once.
async fn warm_up(target: &Target, shape: Shape, ops: &Arc<Vec<Op>>) -> Result<Vec<Arc<Connection>>> {
    let connections = connections(target, shape.connections).await?;
    let min_calls = ops.len().div_ceil(shape.in_flight).max(2);
    load::closed_loop(
        &connections,
        Shape {
            duration: Duration::ZERO,
            min_calls,
            ..shape
        },
        ops,
    )
    .await?;
    Ok(connections)
}

/// Drives one target for its part of a round.
async fn drive(
    target: &Target,
    connections: &[Arc<Connection>],
    shape: Shape,
    ops: &Arc<Vec<Op>>,
) -> Result<Block> {
    let answered_before = target.range_outcomes().await?;
    let cpu = CpuWatch::start(target)?;
    let outcome = load::closed_loop(connections, shape, ops).await?;
    let mut block = cpu.finish(&outcome)?;
    if let Some((before, now)) = answered_before.zip(target.range_outcomes().await?) {
        let share = (now.from_memory - before.from_memory) / (now.all - before.all);
        block.extra.insert(FROM_MEMORY, share);
    }
    Ok(block)
}
