//! What a process used: CPU time and memory, from `/proc`.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};

/// CPU time of a process so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct CpuSample {
    /// Nanoseconds on a CPU by thread id: exact, but a thread that has ended is forgotten.
    threads_ns: BTreeMap<u32, u64>,
    /// User and system time of the whole process, ended threads included, in steps of 10 ms.
    total_ns: u64,
}

/// Linux counts process times in hundredths of a second for user space, whatever its own tick.
const TICK_NS: u64 = 10_000_000;

impl CpuSample {
    /// Reads a process's CPU time.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))
            .with_context(|| format!("process {pid} has ended"))?;
        // The command in parentheses may hold spaces; the fields are counted after it, state being the first.
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        let field = |index: usize| {
            fields
                .get(index)
                .and_then(|text| text.parse::<u64>().ok())
                .unwrap_or(0)
        };
        let total_ns = (field(11) + field(12)) * TICK_NS;
        let mut threads_ns = BTreeMap::new();
        for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
            let Some(tid) = task.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A thread may end between the listing and the reading.
            let Ok(text) = fs::read_to_string(task.path().join("schedstat")) else {
                continue;
            };
            if let Some(ns) = text.split(' ').next().and_then(|text| text.parse().ok()) {
                threads_ns.insert(tid, ns);
            }
        }
        Ok(CpuSample { threads_ns, total_ns })
    }

    /// CPU nanoseconds since an earlier sample of the same process.
    pub(crate) fn since(&self, earlier: &CpuSample) -> u64 {
        let thread_ended = earlier
            .threads_ns
            .keys()
            .any(|tid| !self.threads_ns.contains_key(tid));
        if thread_ended || self.threads_ns.is_empty() {
            return self.total_ns.saturating_sub(earlier.total_ns);
        }
        let sum = |sample: &CpuSample| sample.threads_ns.values().sum::<u64>();
        sum(self).saturating_sub(sum(earlier))
    }
}

/// Resident memory now and at its highest since the last [`reset_peak`], in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    /// Resident now.
    pub(crate) rss_bytes: u64,
    /// The highest since the last reset.
    pub(crate) peak_bytes: u64,
}

/// Reads a process's memory.
pub(crate) fn memory(pid: u32) -> Result<Memory> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))
        .with_context(|| format!("process {pid} has ended"))?;
    let field = |name: &str| -> Result<u64> {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .context("no memory in status")?;
        let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kilobytes * 1024)
    };
    Ok(Memory {
        rss_bytes: field("VmRSS:")?,
        peak_bytes: field("VmHWM:")?,
    })
}

/// Makes the peak start again from what is resident now.
pub(crate) fn reset_peak(pid: u32) -> Result<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5")
        .with_context(|| format!("cannot reset the peak memory of process {pid} by clear_refs"))
}

/// Open descriptors and threads.
pub(crate) fn descriptors_and_threads(pid: u32) -> Result<(usize, usize)> {
    let count =
        |folder: &str| -> Result<usize> { Ok(fs::read_dir(format!("/proc/{pid}/{folder}"))?.count()) };
    Ok((count("fd")?, count("task")?))
}

/// The machine in one line: processor, cores, memory, kernel.
pub(crate) fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let after = |text: &str, name: &str| {
        text.lines()
            .find(|line| line.starts_with(name))
            .and_then(|line| line.split_once(':'))
            .map(|(_, value)| value.trim().to_owned())
            .unwrap_or_else(|| "unknown".into())
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kilobytes: u64 = after(&read("/proc/meminfo"), "MemTotal")
        .trim_end_matches(" kB")
        .parse()
        .unwrap_or_default();
    format!(
        "{}, {cores} cores, {} GB, Linux {}",
        after(&read("/proc/cpuinfo"), "model name"),
        kilobytes >> 20,
        read("/proc/sys/kernel/osrelease").trim()
    )
}

/// How many tasks want a CPU, averaged over the last minute.
pub(crate) fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ')
        .next()
        .and_then(|load| load.parse().ok())
        .unwrap_or(0.0)
}
