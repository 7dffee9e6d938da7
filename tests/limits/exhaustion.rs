//! Listeners that are exhausted, and a process without file descriptors: neither hides the other's port, nor `/livez`.

use std::collections::BTreeSet;
use std::process::Command;

use testkit::etcd::{Etcd, Version};
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::connections::{PREFACE, address, etcd_and_rangecache, h2_frame};

/// Requests of the admin port.
const METRICS: &[u8] = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
const LIVEZ: &[u8] = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";

/// Limits on open files of a process: soft and hard.
fn file_limits(rangecache: &Rangecache) -> (u64, u64) {
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", rangecache.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files"));
    let mut figures = line
        .unwrap()
        .split_whitespace()
        .filter_map(|word| word.parse().ok());
    (figures.next().unwrap(), figures.next().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exhausted_listener_hides_neither_health_nor_etcd() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).with_open_files(200, 400).start().await;
    assert_eq!(file_limits(&rangecache), (400, 400), "the soft limit is raised");
    let client = rangecache.client().await;
    client.put("k", "v").await.expect("is served");

    let mut crowd = Vec::new();
    for _ in 0..450 {
        let mut stream = TcpStream::connect(address(rangecache.url())).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        stream.write_all(&h2_frame(4, 0, 0, &[])).await.unwrap();
        crowd.push(stream);
    }
    let limit = rangecache.metrics().await.0["rangecache_limit{limit=\"max_connections\"}"];
    assert!(limit < 400.0, "lowered to what the descriptors allow: {limit}");
    until(SOON, "every place is taken", async || {
        (rangecache.metrics().await.sum("rangecache_client_connections") == limit).then_some(())
    })
    .await;
    assert_eq!(rangecache.admin("/livez").await.status, 200);
    client.put("k", "w").await.expect("etcd can be reached");
    let health = testkit::http::get(&format!("{}/health", rangecache.metrics_url())).await;
    assert_eq!(health.expect("a response").status, 404);
    drop(crowd);

    // The other way round: connections to the admin port.
    let mut crowd = Vec::new();
    for _ in 0..450 {
        crowd.push(
            TcpStream::connect(address(rangecache.metrics_url()))
                .await
                .unwrap(),
        );
    }
    let fresh = rangecache.client().await;
    let answer = fresh.range(&RangeRequest::one("k")).await.expect("is served");
    assert_eq!(answer.kvs[0].value, b"w");
    // The crowd sends nothing and is closed in time.
    assert_eq!(rangecache.admin("/livez").await.status, 200);
    assert!(
        !rangecache.log().contains("Too many open files"),
        "{}",
        rangecache.log()
    );
    drop(crowd);
}

/// Whether the admin port answers `/livez` on this connection.
async fn is_live(probe: &mut TcpStream) -> bool {
    let mut head = [0; 15];
    let asking = async {
        probe.write_all(LIVEZ).await.ok()?;
        probe.read_exact(&mut head).await.ok()?;
        // The rest of the response.
        probe.read(&mut [0; 4096]).await.ok()
    };
    let answered = timeout(SOON, asking).await.expect("a response or an end");
    answered.is_some() && head == *b"HTTP/1.1 200 OK"
}

async fn admin_connection(rangecache: &Rangecache) -> TcpStream {
    TcpStream::connect(address(rangecache.metrics_url()))
        .await
        .unwrap()
}

