//! Command line, start and termination.

use std::fs::File;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::pin::pin;
use std::process::Output;

use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::kv::PUT;
use testkit::pb::{PutRequest, PutResponse, RangeRequest, WatchCreateRequest};
use testkit::process::Process;
use testkit::proxy::{Rangecache, rangecache_command};
use testkit::tls::Ca;
use testkit::wait::{SOON, until};
use tokio::time::timeout;

/// Runs rangecache until it exits.
async fn run(args: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = rangecache_command();
    command.args(args).envs(environment.iter().copied());
    let child = tokio::process::Command::from(command).kill_on_drop(true).output();
    timeout(SOON, child)
        .await
        .expect("it ends at once")
        .expect("it starts")
}

#[tokio::test]
async fn help_and_version_go_to_stdout() {
    let help = run(&["--help"], &[]).await;
    let text = String::from_utf8_lossy(&help.stdout).into_owned();
    assert!(help.status.success() && help.stderr.is_empty());
    for flag in [
        "--endpoints",
        "--listen-client-urls",
        "--listen-metrics-urls",
        "--cache-prefix",
        "--no-cache-prefix",
    ] {
        assert!(text.contains(flag), "{flag} is missing in\n{text}");
    }
    let version = run(&["--version"], &[]).await;
    assert!(version.status.success());
    let text = String::from_utf8_lossy(&version.stdout);
    let expected = format!("rangecache {} (commit ", env!("CARGO_PKG_VERSION"));
    let commit = text.trim_end().strip_prefix(&expected);
    let commit = commit
        .and_then(|rest| rest.strip_suffix(')'))
        .unwrap_or_else(|| panic!("{text}"));
    let hash = commit.trim_end_matches("-dirty");
    let is_hash = hash.len() >= 12 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    assert!(
        is_hash || commit == "unknown" || std::env::var_os("RANGECACHE_BUILD_COMMIT").is_some(),
        "{text}"
    );
}

#[tokio::test]
async fn completions_and_the_manual_go_to_stdout() {
    for (args, says) in [
        (&["completions", "bash"][..], "--endpoints"),
        (&["completions", "zsh"], "--deep"),
        (&["man"], ".TH rangecache 1"),
        (&["doctor", "--help"], "exit code"),
    ] {
        let output = run(args, &[]).await;
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        assert!(text.contains(says), "{says} is missing in\n{text}");
    }
    // A wrong flag is reported after a command, too.
    let output = run(&["serve", "--cache-prefix", ""], &[]).await;
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    for args in [
        &["completions"][..],
        &["completions", "csh"],
        &["man", "--endpoints", "x"],
    ] {
        let output = run(args, &[]).await;
        assert_eq!(output.status.code(), Some(64), "{args:?}: {output:?}");
    }
}

#[tokio::test]
async fn config_prints_effective_settings_with_secrets_masked() {
    let environment = [
        ("RANGECACHE_MAX_CALLS", "7"),
        ("RANGECACHE_USER", "mirror:hidden"),
    ];
    let output = run(&["config", "--cache-prefix", "/a/,/b/"], &environment).await;
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let (given, rest) = text.split_once("# From the environment\n").expect("two sources");
    let (environment, defaults) = rest.split_once("# Defaults\n").expect("defaults");
    assert!(given.contains("RANGECACHE_CACHE_PREFIX=/a/,/b/\n"), "{text}");
    assert!(environment.contains("RANGECACHE_MAX_CALLS=7\n"), "{text}");
    assert!(environment.contains("# RANGECACHE_USER=(secret)\n"), "{text}");
    assert!(
        defaults.contains("RANGECACHE_ENDPOINTS=http://127.0.0.1:2379\n"),
        "{text}"
    );
    assert!(!text.contains("hidden"), "{text}");
    let output = run(&["config", "--cache-prefix", ""], &[]).await;
    assert_eq!(output.status.code(), Some(64), "{output:?}");
}

