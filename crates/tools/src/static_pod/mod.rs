//! `rangecache static-pod`: writes the manifest of a static pod into the folder that a kubelet watches.
//!
//! | file | subject |
//! |---|---|
//! | `flags` | flags of the command |
//! | `folder` | the manifests, and the files next to them that the kubelet ignores |
//! | `manifest` | what the text of a manifest says |
//!
//! A manifest is written only after a check of its flags (`rangecache doctor`), under a name of its own, so that its pod
//! runs beside the one before it, which is removed once the new one is ready, and stays if it does not become ready in time.
//! The kubelet does not start a static pod while one of the same name ends, and waits for the apiserver before it starts the
//! next: an apiserver that reads through the pod would be away for a minute. Only where both processes cannot share their
//! ports the old one is stopped before the new one is ready, which waits for the ports.
//!
//! Every step leaves files from which the next run continues, so that the installer may be killed at any time. This room imports `config`, `doctor`, `running` and `base`; only `main` and `cli` import it.

mod flags;
mod folder;
mod manifest;

use std::io::{self, Write as _};
use std::{fmt, process::ExitCode, time::Duration};

use rangecache_base::net::Url;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep, timeout};

use super::running::get;
use crate::doctor::{self, DoctorConfig};
use folder::{ManifestFolder, ManifestState};
use manifest::Manifest;
use rangecache_report::output::{ReportFormat, Style};

pub use flags::{StaticPodAction, StaticPodConfig};

/// Interval of looks at the new pod.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit of one look.
const LOOK_TIMEOUT: Duration = Duration::from_secs(3);
/// Time that a kubelet has to start the new pod before the one that has its ports is stopped. Before it starts a pod it
/// announces it to the apiserver, which takes half a minute if the apiserver has no etcd.
const START_TIME: Duration = Duration::from_secs(10);

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
                    _ => Err(report.to_text(Style::Ascii)),
                }
            };
            let installed = runtime.block_on(install(options, check, tell));
            installed.map_err(|error| error.to_string())
        }
        StaticPodAction::Remove => remove(options, tell).map_err(|error| error.to_string()),
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

/// Reason why the manifest is not installed, or not removed.
#[derive(Debug)]
enum InstallError {
    /// A file cannot be read or written.
    Files(io::Error),
    /// The manifest is empty, its pod has no address that can be asked, or no name of its own.
    Manifest(String),
    /// The check of the flags failed: its report.
    Check(String),
    /// An apiserver uses a listener that would go: its manifest, and the listener.
    InUse(String, Url),
    /// The pod did not become ready, and the one before it stays: the new pod's last state.
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
            InstallError::InUse(manifest, url) => write!(
                f,
                "nothing was changed: {manifest} names {url} in --etcd-servers, and its apiserver would lose its etcd; point it \
                 at etcd first, or at the new listener, or use --force"
            ),
            InstallError::NotReady(state) => write!(
                f,
                "the new pod did not become ready ({state}); its manifest is removed, and the one before it is in use"
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
    let text = options.manifest.as_deref().unwrap_or_default();
    if text.trim().is_empty() {
        let reason = "--manifest is empty: the kubelet would run nothing";
        return Err(InstallError::Manifest(reason.to_owned()));
    }
    let url = options.config.listen.metrics_urls.first();
    let url = url.filter(|url| !url.tls).ok_or_else(|| {
        let reason =
            "the first of --listen-metrics-urls must be http://: the new pod's readiness is read there";
        InstallError::Manifest(reason.to_owned())
    })?;
    let folder = ManifestFolder::open(options)?;
    let new = Manifest(text);
    let pod = new.pod().unwrap_or_default();
    let file = folder
        .file_of(pod)
        .ok_or_else(|| name_problem(pod, &options.manifest_name))?;
    let attempt = options.attempt.as_deref().unwrap_or_default();
    if folder.has_failed(attempt, text)? {
        // The process may have ended between the note of the failure and the removal of the manifest.
        folder.give_up()?;
        return Err(InstallError::FailedBefore);
    }
    let since = match folder.state(&file, text)? {
        ManifestState::Accepted => {
            folder.forget_failure()?;
            tell("the manifest is there already");
            return Ok(());
        }
        ManifestState::OnTrial { since } => {
            tell("the manifest was written before, and its pod was not seen ready");
            since
        }
        ManifestState::Missing => {
            folder.give_up()?;
            check().await.map_err(InstallError::Check)?;
            tell("the check of the flags passed");
            refuse_in_use(options, &folder, &new.client_urls())?;
            folder.begin(&file, text)?;
            tell("wrote the manifest; waiting for its pod");
            Duration::ZERO
        }
    };
    let started = Instant::now();
    let others = folder.others(&file)?;
    if !others.iter().all(|other| new.shares_ports_with(Manifest(other))) {
        tell(
            "the pod before it does not share its ports with the new one, and is stopped once that one waits for them",
        );
        sleep(START_TIME.saturating_sub(since)).await;
        folder.stop_others(&file)?;
    }
    let mut state = "it was not seen".to_owned();
    while since + started.elapsed() < options.ready_timeout {
        let looked = timeout(LOOK_TIMEOUT, look(url)).await;
        match looked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            // The pod's name ends with that of the node.
            Ok(seen) if seen.name.starts_with(pod) => match seen.unready {
                None => {
                    folder.accept(&file)?;
                    tell("the pod is ready");
                    return Ok(());
                }
                Some(reason) => state = reason,
            },
            // The pod before it responds at the same port.
            Ok(_) => {}
            Err(error) => state = error.to_string(),
        }
        sleep(LOOK_INTERVAL).await;
    }
    folder.note_failure(attempt, text)?;
    folder.give_up()?;
    Err(InstallError::NotReady(state))
}

