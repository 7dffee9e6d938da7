//! Starts and stops the measured processes: etcd, its grpc-proxy, rangecache and the replay server. Every process
//! listens on a free port, logs into the setup's folder and is killed when dropped.

use std::ffi::OsString;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::http1;
use crate::tls::Tls;

/// Timeout of a process's start.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// Timeout of a mirror's load.
const READY_DEADLINE: Duration = Duration::from_secs(180);
/// Interval between polls.
const POLL: Duration = Duration::from_millis(5);
/// The interval between two polls is at least the time waited so far, divided by this.
const POLLS: u32 = 50;
/// Another process can take a free port before etcd binds it; then another port is tried.
const PORT_ATTEMPTS: usize = 3;

/// Paths of the binaries.
#[derive(Clone, Debug)]
pub(crate) struct Binaries {
    /// etcd 3.7, which is also grpc-proxy.
    pub(crate) etcd: PathBuf,
    /// rangecache as built by cargo for the benchmark.
    pub(crate) rangecache: PathBuf,
    /// Another build of rangecache, to compare with.
    pub(crate) baseline: Option<PathBuf>,
    /// This program, for the replay server.
    pub(crate) suite: PathBuf,
    /// Flags of every rangecache.
    pub(crate) rangecache_flags: Vec<String>,
    /// Program that runs rangecache, and its arguments; empty without one. It executes rangecache in its own process.
    pub(crate) rangecache_under: Vec<String>,
}

impl Binaries {
    /// Finds the binaries; an error says how to get them.
    pub(crate) fn find(rangecache_flags: &str, baseline: Option<PathBuf>) -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let etcd =
            std::env::var_os("ETCD_3_7").map_or_else(|| root.join("target/tools/etcd-3.7"), PathBuf::from);
        if !etcd.exists() {
            bail!(
                "no etcd at {}: run `make tools`, or name one by ETCD_3_7",
                etcd.display()
            );
        }
        let rangecache = std::env::var_os("RANGECACHE")
            .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_rangecache")), PathBuf::from);
        if let Some(path) = baseline.as_ref().filter(|path| !path.exists()) {
            bail!("no rangecache at {}, which --baseline names", path.display());
        }
        Ok(Binaries {
            etcd,
            rangecache,
            baseline,
            suite: std::env::current_exe()?,
            rangecache_flags: rangecache_flags.split_whitespace().map(String::from).collect(),
            rangecache_under: Vec::new(),
        })
    }
}

/// A running process.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
    /// Address for clients.
    pub(crate) address: SocketAddr,
    /// Address of health and metrics; the client address for all but rangecache.
    pub(crate) metrics_address: SocketAddr,
    /// etcd's address for clients with TLS.
    pub(crate) tls_address: Option<SocketAddr>,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Process {
    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process and waits for its end.
    pub(crate) fn stop(&mut self) {
        // Errors mean that the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks the process to end, and waits for its end.
    pub(crate) async fn terminate(&mut self, deadline: Duration) -> Result<()> {
        let pid = self.pid().to_string();
        Command::new("kill").args(["-TERM", &pid]).status()?;
        let until = Instant::now() + deadline;
        while self.child.try_wait()?.is_none() {
            anyhow::ensure!(Instant::now() < until, "{} does not end", self.name);
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Returns an error with the end of the log if the process has ended.
    fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!(
                "{} ended with {status}; the end of its log:\n{}",
                self.name,
                last_lines(&self.log)
            );
        }
        Ok(())
    }

    /// Waits until `GET` of a path returns 200.
    async fn wait_for_200(&mut self, path: &str, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let last = http1::get(self.metrics_address, path).await;
            if matches!(last, Ok((200, _))) {
                return Ok(());
            }
            self.check_alive()?;
            if start.elapsed() > deadline {
                let seen = match last {
                    Ok((status, body)) => format!("{status} {body}"),
                    Err(error) => error.to_string(),
                };
                bail!(
                    "{} is not ready after {deadline:?}: {path} returned {seen}",
                    self.name
                );
            }
            // Each poll is a connection: what takes long is polled seldom, or the polls would be a load.
            tokio::time::sleep(POLL.max(start.elapsed() / POLLS)).await;
        }
    }

    /// Waits until rangecache's mirrors are warm.
    pub(crate) async fn wait_ready(&mut self) -> Result<()> {
        self.wait_for_200("/readyz", READY_DEADLINE).await
    }
}

