//! HTTP/1 requests to etcd: connections that they need, and bodies that never end.

use futures_util::future::join_all;
use testkit::etcd::{Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::proxy::Rangecache;
use testkit::wait::SOON;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Duration, interval, timeout};

use super::connections::{address, etcd_and_rangecache};

/// Clients that send their requests together.
const CLIENTS: usize = 100;
const ROUNDS: usize = 5;

/// Sends `GET /health` on a kept connection, and reads the response.
async fn get_health(stream: &mut TcpStream) {
    let request = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut response = Vec::new();
    while !response.ends_with(b"}") {
        let read = timeout(SOON, stream.read_buf(&mut response)).await;
        assert!(read.expect("in time").unwrap() > 0, "the connection is closed");
    }
    let response = String::from_utf8_lossy(&response);
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bursts_of_http1_requests_share_few_connections_to_etcd() {
    let etcd = Etcd::start(Version::V3_7).await;
    let link = FaultLink::to(&etcd.url(), 0).await;
    let rangecache = Rangecache::at(link.url()).start().await;
    let to = address(rangecache.url());
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(TcpStream::connect(to).await.unwrap());
    }
    // The requests of a round are in flight together.
    link.set(Condition::Slow(Duration::from_millis(20)));
    let before = link.connections();
    for _ in 0..ROUNDS {
        join_all(clients.iter_mut().map(get_health)).await;
    }
    let opened = link.connections() - before;
    assert!(opened <= 2 * CLIENTS, "{opened} connections to etcd");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_body_that_never_ends_is_cut_off_whatever_it_contains() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[("--request-timeout", "1s")]).await;
    // Five zeros are a complete message in gRPC.
    for piece in ["\0\0\0\0\0", " ", "{\"key\":"] {
        let mut stream = TcpStream::connect(address(rangecache.url())).await.unwrap();
        let head = "POST /v3/kv/put HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
        let (mut reader, mut writer) = stream.split();
        let mut pieces = interval(Duration::from_millis(100));
        let sending = async {
            loop {
                pieces.tick().await;
                // It fails once the connection is closed, of which the reader learns, too.
                let _ = writer.write_all(chunk.as_bytes()).await;
            }
        };
        let mut response = [0; 12];
        let answered = async {
            tokio::select! {
                read = reader.read_exact(&mut response) => read.map(|_| ()),
                () = sending => Ok(()),
            }
        };
        timeout(SOON, answered)
            .await
            .expect("an end")
            .expect("a response");
        let status = String::from_utf8_lossy(&response);
        assert_eq!(status, "HTTP/1.1 502", "{piece:?}");
    }
}
