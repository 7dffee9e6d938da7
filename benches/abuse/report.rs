//! The table, and which goals were missed.

use testkit::metrics::Metrics;

use crate::args::Behaviour;
use crate::counts::Counted;
use crate::honest::{KINDS, Kind, Latencies, Phase};

/// Goal: the honest client's p99 while the other misbehaves, as a multiple of that before.
const P99_RATIO: f64 = 3.0;
/// Goal: p99 of probes of the admin port, in milliseconds.
const PROBE_MS: f64 = 50.0;
/// Descriptors and tasks that may come and go by themselves.
const SLACK: f64 = 8.0;

/// Resources that rangecache uses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) rss_bytes: u64,
    pub(crate) descriptors: usize,
    /// Tasks alive, as rangecache counts them; `None` if its admin port does not answer.
    pub(crate) tasks: Option<f64>,
    /// Reads that were forwarded because a mirror was out of service.
    pub(crate) feed_lost: f64,
}

/// Before, while and after a behaviour.
pub(crate) type Phases = [Phase; 3];

/// Result of one behaviour.
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) phases: Phases,
    pub(crate) peak_bytes: u64,
    pub(crate) usage_before: Usage,
    pub(crate) usage_after: Usage,
    pub(crate) counted: Counted,
}

/// Name of a set of behaviours.
pub(crate) fn name(behaviours: &[Behaviour]) -> String {
    match behaviours {
        [behaviour] => behaviour.name(),
        _ => "all together".to_owned(),
    }
}

/// Prints the bounds in bytes that rangecache exports.
pub(crate) fn print_bounds(metrics: &Metrics, memory_mib: u64) {
    println!("bounds, as exported by rangecache, next to a memory limit of {memory_mib} MiB:");
    for (sample, value) in &metrics.0 {
        if sample.starts_with("rangecache_limit") && sample.contains("bytes") {
            println!("  {sample} {:.0} MiB", value / f64::from(1 << 20));
        }
    }
}

/// Prints the names of the columns.
pub(crate) fn print_heading() {
    println!(
        "\nLatencies in milliseconds: p50/p99 before, while, and in the 5 s after. Memory, descriptors and tasks of \
         rangecache: before, and 5 s after."
    );
}

impl Row {
    /// Prints the row.
    pub(crate) fn print(&self, memory_bytes: u64) {
        let Counted {
            connections,
            closed,
            calls,
            refused,
            goaway,
        } = self.counted;
        println!("\n{}", self.name);
        println!(
            "  misbehaved: {connections} connections ({closed} closed by rangecache), {calls} calls or frames \
             ({refused} refused or ended), {goaway} GOAWAY"
        );
        println!(
            "  memory: {} MiB before, peak {} MiB, {} MiB after; descriptors {} -> {}; tasks {} -> {}",
            mib(self.usage_before.rss_bytes),
            mib(self.peak_bytes),
            mib(self.usage_after.rss_bytes),
            self.usage_before.descriptors,
            self.usage_after.descriptors,
            tasks(self.usage_before),
            tasks(self.usage_after),
        );
        for (at, (_, kind)) in KINDS.iter().enumerate() {
            let of =
                |latencies: &Latencies| format!("{:.1}/{:.1}", latencies.at_ms(50.0), latencies.at_ms(99.0));
            let [before, during, after] = &self.phases;
            println!(
                "  {kind:12} {:>14} {:>16} {:>14}   lost {}{}",
                of(&before[at]),
                of(&during[at]),
                of(&after[at]),
                self.lost(at),
                self.errors(at),
            );
        }
        let missed = self.missed(memory_bytes);
        if missed.is_empty() {
            println!("  every goal is reached");
        }
        for goal in missed {
            println!("  MISSED {goal}");
        }
    }

    fn lost(&self, kind: usize) -> u64 {
        self.phases[1..].iter().map(|phase| phase[kind].lost).sum()
    }

    /// The errors of a kind of call while the other misbehaved and after it.
    fn errors(&self, kind: usize) -> String {
        let errors = self.phases[1..].iter().flat_map(|phase| &phase[kind].errors);
        errors
            .map(|(error, count)| format!("\n    {count} times: {error}"))
            .collect()
    }

    fn missed(&self, memory_bytes: u64) -> Vec<String> {
        let mut missed = Vec::new();
        if self.peak_bytes > memory_bytes {
            missed.push(format!("memory: {} MiB", mib(self.peak_bytes)));
        }
        for (at, (kind, text)) in KINDS.iter().enumerate() {
            if self.lost(at) > 0 {
                missed.push(format!("{text}: {} calls lost", self.lost(at)));
            }
            let p99 = |phase: usize| self.phases[phase][at].at_ms(99.0);
            // Lists by etcd and handshakes share the machine's CPUs with what they wait for: printed, without a goal.
            if matches!(kind, Kind::Get | Kind::List) && p99(1) > P99_RATIO * p99(0) {
                missed.push(format!("{text}: p99 is {:.1} times that before", p99(1) / p99(0)));
            }
        }
        if let Some(probes) = KINDS.iter().position(|(kind, _)| *kind == Kind::Livez)
            && self.phases[1][probes].at_ms(99.0) > PROBE_MS
        {
            missed.push("probes of the admin port take longer than 50 ms".to_owned());
        }
        let (before, after) = (self.usage_before, self.usage_after);
        if after.feed_lost > before.feed_lost {
            missed.push("a mirror left service".to_owned());
        }
        if after.descriptors as f64 > before.descriptors as f64 + SLACK {
            missed.push(format!(
                "descriptors: {} more than before",
                after.descriptors - before.descriptors
            ));
        }
        match (before.tasks, after.tasks) {
            (Some(before), Some(after)) if after > before + SLACK => {
                missed.push(format!("tasks: {} more than before", after - before));
            }
            (_, None) => missed.push("the admin port does not answer after it".to_owned()),
            _ => {}
        }
        missed
    }
}

/// Prints the behaviours whose goals were missed; rangecache did not survive those of `failed`.
pub(crate) fn print_summary(rows: &[Row], failed: &[String], memory_bytes: u64) {
    let missed = rows.iter().filter(|row| !row.missed(memory_bytes).is_empty());
    let names: Vec<&str> = missed
        .map(|row| row.name.as_str())
        .chain(failed.iter().map(String::as_str))
        .collect();
    let all = rows.len() + failed.len();
    if names.is_empty() {
        println!("\nevery goal is reached by all {all} behaviours");
    } else {
        println!(
            "\ngoals are missed by {} of {all}: {}",
            names.len(),
            names.join(", ")
        );
    }
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

fn tasks(usage: Usage) -> String {
    usage
        .tasks
        .map_or("unknown".to_owned(), |tasks| tasks.to_string())
}
