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
#[path = "../shared/program.rs"]
mod program;
mod raw_http2;
mod report;
mod sockets;

use std::process::ExitCode;

use anyhow::Result;

use args::{Args, Mode};

fn main() -> ExitCode {
    program::run(run)
}

async fn run(args: Args) -> Result<()> {
    match args.mode {
        Some(Mode::Attack(ref attack)) => attacker::run(attack).await,
        None => measure::run(&args).await,
    }
}
