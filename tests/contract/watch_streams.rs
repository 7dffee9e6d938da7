//! Watch streams served from memory, compared with etcd's, and those that memory leaves to etcd.

use std::time::Duration;

use prost::Message;
use testkit::etcd::{Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::{Client, Stream, UNAVAILABLE};
use testkit::kv::{WATCH, collect_watch};
use testkit::pb::{
    RangeRequest, RequestOp, WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest,
    WatchResponse, prefix_end,
};
use testkit::proxy::{Builder, Rangecache};
use testkit::wait::{SOON, until};

pub(super) fn before(etcd: &Etcd) -> Builder {
    Rangecache::before(etcd).with("--watch-cache", "auto")
}

pub(super) fn prefix(prefix: &str, start_revision: i64) -> WatchCreateRequest {
    WatchCreateRequest {
        key: prefix.into(),
        range_end: prefix_end(prefix.as_bytes()),
        start_revision,
        ..WatchCreateRequest::default()
    }
}

pub(super) fn create(create: WatchCreateRequest) -> WatchRequest {
    WatchRequest {
        create_request: Some(create),
        ..WatchRequest::default()
    }
}

pub(super) fn progress() -> WatchRequest {
    WatchRequest {
        progress_request: Some(WatchProgressRequest {}),
        ..WatchRequest::default()
    }
}

pub(super) fn open(client: &Client, requests: &[WatchRequest]) -> Stream {
    let stream = client.open(WATCH);
    requests.iter().for_each(|request| stream.send(request));
    stream
}

pub(super) async fn next(stream: &mut Stream) -> WatchResponse {
    let next = stream.next_as(SOON).await;
    next.unwrap_or_else(|| panic!("the stream ended: {:?}", stream.end()))
}

pub(super) fn header_revision(response: &WatchResponse) -> i64 {
    response.header.as_ref().expect("a header").revision
}

/// Create requests that had `outcome` with `reason`.
pub(super) async fn created(rangecache: &Rangecache, outcome: &str, reason: &str) -> f64 {
    let sample = format!("rangecache_watch_created_total{{outcome=\"{outcome}\",reason=\"{reason}\"}}");
    let metrics = rangecache.metrics().await;
    metrics.0.get(&sample).copied().unwrap_or_default()
}

async fn live_responses_equal_etcds(version: Version) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    direct.put("/a/old", "1").await.expect("put");
    let rangecache = before(&etcd).start().await;
    let through = rangecache.client().await;
    let start = direct.put("/a/old", "2").await.expect("put") + 1;
    let creates = [
        prefix("/a/", start),
        WatchCreateRequest {
            prev_kv: true,
            watch_id: i64::MAX,
            ..prefix("/a/", start)
        },
        WatchCreateRequest {
            filters: vec![0],
            prev_kv: true,
            ..prefix("/a/", start)
        },
        WatchCreateRequest {
            key: b"/a/one".to_vec(),
            filters: vec![1],
            ..WatchCreateRequest::default()
        },
    ];
    let requests = creates.map(create);
    let mut streams = [&direct, &through].map(|client| open(client, &requests));
    for stream in &mut streams {
        for _ in &requests {
            assert!(next(stream).await.created);
        }
    }
    let large = "x".repeat(5000);
    let transactions = [
        vec![RequestOp::put("/a/one", "1")],
        vec![RequestOp::put("/a/one", &large)],
        vec![RequestOp::put("/a/two", &large), RequestOp::put("/a/three", "3")],
        vec![RequestOp::delete("/a/one"), RequestOp::put("/a/two", "2")],
        vec![RequestOp::delete("/a/two"), RequestOp::delete("/a/three")],
        vec![RequestOp::put("/b/elsewhere", "1")],
        vec![RequestOp::put("/a/one", "")],
    ];
    // Responses per transaction: unfiltered, with previous values, deletes, the one key's puts.
    for (transaction, responses) in transactions.into_iter().zip([3, 3, 2, 3, 3, 0, 3]) {
        direct.transact(transaction.clone()).await.expect("etcd writes");
        let mut received = [Vec::new(), Vec::new()];
        for (stream, received) in streams.iter_mut().zip(&mut received) {
            for _ in 0..responses {
                let message = tokio::time::timeout(SOON, stream.next()).await;
                let message = message.expect("a response").expect("the stream is open");
                received.push(message);
            }
            // Among watchers the order is free.
            received.sort_by_key(|message| WatchResponse::decode(message.clone()).expect("decodes").watch_id);
        }
        let [direct, through] = received;
        assert_eq!(direct, through, "{transaction:?}");
    }
    assert!(created(&rangecache, "memory", "revision").await >= 3.0);
}

