//! `make abuse`: one client misbehaves in every known way, and an honest client next to it must not notice. Starts an
//! etcd and the release build of rangecache under a memory cap; prints one row per behaviour. Not a test: the exit code
//! is 0 whatever the figures are, and another one only if a behaviour could not be measured.
#![allow(clippy::print_stdout, reason = "prints the table")]

mod admin;
mod args;
mod attacker;
mod control_group;
mod counts;
mod dataset;
mod held_calls;
mod honest;
mod lists;
mod measure;
mod raw_http2;
mod report;
mod sockets;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use args::{Args, Mode};

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(message) => {
            // A closed pipe needs no report.
            let _ = message.print();
            return ExitCode::from(if message.use_stderr() { 64 } else { 0 });
        }
    };
    match start(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(args: Args) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let work = async {
            match args.mode {
                Some(Mode::Attack(ref attack)) => attacker::run(attack).await,
                None => measure::run(&args).await,
            }
        };
        tokio::select! {
            outcome = work => outcome,
            // Dropping the work stops every process that it started.
            _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted"),
        }
    })
}
