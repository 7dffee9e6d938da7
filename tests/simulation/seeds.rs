//! Runs seeds, each in a process of its own: nothing of one seed can influence another, and the source of randomness of the
//! process can be replaced by the seed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;

/// Variable that names the seed to simulate.
pub const SEED: &str = "SIMULATION_SEED";
/// Variable that names its job.
pub const JOB: &str = "SIMULATION_JOB";
/// Stands before the result of a simulation that was judged.
pub const RESULT: &str = "simulated: ";
/// Failures that are printed in full.
const PRINTED: usize = 3;
/// Seeds after which the progress is printed.
const PROGRESS_SEEDS: u64 = 500;
/// Lines of a failing trace that are printed.
const TRACE_LINES: usize = 60;

/// Kinds of faults that the seeds have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// All kinds.
    Mixed,
    /// Histories are replaced above all, several times in each simulation.
    Restores,
    /// All kinds, and those of hubs, through two tiers of rangecaches.
    Hubs,
}

impl Job {
    pub const ALL: [Job; 3] = [Job::Mixed, Job::Restores, Job::Hubs];

    pub fn name(self) -> &'static str {
        match self {
            Job::Mixed => "mixed",
            Job::Restores => "restores",
            Job::Hubs => "hubs",
        }
    }

    /// The job of this name.
    pub fn named(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|job| job.name() == name);
        found.unwrap_or_else(|| panic!("no job {name}; jobs: mixed, restores, hubs"))
    }
}

/// Result of one seed.
pub struct Run {
    pub seed: u64,
    /// The line behind [`RESULT`], which has the hash of the trace; `None` if the process did not come to its end.
    pub result: Option<String>,
    pub is_right: bool,
    pub output: String,
}

/// The library that replaces the source of randomness, compiled once.
fn entropy() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let library = folder.join("entropy.so");
        // Other processes may be using the library.
        let compiling = folder.join(format!("entropy-{}.so", std::process::id()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/simulation/entropy.c");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let compiled = Command::new(compiler)
            .args(["-shared", "-fPIC", "-O2", "-o"])
            .args([&compiling, &source])
            .status()
            .expect("a C compiler is installed");
        assert!(compiled.success(), "{} is compiled", source.display());
        std::fs::rename(&compiling, &library).expect("is in the same folder");
        library
    })
}

/// Simulates one seed of `job`; `prints` shows the trace on this process's output.
pub fn run(job: Job, seed: u64, prints: bool) -> Run {
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    command
        .args([
            "one_seed",
            "--exact",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("LD_PRELOAD", entropy())
        .env(SEED, seed.to_string())
        .env(JOB, job.name());
    if prints {
        command.env("SIMULATION_PRINTS", "1");
        command.stdout(std::process::Stdio::inherit());
        command.stderr(std::process::Stdio::inherit());
    }
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("this test runs");
    let mut output = String::from_utf8_lossy(&stdout).into_owned();
    output.push_str(&String::from_utf8_lossy(&stderr));
    // The test harness may have begun the line.
    let result = output.lines().find_map(|line| line.split_once(RESULT));
    Run {
        seed,
        result: result.map(|(_, result)| result.to_owned()),
        is_right: status.success(),
        output,
    }
}

/// Simulates `count` seeds of `job` from `first` on, a process for each processor at a time. Stops early after a failure if
/// `until_found`. Returns the failing runs in the order of their seeds, and the number of seeds that ran.
pub fn run_all(job: Job, first: u64, count: u64, until_found: bool) -> (Vec<Run>, u64) {
    let (next, failed) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let processes = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..processes {
            scope.spawn(|| {
                loop {
                    if until_found && !failed.lock().expect("no panic").is_empty() {
                        return;
                    }
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let run = run(job, first + number, false);
                    let mut failed = failed.lock().expect("no panic");
                    if !run.is_right {
                        println!("{}: seed {} failed", job.name(), run.seed);
                        failed.push(run);
                    }
                    if number % PROGRESS_SEEDS == 0 && number > 0 {
                        println!(
                            "{}: {number} of {count} seeds, {} failed so far",
                            job.name(),
                            failed.len()
                        );
                    }
                }
            });
        }
    });
    let mut failed = failed.into_inner().expect("no panic");
    failed.sort_by_key(|run: &Run| run.seed);
    (failed, next.into_inner().min(count))
}

/// Prints failing seeds of `job`, each with the command that replays it.
pub fn report(job: Job, failed: &[Run]) {
    let job = job.name();
    for run in &failed[..failed.len().min(PRINTED)] {
        let lines: Vec<_> = run.output.lines().collect();
        let shown = &lines[lines.len().saturating_sub(TRACE_LINES)..];
        println!("{}", shown.join("\n"));
        println!(
            "seed {} failed; its whole trace: make simulate JOB={job} SEED={}",
            run.seed, run.seed
        );
    }
    let seeds: Vec<_> = failed.iter().map(|run| run.seed.to_string()).collect();
    println!("failing seeds of {job}: {}", seeds.join(" "));
}
