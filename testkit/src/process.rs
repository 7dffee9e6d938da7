//! A child process that cannot outlive its test.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A running child: its output goes to a file, it is killed on drop, and its log is shown when the test fails.
pub struct Process {
    name: String,
    log: PathBuf,
    child: Child,
}

impl Process {
    /// Starts `command` with stdout and stderr appended to `log`.
    pub fn spawn(name: &str, command: &mut Command, log: &Path) -> Self {
        let out = File::options().create(true).append(true).open(log).unwrap();
        let err = out.try_clone().unwrap();
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        let child =
            child.unwrap_or_else(|e| panic!("cannot start {name} ({:?}): {e}", command.get_program()));
        Self {
            name: name.to_owned(),
            log: log.to_owned(),
            child,
        }
    }

    /// The process's id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The way it ended, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Sends a signal by its name, such as `STOP`, `CONT` or `TERM`.
    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill")
            .arg(format!("-{signal}"))
            .arg(self.id().to_string())
            .status()
            .unwrap();
        assert!(sent.success(), "cannot send {signal} to {}", self.name);
    }

    /// Stops the process in its tracks, sockets left open, and returns when every thread stands still.
    pub fn pause(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.id());
        let stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let status = std::fs::read_to_string(task.unwrap().path().join("status"));
            // A thread that has gone in the meantime stands still too.
            status.is_err() || status.unwrap().lines().any(|line| line.starts_with("State:\tT"))
        };
        let started = Instant::now();
        while !std::fs::read_dir(&tasks).unwrap().all(stopped) {
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "{} does not stop",
                self.name
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends `TERM` and waits for the end.
    pub async fn terminate(mut self, deadline: Duration) -> ExitStatus {
        self.signal("TERM");
        let started = Instant::now();
        loop {
            if let Some(status) = self.exited() {
                return status;
            }
            assert!(
                started.elapsed() < deadline,
                "{} still runs {deadline:?} after TERM",
                self.name
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// All that it has written so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(40)..].join("\n");
            eprintln!("--- the last lines of {} ---\n{tail}\n---", self.name);
        }
    }
}

/// The path of a tool that `make tools` builds; `ETCD_3_7` and the like override it.
pub fn tool(name: &str) -> PathBuf {
    let variable = name.to_uppercase().replace(['-', '.'], "_");
    if let Some(path) = std::env::var_os(&variable) {
        return path.into();
    }
    // testkit/ is a folder of the repository's root.
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools")).join(name);
    assert!(
        path.exists(),
        "{} is missing: run `make tools`, or set {variable}",
        path.display()
    );
    path
}
