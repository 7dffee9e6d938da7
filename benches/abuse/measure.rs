//! Measurement of each behaviour in turn: the honest client before, during and after it, and resources of rangecache.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use testkit::etcd::{Etcd, Version};
use testkit::http;
use testkit::metrics::Metrics;
use testkit::proxy::Rangecache;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::args::{Args, Behaviour};
use crate::control_group::ControlGroup;
use crate::counts::Counted;
use crate::dataset;
use crate::honest::Honest;
use crate::report::{self, Row, Usage};

/// Duration of the honest client's run before each behaviour.
const BEFORE: Duration = Duration::from_secs(10);
/// Honest clients next to one that lists everything.
const HONEST_CLIENTS: u8 = 100;
/// Time after a behaviour within which everything must have been given back; the honest client's run after it.
const AFTER: Duration = Duration::from_secs(5);
/// Time for which the admin port may be slow to answer before it counts as unreachable.
const ADMIN_DEADLINE: Duration = Duration::from_secs(5);

/// The servers of a run.
struct World {
    etcd: Etcd,
    rangecache: Rangecache,
    tls_url: String,
}

impl World {
    async fn start(group: Option<&ControlGroup>, memory_bytes: u64) -> Result<World> {
        let etcd = Etcd::start(Version::V3_7).await;
        dataset::write(&etcd.client().await).await?;
        let mut builder = Rangecache::before(&etcd)
            .with("--no-cache-prefix", dataset::NOT_MIRRORED)
            .with_flag("--auto-tls")
            .listening_on("http://127.0.0.1:0,https://127.0.0.1:0");
        builder = match group {
            Some(group) => builder.in_control_group(&group.processes()),
            // As it would be derived from the limit of a control group.
            None => builder.with("--cache-max-bytes", &(memory_bytes / 2).to_string()),
        };
        let rangecache = builder.start().await;
        let tls_url = rangecache
            .client_urls()
            .into_iter()
            .find(|url| url.starts_with("https://"))
            .context("rangecache does not serve TLS")?;
        Ok(World {
            etcd,
            rangecache,
            tls_url,
        })
    }

    /// URL that plaintext clients call.
    fn client_url(&self, args: &Args) -> String {
        if args.direct {
            self.etcd.url()
        } else {
            self.rangecache.url().to_owned()
        }
    }

    async fn metrics(&self) -> Option<Metrics> {
        let url = format!("{}/metrics", self.rangecache.metrics_url());
        let reachable = tokio::time::timeout(ADMIN_DEADLINE, http::get(&url)).await;
        match reachable {
            Ok(Ok(page)) if page.status == 200 => Some(Metrics::read(&url).await),
            _ => None,
        }
    }

    async fn usage(&self) -> Result<Usage> {
        let process = process(&self.rangecache)?;
        let metrics = self.metrics().await;
        let tasks = metrics.as_ref().map(|metrics| metrics.sum("rangecache_tasks"));
        Ok(Usage {
            rss_bytes: self.rangecache.resident_bytes(),
            descriptors: process.fd_count()?,
            tasks,
            feed_lost: metrics.map_or(0.0, |metrics| {
                metrics.sum_with_label("rangecache_range_total", "reason=\"feed_lost\"")
            }),
        })
    }
}

fn process(rangecache: &Rangecache) -> Result<procfs::process::Process> {
    procfs::process::Process::new(i32::try_from(rangecache.id())?).context("rangecache has ended")
}

/// Measures the chosen behaviours, then all of them together, and prints a table.
pub(crate) async fn run(args: &Args) -> Result<()> {
    let memory_bytes = args.memory_mib << 20;
    let group = ControlGroup::create(memory_bytes);
    match &group {
        Ok(_) => println!(
            "rangecache runs in a memory control group of {} MiB",
            args.memory_mib
        ),
        Err(error) => println!("rangecache runs without a memory cap: {error:#}"),
    }
    let group = group.ok();
    let mut world = World::start(group.as_ref(), memory_bytes).await?;
    let bounds = world.metrics().await.context("the admin port does not answer")?;
    report::print_bounds(&bounds, args.memory_mib);
    report::print_heading();
    let mut rows = Vec::new();
    let mut failed = Vec::new();
    for behaviours in chosen(args) {
        match measure(&world, args, &behaviours, group.as_ref()).await {
            Ok(row) => {
                row.print(memory_bytes);
                rows.push(row);
            }
            Err(error) => {
                let name = report::name(&behaviours);
                println!("\n{name}\n  {error:#}; it is started again");
                failed.push(name);
                drop(world);
                world = World::start(group.as_ref(), memory_bytes).await?;
            }
        }
    }
    report::print_summary(&rows, &failed, memory_bytes);
    Ok(())
}

