//! The task of a fan-out: follows the log of its mirror, admits watchers, and ends them with the mirror's contents.

use std::sync::{Arc, Weak};
use std::time::Duration;

use etcd_store::cache::{Batch, Missed};
use rangecache_base::{panics::caught, telemetry::Reason};
use tokio::time::Instant;

use super::backlog::{BATCHES_AT_ONCE, Backlog};
use super::handle::{FanOut, Held, JoinRefused, JoinRequest};
use super::reader::{Generation, Reader};
use super::{registry::Registry, topic::Topic};
use crate::view::{LogRead, Mirror, Observed, ReaderEnd};

/// Interval at which trimmed events, gone watchers and unused topics are dropped.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a feed after which the watchers end, so that their clients can use another endpoint.
const WITHOUT_FEED: Duration = Duration::from_secs(10);
/// Time for which readers can take the events of a generation that has ended.
const ENDED_KEPT: Duration = Duration::from_secs(10);
/// Time without a leader after which watches with `hasleader` end: etcd's is three election timeouts.
const WITHOUT_LEADER: Duration = Duration::from_secs(3);

/// Follows `mirror` for `fan_out` until dropped. A panic ends the watchers.
pub(crate) async fn follow(mirror: &Mirror, fan_out: &FanOut) {
    let mut task = HubTask {
        mirror,
        fan_out,
        registry: Registry::new(),
        generation: None,
        ended: Vec::new(),
        feed_lost_since: None,
        next_sweep: Instant::now(),
        is_behind: false,
    };
    while caught(task.run()).await.is_err() {
        tracing::warn!(
            mirror = mirror.name,
            "the fan-out of a mirror's events panicked and is restarted; its watches continue at etcd"
        );
        task.end(ReaderEnd::Dropped(Reason::Panicked)).await;
        tokio::time::sleep(SWEEP_INTERVAL).await;
    }
}

struct HubTask<'a> {
    mirror: &'a Mirror,
    fan_out: &'a FanOut,
    registry: Registry,
    /// The load of the mirror that the topics belong to; `None` without topics.
    generation: Option<Arc<Generation>>,
    /// Topics of generations that have ended, which readers may still take events from, and since when.
    ended: Vec<(Instant, Vec<Weak<Topic>>)>,
    feed_lost_since: Option<Instant>,
    next_sweep: Instant,
    /// Whether the log has more batches than one pass reads.
    is_behind: bool,
}

