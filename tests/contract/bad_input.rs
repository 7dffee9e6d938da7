//! Malformed input: rangecache responds like etcd, or lets etcd respond, and keeps serving.

use std::time::Duration;

use bytes::{BufMut as _, Bytes};
use http::Method;
use prost::Message;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Status, frame};
use testkit::kv::{PUT, RANGE, RANGE_STREAM, TXN, WATCH};
use testkit::pb::{PutRequest, RangeRequest};
use testkit::proxy::Rangecache;
use testkit::wait::SOON;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A request that is sent unchanged.
struct Case {
    what: &'static str,
    path: &'static str,
    method: Method,
    headers: Vec<(&'static str, &'static str)>,
    body: Bytes,
}

impl Case {
    /// A well-formed Range call with `body` as its HTTP/2 body.
    fn new(what: &'static str, body: impl Into<Bytes>) -> Self {
        Self {
            what,
            path: RANGE,
            method: Method::POST,
            headers: Vec::new(),
            body: body.into(),
        }
    }

    /// Case of a single message with a correct length prefix.
    fn message(what: &'static str, message: &[u8]) -> Self {
        Self::new(what, frame(message))
    }

    /// A well-formed request for the key `a`.
    fn proper(what: &'static str) -> Self {
        Self::message(what, b"\x0a\x01a")
    }

    fn at(self, path: &'static str) -> Self {
        Self { path, ..self }
    }

    fn by(self, method: Method) -> Self {
        Self { method, ..self }
    }

    /// Sets a header, replacing the usual one of that name.
    fn with(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((name, value));
        self
    }

    async fn send(&self, client: &Client) -> Result<testkit::grpc::Reply, String> {
        let mut request = client.request(self.path).method(self.method.clone());
        let headers = request.headers_mut().expect("a proper request so far");
        for (name, value) in &self.headers {
            headers.insert(*name, value.parse().expect("a header value"));
        }
        // etcd leaves some of these calls without a response; then rangecache must too.
        let reply = timeout(Duration::from_secs(3), client.send(request, self.body.clone())).await;
        reply.unwrap_or_else(|_| Err("no answer".to_owned()))
    }
}

/// The message with `flag` as the first byte of its prefix, and with this length.
fn prefixed(flag: u8, length: u32, message: &[u8]) -> Bytes {
    [&[flag][..], &length.to_be_bytes(), message].concat().into()
}

/// `data` in gzip format without compression: one stored block.
fn gzip(data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(data.len()).expect("one stored block");
    let mut crc = !0_u32;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0xedb8_8320
            } else {
                crc >> 1
            };
        }
    }
    let header = b"\x1f\x8b\x08\0\0\0\0\0\0\xff\x01";
    let lengths = [length.to_le_bytes(), (!length).to_le_bytes()].concat();
    let trailer = [(!crc).to_le_bytes(), u32::from(length).to_le_bytes()].concat();
    [&header[..], &lengths, data, &trailer].concat()
}

fn zipped(message: &[u8]) -> Bytes {
    let zipped = gzip(message);
    prefixed(1, u32::try_from(zipped.len()).expect("small"), &zipped)
}