#[tokio::test]
async fn live_responses_of_watches_equal_etcds_byte_for_byte_3_7() {
    live_responses_equal_etcds(Version::V3_7).await;
}

#[tokio::test]
#[ignore = "make test-other-etcds"]
async fn live_responses_of_watches_equal_etcds_byte_for_byte_3_8() {
    live_responses_equal_etcds(Version::V3_8).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn live_responses_of_watches_equal_etcds_byte_for_byte_3_6() {
    live_responses_equal_etcds(Version::V3_6).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn live_responses_of_watches_equal_etcds_byte_for_byte_3_5() {
    live_responses_equal_etcds(Version::V3_5).await;
}

#[tokio::test]
async fn fragments_of_a_watch_equal_etcds_and_are_not_interrupted() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let rangecache = before(&etcd).start().await;
    let keys: Vec<String> = (0..12).map(|key| format!("/a/{key:02}")).collect();
    let value = "v".repeat(100_000);
    let puts = || keys.iter().map(|key| RequestOp::put(key, &value)).collect();
    let start = direct.transact(puts()).await.expect("etcd writes") + 1;
    let fragmented = WatchCreateRequest {
        prev_kv: true,
        fragment: true,
        ..prefix("/a/", start)
    };
    let requests = [
        create(fragmented.clone()),
        create(fragmented),
        create(prefix("/a/", start)),
    ];
    let clients = [direct.clone(), rangecache.client().await];
    let mut streams = clients.each_ref().map(|client| open(client, &requests));
    for stream in &mut streams {
        for _ in 0..3 {
            assert!(next(stream).await.created);
        }
    }
    direct.transact(puts()).await.expect("etcd writes");
    let mut shapes = Vec::new();
    for stream in &mut streams {
        let mut events = [0; 3];
        let mut responses: Vec<WatchResponse> = Vec::new();
        while events != [12; 3] {
            let response = next(stream).await;
            let id = usize::try_from(response.watch_id).expect("an id");
            events[id] += response.events.len();
            if let Some(last) = responses.last() {
                assert!(
                    !last.fragment || last.watch_id == response.watch_id,
                    "interrupted"
                );
            }
            responses.push(response);
        }
        responses.sort_by_key(|response| response.watch_id);
        let shape = |response: &WatchResponse| {
            let revision = header_revision(response);
            (
                response.watch_id,
                response.fragment,
                response.events.len(),
                revision,
            )
        };
        shapes.push(responses.iter().map(shape).collect::<Vec<_>>());
    }
    assert!(
        shapes[0].iter().any(|shape| shape.1),
        "etcd sends fragments: {shapes:?}"
    );
    assert_eq!(shapes[0], shapes[1]);
}

#[tokio::test]
async fn watch_from_now_begins_after_what_its_client_has_read_and_written() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    for round in 0..20 {
        // Written around rangecache, whose mirror may not have it yet.
        let written = direct.put("/a/key", format!("{round}")).await.expect("put");
        let mut stream = open(&through, &[create(prefix("/a/", 0))]);
        let response = next(&mut stream).await;
        assert!(response.created && header_revision(&response) >= written);
        let later = direct.put("/a/key", "later").await.expect("put");
        let event = next(&mut stream).await;
        assert_eq!(
            event.events[0].kv.as_ref().expect("a kv").mod_revision,
            later,
            "round {round}"
        );
    }
    assert!(created(&rangecache, "memory", "now").await >= 20.0);
}

