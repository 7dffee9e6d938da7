//! Starts and stops the two servers of the tour.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rangecache_base::net::Url;
use rangecache_edge::tls::Connector;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::mpsc;

use crate::{eventually, metrics};

/// Variable that names another rangecache than the one that was built with this program.
const BINARY: &str = "RANGECACHE_BINARY";

/// rangecache's default ports; free ones are chosen if they are in use.
const DEFAULT_PORTS: (u16, u16) = (23_790, 23_791);

/// etcd starts within two seconds; a slow disk may take longer.
const ETCD_START_SECONDS: u64 = 60;

/// Deadline for the log lines of rangecache that name its URLs.
const RANGECACHE_START_SECONDS: u64 = 20;

/// Deadline for loading the mirror: a large etcd takes minutes.
const WARM_SECONDS: u64 = 600;

/// Time between SIGTERM and SIGKILL.
const STOP_SECONDS: u64 = 10;

/// The temporary folder of one tour, removed with everything in it when the tour ends.
pub(crate) struct Workspace {
    folder: TempDir,
}

impl Workspace {
    pub(crate) fn create() -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("rangecache-tour-")
            .tempdir()
            .context("Cannot create a temporary folder: is there space in the folder that TMPDIR names?")?;
        Ok(Self { folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Path of a tool built by `make tools`.
pub(crate) fn tool(name: &str) -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let path = root.unwrap_or(Path::new("")).join("target/tools").join(name);
    if path.exists() {
        return Ok(path);
    }
    bail!("{} is missing. Build it with: make tools", path.display())
}

/// Starts a program in a process group of its own, so that Ctrl-C reaches the tour only, which stops the servers in order.
fn spawn(command: &mut Command) -> Result<Child> {
    let program = command.as_std().get_program().to_owned();
    command
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("{} cannot be started", program.display()))
}

/// Sends SIGTERM, waits for the end, and kills a process that does not end in time.
async fn stop(mut child: Child) {
    if let Some(pid) = child.id() {
        // The standard library sends SIGKILL only; the shell's built-in kill can send SIGTERM.
        let sent = Command::new("sh")
            .args(["-c", &format!("kill -TERM {pid}")])
            .status()
            .await;
        let ends = tokio::time::timeout(Duration::from_secs(STOP_SECONDS), child.wait());
        if sent.is_ok() && ends.await.is_ok() {
            return;
        }
    }
    // An error means that it has ended in the meantime.
    let _ = child.kill().await;
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))
        .context("no free port on 127.0.0.1")?
        .local_addr()?
        .port())
}

fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok()
}

/// etcd, started by the tour.
pub(crate) struct Etcd {
    child: Child,
    pub(crate) client_url: Url,
}

impl Etcd {
    /// Starts it and waits until it serves.
    ///
    /// # Errors
    /// If it is not built, ends early or does not serve in time; the error holds the end of its log.
    pub(crate) async fn start(workspace: &Workspace) -> Result<Self> {
        let program = tool("etcd-3.7")?;
        let client_url = format!("http://127.0.0.1:{}", free_port()?);
        let peer_url = format!("http://127.0.0.1:{}", free_port()?);
        let log = workspace.path("etcd.log");
        let log_file = std::fs::File::create(&log).context("no log file for etcd")?;
        let mut command = Command::new(program);
        command
            .args(["--name", "tour", "--log-level", "warn"])
            .arg("--data-dir")
            .arg(workspace.path("etcd"))
            .args([
                "--listen-client-urls",
                &client_url,
                "--advertise-client-urls",
                &client_url,
            ])
            .args([
                "--listen-peer-urls",
                &peer_url,
                "--initial-advertise-peer-urls",
                &peer_url,
            ])
            .args(["--initial-cluster", &format!("tour={peer_url}")])
            .stdout(Stdio::null())
            .stderr(log_file);
        let mut child = spawn(&mut command)?;
        let (client_url, connector) = (client_url.parse()?, Connector::plaintext());
        let served = eventually(ETCD_START_SECONDS, || {
            let ended = child.try_wait().ok().flatten();
            let (client_url, connector) = (&client_url, &connector);
            async move {
                if let Some(status) = ended {
                    return Some(Err(status));
                }
                let health = metrics::get(connector, client_url, "/health").await;
                matches!(health, Ok((200, _))).then_some(Ok(()))
            }
        })
        .await;
        match served {
            Some(Ok(())) => Ok(Self { child, client_url }),
            Some(Err(status)) => bail!("etcd ended at once ({status}):\n{}", tail(&log)),
            None => bail!(
                "etcd did not serve within {ETCD_START_SECONDS} s:\n{}",
                tail(&log)
            ),
        }
    }

