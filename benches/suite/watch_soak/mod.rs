//! A day in minutes for watches: many watchers of 50 ranges through one rangecache, before three members, while the
//! feed is cut, history is compacted, members are killed, and some clients read slowly or not at all for a while.
//!
//! Unlike the cases of the table this is a verdict, too: every watcher must have got every event of its range, once and
//! in order, or the command fails. Figures of delivery include the client, which shares the machine's cores.

mod background;
mod carrier;
mod cpu;
mod faults;
mod load;
mod run;
mod shared;
mod truth;
mod watcher;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use testkit::etcd::{Cluster, Version};
use testkit::fault_link::FaultLink;
use testkit::proxy::Rangecache;
use tokio::task::JoinSet;

use crate::client::{Connection, Windows};
use crate::load::percentile;
use crate::{http1, usage};
use background::Background;
use cpu::{Cores, CpuMeter};
use faults::Faults;
use load::{Latencies, Reads, Writes};
use shared::Shared;
use truth::Truth;
use watcher::Group;

/// Interval between lines of the output.
const SAMPLE: Duration = Duration::from_secs(10);
/// Duration of the reads without puts, and of those without watchers, to which the reads beside them are compared.
const QUIET: Duration = Duration::from_secs(10);
/// Time for the last events after the last put.
const LAST_EVENTS: Duration = Duration::from_secs(60);
/// Growth of memory from the second quarter of the samples to the last that is taken for a leak.
const MAX_GROWTH: f64 = 1.25;
/// Violations that are printed.
const SHOWN: usize = 10;

/// Runs the soak with about this many watchers.
pub(crate) async fn run(minutes: f64, watchers: usize) -> Result<()> {
    let cluster = Cluster::start(Version::V3_7).await;
    let direct: Vec<SocketAddr> = cluster
        .members
        .iter()
        .map(|member| address(&member.url()))
        .collect::<Result<_>>()?;
    let mut links = Vec::new();
    for (seed, member) in (0..).zip(&cluster.members) {
        links.push(FaultLink::to(&member.url(), seed).await);
    }
    let endpoints = links.iter().map(FaultLink::url).collect::<Vec<_>>().join(",");
    // History grows until it reaches its maximum age; only growth beyond that matters.
    let rangecache = Rangecache::at(&endpoints)
        .with("--history-max-age", "1m")
        .start()
        .await;
    let through = address(rangecache.url())?;
    let metrics = address(rangecache.metrics_url())?;
    let writer = Arc::new(Connection::open(direct[0], Windows::LARGE).await?);
    let base = load::fill(&writer).await?;
    let shared = Arc::new(Shared {
        truth: Arc::new(Truth::new(base)),
        compacted: AtomicI64::new(0),
        in_fault: AtomicBool::new(false),
        is_over: AtomicBool::new(false),
        epoch: Instant::now(),
    });
    let mut tasks = JoinSet::new();
    let reads = Reads::start([through, direct[0]], &shared, &mut tasks).await?;
    tokio::time::sleep(QUIET).await;
    let alone = reads.take().calm;
    truth::follow(&direct, &shared.truth, &mut tasks).await?;
    let writes = Arc::new(Writes::default());
    let stop = Arc::new(AtomicBool::new(false));
    let writing = tokio::spawn(load::write(writer, shared.clone(), writes.clone(), stop.clone()));
    tokio::time::sleep(QUIET).await;
    let beside_puts = reads.take().calm;
    let start = Instant::now();
    let background = Background::start()?;
    let group = Group::open(through, &shared, watchers, &mut tasks, background.handle()).await?;
    println!(
        "{} watchers on {} streams, created within {:.1} s",
        group.watchers(),
        group.streams(),
        start.elapsed().as_secs_f64()
    );
    // The start is not measured.
    reads.take();
    let faults = Faults::new(cluster, links, shared.clone());
    let soak = Soak {
        shared,
        reads,
        writes,
        group,
        direct,
        metrics,
        pid: rangecache.pid(),
        alone,
        beside_puts,
    };
    let watching = async {
        let duration = Duration::from_secs_f64(minutes * 60.0);
        let watched = soak.watch(duration, &mut tasks).await;
        stop.store(true, Ordering::Relaxed);
        watched
    };
    // The cluster runs until the end.
    let (watched, _faults) = tokio::join!(watching, faults.run(&stop));
    writing.await??;
    soak.conclude(&watched?).await
}

