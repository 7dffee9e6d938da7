//! A long mixed load on rangecache, with readers that stop reading, to see whether memory or descriptors grow.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::task::JoinSet;

use crate::cases::pages::PAGE_KEYS;
use crate::cases::{Suite, puts};
use crate::client::{Connection, Windows};
use crate::dataset::Dataset;
use crate::http1;
use crate::load::{Op, nanoseconds, percentile};
use crate::targets::{Kind, Setup, Target};
use crate::usage;

/// Interval between lines of the output.
const SAMPLE: Duration = Duration::from_secs(10);
/// Readers that have stopped reading, at any time.
const SLOW_READERS: usize = 8;
/// Time for which each of them keeps its response unread.
const SLOW_READER_HOLDS: Duration = Duration::from_secs(20);

/// Keys that the puts write.
const WRITTEN_PREFIX: &str = "/registry/leases/";
const WRITTEN_KEYS: usize = 1000;

/// Counters of one kind of work.
#[derive(Default)]
struct Work {
    calls: AtomicU64,
    errors: AtomicU64,
    latencies_ns: parking_lot::Mutex<Vec<u64>>,
    first_error: parking_lot::Mutex<Option<String>>,
}

impl Work {
    fn count(&self, latency: Duration, result: Result<u64, String>) {
        match result {
            Ok(_) => {
                self.calls.fetch_add(1, Ordering::Relaxed);
                self.latencies_ns.lock().push(nanoseconds(latency));
            }
            Err(error) => {
                self.errors.fetch_add(1, Ordering::Relaxed);
                self.first_error.lock().get_or_insert(error);
            }
        }
    }

    /// Calls, errors and the 99th percentile in milliseconds since the last call of this function.
    fn take(&self) -> String {
        let mut latencies_ns = std::mem::take(&mut *self.latencies_ns.lock());
        latencies_ns.sort_unstable();
        let calls = self.calls.swap(0, Ordering::Relaxed);
        format!("{calls} ({:.1} ms)", percentile(&latencies_ns, 0.99) as f64 / 1e6)
    }
}

/// The kinds of work, in the order of the columns.
const NAMES: [&str; 5] = ["GET", "LIST", "page", "PUT", "slow reader"];

/// Runs the load for the given time, and prints a line every ten seconds.
pub(crate) async fn run(suite: &Suite, seconds: u64) -> Result<()> {
    let small = Dataset {
        prefix: "/registry/pods/",
        keys: 50_000,
        value_bytes: 200,
    };
    let large = Dataset {
        prefix: "/registry/secrets/",
        keys: 4_000,
        value_bytes: 10 << 10,
    };
    let mut setup = Setup::start(&suite.binaries, suite.options).await?;
    let etcd = setup.connect().await?;
    small.fill(&etcd, 0).await?;
    large.fill(&etcd, 0).await?;
    // History grows until it reaches its maximum age; only growth beyond that matters.
    setup
        .start_only(Kind::Rangecache, &["--history-max-age", "1m"])
        .await?;
    let target = *setup.targets().last().context("rangecache was just started")?;
    let metrics_address = setup
        .rangecache()
        .context("rangecache was just started")?
        .metrics_address;
    let work: Arc<[Work; 5]> = Arc::default();
    let mut tasks = start_load(&target, &small, &large, &work).await?;
    let pid = target.proxy_pid.context("rangecache has a process")?;

    let columns = NAMES.map(|name| format!("{name:>18}")).join("");
    println!("calls and p99 per {} s\n", SAMPLE.as_secs());
    println!(
        "{:>6} {:>8} {:>8} {:>5} {:>8} {:>6}{columns} {:>7}",
        "s", "RSS MB", "peak MB", "fds", "threads", "tasks", "errors"
    );
    let start = Instant::now();
    let mut samples_mb = Vec::new();
    while start.elapsed() < Duration::from_secs(seconds) {
        tokio::time::sleep(SAMPLE).await;
        if let Some(ended) = tasks.try_join_next() {
            ended?;
        }
        let memory = usage::memory(pid)?;
        let (descriptors, threads) = usage::descriptors_and_threads(pid)?;
        let (_, metrics) = http1::get(metrics_address, "/metrics").await?;
        let tasks =
            http1::metric(&metrics, "rangecache_tasks").map_or("–".into(), |tasks| tasks.to_string());
        let done = work
            .iter()
            .map(|work| format!("{:>18}", work.take()))
            .collect::<String>();
        let errors: u64 = work.iter().map(|work| work.errors.load(Ordering::Relaxed)).sum();
        let (rss_mb, peak_mb) = (memory.rss_bytes as f64 / 1e6, memory.peak_bytes as f64 / 1e6);
        println!(
            "{:>6} {rss_mb:>8.1} {peak_mb:>8.1} {descriptors:>5} {threads:>8} {tasks:>6}{done} {errors:>7}",
            start.elapsed().as_secs()
        );
        samples_mb.push(rss_mb);
    }
    tasks.shutdown().await;
    summary(&samples_mb, &work[..]);
    compare(&etcd, &target, &[small.list(), large.list(), written()].concat()).await
}

