//! Handshakes between a [`Connector`] and an [`Acceptor`] over in-memory sockets; the acceptor also takes the place
//! of etcd.

use std::{path::Path, sync::Arc, time::Duration};

use clap::Parser as _;
use rangecache_base::net::{self, Stream, Url};
use rangecache_base::telemetry::{Metrics, exposition::Format};
use rustls::HandshakeKind;
use testkit::tls::{Ca, Encoding, Leaf, Pair, replace};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio_util::either::Either;

use super::{Acceptor, Connector, FileError, Protocol, TlsConfig, crypto::versions, look_at_file};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The flags from which both sides are made.
#[derive(clap::Parser)]
struct Flags {
    #[arg(long, default_value = "http://127.0.0.1:1")]
    endpoints: Vec<Url>,
    #[arg(long, default_value = "http://127.0.0.1:1")]
    listen_client_urls: Vec<Url>,
    #[command(flatten)]
    tls: TlsConfig,
}

impl Flags {
    fn connector(&self, metrics: &Arc<Metrics>) -> Result<Arc<Connector>, FileError> {
        Connector::open(&self.tls, &self.endpoints, false, metrics)
    }

    fn acceptor(&self, metrics: &Arc<Metrics>) -> Result<Option<Arc<Acceptor>>, FileError> {
        let urls: Vec<&Url> = self.listen_client_urls.iter().collect();
        Acceptor::open(&self.tls, &urls, 1, metrics)
    }
}

fn config(flags: &[&str]) -> Flags {
    Flags::try_parse_from(std::iter::once(&"rangecache").chain(flags)).unwrap()
}

fn open_acceptor(flags: &[&str], metrics: &Arc<Metrics>) -> Result<Arc<Acceptor>, FileError> {
    let flags = [&["--listen-client-urls", "https://localhost:0"], flags].concat();
    Ok(config(&flags).acceptor(metrics)?.expect("a listener with TLS"))
}

pub(super) fn acceptor(flags: &[&str]) -> Arc<Acceptor> {
    open_acceptor(flags, &Arc::default()).unwrap()
}

pub(super) fn connector(flags: &[&str]) -> Arc<Connector> {
    let flags = [&["--endpoints", "https://localhost:1"], flags].concat();
    config(&flags).connector(&Arc::default()).unwrap()
}

