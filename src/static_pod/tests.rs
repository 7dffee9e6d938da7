//! Installations into a temporary folder, with a server in the place of the pod.

use std::cell::Cell;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use clap::FromArgMatches as _;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

const OLD: &str = "kind: Pod # the one before\n";
const NEW: &str = "kind: Pod # the new one\n";

/// A server that reports the same status for ever.
struct FakePod {
    url: String,
    task: tokio::task::JoinHandle<()>,
}

impl FakePod {
    #[allow(clippy::disallowed_methods, reason = "aborted by the drop")]
    async fn start(uptime_seconds: u64, ready: bool) -> FakePod {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 1024];
                let count = stream.read(&mut request).await.unwrap_or_default();
                let body = if request[..count].starts_with(b"GET /status ") {
                    format!(r#"{{"uptime_seconds":{uptime_seconds},"ready":{ready}}}"#)
                } else {
                    "out of service (loading)\n".to_owned()
                };
                let response = format!("HTTP/1.0 200 OK\r\n\r\n{body}");
                let _ = stream.write_all(response.as_bytes()).await;
            }
        });
        FakePod { url, task }
    }
}

impl Drop for FakePod {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn options(folder: &Path, url: &str, args: &[&str]) -> StaticPodConfig {
    let folder = folder.to_str().unwrap();
    let own = [
        "rangecache",
        "static-pod",
        "install",
        "--manifests-dir",
        folder,
        "--manifest",
        NEW,
        "--listen-metrics-urls",
        url,
    ];
    let matches = crate::cli::command()
        .try_get_matches_from(own.iter().chain(args))
        .unwrap();
    let (_, matches) = matches.subcommand().unwrap();
    StaticPodConfig::from_arg_matches(matches).unwrap()
}

/// Names in the folder, without the manifest's own.
fn others(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != "rangecache.yaml").collect()
}

fn manifest(folder: &Path) -> Option<String> {
    std::fs::read_to_string(folder.join("rangecache.yaml")).ok()
}

fn with_manifest(text: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("rangecache.yaml"), text).unwrap();
    dir
}

async fn passed() -> Result<(), String> {
    Ok(())
}

async fn not_asked() -> Result<(), String> {
    panic!("the check is not needed")
}

fn quiet(_: &str) {}

#[tokio::test]
async fn manifest_whose_pod_becomes_ready_remains_alone() {
    let (dir, pod) = (with_manifest(OLD), FakePod::start(0, true).await);
    let options = options(dir.path(), &pod.url, &[]);
    let check = async || {
        assert_eq!(manifest(dir.path()).as_deref(), Some(OLD), "checked before");
        Ok(())
    };
    install(&options, check, quiet).await.unwrap();
    assert_eq!(manifest(dir.path()).as_deref(), Some(NEW));
    assert_eq!(others(dir.path()), Vec::<String>::new());
    let mode = std::fs::metadata(dir.path().join("rangecache.yaml"))
        .unwrap()
        .permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    // An equal manifest is not written again, whatever answers.
    install(&options, not_asked, quiet).await.unwrap();
}

#[tokio::test]
async fn failed_check_writes_nothing() {
    let dir = with_manifest(OLD);
    let options = options(dir.path(), "http://127.0.0.1:1", &[]);
    let refused = install(&options, async || Err("etcd is down".to_owned()), quiet).await;
    assert!(matches!(refused, Err(InstallError::Check(report)) if report == "etcd is down"));
    assert_eq!(manifest(dir.path()).as_deref(), Some(OLD));
    assert_eq!(others(dir.path()), Vec::<String>::new());
}

#[tokio::test]
async fn pod_that_is_not_ready_gives_way_to_the_manifest_before() {
    let (dir, pod) = (with_manifest(OLD), FakePod::start(0, false).await);
    let attempt = |name: &str| {
        options(
            dir.path(),
            &pod.url,
            &["--ready-timeout", "3s", "--attempt", name],
        )
    };
    let failed = install(&attempt("a"), passed, quiet).await;
    assert!(
        matches!(&failed, Err(InstallError::NotReady(state)) if state.contains("loading")),
        "{failed:?}"
    );
    assert_eq!(manifest(dir.path()).as_deref(), Some(OLD));
    // The kubelet starts the installer again and again: the pod must not alternate between both manifests.
    let again = install(&attempt("a"), not_asked, quiet).await;
    assert!(matches!(again, Err(InstallError::FailedBefore)), "{again:?}");
    let checked = Cell::new(false);
    let check = async || {
        checked.set(true);
        Err(String::new())
    };
    let _ = install(&attempt("b"), check, quiet).await;
    assert!(checked.get(), "another attempt may try again");
}

