//! P10, P21, P24, P25 and P27: events delivered to many watchers, and to one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use testkit::pb::{PutRequest, WatchCreateRequest, prefix_end};

use crate::client::{Connection, Method};
use crate::http1;
use crate::load::{self, Op, Outcome};
use crate::measure::{Block, CpuWatch, Series};
use crate::open_loop::open_loop;
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup, Target, connections};
use crate::watchers::{Watchers, stamp};
use crate::wire;

/// Time for deliveries after the last put.
const LAST_DELIVERIES: Duration = Duration::from_secs(60);
/// Keys of each prefix that are written repeatedly.
const KEYS: usize = 100;

/// Watchers on some prefixes, and puts to these.
#[derive(Clone, Copy)]
struct Fanout {
    connections: usize,
    prefixes: usize,
    watchers_per_prefix: usize,
    prev_kv: bool,
    value_bytes: usize,
    puts_per_second: u32,
    duration: Duration,
}

impl Fanout {
    fn create(&self, number: usize) -> WatchCreateRequest {
        let prefix = prefix(number % self.prefixes);
        WatchCreateRequest {
            range_end: prefix_end(prefix.as_bytes()),
            key: prefix.into(),
            prev_kv: self.prev_kv,
            ..WatchCreateRequest::default()
        }
    }
}

fn prefix(number: usize) -> String {
    format!("/registry/watched-{number:02}/")
}

/// The targets of a round, without the floor, which does not watch.
pub(super) fn watched(setup: &Setup) -> Vec<Target> {
    let targets = setup.targets().into_iter();
    targets.filter(|target| target.kind != Kind::Floor).collect()
}

/// Watchers and puts of P10 and P27.
const P10: Fanout = Fanout {
    connections: 8,
    prefixes: 1,
    watchers_per_prefix: 500,
    prev_kv: false,
    value_bytes: 256,
    puts_per_second: 200,
    duration: Duration::from_secs(3),
};

/// P10: 500 watchers of one prefix on 8 connections.
pub(crate) async fn p10(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let series = fan_out(setup, P10, rounds).await?;
    let what = "500 watchers, 200 puts/s";
    let row = |figure: &str, unit, of: fn(&Block) -> f64, checks: &[Check]| {
        Row::of_series("P10", format!("{what}: {figure}"), unit, &series, of, checks)
    };
    let own = |block: &Block| block.cpu_proxy_ns as f64 / block.calls as f64;
    let etcd = Block::etcd_cpu_per_call_ns;
    Ok(vec![
        row(
            "servers' CPU per delivery",
            Unit::Nanoseconds,
            Block::server_cpu_per_call_ns,
            &[Check::AtMost(3_100.0)],
        )
        .with_series(series.clone()),
        row("CPU of the proxy per delivery", Unit::Nanoseconds, own, &[]),
        row(
            "etcd's CPU per delivery",
            Unit::Nanoseconds,
            etcd,
            &[Check::AtMost(100.0)],
        ),
        row("delivery p50", Unit::Nanoseconds, Block::p50_ns, &[]),
        row(
            "delivery p99",
            Unit::Nanoseconds,
            Block::p99_ns,
            &[Check::TimesDirect(2.0), Check::TimesProxy(2.0)],
        ),
    ])
}

/// P27: the watchers of P10 at a rangecache that leaves every watch to etcd.
pub(crate) async fn p27(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let relaying = setup.start_rangecache(&["--watch-cache=off"]).await?;
    let mut targets = watched(setup);
    for target in &mut targets {
        if target.kind == Kind::Rangecache {
            target.address = relaying.address;
            target.proxy_pid = Some(relaying.pid());
        }
    }
    let series = fan_out_to(setup, &targets, P10, rounds).await?;
    let what = "500 watchers left to etcd, 200 puts/s";
    let row = |figure: &str, of: fn(&Block) -> f64, checks: &[Check]| {
        let what = format!("{what}: {figure}");
        Row::of_series("P27", what, Unit::Nanoseconds, &series, of, checks)
    };
    let own = |block: &Block| block.cpu_proxy_ns as f64 / block.calls as f64;
    Ok(vec![
        row("delivery p99", Block::p99_ns, &[Check::TimesDirect(1.0 / 1.5)]).with_series(series.clone()),
        row("delivery p50", Block::p50_ns, &[]),
        row("CPU of the proxy per delivery", own, &[]),
    ])
}