/// The flags of a listener with this certificate, and of more.
fn serving<'a>(pair: &'a Pair, more: &[&'a str]) -> Vec<&'a str> {
    let own = ["--cert-file", text(&pair.cert), "--key-file", text(&pair.key)];
    [&own, more].concat()
}

/// The flags of a client that trusts `ca` and presents `pair`.
fn calling<'a>(ca: &'a Path, pair: Option<&'a Pair>) -> Vec<&'a str> {
    let mut flags = vec!["--cacert", text(ca)];
    if let Some(pair) = pair {
        flags.extend(["--cert", text(&pair.cert), "--key", text(&pair.key)]);
    }
    flags
}

/// The result of a handshake on either side.
async fn handshake(connector: &Connector, acceptor: &Acceptor) -> (Result<Stream, String>, Option<Stream>) {
    handshake_with("https://localhost:1", connector, acceptor).await
}

async fn handshake_with(
    url: &str,
    connector: &Connector,
    acceptor: &Acceptor,
) -> (Result<Stream, String>, Option<Stream>) {
    let url: Url = url.parse().unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    let (client, server) = tokio::join!(
        connector.handshake(&url, Protocol::Http2, net::from_unix(near)),
        acceptor.accept(net::from_unix(far))
    );
    let client = client.map(|(stream, _)| stream);
    (client.map_err(|error| error.to_string()), server)
}

/// The error that a client with these flags gets from `acceptor`.
async fn refusal(flags: &[&str], acceptor: &Acceptor) -> String {
    let (client, server) = handshake(&connector(flags), acceptor).await;
    assert!(server.is_none(), "the acceptor completed the handshake");
    client.expect_err("the client completed the handshake")
}

/// A certificate that no CA has issued.
fn self_signed(ca: &Ca) -> Pair {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let pair = Pair {
        cert: ca.path("own.crt"),
        key: ca.path("own.key"),
    };
    replace(&pair.cert, &made.cert.pem());
    replace(&pair.key, &made.signing_key.serialize_pem());
    pair
}

/// The names in the certificate that the acceptor presents.
fn presented(stream: &Stream) -> Vec<String> {
    let Either::Right(stream) = stream else {
        panic!("no TLS");
    };
    let certificate = &stream.get_ref().1.peer_certificates().unwrap()[0];
    super::facts::of_certificate(certificate).unwrap().names
}

fn sample(metrics: &Metrics, sample: &str) -> Option<f64> {
    let text = metrics.encode(Format::Text);
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '))?;
    line.parse().ok()
}

#[tokio::test]
async fn bytes_pass_in_both_directions_after_the_handshake() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let metrics = Arc::default();
    let acceptor = open_acceptor(&serving(&server, &[]), &metrics).unwrap();
    let (near, far) = handshake(&connector(&calling(&ca.cert(), None)), &acceptor).await;
    let (mut near, mut far) = (near.unwrap(), far.unwrap());
    near.write_all(b"ping").await.unwrap();
    far.write_all(b"pong").await.unwrap();
    let mut buffer = [0; 4];
    far.read_exact(&mut buffer).await.unwrap();
    assert_eq!(&buffer, b"ping");
    near.read_exact(&mut buffer).await.unwrap();
    assert_eq!(&buffer, b"pong");
    let Either::Right(near) = &near else {
        panic!("no TLS");
    };
    assert_eq!(near.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    assert_eq!(
        sample(&metrics, "rangecache_tls_handshakes_total{result=\"ok\"}"),
        Some(1.0)
    );
    assert_eq!(sample(&metrics, "rangecache_tls_handshaking"), Some(0.0));
}

#[tokio::test]
async fn server_certificates_that_cannot_be_verified_are_explained() {
    let (ca, other) = (Ca::new(), Ca::new());
    let expired = Leaf {
        expired: true,
        ..Leaf::default()
    };
    let elsewhere = Leaf {
        names: &["etcd.elsewhere"],
        ..Leaf::default()
    };
    for (issuer, leaf, says) in [
        (&other, Leaf::default(), "was not issued by --cacert"),
        (&ca, expired, "has expired"),
        (&ca, elsewhere, "not for localhost, only for"),
    ] {
        let acceptor = acceptor(&serving(&issuer.issue("server", &leaf), &[]));
        let error = refusal(&calling(&ca.cert(), None), &acceptor).await;
        assert!(error.contains(says), "{says}: {error}");
        let careless = connector(&["--insecure-skip-tls-verify"]);
        let (client, _server) = handshake(&careless, &acceptor).await;
        assert!(client.is_ok(), "{says}: {client:?}");
    }
}

#[tokio::test]
async fn generated_certificate_is_accepted_only_without_verification() {
    let ca = Ca::new();
    let acceptor = acceptor(&["--auto-tls"]);
    let (client, _server) = handshake(&connector(&["--insecure-skip-tls-verify"]), &acceptor).await;
    let names = presented(&client.unwrap());
    for name in ["localhost", "127.0.0.1", "::1"] {
        assert!(names.contains(&name.to_owned()), "{names:?}");
    }
    let error = refusal(&calling(&ca.cert(), None), &acceptor).await;
    assert!(error.contains("was not issued by --cacert"), "{error}");
}

#[tokio::test]
async fn client_certificates_are_verified_and_refusals_explained() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let (authority, revoked) = (ca.cert(), ca.revoke(&[2]));
    let metrics = Arc::default();
    let flags = [
        "--trusted-ca-file",
        text(&authority),
        "--client-crl-file",
        text(&revoked),
    ];
    let acceptor = open_acceptor(&serving(&server, &flags), &metrics).unwrap();
    let leaf = |serial, expired| Leaf {
        serial,
        expired,
        ..Leaf::default()
    };
    let good = ca.issue("good", &leaf(1, false));
    let (client, far) = handshake(&connector(&calling(&authority, Some(&good))), &acceptor).await;
    assert!(client.is_ok() && far.is_some(), "{client:?}");

    let cases = [
        (None, "requires a client certificate"),
        (Some(self_signed(&ca)), "was not issued by a CA in etcd's"),
        (
            Some(ca.issue("revoked", &leaf(2, false))),
            "as revoked: replace it",
        ),
        (Some(ca.issue("expired", &leaf(3, true))), "as expired: renew it"),
    ];
    for (pair, says) in &cases {
        let error = refusal(&calling(&authority, pair.as_ref()), &acceptor).await;
        assert!(error.contains(says), "{says}: {error}");
        if let Some(pair) = pair {
            assert!(error.contains(text(&pair.cert)), "{error}");
        }
    }
    let count = |result| {
        sample(
            &metrics,
            &format!("rangecache_tls_handshakes_total{{result=\"{result}\"}}"),
        )
    };
    assert_eq!((count("ok"), count("refused")), (Some(1.0), Some(4.0)));
}

