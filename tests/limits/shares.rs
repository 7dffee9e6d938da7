//! Bounds on one noisy client: its calls wait or are refused, and other clients are not affected.

use std::sync::Arc;

use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Status};
use testkit::pb::{RangeRequest, RangeResponse};
use testkit::proxy::Rangecache;
use testkit::relay::{HOLD, Relay};
use testkit::wait::{SOON, until};
use tokio::task::JoinHandle;

/// Prefix of keys that no mirror has.
const PREFIX: &str = "/shares/";

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
