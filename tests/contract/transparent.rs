//! Calls that rangecache does not answer itself are forwarded unchanged.

use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::fault_link::FaultLink;
use testkit::grpc::Client;
use testkit::kv::{PUT, WATCH, collect_watch};
use testkit::pb::{
    Empty, Event, PutResponse, RangeRequest, RequestOp, SnapshotResponse, WatchCancelRequest,
    WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse, prefix_end,
};
use testkit::process::{Process, tool};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use testkit::{http, pb};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Runs etcd's own Go client through all of its calls, and returns the transcript; `behind` is the etcd that answers.
async fn transcript(dir: &TempDir, name: &str, url: &str, more: &[&str], behind: &mut Etcd) -> String {
    let path = dir.path().join(name);
    let mut command = Command::new(tool("goclient"));
    command.args(["--endpoints", url, "--out"]).arg(&path).args(more);
    let mut client = Process::spawn(name, &mut command, &dir.path().join(format!("{name}.log")));
    let started = Instant::now();
    let status = loop {
        if let Some(status) = client.exited() {
            break status;
        }
        if started.elapsed() > Duration::from_secs(180) {
            let by_etcd = timeout(SOON, async { behind.client().await.get("open/a").await }).await;
            let steps = std::fs::read_to_string(&path).unwrap_or_default();
            let (client, etcd) = (client.goroutines().await, behind.goroutines().await);
            panic!("{name} {more:?} does not end. A read at etcd: {by_etcd:?}\n{steps}\n{client}\n{etcd}");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(status.success(), "{name}: {}", client.log());
    std::fs::read_to_string(path).expect("a transcript")
}

async fn go_client_transcript_equals_etcds(version: Version) {
    let dir = TempDir::new().expect("a directory");
    let mut differences = Vec::new();
    // Older versions have no RangeStream: its responses through rangecache are compared with the newest version's.
    let runs: &[(&[&str], Version)] = if version == Version::V3_7 {
        &[(&[], version), (&["--auth"], version)]
    } else {
        &[
            (&["--skip", "rangestream"], version),
            (&["--only", "rangestream"], Version::V3_7),
            (&["--auth"], version),
        ]
    };
    for (sections, like) in runs.iter().copied() {
        let (mut etcd, mut behind) = (Etcd::start(like).await, Etcd::start(version).await);
        let rangecache = Rangecache::before(&behind).start().await;
        let through = transcript(&dir, "through", rangecache.url(), sections, &mut behind).await;
        let direct = transcript(&dir, "direct", &etcd.url(), sections, &mut etcd).await;
        assert!(direct.lines().count() > 12, "too little to compare:\n{direct}");
        let lines = direct.lines().zip(through.lines());
        differences.extend(
            lines
                .filter(|(direct, through)| direct != through)
                .take(20)
                .map(|(direct, through)| format!("{sections:?}\n etcd: {direct}\n rangecache: {through}")),
        );
        if direct.lines().count() != through.lines().count() {
            differences.push(format!("{sections:?}: not the same number of lines"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn go_client_transcript_equals_etcds_3_7() {
    go_client_transcript_equals_etcds(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn go_client_transcript_equals_etcds_3_6() {
    go_client_transcript_equals_etcds(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn go_client_transcript_equals_etcds_3_5() {
    go_client_transcript_equals_etcds(Version::V3_5).await;
}

/// etcd and rangecache in front of it, with a client of each.
async fn both(version: Version) -> (Etcd, Rangecache, Client, Client) {
    let etcd = Etcd::start(version).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    (etcd, rangecache, direct, through)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_values_are_forwarded_in_both_directions() {
    let (_etcd, _rangecache, direct, through) = both(Version::V3_7).await;
    let value: Vec<u8> = (0..1_400 << 10).map(|n| (n * 31 % 251) as u8).collect();
    let revision = through.put("large", &value).await.expect("within etcd's limit");
    assert_eq!(direct.get("large").await, Ok(Some(value.clone())));
    let answer = through.range(&RangeRequest::one("large")).await.expect("answers");
    assert_eq!((answer.revision(), &answer.kvs[0].value), (revision, &value));
    let stored = direct.range_raw(&RangeRequest::one("large")).await;
    assert_eq!(through.range_raw(&RangeRequest::one("large")).await, stored);

    // Over the limit: the same refusal, and nothing is written.
    let refused = direct
        .put("large", vec![1; 1_700 << 10])
        .await
        .expect_err("past etcd's limit");
    assert_eq!(through.put("large", vec![1; 1_700 << 10]).await, Err(refused));
    assert_eq!(direct.range_raw(&RangeRequest::one("large")).await, stored);
}

/// etcd's response without its permission for all web pages to read it, which is not forwarded.
fn without_cors(mut response: http::Response) -> http::Response {
    let cors = ["origin", "methods", "headers"].map(|of| format!("access-control-allow-{of}"));
    cors.iter().for_each(|name| drop(response.headers.remove(name)));
    response
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_gateway_calls_are_forwarded() {
    for version in [Version::V3_5, Version::V3_7] {
        let (etcd, rangecache, _direct, _through) = both(version).await;
        for path in [
            "/health",
            "/health?serializable=true",
            "/version",
            "/nowhere",
            "/",
        ] {
            let expected = http::get(&format!("{}{path}", etcd.url()))
                .await
                .expect("etcd answers");
            let expected = without_cors(expected);
            let got = http::get(&format!("{}{path}", rangecache.url()))
                .await
                .expect("rangecache answers");
            assert_eq!(got, expected, "{path} of {version:?}");
        }
        let metrics = http::get(&format!("{}/metrics", rangecache.url()))
            .await
            .expect("rangecache answers");
        assert!(
            metrics.body.contains("etcd_server_has_leader 1"),
            "etcd's own metrics: {}",
            metrics.body
        );

        // The JSON gateway: "YQ==" is "a", "MQ==" is "1".
        let put = format!("{}/v3/kv/put", rangecache.url());
        let put = http::post(&put, r#"{"key":"YQ==","value":"MQ=="}"#)
            .await
            .expect("rangecache answers");
        assert_eq!(put.status, 200, "{put:?}");
        for body in [r#"{"key":"YQ=="}"#, r#"{"key":"not base64"}"#, "{", ""] {
            let expected = http::post(&format!("{}/v3/kv/range", etcd.url()), body)
                .await
                .expect("etcd answers");
            let expected = without_cors(expected);
            let got = http::post(&format!("{}/v3/kv/range", rangecache.url()), body)
                .await
                .expect("answers");
            // Memory answers the reads that it can: only the white space may differ.
            let (got, expected) = (got.compact(), expected.compact());
            assert_eq!(got, expected, "{body} of {version:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_requests_share_kept_connections_and_survive_etcds_restart() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    let link = FaultLink::to(&etcd.url(), 1).await;
    let rangecache = Rangecache::at(link.url()).start().await;
    let version = format!("{}/version", rangecache.url());
    let put = format!("{}/v3/kv/put", rangecache.url());
    let call = async || {
        let got = http::get(&version).await.expect("rangecache answers");
        assert_eq!(got.status, 200, "{got:?}");
        let put = http::post(&put, r#"{"key":"YQ==","value":"MQ=="}"#).await;
        assert_eq!(put.expect("rangecache answers").status, 200);
    };
    call().await;
    let before = link.connections();
    for _ in 0..30 {
        call().await;
    }
    let opened = link.connections() - before;
    assert!(opened < 10, "60 requests took {opened} connections");
    // A connection whose response is not read to its end is closed: it would never be ready again.
    let large = "AAAA".repeat(300_000);
    http::post(&put, &format!(r#"{{"key":"Yg==","value":"{large}"}}"#))
        .await
        .expect("rangecache answers");
    for _ in 0..3 {
        let authority = rangecache.url().strip_prefix("http://").unwrap().to_owned();
        let mut tcp = TcpStream::connect(&authority).await.unwrap();
        let body = r#"{"key":"Yg=="}"#;
        let head = format!(
            "POST /v3/kv/range HTTP/1.1\r\nhost: {authority}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        tcp.write_all(head.as_bytes()).await.unwrap();
        tcp.read_exact(&mut [0; 100]).await.unwrap();
    }
    call().await;
    etcd.restart().await;
    until(SOON, "rangecache has found etcd again", async || {
        let got = http::get(&version).await.ok()?;
        (got.status == 200).then_some(())
    })
    .await;
    call().await;
    assert!(
        rangecache.terminate().await.success(),
        "kept connections delay no stop"
    );
}

fn events(responses: &[WatchResponse]) -> Vec<Event> {
    responses
        .iter()
        .flat_map(|response| response.events.iter().cloned())
        .collect()
}

fn watch_of(prefix: &str, start_revision: i64) -> WatchCreateRequest {
    let key = prefix.as_bytes().to_vec();
    WatchCreateRequest {
        range_end: prefix_end(&key),
        key,
        start_revision,
        prev_kv: true,
        ..WatchCreateRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_deliver_every_event_once_and_in_order() {
    let (_etcd, _rangecache, direct, through) = both(Version::V3_7).await;
    let start = direct.put("w/first", "1").await.expect("etcd puts");
    let mut live = through.watch(watch_of("w/", start)).await;
    for turn in 0..100 {
        let batch = (0..50).map(|n| match (turn + n) % 5 {
            0 => RequestOp::delete(format!("w/{}", n + turn % 3)),
            _ => RequestOp::put(format!("w/{}", n + turn % 3), format!("{turn}")),
        });
        direct.transact(batch.collect()).await.expect("etcd writes");
    }
    let last = direct.put("w/last", "1").await.expect("etcd puts");
    let is_last = |responses: &[WatchResponse]| {
        let event = responses.last().and_then(|response| response.events.last());
        event
            .and_then(|event| event.kv.as_ref())
            .is_some_and(|kv| kv.mod_revision == last)
    };
    let live = events(&collect_watch(&mut live, SOON, is_last).await);
    // Watches started afterwards, through rangecache and directly, deliver the same events from history.
    let past = events(&collect_watch(&mut through.watch(watch_of("w/", start)).await, SOON, is_last).await);
    let expected =
        events(&collect_watch(&mut direct.watch(watch_of("w/", start)).await, SOON, is_last).await);
    assert!(expected.len() > 4_000, "{}", expected.len());
    assert!(live == expected, "the live watch differs");
    assert!(past == expected, "the watch of the past differs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_cancel_refusal_and_progress_match_etcd() {
    let etcd = Etcd::start(Version::V3_7).await;
    // From memory a watch may begin at a revision that another client has compacted a moment ago.
    let rangecache = Rangecache::before(&etcd)
        .with("--watch-cache", "off")
        .start()
        .await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    for n in 0..20 {
        direct.put("w/a", n.to_string()).await.expect("etcd puts");
    }
    direct.compact(15).await.expect("etcd compacts");
    for client in [&direct, &through] {
        let mut watch = client.watch(watch_of("w/", 0)).await;
        watch.send(&WatchRequest {
            progress_request: Some(WatchProgressRequest {}),
            ..WatchRequest::default()
        });
        let progress = watch.next_as::<WatchResponse>(SOON).await.expect("progress");
        assert!(
            progress.events.is_empty() && progress.watch_id == -1,
            "{progress:?}"
        );

        let twin = WatchRequest {
            create_request: Some(WatchCreateRequest {
                watch_id: 7,
                ..watch_of("w/", 0)
            }),
            ..Default::default()
        };
        for expected in [(7, true, false), (-1, true, true)] {
            watch.send(&twin);
            let created = watch.next_as::<WatchResponse>(SOON).await.expect("an answer");
            assert_eq!(
                (created.watch_id, created.created, created.canceled),
                expected,
                "{created:?}"
            );
        }
        watch.send(&WatchRequest {
            cancel_request: Some(WatchCancelRequest { watch_id: 7 }),
            ..WatchRequest::default()
        });
        let cancelled = watch.next_as::<WatchResponse>(SOON).await.expect("an answer");
        assert_eq!(
            (cancelled.watch_id, cancelled.canceled),
            (7, true),
            "{cancelled:?}"
        );

        let mut compacted = client.watch(watch_of("w/", 3)).await;
        let refused = compacted.next_as::<WatchResponse>(SOON).await.expect("an answer");
        assert_eq!(
            (refused.canceled, refused.compact_revision),
            (true, 15),
            "{refused:?}"
        );
    }
}

/// Closing the sending side keeps a client's watches; closing the connection cancels them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_close_and_cancellation_reach_etcd() {
    let etcd = Etcd::start(Version::V3_7).await;
    // Outside the mirrored prefix: these watches are served by etcd.
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/mirrored/")
        .start()
        .await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let watchers = async || etcd.metrics().await.sum("etcd_debugging_mvcc_watcher_total");
    let before = 1.0;
    // A first check of its connection is a watch, too.
    let has_before = async || (watchers().await == before).then_some(());
    until(SOON, "etcd has the mirror's watcher alone", has_before).await;
    let mut watches = Vec::new();
    for _ in 0..10 {
        watches.push(through.watch(watch_of("w/", 0)).await);
    }
    until(SOON, "etcd has ten watchers more", async || {
        (watchers().await == before + 10.0).then_some(())
    })
    .await;

    let mut half_closed = watches.pop().expect("ten of them");
    half_closed.close_send();
    direct.put("w/a", "1").await.expect("etcd puts");
    let event = half_closed
        .next_as::<WatchResponse>(SOON)
        .await
        .expect("an event");
    assert_eq!(event.events.len(), 1);
    drop((watches, half_closed));
    until(SOON, "etcd has no watcher of ours", has_before).await;

    // Half-closing ends a keepalive, but not an empty watch.
    let lease = pb::LeaseGrantRequest { ttl: 60, id: 5 };
    through
        .unary::<Empty>("/etcdserverpb.Lease/LeaseGrant", &lease)
        .await
        .expect("etcd grants");
    let mut keepalive = through.open("/etcdserverpb.Lease/LeaseKeepAlive");
    for _ in 0..3 {
        // In this request the id is the first field.
        keepalive.send(&pb::LeaseGrantRequest { ttl: 5, id: 0 });
        assert!(
            keepalive.next_as::<PutResponse>(SOON).await.is_some(),
            "{:?}",
            keepalive.end()
        );
    }
    keepalive.close_send();
    assert!(keepalive.next_as::<PutResponse>(SOON).await.is_none());
    assert_eq!(keepalive.end().map(|end| end.code), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_is_forwarded_unchanged() {
    let (mut etcd, _rangecache, direct, through) = both(Version::V3_7).await;
    for n in 0..40 {
        direct
            .put(format!("s/{n}"), vec![7; 100 << 10])
            .await
            .expect("etcd puts");
    }
    let mut stream = through.server_stream("/etcdserverpb.Maintenance/Snapshot", &Empty {});
    let mut got = Vec::new();
    while let Some(piece) = stream.next_as::<SnapshotResponse>(SOON).await {
        got.extend_from_slice(&piece.blob);
    }
    assert_eq!(stream.end().map(|end| end.code), Some(0), "{:?}", stream.end());
    let direct_path = etcd.save_snapshot().await;
    assert_eq!(
        got.len() as u64,
        direct_path.metadata().expect("a snapshot").len()
    );
    // The snapshot ends with its own hash, which the restore checks.
    std::fs::write(&direct_path, got).expect("a file");
    etcd.restore(&direct_path, "another", &[]);
    etcd.run();
    etcd.ready().await;
    assert_eq!(
        etcd.client()
            .await
            .range(&RangeRequest::prefix("s/"))
            .await
            .expect("etcd answers")
            .count,
        40
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_during_an_etcd_restart_wait_for_it() {
    let (mut etcd, _rangecache, _direct, through) = both(Version::V3_7).await;
    let mirrored = RangeRequest::prefix("a");
    through.put("a", "1").await.expect("etcd puts");
    etcd.stop();
    let calls = [(); 3].map(|()| through.clone());
    let [put, range, status] = calls;
    let put = tokio::spawn(async move { put.put("b", "2").await });
    let range = tokio::spawn(async move { range.range(&mirrored).await });
    let status = tokio::spawn(async move { status.status().await });
    etcd.run();
    assert!(put.await.expect("no panic").is_ok());
    assert_eq!(range.await.expect("no panic").expect("an answer").count, 1);
    assert_eq!(
        status.await.expect("no panic").expect("an answer").version,
        "3.7.3"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_end_with_unavailable_while_etcd_is_down() {
    let (mut etcd, _rangecache, _direct, through) = both(Version::V3_7).await;
    let mut watch = through.watch(watch_of("w/", 0)).await;
    etcd.stop();
    let started = Instant::now();
    assert!(watch.next_as::<WatchResponse>(SOON).await.is_none());
    assert_eq!(watch.end().map(|end| end.code), Some(14), "{:?}", watch.end());
    let (list, mut again) = (RangeRequest::prefix("w/"), through.open(WATCH));
    again.send(&WatchRequest {
        create_request: Some(watch_of("w/", 0)),
        ..WatchRequest::default()
    });
    let range = through.range(&list);
    let put = through.put("a", "1");
    let raw = through.raw(PUT, b"\x0a\x01a");
    let (range, put, raw, again) = tokio::join!(range, put, raw, again.next_as::<WatchResponse>(SOON));
    println!("refused after {:?}", started.elapsed());
    assert_eq!(range.map_err(|status| status.code), Err(14));
    assert_eq!(put.map_err(|status| status.code), Err(14));
    assert!(again.is_none(), "{again:?}");
    let raw = raw.expect("the connection to rangecache is open");
    assert_eq!((raw.http_status, raw.status().code), (200, 14), "{raw:?}");
}
