//! `--caller-is=certificate`: etcd's users are the common names of certificates, and memory answers the callers that have
//! rangecache's own name.

use ::http::Method;
use testkit::etcd::Version;
use testkit::grpc::{Client, PERMISSION_DENIED, Status};
use testkit::http;
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchResponse, prefix_end};
use testkit::proxy::{Rangecache, rangecache_command};
use testkit::tls::{
    Ca, Leaf, Pair, SecureEtcd, Trust, call_http, connect, handshake, replace, text, try_connect,
};
use testkit::wait::{SOON, until};

/// Key that the user kube may read and write.
const KEY: &str = "/kube/a";
/// Key that the user kube may not read.
const OTHER: &str = "/other";

/// An etcd with auth on whose user kube may use `/kube/`, and a rangecache whose certificate has that name.
struct World {
    ca: Ca,
    etcd: SecureEtcd,
    own: Pair,
    rangecache: Rangecache,
    /// A client of etcd with a token of root.
    root: Client,
}

fn issue(ca: &Ca, file: &str, common_name: Option<&str>) -> Pair {
    let leaf = Leaf {
        common_name,
        ..Leaf::default()
    };
    ca.issue(file, &leaf)
}

impl World {
    async fn start(version: Version) -> World {
        let ca = Ca::new();
        let (server, own) = (issue(&ca, "server", None), issue(&ca, "own", Some("kube")));
        let authority = ca.cert();
        let listener = [
            ("--cert-file", text(&server.cert)),
            ("--key-file", text(&server.key)),
            ("--trusted-ca-file", text(&authority)),
        ];
        let mut etcd_flags: Vec<_> = listener
            .iter()
            .flat_map(|(flag, value)| [*flag, *value])
            .collect();
        etcd_flags.push("--client-cert-auth");
        let nameless = Trust::new(&ca).with(&issue(&ca, "nameless", None));
        let etcd = SecureEtcd::start_version(version, "https", &etcd_flags, &nameless).await;
        let direct = connect(etcd.url(), &nameless).await;
        for key in [KEY, OTHER] {
            direct.put(key, "1").await.unwrap();
        }
        direct.add_user("kube", "unused").await.unwrap();
        direct.add_role("reader").await.unwrap();
        direct.grant_read("reader", "/kube/", "/kube0").await.unwrap();
        direct.grant_role("kube", "reader").await.unwrap();
        let root = direct.enable_auth("password").await.unwrap();
        let mut builder = Rangecache::at(etcd.url())
            .with("--cacert", text(&authority))
            .with("--cert", text(&own.cert))
            .with("--key", text(&own.key))
            .with("--caller-is", "certificate")
            .with("--cache-prefix", "/kube/")
            .with("--tls-reload-interval", "50ms")
            .listening_on("https://127.0.0.1:0,http://127.0.0.1:0");
        for (flag, value) in listener {
            builder = builder.with(flag, value);
        }
        let rangecache = builder.start().await;
        World {
            ca,
            etcd,
            own,
            rangecache,
            root,
        }
    }

    /// A client of rangecache whose certificate has this name.
    async fn caller(&self, common_name: Option<&str>) -> Client {
        try_connect(self.rangecache.url(), &self.trust(common_name))
            .await
            .unwrap()
    }

    fn trust(&self, common_name: Option<&str>) -> Trust {
        let file = format!("client-{}", common_name.unwrap_or("nameless"));
        Trust::new(&self.ca).with(&issue(&self.ca, &file, common_name))
    }

    /// A client of rangecache that presents no certificate.
    async fn without_certificate(&self) -> Client {
        let urls = self.rangecache.client_urls();
        let url = urls.iter().find(|url| url.starts_with("http://")).unwrap();
        Client::try_connect(url).await.unwrap()
    }

