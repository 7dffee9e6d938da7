//! Values that take more than `--cache-max-bytes`: what packing keeps in memory, and what reads of it cost. With values at random,
//! which do not shrink, what is read stays in memory, and the rest is left to etcd.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cases::{Suite, progress};
use crate::client::{Connection, Method, Windows};
use crate::http1;
use crate::load::{Op, Outcome};
use crate::memory_group::MemoryGroup;
use crate::open_loop::open_loop;
use crate::targets::{Kind, Setup};
use crate::usage;
use crate::wire;
use testkit::pb::{RequestOp, TxnRequest};

/// Budgets, in percent of what the objects take unpacked.
const BUDGETS_PERCENT: [u64; 4] = [150, 60, 40, 30];
/// Linearizable GETs per second, of objects at random, and for how long.
const GETS_PER_SECOND: u32 = 1000;
const DURATION: Duration = Duration::from_secs(20);
const CONNECTIONS: usize = 8;
const PER_TXN: usize = 100;
const FILL_IN_FLIGHT: usize = 8;
const PREFIX: &str = "/registry/pods/";
/// Prefix of objects at random that are not read: four of five.
const UNREAD_PREFIX: &str = "/registry/blobs/";
const RANDOM_BYTES: usize = 5_000;

/// Memory of one rangecache.
enum Bound {
    /// `--cache-max-bytes`.
    Budget(u64),
    /// A control group's limit, from which rangecache derives its budget.
    Container(u64),
}

impl Bound {
    /// The flags that set it.
    fn flags(&self) -> Vec<String> {
        match self {
            Bound::Budget(bytes) => vec![format!("--cache-max-bytes={bytes}")],
            Bound::Container(_) => Vec::new(),
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bound::Budget(bytes) => write!(f, "{} MB", bytes / 1_000_000),
            Bound::Container(bytes) => write!(f, "default, in a container of {} MiB", bytes >> 20),
        }
    }
}

/// Figures of one bound.
struct Row {
    bound: Bound,
    ready: Duration,
    reads: Outcome,
    /// Share of the reads that memory answered.
    from_memory: f64,
    /// `rangecache_mirror_packed_encoded_bytes`, and that of all keys.
    packed_bytes: f64,
    /// `rangecache_mirror_not_held_bytes`.
    not_held_bytes: f64,
    all_bytes: f64,
    peak_bytes: u64,
}

/// Fills an etcd, reads it through rangecaches with less and less memory, and prints a table.
pub(crate) async fn run(
    suite: &Suite,
    megabytes: usize,
    kind: Objects,
    container_mib: Option<u64>,
) -> Result<()> {
    // Declared before the setup, whose rangecache has ended when they are removed.
    let mut groups = Vec::new();
    let mut setup = Setup::start(&suite.binaries, suite.options).await?;
    let bytes = kind.object(0).len();
    let keys = megabytes * 1_000_000 / bytes;
    progress(&format!("writes {keys} objects of {bytes} B"));
    fill(&setup.connect().await?, keys, kind).await?;
    let mut rows = Vec::new();
    let budget = |percent: u64| Bound::Budget(megabytes as u64 * 1_000_000 / 100 * percent);
    let bounds = match container_mib {
        None => BUDGETS_PERCENT.map(budget).into_iter().collect(),
        Some(mib) => vec![budget(BUDGETS_PERCENT[0]), Bound::Container(mib << 20)],
    };
    for bound in bounds {
        progress(&format!("budget: {bound}"));
        if let Bound::Container(bytes) = bound {
            let group = MemoryGroup::with_limit(bytes)?;
            setup.run_rangecache_under(group.run());
            groups.push(group);
        }
        rows.push(measured(&mut setup, keys, kind, bound).await?);
    }
    println!(
        "\n{keys} objects, {megabytes} MB; {GETS_PER_SECOND} GETs a second\n\n\
         | `--cache-max-bytes` | ready after | packed | only in etcd | from memory | p50 | p99 | resident, at most |\n|---|---|---|---|---|---|---|---|"
    );
    for row in &rows {
        let micros = |share| row.reads.percentile_ns(share) / 1000;
        println!(
            "| {} | {:.1} s | {:.0} % | {:.0} % | {:.1} % | {} µs | {} µs | {} MB |",
            row.bound,
            row.ready.as_secs_f64(),
            100.0 * row.packed_bytes / row.all_bytes.max(1.0),
            100.0 * row.not_held_bytes / row.all_bytes.max(1.0),
            100.0 * row.from_memory,
            micros(0.5),
            micros(0.99),
            row.peak_bytes / 1_000_000
        );
        if let Some(error) = &row.reads.first_error {
            println!("{} reads failed, the first: {error}", row.reads.errors);
        }
    }
    Ok(())
}

