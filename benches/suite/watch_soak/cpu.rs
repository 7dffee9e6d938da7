//! CPU time of the servers and of the load program.

use std::fmt;
use std::time::Instant;

use anyhow::Result;

use crate::usage::CpuSample;

/// CPU time since the last look.
pub(super) struct CpuMeter {
    rangecache_pid: u32,
    last: Instant,
    rangecache: CpuSample,
    load: CpuSample,
    /// CPU seconds of each member since its start.
    members_s: Vec<f64>,
}

/// Cores in use, on average.
#[derive(Clone, Copy, Default)]
pub(super) struct Cores {
    rangecache: f64,
    etcd: f64,
    load: f64,
}

impl CpuMeter {
    pub(super) fn start(rangecache_pid: u32) -> Result<CpuMeter> {
        Ok(CpuMeter {
            rangecache_pid,
            last: Instant::now(),
            rangecache: CpuSample::of(rangecache_pid)?,
            load: CpuSample::of(std::process::id())?,
            members_s: Vec::new(),
        })
    }

    /// Cores in use since the last look. `members_s` are the CPU seconds of each member since its start, 0 while it is
    /// down.
    pub(super) fn look(&mut self, members_s: Vec<f64>) -> Result<Cores> {
        let (rangecache, load) = (
            CpuSample::of(self.rangecache_pid)?,
            CpuSample::of(std::process::id())?,
        );
        let seconds = self.last.elapsed().as_secs_f64();
        let before = self.members_s.iter().copied().chain(std::iter::repeat(0.0));
        // A member that was started again begins at 0.
        let etcd: f64 = members_s
            .iter()
            .zip(before)
            .map(|(now, before)| if *now < before { *now } else { now - before })
            .sum();
        let cores = Cores {
            rangecache: rangecache.since(&self.rangecache) as f64 / 1e9 / seconds,
            etcd: etcd / seconds,
            load: load.since(&self.load) as f64 / 1e9 / seconds,
        };
        *self = CpuMeter {
            rangecache_pid: self.rangecache_pid,
            last: Instant::now(),
            rangecache,
            load,
            members_s,
        };
        Ok(cores)
    }
}

impl Cores {
    pub(super) fn mean(samples: &[Cores]) -> Cores {
        let mean = |of: fn(&Cores) -> f64| samples.iter().map(of).sum::<f64>() / samples.len().max(1) as f64;
        Cores {
            rangecache: mean(|cores| cores.rangecache),
            etcd: mean(|cores| cores.etcd),
            load: mean(|cores| cores.load),
        }
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!(
            "{:.2}/{:.2}/{:.2}",
            self.rangecache, self.etcd, self.load
        ))
    }
}