#[tokio::test]
async fn clients_are_restricted_to_allowed_host_names() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let authority = ca.cert();
    let flags = [
        "--trusted-ca-file",
        text(&authority),
        "--client-cert-allowed-hostname",
        "client.test",
    ];
    let acceptor = acceptor(&serving(&server, &flags));
    let names = |names| Leaf {
        names,
        ..Leaf::default()
    };
    let allowed = ca.issue("allowed", &names(&["client.test"]));
    let (client, far) = handshake(&connector(&calling(&authority, Some(&allowed))), &acceptor).await;
    assert!(client.is_ok() && far.is_some(), "{client:?}");
    let other = ca.issue("other", &names(&["other.test"]));
    let error = refusal(&calling(&authority, Some(&other)), &acceptor).await;
    assert!(error.contains("does not accept --cert"), "{error}");
}

#[tokio::test]
async fn replaced_files_are_used_if_they_are_valid() {
    let ca = Ca::new();
    let names = |names| Leaf {
        names,
        ..Leaf::default()
    };
    let server = ca.issue("server", &names(&["localhost", "first"]));
    let metrics = Arc::default();
    let acceptor = open_acceptor(&serving(&server, &[]), &metrics).unwrap();
    let reloads = |result| {
        let labels = format!("{{side=\"clients\",result=\"{result}\"}}");
        sample(&metrics, &format!("rangecache_tls_reloads_total{labels}"))
    };
    let expiry = || {
        sample(
            &metrics,
            "rangecache_tls_not_after_timestamp_seconds{side=\"clients\",file=\"cert\"}",
        )
    };
    let authority = ca.cert();
    let client = connector(&calling(&authority, None));
    let presents = async |name: &str| {
        let (near, _far) = handshake(&client, &acceptor).await;
        presented(&near.unwrap()).contains(&name.to_owned())
    };
    assert!(presents("first").await);
    acceptor.current.reload();
    assert_eq!(reloads("ok"), Some(0.0), "nothing has changed");

    ca.issue("server", &names(&["localhost", "second"]));
    assert!(presents("first").await, "not read yet");
    acceptor.current.reload();
    assert_eq!(reloads("ok"), Some(1.0));
    assert!(presents("second").await && !presents("first").await);

    replace(&server.cert, "no certificate");
    acceptor.current.reload();
    acceptor.current.reload();
    assert_eq!(reloads("failed"), Some(1.0), "each broken state counts once");
    assert!(presents("second").await, "the last valid files stay in use");

    std::fs::remove_file(&server.key).unwrap();
    acceptor.current.reload();
    assert_eq!(reloads("failed"), Some(2.0));

    let before = expiry().unwrap();
    let expired = Leaf {
        expired: true,
        ..Leaf::default()
    };
    ca.issue("server", &expired);
    acceptor.current.reload();
    assert_eq!(reloads("ok"), Some(2.0));
    assert!(expiry().unwrap() < before, "the expiry is exported");
}

