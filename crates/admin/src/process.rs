//! Figures of the process, as the kernel has them: its host, CPU time, memory and descriptors.

use std::{fs, time::Duration};

use serde::Serialize;

/// Clock ticks per second of `/proc`, which the kernel fixes for programs.
const TICKS_PER_SECOND: u64 = 100;
/// Bytes per page of `/proc/self/status`' unit.
const KIB: u64 = 1 << 10;

/// Figures of the process.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ProcessStatus {
    pub(crate) pid: u32,
    /// CPU time since the start.
    pub(crate) cpu_seconds: f64,
    /// Memory that is not swapped out.
    pub(crate) resident_bytes: u64,
    /// Open file descriptors.
    pub(crate) open_files: u64,
    /// Running threads.
    pub(crate) threads: u64,
}

impl ProcessStatus {
    /// Figures of now; 0 where the kernel does not say.
    pub(crate) fn now() -> ProcessStatus {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        ProcessStatus {
            pid: std::process::id(),
            cpu_seconds: cpu_time(&fs::read_to_string("/proc/self/stat").unwrap_or_default()).as_secs_f64(),
            resident_bytes: field(&status, "VmRSS:") * KIB,
            open_files: fs::read_dir("/proc/self/fd").map_or(0, |files| files.count() as u64),
            threads: field(&status, "Threads:"),
        }
    }
}

/// Name of the host; in a pod, the pod's.
pub(super) fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// Name of the pod, which the chart takes from Kubernetes' downward API.
pub(super) fn pod() -> Option<String> {
    std::env::var("K8S_POD_NAME").ok().filter(|name| !name.is_empty())
}

/// Number of the line of `/proc/self/status` that begins with `name`.
fn field(status: &str, name: &str) -> u64 {
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix(name));
    value
        .and_then(|value| value.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// User and system time of `/proc/self/stat`.
fn cpu_time(stat: &str) -> Duration {
    // The name of the program, in brackets, may contain blanks.
    let Some((_, rest)) = stat.rsplit_once(')') else {
        return Duration::ZERO;
    };
    let ticks: u64 = rest
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|ticks| ticks.parse::<u64>().ok())
        .sum();
    Duration::from_millis(ticks * 1_000 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_kernels_text() {
        let stat = "7 (a (b) c) S 1 7 7 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 9 0 1 2 3";
        assert_eq!(cpu_time(stat), Duration::from_secs(3));
        assert_eq!(cpu_time(""), Duration::ZERO);
        let status = "Name:\tx\nVmRSS:\t    2048 kB\nThreads:\t9\n";
        assert_eq!((field(status, "VmRSS:"), field(status, "Threads:")), (2048, 9));
        let now = ProcessStatus::now();
        assert!(now.resident_bytes > 0 && now.open_files > 0 && now.threads > 0);
    }
}
