//! Bounds on one noisy client: its calls wait or are refused, and other clients are not affected.

use std::sync::Arc;
use std::time::Duration;

use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, Status};
use testkit::kv::WATCH;
use testkit::pb::{RangeRequest, RangeResponse, WatchCreateRequest, prefix_end};
use testkit::proxy::Rangecache;
use testkit::relay::{HOLD, Relay};
use testkit::wait::{SOON, until};
use tokio::task::JoinHandle;

/// Prefix of keys that no mirror has.
const PREFIX: &str = "/shares/";

/// Bytes of a value that takes its client two seconds at the bound of the tests.
const LARGE_BYTES: usize = 256 << 10;

/// More calls than may wait for the bytes that their client owes, fewer than may wait for etcd.
const MORE_THAN_MAY_WAIT: usize = 300;

type Read = JoinHandle<Result<RangeResponse, Status>>;

/// An etcd behind a relay that holds marked reads.
struct Scene {
    relay: Relay,
    rangecache: Rangecache,
    _etcd: Etcd,
}

impl Scene {
    async fn with(flags: &[(&str, &str)]) -> Scene {
        let etcd = Etcd::start(Version::V3_7).await;
        let relay = Relay::to(&etcd.url()).await;
        let direct = etcd.client().await;
        for n in 0..40 {
            direct.put(key(n), n.to_string()).await.expect("etcd puts");
        }
        let mut builder = Rangecache::at(relay.url()).with("--cache-prefix", "/elsewhere/");
        for (flag, value) in flags {
            builder = builder.with(flag, value);
        }
        let rangecache = builder.start().await;
        Scene {
            relay,
            rangecache,
            _etcd: etcd,
        }
    }

    /// A connection of the client with the address 127.0.0.`client`.
    async fn client(&self, client: u8) -> Client {
        let local = [127, 0, 0, client].into();
        let connected = Client::connect_from(local, self.rangecache.url()).await;
        connected.expect("rangecache listens")
    }

    /// A connection of the client with the address 127.0.0.`client`, whose reads the relay holds under `name`.
    async fn held_client(&self, client: u8, name: &str) -> Arc<Client> {
        Arc::new(self.client(client).await.with_metadata(HOLD, name))
    }

    /// Waits until this many calls are held.
    async fn holds(&self, calls: usize) {
        until(SOON, "calls are held", async || {
            (self.relay.held().in_flight == calls).then_some(())
        })
        .await;
    }

    async fn refused(&self, limit: &str) -> f64 {
        let name = format!("rangecache_client_share_refused_total{{limit=\"{limit}\"}}");
        *self.rangecache.metrics().await.0.get(&name).unwrap_or(&0.0)
    }

    /// Waits until this many calls of a client with the address 127.0.0.`client` have arrived.
    async fn arrived(&self, client: u8, calls: u64) {
        let name = format!("127.0.0.{client}");
        until(SOON, "the calls have arrived", async || {
            let body = self.rangecache.admin("/clients").await.body;
            let clients: serde_json::Value = serde_json::from_str(&body).expect("is JSON");
            let found = clients
                .as_array()?
                .iter()
                .find(|of| of["name"] == name.as_str())?;
            (found["calls"].as_u64()? >= calls).then_some(())
        })
        .await;
    }
}

fn key(n: usize) -> String {
    format!("{PREFIX}{n:02}")
}

fn spawn(client: &Arc<Client>, request: RangeRequest) -> Read {
    let client = Arc::clone(client);
    tokio::spawn(async move { client.range(&request).await })
}

/// The keys that begin with `/shares/` and this digit.
fn list(digit: u8) -> RangeRequest {
    let prefix = format!("{PREFIX}{digit}");
    RangeRequest {
        range_end: prefix_end(prefix.as_bytes()),
        key: prefix.into_bytes(),
        ..RangeRequest::default()
    }
}

