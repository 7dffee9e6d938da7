//! `rangecache doctor` on real etcd of every kind and state.

use std::time::Duration;

use serde_json::Value;
use testkit::etcd::{Cluster, Etcd, Version};
use testkit::grpc::Client;
use testkit::pb::{RequestOp, WatchCreateRequest};
use testkit::proxy::{Rangecache, rangecache_command};
use testkit::roles::{MIRROR, create_users, password};
use testkit::tls::{Ca, Leaf, SecureEtcd, Trust, text};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::timeout;

/// Far above the sum of the doctor's own deadlines: the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(90);

struct Report {
    code: Option<i32>,
    json: Value,
}

impl Report {
    fn has(&self, area: &str, level: &str, says: &str) -> bool {
        let findings = self.json["findings"].as_array().unwrap();
        findings.iter().any(|finding| {
            finding["area"] == area
                && finding["severity"] == level
                && format!(
                    "{}\n{}\n{}",
                    finding["title"], finding["meaning"], finding["remedy"]
                )
                .replace("\\\"", "\"")
                .contains(says)
        })
    }

    #[track_caller]
    fn says(&self, area: &str, level: &str, says: &str) -> &Self {
        assert!(
            self.has(area, level, says),
            "no {level} finding on {area} says {says:?}:\n{:#}",
            self.json["findings"]
        );
        self
    }

    #[track_caller]
    fn ends(&self, code: i32, result: &str) -> &Self {
        assert_eq!(
            (self.code, &self.json["result"]),
            (Some(code), &Value::from(result)),
            "{:#}",
            self.json["findings"]
        );
        self
    }

    /// Keys and bytes under `prefix`, and whether all of them would be mirrored.
    fn under(&self, prefix: &str) -> (u64, u64, bool) {
        let prefixes = self.json["keyspace"]["prefixes"].as_array().unwrap();
        let mine = prefixes
            .iter()
            .filter(|group| group["prefix"].as_str().unwrap().starts_with(prefix));
        mine.fold((0, 0, true), |(keys, bytes, mirrored), group| {
            (
                keys + group["keys"].as_u64().unwrap(),
                bytes + group["bytes"].as_u64().unwrap(),
                mirrored && group["mirrored"].as_bool().unwrap(),
            )
        })
    }
}

async fn run(args: &[&str]) -> std::process::Output {
    let mut command = rangecache_command();
    command.arg("doctor").args(args);
    let child = tokio::process::Command::from(command).kill_on_drop(true).output();
    timeout(TIMEOUT, child)
        .await
        .expect("the doctor ends")
        .expect("it starts")
}

async fn doctor(endpoints: &str, args: &[&str]) -> Report {
    let args = [&["--endpoints", endpoints, "--output", "json"][..], args].concat();
    let output = run(&args).await;
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Report {
        code: output.status.code(),
        json: serde_json::from_slice(&output.stdout).expect("it prints JSON"),
    }
}