    /// The process; `None` once it has ended.
    pub(crate) fn process(&self) -> Option<u32> {
        self.child.id()
    }

    pub(crate) async fn stop(self) {
        stop(self.child).await;
    }
}

/// The last lines of a log file.
fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}

/// rangecache, started by the tour.
pub(crate) struct Rangecache {
    child: Child,
    pub(crate) client_url: Url,
    pub(crate) metrics_url: Url,
    started: Instant,
    /// Warnings and errors from the log; closed when the process ends.
    warnings: mpsc::UnboundedReceiver<String>,
}

impl Rangecache {
    /// Starts the binary with `flags` that say where etcd is. Its
    /// URLs are read from its log.
    ///
    /// # Errors
    /// If it is not built, or ends before it serves; the error holds the end of its log.
    pub(crate) async fn start(flags: &[String]) -> Result<Self> {
        let program = rangecache_binary()?;
        let (client_port, metrics_port) = match DEFAULT_PORTS {
            (client, metrics) if is_free(client) && is_free(metrics) => DEFAULT_PORTS,
            (client, metrics) => {
                println!("(port {client} or {metrics} is in use, so others are taken)");
                (0, 0)
            }
        };
        let mut command = Command::new(program);
        command
            .args(flags)
            .args(["--listen-client-urls", &format!("http://127.0.0.1:{client_port}")])
            .args([
                "--listen-metrics-urls",
                &format!("http://127.0.0.1:{metrics_port}"),
            ])
            .args(["--log-format", "json"])
            // It refuses what is no setting of its own.
            .env_remove(BINARY)
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let started = Instant::now();
        let mut child = spawn(&mut command)?;
        let stderr = child.stderr.take().context("rangecache's log cannot be read")?;
        let (mut urls, mut warnings) = follow(stderr);
        let both = async {
            let (mut client, mut metrics) = (None, None);
            while let Some(line) = urls.recv().await {
                match line {
                    Announcement::Clients(url) => client = Some(url),
                    Announcement::Metrics(url) => metrics = Some(url),
                }
                if let (Some(client_url), Some(metrics_url)) = (&client, &metrics) {
                    return Some((client_url.clone(), metrics_url.clone()));
                }
            }
            None
        };
        let announced = tokio::time::timeout(Duration::from_secs(RANGECACHE_START_SECONDS), both).await;
        match announced {
            Ok(Some((client_url, metrics_url))) => Ok(Self {
                child,
                client_url: client_url.parse()?,
                metrics_url: metrics_url.parse()?,
                started,
                warnings,
            }),
            Ok(None) => bail!(
                "rangecache ended before it served:\n{}",
                end_of_log(&mut warnings).await
            ),
            Err(_) => bail!("rangecache did not serve within {RANGECACHE_START_SECONDS} s"),
        }
    }

