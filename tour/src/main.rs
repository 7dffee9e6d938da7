//! `make run`: the same reads from etcd and through rangecache, side by side, with their cost to etcd.
//!
//! Without `--endpoints` the tour starts an etcd (`target/tools/etcd-3.7`, data in a temporary folder) and fills it like a
//! small Kubernetes cluster; with `--endpoints` it starts rangecache in front of that etcd, and only reads. It runs until
//! Ctrl-C.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a demonstration prints to the terminal"
)]

mod keyspace;
mod metrics;
mod pb;
mod process;
mod read_target;
mod reads;
mod rpc;

use std::future::Future;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

use crate::process::{Etcd, Rangecache, Workspace};
use crate::rpc::EtcdClient;

const USAGE: &str = "usage: tour [--endpoints http://HOST:PORT[,...]]\n\
    Without --endpoints the tour starts a real etcd, and removes it afterwards.";

#[tokio::main]
async fn main() -> ExitCode {
    let endpoints = match arguments(std::env::args().skip(1)) {
        Ok(endpoints) => endpoints,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(64);
        }
    };
    match run(endpoints).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\n{error}");
            for cause in error.chain().skip(1) {
                eprintln!("  because: {cause}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Parses the endpoints of the user's etcd; none if the tour is to start one.
fn arguments(mut args: impl Iterator<Item = String>) -> Result<Vec<String>> {
    let mut endpoints = Vec::new();
    while let Some(arg) = args.next() {
        let value = match arg.split_once('=') {
            Some(("--endpoints", value)) => value.to_owned(),
            None if arg == "--endpoints" => args.next().context("--endpoints needs a URL after it")?,
            _ => bail!("unknown argument {arg}"),
        };
        for url in value.split(',').filter(|url| !url.is_empty()) {
            endpoints.push(match url.split_once("://") {
                None => format!("http://{url}"),
                Some(("http", _)) => url.to_owned(),
                Some(_) => bail!(
                    "the tour supports http:// only, not {url}; for TLS start target/tour/rangecache yourself \
                     (see its --help) and point your client at it"
                ),
            });
        }
    }
    Ok(endpoints)
}

/// Runs the tour until Ctrl-C, SIGTERM or an error, and stops both processes in each case.
async fn run(endpoints: Vec<String>) -> Result<()> {
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
        outcome = show(&workspace, &endpoints, &mut etcd, &mut rangecache) => outcome,
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
    endpoints: &[String],
    etcd: &mut Option<Etcd>,
    rangecache: &mut Option<Rangecache>,
) -> Result<()> {
    let own = endpoints.is_empty();
    let endpoints = if own {
        let started = etcd.insert(Etcd::start(workspace).await?);
        vec![started.client_url.clone()]
    } else {
        endpoints.to_vec()
    };
    let first = endpoints.first().context("no endpoint given")?.clone();
    let mut direct = EtcdClient::connect(&first).await.with_context(|| {
        format!(
            "No response from etcd at {first}. Is it running? ENDPOINTS=http://HOST:PORT names another one."
        )
    })?;
    let version = direct
        .version()
        .await
        .with_context(|| format!("{first} does not respond like an etcd"))?;
    println!(
        "etcd {version:<12} {}{}",
        endpoints.join(","),
        if own { "   (started for this tour)" } else { "" }
    );
    if own {
        let filled = keyspace::fill(&mut direct)
            .await
            .context("etcd refused the tour's keys")?;
        println!("                  filled with {filled}");
    }

    let proxy = rangecache.insert(Rangecache::start(workspace, &endpoints).await?);
    println!(
        "rangecache        {}   status page {}/",
        proxy.client_url, proxy.metrics_url
    );
    let warm_after = proxy.wait_ready().await?;
    println!(
        "                  warm (mirror loaded) {:.2} s after its start\n",
        warm_after.as_secs_f64()
    );

    let mut through = EtcdClient::connect(&proxy.client_url)
        .await
        .context("no response from rangecache")?;
    let scrapes = metrics::Scrapes {
        etcd_url: first.clone(),
        proxy_url: proxy.metrics_url.clone(),
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
    let etcdctl =
        process::tool("etcdctl").map_or_else(|_| "etcdctl".to_owned(), |path| path.display().to_string());
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
