//! Benchmark suite: drives etcd, its grpc-proxy, rangecache and a replay server in turns and prints one table. Not a
//! test: the exit code is 0 whatever the figures are, and another one only if the suite could not run.
#![allow(clippy::print_stdout, reason = "prints the table")]

mod args;
mod beside;
mod cases;
mod churn;
mod client;
mod dataset;
mod fleet;
mod fleet_load;
mod gap;
mod http1;
mod instructions;
mod json;
mod load;
mod measure;
mod open_loop;
mod processes;
#[path = "../shared/program.rs"]
mod program;
mod replay_server;

mod memory_group;
mod report;
mod scarce;
mod soak;

mod svg;
mod table;
mod targets;
mod tls;
mod tracing;
mod train;
mod usage;
mod watch_message;
mod watch_soak;
mod watchers;
mod wire;
mod writes;

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use args::{Args, Mode};
use processes::{Binaries, EtcdOptions};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    program::run(run)
}

async fn run(args: Args) -> Result<()> {
    match args.mode {
        Some(Mode::ReplayServer { upstream }) => replay_server::run(upstream).await,
        _ => suite(args).await,
    }
}

async fn suite(args: Args) -> Result<()> {
    let binaries = Binaries::find(&args.rangecache_flags, args.baseline.clone())?;
    let options = EtcdOptions {
        no_fsync: args.no_fsync,
        tls: None,
    };
    let heading = table::Heading {
        machine: usage::machine(),
        versions: versions(&binaries, options),
        rounds: args.rounds,
        watchers_beside: args.watchers_beside,
        load_before: usage::load_average(),
    };
    let suite = cases::Suite {
        args,
        binaries,
        options,
    };
    let report = match suite.args.mode {
        Some(Mode::Soak { seconds }) => {
            println!("{}\n{}", heading.machine, heading.versions);
            return soak::run(&suite, seconds).await;
        }
        Some(Mode::Churn { seconds }) => {
            println!("{}\n{}", heading.machine, heading.versions);
            return churn::run(&suite, seconds).await;
        }
        Some(Mode::Scarce {
            megabytes,
            random,
            container_mib,
        }) => {
            println!("{}\n{}", heading.machine, heading.versions);
            let objects = if random {
                scarce::Objects::Random
            } else {
                scarce::Objects::Pods
            };
            return scarce::run(&suite, megabytes, objects, container_mib).await;
        }
        Some(Mode::Gap {
            megabytes,
            value_bytes,
        }) => {
            println!("{}\n{}", heading.machine, heading.versions);
            return gap::run(&suite, megabytes, value_bytes).await;
        }
        Some(Mode::Writes { per_second }) => {
            println!("{}\n{}", heading.machine, heading.versions);
            return writes::run(&suite, per_second).await;
        }
        Some(Mode::WatchSoak { minutes, watchers }) => {
            println!("{}\n{}", heading.machine, heading.versions);
            return watch_soak::run(minutes, watchers).await;
        }
        Some(Mode::Instructions) => {
            println!("{}\n{}", heading.machine, heading.versions);
            return instructions::run(&suite).await;
        }
        Some(Mode::Train) => return train::run(&suite).await,
        Some(Mode::Tracing) => {
            println!("{}\n{}", heading.machine, heading.versions);
            return tracing::run(&suite).await;
        }
        Some(Mode::FleetLoad(ref fleet)) => {
            println!("{}\n{}", heading.machine, heading.versions);
            return fleet_load::run(&suite, fleet).await;
        }
        Some(Mode::Fleet) => fleet::run(&suite).await?,
        _ => cases::run(&suite).await,
    };
    println!("{}", table::write(&heading, &report));
    if let Some(path) = &suite.args.json {
        std::fs::write(path, json::write(&heading, &report))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(folder) = &suite.args.svg {
        svg::write(folder, &report)?;
    }
    Ok(())
}

/// Versions that the programs print.
fn versions(binaries: &Binaries, options: EtcdOptions) -> String {
    let first_line = |program: &std::path::Path| {
        let output = Command::new(program).arg("--version").env_clear().output();
        let text = output
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .unwrap_or_default();
        text.lines().next().unwrap_or("unknown version").trim().to_owned()
    };
    let fsync = if options.no_fsync { " without fsync" } else { "" };
    format!(
        "{}{fsync}; {}",
        first_line(&binaries.etcd),
        first_line(&binaries.rangecache)
    )
}