#[tokio::test]
async fn watches_from_memory_cost_etcd_one_watch() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let through = rangecache.client().await;
    let watches = async || etcd.metrics().await.sum("etcd_debugging_mvcc_watcher_total");
    // A first check on another connection may have a watch of its own for a moment.
    let is_one = async || (watches().await == 1.0).then_some(());
    until(SOON, "etcd has the watch of the mirror alone", &is_one).await;
    let mut streams = Vec::new();
    for _ in 0..50 {
        let mut stream = open(&through, &[create(prefix("/a/", 0))]);
        assert!(next(&mut stream).await.created);
        streams.push(stream);
    }
    until(SOON, "etcd has none of the streams' watches", &is_one).await;
    let revision = etcd.client().await.put("/a/key", "value").await.expect("put");
    for stream in &mut streams {
        assert_eq!(header_revision(&next(stream).await), revision);
    }
    drop(streams);
    until(SOON, "no stream is left", async || {
        let metrics = rangecache.metrics().await;
        let open = metrics.sum("rangecache_watch_streams") + metrics.sum("rangecache_watch_watchers");
        (open == 0.0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn serializable_read_is_not_older_than_what_a_watch_has_shown() {
    let etcd = Etcd::start(Version::V3_7).await;
    let (direct, rangecache) = (
        etcd.client().await,
        before(&etcd)
            .with("--cache-prefix", "/a/")
            .with("--cache-prefix", "/b/")
            .start()
            .await,
    );
    let through = rangecache.client().await;
    let mut stream = open(&through, &[create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created);
    for round in 0..50 {
        let revision = direct.put("/a/key", format!("{round}")).await.expect("put");
        assert_eq!(header_revision(&next(&mut stream).await), revision);
        // The mirror of the other prefix has no event at that revision.
        let read = RangeRequest {
            serializable: true,
            ..RangeRequest::prefix("/b/")
        };
        let read = through.range(&read).await.expect("a response");
        assert!(
            read.revision() >= revision,
            "a read at {} after an event at {revision}",
            read.revision()
        );
    }
}

#[tokio::test]
async fn stream_of_keys_without_a_mirror_reaches_etcd_unchanged() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).with("--cache-prefix", "/a/").start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let mut stream = open(&through, &[create(prefix("/b/", 0)), create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created && next(&mut stream).await.created);
    direct.put("/b/key", "1").await.expect("put");
    direct.put("/a/key", "1").await.expect("put");
    let events = collect_watch(&mut stream, SOON, |responses| responses.len() == 2).await;
    assert_eq!((events[0].watch_id, events[1].watch_id), (0, 1));
    assert_eq!(created(&rangecache, "etcd", "not_mirrored").await, 1.0);
    let bypass = through.with_metadata("rangecache-bypass", "true");
    let mut stream = open(&bypass, &[create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created);
    assert_eq!(created(&rangecache, "memory", "now").await, 0.0);
}

#[tokio::test]
async fn stream_that_memory_cannot_serve_continues_at_etcd() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).with("--cache-prefix", "/a/").start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let mut stream = open(&through, &[create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created);
    let first = direct.put("/a/key", "1").await.expect("put");
    assert_eq!(header_revision(&next(&mut stream).await), first);
    stream.send(&create(prefix("/b/", 0)));
    let created_at_etcd = next(&mut stream).await;
    assert!(created_at_etcd.created, "the only created: {created_at_etcd:?}");
    assert_eq!(created_at_etcd.watch_id, 1);
    assert_eq!(created(&rangecache, "etcd", "not_mirrored").await, 1.0);
    for (key, id) in [("/a/key", 0), ("/b/key", 1), ("/a/other", 0)] {
        let revision = direct.put(key, "2").await.expect("put");
        let event = next(&mut stream).await;
        assert_eq!((event.watch_id, header_revision(&event)), (id, revision), "{key}");
        assert_eq!(event.events.len(), 1, "{key}");
    }
}

#[tokio::test]
async fn half_closed_stream_keeps_its_watchers() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let mut stream = open(&rangecache.client().await, &[create(prefix("/a/", 0))]);
    stream.close_send();
    assert!(next(&mut stream).await.created);
    let revision = etcd.client().await.put("/a/key", "1").await.expect("put");
    assert_eq!(header_revision(&next(&mut stream).await), revision);
}

#[tokio::test]
async fn progress_is_reported_periodically_and_on_request() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd)
        .with("--watch-progress-notify-interval", "100ms")
        .start()
        .await;
    let through = rangecache.client().await;
    let notified = WatchCreateRequest {
        progress_notify: true,
        watch_id: 7,
        ..prefix("/a/", 0)
    };
    let mut stream = open(&through, &[create(notified)]);
    let since = header_revision(&next(&mut stream).await);
    let response = next(&mut stream).await;
    assert_eq!((response.watch_id, response.events.len()), (7, 0));
    assert!(header_revision(&response) >= since);

    // Of a watch without notifications, on request: at once, and after every event.
    let mut stream = open(&through, &[create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created);
    for round in 0..20 {
        let revision = through.put("/a/key", format!("{round}")).await.expect("put");
        stream.send(&progress());
        // An answer may be dropped while the mirror is behind: a client asks again.
        let mut had_event = false;
        let reported = loop {
            match tokio::time::timeout(Duration::from_millis(200), stream.next()).await {
                Err(_) => stream.send(&progress()),
                Ok(None) => panic!("the stream ended: {:?}", stream.end()),
                Ok(Some(message)) => {
                    let response = WatchResponse::decode(message).expect("decodes");
                    if response.watch_id == -1 {
                        if header_revision(&response) >= revision {
                            break header_revision(&response);
                        }
                    } else {
                        assert_eq!(header_revision(&response), revision);
                        had_event = true;
                    }
                }
            }
        };
        assert!(had_event, "progress {reported} before the event at {revision}");
    }
}

/// The HTTP/2 library closes a connection with about two thousand small frames that were not taken.
#[tokio::test]
async fn requests_before_the_first_create_are_not_answered_and_memory_serves_the_stream() {
    for version in [Version::V3_7, Version::V3_6, Version::V3_5] {
        let etcd = Etcd::start(version).await;
        let rangecache = before(&etcd).start().await;
        let direct = etcd.client().await;
        let mut written = direct.put("/a/old", "1").await.expect("put");
        for client in [&direct, &rangecache.client().await] {
            let cancel = WatchRequest {
                cancel_request: Some(WatchCancelRequest { watch_id: 7 }),
                ..WatchRequest::default()
            };
            let first = [progress(), cancel, WatchRequest::default(), progress()];
            let mut stream = open(client, &first);
            stream.send(&create(prefix("/a/", 0)));
            let response = next(&mut stream).await;
            assert!(response.created && response.watch_id == 0, "{response:?}");
            assert_eq!(header_revision(&response), written);
            written = direct.put("/a/key", "1").await.expect("put");
            let response = next(&mut stream).await;
            assert_eq!((response.events.len(), header_revision(&response)), (1, written));
        }
        assert_eq!(created(&rangecache, "memory", "now").await, 1.0);
    }
}

#[tokio::test]
async fn client_may_ask_for_progress_without_waiting() {
    let etcd = Etcd::start(Version::V3_7).await;
    let link = FaultLink::to(&etcd.url(), 7).await;
    let rangecache = Rangecache::at(link.url()).start().await;
    let through = rangecache.client().await;
    let mut stream = open(&through, &[create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created);
    assert!(link.feeds() > 0, "no feed was recognised");
    // Every request has to wait for the event.
    link.set(Condition::SlowFeeds(Duration::from_secs(2)));
    let revision = through.put("/a/key", "1").await.expect("put");
    for _ in 0..10_000 {
        stream.send(&progress());
    }
    loop {
        let response = next(&mut stream).await;
        if !response.events.is_empty() {
            assert_eq!(header_revision(&response), revision);
            break;
        }
        assert!(header_revision(&response) < revision, "progress before the event");
    }
    link.set(Condition::Normal);
    // An answer may be dropped while the mirror is behind: a client asks again.
    let asked_again = async {
        loop {
            stream.send(&progress());
            match tokio::time::timeout(Duration::from_millis(200), next(&mut stream)).await {
                Ok(response) if response.watch_id == -1 => break header_revision(&response),
                Ok(_) | Err(_) => {}
            }
        }
    };
    let reported = tokio::time::timeout(SOON, asked_again).await;
    assert!(reported.expect("progress in the end") >= revision);
}

#[tokio::test]
async fn progress_is_not_reported_before_the_events_of_a_watcher_that_catches_up() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let through = rangecache.client().await;
    let value = "v".repeat(4000);
    let mut revisions = Vec::new();
    for _ in 0..100 {
        revisions.push(through.put("/a/key", &value).await.expect("put"));
    }
    let (first, last) = (revisions[0], revisions[99]);
    // The request arrives together with the create: most events are still to be sent.
    let mut stream = open(&through, &[create(prefix("/a/", first)), progress()]);
    assert!(next(&mut stream).await.created);
    let mut received = 0;
    while received < last {
        let response = next(&mut stream).await;
        let revision = header_revision(&response);
        if response.events.is_empty() {
            assert!(
                revision <= received,
                "progress {revision} before the event after {received}"
            );
        } else {
            received = revision;
        }
    }
}

#[tokio::test]
async fn progress_reaches_what_its_client_has_written_around_rangecache() {
    let etcd = Etcd::start(Version::V3_7).await;
    // No event tells this mirror of other keys, and the probe does not tell in time.
    let rangecache = before(&etcd)
        .with("--cache-prefix", "/a/")
        .with("--probe-interval", "1h")
        .start()
        .await;
    let mut stream = open(&rangecache.client().await, &[create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created);
    let written = etcd.client().await.put("/b/key", "1").await.expect("put");
    let mut reported = 0;
    while reported < written {
        stream.send(&progress());
        if let Ok(message) = tokio::time::timeout(Duration::from_millis(100), stream.next()).await {
            let response = WatchResponse::decode(message.expect("the stream is open")).expect("decodes");
            reported = header_revision(&response);
        }
    }
}

#[tokio::test]
async fn fragments_are_not_interrupted_by_responses_to_requests() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let through = rangecache.client().await;
    let value = "v".repeat(100_000);
    let puts = || {
        (0..12)
            .map(|key| RequestOp::put(format!("/a/{key:02}"), &value))
            .collect()
    };
    through.transact(puts()).await.expect("etcd writes");
    let revision = through.transact(puts()).await.expect("etcd writes");
    let fragmented = WatchCreateRequest {
        prev_kv: true,
        fragment: true,
        ..prefix("/a/", revision)
    };
    // Each watcher gets 2.4 MB in two fragments. The window of 8 MiB closes within the last one's first: no create waits
    // before the requests that follow.
    let requests = vec![create(fragmented); 4];
    let mut stream = open(&through, &requests);
    assert!(next(&mut stream).await.created);
    until(SOON, "the last watcher's response has begun", async || {
        let events = rangecache.metrics().await.sum("rangecache_watch_events_total");
        (events >= 48.0).then_some(())
    })
    .await;
    let refused = WatchCreateRequest {
        range_end: b"/a".to_vec(),
        ..prefix("/b/", 0)
    };
    (0..3).for_each(|_| stream.send(&create(refused.clone())));
    // Of one connection: what was sent before this call has arrived.
    through.status().await.expect("a status");
    let (mut created, mut events, mut fragments) = (1, 0, 0);
    let mut last = WatchResponse::default();
    while created < 7 || events < 48 {
        let response = next(&mut stream).await;
        assert!(
            !last.fragment || last.watch_id == response.watch_id,
            "interrupted by {:?}",
            (response.watch_id, response.created)
        );
        created += usize::from(response.created);
        events += response.events.len();
        fragments += usize::from(response.fragment);
        last = response;
    }
    assert_eq!(fragments, 4);
}

#[tokio::test]
async fn watch_from_memory_ends_with_unavailable_when_rangecache_stops() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let through = rangecache.client().await;
    let cancel = WatchRequest {
        cancel_request: Some(WatchCancelRequest { watch_id: 5 }),
        ..WatchRequest::default()
    };
    let mut stream = open(&through, &[create(prefix("/a/", 0)), cancel]);
    assert!(next(&mut stream).await.created);
    rangecache.signal("TERM");
    assert!(stream.next_as::<WatchResponse>(SOON).await.is_none());
    assert_eq!(stream.end().expect("a status").code, UNAVAILABLE);
}