fn name_problem(pod: &str, manifest_name: &str) -> InstallError {
    let stem = manifest_name
        .rsplit_once('.')
        .map_or(manifest_name, |(stem, _)| stem);
    InstallError::Manifest(format!(
        "the manifest's metadata.name is {pod:?}: it must be {stem}- and eight hexadecimal digits that are others for each \
         manifest (the chart takes them of its text), because the kubelet does not run two pods of one name side by side"
    ))
}

/// Refuses to continue if the manifest of an apiserver on this node names a listener of the present pods, and none of those
/// that `stay`.
fn refuse_in_use(
    options: &StaticPodConfig,
    folder: &ManifestFolder,
    stay: &[Url],
) -> Result<(), InstallError> {
    match folder.stranded(stay)? {
        Some((manifest, url)) if !options.force => Err(InstallError::InUse(manifest, url)),
        _ => Ok(()),
    }
}

/// Removes the manifests and the files next to them.
///
/// # Errors
/// If an apiserver uses the pod, or a file cannot be removed.
fn remove(options: &StaticPodConfig, tell: impl Fn(&str)) -> Result<(), InstallError> {
    let folder = ManifestFolder::open(options)?;
    refuse_in_use(options, &folder, &[])?;
    folder.remove()?;
    tell("the manifest is removed");
    Ok(())
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

/// A rangecache that responds.
#[derive(Debug)]
pub(super) struct Pod {
    /// Name of its pod, which ends with the node's; empty if it does not know it.
    pub(super) name: String,
    /// Why it is not ready; `None` if it is.
    pub(super) unready: Option<String>,
}

/// Reads the state of the rangecache at `url`, of one response and therefore of one process: two may share the port.
///
/// # Errors
/// If it does not respond, or something else responds.
pub(super) async fn look(url: &Url) -> io::Result<Pod> {
    let status: Value = serde_json::from_str(&get(url, "/status").await?)?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let Some(is_ready) = status["ready"].as_bool() else {
        let text = "/status does not say whether it is ready";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    };
    let mirrors = status["mirrors"].as_array().map_or(&[][..], Vec::as_slice);
    let waiting = mirrors.iter().filter_map(|mirror| {
        let reason = mirror["out_of_service"].as_str()?;
        Some(format!("{} is out of service: {reason}", text(&mirror["name"])))
    });
    Ok(Pod {
        name: text(&status["pod"]),
        unready: (!is_ready).then(|| waiting.collect::<Vec<_>>().join(", ")),
    })
}
