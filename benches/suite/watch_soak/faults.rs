//! Faults during the soak, in a fixed order, repeatedly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use testkit::etcd::Cluster;
use testkit::fault_link::{Condition, FaultLink};

use super::shared::Shared;

/// Time between two faults.
const PAUSE: Duration = Duration::from_secs(8);
/// Duration for which the link of the feed is cut.
const CUT: Duration = Duration::from_secs(2);
/// Duration for which a member is down.
const DOWN: Duration = Duration::from_secs(5);
/// Time after a fault during which reads still count as affected.
const AFTERMATH: Duration = Duration::from_secs(1);
/// Revisions that a compaction leaves: twenty seconds of puts, less than some readers stall.
const KEPT_REVISIONS: i64 = 10_000;

/// The cluster, and the links between it and rangecache.
pub(super) struct Faults {
    cluster: Cluster,
    links: Vec<FaultLink>,
    shared: Arc<Shared>,
}

impl Faults {
    pub(super) fn new(cluster: Cluster, links: Vec<FaultLink>, shared: Arc<Shared>) -> Faults {
        Faults {
            cluster,
            links,
            shared,
        }
    }

    /// Fails until `stop` is set. The first member, whose watch all others are compared with, is never killed.
    pub(super) async fn run(mut self, stop: &AtomicBool) -> Self {
        let mut round = 0;
        loop {
            for step in 0..4 {
                if is_stopped_within(PAUSE, stop).await {
                    return self;
                }
                self.shared.in_fault.store(true, Ordering::Relaxed);
                match step {
                    0 => self.cut_feed().await,
                    2 => self.kill(1 + round % 2).await,
                    _ => self.compact().await,
                }
                tokio::time::sleep(AFTERMATH).await;
                self.shared.in_fault.store(false, Ordering::Relaxed);
            }
            round += 1;
        }
    }

    /// Cuts the link that carries the feed.
    async fn cut_feed(&self) {
        let carriers: Vec<_> = self.links.iter().filter(|link| link.feeds() > 0).collect();
        println!("      cut: {} links with a feed", carriers.len());
        for link in &carriers {
            link.set(Condition::Cut);
        }
        tokio::time::sleep(CUT).await;
        for link in &carriers {
            link.set(Condition::Normal);
        }
    }

    async fn kill(&mut self, member: usize) {
        let leader = self.cluster.leader().await;
        println!(
            "      killed: member {member}{}",
            if leader == Some(member) {
                ", the leader"
            } else {
                ""
            }
        );
        self.cluster.members[member].stop();
        tokio::time::sleep(DOWN).await;
        self.cluster.members[member].run();
        self.cluster.members[member].ready().await;
    }

    async fn compact(&self) {
        let revision = self.shared.truth.known() - KEPT_REVISIONS;
        if revision <= self.shared.truth.base {
            return;
        }
        // Before etcd begins: a watcher may be cancelled at any time from now on.
        self.shared.compacted.store(revision, Ordering::Relaxed);
        let client = self.cluster.members[0].client().await;
        match client.compact(revision).await {
            Ok(()) => println!("      compacted up to {revision}"),
            Err(error) => println!("      not compacted: {error:?}"),
        }
    }
}

/// Waits; returns early if `stop` is set.
async fn is_stopped_within(pause: Duration, stop: &AtomicBool) -> bool {
    for _ in 0..pause.as_millis() / 100 {
        if stop.load(Ordering::Relaxed) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    stop.load(Ordering::Relaxed)
}
