//! Requests that web pages cause are refused, on both ports.

use std::collections::BTreeMap;

use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::wait::SOON;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

const RANGE: &str = "/v3/kv/range";
const BODY: &str = r#"{"key":"aw=="}"#;

/// Status and headers of the response to one HTTP/1 request.
async fn exchange(
    url: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> (u16, BTreeMap<String, String>) {
    let address = url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = if method == "POST" { BODY } else { "" };
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    request += &format!("\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    timeout(SOON, stream.read_to_end(&mut response))
        .await
        .expect("a response")
        .unwrap();
    let response = String::from_utf8_lossy(&response);
    let head = response.split("\r\n\r\n").next().unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()));
    (status, headers.collect())
}

fn cors(headers: &BTreeMap<String, String>) -> Vec<&String> {
    let names = headers.keys();
    names.filter(|name| name.starts_with("access-control")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_web_pages_are_refused_on_both_ports() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let page = ("origin", "https://page.example");
    for (port, method, path) in [
        (rangecache.url(), "POST", RANGE),
        (rangecache.url(), "OPTIONS", RANGE),
        (rangecache.url(), "GET", "/v3/watch"),
        (rangecache.metrics_url(), "GET", "/status"),
        (rangecache.metrics_url(), "GET", "/metrics"),
    ] {
        for headers in [
            &[("host", "127.0.0.1"), page][..],
            &[("host", "127.0.0.1"), ("origin", "null")],
            // DNS rebinding: the page's own name, and no Origin for a GET.
            &[("host", "page.example:23790")],
            &[("host", "localhost.page.example")],
        ] {
            let (status, answered) = exchange(port, method, path, headers).await;
            assert_eq!(status, 403, "{port}{path} {headers:?}");
            assert_eq!(cors(&answered), Vec::<&String>::new());
        }
    }
    for host in ["127.0.0.1:1", "[::1]", "localhost", "10.0.0.1:23790"] {
        let (status, answered) = exchange(rangecache.url(), "POST", RANGE, &[("host", host)]).await;
        assert_eq!(status, 200, "{host}");
        // etcd itself permits every page.
        assert_eq!(cors(&answered), Vec::<&String>::new());
        let (status, _) = exchange(rangecache.metrics_url(), "GET", "/livez", &[("host", host)]).await;
        assert_eq!(status, 200, "{host}");
    }
    // gRPC clients dial any name: a browser cannot send such a request.
    let address = rangecache.url().strip_prefix("http://").unwrap();
    for name in ["http://localhost", "http://rangecache.default.svc:23790"] {
        let stream = TcpStream::connect(address).await.unwrap();
        let client = Client::over(stream, name).await.unwrap();
        client.range(&RangeRequest::one("k")).await.expect(name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listed_hosts_and_origins_are_served() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--host-whitelist", "etcd.internal,other.internal")
        .with("--cors", "https://page.example")
        .start()
        .await;
    let host = ("host", "etcd.internal:23790");
    let page = ("origin", "https://page.example");
    let (status, answered) = exchange(rangecache.url(), "POST", RANGE, &[host, page]).await;
    assert_eq!(status, 200);
    assert_eq!(answered["access-control-allow-origin"], page.1);
    // etcd answers a page's question whether it may send a request in the same way.
    let (direct, etcds) = exchange(&etcd.url(), "OPTIONS", RANGE, &[("host", "127.0.0.1"), page]).await;
    let (status, ours) = exchange(rangecache.url(), "OPTIONS", RANGE, &[host, page]).await;
    assert_eq!((status, cors(&ours)), (direct, cors(&etcds)));
    let methods = "access-control-allow-methods";
    assert_eq!(ours[methods], etcds[methods]);
    let headers = "access-control-allow-headers";
    assert_eq!(ours[headers], etcds[headers]);

    let other = ("origin", "https://other.example");
    let (status, _) = exchange(rangecache.url(), "POST", RANGE, &[host, other]).await;
    assert_eq!(status, 403);
    let (status, _) = exchange(rangecache.metrics_url(), "GET", "/livez", &[host]).await;
    assert_eq!(status, 200);
    let (status, _) = exchange(rangecache.metrics_url(), "GET", "/livez", &[host, page]).await;
    assert_eq!(status, 403, "no page may read the admin port");
    assert!(
        rangecache.log().contains(r#""listener":"metrics""#),
        "a refused scrape is logged"
    );
}
