//! TLS on both sides, with real etcd.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use http::Method;
use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, UNAVAILABLE};
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchResponse};
use testkit::process::tool;
use testkit::proxy::{Builder, Rangecache, rangecache_command};
use testkit::tls::{
    Ca, Encoding, Leaf, Pair, SecureEtcd, Trust, call_http, connect, handshake, replace, text, try_connect,
};
use testkit::wait::{SOON, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// `--flag path` arguments for one side.
fn server_flags(pair: &Pair) -> Vec<String> {
    ["--cert-file", text(&pair.cert), "--key-file", text(&pair.key)]
        .map(str::to_owned)
        .into()
}

fn with_all(mut builder: Builder, flags: &[String]) -> Builder {
    for pair in flags.chunks(2) {
        builder = builder.with(&pair[0], &pair[1]);
    }
    builder
}

fn strs(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

/// Tests a put, a read from memory, a watch, the JSON gateway over HTTP/1, and a list of some megabytes.
async fn works(what: &str, rangecache: &Rangecache, trust: &Trust, direct: &Client) {
    let client = connect(rangecache.url(), trust).await;
    let mut watch = client
        .watch(WatchCreateRequest {
            key: what.as_bytes().to_vec(),
            ..WatchCreateRequest::default()
        })
        .await;
    client.put(what, "a value").await.unwrap();
    let seen = watch.next_as::<WatchResponse>(SOON).await.unwrap();
    assert_eq!(seen.events.len(), 1, "{what}");

    let before = rangecache.outcomes().await;
    assert_eq!(client.get(what).await, Ok(Some(b"a value".to_vec())), "{what}");
    let list = RangeRequest::prefix("large/");
    assert_eq!(
        client.range(&list).await.unwrap().kvs,
        direct.range(&list).await.unwrap().kvs,
        "{what}"
    );
    let outcomes = rangecache.outcomes_since(&before, 2).await;
    assert_eq!(outcomes.memory_answers(), 2, "{what}: {outcomes:?}");

    let health = call_http(rangecache.url(), trust, Method::GET, "/health", "").await;
    assert_eq!(health.map(|response| response.status), Ok(200), "{what}");
    let question = r#"{"key":"bGFyZ2UvMDE=","keys_only":true}"#;
    let answer = call_http(rangecache.url(), trust, Method::POST, "/v3/kv/range", question).await;
    let answer = answer.unwrap();
    assert!(
        answer.status == 200 && answer.body.contains("bGFyZ2UvMDE="),
        "{what}: {answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_combination_of_listener_and_upstream() {
    let ca = Ca::new();
    let (server, client) = (
        ca.issue("server", &Leaf::default()),
        ca.issue("client", &Leaf::default()),
    );
    let (tls, mutual) = (Trust::new(&ca), Trust::new(&ca).with(&client));
    let flags = server_flags(&server);
    let mut mutual_flags = flags.clone();
    mutual_flags.extend(["--trusted-ca-file".to_owned(), text(&ca.cert()).to_owned()]);
    let mut etcd_mutual = mutual_flags.clone();
    etcd_mutual.push("--client-cert-auth".to_owned());

    let trusting = vec!["--cacert".to_owned(), text(&ca.cert()).to_owned()];
    let mut showing = trusting.clone();
    showing.extend(["--cert", text(&client.cert), "--key", text(&client.key)].map(str::to_owned));
    let upstreams = [
        ("plain", SecureEtcd::start("http", &[], &tls).await, vec![]),
        (
            "TLS",
            SecureEtcd::start("https", &strs(&flags), &tls).await,
            trusting.clone(),
        ),
        (
            "mTLS",
            SecureEtcd::start("https", &strs(&etcd_mutual), &mutual).await,
            showing,
        ),
        ("unix", SecureEtcd::start("unix", &[], &tls).await, vec![]),
        (
            "unixs",
            SecureEtcd::start("unixs", &strs(&flags), &tls).await,
            trusting,
        ),
    ];
    let sockets = TempDir::with_prefix("rangecache-sockets-").unwrap();
    let socket = sockets.path().join("rangecache.sock");
    let (unix, unixs) = (
        format!("unix://{}", socket.display()),
        format!("unixs://{}", socket.display()),
    );
    let listeners: [(&str, &str, &[String], Trust); 6] = [
        ("plain", "http://127.0.0.1:0", &[], tls.clone()),
        ("TLS", "https://127.0.0.1:0", &flags, tls.clone()),
        ("mTLS", "https://127.0.0.1:0", &mutual_flags, mutual.clone()),
        (
            "auto-tls",
            "https://127.0.0.1:0",
            &[],
            Trust::new(&ca).accept_any(),
        ),
        ("unix", &unix, &[], tls.clone()),
        ("unixs", &unixs, &flags, tls.clone()),
    ];
    for (upstream, etcd, upstream_flags) in &upstreams {
        let direct = connect(etcd.url(), &mutual).await;
        for key in 0..30 {
            direct
                .put(format!("large/{key:02}"), vec![b'x'; 100_000])
                .await
                .unwrap();
        }
        for (listener, url, flags, trust) in &listeners {
            let mut builder = with_all(Rangecache::at(etcd.url()), upstream_flags).listening_on(url);
            builder = if *listener == "auto-tls" {
                builder.with_flag("--auto-tls")
            } else {
                with_all(builder, flags)
            };
            let rangecache = builder.start().await;
            works(
                &format!("{listener} before {upstream}"),
                &rangecache,
                trust,
                &direct,
            )
            .await;
            if *listener == "mTLS" {
                let refused = async || {
                    let client = try_connect(rangecache.url(), &tls).await?;
                    client
                        .status()
                        .await
                        .map_err(|status| format!("{status:?}").into())
                };
                let refused: Result<_, Box<dyn std::error::Error + Send + Sync>> = refused().await;
                assert!(refused.is_err(), "a client without a certificate was accepted");
            }
        }
    }
}

/// Sends bytes and returns the response until the server closes the connection.
async fn answer_to(url: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(url.split_once("://").unwrap().1)
        .await
        .unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // A reset and a close are both an end.
    let _ = timeout(SOON, stream.read_to_end(&mut answer))
        .await
        .expect("the server closes the connection");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_the_wrong_protocol_get_etcds_response() {
    let ca = Ca::new();
    let flags = server_flags(&ca.issue("server", &Leaf::default()));
    let trust = Trust::new(&ca);
    let secure = SecureEtcd::start("https", &strs(&flags), &trust).await;
    let plain = SecureEtcd::start("http", &[], &trust).await;
    let before_secure = with_all(Rangecache::at(secure.url()), &flags)
        .with("--cacert", text(&ca.cert()))
        .listening_on("https://127.0.0.1:0")
        .start()
        .await;
    // The gateway over HTTP/2 must work with every upstream.
    let before_plain = with_all(Rangecache::at(plain.url()), &flags)
        .listening_on("https://127.0.0.1:0")
        .start()
        .await;
    let plain_before_plain = Rangecache::at(plain.url()).start().await;
    for url in [secure.url(), before_secure.url(), before_plain.url()] {
        let none = handshake(url, &trust, &["nonsense"]).await;
        assert!(none.is_err(), "{url}: no protocol in common");
        for alpn in [&[][..], &["http/1.1"]] {
            let stream = handshake(url, &trust, alpn).await.unwrap();
            let health =
                testkit::http::over(stream, Method::GET, "localhost", "/health", String::new()).await;
            assert_eq!(health.map(|answer| answer.status), Ok(200), "{url} {alpn:?}");
        }
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            let client = try_connect(url, &trust.clone().only(version)).await.unwrap();
            client.status().await.unwrap();
        }
        let client = connect(url, &trust).await;
        let mut request = client.request("/v3/kv/range");
        let json = "application/json".parse().unwrap();
        request.headers_mut().unwrap().insert("content-type", json);
        let answer = client
            .send(request, Bytes::from_static(br#"{"key":"YQ=="}"#))
            .await
            .unwrap();
        assert_eq!(answer.http_status, 200, "{url}: {answer:?}");
        assert!(String::from_utf8_lossy(&answer.body).contains("revision"));
        for plaintext in [
            &b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"[..],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ] {
            assert_eq!(answer_to(url, plaintext).await, b"", "{url}: plaintext");
        }
    }
    for url in [plain.url(), plain_before_plain.url()] {
        let secure = url.replace("http://", "https://");
        assert!(
            handshake(&secure, &trust, &["h2"]).await.is_err(),
            "{url}: TLS to a plaintext port"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_versions_and_cipher_suites_are_enforced() {
    let ca = Ca::new();
    let flags = server_flags(&ca.issue("server", &Leaf::default()));
    let trust = Trust::new(&ca);
    let etcd = SecureEtcd::start("http", &[], &trust).await;
    let listening = || with_all(Rangecache::at(etcd.url()), &flags).listening_on("https://127.0.0.1:0");
    let new_only = listening().with("--tls-min-version", "TLS1.3").start().await;
    let (old, new) = (
        trust.clone().only(&rustls::version::TLS12),
        trust.clone().only(&rustls::version::TLS13),
    );
    assert!(handshake(new_only.url(), &old, &["h2"]).await.is_err());
    assert!(handshake(new_only.url(), &new, &["h2"]).await.is_ok());

    let suite = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256";
    let old_only = listening()
        .with("--tls-max-version", "TLS1.2")
        .with("--cipher-suites", suite)
        .start()
        .await;
    assert!(handshake(old_only.url(), &new, &["h2"]).await.is_err());
    let stream = handshake(old_only.url(), &trust, &["h2"]).await.unwrap();
    let agreed = stream.get_ref().1.negotiated_cipher_suite().unwrap().suite();
    assert_eq!(format!("{agreed:?}"), suite);

    // Towards etcd, too: this etcd supports none of the allowed cipher suites.
    let mut rsa_only = flags.clone();
    rsa_only.extend(
        [
            "--tls-max-version",
            "TLS1.2",
            "--cipher-suites",
            "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
        ]
        .map(str::to_owned),
    );
    let etcd = SecureEtcd::start("https", &strs(&rsa_only), &trust).await;
    let rangecache = Rangecache::at(etcd.url())
        .with("--cacert", text(&ca.cert()))
        .with("--cipher-suites", suite)
        .start_cold()
        .await;
    logged(&rangecache, &["--cipher-suites", etcd.url()]).await;
}

/// Waits until a line of the log contains all of `parts`.
async fn logged(rangecache: &Rangecache, parts: &[&str]) {
    until(SOON, &format!("a log line with {parts:?}"), async || {
        let said = |line: &str| parts.iter().all(|part| line.contains(part));
        rangecache.log().lines().any(said).then_some(())
    })
    .await;
}

/// Serial number of the certificate presented to a new connection.
async fn shown_serial(url: &str, trust: &Trust) -> u64 {
    let stream = handshake(url, trust, &["h2"]).await.unwrap();
    let shown = stream.get_ref().1.peer_certificates().unwrap()[0].clone();
    let (_, parsed) = x509_parser::parse_x509_certificate(&shown).unwrap();
    parsed.serial.to_string().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hangup_takes_over_a_replaced_certificate_at_once() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let trust = Trust::new(&ca);
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = with_all(Rangecache::before(&etcd), &server_flags(&server))
        .with("--tls-reload-interval", "1h")
        .listening_on("https://127.0.0.1:0")
        .start_cold()
        .await;
    let serial = 77;
    ca.issue(
        "server",
        &Leaf {
            serial,
            ..Leaf::default()
        },
    );
    rangecache.signal("HUP");
    until(SOON, "new connections get the new certificate", async || {
        (shown_serial(rangecache.url(), &trust).await == serial).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_rotated_under_load_without_a_failed_call() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let client = ca.issue("client", &Leaf::default());
    let trust = Trust::new(&ca).with(&ca.issue("caller", &Leaf::default()));
    let mut flags = server_flags(&server);
    flags.extend(["--trusted-ca-file".to_owned(), text(&ca.cert()).to_owned()]);
    let etcd = SecureEtcd::start("https", &strs(&flags), &trust).await;
    let rangecache = with_all(Rangecache::at(etcd.url()), &flags)
        .with("--cacert", text(&ca.cert()))
        .with("--cert", text(&client.cert))
        .with("--key", text(&client.key))
        .with("--tls-reload-interval", "50ms")
        .listening_on("https://127.0.0.1:0")
        .start()
        .await;
    let (stop, calls, url) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
        rangecache.url().to_owned(),
    );
    let mut load = Vec::new();
    for worker in 0..4 {
        let (stop, calls, url, trust) = (Arc::clone(&stop), Arc::clone(&calls), url.clone(), trust.clone());
        let steady = connect(&url, &trust).await;
        load.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let fresh = try_connect(&url, &trust).await.expect("a new connection");
                for client in [&steady, &fresh] {
                    client.put(format!("load/{worker}"), "v").await.expect("a put");
                    client.get(format!("load/{worker}")).await.expect("a read");
                }
                calls.fetch_add(4, Ordering::Relaxed);
            }
        }));
    }
    for serial in 100..105 {
        let leaf = Leaf {
            serial,
            ..Leaf::default()
        };
        // The key is replaced separately: for a moment certificate and key do not match.
        ca.issue("server", &leaf);
        ca.issue("client", &leaf);
        until(SOON, "new connections get the new certificate", async || {
            (shown_serial(&url, &trust).await == serial).then_some(())
        })
        .await;
    }
    let before = calls.load(Ordering::Relaxed);
    until(SOON, "the load continues", async || {
        (calls.load(Ordering::Relaxed) > before + 40).then_some(())
    })
    .await;

    // Broken files are not taken over, which is logged once.
    replace(&server.cert, "no certificate");
    logged(
        &rangecache,
        &["WARN", "--cert-file", "no certificate", "old ones stay"],
    )
    .await;
    assert_eq!(shown_serial(&url, &trust).await, 104);
    stop.store(true, Ordering::Relaxed);
    for worker in load {
        worker.await.expect("no call fails");
    }
    let metrics = rangecache.metrics().await;
    for (side, result, at_least) in [
        ("clients", "ok", 5.0),
        ("clients", "failed", 1.0),
        ("etcd", "ok", 1.0),
    ] {
        let name = format!("rangecache_tls_reloads_total{{side=\"{side}\",result=\"{result}\"}}");
        assert!(metrics.0[&name] >= at_least, "{name} {}", metrics.0[&name]);
    }
    for file in ["cert", "ca"] {
        for side in ["etcd", "clients"] {
            let name =
                format!("rangecache_tls_not_after_timestamp_seconds{{side=\"{side}\",file=\"{file}\"}}");
            assert!(metrics.0[&name] > 2_000_000_000.0, "{name}");
        }
    }
    println!(
        "{} calls while certificates were replaced",
        calls.load(Ordering::Relaxed)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_client_certificate_is_used_without_a_restart() {
    let (ca, other) = (Ca::new(), Ca::new());
    let mut flags = server_flags(&ca.issue("server", &Leaf::default()));
    flags.extend(["--trusted-ca-file".to_owned(), text(&ca.cert()).to_owned()]);
    let trust = Trust::new(&ca).with(&ca.issue("caller", &Leaf::default()));
    let etcd = SecureEtcd::start("https", &strs(&flags), &trust).await;
    let wrong = other.issue("client", &Leaf::default());
    let rangecache = Rangecache::at(etcd.url())
        .with("--cacert", text(&ca.cert()))
        .with("--cert", text(&wrong.cert))
        .with("--key", text(&wrong.key))
        .with("--tls-reload-interval", "50ms")
        .start_cold()
        .await;
    logged(&rangecache, &["WARN", "cannot connect", text(&wrong.cert)]).await;
    let right = ca.issue("client", &Leaf::default());
    std::fs::copy(&right.key, &wrong.key).unwrap();
    std::fs::copy(&right.cert, &wrong.cert).unwrap();
    rangecache.warm().await;
}

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
    let metrics = rangecache.metrics().await;
    assert!(metrics.0["rangecache_tls_handshakes_total{result=\"refused\"}"] >= 4.0);
    logged(&rangecache, &["WARN", "handshake failed"]).await;

    ca.revoke(&[1]);
    until(SOON, "the new revocation list is used", async || {
        (!comes_in(&good).await).then_some(())
    })
    .await;
    assert!(comes_in(&revoked).await, "its certificate is no longer revoked");
}

/// Runs rangecache with `flags`, expects an immediate exit, and returns its output.
fn refused(flags: &[&str]) -> String {
    let output = rangecache_command()
        .args(["--listen-metrics-urls", "http://127.0.0.1:0"])
        .args(flags)
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(64), "{flags:?}: {message}");
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
    let listener: [(&[&str], &[&str]); 9] = [
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
        (&["--cert-file", cert], &["--key-file", "give both"]),
    ];
    for (flags, says) in listener {
        let output = refused(&[&https[..], flags].concat());
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
    let output = refused(&[&upstream[..], &["--cacert", text(&missing)]].concat());
    assert!(
        output.contains("--cacert") && output.contains("cannot be read"),
        "{output}"
    );
    let output = refused(&[&upstream[..], &["--cert", cert, "--key", text(&other.key)]].concat());
    assert!(
        output.contains("--key") && output.contains("is not the key of"),
        "{output}"
    );
    let output = refused(&["--listen-client-urls", "http://0.0.0.0:0"]);
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
    // etcd takes a name in an old encoding for a user, too.
    for (version, encoding) in [
        (testkit::etcd::Version::V3_5, Encoding::Utf8),
        (testkit::etcd::Version::V3_6, Encoding::Utf8),
        (testkit::etcd::Version::V3_7, Encoding::Utf8),
        (testkit::etcd::Version::V3_7, Encoding::T61),
        (testkit::etcd::Version::V3_7, Encoding::Bmp),
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
        let rangecache = Rangecache::at(etcd.url())
            .with("--cacert", text(&ca.cert()))
            .with("--cert", text(&root.cert))
            .with("--key", text(&root.key))
            .start()
            .await;
        let client = rangecache.client().await;
        let before = rangecache.outcomes().await;
        client.get("secret").await.unwrap();
        let outcomes = rangecache.outcomes_since(&before, 1).await;
        assert_eq!(outcomes.memory_answers(), 1, "auth is off: {outcomes:?}");

        direct.enable_auth("password").await.unwrap();
        let before = rangecache.outcomes().await;
        for _ in 0..10 {
            // etcd takes the caller for root because of rangecache's certificate: the warning is about this.
            client.get("secret").await.unwrap();
        }
        let outcomes = rangecache.outcomes_since(&before, 10).await;
        assert_eq!(outcomes.memory_answers(), 0, "auth is on: {outcomes:?}");
        logged(&rangecache, &["WARN", "root", "has a CN", "--cert"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_handshakes_time_out_and_block_no_other() {
    let ca = Ca::new();
    let flags = server_flags(&ca.issue("server", &Leaf::default()));
    let trust = Trust::new(&ca);
    let etcd = SecureEtcd::start("http", &[], &trust).await;
    for (at_once, silent) in [("1024", 50), ("1", 6)] {
        let rangecache = with_all(Rangecache::at(etcd.url()), &flags)
            .with("--tls-handshake-timeout", "500ms")
            .with("--tls-max-handshakes", at_once)
            .listening_on("https://127.0.0.1:0")
            .start()
            .await;
        let address = rangecache.url().strip_prefix("https://").unwrap().to_owned();
        let mut mute = Vec::new();
        for _ in 0..silent {
            mute.push(TcpStream::connect(&address).await.unwrap());
        }
        connect(rangecache.url(), &trust).await;
        for mut stream in mute {
            let mut nothing = [0];
            let ended = timeout(SOON, stream.read(&mut nothing))
                .await
                .expect("rangecache closes the connection");
            assert!(matches!(ended, Ok(0) | Err(_)));
        }
        let (counted, _) = until(SOON, "all timeouts are counted", async || {
            let metrics = rangecache.metrics().await;
            let name = "rangecache_tls_handshakes_total{result=\"timed_out\"}";
            metrics.0.get(name).copied().filter(|n| *n >= f64::from(silent))
        })
        .await;
        println!("{counted} handshakes timed out");
        let metrics = rangecache.metrics().await;
        assert_eq!(metrics.sum("rangecache_tls_handshaking"), 0.0);
    }
}

/// One turn, and clients that would keep it for ever: nothing sent, the begin of a message, a message and nothing
/// after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_stop_in_their_handshake_take_no_turn() {
    let ca = Ca::new();
    let flags = server_flags(&ca.issue("server", &Leaf::default()));
    let trust = Trust::new(&ca);
    let etcd = SecureEtcd::start("http", &[], &trust).await;
    let rangecache = with_all(Rangecache::at(etcd.url()), &flags)
        .with("--tls-handshake-timeout", "10m")
        .with("--tls-max-handshakes", "1")
        .listening_on("https://127.0.0.1:0")
        .start()
        .await;
    let address = rangecache.url().strip_prefix("https://").unwrap();
    let hello = first_message(&trust).await;
    let mut stopped = Vec::new();
    for sent in [&[][..], &hello[..1], &hello[..hello.len() - 1], &hello] {
        for _ in 0..3 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(sent).await.unwrap();
            stopped.push(stream);
        }
    }
    until(SOON, "all of them are in their handshakes", async || {
        let metrics = rangecache.metrics().await;
        (metrics.sum("rangecache_tls_handshaking") == 12.0).then_some(())
    })
    .await;
    let client = connect(rangecache.url(), &trust).await;
    client.put("k", "v").await.expect("is served");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_connect_at_once_are_all_served() {
    const CLIENTS: usize = 500;
    let ca = Ca::new();
    let flags = server_flags(&ca.issue("server", &Leaf::default()));
    let trust = Trust::new(&ca).with(&ca.issue("client", &Leaf::default()));
    let etcd = SecureEtcd::start("http", &[], &trust).await;
    let rangecache = with_all(Rangecache::at(etcd.url()), &flags)
        .with("--trusted-ca-file", text(&ca.cert()))
        .with("--tls-handshake-timeout", "60s")
        .listening_on("https://127.0.0.1:0")
        .start()
        .await;
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let (url, trust) = (rangecache.url().to_owned(), trust.clone());
        clients.spawn(async move {
            let client = try_connect(&url, &trust)
                .await
                .map_err(|error| error.to_string())?;
            client.get("k").await.map_err(|status| status.message)
        });
    }
    while let Some(served) = clients.join_next().await {
        assert_eq!(served.expect("no panic"), Ok(None));
    }
    let metrics = rangecache.metrics().await;
    let handshakes = metrics.0["rangecache_tls_handshakes_total{result=\"ok\"}"];
    assert_eq!(handshakes, CLIENTS as f64);
}

/// The first message of a client's handshake.
async fn first_message(trust: &Trust) -> Vec<u8> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let trust = trust.clone();
    let calling = tokio::spawn(async move { handshake(&url, &trust, &["h2"]).await.map(drop).is_ok() });
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut message = vec![0; 5];
    stream.read_exact(&mut message).await.unwrap();
    message.resize(5 + usize::from(u16::from_be_bytes([message[3], message[4]])), 0);
    stream.read_exact(&mut message[5..]).await.unwrap();
    calling.abort();
    message
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_works_through_mutual_tls() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let client = ca.issue("client", &Leaf::default());
    let mut flags = server_flags(&server);
    flags.extend(["--trusted-ca-file".to_owned(), text(&ca.cert()).to_owned()]);
    let trust = Trust::new(&ca).with(&client);
    let etcd = SecureEtcd::start("https", &strs(&flags), &trust).await;
    let rangecache = with_all(Rangecache::at(etcd.url()), &flags)
        .with("--cacert", text(&ca.cert()))
        .with("--cert", text(&client.cert))
        .with("--key", text(&client.key))
        .listening_on("https://127.0.0.1:0")
        .start()
        .await;
    let etcdctl = |args: &[&str]| {
        let output = Command::new(tool("etcdctl"))
            .args(["--endpoints", rangecache.url(), "--cacert", text(&ca.cert())])
            .args(["--cert", text(&client.cert), "--key", text(&client.key)])
            .args(args)
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(etcdctl(&["put", "a", "b"]).trim(), "OK");
    assert_eq!(etcdctl(&["get", "a"]), "a\nb\n");
    assert!(
        etcdctl(&["endpoint", "health"]).contains("is healthy")
            || etcdctl(&["endpoint", "status"]).contains("3.7")
    );
    assert!(etcdctl(&["member", "list"]).contains("started"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unix_sockets_have_their_mode_and_replace_no_live_socket() {
    let ca = Ca::new();
    let trust = Trust::new(&ca);
    let etcd = SecureEtcd::start("http", &[], &trust).await;
    let dir = TempDir::with_prefix("rangecache-sockets-").unwrap();
    let path = dir.path().join("rangecache.sock");
    let url = format!("unix://{}", path.display());
    let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;

    let rangecache = Rangecache::at(etcd.url()).listening_on(&url).start().await;
    assert_eq!(mode(), 0o600);
    let mut command = rangecache_command();
    command.args(["--endpoints", etcd.url(), "--listen-client-urls", &url]);
    command.args(["--listen-metrics-urls", "http://127.0.0.1:0"]);
    let second = tokio::process::Command::from(command).kill_on_drop(true).output();
    let second = timeout(SOON, second).await.expect("it ends").unwrap();
    assert!(!second.status.success(), "a second one took the socket over");
    connect(&url, &trust).await;
    // After a SIGKILL the socket file remains.
    drop(rangecache);
    assert!(path.exists());
    let rangecache = Rangecache::at(etcd.url())
        .listening_on(&url)
        .with("--unix-socket-mode", "0660")
        .start()
        .await;
    assert_eq!(mode(), 0o660);
    connect(&url, &trust).await;
    drop(rangecache);

    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "not a socket").unwrap();
    let mut command = rangecache_command();
    command.args(["--endpoints", etcd.url(), "--listen-client-urls", &url]);
    command.args(["--listen-metrics-urls", "http://127.0.0.1:0"]);
    let third = tokio::process::Command::from(command).kill_on_drop(true).output();
    let third = timeout(SOON, third).await.expect("it ends").unwrap();
    assert!(!third.status.success());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "not a socket");
}
