//! The command that the command line names, and its exit code.

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

use std::process::ExitCode;

use rangecache::cli::{self, Task};
use rangecache::serve;
use rangecache_report::output::print;
use rangecache_tools::{diff, doctor, running, static_pod};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    match Task::from_args() {
        Ok(Task::Serve(serving)) => serve::run(*serving),
        Ok(Task::Doctor(options)) => doctor::run(&options),
        Ok(Task::Diff(options)) => diff::run(&options),
        Ok(Task::Status(options)) => running::status(&options),
        Ok(Task::Health(options)) => running::health(&options),
        Ok(Task::Ctl(options)) => running::ctl(&options),
        Ok(Task::StaticPod(options)) => static_pod::run(&options),
        Ok(Task::Settings { text, .. }) => print(|out| out.write_all(text.as_bytes())),
        Ok(Task::Completions(shell)) => print(|out| cli::completions(shell, out)),
        Ok(Task::Man) => print(cli::man),
        Err(error) => cli::explain(&error),
    }
}