/// A supervisor that gives up after misuse (64) starts the process again: the file may be late.
#[tokio::test]
async fn files_that_cannot_be_used_exit_1_with_a_remedy() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = folder.path().join("open");
    std::fs::create_dir(&open).expect("a folder");
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).expect("permissions");
    let images = ["--image-dir", open.to_str().expect("text")];
    let password = ["--user", "mirror", "--password-file", "/does/not/exist"];
    for (flags, says) in [
        (&images[..], &["--image-dir", "chmod 700"][..]),
        (&password, &["--password-file /does/not/exist"]),
        (
            &["--flags-file", "/does/not/exist"],
            &["--flags-file /does/not/exist"],
        ),
    ] {
        for command in [&["serve"][..], &["doctor"]] {
            let output = run(&[command, flags].concat(), &[]).await;
            let message = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{flags:?}: {message}");
            for part in says {
                assert!(
                    message.contains(part),
                    "{flags:?}: {part} is missing in {message}"
                );
            }
        }
    }
    let unit =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/rangecache.service"))
            .expect("a unit");
    let (unit, service) = unit.split_once("[Service]").expect("two sections");
    assert!(
        unit.contains("\nStartLimitIntervalSec=0\n"),
        "it gives up: {unit}"
    );
    assert!(service.contains("\nRestartPreventExitStatus=64\n"), "{service}");
}

#[tokio::test]
async fn misuse_exits_64_with_a_remedy() {
    // The port is taken: a program that binds before it has checked all flags would fail with another error.
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = format!("http://{}", taken.local_addr().expect("an address"));
    let listen = [
        "--listen-client-urls",
        &taken,
        "--listen-metrics-urls",
        "http://127.0.0.1:0",
    ];
    let misuses: [(&[&str], &[&str]); 13] = [
        (
            &["--endpoint", "http://127.0.0.1:2379"],
            &["--endpoint", "--endpoints"],
        ),
        (&["--endpoints"], &["--endpoints", "a value"]),
        (
            &["--endpoints", "127.0.0.1:2379"],
            &["--endpoints", "write http://127.0.0.1:2379"],
        ),
        (&["--endpoints", "ftp://etcd"], &["--endpoints", "write http://"]),
        (
            &["--endpoints", "http://127.0.0.1"],
            &["--endpoints", "port", "write http://"],
        ),
        (&["--endpoints", &taken], &["--endpoints", "--listen-client-urls"]),
        (&["--cache-prefix", ""], &["--cache-prefix", "write"]),
        (
            &["--cache-prefix", "/a/b/", "--no-cache-prefix", "/a/"],
            &["--cache-prefix", "--no-cache-prefix"],
        ),
        (
            &["--cache-max-bytes", "lots"],
            &["--cache-max-bytes", "write", "512MiB"],
        ),
        (
            &["--history-max-age", "soon"],
            &["--history-max-age", "write", "10m"],
        ),
        (&["--log-format", "xml"], &["--log-format", "json"]),
        (&["--log-level", "=="], &["--log-level", "write"]),
        (&["serve"], &["serve", "--listen-client-urls"]),
    ];
    for (args, expected) in misuses {
        let output = run(&[&listen[..], args].concat(), &[]).await;
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {message}");
        for part in expected {
            assert!(
                message.contains(part),
                "{args:?} should mention {part}: {message}"
            );
        }
    }
    let output = run(&listen, &[("RANGECACHE_ENDPOINTS", "nowhere")]).await;
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    // A misspelt variable, for every command that reads the environment.
    let misspelt = [("RANGECACHE_CACHE_PREFIXES", "/registry/")];
    for args in [&listen[..], &["doctor"], &["config"]] {
        let output = run(args, &misspelt).await;
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {message}");
        for part in [
            "RANGECACHE_CACHE_PREFIXES",
            "did you mean RANGECACHE_CACHE_PREFIX?",
        ] {
            assert!(
                message.contains(part),
                "{args:?} should mention {part}: {message}"
            );
        }
    }
    assert!(run(&["man"], &misspelt).await.status.success());
}