/// Each behaviour alone; then, if none was chosen, all of them together.
fn chosen(args: &Args) -> Vec<Vec<Behaviour>> {
    let chosen: Vec<Behaviour> = args.behaviours.iter().flatten().copied().collect();
    if !chosen.is_empty() {
        return chosen.into_iter().map(|behaviour| vec![behaviour]).collect();
    }
    let all = Behaviour::value_variants();
    let alone = if args.together { &[] } else { all };
    alone
        .iter()
        .map(|behaviour| vec![*behaviour])
        .chain([all.to_vec()])
        .collect()
}

async fn measure(
    world: &World,
    args: &Args,
    behaviours: &[Behaviour],
    group: Option<&ControlGroup>,
) -> Result<Row> {
    let clients = if behaviours.contains(&Behaviour::ListEverything) {
        HONEST_CLIENTS
    } else {
        1
    };
    let honest = Honest::connect(
        &world.client_url(args),
        &world.tls_url,
        world.rangecache.metrics_url(),
        clients,
    )
    .await?;
    let kills = group.map_or(Ok(0), ControlGroup::kills)?;
    let before = honest.run(BEFORE).await;
    let usage_before = world.usage().await?;
    process(&world.rangecache)?
        .clear_refs(procfs::process::ClearRefs::PeakRSS)
        .context("cannot reset the peak memory")?;
    let attacker = Attacker::start(world, args, behaviours)?;
    let during = honest.run(args.seconds).await;
    let counted = attacker.stop().await?;
    let after = honest.run(AFTER).await;
    let killed = group.map_or(Ok(0), ControlGroup::kills)? - kills;
    anyhow::ensure!(
        killed == 0,
        "MISSED memory: the kernel killed rangecache at its memory limit"
    );
    let peak_kib = process(&world.rangecache)
        .and_then(|process| process.status()?.vmhwm.context("it is a zombie"))
        .with_context(|| format!("MISSED rangecache has ended; its log ends with:\n{}", tail(world)))?;
    Ok(Row {
        name: report::name(behaviours),
        phases: [before, during, after],
        peak_bytes: peak_kib * 1024,
        usage_before,
        usage_after: world.usage().await?,
        counted,
    })
}

fn tail(world: &World) -> String {
    let log = world.rangecache.log();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

/// The misbehaving process.
struct Attacker {
    child: Child,
    lines: tokio::task::JoinHandle<Counted>,
}

impl Attacker {
    fn start(world: &World, args: &Args, behaviours: &[Behaviour]) -> Result<Attacker> {
        let this: PathBuf = std::env::current_exe()?;
        let address = |url: &str| url.rsplit('/').next().unwrap_or(url).to_owned();
        let names: Vec<String> = behaviours.iter().map(|behaviour| behaviour.name()).collect();
        let mut child = Command::new("nice")
            .args(["-n", "19"])
            .arg(this)
            .args(["attack", "--behaviours", &names.join(",")])
            .args(["--client", &address(&world.client_url(args))])
            .args(["--tls", &address(&world.tls_url)])
            .args(["--admin", &address(world.rangecache.metrics_url())])
            .args(["--connections", &args.connections.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start the misbehaving process")?;
        let output = child.stdout.take().context("no output")?;
        let lines = tokio::spawn(async move {
            let mut lines = BufReader::new(output).lines();
            let mut last = Counted::default();
            while let Ok(Some(line)) = lines.next_line().await {
                last = serde_json::from_str(&line).unwrap_or(last);
            }
            last
        });
        Ok(Attacker { child, lines })
    }

    /// Kills it: its connections are closed by the kernel.
    async fn stop(mut self) -> Result<Counted> {
        anyhow::ensure!(
            self.child.try_wait()?.is_none(),
            "the misbehaving process has ended early"
        );
        self.child.kill().await?;
        Ok(self.lines.await?)
    }
}
