//! Certificates that are replaced while rangecache runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use testkit::etcd::{Etcd, Version};
use testkit::proxy::Rangecache;
use testkit::tls::{Ca, Leaf, SecureEtcd, Trust, connect, handshake, replace, text, try_connect};
use testkit::wait::{SOON, until};

use super::{logged, server_flags, strs, with_all};

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
