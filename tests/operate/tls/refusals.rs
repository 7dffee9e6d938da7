//! Certificates, files and clients that are refused, and what is said of them.

use std::os::unix::fs::PermissionsExt as _;

use testkit::grpc::UNAVAILABLE;
use testkit::pb::WatchCreateRequest;
use testkit::proxy::{Rangecache, rangecache_command};
use testkit::tls::{Ca, Encoding, Leaf, Pair, SecureEtcd, Trust, connect, replace, text, try_connect};
use testkit::wait::{SOON, until};

use super::{logged, server_flags, strs, with_all};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoked_and_wrongly_named_clients_are_refused() {
    let ca = Ca::new();
    let flags = server_flags(&ca.issue("server", &Leaf::default()));
    let numbered = |name: &str, serial, names| {
        let leaf = Leaf {
            serial,
            names,
            ..Leaf::default()
        };
        Trust::new(&ca).with(&ca.issue(name, &leaf))
    };
    let (good, revoked, stranger) = (
        numbered("good", 1, &["client.test"]),
        numbered("revoked", 2, &["client.test"]),
        numbered("stranger", 3, &["stranger.test"]),
    );
    let etcd = SecureEtcd::start("http", &[], &good).await;
    let rangecache = with_all(Rangecache::at(etcd.url()), &flags)
        .with("--trusted-ca-file", text(&ca.cert()))
        .with_flag("--client-cert-auth")
        .with("--client-crl-file", text(&ca.revoke(&[2])))
        .with("--client-cert-allowed-hostname", "client.test")
        .with("--tls-reload-interval", "50ms")
        .listening_on("https://127.0.0.1:0")
        .start()
        .await;
    let comes_in = async |trust: &Trust| match try_connect(rangecache.url(), trust).await {
        Ok(client) => client.status().await.is_ok(),
        Err(_) => false,
    };
    let other = Ca::new();
    let foreign = Trust::new(&ca).with(&other.issue("client", &Leaf::default()));
    assert!(comes_in(&good).await);
    for (who, trust) in [
        ("a revoked client", &revoked),
        ("a client of another name", &stranger),
        ("a client of another CA", &foreign),
        ("a client without a certificate", &Trust::new(&ca)),
    ] {
        assert!(!comes_in(trust).await, "{who} came in");
    }
    until(SOON, "each refused handshake is counted", async || {
        let metrics = rangecache.metrics().await;
        let refused = metrics.0["rangecache_tls_handshakes_total{result=\"refused\"}"];
        (refused >= 4.0).then_some(())
    })
    .await;
    logged(&rangecache, &["WARN", "handshake failed"]).await;

    ca.revoke(&[1]);
    until(SOON, "the new revocation list is used", async || {
        (!comes_in(&good).await).then_some(())
    })
    .await;
    assert!(comes_in(&revoked).await, "its certificate is no longer revoked");
}

/// Runs rangecache with `flags`, expects an immediate exit with `code`, and returns its output.
fn refused(code: i32, flags: &[&str]) -> String {
    let output = rangecache_command()
        .args(["--listen-metrics-urls", "http://127.0.0.1:0"])
        .args(flags)
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{flags:?}: {message}");
    message
}

