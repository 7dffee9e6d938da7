//! Handshakes that are slow, never end, or are many.

use testkit::proxy::Rangecache;
use testkit::tls::{Ca, Leaf, SecureEtcd, Trust, connect, handshake, text, try_connect};
use testkit::wait::{SOON, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{server_flags, with_all};

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

/// A single turn, and clients that would keep it for ever: nothing sent, the begin of a message, a message and nothing
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

/// The beginning of a first message of `length` bytes, in records, without its last byte.
fn unfinished_message(length: u32) -> Vec<u8> {
    const CLIENT_HELLO: u8 = 1;
    const RECORD_BYTES: usize = 16_000;
    let mut message = (u32::from(CLIENT_HELLO) << 24 | length).to_be_bytes().to_vec();
    // TLS 1.2, and zeros.
    message.extend([3, 3]);
    message.resize(4 + length as usize - 1, 0);
    let record = |piece: &[u8]| {
        let length = u16::try_from(piece.len()).unwrap().to_be_bytes();
        [&[22, 3, 1], &length[..], piece].concat()
    };
    message.chunks(RECORD_BYTES).flat_map(record).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_message_over_16_kib_ends_its_connection() {
    let ca = Ca::new();
    let flags = server_flags(&ca.issue("server", &Leaf::default()));
    let etcd = SecureEtcd::start("http", &[], &Trust::new(&ca)).await;
    let rangecache = with_all(Rangecache::at(etcd.url()), &flags)
        .with("--tls-handshake-timeout", "10m")
        .listening_on("https://127.0.0.1:0")
        .start()
        .await;
    let address = rangecache.url().strip_prefix("https://").unwrap();
    let mut short = TcpStream::connect(address).await.unwrap();
    short.write_all(&unfinished_message(12 << 10)).await.unwrap();
    let mut long = TcpStream::connect(address).await.unwrap();
    // It may be closed before all of it was written.
    let _ = long.write_all(&unfinished_message(40 << 10)).await;
    let ended = timeout(SOON, long.read(&mut [0])).await;
    assert!(matches!(ended.expect("rangecache closes it"), Ok(0) | Err(_)));
    let refused = "rangecache_tls_handshakes_total{result=\"refused\"}";
    let metrics = rangecache.metrics().await;
    assert_eq!(metrics.0.get(refused), Some(&1.0));
    assert_eq!(metrics.sum("rangecache_tls_handshaking"), 1.0, "the short one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_are_not_complete_are_bounded_and_give_way_when_they_are_late() {
    // More than there may be with any amount of memory.
    const HOSTILE: usize = 300;
    let ca = Ca::new();
    let flags = server_flags(&ca.issue("server", &Leaf::default()));
    let trust = Trust::new(&ca);
    let etcd = SecureEtcd::start("http", &[], &trust).await;
    let rangecache = with_all(Rangecache::at(etcd.url()), &flags)
        .with("--tls-handshake-timeout", "8s")
        .listening_on("https://127.0.0.1:0")
        .start()
        .await;
    let address = rangecache.url().strip_prefix("https://").unwrap();
    let begun = unfinished_message(12 << 10);
    let mut hostile = Vec::new();
    for _ in 0..HOSTILE {
        let mut stream = TcpStream::connect(address).await.unwrap();
        // Those that wait for a place are not read.
        stream.write_all(&begun).await.unwrap();
        hostile.push(stream);
    }
    let served = async {
        let client = connect(rangecache.url(), &trust).await;
        client.put("k", "v").await.expect("is served");
    };
    let given_up = "rangecache_client_connections_closed_total{listener=\"clients\",reason=\"handshake\"}";
    let gave_way = until(SOON, "late handshakes give way", async || {
        let metrics = rangecache.metrics().await;
        let shaking = metrics.sum("rangecache_tls_handshaking");
        assert!(shaking < HOSTILE as f64 - 10.0, "{shaking} handshakes at once");
        (metrics.0[given_up] > 0.0).then_some(())
    });
    tokio::join!(served, gave_way);
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
