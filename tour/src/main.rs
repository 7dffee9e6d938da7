//! `make run`: a herd of clients, and the same reads, straight from etcd and through rangecache, with their cost to etcd.
//!
//! Without `--endpoints` the tour starts an etcd (`target/tools/etcd-3.7`, data in a temporary folder) and fills it like a
//! small Kubernetes cluster; with `--endpoints` it starts rangecache in front of that etcd, only reads, and sends no herd. It
//! runs until Ctrl-C.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a demonstration prints to the terminal"
)]

mod herd;
mod keyspace;
mod metrics;
mod pb;
mod process;
mod read_target;
mod reads;
mod rpc;
mod usage;

use std::future::Future;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Parser;
use rangecache_base::net::Url;
use rangecache_edge::tls::{Connector, TlsConfig};
use tokio::signal::unix::{SignalKind, signal};

use crate::herd::Herd;
use crate::process::{Etcd, Rangecache, Workspace};
use crate::rpc::EtcdClient;

/// Shows rangecache in front of an etcd.
#[derive(Debug, Parser)]
struct Args {
    /// Client URLs of your etcd, comma-separated; without them the tour starts an etcd, and removes it afterwards
    #[arg(long, value_name = "URL,…", value_delimiter = ',')]
    endpoints: Vec<Url>,
    #[command(flatten)]
    tls: TlsConfig,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\n{error}");
            let mut causes: Vec<String> = error.chain().skip(1).map(ToString::to_string).collect();
            causes.dedup();
            causes.iter().for_each(|cause| eprintln!("  because: {cause}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs the tour until Ctrl-C, SIGTERM or an error, and stops both processes in each case.
async fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::create()?;
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut terminations = signal(SignalKind::terminate())?;
    let interrupted = async {
        tokio::select! {
            _ = interrupts.recv() => {}
            _ = terminations.recv() => {}
        }
    };
    tokio::pin!(interrupted);

    let mut etcd = None;
    let mut rangecache = None;
    let outcome = tokio::select! {
        outcome = show(&workspace, args, &mut etcd, &mut rangecache) => outcome,
        () = &mut interrupted => Ok(()),
    };
    println!("\nStopping.");
    // The proxy first: otherwise it would warn about the stopped etcd.
    if let Some(rangecache) = rangecache {
        rangecache.stop().await;
    }
    if let Some(etcd) = etcd {
        etcd.stop().await;
    }
    outcome
}

/// Starts the servers and shows the reads; returns only on failure.
async fn show(
    workspace: &Workspace,
    args: &Args,
    etcd: &mut Option<Etcd>,
    rangecache: &mut Option<Rangecache>,
) -> Result<()> {
    let own = args.endpoints.is_empty();
    let (endpoints, flags) = if own {
        let started = etcd.insert(Etcd::start(workspace).await?);
        let url = started.client_url.clone();
        (vec![url.clone()], vec!["--endpoints".to_owned(), url.to_string()])
    } else {
        // rangecache gets the same flags.
        (args.endpoints.clone(), std::env::args().skip(1).collect())
    };
    let first = endpoints.first().context("no endpoint given")?.clone();
    args.tls.validate(&endpoints, &[], &[], false)?;
    let connector = Connector::open(&args.tls, &endpoints, false, &Arc::default())?;
    let mut direct = EtcdClient::connect(&connector, &first).await.with_context(|| {
        format!("etcd at {first} cannot be reached. ENDPOINTS=http://HOST:PORT names another one.")
    })?;
    let version = direct
        .version()
        .await
        .with_context(|| format!("{first} does not respond like an etcd"))?;
    println!(
        "etcd {version:<12} {}{}",
        endpoints.iter().map(Url::to_string).collect::<Vec<_>>().join(","),
        if own { "   (started for this tour)" } else { "" }
    );
    if own {
        let filled = keyspace::fill(&mut direct)
            .await
            .context("etcd refused the tour's keys")?;
        println!("                  filled with {filled}");
    }

    let proxy = rangecache.insert(Rangecache::start(&flags).await?);
    println!(
        "rangecache        {}   status page {}/",
        proxy.client_url, proxy.metrics_url
    );
    let warm_after = proxy.wait_ready().await?;
    println!(
        "                  warm (mirror loaded) {:.2} s after its start\n",
        warm_after.as_secs_f64()
    );

    let mut through = EtcdClient::connect(&connector, &proxy.client_url)
        .await
        .context("no response from rangecache")?;
    let scrapes = metrics::Scrapes {
        etcd: first,
        proxy: proxy.metrics_url.clone(),
        connector,
    };
    let target = if own {
        keyspace::read_target()
    } else {
        reads::survey(&mut direct).await?
    };
    match target {
        None => {
            println!(
                "This etcd holds no keys, so there is nothing to read. Put some keys and run the tour again."
            )
        }
        Some(target) => {
            if let Some(etcd) = &etcd {
                let herd = Herd {
                    target: &target,
                    scrapes: &scrapes,
                    etcd: etcd.process(),
                    rangecache: proxy.process(),
                };
                herd.show(&mut direct, &proxy.client_url).await?;
            }
            reads::compare(&target, &mut direct, &mut through, &scrapes).await?;
            if own {
                reads::write_then_read(&mut direct, &mut through, &scrapes).await?;
            }
        }
    }
    next_steps(proxy, own);
    proxy.watch_over(etcd.as_mut()).await
}

fn next_steps(proxy: &Rangecache, own: bool) {
    let etcdctl = process::tool("etcdctl").unwrap_or_else(|_| "etcdctl".into());
    let here = std::env::current_dir().unwrap_or_default();
    let etcdctl = etcdctl.strip_prefix(here).unwrap_or(&etcdctl).display();
    let prefix = if own { "/registry/pods/ns-00/" } else { "''" };
    println!("Try it yourself, in another terminal:");
    println!(
        "  {etcdctl} --endpoints {} get {prefix} --prefix --keys-only --limit 5",
        proxy.client_url
    );
    println!(
        "  {etcdctl} --endpoints {} watch {prefix} --prefix",
        proxy.client_url
    );
    println!(
        "or point any etcd client at it, such as kube-apiserver --etcd-servers={}",
        proxy.client_url
    );
    println!("Status page, with the outcome of reads: {}/", proxy.metrics_url);
    println!(
        "Metrics:                                {}/metrics",
        proxy.metrics_url
    );
    println!(
        "Readiness:                              {}/readyz",
        proxy.metrics_url
    );
    println!("\nRunning until Ctrl-C.");
}

/// Polls `condition` every 20 ms until it returns a value; `None` after `deadline_seconds`.
async fn eventually<T, F>(deadline_seconds: u64, mut condition: impl FnMut() -> F) -> Option<T>
where
    F: Future<Output = Option<T>>,
{
    let polling = async {
        loop {
            if let Some(value) = condition().await {
                return value;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(deadline_seconds), polling)
        .await
        .ok()
}
