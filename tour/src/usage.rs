//! CPU and memory of a process, as the kernel counts them (Linux).

use std::fs;
use std::time::Duration;

/// The kernel's clock tick, in which it shows CPU time: a hundredth of a second on every Linux.
const TICK: Duration = Duration::from_millis(10);

/// CPU and memory of a process since [`Meter::start`].
pub(crate) struct Usage {
    pub(crate) cpu: Duration,
    /// From the memory at the start to the most since.
    pub(crate) memory_bytes: u64,
}

/// Measures one process.
pub(crate) struct Meter {
    process: u32,
    cpu: Duration,
    memory_bytes: u64,
}

impl Meter {
    /// `None` if the kernel does not tell.
    pub(crate) fn start(process: Option<u32>) -> Option<Meter> {
        let process = process?;
        // The peak is counted from now on.
        fs::write(format!("/proc/{process}/clear_refs"), "5").ok()?;
        Some(Meter {
            process,
            cpu: cpu(process)?,
            memory_bytes: memory_bytes(process, "VmRSS:")?,
        })
    }

    pub(crate) fn usage(&self) -> Option<Usage> {
        Some(Usage {
            cpu: cpu(self.process)?.saturating_sub(self.cpu),
            memory_bytes: memory_bytes(self.process, "VmHWM:")?.saturating_sub(self.memory_bytes),
        })
    }
}

/// CPU time of all threads, in user mode and in the kernel.
fn cpu(process: u32) -> Option<Duration> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in parentheses, may contain spaces.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u32>().ok();
    Some(TICK * ticks()?.checked_add(ticks()?)?)
}

/// The line of this name, which is in kibibytes.
fn memory_bytes(process: u32, name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}
