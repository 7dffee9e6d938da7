//! The puts, and the honest reader.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use parking_lot::Mutex;
use testkit::pb::{PutRequest, PutResponse};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::Shared;
use super::truth::{Mark, PREFIX, RANGES, Truth};
use crate::client::{Connection, Method};
use crate::load::nanoseconds;
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

/// Outcomes of reads since they were taken.
#[derive(Default)]
pub(super) struct Reads {
    latencies_ns: Mutex<Vec<u64>>,
    in_faults_ns: Mutex<Vec<u64>>,
    failed: AtomicU64,
}

impl Reads {
    /// Latencies while nothing fails, those during faults, and failures.
    pub(super) fn take(&self) -> (Vec<u64>, Vec<u64>, u64) {
        (
            std::mem::take(&mut *self.latencies_ns.lock()),
            std::mem::take(&mut *self.in_faults_ns.lock()),
            self.failed.swap(0, Ordering::Relaxed),
        )
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
pub(super) async fn read(reader: Connection, shared: Arc<Shared>, reads: Arc<Reads>) -> Result<()> {
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
        let (reader, shared, reads) = (reader.clone(), shared.clone(), reads.clone());
        calls.spawn(async move {
            let key = String::from_utf8_lossy(&key(number)).into_owned();
            let body = wire::frame(&wire::get_request(key));
            let was_in_fault = shared.in_fault.load(Ordering::Relaxed);
            let response = tokio::time::timeout(TIMEOUT, reader.call(Method::Range, body)).await;
            let is_in_fault = was_in_fault || shared.in_fault.load(Ordering::Relaxed);
            let latency_ns = nanoseconds(due.elapsed());
            match response {
                Ok(Ok(_)) if is_in_fault => reads.in_faults_ns.lock().push(latency_ns),
                Ok(Ok(_)) => reads.latencies_ns.lock().push(latency_ns),
                _ => {
                    reads.failed.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    Ok(())
}