/// Messages that are malformed, or that a lenient decoder reads differently from a strict one.
fn odd_messages() -> Vec<Case> {
    let key = b"\x0a\x01a";
    let odd = |what, more: &[u8]| Case::message(what, &[&key[..], more].concat());
    vec![
        Case::message("an empty message", b""),
        odd("a truncated tag", b"\x98"),
        odd(
            "a varint without an end",
            b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        ),
        odd("a tag without its value", b"\x18"),
        Case::message("a key longer than the message", b"\x0a\x7fabc"),
        Case::message(
            "a key with a length beyond any memory",
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7fabc",
        ),
        odd("field number 0", b"\x02\x01a"),
        odd("a wire type that does not exist", b"\x1e\x01"),
        odd("a limit with the wire type of bytes", b"\x1a\x01a"),
        odd("a limit with the wire type of fixed64", b"\x19\x01\0\0\0\0\0\0\0"),
        Case::message("a key with the wire type of a number", b"\x08\x05"),
        odd("an unknown number", b"\xf8\x3f\x05"),
        odd("unknown bytes", b"\xfa\x3f\x03xyz"),
        odd("an unknown fixed32", b"\xfd\x3f\x01\x02\x03\x04"),
        odd("an unknown group", b"\xfb\x3f\x08\x01\xfc\x3f"),
        odd("an unknown group without its end", b"\xfb\x3f\x08\x01"),
        odd("the end of a group without its start", b"\xfc\x3f"),
        odd("a repeated key", b"\x0a\x01b"),
        odd("a repeated key, empty the second time", b"\x0a\0"),
        odd("a repeated limit", b"\x12\x01\0\x18\x01\x18\x02"),
        odd("keys_only set and reset", b"\x12\x01\0\x40\x01\x40\0"),
        odd("an explicitly empty end", b"\x12\0"),
        odd(
            "explicit zeros",
            b"\x12\x01\0\x18\0\x20\0\x28\0\x30\0\x38\0\x40\0\x48\0\x50\0",
        ),
        odd("a limit in an overlong encoding", b"\x12\x01\0\x18\x81\x80\x80\0"),
        odd("a tag in an overlong encoding", b"\x12\x01\0\x98\x80\0\x01"),
        odd("keys_only that is 2", b"\x12\x01\0\x40\x02"),
        odd(
            "count_only that is 2 to the 32nd",
            b"\x12\x01\0\x48\x80\x80\x80\x80\x10",
        ),
        odd(
            "a sort order of 2 to the 32nd and 1",
            b"\x12\x01\0\x28\x81\x80\x80\x80\x10",
        ),
        odd("a sort order that does not exist", b"\x12\x01\0\x28\x07"),
        odd("fields in descending order", b"\x40\x01\x18\x01\x12\x01\0"),
    ]
}

fn odd_framing() -> Vec<Case> {
    let key = b"\x0a\x01a";
    let twice = [frame(key), frame(b"\x0a\x01b")].concat();
    vec![
        Case::new("half a length prefix", &b"\0\0\0"[..]),
        Case::new("a length prefix alone", prefixed(0, 3, b"")),
        Case::new("a truncated frame", prefixed(0, 100, key)),
        Case::new("a frame followed by more bytes", prefixed(0, 2, key)),
        Case::new("a huge length prefix", prefixed(0, u32::MAX, key)),
        Case::new("a length just over etcd's limit", prefixed(0, 3 << 20, key)),
        Case::new("two messages", twice),
        Case::new("a flag that does not exist", prefixed(2, 3, key)),
        Case::new("compressed without an encoding header", zipped(key)),
        Case::new("compressed by gzip", zipped(key)).with("grpc-encoding", "gzip"),
        Case::new("gzip in the header but not in the body", frame(key)).with("grpc-encoding", "gzip"),
        Case::new("gzip of nonsense", zipped(b"\x0a\x7f")).with("grpc-encoding", "gzip"),
        Case::new("not gzip", prefixed(1, 3, key)).with("grpc-encoding", "gzip"),
        Case::new("an unknown compression", zipped(key)).with("grpc-encoding", "snail"),
        Case::new("identity announced", frame(key)).with("grpc-encoding", "identity"),
        Case::new("a message over etcd's limit", frame(&vec![0x0a; 3 << 20])),
    ]
}

