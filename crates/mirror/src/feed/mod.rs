//! The feed: the watch that keeps a mirror up to date, alone on its stream and on its connection (I9).
//!
//! | file | subject |
//! |---|---|
//! | `opening` | creating the watch, and the evidence that it continues the mirror's history (I4) |
//! | `member` | cluster, history and version of the member that feeds a mirror; how a feed ends |
//! | `history_check` | whether a connection is of the known history (W10) |
//! | `assemble` | whole revisions from watch responses (I3); responses that are there together are applied together |
//! | `replaced` | values that events replace and that memory does not hold |
//! | `lag` | how long a mirror has been behind etcd |

mod assemble;
mod history_check;
mod lag;
mod member;
mod opening;
mod replaced;

use std::time::Duration;

use etcd_wire::etcdserverpb::WatchResponse;
use futures_util::FutureExt as _;
use tokio::time::Instant;

use super::{load::LoadedBy, memory::make_room};
use assemble::Burst;
use history_check::others_continue;
use lag::Lateness;
use opening::{PROGRESS_PAUSE_FIRST, PROGRESS_PAUSE_LAST};

pub(super) use history_check::is_of_history;
pub(super) use lag::Lag;
pub(super) use member::{FeedEnd, Feeding};
pub(super) use opening::Feed;

pub use opening::RESPONSE_TIMEOUT;

#[cfg(any(test, fuzzing, feature = "testing"))]
pub(super) use assemble::{Assembler, Step};

/// Delay of the first progress request to a feed of the whole keyspace, which receives an event for every revision
/// anyway.
const PROGRESS_DELAY: Duration = Duration::from_millis(10);
/// Shortest time between a progress request and one that a nudge causes.
const NUDGE_INTERVAL: Duration = Duration::from_millis(50);

impl<'a> Feeding<'a> {
    /// Creates a watch from the mirror's revision, and puts the mirror in service once it is proven to continue the mirror's
    /// history. `loaded_by` is the connection that loaded the mirror, until a feed was created.
    ///
    /// # Errors
    /// [`FeedEnd`]
    pub(super) async fn open(self, loaded_by: &mut LoadedBy) -> Result<Feed<'a>, FeedEnd> {
        let opening = async {
            let resumes = loaded_by.is_none();
            let (feed, first) = Feed::open(self, loaded_by).await?;
            if resumes {
                let anchor = self.mirror.anchor(self.epoch)?;
                others_continue(self, anchor.map_or(0, |anchor| anchor.revision)).await?;
            }
            feed.serve(first)
        };
        tokio::select! {
            opened = opening => opened,
            () = self.mirror.epoch_ended(self.epoch) => Err(FeedEnd::StaleEpoch),
        }
    }
}

/// A value that does not exist: [`Feed::run`] returns only errors.
enum Never {}

impl Feed<'_> {
    /// Revision up to which the feed has delivered every event.
    pub(super) fn revision(&self) -> i64 {
        self.assembler.revision()
    }

    /// Follows etcd until the feed ends.
    pub(super) async fn follow(self) -> FeedEnd {
        let (feeding, before) = (self.feeding, self.before.clone());
        tokio::select! {
            end = self.run() => match end {
                Ok(never) => match never {},
                Err(end) => end,
            },
            () = feeding.upstream.until_left_out(feeding.connection) => feeding.another_history(&before, 0),
            () = feeding.upstream.until_preferred_serves(feeding.connection.url()) => {
                FeedEnd::Lost("an endpoint serves again that is preferred to this fallback".into())
            }
            () = feeding.connection.until_removed() => FeedEnd::Lost("its endpoint is used no more".into()),
        }
    }

    /// Adds `response`, and those that are there already, to `burst`.
    fn receive(
        &mut self,
        mut response: Result<Option<WatchResponse>, tonic::Status>,
        burst: &mut Burst,
    ) -> Result<(), FeedEnd> {
        loop {
            let received = response?.ok_or_else(|| FeedEnd::Lost("etcd ended the watch".into()))?;
            burst.has_events |= !received.events.is_empty();
            if let Some(step) = self.step(&received)? {
                burst.add(step);
            }
            if burst.is_full() {
                return Ok(());
            }
            match self.responses.message().now_or_never() {
                Some(next) => response = next,
                None => return Ok(()),
            }
        }
    }

    async fn run(mut self) -> Result<Never, FeedEnd> {
        let Feeding {
            set,
            upstream,
            mirror,
            epoch,
            connection,
        } = self.feeding;
        let mut wanted = mirror.wanted();
        let mut pause = PROGRESS_PAUSE_FIRST;
        let mut next_request: Option<Instant> = None;
        let mut last_request = Instant::now();
        let mut nudge_due: Option<Instant> = None;
        let mut lateness = Lateness::new();
        loop {
            let revision = *wanted.borrow_and_update();
            let behind = lateness.is_behind(revision, self.assembler.revision());
            if !behind || !self.trusts_progress {
                next_request = None;
                pause = PROGRESS_PAUSE_FIRST;
            } else if next_request.is_none() {
                let delay = if mirror.scope.is_everything() {
                    PROGRESS_DELAY
                } else {
                    Duration::ZERO
                };
                next_request = Some(Instant::now() + delay);
            }
            let due = next_request.into_iter().chain(nudge_due).min();
            tokio::select! {
                // Responses first: while there are any, no progress request is needed.
                biased;
                response = self.responses.message() => {
                    let before = self.assembler.revision();
                    let mut burst = Burst::default();
                    let received = self.receive(response, &mut burst);
                    // A progress notification at an old revision shows nothing but that the member is there.
                    if burst.has_events || self.assembler.revision() > before {
                        lateness.record_advance();
                    }
                    // Also what arrived before an end: watchers get it, and the next feed need not.
                    self.take(burst)?;
                    received?;
                    if !make_room(set, mirror, epoch).await? {
                        return Err(FeedEnd::OverBudget);
                    }
                    if !self.brings_replaced && !mirror.metrics.has_all_values() {
                        return Err(replaced::lacks_values());
                    }
                }
                () = mirror.epoch_ended(epoch) => return Err(FeedEnd::StaleEpoch),
                changed = wanted.changed() => {
                    changed.map_err(|_| FeedEnd::StaleEpoch)?;
                }
                () = mirror.nudged(), if self.trusts_progress && nudge_due.is_none() => {
                    nudge_due = Some(last_request + NUDGE_INTERVAL);
                }
                () = tokio::time::sleep_until(due.unwrap_or(last_request)), if due.is_some() => {
                    if let (Some(_), Some(explanation)) = (next_request, lateness.is_too_late(upstream, connection)) {
                        return Err(FeedEnd::Lost(explanation.into()));
                    }
                    mirror.record_progress_request();
                    self.request_progress().await?;
                    (last_request, nudge_due) = (Instant::now(), None);
                    if next_request.is_some() {
                        next_request = Some(last_request + pause);
                        pause = (pause * 2).min(PROGRESS_PAUSE_LAST);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