/// Address in a URL.
fn address(url: &str) -> Result<SocketAddr> {
    let address = url.strip_prefix("http://").context("an http:// URL")?;
    Ok(address.trim_end_matches('/').parse()?)
}

/// A running soak.
struct Soak {
    shared: Arc<Shared>,
    reads: Reads,
    writes: Arc<Writes>,
    group: Group,
    /// Addresses of the members.
    direct: Vec<SocketAddr>,
    /// Address of rangecache's metrics.
    metrics: SocketAddr,
    pid: u32,
    /// Latencies of reads before there were puts.
    alone: Latencies,
    /// Latencies of reads before there were watchers.
    beside_puts: Latencies,
}

/// Figures that the samples have collected.
#[derive(Default)]
struct Samples {
    rss_mb: Vec<f64>,
    cores: Vec<Cores>,
    /// Latencies of reads while nothing fails, and while something does.
    calm: Latencies,
    in_faults: Latencies,
    deliveries_ns: Vec<u64>,
}

impl Soak {
    /// Prints a line every ten seconds. Fails at the first violation.
    async fn watch(&self, duration: Duration, tasks: &mut JoinSet<Result<()>>) -> Result<Samples> {
        println!(
            "{:>5} {:>18} {:>8} {:>6} {:>8} {:>10} {:>12} {:>10} {:>9} {:>9} {:>8} {:>9} {:>8} {:>8}",
            "s",
            "cores: own/etcd/load",
            "RSS MB",
            "fds",
            "puts",
            "events",
            "deliver p99",
            "behind",
            "GET p99",
            "failed",
            "resumed",
            "compacted",
            "at etcd",
            "memory"
        );
        let start = Instant::now();
        let mut samples = Samples::default();
        let mut cpu = CpuMeter::start(self.pid)?;
        while start.elapsed() < duration {
            tokio::time::sleep(SAMPLE.min(duration.saturating_sub(start.elapsed()))).await;
            if let Some(ended) = tasks.try_join_next() {
                ended??;
                bail!("a task of the load has ended");
            }
            self.sample(start.elapsed(), &mut cpu, &mut samples).await?;
            let violations = self.group.verify(&self.shared);
            ensure!(violations.is_empty(), "{}", shown(&violations));
        }
        Ok(samples)
    }

    async fn sample(&self, elapsed: Duration, cpu: &mut CpuMeter, samples: &mut Samples) -> Result<()> {
        let rss_mb = usage::memory(self.pid)?.rss_bytes as f64 / 1e6;
        let (descriptors, _) = usage::descriptors_and_threads(self.pid)?;
        let (mut at_etcd, mut members_s) = (0.0, Vec::new());
        for member in &self.direct {
            // A member may be down at the moment.
            let text = http1::get(*member, "/metrics").await.map(|(_, text)| text);
            let figure = |name| text.as_ref().ok().and_then(|text| http1::metric(text, name));
            at_etcd += figure("etcd_debugging_mvcc_watcher_total").unwrap_or(0.0);
            members_s.push(figure("process_cpu_seconds_total").unwrap_or(0.0));
        }
        let cores = cpu.look(members_s)?;
        let (_, text) = http1::get(self.metrics, "/metrics").await?;
        let streams = http1::metric(&text, "rangecache_watch_streams{source=\"memory\"").unwrap_or(0.0);
        let read = self.reads.take();
        let received = self.group.take();
        let mut deliveries_ns = received.latencies_ns;
        let (puts, _) = self.writes.counts();
        deliveries_ns.sort_unstable();
        println!(
            "{:>5} {cores:>18} {rss_mb:>8.1} {descriptors:>6} {puts:>8} {:>10} {:>9.1} ms {:>10} {:>6.1} ms {:>9} {:>8} {:>9} {at_etcd:>8} {streams:>8}",
            elapsed.as_secs(),
            received.events,
            percentile(&deliveries_ns, 0.99) as f64 / 1e6,
            self.group.behind(&self.shared),
            read.calm.p99_ms()[0],
            read.failed,
            received.resumed,
            received.compacted,
        );
        samples.rss_mb.push(rss_mb);
        samples.cores.push(cores);
        samples.calm.extend(read.calm);
        samples.in_faults.extend(read.in_faults);
        samples.deliveries_ns.extend(deliveries_ns);
        Ok(())
    }

