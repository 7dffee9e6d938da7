//! CPU time, memory and descriptors of a process, and the machine that it runs on.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use procfs::process::Process;
use procfs::{Current, LoadAverage};

fn process(pid: u32) -> Result<Process> {
    let pid = i32::try_from(pid)?;
    Process::new(pid).with_context(|| format!("process {pid} has ended"))
}

/// CPU time of a process so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct CpuSample {
    /// Nanoseconds on a CPU by thread id: exact, but without threads that have ended.
    threads_ns: BTreeMap<i32, u64>,
    /// User and system time of the whole process, ended threads included, in steps of 10 ms.
    total_ns: u64,
}

impl CpuSample {
    /// Reads a process's CPU time.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let process = process(pid)?;
        let stat = process.stat()?;
        let tick_ns = 1_000_000_000 / procfs::ticks_per_second();
        let total_ns = (stat.utime + stat.stime) * tick_ns;
        // A thread may end between the listing and the reading.
        let threads_ns = process.tasks()?.flatten().filter_map(|task| {
            let time = task.schedstat().ok()?.sum_exec_runtime;
            Some((task.tid, time))
        });
        Ok(CpuSample {
            threads_ns: threads_ns.collect(),
            total_ns,
        })
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

/// Resident memory now and its peak since the last [`reset_peak`], in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    /// Resident now.
    pub(crate) rss_bytes: u64,
    /// The peak since the last reset.
    pub(crate) peak_bytes: u64,
}

/// Reads a process's memory.
pub(crate) fn memory(pid: u32) -> Result<Memory> {
    let status = process(pid)?.status()?;
    let kib = |value: Option<u64>| value.context("no memory in /proc/PID/status");
    Ok(Memory {
        rss_bytes: kib(status.vmrss)? * 1024,
        peak_bytes: kib(status.vmhwm)? * 1024,
    })
}

/// Restarts the peak from what is resident now.
pub(crate) fn reset_peak(pid: u32) -> Result<()> {
    process(pid)?
        .clear_refs(procfs::process::ClearRefs::PeakRSS)
        .with_context(|| format!("cannot reset the peak memory of process {pid} by clear_refs"))
}

/// Number of open descriptors and of threads.
pub(crate) fn descriptors_and_threads(pid: u32) -> Result<(usize, usize)> {
    let process = process(pid)?;
    Ok((process.fd_count()?, process.tasks()?.count()))
}

/// The machine in one line: processor, cores, memory, kernel.
pub(crate) fn machine() -> String {
    let model = procfs::CpuInfo::current()
        .ok()
        .and_then(|cpus| cpus.model_name(0).map(str::to_owned))
        .unwrap_or_else(|| "unknown processor".into());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let gib = procfs::Meminfo::current().map_or(0, |memory| memory.mem_total >> 30);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{model}, {cores} cores, {gib} GB, Linux {}", kernel.trim())
}

/// Number of tasks that want a CPU, averaged over the last minute.
pub(crate) fn load_average() -> f64 {
    LoadAverage::current().map_or(0.0, |load| f64::from(load.one))
}
