//! P13: writes, which are forwarded.

use anyhow::Result;

use crate::client::Method;
use crate::load::{Op, Shape};
use crate::measure::{BLOCK, Block, interleave};
use crate::report::{Check, Row, Unit};
use crate::targets::Setup;
use crate::wire;
use testkit::pb::PutRequest;

/// Keys that are written repeatedly.
const KEYS: usize = 1000;

/// P13: sequential PUTs, and 64 in flight. The floor replays a response and writes nothing.
pub(crate) async fn p13(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let puts = || {
        (0..KEYS)
            .map(|number| put(&format!("/registry/leases/object-{number:07}"), 100))
            .collect()
    };
    let one = Shape {
        connections: 1,
        in_flight: 1,
        duration: BLOCK,
        min_calls: 1,
    };
    let series = interleave(setup, one, puts(), rounds).await?;
    let p50 = Row::of_series(
        "P13",
        "PUT, sequential, p50",
        Unit::Nanoseconds,
        &series,
        Block::p50_ns,
        &[Check::AtMostAboveDirect(110_000.0)],
    )
    .with_series(series);
    let many = Shape { in_flight: 64, ..one };
    let series = interleave(setup, many, puts(), rounds).await?;
    let rate = Row::of_series(
        "P13",
        "PUT, 64 in flight",
        Unit::PerSecond,
        &series,
        Block::rate,
        &[Check::TimesDirect(0.7)],
    )
    .with_series(series);
    Ok(vec![p50, rate])
}

/// A put of this key, with a value of this size.
pub(crate) fn put(key: &str, value_bytes: usize) -> Op {
    let request = PutRequest {
        key: key.into(),
        value: vec![b'v'; value_bytes],
        ..PutRequest::default()
    };
    Op {
        method: Method::Put,
        body: wire::frame(&request),
        expected_bytes: None,
    }
}