#[test]
fn bad_files_are_explained_before_a_port_is_bound() {
    let ca = Ca::new();
    let (pair, other) = (
        ca.issue("server", &Leaf::default()),
        ca.issue("other", &Leaf::default()),
    );
    let write = |name: &str, content: &str| {
        replace(&ca.path(name), content);
        ca.path(name)
    };
    let (cert, key, authority) = (text(&pair.cert), text(&pair.key), ca.cert());
    let missing = ca.path("missing");
    let nonsense = write("nonsense", "nonsense");
    let broken = write(
        "broken",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    );
    let encrypted = write(
        "encrypted",
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
    );
    let https = ["--listen-client-urls", "https://127.0.0.1:0"];
    let listener: [(&[&str], &[&str]); 8] = [
        (
            &["--cert-file", text(&missing), "--key-file", key],
            &["--cert-file", "missing", "cannot be read"],
        ),
        (
            &["--cert-file", text(&nonsense), "--key-file", key],
            &["--cert-file", "holds no certificate"],
        ),
        (
            &["--cert-file", text(&broken), "--key-file", key],
            &["--cert-file", "cannot be parsed"],
        ),
        (
            &["--cert-file", cert, "--key-file", text(&nonsense)],
            &["--key-file", "holds no private key"],
        ),
        (
            &["--cert-file", cert, "--key-file", text(&encrypted)],
            &["--key-file", "encrypted", "decrypt it"],
        ),
        (
            &["--cert-file", cert, "--key-file", text(&other.key)],
            &["--key-file", "is not the key of", "--cert-file"],
        ),
        (
            &[
                "--cert-file",
                cert,
                "--key-file",
                key,
                "--trusted-ca-file",
                text(&nonsense),
            ],
            &["--trusted-ca-file", "holds no certificate"],
        ),
        (
            &[
                "--cert-file",
                cert,
                "--key-file",
                key,
                "--trusted-ca-file",
                text(&authority),
                "--client-crl-file",
                text(&nonsense),
            ],
            &["--client-crl-file", "holds no revocation list"],
        ),
    ];
    for (flags, says) in listener {
        let output = refused(1, &[&https[..], flags].concat());
        for part in says {
            assert!(output.contains(part), "{flags:?} should mention {part}: {output}");
        }
    }
    let upstream = [
        "--endpoints",
        "https://127.0.0.1:1",
        "--listen-client-urls",
        "http://127.0.0.1:0",
    ];
    let output = refused(1, &[&upstream[..], &["--cacert", text(&missing)]].concat());
    assert!(
        output.contains("--cacert") && output.contains("cannot be read"),
        "{output}"
    );
    let output = refused(
        1,
        &[&upstream[..], &["--cert", cert, "--key", text(&other.key)]].concat(),
    );
    assert!(
        output.contains("--key") && output.contains("is not the key of"),
        "{output}"
    );
    // Flags alone.
    let output = refused(64, &[&https[..], &["--cert-file", cert]].concat());
    assert!(
        output.contains("--key-file") && output.contains("give both"),
        "{output}"
    );
    let output = refused(64, &["--listen-client-urls", "http://0.0.0.0:0"]);
    assert!(output.contains("--allow-plaintext-listener"), "{output}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_refusals_are_logged_with_a_remedy() {
    let (ca, other) = (Ca::new(), Ca::new());
    let leaf = |name: &str, leaf: Leaf<'_>| ca.issue(name, &leaf);
    let server = leaf("server", Leaf::default());
    let good = leaf("client", Leaf::default());
    let trust = Trust::new(&ca).with(&leaf("caller", Leaf::default()));
    ca.revoke(&[66]);
    let mutual = |server: &Pair| {
        let mut flags = server_flags(server);
        let (ca, crl) = (ca.cert(), ca.path("revoked.der"));
        flags.extend(["--trusted-ca-file", text(&ca), "--client-crl-file", text(&crl)].map(str::to_owned));
        flags
    };
    let etcd = SecureEtcd::start("https", &strs(&mutual(&server)), &trust).await;
    let plain = SecureEtcd::start("http", &[], &trust).await;
    let accept_any = trust.clone().accept_any();
    let named = leaf(
        "named",
        Leaf {
            names: &["etcd.elsewhere"],
            ..Leaf::default()
        },
    );
    let misnamed = SecureEtcd::start("https", &strs(&mutual(&named)), &accept_any).await;
    let old = leaf(
        "old",
        Leaf {
            expired: true,
            ..Leaf::default()
        },
    );
    let expired = SecureEtcd::start("https", &strs(&server_flags(&old)), &accept_any).await;

    let (authority, other_authority) = (ca.cert(), other.cert());
    let (authority, other_authority) = (text(&authority), text(&other_authority));
    let strange = other.issue("client", &Leaf::default());
    let (outdated, revoked) = (
        leaf(
            "outdated",
            Leaf {
                expired: true,
                ..Leaf::default()
            },
        ),
        leaf(
            "revoked",
            Leaf {
                serial: 66,
                ..Leaf::default()
            },
        ),
    );
    let showing = |pair: &Pair| {
        [
            "--cacert",
            authority,
            "--cert",
            text(&pair.cert),
            "--key",
            text(&pair.key),
        ]
        .map(str::to_owned)
        .to_vec()
    };
    let with_ca = |path: &str| vec!["--cacert".to_owned(), path.to_owned()];
    let (plain_to_tls, tls_to_plain) = (
        etcd.url().replace("https", "http"),
        plain.url().replace("http", "https"),
    );
    let cases: [(&str, &str, Vec<String>, &[&str]); 9] = [
        (
            "a wrong CA",
            etcd.url(),
            with_ca(other_authority),
            &["was not issued by --cacert", other_authority],
        ),
        (
            "a wrong name",
            misnamed.url(),
            showing(&good),
            &["not for 127.0.0.1", "etcd.elsewhere", "--endpoints"],
        ),
        (
            "an expired etcd",
            expired.url(),
            with_ca(authority),
            &["has expired: renew it"],
        ),
        (
            "no certificate",
            etcd.url(),
            with_ca(authority),
            &["give --cert and --key"],
        ),
        (
            "a strange certificate",
            etcd.url(),
            showing(&strange),
            &["--cert", text(&strange.cert), "--trusted-ca-file"],
        ),
        (
            "an expired certificate",
            etcd.url(),
            showing(&outdated),
            &["--cert", text(&outdated.cert)],
        ),
        (
            "a revoked certificate",
            etcd.url(),
            showing(&revoked),
            &[text(&revoked.cert), "revoked?"],
        ),
        ("plaintext to TLS", &plain_to_tls, vec![], &["write https://"]),
        (
            "TLS to plaintext",
            &tls_to_plain,
            with_ca(authority),
            &["write http://"],
        ),
    ];
    for (case, url, flags, says) in cases {
        let rangecache = with_all(Rangecache::at(url), &flags)
            .with("--connect-timeout", "1s")
            .start_cold()
            .await;
        logged(&rangecache, &[says, &["WARN", "cannot connect", url]].concat()).await;
        if case != "plaintext to TLS" {
            let status = rangecache.client().await.put("a", "b").await.unwrap_err();
            assert_eq!(status.code, UNAVAILABLE, "{case}");
            for part in [says, &[url]].concat() {
                assert!(status.message.contains(part), "{case}: {part} not in {status:?}");
            }
        }
        // It retries several times a second, and logs the reason once.
        let lines = rangecache.log();
        let said = lines
            .lines()
            .filter(|line| line.contains("cannot connect"))
            .count();
        assert_eq!(said, 1, "{case}: {lines}");
        assert!(!lines.contains("connected to etcd"), "{case}: {lines}");
    }
    let careless = Rangecache::at(expired.url())
        .with_flag("--insecure-skip-tls-verify")
        .start()
        .await;
    logged(&careless, &["WARN", "--insecure-skip-tls-verify"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_with_a_user_name_reads_nothing_from_memory() {
    let ca = Ca::new();
    let mut flags = server_flags(&ca.issue("server", &Leaf::default()));
    flags.extend(["--trusted-ca-file".to_owned(), text(&ca.cert()).to_owned()]);
    flags.push("--client-cert-auth".to_owned());
    let trust = Trust::new(&ca).with(&ca.issue("no_user", &Leaf::default()));
    let own_user = Some("root:password");
    // etcd takes a name in an old encoding for a user, too.
    for (version, encoding, user) in [
        (testkit::etcd::Version::V3_5, Encoding::Utf8, None),
        (testkit::etcd::Version::V3_6, Encoding::Utf8, None),
        (testkit::etcd::Version::V3_7, Encoding::Utf8, None),
        (testkit::etcd::Version::V3_7, Encoding::T61, None),
        (testkit::etcd::Version::V3_7, Encoding::Bmp, None),
        (testkit::etcd::Version::V3_5, Encoding::Utf8, own_user),
        (testkit::etcd::Version::V3_6, Encoding::Utf8, own_user),
        (testkit::etcd::Version::V3_7, Encoding::Utf8, own_user),
    ] {
        let root = ca.issue(
            "root",
            &Leaf {
                common_name: Some("root"),
                encoding,
                ..Leaf::default()
            },
        );
        let etcd = SecureEtcd::start_version(version, "https", &strs(&flags), &trust).await;
        let direct = connect(etcd.url(), &trust).await;
        direct.put("secret", "1").await.unwrap();
        let mut builder = Rangecache::at(etcd.url())
            .with("--cacert", text(&ca.cert()))
            .with("--cert", text(&root.cert))
            .with("--key", text(&root.key));
        if let Some(user) = user {
            builder = builder.with("--user", user);
        }
        let rangecache = builder.start().await;
        let client = rangecache.client().await;
        let before = rangecache.outcomes().await;
        client.get("secret").await.unwrap();
        let outcomes = rangecache.outcomes_since(&before, 1).await;
        assert_eq!(outcomes.memory_answers(), 1, "auth is off: {outcomes:?}");
        // Memory knows the gateway's text from then on.
        let url = format!("{}/v3/kv/range", rangecache.url());
        let json = async || testkit::http::post(&url, r#"{"key":"c2VjcmV0"}"#).await.unwrap();
        assert_eq!(json().await.status, 200);

        direct.enable_auth("password").await.unwrap();
        if user.is_some() {
            let with_token = client.authenticate("root", "password").await.unwrap();
            until(SOON, "memory answers a caller with a token", async || {
                // rangecache finds that auth is on, and logs in.
                client.get("secret").await.unwrap();
                let before = rangecache.outcomes().await;
                with_token.get("secret").await.unwrap();
                let outcomes = rangecache.outcomes_since(&before, 1).await;
                (outcomes.memory_answers() > 0).then_some(())
            })
            .await;
        }
        let before = rangecache.outcomes().await;
        for _ in 0..10 {
            // etcd takes the caller for root because of rangecache's certificate: the warning is about this.
            client.get("secret").await.unwrap();
        }
        let outcomes = rangecache.outcomes_since(&before, 10).await;
        assert_eq!(outcomes.memory_answers(), 0, "auth is on: {outcomes:?}");
        let create = WatchCreateRequest {
            key: "secret".into(),
            ..WatchCreateRequest::default()
        };
        let _watch = client.watch(create).await;
        assert_eq!(rangecache.metrics().await.watches_created("memory"), 0.0);
        // etcd's gateway has no user without a token.
        let refused = json().await;
        assert_eq!(refused.status, 400, "{}", refused.body);
        logged(&rangecache, &["WARN", "root", "has a CN", "--cert"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_that_every_user_may_read_are_warned_of() {
    const WARNING: &str = "every user of this host may read or write this file";
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let etcd = SecureEtcd::start("http", &[], &Trust::new(&ca)).await;
    let password = ca.path("password");
    replace(&password, "secret");
    for mode in [0o640, 0o604] {
        for file in [&server.key, &password] {
            std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let rangecache = with_all(Rangecache::at(etcd.url()), &server_flags(&server))
            .with("--user", "root")
            .with("--password-file", text(&password))
            .listening_on("https://127.0.0.1:0")
            .start()
            .await;
        if mode == 0o640 {
            assert!(!rangecache.log().contains(WARNING), "{}", rangecache.log());
        } else {
            logged(&rangecache, &["WARN", WARNING, "--key-file", "0604"]).await;
            logged(&rangecache, &["WARN", WARNING, "--password-file", "0604"]).await;
        }
    }
}

/// A list of a CA that is not trusted counts for nothing and is reported; one that pretends to be of a trusted CA
/// lets no client in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revocation_list_of_another_issuer_revokes_nothing() {
    let ca = Ca::new();
    let flags = server_flags(&ca.issue("server", &Leaf::default()));
    let client = Leaf {
        serial: 2,
        ..Leaf::default()
    };
    let trust = Trust::new(&ca).with(&ca.issue("client", &client));
    let etcd = SecureEtcd::start("http", &[], &trust).await;
    for (issuer, comes_in) in [(Ca::named("another CA"), true), (Ca::new(), false)] {
        let rangecache = with_all(Rangecache::at(etcd.url()), &flags)
            .with("--trusted-ca-file", text(&ca.cert()))
            .with("--client-crl-file", text(&issuer.revoke(&[2, 3])))
            .listening_on("https://127.0.0.1:0")
            .start()
            .await;
        let served = match try_connect(rangecache.url(), &trust).await {
            Ok(client) => client.status().await.is_ok(),
            Err(_) => false,
        };
        assert_eq!(served, comes_in, "{}", rangecache.log());
        let is_reported = rangecache
            .log()
            .contains("the issuer of --client-crl-file is not in");
        assert_eq!(is_reported, comes_in);
    }
}
