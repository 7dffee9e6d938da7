//! A control group with a memory limit, as a container has: for a rangecache that is started in it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A control group of version 1 or 2; removed when dropped, if nothing runs in it.
#[derive(Debug)]
pub(crate) struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Makes a group whose processes may take `bytes`. Needs root.
    pub(crate) fn with_limit(bytes: u64) -> Result<MemoryGroup> {
        let first_version = Path::new("/sys/fs/cgroup/memory");
        let (parent, limit) = if first_version.is_dir() {
            (first_version, "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup"), "memory.max")
        };
        let path = parent.join(format!("rangecache-bench-{}", std::process::id()));
        let made = || {
            fs::create_dir(&path)?;
            fs::write(path.join(limit), bytes.to_string())
        };
        made().with_context(|| format!("{}: a group with a memory limit needs root", path.display()))?;
        Ok(MemoryGroup(path))
    }

    /// The beginning of a command line that runs the rest of it in the group.
    pub(crate) fn run(&self) -> Vec<String> {
        let join = format!("echo $$ > {}/cgroup.procs; exec \"$0\" \"$@\"", self.0.display());
        ["sh", "-c", &join].map(str::to_owned).to_vec()
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}
