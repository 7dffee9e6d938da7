//! Small reads and new watches that go to etcd have turns: a burst of one client neither takes etcd's CPU from the others
//! nor loses a call.

use std::sync::Arc;

use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, DEADLINE_EXCEEDED, Status, UNAVAILABLE};
use testkit::kv::WATCH;
use testkit::pb::{RangeRequest, RangeResponse, WatchCreateRequest, WatchResponse, prefix_end};
use testkit::proxy::Rangecache;
use testkit::relay::{HOLD, Relay};
use testkit::wait::{SOON, until};
use tokio::task::JoinHandle;

/// Prefix of keys that no mirror has.
const PREFIX: &str = "/small/";

type Read = JoinHandle<Result<RangeResponse, Status>>;

/// An etcd behind a relay that holds marked reads.
struct Scene {
    etcd: Etcd,
    relay: Relay,
    rangecache: Rangecache,
}

impl Scene {
    async fn new(max_small: &str, max_waiting: &str) -> Scene {
        let etcd = Etcd::start(Version::V3_7).await;
        let relay = Relay::to(&etcd.url()).await;
        let direct = etcd.client().await;
        for n in 0..40 {
            direct.put(key(n), n.to_string()).await.expect("etcd puts");
        }
        let rangecache = Rangecache::at(relay.url())
            .with("--cache-prefix", "/elsewhere/")
            .with("--forward-max-small", max_small)
            .with("--forward-max-waiting", max_waiting)
            .start()
            .await;
        Scene {
            etcd,
            relay,
            rangecache,
        }
    }

    /// A connection whose reads the relay holds, under `name`.
    async fn client(&self, name: &str) -> Arc<Client> {
        Arc::new(self.rangecache.client().await.with_metadata(HOLD, name))
    }

    /// Waits until this many calls have a turn, and this many wait for one.
    async fn counts(&self, in_flight: usize, waiting: f64) {
        until(SOON, "calls have turns or wait", async || {
            let metrics = self.rangecache.metrics().await;
            (self.relay.held().in_flight == in_flight
                && metrics.sum("rangecache_forward_small") == in_flight as f64
                && metrics.sum("rangecache_forward_small_waiting") == waiting)
                .then_some(())
        })
        .await;
    }

    async fn refused(&self, reason: &str) -> f64 {
        let name = format!("rangecache_forward_refused_total{{calls=\"small\",reason=\"{reason}\"}}");
        *self.rangecache.metrics().await.0.get(&name).unwrap_or(&0.0)
    }
}

fn key(n: usize) -> String {
    format!("{PREFIX}{n:02}")
}