async fn all_served(reads: Vec<Read>) {
    for read in reads {
        read.await.unwrap().expect("is served");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn burst_of_one_client_on_many_connections_delays_another_by_one_call() {
    let scene = Scene::with(&[("--forward-max-small", "1")]).await;
    let mut reads = Vec::new();
    for n in 0..20 {
        let noisy = scene.held_client(2, "noisy").await;
        reads.push(spawn(&noisy, RangeRequest::one(key(n))));
    }
    let waiting = async |calls: f64| {
        until(SOON, "calls wait", async || {
            let metrics = scene.rangecache.metrics().await;
            (metrics.sum("rangecache_forward_small_waiting") == calls).then_some(())
        })
        .await;
    };
    waiting(19.0).await;
    let honest = scene.held_client(3, "honest").await;
    reads.push(spawn(&honest, RangeRequest::one(key(20))));
    waiting(20.0).await;
    scene.relay.let_go(21);
    all_served(reads).await;
    let arrived = scene.relay.held().arrived;
    let of_honest = arrived.iter().position(|name| name == "honest");
    assert!(of_honest.unwrap() <= 2, "{arrived:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_over_the_bound_of_one_client_wait_and_another_does_not_notice() {
    let scene = Scene::with(&[("--client-max-calls", "2")]).await;
    let noisy = scene.held_client(2, "noisy").await;
    let reads: Vec<_> = (0..4).map(|n| spawn(&noisy, RangeRequest::one(key(n)))).collect();
    scene.arrived(2, 4).await;
    scene.holds(2).await;
    let late = scene.client(2).await.with_metadata("grpc-timeout", "100m");
    let late = late.range(&RangeRequest::one(key(9))).await.unwrap_err();
    assert_eq!(late.code, DEADLINE_EXCEEDED, "{late:?}");
    let honest = scene.client(3).await;
    for n in 0..10 {
        let read = honest.range(&RangeRequest::one(key(n))).await;
        read.expect("the other client's calls do not count");
    }
    assert_eq!(scene.relay.held().most, 2);
    scene.relay.let_go(4);
    all_served(reads).await;
    assert_eq!(scene.relay.held().most, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_over_the_bound_of_one_client_wait_while_its_gets_and_others_lists_are_served() {
    let scene = Scene::with(&[("--client-max-forwarded-lists", "1")]).await;
    let noisy = scene.held_client(2, "noisy").await;
    let reads = vec![spawn(&noisy, list(0)), spawn(&noisy, list(1))];
    scene.arrived(2, 2).await;
    scene.holds(1).await;
    let get = scene.client(2).await.range(&RangeRequest::one(key(0))).await;
    get.expect("a read of one key is no list");
    let listed = scene.client(3).await.range(&list(2)).await;
    assert_eq!(listed.expect("the other client's lists do not count").count, 10);
    scene.relay.let_go(2);
    all_served(reads).await;
    assert_eq!(scene.relay.held().most, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_over_the_bound_of_one_client_is_refused_with_a_clear_text() {
    let scene = Scene::with(&[("--client-max-watches", "1")]).await;
    let create = || WatchCreateRequest {
        key: PREFIX.into(),
        range_end: prefix_end(PREFIX.as_bytes()),
        ..WatchCreateRequest::default()
    };
    let (noisy, honest) = (scene.client(2).await, scene.client(3).await);
    let first = noisy.watch(create()).await;
    let mut second = noisy.open(WATCH);
    assert!(second.next().await.is_none());
    let status = second.end().expect("a status");
    assert_eq!(status.code, RESOURCE_EXHAUSTED, "{status:?}");
    assert!(status.message.contains("--client-max-watches"), "{status:?}");
    assert_eq!(scene.refused("watches").await, 1.0);
    drop(honest.watch(create()).await);
    drop(first);
    until(SOON, "the first watch has ended", async || {
        let mut stream = noisy.open(WATCH);
        let refused = tokio::time::timeout(Duration::from_millis(50), stream.next()).await;
        refused.is_err().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn costly_calls_of_one_client_are_sent_two_at_a_time() {
    let scene = Scene::with(&[]).await;
    let hash = |client: &Arc<Client>| {
        let client = Arc::clone(client);
        tokio::spawn(async move { client.raw("/etcdserverpb.Maintenance/HashKV", b"").await })
    };
    let noisy = scene.held_client(2, "noisy").await;
    let mut hashes: Vec<_> = (0..4).map(|_| hash(&noisy)).collect();
    scene.arrived(2, 4).await;
    scene.holds(2).await;
    let read = scene.client(2).await.range(&RangeRequest::one(key(0))).await;
    read.expect("its reads do not wait");
    hashes.push(hash(&scene.held_client(3, "honest").await));
    scene.holds(3).await;
    scene.relay.let_go(5);
    for hash in hashes {
        assert_eq!(hash.await.unwrap().expect("a response").status().code, 0);
    }
    assert_eq!(scene.relay.held().most, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_over_its_bytes_per_second_is_slowed_down_and_another_does_not_notice() {
    let scene = Scene::with(&[("--client-max-bytes-per-second", "131072")]).await;
    let direct = scene._etcd.client().await;
    direct
        .put(key(50), vec![0; LARGE_BYTES])
        .await
        .expect("etcd puts");
    // They begin before the client owes anything, and together need more than a minute at its bound.
    let noisy = scene.held_client(2, "noisy").await;
    let large: Vec<_> = (0..40)
        .map(|_| spawn(&noisy, RangeRequest::one(key(50))))
        .collect();
    scene.holds(40).await;
    scene.relay.let_go(40);
    // Its next calls wait until these bytes are paid for, and only a number of them may wait. Those that are served before it
    // owes anything are replaced.
    let next = Arc::new(scene.client(2).await);
    let mut waiting: Vec<Read> = Vec::new();
    let (refused, _) = until(SOON, "a call of the noisy client is refused", async || {
        let ended: Vec<_> = waiting.extract_if(.., |read| read.is_finished()).collect();
        waiting.extend((waiting.len()..MORE_THAN_MAY_WAIT).map(|_| spawn(&next, RangeRequest::one(key(1)))));
        let mut refused = None;
        for read in ended {
            refused = read.await.unwrap().err().or(refused);
        }
        refused
    })
    .await;
    assert_eq!(refused.code, RESOURCE_EXHAUSTED, "{refused:?}");
    assert!(
        refused.message.contains("--client-max-bytes-per-second"),
        "{refused:?}"
    );
    assert!(scene.refused("bytes").await >= 1.0);
    let honest = scene.client(3).await;
    for n in 0..20 {
        let read = honest.range(&RangeRequest::one(key(n))).await;
        read.expect("the other client's bytes do not count");
    }
    assert!(
        !large.iter().all(JoinHandle::is_finished),
        "the noisy client is not slowed down"
    );
    large.iter().chain(&waiting).for_each(JoinHandle::abort);
}
