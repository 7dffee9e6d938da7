//! Events that joining watchers need and their topics do not have yet: collected by one pass over the log, whatever
//! the number of watchers.

use std::sync::Arc;

use etcd_store::{cache::Batch, keyspace::Interval};

use super::topic::{Pick, Topic};
use super::{collector::EventCollector, join::Join};
use crate::view::Mirror;

/// Batches that are cloned at once under the mirror's lock.
pub(super) const BATCHES_AT_ONCE: usize = 256;
/// Events after which other tasks run.
const YIELD_AFTER_EVENTS: usize = 1000;

/// A topic that is to be completed.
#[derive(Debug)]
struct JoiningTopic {
    topic: Arc<Topic>,
    /// Events above this revision are needed, up to `up_to`.
    after: i64,
    up_to: i64,
    picks: Vec<Pick>,
}

/// Topics of joining watchers that have to be completed from the log.
#[derive(Debug)]
pub(super) struct Backlog {
    collector: EventCollector,
    topics: Vec<JoiningTopic>,
    /// Memory of what was collected, in bytes.
    picked_bytes: u64,
}

impl Backlog {
    pub(super) fn new() -> Backlog {
        Backlog {
            collector: EventCollector::new(),
            topics: Vec::new(),
            picked_bytes: 0,
        }
    }

    /// Adds what `join` needs of `topic`, whose events up to `reached` exist.
    pub(super) fn add(&mut self, join: &Join, topic: &Arc<Topic>, reached: i64) {
        let (after, up_to) = ((join.first_revision - 1).min(reached), topic.complete_after());
        if after >= up_to {
            return;
        }
        let interval = Interval::from_request(&join.key, &join.range_end);
        if let Some(number) = self.collector.get(&interval) {
            if let Some(known) = self.topics.get_mut(number as usize) {
                known.after = known.after.min(after);
            }
            return;
        }
        let Ok(number) = u32::try_from(self.topics.len()) else {
            return;
        };
        self.collector.insert(&interval, number);
        self.topics.push(JoiningTopic {
            topic: Arc::clone(topic),
            after,
            up_to,
            picks: Vec::new(),
        });
    }

    /// Completes the topics from the log of `mirror` in `generation`, and returns the memory of the events, in bytes. A topic
    /// that the log does not reach back to remains as it is; all do if together they would take more than `max_bytes`.
    pub(super) async fn complete(mut self, mirror: &Mirror, generation: u64, max_bytes: u64) -> u64 {
        let Some(mut position) = self.topics.iter().map(|topic| topic.after).min() else {
            return 0;
        };
        let up_to = self.topics.iter().map(|topic| topic.up_to).max().unwrap_or(0);
        let (mut missing_up_to, mut looked_up) = (i64::MIN, 0);
        while position < up_to {
            let observed = mirror.observe(position, BATCHES_AT_ONCE);
            let Some(log) = observed.log.filter(|log| log.generation == generation) else {
                return 0;
            };
            // What is trimmed after it was read does not matter.
            if log.complete_after > position {
                missing_up_to = log.complete_after;
            }
            let Some(last) = log.batches.last().map(Batch::last_revision) else {
                break;
            };
            for batch in &log.batches {
                self.add_batch(batch, &mut looked_up).await;
                if self.picked_bytes > max_bytes {
                    return 0;
                }
            }
            position = last;
        }
        for incomplete in self.topics {
            if incomplete.after >= missing_up_to {
                incomplete.topic.extend_back(incomplete.picks, incomplete.after);
            }
        }
        self.picked_bytes
    }

    async fn add_batch(&mut self, batch: &Batch, looked_up: &mut usize) {
        for (piece, changes) in batch.changes().chunks(YIELD_AFTER_EVENTS).enumerate() {
            self.collector.look_up(changes, piece * YIELD_AFTER_EVENTS);
            *looked_up += changes.len();
            if *looked_up >= YIELD_AFTER_EVENTS {
                *looked_up = 0;
                tokio::task::yield_now().await;
            }
        }
        let (topics, picked_bytes) = (&mut self.topics, &mut self.picked_bytes);
        self.collector.end_batch(|number, positions| {
            let Some(incomplete) = topics.get_mut(number as usize) else {
                return;
            };
            let changes = batch.changes();
            let is_needed = |position: &u32| {
                changes.get(*position as usize).is_some_and(|change| {
                    let revision = change.revision();
                    revision > incomplete.after && revision <= incomplete.up_to
                })
            };
            let needed: Vec<u32> = positions.iter().copied().filter(is_needed).collect();
            let pick = Pick::new(batch, &needed);
            *picked_bytes += pick.as_ref().map_or(0, Pick::memory_bytes);
            incomplete.picks.extend(pick);
        });
    }
}
