//! A client that lists everything, or sorts and filters many keys, again and again, on many connections from an address of its
//! own.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use testkit::grpc::Client;
use tokio::task::JoinSet;

use crate::counts::{Counts, RECONNECT_PAUSE};
use crate::dataset;

/// Address of the client.
const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 2));

/// Lists on one connection until dropped, and connects again when it is closed.
pub(crate) async fn run(address: String, counts: Arc<Counts>) {
    let url = format!("http://{address}");
    loop {
        if let Ok(client) = Client::connect_from(ADDRESS, &url).await {
            counts.connections.fetch_add(1, Ordering::Relaxed);
            while client.is_open() {
                for prefix in [dataset::LIST, dataset::HOT, dataset::DIRECT_LIST, dataset::WIDE] {
                    counts.calls.fetch_add(1, Ordering::Relaxed);
                    if client.range(&dataset::all(prefix)).await.is_err() {
                        counts.refused.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
            counts.closed.fetch_add(1, Ordering::Relaxed);
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

/// Scans that each connection has in flight.
const SCANS: usize = 15;

/// Sorts and filters on one connection until dropped, and connects again when it is closed.
pub(crate) async fn scan(address: String, counts: Arc<Counts>) {
    let url = format!("http://{address}");
    loop {
        if let Ok(client) = Client::connect_from(ADDRESS, &url).await {
            counts.connections.fetch_add(1, Ordering::Relaxed);
            let client = Arc::new(client);
            let mut scans = JoinSet::new();
            for number in 0..SCANS {
                let (client, counts) = (Arc::clone(&client), Arc::clone(&counts));
                scans.spawn(async move {
                    // No revision is as high.
                    let nothing = dataset::filtered(i64::MAX);
                    let scan = if number % 3 == 0 {
                        nothing
                    } else {
                        dataset::sorted()
                    };
                    while client.is_open() {
                        counts.calls.fetch_add(1, Ordering::Relaxed);
                        if client.range(&scan).await.is_err() {
                            counts.refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            while scans.join_next().await.is_some() {}
            counts.closed.fetch_add(1, Ordering::Relaxed);
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}
