//! P1 to P4: whole lists.

use anyhow::Result;

use crate::dataset::Dataset;
use crate::load::Shape;
use crate::measure::{BLOCK, Block, interleave};
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup};

const ONE_AT_A_TIME: Shape = Shape {
    connections: 1,
    in_flight: 1,
    duration: BLOCK,
    min_calls: 3,
};
const FOUR_CLIENTS: Shape = Shape {
    connections: 4,
    in_flight: 4,
    duration: BLOCK,
    min_calls: 2,
};

/// P1, and its part of P7: LIST of small objects.
pub(crate) async fn p1(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let series = interleave(setup, ONE_AT_A_TIME, data.list(), rounds).await?;
    let checks = [Check::TimesDirect(10.0), Check::TimesProxy(15.0)];
    let p50 = Row::of_series(
        "P1",
        "LIST 100k × 100 B, p50",
        Unit::Nanoseconds,
        &series,
        Block::p50_ns,
        &checks,
    );
    let mut etcd_cpu = Row::of_series(
        "P7",
        "etcd's CPU per LIST",
        Unit::Nanoseconds,
        &series,
        Block::etcd_cpu_per_call_ns,
        &[Check::TimesDirect(100.0)],
    );
    etcd_cpu.figures.remove(&Kind::Floor);
    Ok(vec![p50.with_series(series), etcd_cpu])
}

/// P2: LIST of medium objects.
pub(crate) async fn p2(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let series = interleave(setup, ONE_AT_A_TIME, data.list(), rounds).await?;
    let checks = [Check::TimesDirect(3.0), Check::TimesProxy(6.0)];
    let row = Row::of_series(
        "P2",
        "LIST 20k × 1 KB, p50",
        Unit::Nanoseconds,
        &series,
        Block::p50_ns,
        &checks,
    );
    Ok(vec![row.with_series(series)])
}

/// P3: LIST of large objects, by time and by the servers' CPU.
pub(crate) async fn p3(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let series = interleave(setup, ONE_AT_A_TIME, data.list(), rounds).await?;
    let checks = [Check::TimesDirect(1.45), Check::TimesProxy(3.0)];
    let p50 = Row::of_series(
        "P3",
        "LIST 15k × 10 KB, p50",
        Unit::Nanoseconds,
        &series,
        Block::p50_ns,
        &checks,
    );
    let cpu = Row::of_series(
        "P3",
        "servers' CPU per LIST",
        Unit::Nanoseconds,
        &series,
        Block::server_cpu_per_call_ns,
        // 192 ms of etcd's against 64 ms.
        &[Check::TimesDirect(3.0)],
    );
    Ok(vec![p50.with_series(series), cpu])
}

/// P4: four clients in parallel, each with its own connection.
pub(crate) async fn p4(
    setup: &Setup,
    data: &Dataset,
    rounds: usize,
    what: &str,
    times_direct: f64,
) -> Result<Vec<Row>> {
    let series = interleave(setup, FOUR_CLIENTS, data.list(), rounds).await?;
    let row = Row::of_series(
        "P4",
        format!("4 clients LIST {what}"),
        Unit::BytesPerSecond,
        &series,
        Block::bytes_per_second,
        &[Check::TimesDirect(times_direct)],
    );
    Ok(vec![row.with_series(series)])
}