impl HubTask<'_> {
    async fn run(&mut self) {
        let mut changes = self.mirror.changes();
        loop {
            // Without topics the feed costs nothing here.
            let has_topics = !self.registry.is_empty() || !self.ended.is_empty();
            if self.is_behind {
                tokio::task::yield_now().await;
            } else {
                tokio::select! {
                    () = self.fan_out.called.notified() => {}
                    _ = changes.changed(), if has_topics => {}
                    () = tokio::time::sleep_until(self.next_sweep), if has_topics => {}
                }
            }
            // Before the mirror is observed, so that no change in between is missed.
            changes.mark_unchanged();
            self.pass().await;
        }
    }

    async fn pass(&mut self) {
        let taken = self.generation.as_ref().map(|known| known.reached());
        let (observed, missed) = self.mirror.follow(taken, BATCHES_AT_ONCE);
        self.end_if_dropped(&observed).await;
        if self.fan_out.is_closed() && self.generation.is_some() {
            self.end(ReaderEnd::Dropped(Reason::ForwardAll)).await;
        }
        if let Some(revision) = observed.resumed_at {
            self.registry.cut_ahead_of(revision);
        }
        if let (Some(generation), Some(log)) = (self.generation.clone(), &observed.log) {
            // The log may be too short for a fan-out that had no time in between.
            let is_complete = log.complete_after <= generation.reached();
            match missed.as_ref().and_then(Missed::events) {
                _ if is_complete => self.add(&generation, log).await,
                Some(missed) => {
                    self.registry.miss(missed).await;
                    self.add(&generation, log).await;
                }
                None => self.end(ReaderEnd::Trimmed).await,
            }
        }
        self.admit().await;
        self.signal_reached();
        self.note_feed(&observed).await;
        if self.next_sweep <= Instant::now() || self.registry.has_grown(self.fan_out.bounds()) {
            self.sweep(&observed).await;
            self.next_sweep = Instant::now() + SWEEP_INTERVAL;
        }
    }

    /// Ends the generation if the mirror has dropped its contents since.
    async fn end_if_dropped(&mut self, observed: &Observed) {
        let Some(generation) = &self.generation else {
            return;
        };
        let is_current = |log: &LogRead| log.generation == generation.number;
        if observed.log.as_ref().is_some_and(is_current) {
            return;
        }
        let ended = match observed.ended {
            Some((number, ended)) if number == generation.number => ended,
            // A later load was dropped, too. Its history was not that of the events here.
            Some((_, ended @ ReaderEnd::Replaced { .. })) => ended,
            _ => ReaderEnd::Dropped(Reason::Loading),
        };
        self.end(ended).await;
    }

    /// Ends every watcher.
    async fn end(&mut self, ended: ReaderEnd) {
        if let Some(generation) = self.generation.take() {
            generation.set_end(ended);
        }
        self.registry.wake_all().await;
        self.ended.push((Instant::now(), self.registry.end()));
        *self.fan_out.held.lock() = Held::default();
        self.is_behind = false;
    }

    /// Adds new batches to the topics: readers see them once the generation has reached them, and are woken after that (W5, W17).
    async fn add(&mut self, generation: &Generation, log: &LogRead) {
        for batch in &log.batches {
            self.registry.add_batch(batch).await;
        }
        self.is_behind = log.batches.len() == BATCHES_AT_ONCE;
        let last = log.batches.last().map(Batch::last_revision);
        generation.reach(match last {
            Some(last) if self.is_behind => last,
            _ => log.revision,
        });
        self.registry.wake_touched().await;
    }

    /// Answers the waiting joins.
    async fn admit(&mut self) {
        let requests = std::mem::take(&mut *self.fan_out.joins.lock());
        if requests.is_empty() {
            return;
        }
        let (generation, complete_after) = match self.joinable() {
            Ok(joinable) => joinable,
            Err(refused) => {
                for request in requests {
                    let _ = request.reply.send(Err(refused));
                }
                return;
            }
        };
        let reached = generation.reached();
        let mut backlog = Backlog::new();
        let mut admitted = Vec::new();
        for request in requests {
            let is_trimmed = request
                .watchers
                .iter()
                .any(|join| join.first_revision <= complete_after);
            if request
                .history
                .is_some_and(|history| history != generation.history)
            {
                let _ = request.reply.send(Err(JoinRefused::Replaced));
            } else if is_trimmed {
                let _ = request.reply.send(Err(JoinRefused::Trimmed));
            } else {
                let mut topics = Vec::with_capacity(request.watchers.len());
                for join in &request.watchers {
                    let (number, topic) = self.registry.topic(&join.key, &join.range_end, reached);
                    backlog.add(join, &topic, reached);
                    topics.push((number, topic));
                }
                admitted.push((request, topics));
            }
        }
        let max_bytes = self.fan_out.bounds().max_list_bytes;
        let grown = backlog.complete(self.mirror, generation.number, max_bytes).await;
        self.registry.note_grown(grown);
        for (request, topics) in admitted {
            self.complete_join(&generation, request, &topics);
        }
    }

    /// The generation that watchers can join, and the revision after which its log is complete.
    fn joinable(&mut self) -> Result<(Arc<Generation>, i64), JoinRefused> {
        if self.fan_out.is_closed() {
            return Err(JoinRefused::OutOfService(Reason::ForwardAll));
        }
        let observed = if self.registry.is_empty() {
            self.mirror.follow(Some(i64::MAX), 0).0
        } else {
            self.mirror.observe(i64::MAX, 0)
        };
        if let Some(reason) = observed.out {
            return Err(JoinRefused::OutOfService(reason));
        }
        let log = observed.log.ok_or(JoinRefused::OutOfService(Reason::Loading))?;
        let generation = match &self.generation {
            // Without topics the log was not followed: the first one starts at the mirror's revision.
            _ if self.registry.is_empty() => {
                Arc::new(Generation::new(log.generation, log.history, log.revision))
            }
            Some(generation) if generation.number == log.generation => Arc::clone(generation),
            // The contents were replaced a moment ago; the next pass ends the old generation.
            _ => return Err(JoinRefused::OutOfService(Reason::Loading)),
        };
        self.generation = Some(Arc::clone(&generation));
        Ok((generation, log.complete_after))
    }

    fn complete_join(
        &mut self,
        generation: &Arc<Generation>,
        request: JoinRequest,
        topics: &[(u32, Arc<Topic>)],
    ) {
        let reached = generation.reached();
        let mut readers = Vec::with_capacity(topics.len());
        let mut watchers = Vec::with_capacity(topics.len());
        for (join, (number, topic)) in request.watchers.iter().zip(topics) {
            let through = join.first_revision - 1;
            if topic.complete_after() > through.min(reached) {
                let _ = request.reply.send(Err(JoinRefused::Trimmed));
                return;
            }
            let (reader, watcher) = Reader::new(generation, topic, &request.signal, join);
            readers.push(reader);
            watchers.push((*number, watcher));
        }
        for (number, watcher) in watchers {
            self.registry.add(number, watcher);
        }
        // If the caller does not wait any more, the readers are dropped.
        let _ = request.reply.send(Ok(readers));
    }

    /// Signals the streams that wait for a revision that was reached.
    fn signal_reached(&self) {
        let reached = self.generation.as_ref().map_or(i64::MAX, |known| known.reached());
        self.fan_out.waiting.lock().retain(|(revision, signal)| {
            let is_reached = *revision <= reached;
            if is_reached {
                signal.set();
            }
            !is_reached
        });
    }

    async fn note_feed(&mut self, observed: &Observed) {
        let is_lost = observed.out == Some(Reason::FeedLost);
        if is_lost {
            self.feed_lost_since.get_or_insert_with(Instant::now);
        } else {
            self.feed_lost_since = None;
        }
        if let Some(generation) = &self.generation
            && !generation.set_without_feed(is_lost)
            && is_lost
        {
            // Streams of other rangecaches end now.
            self.registry.wake_all().await;
        }
    }

    /// Drops what readers have left of generations that ended a while ago: a client that does not read must not keep
    /// the events of mirrors that were loaded again.
    fn drop_ended(&mut self, now: Instant) {
        self.ended.retain_mut(|(since, topics)| {
            topics.retain(|topic| topic.strong_count() > 0);
            if now.duration_since(*since) >= ENDED_KEPT {
                for topic in topics.drain(..).filter_map(|topic| topic.upgrade()) {
                    topic.trim_through(i64::MAX);
                }
            }
            !topics.is_empty()
        });
    }

    async fn sweep(&mut self, observed: &Observed) {
        for (_, signal) in self.fan_out.waiting.lock().drain(..) {
            signal.set();
        }
        let now = Instant::now();
        self.drop_ended(now);
        let Some(generation) = self.generation.clone() else {
            return;
        };
        let is_over =
            |since: Option<Instant>, limit| since.is_some_and(|since| now.duration_since(since) >= limit);
        if is_over(self.feed_lost_since, WITHOUT_FEED) {
            self.end(ReaderEnd::FeedLost).await;
            return;
        }
        let has_no_leader = is_over(observed.no_leader_since, WITHOUT_LEADER);
        if generation.set_no_leader(has_no_leader) != has_no_leader {
            self.registry.wake_all().await;
        }
        let complete_after = observed.log.as_ref().map_or(0, |log| log.complete_after);
        let held = self
            .registry
            .sweep(complete_after, generation.reached(), now, self.fan_out.bounds())
            .await;
        *self.fan_out.held.lock() = held;
        if self.registry.is_empty() {
            self.generation = None;
            // From now on the log need not remember what it drops.
            let _ = self.mirror.follow(None, 0);
        }
    }
}