    /// A client of rangecache that memory answers.
    async fn answered_caller(&self) -> Client {
        let caller = self.caller(Some("kube")).await;
        until(
            SOON,
            "memory answers a caller of rangecache's own name",
            async || {
                (self.answers_from_memory(&caller, KEY).await == (Ok(Some(b"1".to_vec())), true))
                    .then_some(())
            },
        )
        .await;
        caller
    }

    /// Result of a get, and whether it came from memory.
    async fn answers_from_memory(
        &self,
        caller: &Client,
        key: &str,
    ) -> (Result<Option<Vec<u8>>, Status>, bool) {
        let before = self.rangecache.outcomes().await;
        let result = caller.get(key).await;
        let since = self.rangecache.outcomes_since(&before, 1).await;
        assert_eq!(since.total(), 1, "{since:?}");
        (result, since.memory_answers() == 1)
    }
}

async fn caller_of_the_same_name_is_answered(version: Version) {
    let world = World::start(version).await;
    let caller = world.answered_caller().await;
    world.root.put(KEY, "2").await.unwrap();
    let (value, from_memory) = world.answers_from_memory(&caller, KEY).await;
    assert_eq!((value, from_memory), (Ok(Some(b"2".to_vec())), true));
    let before = world.rangecache.stream_outcomes().await;
    caller.streamed(&RangeRequest::one(KEY)).await.unwrap();
    let streams = world.rangecache.stream_outcomes_since(&before, 1).await;
    assert_eq!(streams.memory_answers(), 1, "{streams:?}");

    // The rights are those of the name at etcd, in etcd's words; kube may not write either.
    let direct = try_connect(world.etcd.url(), &world.trust(Some("kube")))
        .await
        .unwrap();
    let (refused, from_memory) = world.answers_from_memory(&caller, OTHER).await;
    assert_eq!(refused, direct.get(OTHER).await);
    assert_eq!(refused.unwrap_err().code, PERMISSION_DENIED);
    assert!(!from_memory);
    assert_eq!(caller.put(KEY, "3").await, direct.put(KEY, "3").await);
    assert_eq!(caller.put(KEY, "3").await.unwrap_err().code, PERMISSION_DENIED);

    // A call with this metadata is one of etcd's gateway, for which etcd ignores certificates.
    let of_the_gateway = caller.with_metadata("grpcgateway-accept", "*/*");
    let (refused, from_memory) = world.answers_from_memory(&of_the_gateway, KEY).await;
    let at_etcd = direct.with_metadata("grpcgateway-accept", "*/*").get(KEY).await;
    assert_eq!((&refused, from_memory), (&at_etcd, false));
    assert!(refused.is_err());

    // A right that is removed ends at once.
    world.root.revoke_role("kube", "reader").await.unwrap();
    assert_eq!(caller.get(KEY).await.unwrap_err().code, PERMISSION_DENIED);
}

async fn other_callers_are_forwarded(version: Version) {
    let world = World::start(version).await;
    world.answered_caller().await;
    let others = [
        ("a longer name", world.caller(Some("kubelet")).await),
        ("no name", world.caller(None).await),
        ("no certificate", world.without_certificate().await),
    ];
    for (what, caller) in &others {
        // etcd sees rangecache's certificate: its verdict is that about kube.
        let (allowed, from_memory) = world.answers_from_memory(caller, KEY).await;
        assert_eq!((allowed, from_memory), (Ok(Some(b"1".to_vec())), false), "{what}");
        let (refused, from_memory) = world.answers_from_memory(caller, OTHER).await;
        assert_eq!(refused.unwrap_err().code, PERMISSION_DENIED, "{what}");
        assert!(!from_memory, "{what}");
        let serializable = RangeRequest {
            serializable: true,
            ..RangeRequest::one(KEY)
        };
        let before = world.rangecache.outcomes().await;
        caller.range(&serializable).await.unwrap();
        let since = world.rangecache.outcomes_since(&before, 1).await;
        assert_eq!(since.memory_answers(), 0, "{what}: {since:?}");
        let before = world.rangecache.stream_outcomes().await;
        caller.streamed(&RangeRequest::one(KEY)).await.unwrap();
        let streams = world.rangecache.stream_outcomes_since(&before, 1).await;
        assert_eq!(streams.memory_answers(), 0, "{what}: {streams:?}");
    }

    // While auth is off, there are no rights, and memory answers all callers.
    world.root.disable_auth().await.unwrap();
    for (what, caller) in &others {
        until(SOON, "memory answers while auth is off", async || {
            world.answers_from_memory(caller, KEY).await.1.then_some(())
        })
        .await;
        assert_eq!(caller.get(OTHER).await, Ok(Some(b"1".to_vec())), "{what}");
    }
}

