//! The herd: many clients at once that list every pod and watch them, as after a restart. First through rangecache, then straight
//! from etcd, so that memory that etcd has taken for the one is not there for the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_base::net::Url;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::keyspace;
use crate::metrics::Scrapes;
use crate::read_target::ReadTarget;
use crate::reads::{scaled, time};
use crate::rpc::{EtcdClient, revision};
use crate::usage::{Meter, Usage};

/// Clients, each with a connection of its own.
const CLIENTS: usize = 100;

/// Writes, of which each client gets an event.
const WRITES: usize = 100;

/// The servers that the herd is sent to.
pub(crate) struct Herd<'a> {
    pub(crate) target: &'a ReadTarget,
    pub(crate) scrapes: &'a Scrapes,
    /// Processes of which CPU and memory are shown.
    pub(crate) etcd: Option<u32>,
    pub(crate) rangecache: Option<u32>,
}

/// Times and cost of a herd.
struct Cost {
    /// From the first request to the last response.
    listed: Duration,
    /// From the first write to the last event.
    delivered: Duration,
    etcd: Option<Usage>,
    rangecache: Option<Usage>,
    /// Bytes that etcd has sent.
    etcd_sent: Option<f64>,
}

impl Herd<'_> {
    /// Sends the herd through `proxy` and straight to etcd, and prints what it has cost.
    pub(crate) async fn show(&self, direct: &mut EtcdClient, proxy: &Url) -> Result<()> {
        println!(
            "A herd: {CLIENTS} clients list all {} pods at once, and watch them while {WRITES} of them are written.\n",
            self.target.keys
        );
        let through = self.send(proxy, direct, 2).await?;
        let straight = self.send(&self.scrapes.etcd, direct, 3).await?;
        let row = |name: &str, straight: String, through: String| {
            println!("{name:36}{straight:>18}{through:>20}");
        };
        row("", "straight to etcd".to_owned(), "through rangecache".to_owned());
        let both = |name, show: &dyn Fn(&Cost) -> String| row(name, show(&straight), show(&through));
        both("the last list has arrived after", &|cost| time(cost.listed));
        both("the last event has arrived after", &|cost| time(cost.delivered));
        both("etcd's CPU", &|cost| cpu(cost.etcd.as_ref()));
        both("etcd's memory grew by", &|cost| memory(cost.etcd.as_ref()));
        both("etcd has sent", &|cost| cost.etcd_sent.map_or_else(none, scaled));
        row("rangecache's CPU", none(), cpu(through.rangecache.as_ref()));
        row(
            "rangecache's memory grew by",
            none(),
            memory(through.rangecache.as_ref()),
        );
        println!(
            "\nLists that are in flight together share a quorum check, and watches share one feed from etcd.\n"
        );
        Ok(())
    }

    /// Sends the herd to `url`. Writes go straight to etcd, and have this generation.
    async fn send(&self, url: &Url, direct: &mut EtcdClient, generation: usize) -> Result<Cost> {
        let mut clients = Vec::with_capacity(CLIENTS);
        for _ in 0..CLIENTS {
            clients.push(EtcdClient::connect(&self.scrapes.connector, url).await?);
        }
        let before = self.scrapes.take().await?;
        let (etcd, rangecache) = (Meter::start(self.etcd), Meter::start(self.rangecache));

        // Clients, and this function.
        let stage = Arc::new(Barrier::new(CLIENTS + 1));
        let keys = usize::try_from(self.target.keys)?;
        let mut herd = JoinSet::new();
        for client in clients {
            herd.spawn(one(client, self.target.range(), keys, Arc::clone(&stage)));
        }
        all_at(&stage, &mut herd).await?;
        let started = Instant::now();
        all_at(&stage, &mut herd).await?;
        let listed = started.elapsed();
        all_at(&stage, &mut herd).await?;
        let started = Instant::now();
        for index in 0..WRITES {
            let (key, value) = keyspace::pod(index, generation);
            direct.put(&key, value).await?;
        }
        while let Some(ended) = herd.join_next().await {
            ended??;
        }
        let delivered = started.elapsed();
        let usage = |meter: Option<Meter>| meter.and_then(|meter| meter.usage());
        Ok(Cost {
            listed,
            delivered,
            etcd: usage(etcd),
            rangecache: usage(rangecache),
            etcd_sent: self
                .scrapes
                .take()
                .await?
                .since(&before)
                .etcd
                .map(|(_, sent)| sent),
        })
    }
}

/// Waits until every client has come to the next stage; returns the error of one that ends before.
async fn all_at(stage: &Barrier, herd: &mut JoinSet<Result<()>>) -> Result<()> {
    tokio::select! {
        _ = stage.wait() => Ok(()),
        ended = herd.join_next() => {
            ended.context("no client is left")???;
            bail!("a client ended before the others")
        }
    }
}

/// A client of the herd.
async fn one(
    mut client: EtcdClient,
    range: RangeRequest,
    expected: usize,
    stage: Arc<Barrier>,
) -> Result<()> {
    stage.wait().await;
    let response = client.range(range.clone()).await?;
    let (keys, listed_at) = (response.kvs.len(), revision(response.header.as_ref())?);
    drop(response);
    ensure!(
        keys == expected,
        "a list of {keys} keys, not {expected}: please report this"
    );
    stage.wait().await;
    let mut events = client.watch(range, listed_at + 1).await?;
    stage.wait().await;
    let mut received = 0;
    while received < WRITES {
        let response = events.message().await?.context("the watch has ended")?;
        received += response.events.len();
    }
    ensure!(
        received == WRITES,
        "{received} events, not {WRITES}: please report this"
    );
    Ok(())
}

fn none() -> String {
    "-".to_owned()
}

fn cpu(usage: Option<&Usage>) -> String {
    usage.map_or_else(none, |usage| format!("{:.2} s", usage.cpu.as_secs_f64()))
}

#[allow(clippy::cast_precision_loss, reason = "shown with three digits")]
fn memory(usage: Option<&Usage>) -> String {
    usage.map_or_else(none, |usage| scaled(usage.memory_bytes as f64))
}