fn read(client: &Arc<Client>, n: usize) -> Read {
    let client = Arc::clone(client);
    tokio::spawn(async move { client.range(&RangeRequest::one(key(n))).await })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_reads_in_flight_to_etcd_are_bounded_and_none_is_lost() {
    let scene = Scene::new("4", "100").await;
    let mut reads = Vec::new();
    for connection in 0..4 {
        let client = scene.client("read").await;
        reads.extend((0..10).map(|n| (10 * connection + n, read(&client, 10 * connection + n))));
    }
    scene.counts(4, 36.0).await;
    scene.relay.let_go(40);
    for (n, read) in reads {
        let response = read.await.unwrap().expect("is served");
        assert_eq!(response.kvs[0].value, n.to_string().as_bytes());
    }
    let held = scene.relay.held();
    assert_eq!((held.arrived.len(), held.most), (40, 4));
    scene.counts(0, 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn burst_of_one_connection_delays_another_by_one_call() {
    let scene = Scene::new("1", "100").await;
    let (burst, other) = (scene.client("burst").await, scene.client("other").await);
    let mut reads: Vec<_> = (0..20).map(|n| read(&burst, n)).collect();
    scene.counts(1, 19.0).await;
    reads.push(read(&other, 20));
    scene.counts(1, 20.0).await;
    scene.relay.let_go(21);
    for read in reads {
        read.await.unwrap().expect("is served");
    }
    let arrived = scene.relay.held().arrived;
    let of_other = arrived.iter().position(|name| name == "other");
    assert!(of_other.unwrap() <= 2, "{arrived:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_waits_for_its_turn_until_its_deadline_and_gets_etcds_error() {
    let scene = Scene::new("1", "100").await;
    let first = read(&scene.client("first").await, 0);
    scene.counts(1, 0.0).await;
    let before = scene.rangecache.outcomes().await;
    let client = scene
        .rangecache
        .client()
        .await
        .with_metadata("grpc-timeout", "200m");
    let status = client.range(&RangeRequest::one(key(1))).await.unwrap_err();
    assert_eq!(
        (status.code, status.message.as_str()),
        (DEADLINE_EXCEEDED, "context deadline exceeded")
    );
    let outcomes = scene.rangecache.outcomes_since(&before, 1).await;
    assert_eq!(outcomes.of("failed"), 1, "{outcomes:?}");
    assert_eq!(scene.refused("deadline").await, 1.0);
    scene.relay.let_go(1);
    first.await.unwrap().expect("is served");
    scene.counts(0, 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_queue_refuses_the_connection_that_fills_it() {
    let scene = Scene::new("1", "3").await;
    let (burst, other) = (scene.client("burst").await, scene.client("other").await);
    let mut reads: Vec<_> = (0..4).map(|n| read(&burst, n)).collect();
    scene.counts(1, 3.0).await;
    let refused = burst.range(&RangeRequest::one(key(4))).await.unwrap_err();
    assert_eq!(refused.code, UNAVAILABLE, "{refused:?}");
    let served = read(&other, 5);
    until(SOON, "a read of the burst gives its place up", async || {
        (scene.refused("too_many_waiting").await == 2.0).then_some(())
    })
    .await;
    scene.relay.let_go(4);
    served.await.unwrap().expect("is served");
    let mut codes = Vec::new();
    for read in reads.drain(..) {
        codes.extend(read.await.unwrap().err().map(|status| status.code));
    }
    assert_eq!(codes, [UNAVAILABLE]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_and_watches_are_served_while_no_endpoint_is_connected_for_a_moment() {
    let mut scene = Scene::new("1", "100").await;
    let client = Arc::new(scene.rangecache.client().await);
    scene.etcd.stop();
    // A read that was sent before is lost with its connection.
    until(SOON, "rangecache has lost its connections", async || {
        let metrics = scene.rangecache.metrics().await;
        (metrics.sum("rangecache_endpoint_connections") == 0.0).then_some(())
    })
    .await;
    let reads: Vec<_> = (0..20).map(|n| read(&client, n)).collect();
    scene.etcd.run();
    for read in reads {
        read.await.unwrap().expect("waits for etcd's return");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_watches_take_turns_and_a_stream_without_a_response_keeps_none() {
    let scene = Scene::new("2", "1000").await;
    let client = Arc::new(scene.rangecache.client().await);
    let silent: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = client.open(WATCH);
            // Has a field that a WatchRequest does not have: etcd, which decides about it, does not respond.
            stream.send(&RangeRequest {
                serializable: true,
                ..RangeRequest::default()
            });
            tokio::spawn(async move { stream.next().await })
        })
        .collect();
    until(SOON, "the silent streams have both turns", async || {
        let metrics = scene.rangecache.metrics().await;
        (metrics.sum("rangecache_forward_small") == 2.0).then_some(())
    })
    .await;
    let created: Vec<_> = (0..100)
        .map(|_| {
            let client = Arc::clone(&client);
            let create = WatchCreateRequest {
                key: PREFIX.into(),
                range_end: prefix_end(PREFIX.as_bytes()),
                ..WatchCreateRequest::default()
            };
            tokio::spawn(async move { client.watch(create).await })
        })
        .collect();
    let mut watches = Vec::new();
    for watch in created {
        watches.push(watch.await.expect("is created"));
    }
    scene.etcd.client().await.put(key(0), "new").await.unwrap();
    for watch in &mut watches {
        let response: WatchResponse = watch.next_as(SOON).await.expect("an event");
        assert_eq!(response.events.len(), 1);
    }
    scene.counts(0, 0.0).await;
    silent.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_of_a_mirror_that_is_behind_fails_at_once_if_so_configured() {
    let etcd = Etcd::start(Version::V3_7).await;
    etcd.client().await.put("/mirrored/a", "1").await.unwrap();
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/mirrored/")
        .with("--freshness-timeout", "300ms")
        .with("--when-behind", "fail")
        .start()
        .await;
    let client = Arc::new(rangecache.client().await);
    let before = rangecache.outcomes().await;
    etcd.pause();
    let question = RangeRequest::one("/mirrored/a");
    let status = client.range(&question).await.unwrap_err();
    assert_eq!(
        (status.code, status.message.as_str()),
        (UNAVAILABLE, "rangecache: the mirror is behind etcd; try again")
    );
    let streamed = client.range_stream(&RangeRequest::prefix("/mirrored/")).await;
    assert_eq!(streamed.unwrap_err().code, UNAVAILABLE);
    let elsewhere = tokio::spawn({
        let client = Arc::clone(&client);
        async move { client.range(&RangeRequest::one("/elsewhere")).await }
    });
    etcd.resume();
    elsewhere.await.unwrap().expect("keys of no mirror are forwarded");
    let outcomes = rangecache.outcomes_since(&before, 2).await;
    let shed = outcomes.0.get(&("shed".to_owned(), "check_failed".to_owned()));
    assert_eq!(shed, Some(&1), "{outcomes:?}");
    until(SOON, "the read is served from memory again", async || {
        client.range(&question).await.ok()
    })
    .await;
}