/// Compares memory in the first quarter, start-up excluded, with the last.
fn summary(samples_mb: &[f64], work: &[Work]) {
    let quarter = samples_mb.len() / 4;
    let mean = |samples: &[f64]| samples.iter().sum::<f64>() / samples.len() as f64;
    if quarter > 0 {
        let first = mean(&samples_mb[..quarter]);
        let last = mean(&samples_mb[samples_mb.len() - quarter..]);
        println!(
            "\nRSS in the first quarter {first:.1} MB, in the last {last:.1} MB: {:+.1} %",
            (last / first - 1.0) * 100.0
        );
    }
    for (name, work) in NAMES.iter().zip(work) {
        if let Some(error) = work.first_error.lock().as_ref() {
            println!(
                "{name}: {} errors, the first: {error}",
                work.errors.load(Ordering::Relaxed)
            );
        }
    }
}

/// Checks that responses still equal etcd's byte for byte, for keys that were only read and for keys written all the
/// time.
async fn compare(etcd: &Connection, target: &Target, lists: &[Op]) -> Result<()> {
    let through = Connection::open(target.address, Windows::LARGE).await?;
    for list in lists {
        let expected = etcd.fetch(list.method, list.body.clone()).await?;
        let answer = through.fetch(list.method, list.body.clone()).await?;
        anyhow::ensure!(answer == expected, "a response differs from etcd's");
    }
    println!(
        "after the load, {} LISTs of all keys equal etcd's byte for byte",
        lists.len()
    );
    Ok(())
}

/// A LIST of the written keys.
fn written() -> Vec<Op> {
    Dataset {
        prefix: WRITTEN_PREFIX,
        keys: WRITTEN_KEYS,
        value_bytes: 200,
    }
    .list()
}

/// Starts every kind of work; dropping the set stops it.
async fn start_load(
    target: &Target,
    small: &Dataset,
    large: &Dataset,
    work: &Arc<[Work; 5]>,
) -> Result<JoinSet<()>> {
    let mut tasks = JoinSet::new();
    let puts: Vec<Op> = (0..WRITTEN_KEYS)
        .map(|number| puts::put(&format!("{WRITTEN_PREFIX}object-{number:07}"), 200))
        .collect();
    let lists = [small.list(), large.list()].concat();
    // Kind of work, its calls, the interval of each worker, and the number of workers.
    let loads: [(usize, Vec<Op>, Duration, usize); 4] = [
        (0, small.gets(), Duration::from_millis(10), 8),
        (1, lists, Duration::from_millis(500), 2),
        (2, small.random_pages(PAGE_KEYS, 0), Duration::from_millis(50), 2),
        (3, puts, Duration::from_millis(10), 2),
    ];
    for (kind, ops, period, workers) in loads {
        let ops = Arc::new(ops);
        for worker in 0..workers {
            let connection = Connection::open(target.address, Windows::LARGE).await?;
            let (ops, work) = (ops.clone(), work.clone());
            tasks.spawn(async move {
                let mut ticks = tokio::time::interval(period);
                for number in worker.. {
                    ticks.tick().await;
                    let op = &ops[number % ops.len()];
                    let begin = Instant::now();
                    let result = connection.call(op.method, op.body.clone()).await;
                    work[kind].count(begin.elapsed(), result.map_err(|error| error.to_string()));
                }
            });
        }
    }
    for _ in 0..SLOW_READERS {
        let (address, list, work) = (target.address, large.list().remove(0), work.clone());
        tasks.spawn(async move {
            loop {
                let begin = Instant::now();
                let result = stall(address, &list).await.map_err(|error| format!("{error:#}"));
                let failed = result.is_err();
                work[4].count(begin.elapsed(), result);
                if failed {
                    // Do not retry a closed target in a tight loop.
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        });
    }
    Ok(tasks)
}

/// Requests a large LIST with small windows, reads one chunk, waits, and closes the connection.
async fn stall(address: std::net::SocketAddr, list: &Op) -> Result<u64> {
    let connection = Connection::open(
        address,
        Windows {
            stream_bytes: 65_535,
            connection_bytes: 65_535,
        },
    )
    .await?;
    let mut answer = connection.begin(list.method, list.body.clone()).await?;
    let first = answer.data().await.context("a response without a body")??;
    tokio::time::sleep(SLOW_READER_HOLDS).await;
    Ok(first.len() as u64)
}
