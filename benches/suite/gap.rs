//! Gaps: rangecache is cut off from etcd while some of the keys change, until etcd has compacted these changes. Measured is
//! what the reload takes, beside the load of everything at the start, and starts from an image and from a neighbour.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow, bail};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::Client;

use crate::cases::{Suite, progress};
use crate::dataset::{Dataset, current_revision};
use crate::http1;
use crate::processes::{self, Endpoint, Process};
use crate::targets::Setup;
use crate::usage::CpuSample;

/// Parts of the keys that change during a gap, in percent.
const CHANGED_PERCENT: [usize; 3] = [1, 10, 100];
/// Writes in the log of an image: more than the newest entries by which a start shows that etcd's history is the image's.
const LOGGED_WRITES: usize = 200;
/// Interval between two looks at rangecache's metrics.
const POLL: Duration = Duration::from_millis(10);
const DEADLINE: Duration = Duration::from_secs(120);

/// Cost of one load.
struct Row {
    what: String,
    ready: Duration,
    /// Bytes that etcd has sent to clients.
    sent_bytes: f64,
    etcd_cpu_ns: u64,
    rangecache_cpu_ns: u64,
    kept_bytes: f64,
}

/// Figures before a load.
struct Before {
    at: Instant,
    sent_bytes: f64,
    etcd: CpuSample,
}

impl Before {
    async fn now(setup: &Setup) -> Result<Before> {
        Ok(Before {
            at: Instant::now(),
            sent_bytes: sent_bytes(setup).await?,
            etcd: CpuSample::of(setup.etcd.pid())?,
        })
    }
}

/// Measures the start, and gaps in which more and more of the keys change, and prints a table.
pub(crate) async fn run(suite: &Suite, megabytes: usize, value_bytes: usize) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("rangecache-bench-").tempdir()?;
    let setup = Setup::start(&suite.binaries, suite.options).await?;
    let data = Dataset {
        prefix: "/registry/pods/",
        keys: megabytes * 1_000_000 / value_bytes,
        value_bytes,
    };
    progress(&format!("writes {} keys of {value_bytes} B", data.keys));
    let etcd = setup.connect().await?;
    data.fill(&etcd, 0).await?;
    let client = Client::connect(&setup.endpoint().url()).await;
    let link = FaultLink::to(&setup.endpoint().url(), 0).await;
    let address = link.url().trim_start_matches("http://").parse()?;
    let endpoint = Endpoint { address, tls: None };
    let before = Before::now(&setup).await?;
    let mut rangecache =
        processes::start_rangecache(&suite.binaries, folder.path(), &[endpoint], &[], &[]).await?;
    rangecache.wait_ready().await?;
    let nothing = (&CpuSample::default(), 0.0);
    let mut rows = vec![measured(&setup, &rangecache, "start".into(), before, nothing).await?];
    for percent in CHANGED_PERCENT {
        progress(&format!("gap in which {percent} % of the keys change"));
        link.set(Condition::Cut);
        let loads = metric(&rangecache, "rangecache_mirror_reloads_total").await?;
        data.rewrite(&etcd, data.keys * percent / 100).await?;
        let compacted = client.compact(current_revision(&etcd).await?).await;
        compacted.map_err(|status| anyhow!("etcd does not compact: {}", status.message))?;
        let kept = kept_bytes(&rangecache).await;
        let cpu = CpuSample::of(rangecache.pid())?;
        let before = Before::now(&setup).await?;
        link.set(Condition::Normal);
        until("rangecache is back", async || {
            let has_loaded = metric(&rangecache, "rangecache_mirror_reloads_total").await? != loads;
            Ok(has_loaded && metric(&rangecache, "rangecache_mirror_in_service").await? >= 1.0)
        })
        .await?;
        let what = format!("{percent} % changed");
        rows.push(measured(&setup, &rangecache, what, before, (&cpu, kept)).await?);
    }
    drop(rangecache);
    for writes in [0, LOGGED_WRITES] {
        let write = async || data.rewrite(&etcd, writes).await;
        let (folder, what) = (
            folder.path(),
            format!("start from an image, after {writes} writes"),
        );
        rows.push(start_from_image(suite, (&setup, endpoint), folder, what, write).await?);
    }
    rows.push(start_from_neighbour(suite, (&setup, endpoint), folder.path()).await?);
    println!(
        "\n{} keys of {value_bytes} B\n\n| | ready after | sent by etcd | etcd's CPU | rangecache's CPU | not read |\n|---|---|---|---|---|---|",
        data.keys
    );
    for row in &rows {
        println!(
            "| {} | {:.2} s | {:.1} MB | {:.2} s | {:.2} s | {:.0} MB |",
            row.what,
            row.ready.as_secs_f64(),
            row.sent_bytes / 1e6,
            row.etcd_cpu_ns as f64 / 1e9,
            row.rangecache_cpu_ns as f64 / 1e9,
            row.kept_bytes / 1e6,
        );
    }
    Ok(())
}

