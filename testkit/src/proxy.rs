//! rangecache as a process, and its log.

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use ::http::Method;
use serde_json::Value;
use tempfile::TempDir;

use crate::etcd::Etcd;
use crate::grpc::Client;
use crate::http;
use crate::metrics::{Metrics, Outcomes};
use crate::process::Process;
use crate::wait::{SOON, until};

/// Settings of a rangecache to start; see [`Rangecache::before`].
pub struct Builder {
    args: Vec<String>,
    listen: String,
    environment: Vec<(String, String)>,
    hosts: Option<PathBuf>,
    control_group: Option<PathBuf>,
    open_files: Option<(u32, u32)>,
    user: Option<u32>,
    behind: Option<Box<Rangecache>>,
}

impl Builder {
    /// Adds one flag with its value.
    pub fn with(mut self, flag: &str, value: &str) -> Self {
        self.args.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    /// Listens for clients at this URL in place of a free port, for example to replace another instance.
    pub fn listening_on(mut self, url: &str) -> Self {
        self.listen = url.to_owned();
        self
    }

    /// Adds a flag without a value.
    pub fn with_flag(mut self, flag: &str) -> Self {
        self.args.push(flag.to_owned());
        self
    }

    /// Sets an environment variable.
    pub fn with_environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Makes it resolve host names by this file in place of `/etc/hosts`, in a mount namespace of its own.
    pub fn with_hosts(mut self, file: &Path) -> Self {
        self.hosts = Some(file.to_owned());
        self
    }

    /// Makes it join the control group whose `cgroup.procs` file this is, before it starts.
    pub fn in_control_group(mut self, processes: &Path) -> Self {
        self.control_group = Some(processes.to_owned());
        self
    }

    /// Limits its open files (RLIMIT_NOFILE), soft and hard.
    pub fn with_open_files(mut self, soft: u32, hard: u32) -> Self {
        self.open_files = Some((soft, hard));
        self
    }

    /// Runs it as the user and the group with this number, which only root can.
    pub fn as_user(mut self, user: u32) -> Self {
        self.user = Some(user);
        self
    }

    /// Lets calls inject faults; see [`Client::inject_fault`].
    pub fn with_fault_injection(self) -> Self {
        self.with_environment("RANGECACHE_TEST_FAULTS", "1")
    }

    /// Starts it, and waits until its mirrors are warm.
    pub async fn start(self) -> Rangecache {
        let rangecache = self.start_cold().await;
        rangecache.warm().await;
        rangecache
    }

    /// Starts it, and waits only until it listens.
    pub async fn start_cold(self) -> Rangecache {
        let dir = TempDir::with_prefix("rangecache-").unwrap();
        let mut command = match (&self.hosts, &self.control_group, self.open_files) {
            (Some(hosts), ..) => rangecache_command_with_hosts(hosts),
            (None, Some(processes), _) => rangecache_command_in_control_group(processes),
            (None, None, Some((soft, hard))) => rangecache_command_with_open_files(soft, hard),
            (None, None, None) => rangecache_command(),
        };
        if !is_root() {
            // Tests look at descriptors, which only root may see of a process that forbids core dumps.
            command.env("RANGECACHE_CORE_DUMPS", "true");
        }
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        command.envs(self.environment);
        command.args(["--listen-client-urls", &self.listen]);
        command.args([
            "--listen-metrics-urls",
            "http://127.0.0.1:0",
            "--log-format",
            "json",
        ]);
        command.args(self.args);
        let mut process = Process::spawn("rangecache", &mut command, &dir.path().join("log"));
        let (urls, _) = until(SOON, "rangecache listens", async || {
            assert!(
                process.exited().is_none(),
                "rangecache ended at once:\n{}",
                process.log()
            );
            Some((
                logged_url(&process, "serving clients")?,
                logged_url(&process, "serving metrics")?,
            ))
        })
        .await;
        Rangecache {
            process,
            _dir: dir,
            url: urls.0,
            metrics_url: urls.1,
            _behind: self.behind,
        }
    }
}

/// A running rangecache, killed on drop.
pub struct Rangecache {
    process: Process,
    _dir: TempDir,
    url: String,
    metrics_url: String,
    _behind: Option<Box<Rangecache>>,
}

impl Rangecache {
    /// Settings for a rangecache that mirrors the whole keyspace of `etcd`.
    pub fn before(etcd: &Etcd) -> Builder {
        Self::at(&etcd.url())
    }

    /// Settings for a rangecache whose etcd is another rangecache, which ends with it.
    pub fn before_another(behind: Rangecache) -> Builder {
        let mut builder = Self::at(&behind.url);
        builder.behind = Some(Box::new(behind));
        builder
    }

    /// Settings with these `--endpoints`.
    pub fn at(endpoints: &str) -> Builder {
        Self::with_first("--endpoints", endpoints)
    }

    /// Settings whose endpoints are in this `--flags-file`.
    pub fn with_flags_file(file: &Path) -> Builder {
        Self::with_first("--flags-file", file.to_str().expect("is text"))
    }

