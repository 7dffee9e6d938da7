//! The feed: the watch that keeps a mirror up to date, alone on its stream and on its connection (I9).
//!
//! | file | subject |
//! |---|---|
//! | `end` | how a feed ends |
//! | `member` | cluster, history and version of the member that feeds a mirror |
//! | `continuity` | the proof that a feed continues the history that the mirror holds (I4) |
//! | `assemble` | whole revisions from watch responses (I3) |
//! | `lag` | how long a mirror has been behind etcd |
//! | `history_check` | whether a connection is of the known history (W10) |

mod assemble;
mod continuity;
mod end;
mod history_check;
mod lag;
mod member;

pub(super) use assemble::{Assembler, Step};
pub(super) use end::FeedEnd;
pub(super) use lag::Lag;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;

use super::history::Before;
use super::load::{LoadCause, LoadedBy};
use super::mirrors::Mirrors;
use super::view::{Anchor, Epoch, Mirror};
use crate::etcdserverpb::watch_client::WatchClient;
use crate::etcdserverpb::watch_request::RequestUnion;
use crate::etcdserverpb::{
    ResponseHeader, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use crate::faults::{self, Fault};
use crate::telemetry::trace::{Span, SpanExt as _};
use crate::upstream::{Connection, gates};
use continuity::{Continuity, Judgement, Proof, compare, compare_base, still_responds};
use lag::Lateness;
use member::{another_history, check_member};

/// Timeout for creating a watch and for a small read.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause between progress requests; it doubles up to [`PROGRESS_PAUSE_LAST`].
const PROGRESS_PAUSE_FIRST: Duration = Duration::from_millis(5);
/// Longest pause between progress requests while a reader waits; kube-apiserver's interval (KEP-2340).
const PROGRESS_PAUSE_LAST: Duration = Duration::from_millis(100);
/// Delay of the first progress request to a feed of the whole keyspace, which receives an event for every revision
/// anyway.
const PROGRESS_DELAY: Duration = Duration::from_millis(10);
/// Shortest time between a progress request and one that a nudge causes.
const NUDGE_INTERVAL: Duration = Duration::from_millis(50);
/// Bound on requests waiting to be written to the stream: one create, then one progress request at a time.
const REQUEST_QUEUE: usize = 8;

/// Follows etcd from the mirror's revision until the feed ends. `loaded_by` is the connection that loaded the mirror,
/// until a feed was created. `span` covers the creation of the watch.
pub(super) async fn follow(
    mirrors: &Mirrors,
    mirror: &Mirror,
    epoch: Epoch,
    connection: &Arc<Connection>,
    loaded_by: &mut LoadedBy,
    span: Option<Box<Span>>,
) -> FeedEnd {
    let opening = async {
        let resumes = loaded_by.is_none();
        let proven = Feed::open(mirrors, mirror, epoch, connection, loaded_by).await?;
        if resumes {
            let revision = mirror.anchor(epoch)?.map_or(0, |anchor| anchor.revision);
            mirrors.others_continue(mirror, revision, connection).await?;
        }
        proven.serve()
    };
    let opened = tokio::select! {
        opened = opening => opened,
        () = mirror.epoch_ended(epoch) => Err(FeedEnd::StaleEpoch),
    };
    if let Some(mut span) = span {
        span.set_endpoint(connection.url());
        match &opened {
            Ok(feed) => span.set("rangecache.revision.served", feed.assembler.revision()),
            Err(end) => span.fail(end.to_string()),
        }
        mirrors.telemetry.tracer.end(*span);
    }
    match opened {
        Ok(feed) => {
            let before = feed.before.clone();
            tokio::select! {
                end = feed.run(mirrors, connection) => match end {
                    Ok(never) => match never {},
                    Err(end) => end,
                },
                () = mirrors.upstream.until_left_out(connection) => another_history(mirrors, &before, 0),
            }
        }
        Err(end) => end,
    }
}

struct Feed<'a> {
    mirror: &'a Mirror,
    epoch: Epoch,
    /// State before the watch was created.
    before: Before,
    requests: mpsc::Sender<WatchRequest>,
    responses: tonic::Streaming<WatchResponse>,
    assembler: Assembler,
    /// Whether progress notifications of the feed's member can be trusted.
    trusts_progress: bool,
}

/// A feed that continues the mirror's history.
struct Proven<'a> {
    feed: Feed<'a>,
    /// What has arrived behind the mirror's revision.
    first: Step,
}

