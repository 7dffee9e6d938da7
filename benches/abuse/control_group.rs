//! A memory control group for rangecache, version 1 or 2, removed on drop.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A control group with a memory limit.
pub(crate) struct ControlGroup(PathBuf);

impl ControlGroup {
    /// Creates a group below this process's own, with `bytes` as its limit. Needs write access to the groups, as root
    /// has in most containers.
    pub(crate) fn create(bytes: u64) -> Result<ControlGroup> {
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let path_of = |wanted: &str| {
            own.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let controllers = fields.next()?;
                (controllers == wanted)
                    .then(|| fields.next().map(|path| path.trim_start_matches('/').to_owned()))?
            })
        };
        let candidates = [
            ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("", "/sys/fs/cgroup", "memory.max"),
        ];
        let name = format!("rangecache-abuse-{}", std::process::id());
        for (controllers, mount, limit) in candidates {
            let Some(path) = path_of(controllers) else {
                continue;
            };
            for parent in [Path::new(mount).join(&path), PathBuf::from(mount)] {
                let group = parent.join(&name);
                if std::fs::create_dir(&group).is_err() {
                    continue;
                }
                let group = ControlGroup(group);
                if std::fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                    return Ok(group);
                }
            }
        }
        Err(anyhow::anyhow!(
            "no memory control group can be created below this process's own: run as root, or with delegated groups"
        ))
    }

    /// The file that takes the ids of the group's processes.
    pub(crate) fn processes(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }

    /// Number of times that the kernel has killed a process of the group because of its limit.
    pub(crate) fn kills(&self) -> Result<u64> {
        let text = ["memory.oom_control", "memory.events"]
            .iter()
            .find_map(|file| std::fs::read_to_string(self.0.join(file)).ok())
            .context("the control group has no count of kills")?;
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        Ok(line.and_then(|count| count.trim().parse().ok()).unwrap_or(0))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // The processes have been killed and are reaped a moment later.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
