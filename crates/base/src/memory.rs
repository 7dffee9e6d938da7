//! Memory limit of this process. A leaf.

use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Time after which the limit is read again: a container's may be changed while it runs.
const READ_AGAIN: Duration = Duration::from_secs(10);
/// Assumed limit in bytes if nothing can be read.
const UNKNOWN_BYTES: u64 = 2 << 30;

/// Memory that this process may use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The lowest limit of its control groups and their parents.
    Group(u64),
    /// The machine's memory, which other processes use, too.
    Machine(u64),
}

/// The memory limit. Read from the system's files at most every 10 s, as it is asked for with each response to a feed.
#[must_use]
pub fn limit() -> MemoryLimit {
    static LAST: Mutex<Option<(Instant, MemoryLimit)>> = Mutex::new(None);
    last_or(&mut LAST.lock(), || limit_below(Path::new("/")))
}

/// The memory limit in bytes, whatever it is of.
#[must_use]
pub fn limit_bytes() -> u64 {
    match limit() {
        MemoryLimit::Group(bytes) | MemoryLimit::Machine(bytes) => bytes,
    }
}

/// The limit that was read last, or that which `read` returns now.
fn last_or(last: &mut Option<(Instant, MemoryLimit)>, read: impl FnOnce() -> MemoryLimit) -> MemoryLimit {
    match *last {
        Some((at, limit)) if at.elapsed() < READ_AGAIN => limit,
        _ => {
            let limit = read();
            *last = Some((Instant::now(), limit));
            limit
        }
    }
}

/// [`limit`] with the system files below `root`.
fn limit_below(root: &Path) -> MemoryLimit {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let machine = machine_bytes(&read("proc/meminfo")).unwrap_or(UNKNOWN_BYTES);
    let groups = read("proc/self/cgroup");
    let limits = groups.lines().flat_map(|line| group_limits(root, line));
    match limits.min() {
        Some(group) if group < machine => MemoryLimit::Group(group),
        _ => MemoryLimit::Machine(machine),
    }
}

fn machine_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Limits of the group that a line of `/proc/self/cgroup` names (`id:controllers:path`), and of its parents. A
/// container sees its own group as the root, or under the path on the host: both are read if they exist.
fn group_limits(root: &Path, line: &str) -> Vec<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
        return Vec::new();
    };
    let (mount, file) = match controllers {
        "" => ("sys/fs/cgroup", "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return Vec::new(),
    };
    let group = PathBuf::from(path.trim_start_matches('/'));
    let limit = |group: &Path| {
        let text = std::fs::read_to_string(root.join(mount).join(group).join(file)).ok()?;
        // "max" means unlimited, and does not parse.
        text.trim().parse().ok()
    };
    group.ancestors().filter_map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn limit_is_read_again_after_ten_seconds() {
        let mut last = None;
        let [one, two] = [1, 2].map(MemoryLimit::Group);
        assert_eq!(last_or(&mut last, || one), one);
        tokio::time::advance(Duration::from_millis(9_999)).await;
        assert_eq!(last_or(&mut last, || panic!("is known")), one);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(last_or(&mut last, || two), two);
    }

    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::TempDir::new().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal:    8388608 kB\nMemFree: 1 kB\n");
    const V2: &str = "sys/fs/cgroup";

    #[test]
    fn lowest_limit_wins() {
        use MemoryLimit::{Group, Machine};
        let root = &format!("{V2}/memory.max");
        let pod = &format!("{V2}/pods/pod1/memory.max");
        let container = &format!("{V2}/pods/pod1/c/memory.max");
        let nested = ("proc/self/cgroup", "0::/pods/pod1/c\n");
        let legacy = (
            "proc/self/cgroup",
            "5:cpu:/elsewhere\n4:memory:/docker/c\n0::/ignored\n",
        );
        let legacy_limit = "sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes";
        for (files, expected) in [
            (vec![], Machine(UNKNOWN_BYTES)),
            (vec![MACHINE], Machine(8 << 30)),
            (
                vec![MACHINE, ("proc/self/cgroup", "0::/\n"), (root, "1048576\n")],
                Group(1 << 20),
            ),
            (
                vec![MACHINE, nested, (container, "max\n"), (pod, "2097152\n")],
                Group(2 << 20),
            ),
            (
                vec![MACHINE, nested, (container, "1048576\n"), (pod, "2097152\n")],
                Group(1 << 20),
            ),
            // The path is that on the host; the container sees only its own group, as the root.
            (vec![MACHINE, nested, (root, "3145728\n")], Group(3 << 20)),
            (
                vec![MACHINE, nested, (container, "99999999999999\n")],
                Machine(8 << 30),
            ),
            (vec![MACHINE, legacy, (legacy_limit, "4194304\n")], Group(4 << 20)),
            (
                vec![MACHINE, ("proc/self/cgroup", "nonsense\n")],
                Machine(8 << 30),
            ),
        ] {
            let dir = system(&files);
            assert_eq!(limit_below(dir.path()), expected, "{files:?}");
        }
    }
}