/// P21: 1,000 watchers of one prefix, on 16 connections and on a connection each; one watcher for comparison.
pub(crate) async fn p21(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let many = Fanout {
        connections: 16,
        prefixes: 1,
        watchers_per_prefix: 1_000,
        prev_kv: false,
        value_bytes: 256,
        puts_per_second: 200,
        duration: Duration::from_secs(3),
    };
    let one = Fanout {
        connections: 1,
        watchers_per_prefix: 1,
        ..many
    };
    // A put that waits long delays a thousand deliveries: of 300 puts the third slowest would be the percentile.
    let slower = Fanout {
        puts_per_second: 100,
        duration: Duration::from_secs(8),
        ..many
    };
    let own_connections = Fanout {
        connections: 1_000,
        duration: many.duration,
        ..slower
    };
    let rate = |block: &Block| block.calls as f64 / block.seconds;
    let etcd = |block: &Block| block.cpu_etcd_ns as f64 / block.seconds;
    let own = |block: &Block| block.cpu_proxy_ns as f64 / block.seconds;
    let mut rows = Vec::new();
    let at_200 = fan_out(setup, many, rounds).await?;
    let row = |what: &str, unit, of: &dyn Fn(&Block) -> f64, series: &Series, checks: &[Check]| {
        Row::of_series("P21", what, unit, series, of, checks)
    };
    let what = "1,000 watchers, 200 puts/s: deliveries";
    rows.push(
        row(what, Unit::PerSecond, &rate, &at_200, &[Check::TimesDirect(3.0)]).with_series(at_200.clone()),
    );
    rows.push(row(
        "the same: CPU/s of the proxy",
        Unit::Nanoseconds,
        &own,
        &at_200,
        &[Check::AtMost(0.6e9)],
    ));
    rows.push(row(
        "the same: CPU/s of etcd",
        Unit::Nanoseconds,
        &etcd,
        &at_200,
        &[],
    ));
    let alone = fan_out(setup, one, rounds).await?;
    rows.push(row(
        "one watcher: CPU/s of etcd",
        Unit::Nanoseconds,
        &etcd,
        &alone,
        &[],
    ));
    let at_100 = fan_out(setup, slower, rounds).await?;
    let what = "1,000 watchers, 100 puts/s: delivery p99";
    rows.push(
        row(
            what,
            Unit::Nanoseconds,
            &Block::p99_ns,
            &at_100,
            &[Check::TimesDirect(2.0)],
        )
        .with_series(at_100.clone()),
    );
    let put_p99 = |block: &Block| block.extra.get(PUT_P99).copied().unwrap_or(f64::NAN);
    let what = "the same: p99 of the puts' own responses";
    rows.push(row(what, Unit::Nanoseconds, &put_p99, &at_100, &[]));
    rows.push(row(
        "the same: delivery p50",
        Unit::Nanoseconds,
        &Block::p50_ns,
        &at_100,
        &[],
    ));
    let apart = fan_out(setup, own_connections, rounds).await?;
    let what = "the same, a connection each: servers' CPU per delivery";
    let cpu = row(
        what,
        Unit::Nanoseconds,
        &Block::server_cpu_per_call_ns,
        &apart,
        &[Check::TimesDirect(1.5), Check::AtMost(8_000.0)],
    );
    rows.push(cpu.with_series(apart));
    Ok(rows)
}

/// P24: one watch of an idle store.
pub(crate) async fn p24(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let fanout = Fanout {
        connections: 1,
        prefixes: 1,
        watchers_per_prefix: 1,
        prev_kv: false,
        value_bytes: 256,
        puts_per_second: 100,
        duration: Duration::from_secs(3),
    };
    let series = fan_out(setup, fanout, rounds).await?;
    let row = |what: &str, of: fn(&Block) -> f64, above: f64| {
        let what = format!("one watch, from put to event: {what}");
        let check = [Check::AtMostAboveDirect(above)];
        Row::of_series("P24", what, Unit::Nanoseconds, &series, of, &check)
    };
    Ok(vec![
        row("p50", Block::p50_ns, 150_000.0).with_series(series.clone()),
        row("p99", Block::p99_ns, 500_000.0),
    ])
}

/// P25: what three kube-apiservers watch, with objects of 10 KB and their previous values.
pub(crate) async fn p25(setup: &Setup, rounds: usize) -> Result<Vec<Row>> {
    let fanout = Fanout {
        connections: 3,
        prefixes: 62,
        watchers_per_prefix: 3,
        prev_kv: true,
        value_bytes: 10 << 10,
        puts_per_second: 50,
        duration: Duration::from_secs(4),
    };
    let series = fan_out(setup, fanout, rounds).await?;
    let sent = |block: &Block| block.extra.get(ETCD_SENT).copied().unwrap_or(f64::NAN) / block.calls as f64;
    let what = |figure: &str| format!("62 prefixes × 3 clients, 10 KB: {figure}");
    Ok(vec![
        Row::of_series(
            "P25",
            what("bytes sent by etcd per delivery"),
            Unit::Bytes,
            &series,
            sent,
            &[Check::TimesDirect(2.8)],
        )
        .with_series(series.clone()),
        Row::of_series(
            "P25",
            what("servers' CPU per delivery"),
            Unit::Nanoseconds,
            &series,
            Block::server_cpu_per_call_ns,
            &[],
        ),
        Row::of_series(
            "P25",
            what("delivery p99"),
            Unit::Nanoseconds,
            &series,
            Block::p99_ns,
            &[],
        ),
    ])
}

