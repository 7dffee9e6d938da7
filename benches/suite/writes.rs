//! Writes to a cluster of three members: by a client that spreads them over the members, as etcd's own does, and through
//! rangecache with each value of `--writes-to`, at a fixed rate.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::cases::{Suite, progress, puts::put};
use crate::client::{Connection, Windows};
use crate::http1;
use crate::load::{Op, Outcome};
use crate::open_loop::open_loop;
use crate::processes::{self, Endpoint, Process};
use crate::usage::CpuSample;

const MEMBERS: usize = 3;
const VALUE_BYTES: usize = 1 << 10;
const KEYS: usize = 10_000;
const BLOCK: Duration = Duration::from_secs(8);

/// Target of the writes.
struct Target {
    name: &'static str,
    /// The writes are spread over them.
    connections: Arc<Vec<Connection>>,
    /// Kept for as long as it is written to.
    _rangecache: Option<Process>,
}

/// Measures each target in turns, and prints one line for each and round.
pub(crate) async fn run(suite: &Suite, per_second: u32) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("rangecache-bench-").tempdir()?;
    let members = processes::start_cluster(&suite.binaries, folder.path(), MEMBERS, suite.options).await?;
    let mut direct = Vec::new();
    let mut endpoints = Vec::new();
    for member in &members {
        direct.push(Connection::open(member.address, Windows::LARGE).await?);
        let address = member.address;
        endpoints.push(Endpoint { address, tls: None });
    }
    let mut targets = vec![Target {
        name: "direct",
        connections: Arc::new(direct),
        _rangecache: None,
    }];
    for (name, flag) in [("any", "--writes-to=any"), ("leader", "--writes-to=leader")] {
        let flags = [flag];
        let starting = processes::start_rangecache(&suite.binaries, folder.path(), &endpoints, &flags, &[]);
        let mut rangecache = starting.await?;
        rangecache.wait_ready().await?;
        let connection = Connection::open(rangecache.address, Windows::LARGE).await?;
        targets.push(Target {
            name,
            connections: Arc::new(vec![connection]),
            _rangecache: Some(rangecache),
        });
    }
    let keys = (0..KEYS).map(|number| put(&format!("/registry/leases/{number:05}"), VALUE_BYTES));
    let puts: Arc<Vec<Op>> = Arc::new(keys.collect());
    println!(
        "{per_second} PUTs of {VALUE_BYTES} B a second to {MEMBERS} members\n\n| round | writes to | p50 | p99 | failed | bytes between members, of each PUT | etcd's CPU of each PUT |\n|---|---|---|---|---|---|---|"
    );
    for round in 0..suite.args.rounds {
        for target in &targets {
            progress(&format!("round {}, {}", round + 1, target.name));
            let (peer_bytes, cpu) = (peer_bytes(&members).await?, cpu(&members)?);
            let (connections, puts) = (Arc::clone(&target.connections), Arc::clone(&puts));
            let outcome = open_loop(per_second, BLOCK, move |number| {
                let (connections, put) = (Arc::clone(&connections), puts[number % puts.len()].clone());
                async move {
                    let connection = &connections[number % connections.len()];
                    let sent = connection.call(put.method, put.body).await;
                    sent.map_err(|error| error.to_string())
                }
            })
            .await?;
            let sent = self::peer_bytes(&members).await? - peer_bytes;
            let after = self::cpu(&members)?;
            let used = after.iter().zip(&cpu).map(|(now, before)| now.since(before));
            print(round, target, &outcome, sent, used.sum());
        }
    }
    Ok(())
}

fn print(round: usize, target: &Target, outcome: &Outcome, peer_bytes: f64, cpu_ns: u64) {
    let milliseconds = |share| outcome.percentile_ns(share) as f64 / 1e6;
    let calls = outcome.calls.max(1) as f64;
    println!(
        "| {} | {} | {:.2} ms | {:.2} ms | {} | {:.0} | {:.0} µs |",
        round + 1,
        target.name,
        milliseconds(0.5),
        milliseconds(0.99),
        outcome.errors,
        peer_bytes / calls,
        cpu_ns as f64 / 1e3 / calls,
    );
    if let Some(error) = &outcome.first_error {
        println!("  {error}");
    }
}

/// Bytes that the members have sent to each other.
async fn peer_bytes(members: &[Process]) -> Result<f64> {
    let mut sum = 0.0;
    for member in members {
        let sent = http1::read_metric(member.address, "etcd_network_peer_sent_bytes_total");
        sum += sent
            .await
            .context("the members have no connections to each other")?;
    }
    Ok(sum)
}

fn cpu(members: &[Process]) -> Result<Vec<CpuSample>> {
    members.iter().map(|member| CpuSample::of(member.pid())).collect()
}
