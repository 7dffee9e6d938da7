//! STREAMS: a whole list by RangeStream from memory, compared with etcd's own. grpc-proxy has no RangeStream, and the
//! floor cannot replay one.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use bytes::Bytes;

use crate::client::{Connection, Method, Windows};
use crate::dataset::Dataset;
use crate::load::{Outcome, nanoseconds};
use crate::measure::{Block, CpuWatch, FROM_MEMORY, Series};
use crate::report::{Row, Unit};
use crate::targets::{Kind, Setup, Target};
use crate::wire::{frame, prefix_request};

/// Streams per block: a single time to first byte varies too much.
const STREAMS: u64 = 3;
const FIRST_BYTE: &str = "first_byte_ns";

/// Time to first byte, and bytes per second.
pub(crate) async fn run(setup: &Setup, data: &Dataset, rounds: usize, what: &str) -> Result<Vec<Row>> {
    let request = frame(&prefix_request(data.prefix));
    let mut driven: Vec<(Target, Arc<Connection>)> = Vec::new();
    for target in setup.targets() {
        if matches!(target.kind, Kind::Direct | Kind::Rangecache) {
            let connection = Connection::open(target.address, Windows::LARGE).await?;
            driven.push((target, Arc::new(connection)));
        }
    }
    let expected_bytes = setup
        .connect()
        .await?
        .call(Method::RangeStream, request.clone())
        .await?;
    let mut series = Series::new();
    for _ in 0..rounds {
        for (target, connection) in &driven {
            let block = block(target, connection, &request, expected_bytes).await?;
            series.entry(target.kind).or_default().push(block);
        }
    }
    let first_byte = |block: &Block| block.extra.get(FIRST_BYTE).copied().unwrap_or(f64::NAN);
    let rate = Row::of_series(
        "STREAMS",
        format!("RangeStream of {what}"),
        Unit::BytesPerSecond,
        &series,
        Block::bytes_per_second,
        &[],
    );
    let first_byte = Row::of_series(
        "STREAMS",
        "the same: time to first byte",
        Unit::Nanoseconds,
        &series,
        first_byte,
        &[],
    );
    Ok(vec![rate.with_series(series), first_byte])
}

async fn block(
    target: &Target,
    connection: &Connection,
    request: &Bytes,
    expected_bytes: u64,
) -> Result<Block> {
    let answered_before = target.range_outcomes().await?;
    let cpu = CpuWatch::start(target)?;
    let began = Instant::now();
    let (mut outcome, mut first_bytes) = (Outcome::default(), Vec::new());
    for _ in 0..STREAMS {
        let (sent, mut first_byte, mut bytes) = (Instant::now(), None, 0);
        let read = connection
            .exchange(Method::RangeStream, request.clone(), |piece| {
                first_byte.get_or_insert_with(|| sent.elapsed());
                bytes += piece.len() as u64;
            })
            .await;
        let result = match read {
            // The layout of chunks is no contract, but the overhead of chunks is negligible.
            Ok(()) if bytes.abs_diff(expected_bytes) * 1000 > expected_bytes => {
                Err(format!("a stream of {bytes} bytes; etcd's has {expected_bytes}"))
            }
            Ok(()) => Ok(bytes),
            Err(error) => Err(error.to_string()),
        };
        outcome.count(sent.elapsed(), result);
        first_bytes.extend(first_byte.map(nanoseconds));
    }
    outcome.elapsed = began.elapsed();
    outcome.latencies_ns.sort_unstable();
    first_bytes.sort_unstable();
    let mut block = cpu.finish(&outcome)?;
    if let Some((before, now)) = answered_before.zip(target.range_outcomes().await?) {
        let share = (now.from_memory - before.from_memory) / (now.all - before.all);
        block.extra.insert(FROM_MEMORY, share);
    }
    if let Some(median) = first_bytes.get(first_bytes.len() / 2) {
        block.extra.insert(FIRST_BYTE, *median as f64);
    }
    Ok(block)
}
