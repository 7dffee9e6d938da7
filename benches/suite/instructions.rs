//! Instructions of rangecache for each call, counted by callgrind: equal to about 1 % on an idle machine and beside other load.
//! And the system calls of a LIST, counted by strace.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::cases::puts::put;
use crate::cases::{Suite, progress};
use crate::client::{Connection, Windows};
use crate::dataset::Dataset;
use crate::load::{self, Op, Shape};
use crate::processes::{self, Binaries, Process};
use crate::targets::Setup;

/// Time for what a tool starts, or writes at its end.
const TOOL_DEADLINE: Duration = Duration::from_secs(60);

/// A row of the table.
struct Case {
    name: &'static str,
    shape: Shape,
    ops: Vec<Op>,
    count: Count,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Count {
    Instructions,
    SystemCalls,
}

impl Count {
    fn unit(self) -> &'static str {
        match self {
            Count::Instructions => "instructions",
            Count::SystemCalls => "system calls",
        }
    }
}

/// Sends each case's calls to a rangecache of its own, and prints a table.
pub(crate) async fn run(suite: &Suite) -> Result<()> {
    let data = Dataset {
        prefix: "/registry/pods/",
        keys: 20_000,
        value_bytes: 1 << 10,
    };
    let setup = Setup::start(&suite.binaries, suite.options).await?;
    let etcd = setup.connect().await?;
    data.fill(&etcd, 0).await?;
    let (mut gets, mut list) = (data.gets(), data.list());
    load::learn(&etcd, &mut gets).await?;
    load::learn(&etcd, &mut list).await?;
    let cases = [
        case("GET alone", &gets, 1, 2_000, Count::Instructions),
        case("GET, 64 in flight", &gets, 64, 4_096, Count::Instructions),
        case("LIST 20k × 1 KB", &list, 1, 3, Count::Instructions),
        case("LIST 20k × 1 KB", &list, 1, 5, Count::SystemCalls),
        // Last: their revision is longer, and so are headers.
        case(
            "PUT alone",
            &[put("/registry/leases/a", 100)],
            1,
            1_000,
            Count::Instructions,
        ),
    ];
    println!("rangecache's part of one call\n");
    println!("| call | count | rangecache | baseline |\n|---|---|---|---|");
    for case in cases {
        let mut counts = vec![count(&setup, &suite.binaries, &case).await?];
        if let Some(rangecache) = suite.binaries.baseline.clone() {
            let binaries = Binaries {
                rangecache,
                ..suite.binaries.clone()
            };
            counts.push(count(&setup, &binaries, &case).await?);
        }
        let [ours, rest @ ..] = &counts[..] else {
            bail!("nothing was counted");
        };
        let baseline = rest.first().map_or_else(
            || "–".to_owned(),
            |baseline| format!("{} ({:.2}×)", grouped(*baseline), baseline / ours),
        );
        println!(
            "| {} | {} | {} | {baseline} |",
            case.name,
            case.count.unit(),
            grouped(*ours)
        );
    }
    Ok(())
}

fn case(name: &'static str, ops: &[Op], in_flight: usize, calls: usize, count: Count) -> Case {
    Case {
        name,
        shape: Shape {
            connections: 1,
            in_flight,
            duration: Duration::ZERO,
            min_calls: calls / in_flight,
        },
        ops: ops.to_vec(),
        count,
    }
}

/// With commas between thousands.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let (mut text, first) = (String::new(), digits.len() % 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && at % 3 == first {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The mean for each call of the case.
async fn count(setup: &Setup, binaries: &Binaries, case: &Case) -> Result<f64> {
    progress(&format!(
        "{} of {}: {}",
        case.count.unit(),
        case.name,
        binaries.rangecache.display()
    ));
    let folder = tempfile::Builder::new().prefix("rangecache-bench-").tempdir()?;
    let out = folder.path().join("counts");
    let mut binaries = binaries.clone();
    if case.count == Count::Instructions {
        let tool = format!(
            "valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file={}",
            out.display()
        );
        binaries.rangecache_under = tool.split(' ').map(str::to_owned).collect();
    }
    let mut process =
        processes::start_rangecache(&binaries, folder.path(), &[setup.endpoint()], &[], &[]).await?;
    process.wait_ready().await?;
    let connections = [Arc::new(Connection::open(process.address, Windows::LARGE).await?)];
    let ops = Arc::new(case.ops.clone());
    // The first calls are of a connection, and of caches, that are new.
    let few = Shape {
        min_calls: case.shape.min_calls.div_ceil(10),
        ..case.shape
    };
    load::closed_loop(&connections, few, &ops).await?;
    let counting = Counting::start(case.count, &process, &out).await?;
    let outcome = load::closed_loop(&connections, case.shape, &ops).await?;
    let total = counting.end(process, &out).await?;
    ensure!(
        outcome.errors == 0 && outcome.calls > 0,
        "calls failed: {}",
        outcome.first_error.unwrap_or_default()
    );
    Ok(total / outcome.calls as f64)
}

/// A tool that counts.
enum Counting {
    Callgrind,
    Strace(Child),
}

impl Counting {
    async fn start(count: Count, process: &Process, out: &Path) -> Result<Counting> {
        match count {
            Count::Instructions => {
                switch("on", process).await?;
                Ok(Counting::Callgrind)
            }
            Count::SystemCalls => {
                let mut command = Command::new("strace");
                command.args(["-f", "-c", "-o"]).arg(out);
                command.args(["-p", &process.pid().to_string()]);
                let mut strace = command
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped())
                    .spawn()
                    .context("cannot start strace: install it")?;
                let (mut line, stderr) = (
                    String::new(),
                    strace.stderr.take().context("no output of strace")?,
                );
                // It reports that it is attached.
                std::io::BufRead::read_line(&mut std::io::BufReader::new(stderr), &mut line)?;
                ensure!(line.contains("attached"), "strace cannot count: {line}");
                Ok(Counting::Strace(strace))
            }
        }
    }

    /// The whole count, once the process has ended.
    async fn end(self, mut process: Process, out: &Path) -> Result<f64> {
        match self {
            Counting::Callgrind => {
                switch("off", &process).await?;
                process.terminate(TOOL_DEADLINE).await?;
                let text = std::fs::read_to_string(out)?;
                let mut lines = text.lines();
                let total = lines.find_map(|line| line.strip_prefix("totals: "));
                Ok(total.context("callgrind wrote no totals")?.trim().parse()?)
            }
            Counting::Strace(mut strace) => {
                // It ends with what it watches.
                process.stop();
                strace.wait()?;
                let text = std::fs::read_to_string(out)?;
                let total = text.lines().rfind(|line| line.ends_with(" total"));
                // Percent, seconds, microseconds for each, calls, errors if there were any, the name.
                let calls = total.and_then(|line| line.split_whitespace().nth(3));
                Ok(calls.context("strace wrote no total")?.parse()?)
            }
        }
    }
}

/// Makes callgrind count, or no longer.
async fn switch(to: &str, process: &Process) -> Result<()> {
    let mut command = tokio::process::Command::new("callgrind_control");
    command
        .args(["--instr", to])
        .arg(process.pid().to_string())
        .kill_on_drop(true);
    let output = tokio::time::timeout(TOOL_DEADLINE, command.output()).await;
    let output = output
        .context("callgrind does not respond")?
        .context("cannot start callgrind_control: install valgrind")?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