#[test]
fn key_of_another_certificate_is_refused_with_both_flags() {
    let ca = Ca::new();
    let (server, other) = (
        ca.issue("server", &Leaf::default()),
        ca.issue("other", &Leaf::default()),
    );
    let mixed = Pair {
        cert: server.cert,
        key: other.key,
    };
    let error = open_acceptor(&serving(&mixed, &[]), &Arc::default()).unwrap_err();
    assert!(matches!(error, FileError::Mismatch { .. }), "{error}");
    let error = error.to_string();
    for part in [
        "--key-file",
        text(&mixed.key),
        "is not the key of",
        "--cert-file",
        text(&mixed.cert),
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let authority = ca.cert();
    let flags = [
        &["--endpoints", "https://localhost:1"][..],
        &calling(&authority, Some(&mixed)),
    ]
    .concat();
    let error = config(&flags).connector(&Arc::default()).unwrap_err();
    assert!(
        error.to_string().contains(&format!("--key {}", text(&mixed.key))),
        "{error}"
    );
}

#[test]
fn files_without_what_they_should_hold_are_named_with_their_flag() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let encrypted = ca.path("encrypted.key");
    replace(&encrypted, "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n");
    let (missing, authority, empty) = (ca.path("missing"), ca.cert(), ca.path("empty"));
    replace(&empty, "");
    let pair = |cert: &Path, key: &Path| Pair {
        cert: cert.to_owned(),
        key: key.to_owned(),
    };
    for (pair, more, says) in [
        (
            pair(&missing, &server.key),
            vec![],
            "--cert-file {}: cannot be read",
        ),
        (
            pair(&empty, &server.key),
            vec![],
            "--cert-file {}: the file holds no certificate",
        ),
        (
            pair(&server.cert, &empty),
            vec![],
            "--key-file {}: the file holds no private key",
        ),
        (
            pair(&server.cert, &encrypted),
            vec![],
            "--key-file {}: the key is encrypted",
        ),
        (
            server.clone(),
            vec!["--trusted-ca-file", text(&empty)],
            "--trusted-ca-file {}: the file holds no certificate",
        ),
        (
            server.clone(),
            vec![
                "--trusted-ca-file",
                text(&authority),
                "--client-crl-file",
                text(&empty),
            ],
            "--client-crl-file {}: the file holds no revocation list",
        ),
    ] {
        let error = open_acceptor(&serving(&pair, &more), &Arc::default())
            .unwrap_err()
            .to_string();
        let (flag, problem) = says.split_once(" {}").unwrap();
        assert!(
            error.starts_with(flag) && error.contains(problem),
            "{says}: {error}"
        );
    }
}

#[test]
fn facts_are_those_of_the_first_certificate() {
    let ca = Ca::new();
    let leaf = Leaf {
        common_name: Some("root"),
        names: &["a.test", "10.0.0.1"],
        expired: true,
        ..Leaf::default()
    };
    let pair = ca.issue("server", &leaf);
    let facts = look_at_file("cert", &pair.cert).unwrap();
    assert_eq!(facts.common_name.as_deref(), Some("root"));
    assert_eq!(facts.names, ["a.test", "10.0.0.1"]);
    assert_eq!(facts.not_after_seconds, 1_577_836_800, "2020-01-01");
    let connector = connector(&calling(&ca.cert(), Some(&pair)));
    assert_eq!(connector.common_name().as_deref(), Some("root"));
    assert!(connector.names_a_user());
}

/// A handshake that is in progress while the certificate is replaced presents the old one, and the connection keeps it.
#[tokio::test]
async fn name_of_a_connection_is_that_of_the_certificate_which_it_presented() {
    let ca = Ca::new();
    let acceptor = acceptor(&serving(&ca.issue("server", &Leaf::default()), &[]));
    let named = Leaf {
        common_name: Some("root"),
        ..Leaf::default()
    };
    let client = connector(&calling(&ca.cert(), Some(&ca.issue("client", &named))));
    let url: Url = "https://localhost:1".parse().unwrap();
    let connect = async |replaced: &Leaf| {
        let (near, far) = UnixStream::pair().unwrap();
        let connecting = client.handshake(&url, Protocol::Http2, net::from_unix(near));
        tokio::pin!(connecting);
        assert!(futures_util::poll!(&mut connecting).is_pending());
        ca.issue("client", replaced);
        client.reload();
        let (connected, accepted) = tokio::join!(connecting, acceptor.accept(net::from_unix(far)));
        assert!(accepted.is_some());
        connected.expect("a connection").1
    };
    let first = connect(&Leaf::default()).await;
    assert!(first.is_some());
    assert!(
        client.common_name().is_none() && client.names_a_user(),
        "an open connection has the name"
    );
    let second = connect(&named).await;
    assert!(
        second.is_none() && client.names_a_user(),
        "the newest certificate has the name"
    );
    ca.issue("client", &Leaf::default());
    client.reload();
    assert!(client.names_a_user());
    drop(first);
    assert!(!client.names_a_user(), "no open connection has the name");
}