fn odd_calls() -> Vec<Case> {
    let put = PutRequest {
        value: vec![b'v'; 3 << 20],
        key: b"big".to_vec(),
        lease: 0,
    }
    .encode_to_vec();
    vec![
        Case::proper("accepts gzip").with("grpc-accept-encoding", "gzip"),
        Case::proper("a subtype known to etcd").with("content-type", "application/grpc+proto"),
        Case::proper("an unknown subtype").with("content-type", "application/grpc+json"),
        Case::proper("a content type with parameters").with("content-type", "application/grpc;charset=utf-8"),
        Case::proper("a content type in capitals").with("content-type", "Application/GRPC"),
        Case::proper("a content type that begins like gRPC's").with("content-type", "application/grpcx"),
        Case::proper("JSON").with("content-type", "application/json"),
        Case::proper("plain text").with("content-type", "text/plain"),
        Case::proper("gRPC-Web").with("content-type", "application/grpc-web+proto"),
        Case::proper("te without trailers").with("te", "gzip"),
        Case::proper("a malformed deadline").with("grpc-timeout", "soon"),
        Case::proper("a deadline of too many digits").with("grpc-timeout", "123456789S"),
        Case::proper("a deadline").with("grpc-timeout", "30S"),
        Case::proper("unknown metadata").with("x-nothing", "to see"),
        Case::proper("binary metadata").with("x-nothing-bin", "AAEC"),
        Case::proper("binary metadata that is not base64").with("x-nothing-bin", "%%%"),
        Case::proper("the leader required").with("hasleader", "true"),
        Case::proper("a token while auth is off").with("token", "unknown.1"),
        Case::proper("GET").by(Method::GET),
        Case::proper("PUT").by(Method::PUT),
        Case::proper("no such method").at("/etcdserverpb.KV/Rank"),
        Case::proper("no such service").at("/etcdserverpb.VK/Range"),
        Case::proper("another package").at("/mvccpb.KV/Range"),
        Case::proper("a path in lower case").at("/etcdserverpb.kv/range"),
        Case::proper("a path with a trailing slash").at("/etcdserverpb.KV/Range/"),
        Case::proper("a path with two leading slashes").at("//etcdserverpb.KV/Range"),
        Case::proper("a path with a query").at("/etcdserverpb.KV/Range?a=b"),
        Case::proper("a path other than a method").at("/nowhere"),
        Case::proper("the root").at("/"),
        Case::message("a truncated Put", b"\x0a\x05a").at(PUT),
        Case::message("a Put over etcd's limit", &put).at(PUT),
        Case::message("a Txn of nonsense", b"\x12\x03\x12\x01\x0a").at(TXN),
        Case::message("a Watch of nonsense", b"\x0a\x7f").at(WATCH),
        Case::new("a Watch with an empty body", "").at(WATCH),
    ]
}

/// Odd messages and framing over RangeStream, and requests that only RangeStream refuses.
fn odd_streams() -> Vec<Case> {
    let mut cases: Vec<_> = odd_messages().into_iter().chain(odd_framing()).collect();
    cases.extend([
        Case::message(
            "a RangeStream in descending order",
            b"\x0a\x01a\x12\x01\0\x28\x02",
        ),
        Case::message("a RangeStream by version", b"\x0a\x01a\x12\x01\0\x28\x01\x30\x01"),
        Case::message("a RangeStream with a filter", b"\x0a\x01a\x12\x01\0\x50\x02"),
        Case::proper("a malformed deadline").with("grpc-timeout", "soon"),
        Case::proper("binary metadata that is not base64").with("x-nothing-bin", "%%%"),
        Case::proper("a content type with parameters").with("content-type", "application/grpc;charset=utf-8"),
        Case::proper("a path with a query").at("/etcdserverpb.KV/RangeStream?a=b"),
    ]);
    let to_the_method = |case: Case| {
        if case.path == RANGE {
            case.at(RANGE_STREAM)
        } else {
            case
        }
    };
    cases.into_iter().map(to_the_method).collect()
}