async fn token_wins_over_the_certificate(version: Version) {
    let world = World::start(version).await;
    let same = world.answered_caller().await;
    let token = world.root.new_token("root", "password").await.unwrap();
    let direct = try_connect(world.etcd.url(), &world.trust(Some("kube")))
        .await
        .unwrap();
    for caller in [same.clone(), world.caller(Some("kubelet")).await] {
        let as_root = caller.with_metadata("token", &token);
        assert_eq!(as_root.get(OTHER).await, Ok(Some(b"1".to_vec())));
        // Memory answers, as the rights are those of root.
        assert_eq!(
            world.answers_from_memory(&as_root, KEY).await,
            (Ok(Some(b"1".to_vec())), true)
        );
        let unknown = caller.with_metadata("token", "unknown");
        let (refused, from_memory) = world.answers_from_memory(&unknown, KEY).await;
        assert_eq!(refused, direct.with_metadata("token", "unknown").get(KEY).await);
        assert!(refused.is_err() && !from_memory);
    }
    world.root.add_user("powerless", "password").await.unwrap();
    let token = world.root.new_token("powerless", "password").await.unwrap();
    let (refused, from_memory) = world
        .answers_from_memory(&same.with_metadata("token", &token), KEY)
        .await;
    assert_eq!(refused.unwrap_err().code, PERMISSION_DENIED);
    assert!(!from_memory);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caller_of_rangecaches_own_name_is_answered_from_memory_3_7() {
    caller_of_the_same_name_is_answered(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn caller_of_rangecaches_own_name_is_answered_from_memory_3_6() {
    caller_of_the_same_name_is_answered(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn caller_of_rangecaches_own_name_is_answered_from_memory_3_5() {
    caller_of_the_same_name_is_answered(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_of_other_names_are_forwarded_3_7() {
    other_callers_are_forwarded(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn callers_of_other_names_are_forwarded_3_5() {
    other_callers_are_forwarded(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_of_a_caller_wins_over_its_certificate_3_7() {
    token_wins_over_the_certificate(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn token_of_a_caller_wins_over_its_certificate_3_5() {
    token_wins_over_the_certificate(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_is_served_from_memory_only_to_callers_of_rangecaches_own_name() {
    let world = World::start(Version::V3_7).await;
    let caller = world.answered_caller().await;
    let watch = || WatchCreateRequest {
        key: b"/kube/".to_vec(),
        range_end: prefix_end(b"/kube/"),
        ..WatchCreateRequest::default()
    };
    let created = async |by| world.rangecache.metrics().await.watches_created(by);
    let mut watches = vec![caller.watch(watch()).await];
    assert_eq!((created("memory").await, created("etcd").await), (1.0, 0.0));
    for other in [
        world.caller(Some("kubelet")).await,
        world.without_certificate().await,
    ] {
        watches.push(other.watch(watch()).await);
    }
    assert_eq!((created("memory").await, created("etcd").await), (1.0, 2.0));
    world.root.put(KEY, "2").await.unwrap();
    for watch in &mut watches {
        let response = watch.next_as::<WatchResponse>(SOON).await.unwrap();
        assert_eq!(response.events.len(), 1, "{response:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateway_takes_no_certificate_for_a_user() {
    let world = World::start(Version::V3_7).await;
    let caller = world.answered_caller().await;
    let (question, path) = (r#"{"key":"L2t1YmUvYQ=="}"#, "/v3/kv/range");
    let same = world.trust(Some("kube"));
    let ask = async |url: &str| {
        let response = call_http(url, &same, Method::POST, path, question).await.unwrap();
        (response.status, response.body)
    };
    // While auth is off, memory answers.
    world.root.disable_auth().await.unwrap();
    until(SOON, "memory answers in JSON while auth is off", async || {
        let before = world.rangecache.outcomes().await;
        assert_eq!(ask(world.rangecache.url()).await.0, 200);
        let since = world.rangecache.outcomes_since(&before, 1).await;
        (since.memory_answers() == 1).then_some(())
    })
    .await;
    world.root.auth_enable().await.unwrap();
    until(SOON, "etcd's auth is known to be on", async || {
        let authorizations = async || {
            world
                .rangecache
                .metrics()
                .await
                .sum("rangecache_authorizations_total")
        };
        let before = authorizations().await;
        caller.get(KEY).await.unwrap();
        (authorizations().await > before).then_some(())
    })
    .await;
    for _ in 0..3 {
        let before = world.rangecache.outcomes().await;
        let (through, at_etcd) = (ask(world.rangecache.url()).await, ask(world.etcd.url()).await);
        assert_eq!(through, at_etcd);
        assert_ne!(at_etcd.0, 200, "{}", at_etcd.1);
        let since = world.rangecache.outcomes_since(&before, 1).await;
        assert_eq!(since.memory_answers(), 0, "{since:?}");
    }
}

/// etcd's gateway takes no certificate for a user, so that the name of a caller's certificate does not count in JSON.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_watch_is_served_from_memory_to_callers_with_a_token_or_while_auth_is_off() {
    let world = World::start(Version::V3_7).await;
    world.answered_caller().await;
    let body = r#"{"create_request":{"key":"L2t1YmUvYQ=="}}"#;
    let open = async |url: &str, name: Option<&str>, headers: &[(&str, &str)]| {
        let stream = handshake(url, &world.trust(name), &["http/1.1"]).await.unwrap();
        let lines = http::lines_over(stream, "localhost", "/v3/watch", headers, body).await;
        lines.unwrap()
    };
    let created = async || {
        let metrics = world.rangecache.metrics().await;
        (metrics.watches_created("memory"), metrics.watches_created("etcd"))
    };
    let (through, direct) = (world.rangecache.url(), world.etcd.url());
    for (name, count) in [(Some("kube"), 1.0), (Some("kubelet"), 2.0)] {
        let (mut forwarded, mut at_etcd) = (open(through, name, &[]).await, open(direct, name, &[]).await);
        assert_eq!(forwarded.status, at_etcd.status, "{name:?}");
        let refused = at_etcd.next().await.unwrap();
        assert!(!refused.contains("created"), "{refused}");
        assert_eq!(forwarded.next().await.unwrap(), refused, "{name:?}");
        assert_eq!(created().await, (0.0, count), "{name:?}");
    }

    // A token names the user, whatever the certificate.
    let token = world.root.new_token("root", "password").await.unwrap();
    let headers = [("authorization", token.as_str())];
    let mut of_root = open(through, Some("kubelet"), &headers).await;
    assert!(of_root.next().await.unwrap().contains("\"created\":true"));
    assert_eq!(created().await, (1.0, 2.0));

    // While auth is off, there are no rights.
    world.root.disable_auth().await.unwrap();
    let mut watches = Vec::new();
    for name in [Some("kube"), Some("kubelet"), None] {
        let before = created().await.0;
        let watch = until(
            SOON,
            "memory serves a watch in JSON while auth is off",
            async || {
                let mut watch = open(through, name, &[]).await;
                watch.next().await.unwrap();
                (created().await.0 > before).then_some(watch)
            },
        );
        watches.push(watch.await.0);
    }
    let plain = connect(direct, &world.trust(None)).await;
    plain.put(KEY, "2").await.unwrap();
    for watch in &mut watches {
        let line = watch.next().await.unwrap();
        assert!(line.contains("\"events\":["), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_certificate_of_another_name_is_not_taken() {
    let world = World::start(Version::V3_7).await;
    let caller = world.answered_caller().await;
    // The certificate is read between two checks of the files, whole or not at all.
    for (serial, common_name, result) in [(8, "kube", "ok"), (9, "kubelet", "failed")] {
        let leaf = Leaf {
            common_name: Some(common_name),
            serial,
            ..Leaf::default()
        };
        let pair = world.ca.issue("replacement", &leaf);
        for (from, to) in [(&pair.key, &world.own.key), (&pair.cert, &world.own.cert)] {
            replace(to, &std::fs::read_to_string(from).unwrap());
        }
        let sample = format!("rangecache_tls_reloads_total{{side=\"etcd\",result=\"{result}\"}}");
        let sample = &sample;
        until(SOON, &format!("the reload: {result}"), async || {
            let metrics = world.rangecache.metrics().await;
            (metrics.0[sample] > 0.0).then_some(())
        })
        .await;
    }
    until(SOON, "the reason is logged", async || {
        let log = world.rangecache.log();
        let is_said = |line: &str| line.contains("kubelet") && line.contains("restart rangecache");
        log.lines().any(is_said).then_some(())
    })
    .await;
    let (value, from_memory) = world.answers_from_memory(&caller, KEY).await;
    assert_eq!((value, from_memory), (Ok(Some(b"1".to_vec())), true));
    let (_, from_memory) = world
        .answers_from_memory(&world.caller(Some("kubelet")).await, KEY)
        .await;
    assert!(!from_memory, "the new name is not that of any connection to etcd");
}

#[test]
fn certificate_without_a_name_is_refused_before_a_port_is_bound() {
    let ca = Ca::new();
    let (server, nameless) = (issue(&ca, "server", None), issue(&ca, "nameless", None));
    let urls = [
        "--endpoints",
        "https://127.0.0.1:1",
        "--listen-client-urls",
        "https://127.0.0.1:0",
    ];
    let output = rangecache_command()
        .args(urls)
        .args(["--caller-is", "certificate", "--cacert", text(&ca.cert())])
        .args(["--cert", text(&nameless.cert), "--key", text(&nameless.key)])
        .args(["--cert-file", text(&server.cert), "--key-file", text(&server.key)])
        .args(["--trusted-ca-file", text(&ca.cert())])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("no common name"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_checks_the_rights_of_the_certificates_user() {
    let world = World::start(Version::V3_7).await;
    for (prefix, code, says) in [
        (
            "/kube/",
            0,
            "the user \"kube\" may read all that is to be mirrored",
        ),
        (OTHER, 1, OTHER),
    ] {
        let mut command = rangecache_command();
        command
            .args([
                "doctor",
                "--endpoints",
                world.etcd.url(),
                "--caller-is",
                "certificate",
            ])
            .args(["--cacert", text(&world.ca.cert()), "--cache-prefix", prefix])
            .args(["--cert", text(&world.own.cert), "--key", text(&world.own.key)])
            .args(["--listen-client-urls", "https://127.0.0.1:0"])
            .args([
                "--cert-file",
                text(&world.own.cert),
                "--key-file",
                text(&world.own.key),
            ])
            .args(["--trusted-ca-file", text(&world.ca.cert())]);
        let run = tokio::task::spawn_blocking(move || command.output());
        let output = run.await.unwrap().unwrap();
        let report = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(code), "{report}");
        assert!(report.contains(says), "{report}");
        assert!(!report.contains("use a certificate without a CN"), "{report}");
    }
}
