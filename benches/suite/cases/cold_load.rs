//! P11: load time of a large mirror while etcd is idle, and while it has another client, whose latency is measured.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::dataset::Dataset;
use crate::load::{self, Outcome};
use crate::measure::{CpuWatch, Series};
use crate::open_loop::open_loop;
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup, connections};

/// Reads of other clients.
const GETS_PER_SECOND: u32 = 1000;
/// Length of a measurement of the other clients, before the load and repeatedly during it.
const WINDOW: Duration = Duration::from_millis(2500);

/// P11 with a store of 1.5 GB: the loads next to which nothing else reads or writes, and those with another client.
pub(crate) async fn large(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let mut seconds = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        let process = setup.start_rangecache(&[]).await?;
        seconds.push(start.elapsed().as_secs_f64() * 1e9);
        drop(process);
    }
    let size_gb = data.keys as f64 * data.value_bytes as f64 / 1e9;
    let idle = Row::of_figures(
        "P11",
        format!("cold load of {size_gb:.1} GB, start to ready, etcd idle"),
        Unit::Nanoseconds,
        [(Kind::Rangecache, seconds)],
        &[Check::AtMost(3.5e9)],
    );
    let mut rows = vec![idle];
    rows.extend(with_others(setup, data, rounds, "1.5 GB of 10 KB objects").await?);
    Ok(rows)
}

/// Loads while another client reads from etcd. Each round starts a fresh rangecache.
pub(crate) async fn with_others(
    setup: &Setup,
    data: &Dataset,
    rounds: usize,
    what: &str,
) -> Result<Vec<Row>> {
    let targets = setup.targets();
    let direct = targets[0];
    let connection = connections(&direct, 1).await?.remove(0);
    let mut gets = data.gets();
    load::learn(&connection, &mut gets).await?;
    let gets = Arc::new(gets);
    let others = |duration| {
        let (connection, gets) = (connection.clone(), gets.clone());
        open_loop(GETS_PER_SECOND, duration, move |number| {
            let (connection, gets) = (connection.clone(), gets.clone());
            async move { load::checked_call(&connection, &gets[number % gets.len()]).await }
        })
    };
    let (mut seconds, mut factors) = (Vec::new(), Vec::new());
    let mut series = Series::new();
    for _ in 0..rounds {
        let before = others(WINDOW).await?;
        let cpu = CpuWatch::start(&direct)?;
        let start = Instant::now();
        let load = async {
            let mut process = setup.launch_rangecache(&[]).await?;
            process.wait_ready().await?;
            Ok::<_, anyhow::Error>((start.elapsed(), process))
        };
        tokio::pin!(load);
        let mut during = Outcome::default();
        // Measurements follow each other until the mirror is warm; the last may exceed it, by less than its length.
        let (elapsed, process) = loop {
            let slice = others(Duration::from_millis(250));
            tokio::pin!(slice);
            tokio::select! {
                outcome = &mut slice => during.merge(outcome?),
                loaded = &mut load => {
                    during.merge(slice.await?);
                    break loaded?;
                }
            }
        };
        drop(process);
        during.latencies_ns.sort_unstable();
        seconds.push(elapsed.as_secs_f64() * 1e9);
        factors.push(during.percentile_ns(0.99) as f64 / before.percentile_ns(0.99) as f64);
        let mut block = cpu.finish(&during)?;
        block.extra.insert("load_seconds", elapsed.as_secs_f64());
        block
            .extra
            .insert("get_p99_before_ns", before.percentile_ns(0.99) as f64);
        block
            .extra
            .insert("get_p99_during_ns", during.percentile_ns(0.99) as f64);
        series.entry(Kind::Direct).or_default().push(block);
    }
    let load = Row::of_figures(
        "P11",
        format!("cold load of {what}, others read from etcd"),
        Unit::Nanoseconds,
        [(Kind::Rangecache, seconds)],
        &[],
    );
    let p99 = Row::of_figures(
        "P11",
        format!("{what}: others' GET p99 on etcd, against before"),
        Unit::Factor,
        [(Kind::Rangecache, factors)],
        &[Check::AtMost(3.0)],
    );
    Ok(vec![load, p99.with_series(series)])
}
