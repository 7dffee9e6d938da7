//! The puts, and the honest reader.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use parking_lot::Mutex;
use testkit::pb::{PutRequest, PutResponse};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::shared::Shared;
use super::truth::{Mark, PREFIX, RANGES, Truth};
use crate::client::{Connection, Method, Windows};
use crate::load::{nanoseconds, percentile};
use crate::watchers::stamp;
use crate::wire;

/// Puts a second.
const PUTS_PER_SECOND: u64 = 500;
/// Keys of each range.
const KEYS: usize = 20;
/// Bytes of each value.
const VALUE_BYTES: usize = 256;
/// GETs a second of the honest reader.
const GETS_PER_SECOND: u64 = 100;
/// A call without a response for this long has failed, or its outcome is not known.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Calls of one kind that may wait at once, as during the election of a leader.
const MAX_WAITING: usize = 5_000;

/// Outcomes of puts.
#[derive(Default)]
pub(super) struct Writes {
    acknowledged: Mutex<Vec<Mark>>,
    unknown: AtomicU64,
}

impl Writes {
    /// Puts that were acknowledged, and others.
    pub(super) fn counts(&self) -> (usize, u64) {
        (
            self.acknowledged.lock().len(),
            self.unknown.load(Ordering::Relaxed),
        )
    }

    /// Acknowledged puts that are not among the events.
    pub(super) fn missing(&self, truth: &Truth) -> Vec<String> {
        let acknowledged = self.acknowledged.lock();
        let missing = acknowledged.iter().filter(|mark| !truth.has(**mark));
        missing
            .map(|mark| format!("etcd has not delivered the put at revision {}", mark.0))
            .collect()
    }
}

/// Latencies of reads through rangecache, and of a member itself.
#[derive(Default)]
pub(super) struct Latencies([Vec<u64>; 2]);

impl Latencies {
    pub(super) fn extend(&mut self, later: Latencies) {
        for (all, more) in self.0.iter_mut().zip(later.0) {
            all.extend(more);
        }
    }

    pub(super) fn p99_ms(&self) -> [f64; 2] {
        self.0.each_ref().map(|latencies_ns| {
            let mut sorted = latencies_ns.clone();
            sorted.sort_unstable();
            percentile(&sorted, 0.99) as f64 / 1e6
        })
    }
}

/// Outcomes of reads.
#[derive(Default)]
pub(super) struct Outcomes {
    /// Latencies while nothing fails.
    pub(super) calm: Latencies,
    pub(super) in_faults: Latencies,
    /// Reads that failed.
    pub(super) failed: u64,
}

/// The honest reader: the same reads of two targets.
pub(super) struct Reads(Arc<Mutex<Outcomes>>);

impl Reads {
    /// Starts reads of rangecache and of a member, in tasks.
    pub(super) async fn start(
        targets: [SocketAddr; 2],
        shared: &Arc<Shared>,
        tasks: &mut JoinSet<Result<()>>,
    ) -> Result<Reads> {
        let outcomes = Arc::default();
        for (target, address) in targets.into_iter().enumerate() {
            let reader = Connection::open(address, Windows::LARGE).await?;
            tasks.spawn(read(target, reader, shared.clone(), Arc::clone(&outcomes)));
        }
        Ok(Reads(outcomes))
    }

    /// Outcomes since the last call.
    pub(super) fn take(&self) -> Outcomes {
        std::mem::take(&mut *self.0.lock())
    }
}

fn key(number: usize) -> Vec<u8> {
    format!("{PREFIX}{:02}/{:03}", number % RANGES, number / RANGES % KEYS).into_bytes()
}

/// Puts one value and returns its revision.
async fn put(writer: &Connection, number: usize, value: Vec<u8>) -> Result<i64> {
    let request = PutRequest {
        key: key(number),
        value,
        ..PutRequest::default()
    };
    let put = writer.fetch(Method::Put, wire::frame(&request));
    let response: PutResponse = wire::unframe(&tokio::time::timeout(TIMEOUT, put).await??)?;
    Ok(response.header.map_or(0, |header| header.revision))
}

/// Writes every key once; returns the revision of the last one.
pub(super) async fn fill(writer: &Connection) -> Result<i64> {
    let mut last = 0;
    for number in 0..RANGES * KEYS {
        last = put(writer, number, vec![b'v'; VALUE_BYTES]).await?;
    }
    Ok(last)
}

/// Puts values on a schedule, until `stop` is set. Each holds the time and the number of its put.
pub(super) async fn write(
    writer: Arc<Connection>,
    shared: Arc<Shared>,
    writes: Arc<Writes>,
    stop: Arc<AtomicBool>,
) -> Result<()> {
    let mut ticks = interval(Duration::from_nanos(1_000_000_000 / PUTS_PER_SECOND));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut calls = JoinSet::new();
    for number in 0_usize.. {
        ticks.tick().await;
        while calls.try_join_next().is_some() {}
        if stop.load(Ordering::Relaxed) {
            break;
        }
        if calls.len() >= MAX_WAITING {
            continue;
        }
        let (writer, writes, epoch) = (writer.clone(), writes.clone(), shared.epoch);
        calls.spawn(async move {
            let mut value = stamp(epoch, VALUE_BYTES);
            value[8..16].copy_from_slice(&(number as u64).to_le_bytes());
            match put(&writer, number, value).await {
                Ok(revision) => writes.acknowledged.lock().push((revision, number as u64)),
                Err(_) => {
                    writes.unknown.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    calls.join_all().await;
    Ok(())
}

/// Sends linearizable GETs on a schedule. Latency counts from the time at which a GET was due.
async fn read(
    target: usize,
    reader: Connection,
    shared: Arc<Shared>,
    outcomes: Arc<Mutex<Outcomes>>,
) -> Result<()> {
    let reader = Arc::new(reader);
    let mut ticks = interval(Duration::from_nanos(1_000_000_000 / GETS_PER_SECOND));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut calls = JoinSet::new();
    for number in 0_usize.. {
        let due: Instant = ticks.tick().await;
        while calls.try_join_next().is_some() {}
        if calls.len() >= MAX_WAITING {
            continue;
        }
        let (reader, shared, outcomes) = (reader.clone(), shared.clone(), outcomes.clone());
        calls.spawn(async move {
            let key = String::from_utf8_lossy(&key(number)).into_owned();
            let body = wire::frame(&wire::get_request(key));
            let was_in_fault = shared.in_fault.load(Ordering::Relaxed);
            let response = tokio::time::timeout(TIMEOUT, reader.call(Method::Range, body)).await;
            let is_in_fault = was_in_fault || shared.in_fault.load(Ordering::Relaxed);
            let latency_ns = nanoseconds(due.elapsed());
            let mut outcomes = outcomes.lock();
            match response {
                Ok(Ok(_)) if is_in_fault => outcomes.in_faults.0[target].push(latency_ns),
                Ok(Ok(_)) => outcomes.calm.0[target].push(latency_ns),
                _ => outcomes.failed += 1,
            }
        });
    }
    Ok(())
}