fn last_lines(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

fn spawn(name: &'static str, mut command: Command, folder: &Path) -> Result<(Child, PathBuf)> {
    // The user's own settings for etcd and rangecache must not reach the measured processes.
    for (variable, _) in std::env::vars_os() {
        let is_setting = variable.to_str().is_some_and(|text| {
            text.starts_with("ETCD_") || text.starts_with("RANGECACHE_") || text.starts_with("OTEL_")
        });
        if is_setting {
            command.env_remove(variable);
        }
    }
    let (mut file, log) = (None, folder.join(format!("{name}.log")));
    for number in 0..1000 {
        let path = folder.join(format!("{name}-{number}.log"));
        if let Ok(created) = File::create_new(&path) {
            file = Some((created, path));
            break;
        }
    }
    let (file, log) = file.with_context(|| format!("cannot create {}", log.display()))?;
    let child = command
        .stderr(file)
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    Ok((child, log))
}

/// Options of an etcd.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EtcdOptions {
    /// Passes `--unsafe-no-fsync`.
    pub(crate) no_fsync: bool,
    /// Listens with TLS in addition.
    pub(crate) tls: Option<&'static Tls>,
}

/// Address of etcd, and TLS files; a proxy's clients use the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Endpoint {
    /// etcd's address.
    pub(crate) address: SocketAddr,
    /// TLS files, if TLS is used.
    pub(crate) tls: Option<&'static Tls>,
}

impl Endpoint {
    fn scheme(self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    pub(crate) fn url(self) -> String {
        format!("{}://{}", self.scheme(), self.address)
    }

    /// Flags for both sides of a proxy: grpc-proxy and rangecache have the same names.
    fn flags(self) -> Vec<OsString> {
        let Some(tls) = self.tls else {
            return Vec::new();
        };
        let flags = [
            ("--cacert", &tls.cert),
            ("--cert", &tls.client_cert),
            ("--key", &tls.client_key),
            ("--cert-file", &tls.cert),
            ("--key-file", &tls.key),
        ];
        let flags = flags.into_iter();
        flags
            .flat_map(|(flag, file)| [flag.into(), file.clone().into()])
            .collect()
    }
}

/// A member of a cluster that is about to be started.
struct Member {
    name: String,
    client: SocketAddr,
    peer: SocketAddr,
}

impl Member {
    fn new(name: impl Into<String>) -> Result<Member> {
        Ok(Member {
            name: name.into(),
            client: free_address()?,
            peer: free_address()?,
        })
    }

