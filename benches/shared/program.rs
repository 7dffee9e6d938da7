//! A benchmark as a program: its command line, its end by a signal, and its exit code.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

/// Does `work` with the arguments of the command line.
pub(crate) fn run<A: Parser>(work: impl AsyncFnOnce(A) -> Result<()>) -> ExitCode {
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(message) => {
            // A closed pipe needs no report.
            let _ = message.print();
            // Misuse exits 64, like rangecache itself.
            return ExitCode::from(if message.use_stderr() { 64 } else { 0 });
        }
    };
    match until_interrupted(work(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The causes in one line: a backtrace would hide what to do. A closed pipe needs no report.
            let _ = writeln!(std::io::stderr(), "{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn until_interrupted(work: impl Future<Output = Result<()>>) -> Result<()> {
    // Two threads: the client must be able to use the CPU time that the servers leave, on a small machine as well.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        tokio::select! {
            outcome = work => outcome,
            // Dropping the work stops every process that it started.
            _ = interrupted() => anyhow::bail!("interrupted"),
        }
    })
}

/// Waits for SIGINT or SIGTERM.
async fn interrupted() -> Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        outcome = tokio::signal::ctrl_c() => Ok(outcome?),
        _ = terminate.recv() => Ok(()),
    }
}