#[tokio::test]
async fn pod_before_is_not_taken_for_the_new_one() {
    let (dir, pod) = (with_manifest(OLD), FakePod::start(3600, true).await);
    let options = options(dir.path(), &pod.url, &["--ready-timeout", "2s"]);
    let failed = install(&options, passed, quiet).await;
    assert!(
        matches!(&failed, Err(InstallError::NotReady(state)) if state.contains("still running")),
        "{failed:?}"
    );
    assert_eq!(manifest(dir.path()).as_deref(), Some(OLD));
}

#[tokio::test]
async fn first_manifest_that_fails_leaves_none() {
    let dir = TempDir::new().unwrap();
    let options = options(dir.path(), "http://127.0.0.1:1", &["--ready-timeout", "1s"]);
    let failed = install(&options, passed, quiet).await;
    assert!(matches!(failed, Err(InstallError::NotReady(_))), "{failed:?}");
    assert_eq!(manifest(dir.path()), None);
}

#[tokio::test]
async fn installation_that_was_interrupted_continues() {
    let (dir, pod) = (with_manifest(OLD), FakePod::start(0, true).await);
    let options = options(dir.path(), &pod.url, &[]);
    Folder::open(&options).unwrap().replace(NEW).unwrap();
    let hidden = others(dir.path());
    assert!(
        !hidden.is_empty() && hidden.iter().all(|name| name.starts_with('.')),
        "the kubelet reads every other name: {hidden:?}"
    );
    install(&options, not_asked, quiet).await.unwrap();
    assert_eq!(others(dir.path()), Vec::<String>::new());
}

/// Two manifests after another, the first of which was never ready: the one before both comes back.
#[tokio::test]
async fn unfinished_manifest_is_not_the_one_that_comes_back() {
    let dir = with_manifest(OLD);
    let options = options(dir.path(), "http://127.0.0.1:1", &["--ready-timeout", "1s"]);
    Folder::open(&options)
        .unwrap()
        .replace("kind: Pod # never ready\n")
        .unwrap();
    let failed = install(&options, passed, quiet).await;
    assert!(matches!(failed, Err(InstallError::NotReady(_))), "{failed:?}");
    assert_eq!(manifest(dir.path()).as_deref(), Some(OLD));
}

#[tokio::test]
async fn noted_failure_is_completed() {
    let dir = with_manifest(OLD);
    let options = options(dir.path(), "http://127.0.0.1:1", &[]);
    let folder = Folder::open(&options).unwrap();
    folder.replace(NEW).unwrap();
    folder.note_failure("", NEW).unwrap();
    let failed = install(&options, not_asked, quiet).await;
    assert!(matches!(failed, Err(InstallError::FailedBefore)), "{failed:?}");
    assert_eq!(manifest(dir.path()).as_deref(), Some(OLD));
}

#[test]
fn remove_leaves_nothing_and_may_be_repeated() {
    let dir = with_manifest(OLD);
    let options = options(dir.path(), "http://127.0.0.1:1", &[]);
    Folder::open(&options).unwrap().replace(NEW).unwrap();
    remove(&options).unwrap();
    assert_eq!((manifest(dir.path()), others(dir.path())), (None, Vec::new()));
    remove(&options).unwrap();
}

#[tokio::test]
async fn folder_and_address_that_cannot_be_right_are_refused() {
    let dir = TempDir::new().unwrap();
    let missing = options(&dir.path().join("elsewhere"), "http://127.0.0.1:1", &[]);
    assert!(matches!(
        install(&missing, passed, quiet).await,
        Err(InstallError::Files(_))
    ));
    let over_tls = options(dir.path(), "https://127.0.0.1:1", &[]);
    assert!(matches!(
        install(&over_tls, passed, quiet).await,
        Err(InstallError::Manifest(_))
    ));
}