/// Writes `n` keys `prefix/00000…` with values of this many bytes.
async fn fill(client: &Client, prefix: &str, n: usize, value_bytes: usize) {
    for chunk in (0..n)
        .collect::<Vec<_>>()
        .chunks(if value_bytes > 5000 { 20 } else { 100 })
    {
        let puts = chunk
            .iter()
            .map(|i| RequestOp::put(format!("{prefix}{i:05}"), vec![b'v'; value_bytes]));
        client.transact(puts.collect()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keyspace_is_measured_unchanged_on_every_version() {
    for (version, number, level, stream) in [
        (Version::V3_5, "3.5.", "note", "RangeStream: not available"),
        (Version::V3_6, "3.6.", "note", "RangeStream: not available"),
        (Version::V3_7, "3.7.", "good", "RangeStream: available"),
    ] {
        let etcd = Etcd::start(version).await;
        let client = etcd.client().await;
        fill(&client, "/registry/pods/default/", 700, 3000).await;
        fill(&client, "/registry/pods/other/", 300, 3000).await;
        fill(&client, "/registry/events/", 400, 500).await;
        fill(&client, "/registry/leases/a/", 50, 200).await;
        client.put("/registry/health", "ok").await.unwrap();
        client.put("lonely", "1").await.unwrap();
        let before = client.status().await.unwrap();
        let watches = WatchCreateRequest {
            key: "lonely".into(),
            ..WatchCreateRequest::default()
        };
        let mut open = Vec::new();
        for _ in 0..5 {
            open.push(client.watch(watches.clone()).await);
        }

        let report = doctor(&etcd.url(), &["--no-cache-prefix", "/registry/events/"]).await;
        report
            .ends(0, "good")
            .says("endpoints", "good", number)
            .says("endpoints", "good", "leader")
            .says("gates", "good", "Progress notifications: available")
            .says("gates", level, stream)
            .says("auth", "good", "auth is off")
            .says("watches", "good", "5 watchers in 5 streams, counted on 1 member")
            .says("watches", "good", "through rangecache, etcd has 2 feeds instead")
            .says("verdict", "good", "left out: /registry/events/")
            .says("verdict", "good", "LIST, paged and count requests benefit");
        let keyspace = &report.json["keyspace"];
        assert_eq!(keyspace["keys"], 1452, "{keyspace:#}");
        for (prefix, keys, value_bytes, mirrored) in [
            ("/registry/pods/", 1000, 3000, true),
            ("/registry/events/", 400, 500, false),
            ("/registry/leases/", 50, 200, true),
        ] {
            let found = report.under(prefix);
            assert_eq!((found.0, found.2), (keys, mirrored), "{prefix} in {keyspace:#}");
            let mean = found.1 / keys;
            assert!(
                (value_bytes..value_bytes + 80).contains(&mean),
                "{prefix}: {mean}"
            );
        }
        // The doctor reads a sample, not the keyspace.
        let read = keyspace["cost"]["read_bytes"].as_u64().unwrap();
        assert!(read < 400_000, "{keyspace:#}");

        let deep = doctor(&etcd.url(), &["--deep", "--cache-prefix", "/registry/pods/"]).await;
        assert_eq!(deep.json["keyspace"]["keys"], 1452);
        assert_eq!(deep.json["keyspace"]["exact"], true);
        let read = deep.json["keyspace"]["cost"]["read_bytes"].as_u64().unwrap();
        assert!(read > 3_000_000, "{:#}", deep.json["keyspace"]);
        assert_eq!(
            client.status().await.unwrap().header,
            before.header,
            "nothing is written"
        );
        // The estimate equals the size of a mirror.
        let rangecache = Rangecache::before(&etcd)
            .with("--cache-prefix", "/registry/pods/")
            .start()
            .await;
        let is = rangecache.metrics().await.sum("rangecache_mirror_memory_bytes");
        let said = deep.json["mirrors"][0]["memory_bytes"].as_f64().unwrap();
        assert!((said - is).abs() < is * 0.03, "{said} was said, {is} it is");
        // The doctor works through rangecache like on etcd.
        doctor(rangecache.url(), &[]).await.ends(0, "good");
    }
}

/// A resource in many namespaces is one list, however it was divided to be counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn totals_per_resource_come_before_their_parts() {
    let etcd = Etcd::start(Version::V3_7).await;
    let client = etcd.client().await;
    for namespace in 0..9 {
        fill(&client, &format!("/registry/pods/ns{namespace}/"), 300, 1000).await;
    }
    fill(&client, "/registry/secrets/a/", 400, 2000).await;
    fill(&client, "/registry/cert-manager.io/certificates/a/", 60, 500).await;
    fill(&client, "/registry/cert-manager.io/issuers/a/", 40, 100).await;
    let report = doctor(&etcd.url(), &[]).await;
    report.says("verdict", "good", "2,700 keys under /registry/pods/ (");
    let keyspace = &report.json["keyspace"];
    let total = |prefix: &str| {
        let resources = keyspace["resources"].as_array().unwrap().iter();
        let mut found = resources.filter(|resource| resource["prefix"] == prefix);
        let only = found.next().unwrap_or_else(|| panic!("{prefix} in {keyspace:#}"));
        assert!(found.next().is_none(), "{keyspace:#}");
        only["keys"].as_u64().unwrap()
    };
    for (prefix, keys) in [
        ("/registry/pods/", 2700),
        ("/registry/secrets/", 400),
        ("/registry/cert-manager.io/certificates/", 60),
        ("/registry/cert-manager.io/issuers/", 40),
    ] {
        assert_eq!(total(prefix), keys, "{keyspace:#}");
    }
    let text = run(&["--endpoints", &etcd.url()]).await.stdout;
    let text = String::from_utf8_lossy(&text).into_owned();
    let at = |row: &str| text.find(row).unwrap_or_else(|| panic!("{row:?} in\n{text}"));
    let (pods, secrets) = (at("    /registry/pods/ "), at("    /registry/secrets/ "));
    assert!(
        pods < at("      /registry/pods/ns0/ ") && pods < secrets,
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_keyspace_is_reported_with_prefixes_to_exclude() {
    let etcd = Etcd::start(Version::V3_7).await;
    let client = etcd.client().await;
    fill(&client, "/registry/large/", 500, 20_000).await;
    fill(&client, "/registry/small/", 500, 1000).await;
    let limit = ["--cache-max-bytes", "4MiB", "--history-max-bytes", "1MiB"];
    doctor(&etcd.url(), &limit)
        .await
        .says("memory", "good", "packed, as --cache-pack=auto has");
    doctor(&etcd.url(), &["--cache-max-bytes", "200KiB"])
        .await
        .ends(0, "warning")
        .says(
            "memory",
            "warning",
            "values of the prefixes that cost most would only be in etcd",
        )
        .says("memory", "warning", "--no-cache-prefix /registry/large/");
    let limit = [&limit[..], &["--cache-pack", "never"]].concat();
    doctor(&etcd.url(), &limit)
        .await
        .ends(1, "bad")
        .says("memory", "bad", "the mirror is disabled (over budget)")
        .says("memory", "bad", "--no-cache-prefix /registry/large/")
        .says("verdict", "bad", "not ready");
    let advised = [&limit[..], &["--no-cache-prefix", "/registry/large/"]].concat();
    doctor(&etcd.url(), &advised).await.ends(0, "warning").says(
        "verdict",
        "warning",
        "there is little to gain",
    );
    doctor(
        &etcd.url(),
        &["--cache-max-bytes", "11MiB", "--cache-pack", "never"],
    )
    .await
    .ends(0, "warning")
    .says("memory", "warning", "little to spare");
    doctor(&etcd.url(), &["--cache-prefix", "/elsewhere/"])
        .await
        .says("verdict", "warning", "check --cache-prefix");
    let out = "/registry/smal/,/registry/large/";
    let report = doctor(&etcd.url(), &["--no-cache-prefix", out]).await;
    let mistyped = "--no-cache-prefix /registry/smal/ leaves nothing out";
    report.says("verdict", "note", mistyped);
    assert!(!report.has("verdict", "note", "/registry/large/"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auth_on_checks_the_users_permissions() {
    for version in [Version::V3_5, Version::V3_7] {
        let etcd = Etcd::start(version).await;
        let root = create_users(&etcd).await;
        fill(&root, "/a/", 300, 300).await;
        fill(&root, "/b/", 300, 300).await;
        let url = etcd.url();
        doctor(&url, &[])
            .await
            .ends(1, "bad")
            .says("auth", "bad", "no user of its own (--user)")
            .says("verdict", "bad", "nothing would be answered from memory");
        doctor(&url, &["--user", "mirror:wrong"])
            .await
            .ends(1, "bad")
            .says("auth", "bad", "does not accept the user \"mirror\"");
        let alice = format!("alice:{}", password("alice"));
        doctor(&url, &["--user", &alice]).await.ends(1, "bad").says(
            "auth",
            "bad",
            "may not read all of everything",
        );
        // With permission for one prefix, that prefix can be examined.
        let own = doctor(&url, &["--user", &alice, "--cache-prefix", "/a/"]).await;
        own.ends(0, "warning")
            .says("auth", "good", "may read all that is to be mirrored");
        assert_eq!(own.under("/a/").0, 300);
        let some = doctor(
            &url,
            &["--user", &alice, "--cache-prefix", "/a/", "--cache-prefix", "/b/"],
        )
        .await;
        some.ends(1, "bad").says("auth", "bad", "may not read all of /b/");
        let mirror = format!("{MIRROR}:{}", password(MIRROR));
        let all = doctor(&url, &["--user", &mirror]).await;
        all.says("auth", "good", "each read is authorised by etcd")
            .says("endpoints", "good", "leader");
        assert_eq!((all.code, &all.json["keyspace"]["keys"]), (Some(0), &600.into()));
        let printed = format!("{:#} {:#}", all.json, own.json);
        assert!(
            !printed.contains("open-sesame"),
            "a secret is printed:\n{printed}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_of_both_sides_are_checked() {
    let (ca, other) = (Ca::new(), Ca::new());
    let server = ca.issue("server", &Leaf::default());
    let etcd = SecureEtcd::start(
        "https",
        &[
            "--cert-file",
            text(&server.cert),
            "--key-file",
            text(&server.key),
            "--trusted-ca-file",
            text(&ca.cert()),
            "--client-cert-auth",
        ],
        &Trust::new(&ca).with(&ca.issue("tests", &Leaf::default())),
    )
    .await;
    let with = async |ca: &Ca, pair: &testkit::tls::Pair, more: &[&str]| {
        let flags = [
            "--cacert",
            text(&ca.cert()),
            "--cert",
            text(&pair.cert),
            "--key",
            text(&pair.key),
        ]
        .map(str::to_owned);
        let flags: Vec<&str> = flags
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect();
        doctor(etcd.url(), &flags).await
    };
    let client = ca.issue("client", &Leaf::default());
    with(&ca, &client, &[])
        .await
        .says("endpoints", "good", "leader")
        .says(
            "certificates",
            "good",
            "shows a certificate for 127.0.0.1, localhost",
        )
        .says("certificates", "good", "--cert ");
    with(&other, &client, &[])
        .await
        .ends(1, "bad")
        .says("endpoints", "bad", "was not issued by --cacert");
    with(&ca, &other.issue("stranger", &Leaf::default()), &[])
        .await
        .ends(1, "bad")
        .says("endpoints", "bad", "etcd's --trusted-ca-file");
    let named = ca.issue(
        "named",
        &Leaf {
            common_name: Some("root"),
            ..Leaf::default()
        },
    );
    with(&ca, &named, &[])
        .await
        .says("auth", "warning", "the common name \"root\"");
    let expired = ca.issue(
        "expired",
        &Leaf {
            expired: true,
            ..Leaf::default()
        },
    );
    let listener = [
        "--listen-client-urls",
        "https://127.0.0.1:0",
        "--cert-file",
        text(&expired.cert),
        "--key-file",
        text(&expired.key),
    ];
    with(&ca, &client, &listener)
        .await
        .ends(1, "bad")
        .says("certificates", "bad", "expired on 2020-01-01");
    // A file without a certificate: rangecache would not start, and says why.
    let broken = ca.path("broken.crt");
    std::fs::write(&broken, "not a certificate").unwrap();
    doctor(etcd.url(), &["--cacert", text(&broken)])
        .await
        .ends(1, "bad")
        .says("certificates", "bad", "the file holds no certificate");
    // http:// to an etcd with TLS.
    let plain = etcd.url().replace("https://", "http://");
    doctor(&plain, &[])
        .await
        .ends(1, "bad")
        .says("endpoints", "bad", "write https://");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_unlisted_and_mixed_version_members_are_reported() {
    let mut cluster = Cluster::start_mixed([Version::V3_6, Version::V3_6, Version::V3_7]).await;
    let leader = cluster.leader().await.expect("they agree");
    let dead = (leader + 1) % 3;
    let url = cluster.members[dead].url();
    doctor(&cluster.endpoints(), &[])
        .await
        .says("gates", "warning", "different versions: 3.6.")
        .says("gates", "note", "RangeStream: available on 1 of 3")
        .says("endpoints", "good", "all 3 members of the cluster are named")
        .says("endpoints", "good", "follower");
    doctor(&cluster.members[leader].url(), &[])
        .await
        .says(
            "endpoints",
            "warning",
            "2 of the cluster's 3 members are not in --endpoints",
        )
        .says("endpoints", "warning", &url);

    cluster.members[dead].stop();
    let report = doctor(&cluster.endpoints(), &[]).await;
    report
        .says("endpoints", "warning", &format!("{url}: Connection refused"))
        .says("endpoints", "good", "all 3 members");
    assert_eq!(report.code, Some(0), "{:#}", report.json["findings"]);

    // Without a quorum no read can be proven fresh.
    cluster.members[leader].stop();
    doctor(&cluster.endpoints(), &[])
        .await
        .ends(1, "bad")
        .says("endpoints", "bad", "no member answers a linearizable read")
        .says("verdict", "bad", "nothing would be answered from memory");

    let stranger = Etcd::start(Version::V3_7).await;
    let survivor = (0..3).find(|n| ![dead, leader].contains(n)).unwrap();
    let both = format!("{},{}", stranger.url(), cluster.members[survivor].url());
    doctor(&both, &[])
        .await
        .ends(1, "bad")
        .says("endpoints", "bad", "different clusters");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_other_than_etcd_are_reported_in_time() {
    // A server that accepts and never responds, and one of HTTP/1.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let web = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let urls = [&silent, &web].map(|listener| format!("http://{}", listener.local_addr().unwrap()));
    let holding = tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((socket, _)) = silent.accept().await {
            held.push(socket);
        }
    });
    let serving = tokio::spawn(async move {
        while let Ok((mut socket, _)) = web.accept().await {
            tokio::spawn(async move {
                let _ = socket.read(&mut [0; 1024]).await;
                let _ = socket
                    .write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                    .await;
            });
        }
    });
    for (url, says) in [
        (&urls[0], "no response within"),
        (&urls[1], &*format!("{}: ", urls[1])),
    ] {
        doctor(url, &[])
            .await
            .ends(1, "bad")
            .says("endpoints", "bad", says);
    }
    holding.abort();
    serving.abort();

    let etcd = Etcd::start(Version::V3_7).await;
    etcd.pause();
    let report = doctor(&etcd.url(), &[]).await;
    etcd.resume();
    report
        .ends(1, "bad")
        .says("endpoints", "bad", "no member answers a linearizable read");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_text_is_ascii_in_a_pipe_and_misuse_exits_64() {
    let etcd = Etcd::start(Version::V3_7).await;
    let output = run(&["--endpoints", &etcd.url()]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.is_ascii(), "{text}");
    for says in ["endpoints\n  ok   ", "verdict\n", "memory\n"] {
        assert!(text.contains(says), "{says:?} is not in\n{text}");
    }
    for (args, says) in [
        (&["--endpoints", "nowhere"][..], "write http://nowhere"),
        (&["--cache-prefix", ""], "leave --cache-prefix out"),
        (&["--output", "xml"], "json"),
    ] {
        let output = run(args).await;
        assert_eq!(output.status.code(), Some(64), "{args:?}");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.contains(says), "{args:?}: {message}");
    }
}
