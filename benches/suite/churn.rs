//! History under churn: objects that are replaced all the time, faster than the bound on the history lets it keep them, to see
//! whether the bound holds and what the process takes beside it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cases::{Suite, puts};
use crate::dataset::Dataset;
use crate::http1;
use crate::load::Op;
use crate::open_loop::open_loop;
use crate::targets::{Kind, Setup};
use crate::usage;

/// Puts per second, and the size of their values.
const PUTS_PER_SECOND: u32 = 500;
const VALUE_BYTES: usize = 10 << 10;
/// Keys that are written in turns.
const KEYS: usize = 1000;
/// `--history-max-bytes` of rangecache.
const HISTORY_MAX_BYTES: u64 = 256 << 20;
/// Interval of the samples, and number of them to a line of the output.
const SAMPLE: Duration = Duration::from_secs(1);
const SAMPLES_PER_LINE: usize = 10;

/// rangecache's memory at one time, in bytes.
#[derive(Clone, Copy)]
struct Sample {
    history: u64,
    mirror: u64,
    resident: u64,
}

/// Runs the puts for the given time, prints a line every ten seconds, and a table at the end.
pub(crate) async fn run(suite: &Suite, seconds: u64) -> Result<()> {
    let objects = Dataset {
        prefix: "/registry/configmaps/",
        keys: KEYS,
        value_bytes: VALUE_BYTES,
    };
    let mut setup = Setup::start(&suite.binaries, suite.options).await?;
    let etcd = setup.connect().await?;
    objects.fill(&etcd, 0).await?;
    let bound = HISTORY_MAX_BYTES.to_string();
    setup
        .start_only(Kind::Rangecache, &["--history-max-bytes", &bound])
        .await?;
    let rangecache = setup.rangecache().context("rangecache was just started")?;
    let (pid, metrics_address) = (rangecache.pid(), rangecache.metrics_address);
    let before = sample(pid, metrics_address).await?;
    usage::reset_peak(pid)?;

    let puts: Arc<[Op]> = (0..KEYS)
        .map(|number| puts::put(&objects.key(number), VALUE_BYTES))
        .collect();
    let connection = etcd.clone();
    let load = tokio::spawn(open_loop(
        PUTS_PER_SECOND,
        Duration::from_secs(seconds),
        move |number| {
            let (connection, puts) = (connection.clone(), puts.clone());
            async move {
                let op = &puts[number % puts.len()];
                let called = connection.call(op.method, op.body.clone()).await;
                called.map_err(|error| error.to_string())
            }
        },
    ));
    println!(
        "{PUTS_PER_SECOND} puts a second of {VALUE_BYTES} B\n\n{:>6} {:>10} {:>10} {:>11}",
        "s", "history MB", "mirror MB", "resident MB"
    );
    let start = Instant::now();
    let mut samples = Vec::new();
    while !load.is_finished() {
        tokio::time::sleep(SAMPLE).await;
        let now = sample(pid, metrics_address).await?;
        samples.push(now);
        if samples.len().is_multiple_of(SAMPLES_PER_LINE) {
            println!(
                "{:>6} {:>10} {:>10} {:>11}",
                start.elapsed().as_secs(),
                megabytes(now.history),
                megabytes(now.mirror),
                megabytes(now.resident)
            );
        }
    }
    let sent = load.await??;
    if let Some(error) = &sent.first_error {
        println!("{} puts failed, the first: {error}", sent.errors);
    }
    table(
        &before,
        &samples,
        usage::memory(pid)?.peak_bytes,
        sent.latencies_ns.len(),
    );
    Ok(())
}

async fn sample(pid: u32, metrics_address: std::net::SocketAddr) -> Result<Sample> {
    let (_, metrics) = http1::get(metrics_address, "/metrics").await?;
    let bytes = |name| -> Result<u64> {
        let value =
            http1::metric(&metrics, name).with_context(|| format!("rangecache has no metric {name}"))?;
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of bytes"
        )]
        let bytes = value as u64;
        Ok(bytes)
    };
    Ok(Sample {
        history: bytes("rangecache_mirror_history_bytes")?,
        mirror: bytes("rangecache_mirror_memory_bytes")?,
        resident: usage::memory(pid)?.rss_bytes,
    })
}

fn table(before: &Sample, samples: &[Sample], peak_bytes: u64, puts: usize) {
    let largest = samples
        .iter()
        .map(|sample| sample.history)
        .max()
        .unwrap_or_default();
    let verdict = if largest <= HISTORY_MAX_BYTES {
        "within"
    } else {
        "above"
    };
    let quarters: Vec<String> = samples
        .chunks(samples.len().div_ceil(4).max(1))
        .map(|quarter| {
            let sum: u64 = quarter.iter().map(|sample| sample.resident).sum();
            megabytes(sum / quarter.len() as u64)
        })
        .collect();
    println!("\n| | |\n|---|---|");
    println!(
        "| puts; bytes of their values | {puts}; {} MB |",
        megabytes(puts as u64 * VALUE_BYTES as u64)
    );
    println!(
        "| history at most; its bound | {}; {} MB: {verdict} the bound |",
        megabytes(largest),
        megabytes(HISTORY_MAX_BYTES)
    );
    println!(
        "| resident memory before the puts | {} MB |",
        megabytes(before.resident)
    );
    println!("| the same, mean of each quarter | {} MB |", quarters.join(", "));
    println!("| the same, at most | {} MB |", megabytes(peak_bytes));
}

fn megabytes(bytes: u64) -> String {
    format!("{:.0}", bytes as f64 / 1e6)
}
