//! P5 to P7: linearizable reads of single keys.

use std::time::Duration;

use anyhow::Result;

use crate::dataset::Dataset;
use crate::load::Shape;
use crate::measure::{BLOCK, Block, interleave};
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup};

/// Short calls vary more, so they are driven for longer.
const LONG_BLOCK: Duration = Duration::from_millis(1500);

/// P5, and its part of P7: 64 in flight on one connection and on eight.
pub(crate) async fn p5(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for connections in [1, 8] {
        let shape = Shape {
            connections,
            in_flight: 64,
            duration: LONG_BLOCK,
            min_calls: 1,
        };
        let series = interleave(setup, shape, data.gets(), rounds).await?;
        let plural = if connections == 1 { "" } else { "s" };
        let rate = Row::of_series(
            "P5",
            format!("GET, 64 in flight on {connections} connection{plural}"),
            Unit::PerSecond,
            &series,
            Block::rate,
            &[Check::TimesDirect(1.6), Check::TimesProxy(4.5)],
        );
        let mut etcd_cpu = Row::of_series(
            "P7",
            format!("etcd's CPU per GET, 64 on {connections} connection{plural}"),
            Unit::Nanoseconds,
            &series,
            Block::etcd_cpu_per_call_ns,
            &[Check::TimesDirect(9.0)],
        );
        etcd_cpu.figures.remove(&Kind::Floor);
        rows.push(rate.with_series(series));
        rows.push(etcd_cpu);
    }
    Ok(rows)
}

/// P6: sequential reads.
pub(crate) async fn p6(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let shape = Shape {
        connections: 1,
        in_flight: 1,
        duration: BLOCK,
        min_calls: 1,
    };
    let series = interleave(setup, shape, data.gets(), rounds).await?;
    let row = Row::of_series(
        "P6",
        "GET, sequential, p50",
        Unit::Nanoseconds,
        &series,
        Block::p50_ns,
        // 350 µs where etcd takes 238 µs, and 0.65 of grpc-proxy's time.
        &[Check::TimesDirect(238.0 / 350.0), Check::TimesProxy(1.0 / 0.65)],
    );
    Ok(vec![row.with_series(series)])
}