impl<'a> Proven<'a> {
    /// Puts the mirror in service.
    fn serve(self) -> Result<Feed<'a>, FeedEnd> {
        self.feed.mirror.put_in_service(self.feed.epoch)?;
        self.feed.take(self.first)?;
        Ok(self.feed)
    }
}

/// Compares the history behind `connection` with the mirror's contents, by the proofs of a feed, and without a change of
/// the mirror.
///
/// # Errors
/// [`FeedEnd::StaleEpoch`] if it is another one, or the contents were dropped; the others leave it open.
pub(super) async fn compare_history(
    mirrors: &Mirrors,
    mirror: &Mirror,
    connection: &Arc<Connection>,
) -> Result<(), FeedEnd> {
    let (epoch, mut loaded_by) = (mirror.epoch(), None);
    tokio::select! {
        opened = Feed::open(mirrors, mirror, epoch, connection, &mut loaded_by) => opened.map(drop),
        () = mirror.epoch_ended(epoch) => Err(FeedEnd::StaleEpoch),
    }
}

/// A value that does not exist: [`Feed::run`] returns only errors.
enum Never {}

impl<'a> Feed<'a> {
    /// Creates the watch, and proves that it continues the mirror's history.
    async fn open(
        mirrors: &Mirrors,
        mirror: &'a Mirror,
        epoch: Epoch,
        connection: &Arc<Connection>,
        loaded_by: &mut LoadedBy,
    ) -> Result<Proven<'a>, FeedEnd> {
        let anchor = mirror.anchor(epoch)?.ok_or(FeedEnd::StaleEpoch)?;
        let by_events = |compacted| {
            anchor
                .first_event(compacted)
                .map_or(Proof::Comparison, Proof::FirstEvent)
        };
        let mut proof = loaded_by.clone().map_or_else(|| by_events(0), Proof::Load);
        loop {
            let opened = Feed::open_by(mirrors, mirror, epoch, connection, &anchor, &proof).await;
            // What does not prove anything is followed by the next proof.
            let cause = match opened {
                Ok(proven) => {
                    *loaded_by = None;
                    return Ok(proven);
                }
                Err(FeedEnd::Reload(cause @ (LoadCause::Compacted(_) | LoadCause::Unproven), _))
                    if !matches!(proof, Proof::Comparison) =>
                {
                    cause
                }
                Err(end) => return Err(end),
            };
            proof = match (proof, cause) {
                (Proof::Load(_), _) => by_events(0),
                (Proof::FirstEvent(event), LoadCause::Compacted(compacted)) if compacted > event => {
                    by_events(compacted)
                }
                _ => Proof::Comparison,
            };
        }
    }

    /// Creates the watch, and proves by `proof` that it continues the history of `anchor`.
    async fn open_by(
        mirrors: &Mirrors,
        mirror: &'a Mirror,
        epoch: Epoch,
        connection: &Arc<Connection>,
        anchor: &Anchor,
        proof: &Proof,
    ) -> Result<Proven<'a>, FeedEnd> {
        let before = mirrors.cluster_state.before_check();
        let start_revision = match proof {
            Proof::FirstEvent(event) => *event,
            Proof::Load(_) | Proof::Comparison => anchor.revision + 1,
        };
        let (mut feed, created) =
            Feed::create(mirrors, &before, mirror, epoch, connection, start_revision).await?;
        let shown = created.revision;
        let version = check_member(mirrors, &before, mirror, connection, created).await?;
        feed.trusts_progress = version.is_some_and(|version| gates::PROGRESS_NOTIFICATIONS.is_open(version));
        if !feed.trusts_progress {
            feed.may_do_without_progress(mirrors, anchor, proof)?;
        }
        let first = match proof {
            Proof::FirstEvent(event) => {
                let proving = feed.prove(Continuity::new(anchor, *event));
                let proven = tokio::time::timeout(RESPONSE_TIMEOUT, proving).await;
                let first = proven.map_err(|_| {
                    FeedEnd::Lost("the mirror's last event was not delivered again in time".into())
                })??;
                let is_held = match &anchor.base {
                    _ if first.is_none() || anchor.recent_is_full => true,
                    // Few events prove little about what was loaded. Every one since the oldest state was delivered again.
                    Some(base) if base.1 + 1 == *event => compare_base(mirror, base, connection).await?,
                    _ => compare(mirror, epoch, anchor, connection).await?,
                };
                if !is_held {
                    return Err(another_history(mirrors, &before, shown));
                }
                first
            }
            Proof::Load(loaded_by) => {
                let continues = still_responds(mirror, anchor, loaded_by).await?;
                continues.then_some(Step::Wait)
            }
            // After the watch was created: if the revision can still be read, no delete behind it was compacted before
            // (etcd 18089, 19179).
            Proof::Comparison if anchor.ends_with_a_delete() => {
                // A delete leaves nothing to compare.
                return Err(FeedEnd::Reload(
                    LoadCause::Unproven,
                    "the last event can no longer be had from etcd".into(),
                ));
            }
            Proof::Comparison => {
                let is_held = compare(mirror, epoch, anchor, connection).await?;
                is_held.then_some(Step::Wait)
            }
        };
        let Some(first) = first else {
            let may_lack_deletes =
                version.is_none_or(|version| !gates::DELETES_AT_COMPACTION.is_open(version));
            if let Proof::FirstEvent(event) = proof
                && anchor.has_delete_from(*event)
                && may_lack_deletes
            {
                return Err(FeedEnd::Reload(
                    LoadCause::Unproven,
                    "this version of etcd may have compacted the mirror's last event".into(),
                ));
            }
            return Err(another_history(mirrors, &before, shown));
        };
        Ok(Proven { feed, first })
    }

    /// Decides what becomes of a feed whose member's progress notifications cannot be trusted. If this holds for every
    /// endpoint, linearizable reads are forwarded anyway and the mirror follows the events alone.
    fn may_do_without_progress(
        &self,
        mirrors: &Mirrors,
        anchor: &Anchor,
        proof: &Proof,
    ) -> Result<(), FeedEnd> {
        let lowest = mirrors.upstream.lowest_version();
        if lowest.is_some_and(|lowest| gates::PROGRESS_NOTIFICATIONS.is_open(lowest)) {
            return Err(FeedEnd::Lost(
                "progress notifications of the watch's member cannot be trusted".into(),
            ));
        }
        match proof {
            Proof::FirstEvent(_) if anchor.last_event < Some(anchor.revision) => Err(FeedEnd::Reload(
                LoadCause::Unproven,
                "only a progress notification can show that there are no other events".into(),
            )),
            _ => Ok(()),
        }
    }

    /// Creates a watch of the mirror's scope from `start_revision`; also returns the header of the first response.
    async fn create(
        mirrors: &Mirrors,
        before: &Before,
        mirror: &'a Mirror,
        epoch: Epoch,
        connection: &Arc<Connection>,
        start_revision: i64,
    ) -> Result<(Feed<'a>, ResponseHeader), FeedEnd> {
        let (channel, origin) = connection.own_channel();
        let mut client = WatchClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        let (requests, queue) = mpsc::channel(REQUEST_QUEUE);
        let create = WatchCreateRequest {
            key: mirror.scope.key(),
            range_end: mirror.scope.range_end(),
            start_revision,
            fragment: true,
            ..WatchCreateRequest::default()
        };
        send(&requests, RequestUnion::CreateRequest(create)).await?;
        let mut call = tonic::Request::new(ReceiverStream::new(queue));
        // Makes a member that has lost its leader end the watch instead of leaving it silent.
        call.metadata_mut()
            .insert("hasleader", MetadataValue::from_static("true"));
        let opening = async {
            let mut responses = client.watch(call).await?.into_inner();
            let created = responses.message().await?;
            Ok::<_, tonic::Status>((responses, created))
        };
        let (responses, created) = tokio::time::timeout(RESPONSE_TIMEOUT, opening)
            .await
            .map_err(|_| FeedEnd::Lost("no response to a watch request in time".into()))??;
        let created = created.ok_or_else(|| FeedEnd::Lost("the watch ended at once".into()))?;
        if created.canceled || !created.created {
            connection
                .credentials()
                .check_watch_rejected(&created.cancel_reason);
            return Err(cancelled(&created));
        }
        let feed = Feed {
            mirror,
            epoch,
            before: before.clone(),
            requests,
            responses,
            assembler: Assembler::new(start_revision - 1, mirrors.budget_of(mirror)),
            trusts_progress: false,
        };
        Ok((feed, created.header.unwrap_or_default()))
    }

    /// Waits until the responses show whether the feed continues the mirror's history. If it does, returns what has
    /// arrived behind the mirror's revision. The caller bounds the wait.
    async fn prove(&mut self, mut continuity: Continuity<'_>) -> Result<Option<Step>, FeedEnd> {
        let mut pause = PROGRESS_PAUSE_FIRST;
        loop {
            // Without events behind the last one only a progress notification shows that there are none.
            let Ok(response) = tokio::time::timeout(pause, self.responses.message()).await else {
                send(
                    &self.requests,
                    RequestUnion::ProgressRequest(WatchProgressRequest {}),
                )
                .await?;
                pause = (pause * 2).min(PROGRESS_PAUSE_LAST);
                continue;
            };
            let response = response?.ok_or_else(|| FeedEnd::Lost("etcd ended the watch".into()))?;
            let Some(step) = self.step(&response)? else {
                continue;
            };
            let judgement = match &step {
                Step::Wait | Step::Fenced(_) => Judgement::Open,
                Step::Apply { changes, .. } => continuity.events(changes),
                Step::Advance(revision) => continuity.progress(*revision),
            };
            match judgement {
                Judgement::Open => {}
                Judgement::Another(explanation) => {
                    tracing::debug!(
                        mirror = self.mirror.name,
                        explanation,
                        "the feed is of another history"
                    );
                    return Ok(None);
                }
                Judgement::Continues => {
                    self.assembler.raise(continuity.revision());
                    return Ok(Some(step.behind(continuity.revision())));
                }
            }
        }
    }

    async fn run(mut self, mirrors: &Mirrors, connection: &Connection) -> Result<Never, FeedEnd> {
        let mut wanted = self.mirror.wanted();
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
                let delay = if self.mirror.scope.is_everything() {
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
                    let response = response?.ok_or_else(|| FeedEnd::Lost("etcd ended the watch".into()))?;
                    let before = self.assembler.revision();
                    if let Some(step) = self.step(&response)? {
                        self.take(step)?;
                    }
                    // A progress notification at an old revision shows nothing but that the member is there.
                    if !response.events.is_empty() || self.assembler.revision() > before {
                        lateness.record_advance();
                    }
                    if !mirrors.within_budget(self.mirror) {
                        return Err(FeedEnd::OverBudget);
                    }
                }
                () = self.mirror.epoch_ended(self.epoch) => return Err(FeedEnd::StaleEpoch),
                changed = wanted.changed() => {
                    changed.map_err(|_| FeedEnd::StaleEpoch)?;
                }
                () = self.mirror.nudged(), if self.trusts_progress && nudge_due.is_none() => {
                    nudge_due = Some(last_request + NUDGE_INTERVAL);
                }
                () = tokio::time::sleep_until(due.unwrap_or(last_request)), if due.is_some() => {
                    if let (Some(_), Some(explanation)) = (next_request, lateness.is_too_late(mirrors, connection)) {
                        return Err(FeedEnd::Lost(explanation.into()));
                    }
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

    async fn request_progress(&self) -> Result<(), FeedEnd> {
        self.mirror.record_progress_request();
        send(
            &self.requests,
            RequestUnion::ProgressRequest(WatchProgressRequest {}),
        )
        .await
    }

    /// What one response does: events, a fragment of them, or progress. `None` if it has no effect.
    fn step(&mut self, response: &WatchResponse) -> Result<Option<Step>, FeedEnd> {
        faults::trip(Fault::Feed);
        if response.canceled {
            return Err(cancelled(response));
        }
        let is_progress = response.events.is_empty() && !response.fragment;
        if response.created || (is_progress && !self.trusts_progress) {
            return Ok(None);
        }
        let step = self.assembler.add(response);
        let step = step.map_err(|error| FeedEnd::Reload(LoadCause::Malformed, error.to_string()))?;
        Ok(Some(step))
    }

    /// Changes the mirror.
    fn take(&self, step: Step) -> Result<(), FeedEnd> {
        match step {
            Step::Wait => {}
            Step::Apply { changes, revision } => {
                self.mirror.apply(self.epoch, changes, revision)?;
            }
            Step::Advance(revision) => self.mirror.advance(self.epoch, revision)?,
            Step::Fenced(events) => {
                self.mirror.metrics.events_fenced.inc_by(events);
            }
        }
        Ok(())
    }
}

async fn send(requests: &mpsc::Sender<WatchRequest>, request: RequestUnion) -> Result<(), FeedEnd> {
    let request = WatchRequest {
        request_union: Some(request),
    };
    match tokio::time::timeout(RESPONSE_TIMEOUT, requests.send(request)).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(FeedEnd::Lost("the watch accepts no requests".into())),
    }
}

fn cancelled(response: &WatchResponse) -> FeedEnd {
    if response.compact_revision > 0 {
        return FeedEnd::Reload(
            LoadCause::Compacted(response.compact_revision),
            format!(
                "etcd has compacted up to {} past the mirror",
                response.compact_revision
            ),
        );
    }
    FeedEnd::Lost(format!("etcd cancelled the watch: {}", response.cancel_reason))
}