    /// Waits until every mirror is warm, and returns the time since the start.
    pub(crate) async fn wait_ready(&mut self) -> Result<Duration> {
        let Self {
            child,
            metrics_url,
            started,
            ..
        } = self;
        let mut reported = false;
        let connector = Connector::plaintext();
        let ready = eventually(WARM_SECONDS, || {
            let ended = child.try_wait().ok().flatten();
            if !reported && started.elapsed() > Duration::from_secs(3) {
                reported = true;
                println!("                  loading the keys of etcd ...");
            }
            let (metrics_url, connector) = (&*metrics_url, &connector);
            async move {
                if ended.is_some() {
                    return Some(false);
                }
                let ready = metrics::get(connector, metrics_url, "/readyz").await;
                matches!(ready, Ok((200, _))).then_some(true)
            }
        })
        .await;
        match ready {
            Some(true) => Ok(self.started.elapsed()),
            Some(false) => bail!(
                "rangecache ended while it loaded:\n{}",
                end_of_log(&mut self.warnings).await
            ),
            None => {
                let state = metrics::get(&connector, &self.metrics_url, "/readyz")
                    .await
                    .map(|(_, text)| text)
                    .unwrap_or_default();
                bail!(
                    "rangecache was not warm after {WARM_SECONDS} s; {}/readyz says:\n{state}",
                    self.metrics_url
                )
            }
        }
    }

    /// Prints rangecache's warnings and errors until it or etcd ends, which is an error.
    pub(crate) async fn watch_over(&mut self, etcd: Option<&mut Etcd>) -> Result<()> {
        let etcd_ends = async {
            match etcd {
                Some(etcd) => etcd.child.wait().await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(etcd_ends);
        loop {
            tokio::select! {
                warning = self.warnings.recv() => match warning {
                    Some(line) => println!("rangecache: {line}"),
                    None => bail!("rangecache ended unexpectedly ({})", self.child.wait().await?),
                },
                status = &mut etcd_ends => bail!("etcd ended unexpectedly ({})", status?),
            }
        }
    }

    /// The process; `None` once it has ended.
    pub(crate) fn process(&self) -> Option<u32> {
        self.child.id()
    }

    pub(crate) async fn stop(self) {
        stop(self.child).await;
    }
}

/// Reads the warnings and errors of a process that has ended.
async fn end_of_log(warnings: &mut mpsc::UnboundedReceiver<String>) -> String {
    let mut lines = Vec::new();
    while let Some(line) = warnings.recv().await {
        lines.push(line);
    }
    lines.join("\n")
}

/// The binary that [`BINARY`] names, otherwise `target/tour/tour` → `target/tour/rangecache`.
fn rangecache_binary() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(BINARY).filter(|path| !path.is_empty()) {
        let path = PathBuf::from(named);
        ensure!(path.exists(), "{BINARY}: there is no {}", path.display());
        return Ok(path);
    }
    let this = std::env::current_exe().context("the path of this program is unknown")?;
    let program = this.parent().map(|folder| folder.join("rangecache"));
    match program {
        Some(program) if program.exists() => Ok(program),
        _ => bail!(
            "There is no rangecache binary next to {}. Build and run both with: make run",
            this.display()
        ),
    }
}

/// A log line that names a URL.
enum Announcement {
    Clients(String),
    Metrics(String),
}

/// Reads the log to its end: URLs go to the first channel, warnings and lines other than JSON to the second.
fn follow(
    stderr: ChildStderr,
) -> (
    mpsc::UnboundedReceiver<Announcement>,
    mpsc::UnboundedReceiver<String>,
) {
    let (announce, urls) = mpsc::unbounded_channel();
    let (warn, warnings) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut lines = BufReader::new(stderr).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let Ok(entry) = serde_json::from_str::<serde_json::Value>(&line) else {
                let _ = warn.send(line);
                continue;
            };
            let text = |field: &str| {
                entry
                    .get(field)
                    .and_then(|value| value.as_str())
                    .unwrap_or_default()
                    .to_owned()
            };
            // A closed receiver is ignored: the log must still be read, or its writer would block.
            let _ = match text("message").as_str() {
                "serving clients" => announce.send(Announcement::Clients(text("url"))).is_ok(),
                "serving metrics" => announce.send(Announcement::Metrics(text("url"))).is_ok(),
                _ if matches!(text("level").as_str(), "WARN" | "ERROR") => warn.send(line).is_ok(),
                _ => true,
            };
        }
    });
    (urls, warnings)
}
