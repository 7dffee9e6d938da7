//! Drives one target in a closed loop: a number of calls in flight over a number of connections, for a duration.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use bytes::Bytes;

use crate::client::{Connection, Method};

/// A load fails if no call completes within this time.
const BLOCK_DEADLINE: Duration = Duration::from_secs(120);
/// Errors after which a worker stops.
const ERRORS_PER_WORKER: u64 = 100;

/// Encoded call, with the size of its expected response.
#[derive(Clone, Debug)]
pub(crate) struct Op {
    /// Method to call.
    pub(crate) method: Method,
    /// The request with its gRPC prefix.
    pub(crate) body: Bytes,
    /// Size of the expected response, once [`learn`] has measured it on etcd.
    pub(crate) expected_bytes: Option<u64>,
}

impl Op {
    /// A Range.
    pub(crate) fn range(request: &etcd_wire::etcdserverpb::RangeRequest) -> Self {
        Op {
            method: Method::Range,
            body: crate::wire::frame(request),
            expected_bytes: None,
        }
    }
}

/// Parameters of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Connections, among which the calls are spread.
    pub(crate) connections: usize,
    /// Calls in flight, over all connections.
    pub(crate) in_flight: usize,
    /// Duration during which calls are started.
    pub(crate) duration: Duration,
    /// Calls per worker that are made even after the duration.
    pub(crate) min_calls: usize,
}

/// Result of a load.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Successful calls with the expected size.
    pub(crate) calls: u64,
    /// Bytes of responses.
    pub(crate) bytes: u64,
    /// Calls that failed, or whose response has another size than etcd's.
    pub(crate) errors: u64,
    /// Message of the first error.
    pub(crate) first_error: Option<String>,
    /// Time from the first call to the last response.
    pub(crate) elapsed: Duration,
    /// Latency of every successful call, in nanoseconds, sorted.
    pub(crate) latencies_ns: Vec<u64>,
}

impl Outcome {
    /// Latency percentile, in nanoseconds.
    pub(crate) fn percentile_ns(&self, share: f64) -> u64 {
        percentile(&self.latencies_ns, share)
    }

    /// Adds the outcome of another worker.
    pub(crate) fn merge(&mut self, other: Outcome) {
        self.calls += other.calls;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
        self.elapsed = self.elapsed.max(other.elapsed);
        self.latencies_ns.extend(other.latencies_ns);
    }

    /// Counts one completed call.
    pub(crate) fn count(&mut self, latency: Duration, result: Result<u64, String>) {
        match result {
            Ok(bytes) => {
                self.calls += 1;
                self.bytes += bytes;
                self.latencies_ns.push(nanoseconds(latency));
            }
            Err(error) => {
                self.errors += 1;
                self.first_error.get_or_insert(error);
            }
        }
    }
}

/// A duration in whole nanoseconds.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Percentile of sorted numbers, by nearest rank.
pub(crate) fn percentile(sorted: &[u64], share: f64) -> u64 {
    #[allow(
        clippy::cast_possible_truncation,
        reason = "an index below the length of the slice"
    )]
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

/// Measures the size of each response on etcd itself, to check all other responses.
pub(crate) async fn learn(etcd: &Connection, ops: &mut [Op]) -> Result<()> {
    for chunk in ops.chunks_mut(64) {
        let calls = chunk.iter().map(|op| etcd.call(op.method, op.body.clone()));
        let sizes = futures_util::future::join_all(calls).await;
        for (op, size) in chunk.iter_mut().zip(sizes) {
            op.expected_bytes = Some(size?);
        }
    }
    Ok(())
}

/// Makes one call and checks the size of its response.
pub(crate) async fn checked_call(connection: &Connection, op: &Op) -> Result<u64, String> {
    match connection.call(op.method, op.body.clone()).await {
        Ok(bytes) => match op.expected_bytes {
            Some(expected) if expected != bytes => {
                Err(format!("a response of {bytes} bytes; etcd's has {expected}"))
            }
            _ => Ok(bytes),
        },
        Err(error) => Err(error.to_string()),
    }
}

/// Drives a target in a closed loop: each worker sends its next call after the response to the last.
pub(crate) async fn closed_loop(
    connections: &[Arc<Connection>],
    shape: Shape,
    ops: &Arc<Vec<Op>>,
) -> Result<Outcome> {
    if connections.is_empty() || ops.is_empty() {
        bail!("a load needs connections and calls");
    }
    let start = Instant::now();
    let deadline = start + shape.duration;
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..shape.in_flight {
        let connection = connections[worker % connections.len()].clone();
        let ops = ops.clone();
        workers.spawn(async move {
            let mut outcome = Outcome::default();
            // Workers start at different calls and advance at the same rate, so that their requests differ.
            let mut next = worker * ops.len() / shape.in_flight;
            let mut calls = 0;
            while outcome.errors < ERRORS_PER_WORKER && (calls < shape.min_calls || Instant::now() < deadline)
            {
                let begin = Instant::now();
                let result = checked_call(&connection, &ops[next % ops.len()]).await;
                outcome.count(begin.elapsed(), result);
                next += 1;
                calls += 1;
            }
            outcome.elapsed = start.elapsed();
            outcome
        });
    }
    let mut sum = Outcome::default();
    let all = async {
        while let Some(outcome) = workers.join_next().await {
            sum.merge(outcome?);
        }
        Ok::<_, tokio::task::JoinError>(())
    };
    // After a timeout the set is dropped at the end of this function, which stops the workers.
    match tokio::time::timeout(shape.duration + BLOCK_DEADLINE, all).await {
        Ok(joined) => joined?,
        Err(_) => {
            sum.errors += 1;
            sum.first_error
                .get_or_insert(format!("no response within {BLOCK_DEADLINE:?}"));
        }
    }
    sum.latencies_ns.sort_unstable();
    Ok(sum)
}