/// Name of the bytes that etcd sent to gRPC clients during a block.
const ETCD_SENT: &str = "etcd_sent_bytes";
/// Name of the 99th percentile of the puts of a block, from the time at which they were due to their responses.
const PUT_P99: &str = "put_p99_ns";

async fn fan_out(setup: &Setup, fanout: Fanout, rounds: usize) -> Result<Series> {
    fan_out_to(setup, &watched(setup), fanout, rounds).await
}

async fn fan_out_to(setup: &Setup, targets: &[Target], fanout: Fanout, rounds: usize) -> Result<Series> {
    let mut series = Series::new();
    for _ in 0..rounds {
        for target in targets {
            let block = deliver(setup, target, fanout).await?;
            series.entry(target.kind).or_default().push(block);
        }
    }
    Ok(series)
}

/// Watches through one target while puts go to etcd.
async fn deliver(setup: &Setup, target: &Target, fanout: Fanout) -> Result<Block> {
    let epoch = Instant::now();
    let count = fanout.prefixes * fanout.watchers_per_prefix;
    let carriers = connections(target, fanout.connections.min(count)).await?;
    let mut watchers = Watchers::new(epoch);
    for number in 0..count {
        // Watchers of one prefix are spread over the connections.
        let carrier = &carriers[(number / fanout.prefixes) % carriers.len()];
        watchers.open(carrier, vec![fanout.create(number)]).await?;
    }
    watchers.wait_created().await?;
    let writer = setup.connect().await?;
    // The first put of each key is not measured: previous values have to exist.
    for number in 0..fanout.prefixes * KEYS {
        put(&writer, fanout, epoch, number)
            .await
            .map_err(anyhow::Error::msg)?;
    }
    let first = (fanout.prefixes * KEYS * fanout.watchers_per_prefix) as u64;
    watchers.wait_events(first, LAST_DELIVERIES).await?;
    let warm = watchers.begin();
    let sent = etcd_sent(setup).await?;
    let (cpu, start) = (CpuWatch::start(target)?, Instant::now());
    let write = move |number: usize| {
        let writer = writer.clone();
        async move { put(&writer, fanout, epoch, number).await }
    };
    let writes = open_loop(fanout.puts_per_second, fanout.duration, write).await?;
    let put_p99 = writes.percentile_ns(0.99) as f64;
    let wanted = warm + writes.calls * fanout.watchers_per_prefix as u64;
    let all = watchers.wait_events(wanted, LAST_DELIVERIES).await;
    let elapsed = start.elapsed();
    let mut outcome: Outcome = watchers.finish(start).await?;
    outcome.elapsed = elapsed;
    outcome.calls -= warm;
    outcome.errors += writes.errors;
    outcome.first_error = outcome.first_error.take().or(writes.first_error);
    if let Err(error) = all {
        outcome.errors += 1;
        outcome.first_error.get_or_insert(format!("{error:#}"));
    }
    let mut block = cpu.finish(&outcome)?;
    block.extra.insert(ETCD_SENT, etcd_sent(setup).await? - sent);
    block.extra.insert(PUT_P99, put_p99);
    Ok(block)
}

/// Puts a value that carries the time.
async fn put(writer: &Arc<Connection>, fanout: Fanout, epoch: Instant, number: usize) -> Result<u64, String> {
    let key = format!(
        "{}{:03}",
        prefix(number % fanout.prefixes),
        number / fanout.prefixes % KEYS
    );
    let request = PutRequest {
        key: key.into(),
        value: stamp(epoch, fanout.value_bytes),
        ..PutRequest::default()
    };
    let op = Op {
        method: Method::Put,
        body: wire::frame(&request),
        expected_bytes: None,
    };
    load::checked_call(writer, &op).await
}

/// Bytes that etcd has sent to gRPC clients.
async fn etcd_sent(setup: &Setup) -> Result<f64> {
    let (_, text) = http1::get(setup.etcd.address, "/metrics").await?;
    Ok(http1::metric(&text, "etcd_network_client_grpc_sent_bytes_total").unwrap_or(f64::NAN))
}