async fn bad_input_gets_etcds_response(version: Version) {
    let etcd = Etcd::start(version).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let (mut direct, mut through) = (etcd.client().await, rangecache.client().await);
    direct.put("a", "1").await.expect("etcd puts");
    direct.put("b", "2").await.expect("etcd puts");

    let mut defects = Vec::new();
    let mut cases = odd_messages()
        .into_iter()
        .chain(odd_framing())
        .chain(odd_calls())
        .collect::<Vec<_>>();
    if version == Version::V3_7 {
        // Older versions do not have the method.
        cases.extend(odd_streams());
    }
    for case in &cases {
        // etcd closes the connection after some of these: use a new one for each.
        for (client, url) in [
            (&mut direct, etcd.url()),
            (&mut through, rangecache.url().to_owned()),
        ] {
            if !client.is_open() {
                *client = Client::connect(&url).await;
            }
        }
        let (expected, got) = tokio::join!(case.send(&direct), case.send(&through));
        if got != expected {
            defects.push(format!(
                "{} ({})\n etcd: {expected:?}\n rangecache: {got:?}",
                case.what, case.path
            ));
        }
    }
    println!("{} cases", cases.len());
    assert!(
        defects.is_empty(),
        "{} defects:\n{}",
        defects.len(),
        defects.join("\n\n")
    );

    let read = RangeRequest::prefix("a");
    let through = rangecache.client().await;
    let before = rangecache.outcomes().await;
    assert_eq!(
        through.range_raw(&read).await,
        direct.range_raw(&read).await,
        "it serves as before"
    );
    assert_eq!(
        rangecache.outcomes_since(&before, 1).await.memory_answers(),
        1,
        "and from memory"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_gets_etcds_response_3_7() {
    bad_input_gets_etcds_response(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_gets_etcds_response_3_6() {
    bad_input_gets_etcds_response(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_gets_etcds_response_3_5() {
    bad_input_gets_etcds_response(Version::V3_5).await;
}

/// Status of a call that ends by an empty frame of data.
async fn without_a_message(client: &Client, path: &str) -> Option<Status> {
    let mut stream = client.open(path);
    stream.close_send();
    let message = timeout(SOON, stream.next()).await;
    assert_eq!(message.expect("no call waits for ever"), None, "{path}");
    stream.end().cloned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_without_a_message_gets_etcds_response() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    for path in [
        RANGE,
        RANGE_STREAM,
        PUT,
        TXN,
        "/etcdserverpb.KV/Compact",
        "/etcdserverpb.Lease/LeaseGrant",
        "/etcdserverpb.Auth/AuthEnable",
        "/etcdserverpb.Auth/Authenticate",
        "/etcdserverpb.Cluster/MemberList",
        "/etcdserverpb.Maintenance/Snapshot",
        "/v3lockpb.Lock/Lock",
        "/grpc.health.v1.Health/Check",
    ] {
        let expected = without_a_message(&direct, path).await;
        assert!(expected.is_some(), "{path}");
        assert_eq!(without_a_message(&through, path).await, expected, "{path}");
        // etcd itself never responds to a call that ends with its head.
        let by_its_head = through.send(through.request(path), Bytes::new()).await;
        assert_eq!(
            Some(by_its_head.expect("a response").status()),
            expected,
            "{path}"
        );
    }
}

/// A frame of HTTP/2.
fn http2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.put_uint(payload.len() as u64, 3);
    frame.put_slice(&[kind, flags]);
    frame.put_u32(stream);
    frame.put_slice(payload);
    frame
}

/// The kind of the frame with which the server responds to a Range whose head has these fields, besides the usual ones.
async fn response_to_head(url: &str, fields: &[(&str, &str)]) -> u8 {
    let address = url.strip_prefix("http://").expect("a URL");
    let mut server = TcpStream::connect(address).await.expect("a connection");
    let usual = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", RANGE),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let mut head = Vec::new();
    for (name, value) in usual.iter().chain(fields) {
        head.push(0);
        for text in [name, value] {
            head.push(u8::try_from(text.len()).expect("short"));
            head.extend(text.as_bytes());
        }
    }
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    sent.extend(http2_frame(4, 0, 0, b""));
    sent.extend(http2_frame(1, 4, 1, &head));
    sent.extend(http2_frame(0, 1, 1, &frame(b"\x0a\x01a")));
    server.write_all(&sent).await.expect("is sent");
    let responding = async {
        loop {
            let mut prefix = [0; 9];
            server.read_exact(&mut prefix).await.expect("a frame");
            let [a, b, c, kind, ..] = prefix;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            server.read_exact(&mut payload).await.expect("a payload");
            // The head of a response, a reset, or the end of the connection.
            if [1, 3, 7].contains(&kind) {
                return kind;
            }
        }
    };
    timeout(SOON, responding).await.expect("a response")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_that_etcd_refuses_harm_no_other_connection() {
    const HEAD: u8 = 1;
    const RESET: u8 = 3;
    const GOAWAY: u8 = 7;
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let (of_etcd, of_rangecache) = (etcd.url(), rangecache.url());
    let capitals = [(":authority", "etcd:2379"), ("X-Capitals", "a")];
    assert_eq!(response_to_head(&of_etcd, &capitals).await, RESET);
    assert_eq!(response_to_head(of_rangecache, &capitals).await, GOAWAY);
    assert_eq!(response_to_head(of_rangecache, &[]).await, HEAD);
    let through = rangecache.client().await;
    through.put("a", "1").await.expect("it serves");
}