    fn with_first(flag: &str, value: &str) -> Builder {
        Builder {
            args: vec![flag.to_owned(), value.to_owned()],
            listen: "http://127.0.0.1:0".to_owned(),
            environment: Vec::new(),
            hosts: None,
            control_group: None,
            open_files: None,
            user: None,
            behind: None,
        }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// URL for clients.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// All URLs for clients, in the order of the log.
    pub fn client_urls(&self) -> Vec<String> {
        logged_urls(&self.process, "serving clients")
    }

    /// URL for clients that may only read (`--read-only-listen-client-urls`).
    pub fn read_only_url(&self) -> String {
        logged_urls(&self.process, "serving clients that may only read").remove(0)
    }

    /// URL of the status page and the metrics.
    pub fn metrics_url(&self) -> &str {
        &self.metrics_url
    }

    /// A new connection to it.
    pub async fn client(&self) -> Client {
        Client::connect(&self.url).await
    }

    /// Whether `/readyz` reports that every mirror is warm.
    pub async fn is_warm(&self) -> bool {
        http::get(&format!("{}/readyz", self.metrics_url))
            .await
            .is_ok_and(|response| response.status == 200)
    }

    /// Waits until every mirror is warm, and returns how long that took.
    pub async fn warm(&self) -> Duration {
        until(SOON, "rangecache is ready", async || {
            self.is_warm().await.then_some(())
        })
        .await
        .1
    }

    /// `GET` of a path on the metrics URL.
    pub async fn admin(&self, path: &str) -> http::Response {
        http::get(&format!("{}{path}", self.metrics_url)).await.unwrap()
    }

    /// Switches memory off (`POST`) or on again (`DELETE`), and returns the answer.
    pub async fn forward_all(&self, method: Method) -> String {
        let url = format!("{}/forward-all", self.metrics_url);
        let response = http::send(method, &url).await.unwrap();
        assert_eq!(response.status, 200, "{}", response.body);
        response.body
    }

    /// Scrapes its metrics.
    pub async fn metrics(&self) -> Metrics {
        Metrics::read(&format!("{}/metrics", self.metrics_url)).await
    }

    /// Range calls so far, by outcome.
    pub async fn outcomes(&self) -> Outcomes {
        self.metrics().await.outcomes()
    }

    /// RangeStream calls so far, by outcome.
    pub async fn stream_outcomes(&self) -> Outcomes {
        self.metrics().await.outcomes_of("rangecache_range_stream_total")
    }

    /// RangeStream calls since `before`, by outcome, once at least `streams` of them are counted.
    pub async fn stream_outcomes_since(&self, before: &Outcomes, streams: u64) -> Outcomes {
        let counted = async || {
            let since = self.stream_outcomes().await.since(before);
            (since.total() >= streams).then_some(since)
        };
        until(
            SOON,
            "every RangeStream is counted in rangecache_range_stream_total",
            counted,
        )
        .await
        .0
    }

    /// Resident memory, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    /// Range calls since `before`, by outcome, once at least `ranges` of them are counted: a call is counted after
    /// the last byte of its response.
    pub async fn outcomes_since(&self, before: &Outcomes, ranges: u64) -> Outcomes {
        let counted = async || {
            let since = self.outcomes().await.since(before);
            (since.total() >= ranges).then_some(since)
        };
        until(SOON, "every Range is counted in rangecache_range_total", counted)
            .await
            .0
    }

    /// All log lines so far.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends a signal by its name.
    pub fn signal(&self, signal: &str) {
        self.process.signal(signal);
    }

    /// Suspends the process by SIGSTOP; sockets stay open.
    pub fn pause(&self) {
        self.process.pause();
    }

    /// Resumes a suspended process.
    pub fn resume(&self) {
        self.process.signal("CONT");
    }

    /// Sends `TERM` and waits for the end.
    pub async fn terminate(self) -> ExitStatus {
        self.process.terminate(SOON).await
    }
}

/// Path of the rangecache binary that cargo built together with the running test or benchmark:
/// `target/debug/deps/end_to_end-…` and `target/release/deps/suite-…` lead to `rangecache` one folder up. The environment
/// variable `RANGECACHE` names another binary.
pub fn rangecache_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("RANGECACHE") {
        return path.into();
    }
    let this = std::env::current_exe().expect("the path of this program");
    let folder = this.ancestors().nth(2).expect("a folder of cargo's");
    folder.join("rangecache")
}

/// The binary under test, without arguments.
pub fn rangecache_command() -> Command {
    let mut command = Command::new(rangecache_binary());
    // The developer's own settings must not reach the process under test.
    for (name, _) in std::env::vars_os() {
        let name_of = name.to_string_lossy();
        if name_of.starts_with("RANGECACHE_") || name_of.starts_with("OTEL_") {
            command.env_remove(name);
        }
    }
    command
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0)
}

/// Command that starts rangecache with host names resolved by the file `hosts`.
fn rangecache_command_with_hosts(hosts: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c"]);
    command.arg(r#"mount --bind "$1" /etc/hosts && shift && exec "$@""#);
    command
        .arg("sh")
        .arg(hosts)
        .arg(rangecache_command().get_program());
    command
}

/// Command that starts rangecache in the control group whose `cgroup.procs` file is `processes`.
fn rangecache_command_in_control_group(processes: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", r#"echo $$ > "$1" && shift && exec "$@""#, "sh"]);
    command.arg(processes).arg(rangecache_command().get_program());
    command
}

/// Command that starts rangecache with limits on its open files.
fn rangecache_command_with_open_files(soft: u32, hard: u32) -> Command {
    let own = rangecache_command();
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!(r#"ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@""#))
        .arg("sh")
        .arg(own.get_program());
    for (name, value) in own.get_envs() {
        if value.is_none() {
            command.env_remove(name);
        }
    }
    command
}

fn logged_url(process: &Process, message: &str) -> Option<String> {
    logged_urls(process, message).into_iter().next()
}

/// URLs of the log lines with this message.
fn logged_urls(process: &Process, message: &str) -> Vec<String> {
    let log = process.log();
    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines
        .filter(|line| line["message"] == message)
        .map(|line| line["url"].as_str().expect("the line names its url").to_owned())
        .collect()
}
