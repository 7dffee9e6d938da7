//! Drives the targets in turn, round after round, so that what disturbs the machine disturbs them all alike.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use crate::client::Connection;
use crate::load::{self, Op, Outcome, Shape};
use crate::targets::{Kind, Setup, Target, connections};
use crate::usage::CpuSample;

/// How long a target is driven per round.
pub(crate) const BLOCK: Duration = Duration::from_millis(1000);

/// The share of a block's Ranges that rangecache says it answered from memory.
pub(crate) const FROM_MEMORY: &str = "from_memory";

/// What one target did in one round.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Calls answered as they should be.
    pub(crate) calls: u64,
    /// Bytes of answers.
    pub(crate) bytes: u64,
    /// Calls that were not.
    pub(crate) errors: u64,
    /// What the first of them said.
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
    /// What only one case knows, by name.
    pub(crate) extra: BTreeMap<&'static str, f64>,
}

impl Block {
    /// A block that brought nothing but this error.
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
        }
    }

    /// The median latency in nanoseconds.
    pub(crate) fn p50_ns(&self) -> f64 {
        self.percentiles_ns[0]
    }

    /// Calls per second.
    pub(crate) fn rate(&self) -> f64 {
        self.calls as f64 / self.seconds
    }

    /// Bytes of answers per second.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// CPU nanoseconds of etcd per call.
    pub(crate) fn etcd_cpu_per_call_ns(&self) -> f64 {
        self.cpu_etcd_ns as f64 / self.calls as f64
    }

    /// CPU nanoseconds of etcd and of what stands before it, per call.
    pub(crate) fn server_cpu_per_call_ns(&self) -> f64 {
        (self.cpu_etcd_ns + self.cpu_proxy_ns) as f64 / self.calls as f64
    }
}

/// The rounds of every target.
pub(crate) type Series = BTreeMap<Kind, Vec<Block>>;

/// Reads the CPU time of all who take part.
pub(crate) struct CpuWatch {
    target: Target,
    client: CpuSample,
    proxy: Option<CpuSample>,
    etcd: CpuSample,
}

impl CpuWatch {
    /// Starts to count.
    pub(crate) fn start(target: &Target) -> Result<Self> {
        Ok(CpuWatch {
            target: *target,
            client: CpuSample::of(std::process::id())?,
            proxy: target.proxy_pid.map(CpuSample::of).transpose()?,
            etcd: CpuSample::of(target.etcd_pid)?,
        })
    }

    /// Stops to count and makes a block of it.
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
                // No call succeeded: there is no latency, least of all a short one.
                0 => f64::NAN,
                _ => outcome.percentile_ns(share) as f64,
            }),
            cpu_client_ns: now.client.since(&self.client),
            cpu_proxy_ns: proxy,
            cpu_etcd_ns: now.etcd.since(&self.etcd),
            extra: BTreeMap::new(),
        })
    }
}

/// Learns the right answers from etcd, warms every target up with each call, then drives them in turn. A target that is
/// gone counts an error and leaves the others to be measured.
pub(crate) async fn interleave(
    setup: &Setup,
    shape: Shape,
    mut ops: Vec<Op>,
    rounds: usize,
) -> Result<Series> {
    let etcd = setup.connect().await?;
    // A write answers with a revision that grows, so only reads have a size to learn.
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
            let block = drive(target, connections, shape, &ops).await;
            let block = block.unwrap_or_else(|error| Block::failed(&error));
            series.entry(target.kind).or_default().push(block);
        }
    }
    Ok(series)
}

/// Connects to a target and makes every call at least once.
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

/// One target's part of a round.
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
