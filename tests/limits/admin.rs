//! Clients of the admin port that give up their requests, or read no response.

use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::metrics::Metrics;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::connections::{address, etcd_and_rangecache};

/// Requests that one connection may have in flight.
const STREAMS: usize = 4;
/// Bound on the responses that were not read, in bytes.
const MAX_UNREAD_BYTES: f64 = 8_388_608.0;
const UNREAD_BYTES: &str = "rangecache_admin_unread_bytes";

/// A connection to the admin port that takes `window` bytes of each response. It is closed when the set is dropped.
async fn connect(rangecache: &Rangecache, window: u32, connections: &mut JoinSet<()>) -> SendRequest<Bytes> {
    let tcp = TcpStream::connect(address(rangecache.metrics_url()))
        .await
        .unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(window);
    let (sender, connection) = builder.handshake::<_, Bytes>(tcp).await.unwrap();
    connections.spawn(async move { drop(connection.await) });
    sender
}

fn get(path: &str) -> http::Request<()> {
    http::Request::get(format!("http://127.0.0.1{path}"))
        .body(())
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_while_other_requests_of_the_admin_port_wait() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).with_fault_injection().start().await;
    let client = rangecache.client().await;
    let url = format!("{}/nope", rangecache.metrics_url());
    let held = || rangecache.log().matches("held by a planted fault").count();
    let ahead = async || {
        let held_before = held();
        client.inject_fault("admin-turn").await;
        let waiting = tokio::spawn({
            let url = url.clone();
            async move { testkit::http::get(&url).await }
        });
        until(SOON, "the turn is held", async || {
            (held() > held_before).then_some(())
        })
        .await;
        for probe in ["/livez", "/readyz"] {
            assert_eq!(rangecache.admin(probe).await.status, 200, "{probe}");
        }
        let is_waiting = !waiting.is_finished();
        // It is refused once it has waited for as long as a request may.
        let refused = waiting.await.unwrap().expect("a response");
        assert_eq!(refused.status, 503, "{}", refused.body);
        assert_eq!(refused.headers["retry-after"], "1");
        is_waiting.then_some(())
    };
    until(
        SOON,
        "probes are answered before a request that waits for its turn",
        ahead,
    )
    .await;
    // The refused request has used up nothing.
    assert_eq!(rangecache.admin("/metrics").await.status, 200);
}

/// Before a request is answered, its connection is closed, again and again. Each used to take a millisecond of the later
/// ones: half a minute in all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_requests_of_the_admin_port_delay_no_later_one() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    let mut abandoning = JoinSet::new();
    for _ in 0..8 {
        let url = rangecache.metrics_url().to_owned();
        abandoning.spawn(async move {
            for _ in 0..400 {
                let tcp = TcpStream::connect(address(&url)).await.unwrap();
                let Ok((mut sender, connection)) = h2::client::handshake(tcp).await else {
                    continue;
                };
                let sent: Vec<_> = (0..16).map(|_| sender.send_request(get("/nope"), true)).collect();
                // The requests are written, and some may be answered.
                let _ = timeout(Duration::from_millis(20), connection).await;
                drop(sent);
            }
        });
    }
    abandoning.join_all().await;
    let answered = async {
        for path in ["/livez", "/nope", "/metrics"] {
            rangecache.admin(path).await;
        }
    };
    timeout(SOON, answered).await.expect("the admin port answers");
}

/// All responses together would be more than twice what is permitted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_pages_of_the_admin_port_are_bounded_and_counted() {
    const CONNECTIONS: usize = 60;
    const REPLACED: &str =
        "rangecache_client_connections_closed_total{listener=\"metrics\",reason=\"replaced\"}";
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    let mut clients = Vec::new();
    for client in 0..600_u16 {
        let [network, host] = (0x0201 + client / 200 * 256 + client % 200).to_be_bytes();
        let client = Client::connect_from([127, 0, network, host].into(), rangecache.url()).await;
        let client = client.unwrap().with_metadata("user-agent", &"a".repeat(400));
        client.get("k").await.expect("is served");
        clients.push(client);
    }
    let page_bytes = rangecache.admin("/clients").await.body.len() as f64;
    let all = CONNECTIONS * STREAMS;
    assert!(page_bytes * all as f64 > 2.0 * MAX_UNREAD_BYTES, "{page_bytes}");

    let mut connections = JoinSet::new();
    let mut unread = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut sender = connect(&rangecache, 0, &mut connections).await;
        for _ in 0..STREAMS {
            sender = sender.ready().await.unwrap();
            unread.push(sender.send_request(get("/clients"), true).unwrap().0);
        }
    }
    // The bound is reached, and other clients are served nevertheless.
    let mut most = 0.0_f64;
    until(SOON, "connections make room for pages", async || {
        let metrics = rangecache.metrics().await;
        most = most.max(metrics.0[UNREAD_BYTES]);
        assert_eq!(rangecache.admin("/readyz").await.status, 200);
        (metrics.0[REPLACED] >= 5.0).then_some(())
    })
    .await;
    assert!(most > MAX_UNREAD_BYTES / 2.0, "{most}");
    assert!(most < MAX_UNREAD_BYTES + 2.0 * page_bytes, "{most}");
    drop((unread, connections));
    until(SOON, "what was not read is given back", async || {
        // Until the dropped connections have given theirs back, the request's own one may be the oldest, which is closed.
        let page = testkit::http::get(&format!("{}/metrics", rangecache.metrics_url())).await;
        let metrics = Metrics::parse(&page.ok()?.body);
        // The response that shows the figure may be counted itself by then.
        (*metrics.0.get(UNREAD_BYTES)? < page_bytes).then_some(())
    })
    .await;
}
