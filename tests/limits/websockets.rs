//! WebSockets: a connection that was upgraded counts like every other connection, and its call like every other call.

use std::net::IpAddr;

use serde_json::{Value, json};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use testkit::websocket::WebSocket;
use tokio::net::TcpStream;

use super::connections::{address, etcd_and_rangecache};

const WATCH: &str = "/v3/watch";
/// `{"create_request":{"key":"k"}}`, with the key in base64.
const CREATE: &str = r#"{"create_request":{"key":"aw=="}}"#;

fn local(client: u8) -> IpAddr {
    [127, 0, 0, client].into()
}

/// A WebSocket of the client with the address 127.0.0.`client`.
async fn open(rangecache: &Rangecache, client: u8) -> Result<WebSocket, String> {
    WebSocket::open(local(client), rangecache.url(), WATCH).await
}

/// The figures of the client with the address 127.0.0.`client`.
async fn figures(rangecache: &Rangecache, client: u8) -> Value {
    let body = rangecache.admin("/clients").await.body;
    let clients: Vec<Value> = serde_json::from_str(&body).expect("is JSON");
    let name = local(client).to_string();
    clients
        .into_iter()
        .find(|of| of["name"] == name.as_str())
        .unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websockets_of_one_address_are_bounded_like_its_connections() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[("--max-connections-per-address", "3")]).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(open(&rangecache, 2).await.expect("is upgraded"));
    }
    let fourth = open(&rangecache, 2).await.err();
    assert_eq!(fourth.as_deref(), Some(""), "a fourth one");
    assert!(open(&rangecache, 3).await.is_ok(), "another address");
    until(SOON, "the open connections are counted", async || {
        let metrics = rangecache.metrics().await;
        (metrics.sum("rangecache_client_connections") == 3.0).then_some(())
    })
    .await;
    held.pop();
    until(SOON, "its place is free again", async || {
        open(&rangecache, 2).await.ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_beyond_the_bound_waits_for_the_end_of_a_websocket() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[("--max-connections", "3")]).await;
    let mut held = Vec::new();
    for client in 2..5 {
        held.push(open(&rangecache, client).await.expect("is upgraded"));
    }
    // The kernel accepts it, and rangecache does not before there is a place.
    let to = address(rangecache.url());
    let fourth = TcpStream::connect(to).await.unwrap();
    let mut upgrading = Box::pin(WebSocket::upgrade(fourth, to, WATCH));
    // The port answers others only after it has had the time to accept this one.
    for _ in 0..3 {
        assert_eq!(rangecache.admin("/livez").await.status, 200);
        assert!(futures_util::poll!(&mut upgrading).is_pending());
    }
    assert_eq!(
        rangecache.metrics().await.sum("rangecache_client_connections"),
        3.0
    );
    held.pop();
    upgrading.await.expect("has the place that became free");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_is_a_call_of_its_client_until_it_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("access.log");
    let (_etcd, rangecache) = etcd_and_rangecache(&[("--access-log", log.to_str().unwrap())]).await;
    let mut watch = open(&rangecache, 2).await.expect("is upgraded");
    watch.send(CREATE).await.unwrap();
    let created = watch.next().await.expect("a response");
    assert!(created.contains(r#""created":true"#), "{created}");
    let client = rangecache.client().await;
    client.put("k", "v").await.expect("etcd can be reached");
    let event = watch.next().await.expect("an event");
    assert!(event.contains(r#""events""#), "{event}");

    let open_now = figures(&rangecache, 2).await;
    for name in ["connections", "calls_in_flight", "watches"] {
        assert_eq!(open_now[name], 1, "{name} of {open_now}");
    }
    let texts = (created.len() + event.len()) as u64;
    assert!(open_now["sent_bytes"].as_u64() >= Some(texts), "{open_now}");
    let received = open_now["received_bytes"].as_u64();
    assert!(received > Some(CREATE.len() as u64), "{open_now}");
    let metrics = rangecache.metrics().await;
    assert!(
        metrics.buffered("forwarded") > 0.0,
        "what is buffered for it counts"
    );

    drop(watch);
    until(SOON, "the call has ended", async || {
        let ended = figures(&rangecache, 2).await;
        let ended = ["connections", "calls_in_flight", "watches"].map(|name| ended[name] == json!(0));
        (ended == [true; 3]).then_some(())
    })
    .await;
    until(SOON, "the call is logged", async || {
        let text = std::fs::read_to_string(&log).ok()?;
        let lines = text
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines
            .filter(|line| line["http_status"] == 101 && line["bytes"].as_u64() >= Some(texts))
            .find(|line| line["client"].as_str() == Some("127.0.0.2"))
    })
    .await;
    until(SOON, "nothing is kept", async || {
        (rangecache.metrics().await.buffered("forwarded") == 0.0).then_some(())
    })
    .await;
}

/// A client may close its side and still read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_ends_with_etcd_and_at_the_stop_of_the_process() {
    let (mut etcd, rangecache) = etcd_and_rangecache(&[]).await;
    let mut watch = open(&rangecache, 2).await.expect("is upgraded");
    watch.send(CREATE).await.unwrap();
    watch.next().await.expect("a response");
    etcd.restart().await;
    assert_eq!(watch.next().await, None);
    let mut watch = until(SOON, "etcd is connected again", async || {
        open(&rangecache, 2).await.ok()
    })
    .await
    .0;
    let stopped = tokio::spawn(rangecache.terminate());
    assert_eq!(watch.next().await, None);
    assert!(stopped.await.unwrap().success());
}
