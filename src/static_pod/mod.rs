//! `rangecache static-pod`: writes the manifest of a static pod into the folder that a kubelet watches.
//!
//! | file | subject |
//! |---|---|
//! | `flags` | flags of the command |
//! | `folder` | the manifest, and the files next to it that the kubelet ignores |
//! | `probe` | whether the pod that the manifest describes is ready |
//!
//! A manifest is written only after a check of its flags (`rangecache doctor`), and the one before it comes back if the new
//! pod does not become ready in time. Every step leaves files from which the next run continues, so that the installer may
//! be killed at any time. This room imports `config`, `doctor` and `net`; only `main` and `cli` import it.

mod flags;
mod folder;
mod probe;

use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep, timeout};

use crate::doctor::{self, DoctorConfig};
use crate::report::ReportFormat;
pub use flags::{StaticPodAction, StaticPodConfig};
use folder::{Folder, ManifestChange};
use rangecache_base::net::Url;

/// Interval of looks at the new pod.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit of one look.
const LOOK_TIMEOUT: Duration = Duration::from_secs(3);

/// Installs or removes the manifest of a static pod. The flags are valid, and those of the pod: its files must be readable here, too.
#[must_use]
pub fn run(options: &StaticPodConfig) -> ExitCode {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    let tell = |line: &str| drop(writeln!(io::stdout(), "{line}"));
    let done = match options.action {
        StaticPodAction::Install => {
            let check = async || {
                let examined = DoctorConfig {
                    config: options.config.clone(),
                    output: ReportFormat::Text,
                    deep: false,
                };
                let report = doctor::examine(&examined).await;
                match report.exit_code() {
                    0 => Ok(()),
                    _ => Err(report.to_text(doctor::Style::detect(false)).to_string()),
                }
            };
            let installed = runtime.block_on(install(options, check, tell));
            installed.map_err(|error| error.to_string())
        }
        StaticPodAction::Remove => remove(options).map_err(|error| error.to_string()),
        StaticPodAction::Hold => runtime.block_on(hold()).map_err(|error| error.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "rangecache static-pod: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Reason why the manifest is not installed.
#[derive(Debug)]
enum InstallError {
    /// A file cannot be read or written.
    Files(io::Error),
    /// The manifest is empty, or its pod has no address that can be asked.
    Manifest(&'static str),
    /// The check of the flags failed: its report.
    Check(String),
    /// The pod did not become ready, and the manifest before it is back: the pod's last state.
    NotReady(String),
    /// An attempt of this name has failed with this manifest before.
    FailedBefore,
}

impl fmt::Display for InstallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InstallError::Files(error) => write!(f, "{error}"),
            InstallError::Manifest(reason) => f.write_str(reason),
            InstallError::Check(report) => {
                write!(f, "{report}\nnothing was written: the check of the flags failed")
            }
            InstallError::NotReady(state) => write!(
                f,
                "the new pod did not become ready ({state}); the manifest before it is back"
            ),
            InstallError::FailedBefore => f.write_str(
                "this manifest did not become ready in the same attempt before; change it, or delete the installer's pod \
                 to try again",
            ),
        }
    }
}

impl From<io::Error> for InstallError {
    fn from(error: io::Error) -> InstallError {
        InstallError::Files(error)
    }
}

/// Installs the manifest, and returns once its pod is ready. `check` examines the flags; it is called before anything is
/// written. `tell` receives a line per step.
///
/// # Errors
/// Why the manifest is not in the folder.
async fn install(
    options: &StaticPodConfig,
    check: impl AsyncFnOnce() -> Result<(), String>,
    tell: impl Fn(&str),
) -> Result<(), InstallError> {
    let manifest = options.manifest.as_deref().unwrap_or_default();
    if manifest.trim().is_empty() {
        return Err(InstallError::Manifest(
            "--manifest is empty: the kubelet would run nothing",
        ));
    }
    let url = options.config.listen.metrics_urls.first();
    let url = url.filter(|url| !url.tls).ok_or(InstallError::Manifest(
        "the first of --listen-metrics-urls must be http://: the new pod's readiness is read there",
    ))?;
    let attempt = options.attempt.as_deref().unwrap_or_default();
    let folder = Folder::open(options)?;
    if folder.has_failed(attempt, manifest)? {
        // The process may have ended between the note of the failure and the return of the old manifest.
        folder.restore()?;
        return Err(InstallError::FailedBefore);
    }
    let since = match folder.change_to(manifest)? {
        ManifestChange::None => {
            tell("the manifest is there already");
            return Ok(());
        }
        ManifestChange::Unfinished { since } => {
            tell("the manifest was written before, and its pod was not seen ready");
            since
        }
        ManifestChange::Needed => {
            check().await.map_err(InstallError::Check)?;
            tell("the check of the flags passed");
            folder.replace(manifest)?;
            tell("wrote the manifest; waiting for its pod");
            Duration::ZERO
        }
    };
    let started = Instant::now();
    let mut state = "not asked yet".to_owned();
    while started.elapsed() < options.ready_timeout {
        let looked = timeout(LOOK_TIMEOUT, look(url, since + started.elapsed())).await;
        match looked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(None) => {
                folder.accept()?;
                tell("the pod is ready");
                return Ok(());
            }
            Ok(Some(reason)) => state = reason,
            Err(error) => state = error.to_string(),
        }
        sleep(LOOK_INTERVAL).await;
    }
    folder.note_failure(attempt, manifest)?;
    folder.restore()?;
    Err(InstallError::NotReady(state))
}

/// Why the pod at `url` is not a ready one that was started after a moment that lies `since` back; `None` if it is.
async fn look(url: &Url, since: Duration) -> io::Result<Option<String>> {
    let pod = probe::look(url).await?;
    if !is_younger(pod.uptime, since) {
        return Ok(Some("the pod before it is still running".to_owned()));
    }
    if pod.is_ready {
        return Ok(None);
    }
    probe::reason(url).await.map(Some)
}

/// Whether a process that reports `uptime` in whole seconds was started after a moment that lies `since` back.
fn is_younger(uptime: Duration, since: Duration) -> bool {
    uptime + Duration::from_secs(1) <= since
}

/// Removes the manifest and the files next to it.
///
/// # Errors
/// If a file cannot be removed.
fn remove(options: &StaticPodConfig) -> io::Result<()> {
    Folder::open(options)?.remove()
}

/// Waits for SIGTERM or SIGINT.
///
/// # Errors
/// If the signals cannot be received.
async fn hold() -> io::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests;