/// Leaves the process as many descriptors as it uses now, or gives it back all that its hard limit allows.
fn limit_descriptors(rangecache: &Rangecache, to_used: bool) {
    let used: BTreeSet<u64> = std::fs::read_dir(format!("/proc/{}/fd", rangecache.id()))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    let lowest_free = (0..).find(|number| !used.contains(number)).unwrap();
    let soft = if to_used {
        lowest_free
    } else {
        file_limits(rangecache).1
    };
    let limited = Command::new("prlimit")
        .arg(format!("--pid={}", rangecache.id()))
        .arg(format!("--nofile={soft}:"))
        .status()
        .expect("prlimit runs");
    assert!(limited.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_without_free_descriptors_keeps_its_connections_and_recovers() {
    const EXHAUSTED: &str = "accepting a connection failed";
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    let client = rangecache.client().await;
    client.put("k", "v").await.expect("is served");
    let mut probe = admin_connection(&rangecache).await;
    assert!(is_live(&mut probe).await);

    limit_descriptors(&rangecache, true);
    let mut waiting = Vec::new();
    until(SOON, "connections cannot be accepted", async || {
        let mut stream = TcpStream::connect(address(rangecache.url())).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        stream.write_all(&h2_frame(4, 0, 0, &[])).await.unwrap();
        waiting.push(stream);
        rangecache.log().contains(EXHAUSTED).then_some(())
    })
    .await;
    for n in 0..20 {
        let value = n.to_string();
        client.put("k", &value).await.expect("etcd can be reached");
        let read = client.get("k").await.expect("reads are served");
        assert_eq!(read.as_deref(), Some(value.as_bytes()));
        assert!(is_live(&mut probe).await, "/livez");
    }

    limit_descriptors(&rangecache, false);
    for mut stream in waiting {
        let served = timeout(SOON, stream.read_exact(&mut [0; 9])).await;
        served.expect("is accepted").expect("gets settings");
    }
    assert_eq!(rangecache.admin("/livez").await.status, 200);
    let lines = rangecache.log().matches(EXHAUSTED).count();
    assert!(lines <= 20, "{lines} lines in the log");
}

/// With so few descriptors the admin port's own bound is higher than what is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admin_connections_give_up_their_descriptors_to_new_ones() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).with_open_files(64, 64).start().await;
    let client = rangecache.client().await;
    client.put("k", "v").await.expect("is served");
    let mut crowd = Vec::new();
    for _ in 0..100 {
        let mut stream = admin_connection(&rangecache).await;
        // A head that never ends has longer than a probe waits.
        stream.write_all(b"GET /livez HTTP/1.1\r\n").await.unwrap();
        crowd.push(stream);
    }
    until(SOON, "there is no descriptor left", async || {
        rangecache
            .log()
            .contains("accepting a connection failed")
            .then_some(())
    })
    .await;
    assert!(is_live(&mut admin_connection(&rangecache).await).await, "/livez");
    client.put("k", "w").await.expect("etcd can be reached");
    let fresh = rangecache.client().await;
    let answer = fresh.range(&RangeRequest::one("k")).await;
    assert_eq!(answer.expect("is served").kvs[0].value, b"w");
    let replaced = "rangecache_client_connections_closed_total{listener=\"metrics\",reason=\"replaced\"}";
    assert!(rangecache.metrics().await.0[replaced] > 0.0);
}

/// Reads until the end of the connection.
async fn end_of(mut stream: TcpStream) -> Vec<u8> {
    let mut read = Vec::new();
    // A reset is an end, too.
    let _ = timeout(SOON * 6, stream.read_to_end(&mut read))
        .await
        .expect("the connection is closed");
    read
}

/// Each of these clients would keep its connection for ever. The bounds in time are a minute at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admin_port_bounds_connections_requests_and_time() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    // A request whose head never ends.
    let mut slow = admin_connection(&rangecache).await;
    slow.write_all(b"GET /livez HTTP/1.1\r\nx-slow: ").await.unwrap();
    // Responses that are never read, asked for again and again.
    let unread = admin_connection(&rangecache).await;
    let (unread_end, mut asking) = unread.into_split();
    let asking = tokio::spawn(async move { while asking.write_all(&METRICS.repeat(100)).await.is_ok() {} });
    // Requests without end, one at a time.
    let mut busy = admin_connection(&rangecache).await;
    let busy = tokio::spawn(async move {
        let mut served = 0;
        while is_live(&mut busy).await {
            served += 1;
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        served
    });
    // HTTP/2 with more requests at once than are permitted.
    let mut streams = admin_connection(&rangecache).await;
    streams.write_all(PREFACE).await.unwrap();
    streams.write_all(&h2_frame(4, 0, 0, &[])).await.unwrap();
    let mut settings = [0; 9];
    streams.read_exact(&mut settings).await.unwrap();
    let mut payload = vec![0; usize::from(settings[2])];
    streams.read_exact(&mut payload).await.unwrap();
    let max_streams = [0, 3, 0, 0, 0, 4];
    assert!(
        payload.chunks(6).any(|setting| setting == max_streams),
        "{payload:?}"
    );

    let mut large = admin_connection(&rangecache).await;
    let head = format!("GET /livez HTTP/1.1\r\nx-large: {}\r\n\r\n", "v".repeat(70_000));
    large.write_all(head.as_bytes()).await.ok();
    let answer = end_of(large).await;
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"),
        "{answer:?}"
    );

    end_of(slow).await;
    let served = timeout(SOON * 6, busy)
        .await
        .expect("the busy client's connection is closed");
    assert!(served.unwrap() > 1, "it is served before");
    timeout(SOON * 6, asking)
        .await
        .expect("the unread connection is closed")
        .unwrap();
    drop(unread_end);
    assert_eq!(rangecache.admin("/livez").await.status, 200);
}
