//! Every combination of plaintext and TLS between clients, rangecache and etcd.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use bytes::Bytes;
use http::Method;
use tempfile::TempDir;
use testkit::grpc::Client;
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchResponse};
use testkit::process::tool;
use testkit::proxy::{Rangecache, rangecache_command};
use testkit::tls::{Ca, Leaf, SecureEtcd, Trust, call_http, connect, handshake, text, try_connect};
use testkit::wait::SOON;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{logged, server_flags, strs, with_all};

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
        assert!(answer.headers.contains_key("date"), "{url}: {answer:?}");
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