/// Measures a start from an image that a process before has left, which has seen what `write` writes.
async fn start_from_image(
    suite: &Suite,
    (setup, endpoint): (&Setup, Endpoint),
    folder: &Path,
    what: String,
    write: impl AsyncFn() -> Result<()>,
) -> Result<Row> {
    progress(&what);
    let images = format!("--image-dir={}", folder.join("images").display());
    let start =
        async || processes::start_rangecache(&suite.binaries, folder, &[endpoint], &[&images], &[]).await;
    let mut first = start().await?;
    first.wait_ready().await?;
    until("there is an image", async || {
        Ok(metric(&first, "rangecache_mirror_image_bytes").await? > 0.0)
    })
    .await?;
    write().await?;
    let written = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    until("the image has the writes", async || {
        Ok(metric(&first, "rangecache_mirror_image_timestamp_seconds").await? > written + 1.0)
    })
    .await?;
    drop(first);
    measured_start(setup, what, start()).await
}

/// Measures a start whose keys come from the memory of another process.
async fn start_from_neighbour(
    suite: &Suite,
    (setup, endpoint): (&Setup, Endpoint),
    folder: &Path,
) -> Result<Row> {
    let what = "start from a neighbour".to_owned();
    progress(&what);
    let start = async |flags: &[&str]| {
        processes::start_rangecache(&suite.binaries, folder, &[endpoint], flags, &[]).await
    };
    let mut neighbour = start(&[]).await?;
    neighbour.wait_ready().await?;
    let warm_from = format!("--warm-from=http://{}", neighbour.address);
    measured_start(setup, what, start(&[&warm_from])).await
}

/// Measures a start, which begins when `starting` is polled.
async fn measured_start(
    setup: &Setup,
    what: String,
    starting: impl Future<Output = Result<Process>>,
) -> Result<Row> {
    let before = Before::now(setup).await?;
    let mut rangecache = starting.await?;
    rangecache.wait_ready().await?;
    let nothing = (&CpuSample::default(), 0.0);
    measured(setup, &rangecache, what, before, nothing).await
}

/// Waits until `condition` holds.
async fn until(what: &str, condition: impl AsyncFn() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !condition().await? {
        if began.elapsed() > DEADLINE {
            bail!("not after {DEADLINE:?}: {what}");
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

/// The cost since `before`, and since these figures of rangecache: its CPU, and what it did not have to read.
async fn measured(
    setup: &Setup,
    rangecache: &Process,
    what: String,
    before: Before,
    (cpu, kept): (&CpuSample, f64),
) -> Result<Row> {
    let ready = before.at.elapsed();
    let etcd = CpuSample::of(setup.etcd.pid())?;
    Ok(Row {
        what,
        ready,
        sent_bytes: sent_bytes(setup).await? - before.sent_bytes,
        etcd_cpu_ns: etcd.since(&before.etcd),
        rangecache_cpu_ns: CpuSample::of(rangecache.pid())?.since(cpu),
        kept_bytes: kept_bytes(rangecache).await - kept,
    })
}

/// Bytes that loads did not have to read: none with a build that has no such metric.
async fn kept_bytes(rangecache: &Process) -> f64 {
    let kept = metric(rangecache, "rangecache_mirror_adopted_bytes_total");
    kept.await.unwrap_or(0.0)
}

async fn sent_bytes(setup: &Setup) -> Result<f64> {
    setup
        .etcd_metric("etcd_network_client_grpc_sent_bytes_total")
        .await
}

async fn metric(rangecache: &Process, name: &str) -> Result<f64> {
    http1::read_metric(rangecache.metrics_address, name).await
}
