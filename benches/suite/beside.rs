//! Watchers that are open beside a load.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use testkit::pb::{WatchCreateRequest, prefix_end};

use crate::client::Connection;
use crate::targets::{Target, connections};
use crate::watchers::Watchers;

/// Streams of one connection.
const PER_CONNECTION: usize = 250;
/// Prefixes of the watched ranges, in turns: pods are written in no case; the cases that write have a thousand keys each,
/// so that about a third of their puts has one watcher.
const PREFIXES: [&str; 3] = [
    "/registry/pods/namespace-00/object-",
    "/registry/leases/object-",
    "/registry/events/object-",
];

/// Open watchers, a stream each; dropping them closes them.
pub(crate) struct Beside {
    _watchers: Watchers,
    _carriers: Vec<Arc<Connection>>,
}

impl Beside {
    /// Opens this number of watchers of distinct ranges.
    pub(crate) async fn open(target: &Target, count: usize) -> Result<Beside> {
        let carriers = connections(target, count.div_ceil(PER_CONNECTION)).await?;
        let mut watchers = Watchers::new(Instant::now());
        for number in 0..count {
            let prefix = format!("{}{number:07}", PREFIXES[number % PREFIXES.len()]);
            let create = WatchCreateRequest {
                range_end: prefix_end(prefix.as_bytes()),
                key: prefix.into(),
                ..WatchCreateRequest::default()
            };
            watchers
                .open(&carriers[number / PER_CONNECTION], vec![create])
                .await?;
        }
        watchers.wait_created().await?;
        Ok(Beside {
            _watchers: watchers,
            _carriers: carriers,
        })
    }
}
