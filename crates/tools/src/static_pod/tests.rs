//! Installations into a temporary folder, with a server in the place of the pod.

use std::{cell::Cell, os::unix::fs::PermissionsExt as _, path::Path};

use clap::{Args as _, FromArgMatches as _};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

/// The manifest of a pod with its name's digits, and how it listens.
fn pod(digits: &str, flags: &str) -> String {
    format!(
        "kind: Pod\nmetadata:\n  name: rangecache-{digits}\nspec:\n  args:\n    - --listen-client-urls={CLIENTS}\n    {flags}\n"
    )
}

const CLIENTS: &str = "https://127.0.0.1:23790";
const SHARING: &str = "- --socket-reuse-port";

fn old() -> String {
    pod("0000000a", SHARING)
}

fn new() -> String {
    pod("0000000b", SHARING)
}

/// A server that reports the same status for ever.
struct FakePod {
    url: String,
    task: tokio::task::JoinHandle<()>,
}

impl FakePod {
    #[allow(clippy::disallowed_methods, reason = "aborted by the drop")]
    async fn start(name: &'static str, ready: bool) -> FakePod {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).await;
                let reason = if ready { "null" } else { r#""loading""# };
                let mirrors = format!(r#"[{{"name":"everything","out_of_service":{reason}}}]"#);
                let body = format!(r#"{{"pod":"{name}","ready":{ready},"mirrors":{mirrors}}}"#);
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

/// Flags that install `manifest`.
fn installing(manifest: &str, folder: &Path, url: &str, args: &[&str]) -> StaticPodConfig {
    let folder = folder.to_str().unwrap();
    let own = [
        "static-pod",
        "install",
        "--manifests-dir",
        folder,
        "--manifest",
        manifest,
        "--listen-metrics-urls",
        url,
    ];
    let matches = StaticPodConfig::augment_args(clap::Command::new("static-pod"))
        .try_get_matches_from(own.iter().chain(args))
        .unwrap();
    StaticPodConfig::from_arg_matches(&matches).unwrap()
}

fn options(folder: &Path, url: &str, args: &[&str]) -> StaticPodConfig {
    installing(&new(), folder, url, args)
}

/// The files in the folder, by name, without their texts where the kubelet ignores them.
fn files(folder: &Path) -> Vec<(String, String)> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<_> = entries
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let text = if name.starts_with('.') {
                String::new()
            } else {
                std::fs::read_to_string(&path).unwrap()
            };
            (name, text)
        })
        .collect();
    files.sort();
    files
}

/// Texts that the kubelet sees.
fn manifests(folder: &Path) -> Vec<String> {
    let seen = files(folder)
        .into_iter()
        .filter(|(name, _)| !name.starts_with('.'));
    seen.map(|(_, text)| text).collect()
}

/// A folder in which `rangecache-0000000a.yaml` is installed.
fn with_old() -> TempDir {
    with("rangecache-0000000a.yaml", &old())
}

fn with(name: &str, text: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join(name), text).unwrap();
    dir
}

async fn passed() -> Result<(), String> {
    Ok(())
}

async fn not_asked() -> Result<(), String> {
    panic!("the check is not needed")
}

fn quiet(_: &str) {}

/// A URL where nothing listens.
const NOWHERE: &str = "http://127.0.0.1:1";
/// The pod of `new`, on a node.
const POD: &str = "rangecache-0000000b-node1";

#[tokio::test]
async fn manifest_whose_pod_becomes_ready_remains_alone() {
    let (dir, pod) = (with_old(), FakePod::start(POD, true).await);
    let options = options(dir.path(), &pod.url, &[]);
    let check = async || {
        assert_eq!(manifests(dir.path()), [old()], "checked before");
        Ok(())
    };
    install(&options, check, quiet).await.unwrap();
    assert_eq!(
        files(dir.path()),
        [("rangecache-0000000b.yaml".to_owned(), new())]
    );
    let file = dir.path().join("rangecache-0000000b.yaml");
    assert_eq!(
        std::fs::metadata(file).unwrap().permissions().mode() & 0o777,
        0o600
    );
    // An equal manifest is not written again, whatever answers.
    install(&options, not_asked, quiet).await.unwrap();
}

#[tokio::test]
async fn pod_before_runs_until_the_new_one_is_ready() {
    let (dir, pod) = (with_old(), FakePod::start(POD, false).await);
    let options = options(dir.path(), &pod.url, &[]);
    let installing = install(&options, passed, quiet);
    let both = async {
        while manifests(dir.path()) != [old(), new()] {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        done = installing => panic!("the pod is not ready: {done:?}"),
        () = both => {}
    }
}

#[tokio::test]
async fn failed_check_writes_nothing() {
    let dir = with_old();
    let options = options(dir.path(), NOWHERE, &[]);
    let refused = install(&options, async || Err("etcd is down".to_owned()), quiet).await;
    assert!(matches!(refused, Err(InstallError::Check(report)) if report == "etcd is down"));
    assert_eq!(
        files(dir.path()),
        [("rangecache-0000000a.yaml".to_owned(), old())]
    );
}

#[tokio::test]
async fn pod_that_is_not_ready_leaves_the_one_before_it() {
    let (dir, pod) = (with_old(), FakePod::start(POD, false).await);
    let attempt = |name: &str| {
        options(
            dir.path(),
            &pod.url,
            &["--ready-timeout", "3s", "--attempt", name],
        )
    };
    let failed = install(&attempt("a"), passed, quiet).await;
    assert!(
        matches!(&failed, Err(InstallError::NotReady(state)) if state == "everything is out of service: loading"),
        "{failed:?}"
    );
    assert_eq!(manifests(dir.path()), [old()]);
    // The kubelet starts the installer again and again: the new pod must not come and go.
    let again = install(&attempt("a"), not_asked, quiet).await;
    assert!(matches!(again, Err(InstallError::FailedBefore)), "{again:?}");
    // Back to the manifest before: nothing is left of the failure.
    let back = installing(&old(), dir.path(), &pod.url, &[]);
    install(&back, not_asked, quiet).await.unwrap();
    assert_eq!(
        files(dir.path()),
        [("rangecache-0000000a.yaml".to_owned(), old())]
    );

    let checked = Cell::new(false);
    let check = async || {
        checked.set(true);
        Err(String::new())
    };
    let _ = install(&attempt("b"), check, quiet).await;
    assert!(checked.get(), "another attempt may try again");
}

/// Both listen at the same port, and a pod may restart at any time: only its name says which one it is.
#[tokio::test]
async fn pod_before_is_not_taken_for_the_new_one() {
    for name in ["rangecache-0000000a-node1", ""] {
        let (dir, pod) = (with_old(), FakePod::start(name, true).await);
        let options = options(dir.path(), &pod.url, &["--ready-timeout", "1s"]);
        let failed = install(&options, passed, quiet).await;
        assert!(
            matches!(&failed, Err(InstallError::NotReady(state)) if state.contains("not seen")),
            "{failed:?}"
        );
        assert_eq!(manifests(dir.path()), [old()]);
    }
}

#[tokio::test]
async fn first_manifest_that_fails_leaves_none() {
    let dir = TempDir::new().unwrap();
    let options = options(dir.path(), NOWHERE, &["--ready-timeout", "1s"]);
    let failed = install(&options, passed, quiet).await;
    assert!(matches!(failed, Err(InstallError::NotReady(_))), "{failed:?}");
    assert_eq!(manifests(dir.path()), Vec::<String>::new());
}

/// The file of a manifest, as an installer that was killed in the middle has left it.
fn begun(options: &StaticPodConfig, text: &str, stop_others: bool) -> ManifestFolder {
    let folder = ManifestFolder::open(options).unwrap();
    let file = folder.file_of(Manifest(text).pod().unwrap()).unwrap();
    folder.begin(&file, text).unwrap();
    if stop_others {
        folder.stop_others(&file).unwrap();
    }
    folder
}

#[tokio::test]
async fn installation_that_was_interrupted_continues() {
    let (dir, pod) = (with_old(), FakePod::start(POD, true).await);
    let options = options(dir.path(), &pod.url, &[]);
    begun(&options, &new(), false);
    install(&options, not_asked, quiet).await.unwrap();
    assert_eq!(
        files(dir.path()),
        [("rangecache-0000000b.yaml".to_owned(), new())]
    );
}

/// Two manifests after another, the first of which was never ready: the one before both stays.
#[tokio::test]
async fn unfinished_manifest_is_not_the_one_that_stays() {
    for stop_others in [false, true] {
        let dir = with_old();
        let options = options(dir.path(), NOWHERE, &["--ready-timeout", "1s"]);
        begun(&options, &pod("0000000c", SHARING), stop_others);
        let failed = install(&options, passed, quiet).await;
        assert!(matches!(failed, Err(InstallError::NotReady(_))), "{failed:?}");
        assert_eq!(manifests(dir.path()), [old()]);
    }
}

#[tokio::test]
async fn noted_failure_is_completed() {
    let dir = with_old();
    let options = options(dir.path(), NOWHERE, &[]);
    let folder = begun(&options, &new(), true);
    assert_eq!(manifests(dir.path()), [new()]);
    folder.note_failure("", &new()).unwrap();
    let failed = install(&options, not_asked, quiet).await;
    assert!(matches!(failed, Err(InstallError::FailedBefore)), "{failed:?}");
    assert_eq!(manifests(dir.path()), [old()]);
}

/// Texts that the kubelet sees one after another while a manifest is on trial beside `before`, and does not become ready.
async fn seen_during_a_trial(before: &str) -> Vec<Vec<String>> {
    let dir = with("rangecache-0000000a.yaml", before);
    let options = options(dir.path(), NOWHERE, &["--ready-timeout", "30s"]);
    let mut seen = vec![manifests(dir.path())];
    let mut installing = Box::pin(install(&options, passed, quiet));
    loop {
        let looked = timeout(LOOK_INTERVAL / 5, &mut installing).await;
        let now = manifests(dir.path());
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        if let Ok(failed) = looked {
            assert!(matches!(failed, Err(InstallError::NotReady(_))), "{failed:?}");
            return seen;
        }
    }
}

/// A pod that keeps its ports for itself ends before the next one listens, which runs by then; it comes back if that one fails.
#[tokio::test(start_paused = true)]
async fn only_a_pod_that_does_not_share_its_ports_is_stopped_before_the_new_one_is_ready() {
    let (alone, sharing) = (pod("0000000a", ""), old());
    assert_eq!(
        seen_during_a_trial(&alone).await,
        [
            vec![alone.clone()],
            vec![alone.clone(), new()],
            vec![new()],
            vec![alone]
        ]
    );
    assert_eq!(
        seen_during_a_trial(&sharing).await,
        [vec![sharing.clone()], vec![sharing.clone(), new()], vec![sharing]]
    );
}

#[test]
fn remove_leaves_nothing_and_may_be_repeated() {
    let dir = with_old();
    std::fs::write(
        dir.path().join("rangecache.yaml"),
        "kind: Pod # of an earlier version\n",
    )
    .unwrap();
    let options = options(dir.path(), NOWHERE, &[]);
    begun(&options, &new(), true);
    remove(&options, quiet).unwrap();
    assert_eq!(files(dir.path()), []);
    remove(&options, quiet).unwrap();
}

#[tokio::test]
async fn pod_that_an_apiserver_uses_is_neither_removed_nor_moved() {
    let dir = with_old();
    let apiserver = "kind: Pod\n    - --etcd-servers=https://localhost:23790\n";
    std::fs::write(dir.path().join("kube-apiserver.yaml"), apiserver).unwrap();
    let moved = new().replace("23790", "23700");
    let options = |args: &[&str]| installing(&moved, dir.path(), NOWHERE, args);
    let is_refusal = |error: &InstallError| {
        let text = error.to_string();
        text.contains("kube-apiserver.yaml names https://localhost:23790") && text.contains("--force")
    };
    let refused = remove(&options(&[]), quiet).unwrap_err();
    assert!(is_refusal(&refused), "{refused}");
    let refused = install(&options(&[]), passed, quiet).await.unwrap_err();
    assert!(is_refusal(&refused), "{refused}");
    assert_eq!(manifests(dir.path()), [apiserver.to_owned(), old()]);

    // Another address through which it is still reached.
    let wider = new().replace("127.0.0.1:23790", "0.0.0.0:23790");
    let wider = installing(&wider, dir.path(), NOWHERE, &["--ready-timeout", "1s"]);
    let failed = install(&wider, passed, quiet).await;
    assert!(matches!(failed, Err(InstallError::NotReady(_))), "{failed:?}");

    let failed = install(&options(&["--force", "--ready-timeout", "1s"]), passed, quiet).await;
    assert!(matches!(failed, Err(InstallError::NotReady(_))), "{failed:?}");
    remove(&options(&["--force"]), quiet).unwrap();
    assert_eq!(manifests(dir.path()), [apiserver.to_owned()]);
}

#[tokio::test]
async fn folder_address_and_name_that_cannot_be_right_are_refused() {
    let dir = TempDir::new().unwrap();
    let missing = options(&dir.path().join("elsewhere"), NOWHERE, &[]);
    assert!(matches!(
        install(&missing, passed, quiet).await,
        Err(InstallError::Files(_))
    ));
    let over_tls = options(dir.path(), "https://127.0.0.1:1", &[]);
    let nameless = installing("kind: Pod\n", dir.path(), NOWHERE, &[]);
    let same_name = new().replace("-0000000b", "");
    let same_name = installing(&same_name, dir.path(), NOWHERE, &[]);
    for options in [over_tls, nameless, same_name] {
        let refused = install(&options, passed, quiet).await;
        assert!(matches!(refused, Err(InstallError::Manifest(_))), "{refused:?}");
    }
    assert_eq!(files(dir.path()), []);
}
