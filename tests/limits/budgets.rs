//! Bounds on the resources that clients can use, however many or misbehaving, and on the effect on other clients
//! (F8).

use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use h2::client::SendRequest;
use prost::Message;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Stream, UNAVAILABLE, frame};
use testkit::kv::{PUT, RANGE};
use testkit::pb::{Empty, PutRequest, RangeRequest, WatchCreateRequest};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

pub const PREFIX: &str = "/budgets/";
/// Maximum duration of a flood.
const FLOOD: Duration = Duration::from_secs(10);

pub async fn etcd_with(keys: usize, value_bytes: usize) -> Etcd {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    for n in 0..keys {
        let put = direct
            .put(format!("{PREFIX}{n:04}"), vec![b'v'; value_bytes])
            .await;
        put.expect("etcd writes");
    }
    etcd
}

pub async fn watch(client: &Client) -> Stream {
    let create = WatchCreateRequest {
        key: PREFIX.into(),
        ..WatchCreateRequest::default()
    };
    client.watch(create).await
}

/// Resident memory of a process, in MiB.
fn resident_mib(rangecache: &Rangecache) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", rangecache.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

fn descriptors(rangecache: &Rangecache) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", rangecache.id()))
        .unwrap()
        .count()
}

async fn tasks(rangecache: &Rangecache) -> f64 {
    rangecache.metrics().await.sum("rangecache_tasks")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_beyond_the_limit_are_refused() {
    let etcd = etcd_with(1, 1).await;
    let rangecache = Rangecache::before(&etcd).with("--max-calls", "4").start().await;
    let through = rangecache.client().await;
    let mut watches = Vec::new();
    for _ in 0..4 {
        watches.push(watch(&through).await);
    }
    let before = rangecache.outcomes().await;
    let list = RangeRequest::prefix(PREFIX);
    let refused = rangecache.client().await.range(&list).await;
    assert_eq!(refused.expect_err("a call over the limit").code, UNAVAILABLE);
    let put = through.put("a", "b").await;
    assert_eq!(put.expect_err("a call over the limit").code, UNAVAILABLE);
    let outcomes = rangecache.outcomes_since(&before, 1).await;
    assert_eq!(
        outcomes.0.get(&("shed".into(), "too_many_calls".into())),
        Some(&1)
    );
    let metrics = rangecache.metrics().await;
    assert_eq!(metrics.sum("rangecache_shed_calls_total"), 2.0);
    assert!(metrics.0.contains_key("rangecache_limit{limit=\"max_calls\"}"));

    watches.pop();
    until(SOON, "calls are accepted again", async || {
        through.range(&list).await.ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_with_all_its_streams_in_use_waits() {
    let etcd = etcd_with(1, 1).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--max-concurrent-streams", "2")
        .start()
        .await;
    let through = rangecache.client().await;
    let list = RangeRequest::prefix(PREFIX);
    // A client gets the limit with its first response.
    through.range(&list).await.expect("answers");
    let watches = [watch(&through).await, watch(&through).await];
    let third = {
        let (through, list) = (through.clone(), list.clone());
        tokio::spawn(async move { through.range(&list).await })
    };
    let before = rangecache.outcomes().await;
    rangecache
        .client()
        .await
        .range(&list)
        .await
        .expect("other connections do not wait");
    assert_eq!(rangecache.outcomes_since(&before, 1).await.total(), 1);
    assert!(!third.is_finished());
    drop(watches);
    third.await.expect("no panic").expect("it follows the others");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_do_not_keep_others_out() {
    let etcd = etcd_with(1, 1).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--max-connections", "2")
        .start()
        .await;
    let address = rangecache.url().strip_prefix("http://").unwrap().to_owned();
    let silent = [
        TcpStream::connect(&address).await.unwrap(),
        TcpStream::connect(&address).await.unwrap(),
    ];
    until(SOON, "the silent connections use all slots", async || {
        (rangecache.metrics().await.sum("rangecache_client_connections") == 2.0).then_some(())
    })
    .await;
    let through = rangecache.client().await;
    // Within the timeout of a call.
    through
        .range(&RangeRequest::prefix(PREFIX))
        .await
        .expect("the slots are freed");
    drop(silent);
}

/// A client on bare HTTP/2, which can break any rule; its windows are HTTP/2's default, 64 KiB.
pub async fn rude(
    rangecache: &Rangecache,
) -> (SendRequest<Bytes>, tokio::task::JoinHandle<Result<(), h2::Error>>) {
    let address = rangecache.url().strip_prefix("http://").unwrap();
    let tcp = TcpStream::connect(address).await.unwrap();
    let (sender, connection) = h2::client::handshake(tcp).await.unwrap();
    (sender, tokio::spawn(connection))
}

pub fn call(rangecache: &Rangecache, path: &str) -> http::Request<()> {
    http::Request::post(format!("{}{path}", rangecache.url()))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_never_read_cost_little() {
    // 16 MB per list.
    let etcd = etcd_with(64, 250_000).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let polite = rangecache.client().await;
    let list = RangeRequest::prefix(PREFIX);
    let whole = polite.range(&list).await.expect("answers");
    let before = resident_mib(&rangecache);
    let (mut sender, _connection) = rude(&rangecache).await;
    let mut unread = Vec::new();
    for _ in 0..100 {
        sender = sender.ready().await.unwrap();
        let (answer, mut body) = sender.send_request(call(&rangecache, RANGE), false).unwrap();
        body.send_data(frame(&list.encode_to_vec()), true).unwrap();
        unread.push(answer.await.expect("a response head"));
    }
    let after = resident_mib(&rangecache);
    println!("100 unread lists of 16 MB: {before} MiB, then {after} MiB");
    // Each may hold a chunk of 128 KiB, and all of them together one send buffer.
    assert!(after < before + 64, "{before} MiB, then {after} MiB");
    let again = polite.range(&list).await.expect("other clients are served");
    assert_eq!(again.kvs.len(), whole.kvs.len());
    drop(unread);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_held_by_slow_readers_count_against_the_bound() {
    const KEYS: usize = 40;
    // 4 MB of keys.
    let etcd = etcd_with(KEYS, 100_000).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-max-bytes", "16MiB")
        .with("--history-max-bytes", "1MiB")
        .start()
        .await;
    let list = RangeRequest::prefix(PREFIX);
    let mut unread = Vec::new();
    let direct = etcd.client().await;
    for reader in 0..6 {
        let (sender, connection) = rude(&rangecache).await;
        let mut sender = sender.ready().await.unwrap();
        let (answer, mut body) = sender.send_request(call(&rangecache, RANGE), false).unwrap();
        body.send_data(frame(&list.encode_to_vec()), true).unwrap();
        let head = answer.await.expect("a response head");
        unread.push((head.into_body(), sender, connection));
        // Every version of the keys stays in memory for a reader.
        for n in 0..KEYS {
            let put = direct.put(format!("{PREFIX}{n:04}"), vec![b'w'; 100_000]).await;
            put.expect("etcd writes");
        }
        if reader == 0 {
            // Within the bound: seen before a reader is given up.
            until(SOON, "what the reader keeps is counted", async || {
                let held = rangecache.metrics().await.sum("rangecache_mirror_held_bytes");
                (held > 2e6).then_some(())
            })
            .await;
        }
    }
    until(SOON, "the slowest readers are given up", async || {
        let metrics = rangecache.metrics().await;
        let given_up = metrics.sum("rangecache_responses_given_up_total");
        let used =
            metrics.sum("rangecache_mirror_held_bytes") + metrics.sum("rangecache_mirror_memory_bytes");
        (given_up > 0.0 && used <= f64::from(16 << 20)).then_some(())
    })
    .await;
    assert!(rangecache.log().contains("slow readers keep more old data"));
    let oldest = &mut unread[0].0;
    let reading = async {
        loop {
            match oldest.data().await {
                Some(Ok(data)) => oldest.flow_control().release_capacity(data.len()).unwrap(),
                Some(Err(error)) => return error,
                None => panic!("the response is complete"),
            }
        }
    };
    let reset = tokio::time::timeout(SOON, reading)
        .await
        .expect("the end of the response");
    assert!(reset.is_reset(), "{reset}");
    let newest = rangecache.client().await.range(&list).await;
    assert_eq!(newest.expect("the mirror answers").kvs.len(), KEYS);
    assert_eq!(
        rangecache.metrics().await.sum("rangecache_mirror_in_service"),
        1.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floods_do_not_disturb_other_connections() {
    let etcd = etcd_with(10, 100).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let polite = rangecache.client().await;
    let list = RangeRequest::prefix(PREFIX);
    polite.range(&list).await.expect("answers");
    let (fds, memory, alive) = (
        descriptors(&rangecache),
        resident_mib(&rangecache),
        tasks(&rangecache).await,
    );

    // Calls that are reset as soon as they are sent, forwarded ones and ones from memory.
    let mut floods = JoinSet::new();
    for path in [RANGE, PUT, RANGE, PUT] {
        let (mut sender, connection) = rude(&rangecache).await;
        let request = call(&rangecache, path);
        // A write puts a key outside the list: some are applied before the reset.
        let message = frame(&RangeRequest::range("flood", "flooe").encode_to_vec());
        let flood = async move {
            for n in 0..5_000 {
                // rangecache may close the connection at some point: that is allowed.
                sender = sender.ready().await?;
                let (_answer, mut body) = sender.send_request(request.clone(), false)?;
                if n % 2 == 0 {
                    body.send_data(message.clone(), false)?;
                }
                body.send_reset(h2::Reason::CANCEL);
                tokio::task::yield_now().await;
            }
            Ok::<_, h2::Error>(())
        };
        floods.spawn(async move {
            let _ = tokio::time::timeout(FLOOD, flood).await;
            connection.abort();
        });
    }
    // A message sent byte by byte.
    let (sender, connection) = rude(&rangecache).await;
    let request = call(&rangecache, PUT);
    let message = frame(
        &PutRequest {
            key: b"tiny".to_vec(),
            value: vec![b'v'; 20_000],
            lease: 0,
        }
        .encode_to_vec(),
    );
    let flood = async move {
        let (_answer, mut body) = sender.ready().await?.send_request(request, false)?;
        for byte in &message {
            body.send_data(Bytes::copy_from_slice(&[*byte]), false)?;
            tokio::task::yield_now().await;
        }
        Ok::<_, h2::Error>(())
    };
    floods.spawn(async move {
        let _ = tokio::time::timeout(FLOOD, flood).await;
        connection.abort();
    });
    let mut served = 0;
    while !matches!(
        tokio::time::timeout(Duration::ZERO, floods.join_next()).await,
        Ok(None)
    ) {
        let answer = tokio::time::timeout(SOON, polite.range(&list)).await;
        assert_eq!(
            answer
                .expect("each list is served in time")
                .expect("answers")
                .kvs
                .len(),
            10
        );
        served += 1;
    }
    println!("{served} lists were answered in the meantime");
    until(SOON, "nothing of the floods remains", async || {
        (descriptors(&rangecache) <= fds && tasks(&rangecache).await <= alive).then_some(())
    })
    .await;
    let after = resident_mib(&rangecache);
    assert!(after < memory + 64, "{memory} MiB, then {after} MiB");
    assert_eq!(rangecache.metrics().await.sum("rangecache_panics_total"), 0.0);
}

/// Opens this many connections, fifty at a time, each with a read and some with watches.
async fn connections(url: &str, connections: usize) {
    let clients = stream::iter((0..connections).map(|n| one_client(url.to_owned(), n)));
    clients.buffer_unordered(50).collect::<()>().await;
}

async fn one_client(url: String, n: usize) {
    let client = Client::connect(&url).await;
    let list = RangeRequest::prefix(PREFIX);
    assert_eq!(client.range(&list).await.expect("answers").kvs.len(), 10);
    if n.is_multiple_of(2) {
        drop(watch(&client).await);
    }
    if n.is_multiple_of(5) {
        // A call that ends with its connection.
        let _watch = watch(&client).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_connections_leave_nothing_behind() {
    let etcd = etcd_with(10, 100).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let settled = async || {
        until(SOON, "all connections are closed", async || {
            let metrics = rangecache.metrics().await;
            (metrics.sum("rangecache_client_connections") == 0.0).then_some(())
        })
        .await;
        let etcds = etcd.metrics().await.sum("etcd_debugging_mvcc_watcher_total");
        (
            descriptors(&rangecache),
            tasks(&rangecache).await,
            resident_mib(&rangecache),
            etcds,
        )
    };
    // One-time allocations are made by the first hundreds.
    connections(rangecache.url(), 500).await;
    let before = settled().await;
    connections(rangecache.url(), 5_000).await;
    let (fds, alive, memory, watchers) = before;
    until(SOON, "descriptors, tasks and watches are as before", async || {
        let now = settled().await;
        (now.0 <= fds && now.1 <= alive && now.3 <= watchers).then_some(())
    })
    .await;
    let after = settled().await;
    println!("descriptors, tasks, MiB, etcd's watches: {before:?}, after 5000 connections {after:?}");
    assert!(after.2 < memory + 32, "{before:?}, then {after:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keyspace_over_budget_is_packed_and_stays_in_service_while_it_is_written() {
    const KEYS: usize = 128;
    // 32 MB of keys, and a budget of 16 MB.
    let etcd = etcd_with(KEYS, 250_000).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-max-bytes", "16MiB")
        .with("--history-max-bytes", "1MiB")
        .start()
        .await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let reads = [
        RangeRequest::one(format!("{PREFIX}0000")),
        RangeRequest::prefix(PREFIX),
    ];
    let is_equal = async || {
        let before = rangecache.outcomes().await;
        for read in &reads {
            assert_eq!(through.range(read).await, direct.range(read).await);
        }
        assert_eq!(rangecache.outcomes_since(&before, 2).await.memory_answers(), 2);
    };
    is_equal().await;
    let metrics = rangecache.metrics().await;
    assert!(metrics.sum("rangecache_mirror_packed_bytes") > 0.0);
    // Each write makes an entry plain.
    for n in 0..KEYS {
        let put = direct.put(format!("{PREFIX}{n:04}"), vec![b'w'; 250_000]).await;
        put.expect("etcd writes");
    }
    is_equal().await;
    let metrics = rangecache.metrics().await;
    assert!(metrics.sum("rangecache_mirror_memory_bytes") <= f64::from(16 << 20));
    assert!(metrics.sum("rangecache_mirror_repacked_bytes_total") > 0.0);
    assert!(!rangecache.log().contains("over budget"), "it was never disabled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keyspace_over_budget_is_forwarded_until_it_fits() {
    // 64 MB of keys, and a budget of 8 MB.
    let etcd = etcd_with(256, 250_000).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-max-bytes", "8MiB")
        .with("--cache-pack", "never")
        .with("--probe-interval", "50ms")
        .start()
        .await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let before = rangecache.outcomes().await;
    let one = RangeRequest::one(format!("{PREFIX}0000"));
    assert_eq!(through.range(&one).await, direct.range(&one).await);
    let outcomes = rangecache.outcomes_since(&before, 1).await;
    assert_eq!(
        outcomes.0.get(&("forwarded".into(), "over_budget".into())),
        Some(&1)
    );
    let memory = resident_mib(&rangecache);
    println!("{memory} MiB in front of 64 MB");
    assert!(memory < 64, "{memory} MiB");
    assert!(rangecache.log().contains("mirror disabled (over budget)"));
    assert!(rangecache.is_warm().await, "it counts as ready");

    for n in 8..256 {
        direct
            .delete(format!("{PREFIX}{n:04}"))
            .await
            .expect("etcd deletes");
    }
    // Long before the mirror is tried without a check of etcd's size.
    until(SOON, "it fits", async || {
        let before = rangecache.outcomes().await;
        assert_eq!(
            through.range(&one).await.unwrap().kvs,
            direct.range(&one).await.unwrap().kvs
        );
        let outcomes = rangecache.outcomes_since(&before, 1).await;
        (outcomes.memory_answers() == 1).then_some(())
    })
    .await;

    // The mirror outgrows the budget again, while following etcd.
    for n in 0..256 {
        direct
            .put(format!("{PREFIX}{n:04}"), vec![b'w'; 250_000])
            .await
            .expect("etcd writes");
    }
    until(SOON, "it is disabled again", async || {
        rangecache.log().contains("outgrown").then_some(())
    })
    .await;
    assert!(rangecache.is_warm().await);
    assert_eq!(through.range(&one).await, direct.range(&one).await);
}

/// F5: while etcd is suspended, 64 clients that list mirrored ranges cause at most one call per range, also while it is
/// unknown whether etcd's auth is on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listing_clients_share_calls_to_etcd() {
    for auth_is_known in [true, false] {
        share_calls_to_suspended_etcd(auth_is_known).await;
    }
}

async fn share_calls_to_suspended_etcd(auth_is_known: bool) {
    const RANGES: usize = 4;
    let etcd = etcd_with(1, 1).await;
    let direct = etcd.client().await;
    for n in 0..RANGES * 20 {
        let key = format!("{PREFIX}{}/{n:03}", n % RANGES);
        direct.put(key, "v").await.expect("etcd writes");
    }
    let rangecache = Rangecache::before(&etcd)
        .with("--freshness-timeout", "200ms")
        .with("--probe-interval", "1h")
        .start()
        .await;
    let through = rangecache.client().await;
    // A check, after which auth is known to be off; etcd may respond to the first ones too late.
    until(SOON, "memory answers", async || {
        let before = rangecache.outcomes().await;
        through
            .range(&RangeRequest::prefix(PREFIX))
            .await
            .expect("answers");
        let outcomes = rangecache.outcomes_since(&before, 1).await;
        (outcomes.memory_answers() == 1).then_some(())
    })
    .await;
    if !auth_is_known {
        through.disable_auth().await.expect("auth is off");
    }
    let joined_before = rangecache.metrics().await.sum("rangecache_forward_joined_total");
    etcd.pause();
    let mut reads = JoinSet::new();
    for n in 0..64 {
        let (through, list) = (
            through.clone(),
            RangeRequest::prefix(format!("{PREFIX}{}/", n % RANGES)),
        );
        reads.spawn(async move { through.range(&list).await });
    }
    until(
        SOON,
        "one call per range is in flight, the others wait",
        async || {
            let metrics = rangecache.metrics().await;
            let in_flight = metrics.sum("rangecache_forward_large");
            assert!(in_flight <= RANGES as f64, "{in_flight} calls in flight");
            (in_flight == RANGES as f64 && metrics.sum("rangecache_forward_waiting") == 60.0).then_some(())
        },
    )
    .await;
    etcd.resume();
    while let Some(read) = reads.join_next().await {
        assert_eq!(read.unwrap().expect("answers").kvs.len(), 20);
    }
    let joined = rangecache.metrics().await.sum("rangecache_forward_joined_total") - joined_before;
    assert_eq!(joined, 60.0, "the waiting reads shared one call per range");
}

/// F5 with a real defragmentation, during which etcd answers no read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_after_a_defragmentation_share_calls_to_etcd() {
    const RANGES: usize = 4;
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    // The data to defragment.
    for n in 0..1_000 {
        let put = direct.put(format!("/large/{n:04}"), vec![b'v'; 250_000]).await;
        put.expect("etcd writes");
    }
    for n in 0..RANGES * 20 {
        let put = direct.put(format!("{PREFIX}{}/{n:03}", n % RANGES), "v").await;
        put.expect("etcd writes");
    }
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .with("--freshness-timeout", "50ms")
        .start()
        .await;
    let mut clients = Vec::new();
    for _ in 0..64 {
        clients.push(rangecache.client().await);
    }
    // etcd 3.7 receives forwarded lists as RangeStream calls, and no others.
    let lists = async || etcd.started_calls("RangeStream").await;
    until(
        SOON * 3,
        "the defragmentation is too short for the test",
        async || {
            let (before, lists_before) = (rangecache.outcomes().await, lists().await);
            let operator = etcd.client().await;
            let defragmentation = tokio::spawn(async move {
                let done = operator.unary::<Empty>("/etcdserverpb.Maintenance/Defragment", &Empty {});
                done.await.expect("etcd defragments");
            });
            until(SOON, "etcd is blocked", async || {
                let read = RangeRequest::one("any");
                let read = tokio::time::timeout(Duration::from_millis(20), direct.range(&read));
                (read.await.is_err() || defragmentation.is_finished()).then_some(())
            })
            .await;
            let mut reads = JoinSet::new();
            for (n, client) in clients.iter().cloned().enumerate() {
                let list = RangeRequest::prefix(format!("{PREFIX}{}/", n % RANGES));
                reads.spawn(async move { client.range(&list).await });
            }
            while let Some(read) = reads.join_next().await {
                assert_eq!(read.unwrap().expect("a response").kvs.len(), 20);
            }
            defragmentation.await.expect("no panic");
            let outcomes = rangecache.outcomes_since(&before, 64).await;
            let asked = lists().await - lists_before;
            println!("{asked} lists reached etcd: {outcomes:?}");
            // Per range one call at a time: for the first read, and one for all that arrived while it was in flight.
            assert!(
                asked <= 2.0 * RANGES as f64,
                "{asked} lists reached etcd: {outcomes:?}"
            );
            (outcomes.memory_answers() == 0).then_some(())
        },
    )
    .await;
}