    /// Waits for the last events, compares every watcher with etcd's history, and prints the verdict.
    async fn conclude(&self, samples: &Samples) -> Result<()> {
        self.shared.is_over.store(true, Ordering::Relaxed);
        let until = Instant::now() + LAST_EVENTS;
        let mut violations = self.group.verify(&self.shared);
        while violations.is_empty() && self.group.behind(&self.shared) > 0 && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(200)).await;
            violations = self.group.verify(&self.shared);
        }
        violations.extend(self.group.missing(&self.shared));
        violations.extend(self.writes.missing(&self.shared.truth));
        let mut deliveries_ns = samples.deliveries_ns.clone();
        deliveries_ns.sort_unstable();
        let (puts, unknown) = self.writes.counts();
        println!(
            "\n{puts} puts acknowledged, {unknown} of unknown outcome; {} events of etcd; {} deliveries, p99 {:.1} ms",
            self.shared.truth.events(),
            self.group.delivered(),
            percentile(&deliveries_ns, 0.99) as f64 / 1e6,
        );
        println!(
            "cores of rangecache / etcd / load: {}",
            Cores::mean(&samples.cores)
        );
        self.print_reads(samples);
        self.print_counters().await?;
        let growth = growth(&samples.rss_mb);
        if let Some(growth) = growth {
            println!("RSS of the last quarter is {growth:.2} times that of the second");
        }
        ensure!(violations.is_empty(), "{}", shown(&violations));
        println!("every watcher has got every event of its range, once and in order");
        ensure!(
            growth.is_none_or(|growth| growth < MAX_GROWTH),
            "memory has grown"
        );
        Ok(())
    }

    /// Prints how long reads took, through rangecache and of a member.
    fn print_reads(&self, samples: &Samples) {
        let alone = self.alone.p99_ms();
        println!("{:<30} {:>18} {:>18}", "GET p99", "rangecache", "etcd itself");
        for (when, latencies) in [
            ("alone", &self.alone),
            ("beside puts", &self.beside_puts),
            ("beside puts and watchers", &samples.calm),
            ("during faults", &samples.in_faults),
        ] {
            let p99 = latencies.p99_ms();
            let shown =
                [0, 1].map(|target| format!("{:.2} ms ({:.1} x)", p99[target], p99[target] / alone[target]));
            println!("{when:<30} {:>18} {:>18}", shown[0], shown[1]);
        }
    }

    /// Prints what rangecache says about creates, handovers and cancels.
    async fn print_counters(&self) -> Result<()> {
        let (_, text) = http1::get(self.metrics, "/metrics").await?;
        let counters = ["created", "handovers", "cancelled", "refused"]
            .map(|name| format!("rangecache_watch_{name}_total"));
        for line in text.lines().filter(|line| !line.ends_with(" 0")) {
            if counters.iter().any(|counter| line.starts_with(counter.as_str())) {
                println!("{line}");
            }
        }
        Ok(())
    }
}

/// Mean of the last quarter by the mean of the second; `None` for a short run.
fn growth(samples: &[f64]) -> Option<f64> {
    let quarter = samples.len() / 4;
    if quarter < 3 {
        return None;
    }
    let mean = |samples: &[f64]| samples.iter().sum::<f64>() / samples.len() as f64;
    Some(mean(&samples[samples.len() - quarter..]) / mean(&samples[quarter..2 * quarter]))
}

/// The first violations, a line each.
fn shown(violations: &[String]) -> String {
    let first = violations.iter().take(SHOWN).map(String::as_str);
    let lines = first.collect::<Vec<_>>().join("\n");
    format!("{} violations, the first:\n{lines}", violations.len())
}
