//! Child processes that end with their test.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::wait::{SOON, until};

/// A running child: its output goes to a file, it is killed on drop, and the end of its log is printed if the test
/// fails.
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

    /// Exit status, if the process has ended.
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

    /// Suspends the process by SIGSTOP, sockets open, and returns once every thread is stopped.
    pub fn pause(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.id());
        let stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let status = std::fs::read_to_string(task.unwrap().path().join("status"));
            // A thread that has ended in the meantime counts as stopped.
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

    /// Ends a program in Go, and returns its output with what each goroutine did, which Go prints on SIGQUIT.
    pub async fn goroutines(&mut self) -> String {
        self.signal("QUIT");
        until(SOON, "the process ends", async || self.exited()).await;
        self.log()
    }

    /// All output so far.
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

/// Path of a tool built by `make tools`; an environment variable such as `ETCD_3_7` overrides it.
pub fn tool(name: &str) -> PathBuf {
    let variable = name.to_uppercase().replace(['-', '.'], "_");
    if let Some(path) = std::env::var_os(&variable) {
        return path.into();
    }
    // testkit/ lies in the root of the repository.
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools")).join(name);
    assert!(
        path.exists(),
        "{} is missing: run `make tools`, or set {variable}",
        path.display()
    );
    path
}