/// SIGHUP arrives while the start waits for a file: before a socket is bound, and before any of the tasks that obey it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hangup_during_the_start_ends_nothing() {
    let dir = TempDir::with_prefix("rangecache-start-").expect("a folder");
    let fifo = dir.path().join("ca.crt");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.expect("mkfifo runs").success());
    let ca = std::fs::read(Ca::new().cert()).expect("a certificate");
    let mut command = rangecache_command();
    command
        .args(["--endpoints", "https://127.0.0.1:1", "--cacert"])
        .arg(&fifo);
    command.args(["--listen-client-urls", "http://127.0.0.1:0"]);
    command.args(["--listen-metrics-urls", "http://127.0.0.1:0"]);
    let mut process = Process::spawn("rangecache", &mut command, &dir.path().join("log"));
    // Opening a pipe ends when the other side opens it as well. Then rangecache reads until this side is closed.
    let opening = tokio::task::spawn_blocking(move || File::options().write(true).open(fifo));
    let opened = timeout(SOON, opening).await.expect("rangecache reads the file");
    let mut writer = opened.expect("no panic").expect("a pipe");
    process.signal("HUP");
    writer.write_all(&ca).expect("rangecache reads");
    drop(writer);
    until(SOON, "it serves", async || {
        assert!(process.exited().is_none(), "SIGHUP ended it:\n{}", process.log());
        process.log().contains("serving clients").then_some(())
    })
    .await;
    assert!(process.terminate(SOON).await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_is_logged_with_its_build_and_given_settings_without_secrets() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--max-calls", "777")
        .with_environment("RANGECACHE_PASSWORD", "hidden")
        .with("--user", "mirror")
        .start_cold()
        .await;
    let log = rangecache.log();
    let line = log.lines().find(|line| line.contains("rangecache starts"));
    let line: serde_json::Value = serde_json::from_str(line.expect("a line")).expect("JSON");
    assert_eq!(line["level"], "INFO");
    assert_eq!(line["version"], env!("CARGO_PKG_VERSION"));
    assert!(
        line["commit"].as_str().is_some_and(|commit| !commit.is_empty()),
        "{line}"
    );
    let settings = line["settings"].as_str().expect("text");
    for flag in [
        "--max-calls=777",
        "--user='(secret)'",
        "--password='(secret)'",
        "--endpoints=http://",
    ] {
        assert!(settings.contains(flag), "{flag} not in {settings}");
    }
    assert!(!settings.contains("--max-connections"), "{settings}");
    assert!(!log.contains("hidden"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn debug_level_shows_rangecaches_own_lines_alone() {
    let etcd = Etcd::start(Version::V3_7).await;
    for (level, shows_frames) in [("debug", false), ("debug,h2=debug", true)] {
        let rangecache = Rangecache::before(&etcd).with("--log-level", level).start().await;
        rangecache.client().await.get("a").await.expect("a response");
        let log = rangecache.log();
        let has = |level: &str, target: &str| {
            let target = format!(r#""target":"{target}"#);
            log.lines()
                .any(|line| line.contains(level) && line.contains(&target))
        };
        assert!(has("DEBUG", "rangecache_"), "{log}");
        assert_eq!(has("DEBUG", "h2::"), shows_frames, "{level}");
        assert!(!has("DEBUG", "hyper"), "{level}");
    }
}

/// Lines of level debug about one read have its id, its client and its prefix, also the line about its end, and no key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn debug_lines_of_one_read_can_be_joined() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--log-level", "debug")
        .start()
        .await;
    let client = rangecache.client().await;
    for key in ["/joined/one/s3cr3t", "/joined/two/s3cr3t"] {
        client.get(key).await.expect("a response");
    }
    let finished = |log: &str| log.matches("read finished").count();
    let (log, _) = until(SOON, "both reads are logged", async || {
        let log = rangecache.log();
        (finished(&log) == 2).then_some(log)
    })
    .await;
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    for (prefix, messages) in [
        ("/joined/one/", ["planned", "proven", "read finished"]),
        ("/joined/two/", ["planned", "proven", "read finished"]),
    ] {
        let of_read: Vec<_> = lines
            .iter()
            .filter(|line| line["span"]["prefix"] == prefix)
            .collect();
        let logged: Vec<_> = of_read.iter().map(|line| &line["message"]).collect();
        assert_eq!(logged, messages, "{log}");
        let span = &of_read[0]["span"];
        assert!(span["id"].as_u64() > Some(0), "{span}");
        assert_eq!(span["client"], "address 127.0.0.1", "{span}");
        for line in of_read {
            assert_eq!(&line["span"], span);
        }
    }
    assert!(!log.contains("s3cr3t"), "a key is in the log");
}

#[tokio::test]
async fn port_in_use_is_named_in_the_error() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = format!("http://{}", taken.local_addr().expect("an address"));
    for flag in ["--listen-client-urls", "--listen-metrics-urls"] {
        let other = if flag == "--listen-client-urls" {
            "--listen-metrics-urls"
        } else {
            "--listen-client-urls"
        };
        let output = run(&[flag, &taken, other, "http://127.0.0.1:0"], &[]).await;
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(
            matches!(output.status.code(), Some(code) if code != 0 && code != 64),
            "{output:?}"
        );
        assert!(
            message.contains(flag) && message.contains(taken.trim_start_matches("http://")),
            "{message}"
        );
    }
}

/// The unix sockets of a start that fails later, here at the last listener, are removed.
#[tokio::test]
async fn failed_start_leaves_no_unix_socket() {
    // An address of documentation, which is no host's.
    let elsewhere = "http://192.0.2.1:1";
    let dir = TempDir::with_prefix("rangecache-start-").expect("a folder");
    let path = dir.path().join("socket");
    let url = format!("unix://{}", path.display());
    for more in [&[][..], &["--socket-reuse-port"]] {
        let listen = ["--listen-client-urls", &url, "--listen-metrics-urls", elsewhere];
        let output = run(&[&listen[..], more].concat(), &[]).await;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let left: Vec<_> = std::fs::read_dir(dir.path()).expect("the folder").collect();
        assert!(left.is_empty(), "{more:?}: {left:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_before_etcd_serves_once_etcd_is_up() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    etcd.client().await.put("a", "1").await.expect("etcd puts");
    etcd.stop();
    let rangecache = Rangecache::before(&etcd).start_cold().await;
    assert_eq!(rangecache.admin("/livez").await.status, 200);
    until(
        SOON,
        "the log names the etcd that cannot be reached",
        async || {
            rangecache
                .log()
                .lines()
                .any(|line| line.contains(&etcd.url()) && line.contains("WARN"))
                .then_some(())
        },
    )
    .await;
    let ready = rangecache.admin("/readyz").await;
    assert_eq!(ready.status, 503, "{ready:?}");

    etcd.run();
    let took = rangecache.warm().await;
    println!("warm {took:?} after etcd's start");
    assert_eq!(rangecache.client().await.get("a").await, Ok(Some(b"1".to_vec())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn termination_completes_calls_in_flight() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let (client, url) = (rangecache.client().await, rangecache.url().to_owned());
    // A watch does not end by itself, and must not delay termination for long.
    let watch = client
        .watch(WatchCreateRequest {
            key: b"a".to_vec(),
            ..WatchCreateRequest::default()
        })
        .await;

    etcd.pause();
    let put = PutRequest {
        key: b"a".to_vec(),
        value: b"in flight".to_vec(),
        lease: 0,
    };
    let mut call = pin!(client.unary::<PutResponse>(PUT, &put));
    // Frames keep their order: once a later call of the connection has its response, the put has been received.
    let later = RangeRequest {
        serializable: true,
        ..RangeRequest::one("a")
    };
    tokio::select! {
        biased;
        answer = &mut call => panic!("a response though etcd is suspended: {answer:?}"),
        answer = client.range(&later) => drop(answer.expect("a serializable read needs no etcd")),
    }
    let end = tokio::spawn(rangecache.terminate());
    until(SOON, "it takes no new connections", async || {
        Client::try_connect(&url).await.err()
    })
    .await;
    etcd.resume();
    assert!(call.await.is_ok(), "the put is answered");
    let status = end.await.expect("no panic");
    assert!(status.success(), "{status}");
    drop(watch);
    assert_eq!(
        etcd.client().await.get("a").await,
        Ok(Some(b"in flight".to_vec()))
    );
}