    /// Starts the member; the caller waits until it is healthy.
    fn spawn(
        &self,
        cluster: &[Member],
        binaries: &Binaries,
        folder: &Path,
        data: &Path,
        options: EtcdOptions,
    ) -> Result<Process> {
        let tls_address = options.tls.map(|_| free_address()).transpose()?;
        let Member { name, client, peer } = self;
        let mut listen = format!("http://{client}");
        let mut command = Command::new(&binaries.etcd);
        if let Some((tls, address)) = options.tls.zip(tls_address) {
            listen = format!("{listen},https://{address}");
            command
                .arg("--cert-file")
                .arg(&tls.cert)
                .arg("--key-file")
                .arg(&tls.key);
        }
        let urls = cluster
            .iter()
            .map(|member| format!("{}=http://{}", member.name, member.peer));
        let urls: Vec<_> = urls.collect();
        command
            .args(["--name", name, "--log-level", "error", "--enable-pprof"])
            .args(["--quota-backend-bytes", "8589934592", "--max-txn-ops", "2048"])
            .arg("--data-dir")
            .arg(data)
            .args(["--listen-client-urls", &listen])
            .args(["--advertise-client-urls", &format!("http://{client}")])
            .args(["--listen-peer-urls", &format!("http://{peer}")])
            .args(["--initial-advertise-peer-urls", &format!("http://{peer}")])
            .args(["--initial-cluster", &urls.join(",")])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if options.no_fsync {
            command.arg("--unsafe-no-fsync");
        }
        let (child, log) = spawn("etcd", command, folder)?;
        Ok(Process {
            name: "etcd",
            child,
            log,
            address: *client,
            metrics_address: *client,
            tls_address,
        })
    }
}

/// Starts an etcd on a data folder, new or existing, and waits until it is healthy.
pub(crate) async fn start_etcd(
    binaries: &Binaries,
    folder: &Path,
    data: &Path,
    options: EtcdOptions,
) -> Result<Process> {
    let mut attempt = 1;
    loop {
        let member = [Member::new("bench")?];
        let mut etcd = member[0].spawn(&member, binaries, folder, data, options)?;
        match etcd.wait_for_200("/health", START_DEADLINE).await {
            Ok(()) => return Ok(etcd),
            Err(error) if attempt == PORT_ATTEMPTS => return Err(error),
            Err(_) => attempt += 1,
        }
    }
}

/// Starts an empty cluster with this number of members, and waits until they are healthy.
pub(crate) async fn start_cluster(
    binaries: &Binaries,
    folder: &Path,
    members: usize,
    options: EtcdOptions,
) -> Result<Vec<Process>> {
    let cluster: Vec<_> = (0..members)
        .map(|number| Member::new(format!("bench-{number}")))
        .collect::<Result<_>>()?;
    let start = |member: &Member| {
        let data = folder.join(&member.name);
        member.spawn(&cluster, binaries, folder, &data, options)
    };
    let mut processes: Vec<_> = cluster.iter().map(start).collect::<Result<_>>()?;
    for etcd in &mut processes {
        etcd.wait_for_200("/health", START_DEADLINE).await?;
    }
    Ok(processes)
}

/// Starts etcd's grpc-proxy in front of an etcd, and waits until it is healthy.
pub(crate) async fn start_grpc_proxy(binaries: &Binaries, folder: &Path, etcd: Endpoint) -> Result<Process> {
    let mut attempt = 1;
    loop {
        let (address, metrics_address) = (free_address()?, free_address()?);
        let mut command = Command::new(&binaries.etcd);
        command
            .args(["grpc-proxy", "start"])
            .args(["--endpoints", &etcd.url()])
            .args(["--listen-addr", &address.to_string()])
            .args(["--metrics-addr", &format!("http://{metrics_address}")])
            .args(etcd.flags())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let (child, log) = spawn("grpc-proxy", command, folder)?;
        let mut proxy = Process {
            name: "grpc-proxy",
            child,
            log,
            address,
            metrics_address,
            tls_address: None,
        };
        match proxy.wait_for_200("/health", START_DEADLINE).await {
            Ok(()) => return Ok(proxy),
            Err(error) if attempt == PORT_ATTEMPTS => return Err(error),
            Err(_) => attempt += 1,
        }
    }
}

/// Starts rangecache in front of an etcd's members with additional flags and variables, and waits until it listens; its mirrors
/// may still be loading.
pub(crate) async fn start_rangecache(
    binaries: &Binaries,
    folder: &Path,
    etcd: &[Endpoint],
    flags: &[&str],
    environment: &[(&str, &str)],
) -> Result<Process> {
    let urls: Vec<_> = etcd.iter().copied().map(Endpoint::url).collect();
    let first = etcd.first().context("rangecache needs an endpoint")?;
    let mut command = Command::new(&binaries.rangecache);
    if let [program, arguments @ ..] = &binaries.rangecache_under[..] {
        command = Command::new(program);
        command.args(arguments).arg(&binaries.rangecache);
    }
    command
        .args(["--endpoints", &urls.join(",")])
        .args([
            "--listen-client-urls",
            &format!("{}://127.0.0.1:0", first.scheme()),
        ])
        .args(first.flags())
        .args(["--listen-metrics-urls", "http://127.0.0.1:0"])
        .args(["--log-format", "json"])
        .args(&binaries.rangecache_flags)
        .args(flags)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let (child, log) = spawn("rangecache", command, folder)?;
    // Placeholders until the log names the ports.
    let unknown = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut process = Process {
        name: "rangecache",
        child,
        log,
        address: unknown,
        metrics_address: unknown,
        tls_address: None,
    };
    let until = Instant::now() + START_DEADLINE;
    loop {
        let text = fs::read_to_string(&process.log)?;
        if let (Some(clients), Some(metrics)) = (
            logged_address(&text, "serving clients"),
            logged_address(&text, "serving metrics"),
        ) {
            process.address = clients;
            process.metrics_address = metrics;
            return Ok(process);
        }
        process.check_alive()?;
        if Instant::now() > until {
            bail!(
                "rangecache does not serve after {START_DEADLINE:?}:\n{}",
                last_lines(&process.log)
            );
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Address in the log line with this message.
fn logged_address(log: &str, message: &str) -> Option<SocketAddr> {
    log.lines().find_map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        let fields = if line.get("message").is_some() {
            &line
        } else {
            line.get("fields")?
        };
        if fields.get("message")?.as_str()? != message {
            return None;
        }
        fields
            .get("url")?
            .as_str()?
            .split_once("://")?
            .1
            .trim_end_matches('/')
            .parse()
            .ok()
    })
}

/// Starts the replay server, which records the responses of `upstream` and replays them.
pub(crate) async fn start_replay_server(
    binaries: &Binaries,
    folder: &Path,
    upstream: SocketAddr,
) -> Result<Process> {
    let mut command = Command::new(&binaries.suite);
    // The replay server exits when its standard input is closed, which happens however the suite ends.
    command
        .args(["replay-server", "--upstream", &upstream.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let (child, log) = spawn("replay-server", command, folder)?;
    let unknown = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut process = Process {
        name: "replay server",
        child,
        log,
        address: unknown,
        metrics_address: unknown,
        tls_address: None,
    };
    let until = Instant::now() + START_DEADLINE;
    loop {
        let text = fs::read_to_string(&process.log)?;
        if let Some(address) = text.lines().find_map(|line| line.strip_prefix("listening ")) {
            process.address = address.parse()?;
            process.metrics_address = process.address;
            return Ok(process);
        }
        process.check_alive()?;
        if Instant::now() > until {
            bail!("the replay server does not serve after {START_DEADLINE:?}");
        }
        tokio::time::sleep(POLL).await;
    }
}