async fn measured(setup: &mut Setup, keys: usize, kind: Objects, bound: Bound) -> Result<Row> {
    let began = Instant::now();
    let flags = bound.flags();
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    setup.start_only(Kind::Rangecache, &flags).await?;
    let ready = began.elapsed();
    let targets = setup.targets();
    let mut targets = targets.iter();
    let target = targets
        .find(|target| target.kind == Kind::Rangecache)
        .context("rangecache was just started")?;
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(Arc::new(Connection::open(target.address, Windows::LARGE).await?));
    }
    let before = target.range_outcomes().await?.unwrap_or_default();
    let reads = open_loop(GETS_PER_SECOND, DURATION, move |number| {
        let connection = connections[number % CONNECTIONS].clone();
        let op = Op::range(&wire::get_request(kind.read_key(spread(number) % keys)));
        async move {
            let called = connection.call(op.method, op.body).await;
            called.map_err(|error| error.to_string())
        }
    })
    .await?;
    let after = target.range_outcomes().await?.unwrap_or_default();
    let metrics = target.outcomes.context("rangecache has metrics")?;
    let pid = target.proxy_pid.context("rangecache is a process")?;
    Ok(Row {
        bound,
        ready,
        reads,
        from_memory: (after.from_memory - before.from_memory) / (after.all - before.all).max(1.0),
        packed_bytes: http1::read_metric(metrics, "rangecache_mirror_packed_encoded_bytes").await?,
        not_held_bytes: http1::read_metric(metrics, "rangecache_mirror_not_held_bytes").await?,
        all_bytes: http1::read_metric(metrics, "rangecache_mirror_load_bytes").await?,
        peak_bytes: usage::memory(pid)?.peak_bytes,
    })
}

async fn fill(etcd: &Arc<Connection>, keys: usize, kind: Objects) -> Result<()> {
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..FILL_IN_FLIGHT {
        let (etcd, next) = (etcd.clone(), next.clone());
        workers.spawn(async move {
            loop {
                let first = next.fetch_add(PER_TXN, Ordering::Relaxed);
                if first >= keys {
                    return Ok::<_, anyhow::Error>(());
                }
                let puts = first..(first + PER_TXN).min(keys);
                let request = TxnRequest {
                    success: puts
                        .map(|number| RequestOp::put(kind.key(number), kind.object(number)))
                        .collect(),
                    ..TxnRequest::default()
                };
                etcd.call(Method::Txn, wire::frame(&request)).await?;
            }
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker??;
    }
    Ok(())
}

/// Kind of the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Objects {
    /// Like pods; all are read.
    Pods,
    /// At random, which does not shrink; one of five is read.
    Random,
}

impl Objects {
    fn key(self, number: usize) -> String {
        let prefix = match self {
            Objects::Random if !number.is_multiple_of(5) => UNREAD_PREFIX,
            _ => PREFIX,
        };
        format!("{prefix}namespace-{:03}/app-{number:07}", number / 1000)
    }

    /// The key of an object that is read.
    fn read_key(self, number: usize) -> String {
        match self {
            Objects::Pods => self.key(number),
            Objects::Random => self.key(number / 5 * 5),
        }
    }

    fn object(self, number: usize) -> Vec<u8> {
        match self {
            Objects::Pods => pod(number),
            Objects::Random => (0..RANDOM_BYTES / 8)
                .flat_map(|word| (spread(number * RANDOM_BYTES + word) as u64).to_le_bytes())
                .collect(),
        }
    }
}

/// A number that is unlike those of its neighbours.
fn spread(number: usize) -> usize {
    let mut hash = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^= hash >> 31;
    #[allow(clippy::cast_possible_truncation, reason = "any number will do")]
    let spread = (hash >> 8) as usize;
    spread
}

/// An object like a pod: what is the same in all, what its application has in common, and what is its own.
fn pod(number: usize) -> Vec<u8> {
    let own = |salt: usize| {
        format!(
            "{:016x}{:016x}",
            spread(number * 8 + salt),
            spread(number * 8 + salt + 4)
        )
    };
    let app = number / 10;
    let mut text = format!(
        "k8s\0v1 Pod metadata name app-{number:07} uid {} labels app.kubernetes.io/name app-{app} pod-template-hash {:x} annotations checksum/config {} ",
        own(0),
        spread(app),
        own(1)
    );
    for container in 0..4 {
        text.push_str(&format!(
            "container name part-{container} image registry.example.com/team-{}/app-{app}:v1.{}.{container} imageID sha256:{} \
             args --config=/etc/app/config.yaml --log-level=info --listen=:{} env POD_NAME fieldRef metadata.name env POD_NAMESPACE \
             fieldRef metadata.namespace ports containerPort {} protocol TCP resources requests cpu 100m memory 128Mi limits memory 256Mi \
             readinessProbe httpGet path /ready port http initialDelaySeconds 5 periodSeconds 10 volumeMounts name config mountPath /etc/app \
             volumeMounts name kube-api-access readOnly true mountPath /var/run/secrets/kubernetes.io/serviceaccount \
             terminationMessagePath /dev/termination-log imagePullPolicy IfNotPresent state running startedAt 2026-01-01T00:00:{:02}Z \
             containerID containerd://{}{} ",
            app % 40,
            app % 7,
            own(2),
            8000 + app % 100,
            8000 + app % 100,
            number % 60,
            own(3),
            spread(number + container)
        ));
    }
    for field in ["PodScheduled", "Initialized", "ContainersReady", "Ready"] {
        text.push_str(&format!(
            "managedFields manager kubelet operation Update f:status f:conditions k:{{\"type\":\"{field}\"}} f:lastProbeTime f:lastTransitionTime \
             f:status f:type conditions type {field} status True lastTransitionTime 2026-01-01T00:00:{:02}Z ",
            number % 60
        ));
    }
    text.into_bytes()
}