/// The error of a client whose server does not complete the handshake.
async fn error_of(server: impl AsyncFnOnce(UnixStream)) -> String {
    let ca = Ca::new();
    let connector = connector(&calling(&ca.cert(), None));
    let (near, far) = UnixStream::pair().unwrap();
    let url = "https://localhost:1".parse().unwrap();
    let (client, ()) = tokio::join!(
        connector.handshake(&url, Protocol::Http2, net::from_unix(near)),
        server(far)
    );
    client.expect_err("no handshake").to_string()
}

#[tokio::test]
async fn servers_without_tls_are_explained() {
    let error = error_of(async |mut server: UnixStream| {
        server
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .await
            .unwrap();
    })
    .await;
    assert!(error.contains("write http://"), "{error}");
    let error = error_of(async |server: UnixStream| drop(server)).await;
    assert!(error.contains("closed during the TLS handshake"), "{error}");
}

#[test]
fn connections_closed_before_the_first_response_are_explained() {
    let connector = connector(&["--insecure-skip-tls-verify"]);
    let explain = |url: &str, text: &str| connector.explain(&url.parse().unwrap(), text);
    assert!(explain("http://a:1", "reset").contains("write https://"));
    assert!(explain("https://a:1", "reset").contains("see etcd's log"));
    let required = rustls::Error::AlertReceived(rustls::AlertDescription::CertificateRequired);
    assert!(explain("https://a:1", &required.to_string()).contains("give --cert and --key"));
}

#[tokio::test]
async fn versions_without_overlap_are_explained_and_refused() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let acceptor = acceptor(&serving(&server, &["--tls-min-version", "TLS1.3"]));
    let authority = ca.cert();
    let old = [&calling(&authority, None)[..], &["--tls-max-version", "TLS1.2"]].concat();
    let error = refusal(&old, &acceptor).await;
    assert!(error.contains("--tls-min-version"), "{error}");
}

#[test]
fn versions_without_a_cipher_suite_are_disabled() {
    let only_1_3 = config(&["--cipher-suites", "TLS_AES_128_GCM_SHA256"]);
    let enabled: Vec<_> = versions(&only_1_3.tls)
        .iter()
        .map(|version| version.version)
        .collect();
    assert!(enabled.contains(&rustls::ProtocolVersion::TLSv1_3), "{enabled:?}");
    let old = config(&["--tls-max-version", "TLS1.2"]);
    let enabled: Vec<_> = versions(&old.tls).iter().map(|version| version.version).collect();
    assert_eq!(enabled, [rustls::ProtocolVersion::TLSv1_2]);
}

#[tokio::test]
async fn silent_client_is_given_up_after_the_timeout() {
    let metrics = Arc::default();
    let flags = ["--auto-tls", "--tls-handshake-timeout", "20ms"];
    let acceptor = open_acceptor(&flags, &metrics).unwrap();
    let (_near, far) = UnixStream::pair().unwrap();
    let accepted = tokio::time::timeout(Duration::from_secs(10), acceptor.accept(net::from_unix(far))).await;
    assert!(accepted.unwrap().is_none());
    assert_eq!(
        sample(&metrics, "rangecache_tls_handshakes_total{result=\"timed_out\"}"),
        Some(1.0)
    );
}

