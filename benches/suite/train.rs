//! A mix of what rangecache does, for a compiler that learns from it (`make pgo`): loads, reads alone and in flight, lists, pages,
//! writes and watches. Sent to one rangecache, which ends by itself afterwards, so that it writes what it has counted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use testkit::pb::{WatchCreateRequest, prefix_end};

use crate::cases::puts::put;
use crate::cases::{Suite, progress};
use crate::client::{Connection, Windows};
use crate::dataset::Dataset;
use crate::load::{self, Op, Shape};
use crate::processes;
use crate::targets::Setup;
use crate::watchers::Watchers;

/// Duration of each load.
const DURATION: Duration = Duration::from_secs(4);
/// Time in which rangecache has to end.
const END_DEADLINE: Duration = Duration::from_secs(60);
const WATCHERS: usize = 100;
const WATCHED: &str = "/registry/leases/";

const SMALL: Dataset = Dataset {
    prefix: "/registry/events/",
    keys: 50_000,
    value_bytes: 100,
};
const MEDIUM: Dataset = Dataset {
    prefix: "/registry/pods/",
    keys: 20_000,
    value_bytes: 1 << 10,
};
const LARGE: Dataset = Dataset {
    prefix: "/registry/crds/",
    keys: 2_000,
    value_bytes: 10 << 10,
};

/// Runs the mix.
pub(crate) async fn run(suite: &Suite) -> Result<()> {
    let setup = Setup::start(&suite.binaries, suite.options).await?;
    let etcd = setup.connect().await?;
    for data in [&SMALL, &MEDIUM, &LARGE] {
        data.fill(&etcd, 0).await?;
    }
    let folder = tempfile::Builder::new().prefix("rangecache-bench-").tempdir()?;
    let mut process =
        processes::start_rangecache(&suite.binaries, folder.path(), &[setup.endpoint()], &[], &[]).await?;
    process.wait_ready().await?;
    let mut connections = Vec::new();
    for _ in 0..8 {
        connections.push(Arc::new(Connection::open(process.address, Windows::LARGE).await?));
    }
    let gets = [MEDIUM.gets(), SMALL.gets()].concat();
    let lists = [SMALL.list(), MEDIUM.list(), LARGE.list()].concat();
    let pages = [MEDIUM.first_page(500), MEDIUM.count(), SMALL.count()].concat();
    let puts: Vec<Op> = (0..64)
        .map(|key| put(&format!("{WATCHED}{key}"), 1 << 10))
        .collect();
    let loads: [(&str, &[Op], usize, usize); 7] = [
        ("GETs alone", &gets, 1, 1),
        ("GETs in flight", &gets, 1, 64),
        ("GETs over several connections", &gets, 8, 64),
        ("lists", &lists, 4, 4),
        ("pages and counts", &pages, 2, 8),
        ("PUTs alone", &puts, 1, 1),
        ("PUTs in flight", &puts, 8, 64),
    ];
    let epoch = Instant::now();
    let mut watchers = Watchers::new(epoch);
    for number in 0..WATCHERS {
        let create = WatchCreateRequest {
            key: WATCHED.into(),
            range_end: prefix_end(WATCHED.as_bytes()),
            prev_kv: number % 2 == 0,
            ..WatchCreateRequest::default()
        };
        watchers
            .open(&connections[number % connections.len()], vec![create])
            .await?;
    }
    watchers.wait_created().await?;
    for (name, ops, connected, in_flight) in loads {
        progress(name);
        let shape = Shape {
            connections: connected,
            in_flight,
            duration: DURATION,
            min_calls: 1,
        };
        let outcome = load::closed_loop(&connections[..connected], shape, &Arc::new(ops.to_vec())).await?;
        ensure!(
            outcome.errors == 0,
            "{name} failed: {}",
            outcome.first_error.unwrap_or_default()
        );
        println!("{name}: {} calls", outcome.calls);
    }
    let events = watchers.finish(epoch).await?.calls;
    println!("watches: {events} events");
    process.terminate(END_DEADLINE).await
}