#[test]
fn listeners_without_tls_need_no_files() {
    let acceptor = config(&[]).acceptor(&Arc::default()).unwrap();
    assert!(acceptor.is_none());
    let connector = config(&[]).connector(&Arc::default()).unwrap();
    assert!(!connector.names_a_user() && connector.common_name().is_none());
}

/// Kind of the handshake of `client` with `acceptor` on the client's side, and whether the acceptor lets the client
/// in. The client reads the ticket for its next connection.
async fn connect_again(client: &Connector, acceptor: &Acceptor) -> (Option<HandshakeKind>, bool) {
    let (near, far) = handshake(client, acceptor).await;
    let Ok(Either::Right(mut near)) = near else {
        return (None, far.is_some());
    };
    let is_in = far.is_some();
    if let Some(mut far) = far {
        far.write_all(b"x").await.unwrap();
        let mut read = [0];
        near.read_exact(&mut read).await.unwrap();
    }
    (near.get_ref().1.handshake_kind(), is_in)
}

#[tokio::test]
async fn sessions_are_resumed_until_the_files_are_replaced() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let own = ca.issue("client", &Leaf::default());
    for version in ["TLS1.2", "TLS1.3"] {
        let authority = ca.cert();
        let flags = [
            "--trusted-ca-file",
            text(&authority),
            "--tls-max-version",
            version,
        ];
        let acceptor = acceptor(&serving(&server, &flags));
        let client = connector(&calling(&authority, Some(&own)));
        for kind in [
            HandshakeKind::Full,
            HandshakeKind::Resumed,
            HandshakeKind::Resumed,
        ] {
            assert_eq!(
                connect_again(&client, &acceptor).await,
                (Some(kind), true),
                "{version}"
            );
        }
        ca.issue("server", &Leaf::default());
        acceptor.current.reload();
        for kind in [HandshakeKind::Full, HandshakeKind::Resumed] {
            assert_eq!(
                connect_again(&client, &acceptor).await,
                (Some(kind), true),
                "{version}"
            );
        }
    }
}

#[tokio::test]
async fn certificate_of_a_resumed_client_is_verified_again() {
    let ca = Ca::new();
    let server = ca.issue("server", &Leaf::default());
    let short = Leaf {
        expires_in: Some(Duration::from_secs(3)),
        ..Leaf::default()
    };
    let authority = ca.cert();
    let acceptor = acceptor(&serving(&server, &["--trusted-ca-file", text(&authority)]));
    let client = connector(&calling(&authority, Some(&ca.issue("client", &short))));
    assert_eq!(
        connect_again(&client, &acceptor).await,
        (Some(HandshakeKind::Full), true)
    );
    let refused = async || {
        let (kind, is_in) = connect_again(&client, &acceptor).await;
        // With the same ticket, a refused client sees the end of its connection only.
        assert_eq!(kind, is_in.then_some(HandshakeKind::Resumed));
        (!is_in).then_some(())
    };
    testkit::wait::until(testkit::wait::SOON, "the expired certificate is refused", refused).await;
}

#[tokio::test]
async fn certificate_of_a_resumed_etcd_is_verified_again() {
    let ca = Ca::new();
    let short = Leaf {
        expires_in: Some(Duration::from_secs(3)),
        ..Leaf::default()
    };
    let acceptor = acceptor(&serving(&ca.issue("server", &short), &[]));
    let client = connector(&calling(&ca.cert(), None));
    assert_eq!(
        connect_again(&client, &acceptor).await,
        (Some(HandshakeKind::Full), true)
    );
    let refused = async || connect_again(&client, &acceptor).await.0.is_none().then_some(());
    testkit::wait::until(testkit::wait::SOON, "the expired certificate is refused", refused).await;
}

#[test]
fn common_name_is_found_in_every_encoding() {
    let ca = Ca::new();
    for encoding in [Encoding::Utf8, Encoding::T61, Encoding::Bmp] {
        let leaf = Leaf {
            common_name: Some("root"),
            encoding,
            ..Leaf::default()
        };
        let facts = look_at_file("cert", &ca.issue("root", &leaf).cert).unwrap();
        assert_eq!(facts.common_name.as_deref(), Some("root"), "{encoding:?}");
    }
}
