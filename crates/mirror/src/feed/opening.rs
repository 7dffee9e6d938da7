//! Opening of a feed: creates the watch, and finds evidence that it continues the mirror's history. A feed resumes *at* the newest events
//! that it delivered, so that they are delivered again (the table in `lineage/judge.rs`).

use std::{sync::Arc, time::Duration};

use etcd_store::cache::Tree;
use etcd_wire::etcdserverpb::{
    RangeRequest, ResponseHeader, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use etcd_wire::etcdserverpb::{watch_client::WatchClient, watch_request::RequestUnion};
use etcd_wire::grpc::metadata::FEED;
use rangecache_base::faults::{self, Fault};
use rangecache_upstream::{Connection, gates, header_request, is_compaction, is_future_revision, range};
use tokio::sync::mpsc;
use tonic::{codegen::tokio_stream::wrappers::ReceiverStream, metadata::MetadataValue};

use super::assemble::{Assembler, Burst, Step};
use super::member::{FeedEnd, FeedMember, Feeding};
use super::replaced;
use crate::lineage::{Anchor, Before, EventComparison, Evidence, Keys, Verdict};
use crate::load::{LoadCause, LoadedBy};
use crate::view::Mirror;

/// Timeout for creating a watch, for the events by which it is judged, and for a small read.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause between progress requests; it doubles up to [`PROGRESS_PAUSE_LAST`].
pub(super) const PROGRESS_PAUSE_FIRST: Duration = Duration::from_millis(5);
/// Longest pause between progress requests while a reader waits; kube-apiserver's interval (KEP-2340).
pub(super) const PROGRESS_PAUSE_LAST: Duration = Duration::from_millis(100);
/// Bound on requests waiting to be written to the stream: one create, then one progress request at a time.
const REQUEST_QUEUE: usize = 8;

/// A watch that may continue the mirror's history.
#[derive(Debug)]
pub(crate) struct Feed<'a> {
    pub(super) feeding: Feeding<'a>,
    /// State before the watch was created.
    pub(super) before: Before,
    requests: mpsc::Sender<WatchRequest>,
    pub(super) responses: tonic::Streaming<WatchResponse>,
    pub(super) assembler: Assembler,
    /// Whether progress notifications of the feed's member can be trusted.
    pub(super) trusts_progress: bool,
    /// Whether events bring what they replace (`prev_kv`).
    pub(super) brings_replaced: bool,
}

/// Compares the history behind `connection` with the mirror's contents, by the proofs of a feed, and without a change of
/// the mirror.
///
/// # Errors
/// [`FeedEnd::StaleEpoch`] if it is another one, or the contents were dropped; the others leave it open.
pub(super) async fn compare_history(feeding: Feeding<'_>) -> Result<(), FeedEnd> {
    let mut loaded_by = None;
    tokio::select! {
        opened = Feed::open(feeding, &mut loaded_by) => opened.map(drop),
        () = feeding.mirror.epoch_ended(feeding.epoch) => Err(FeedEnd::StaleEpoch),
    }
}

impl<'a> Feed<'a> {
    /// Creates the watch, and finds evidence that it continues the mirror's history. Returns its first step, without the events that the
    /// mirror has. `loaded_by` is the connection that loaded the mirror, until a feed was created.
    pub(super) async fn open(
        feeding: Feeding<'a>,
        loaded_by: &mut LoadedBy,
    ) -> Result<(Feed<'a>, Step), FeedEnd> {
        let anchor = feeding.mirror.anchor(feeding.epoch)?.ok_or(FeedEnd::StaleEpoch)?;
        let lineages = feeding.connection.proven_lineages();
        let (mut compacted, mut shows_nothing) = (0, FeedEnd::StaleEpoch);
        for evidence in anchor.evidence(loaded_by.clone()) {
            if matches!(evidence, Evidence::Events(first) if first < compacted) {
                continue;
            }
            match Feed::open_by(feeding, &anchor, &evidence).await {
                Ok(opened) => {
                    let lineage = match &evidence {
                        Evidence::Loader(loader) => loader.standing().map(|standing| standing.lineage),
                        Evidence::Events(_) | Evidence::Keys => feeding.connection.lineage_since(&lineages),
                    };
                    feeding.note_lineage(lineage)?;
                    *loaded_by = None;
                    return Ok(opened);
                }
                Err(end @ FeedEnd::Reload(cause @ (LoadCause::Compacted(_) | LoadCause::Unproven), _)) => {
                    compacted = match (evidence, cause) {
                        (Evidence::Loader(_), _) => 0,
                        (_, LoadCause::Compacted(revision)) => revision,
                        // No other events show more.
                        _ => i64::MAX,
                    };
                    shows_nothing = end;
                }
                Err(end) => return Err(end),
            }
        }
        Err(shows_nothing)
    }

    /// Creates the watch, and judges by `evidence` whether it continues the history of `anchor`.
    ///
    /// # Errors
    /// [`FeedEnd::Reload`] if the evidence shows nothing.
    async fn open_by(
        feeding: Feeding<'a>,
        anchor: &Anchor,
        evidence: &Evidence,
    ) -> Result<(Feed<'a>, Step), FeedEnd> {
        let before = feeding.set.cluster_state.before_check();
        let start_revision = match evidence {
            Evidence::Events(first) => *first,
            Evidence::Loader(_) | Evidence::Keys => anchor.revision + 1,
        };
        let brings_replaced = !anchor.tree.summary().has_all_values();
        let (mut feed, created) = Feed::create(feeding, &before, start_revision, brings_replaced).await?;
        let shown = created.revision;
        let member = feeding.check_member(&before, created).await?;
        feed.trusts_progress = member.has_true_progress;
        if !feed.trusts_progress {
            feed.may_do_without_progress(anchor, evidence)?;
        }
        let first = match evidence {
            Evidence::Loader(loader) => {
                let continues = still_responds(feeding.mirror, anchor, loader).await?;
                continues.then_some(Step::Wait)
            }
            Evidence::Events(first) => feed.judge_events(anchor, *first, member).await?,
            // After the watch was created: if the revision can still be read, no delete behind it was compacted before
            // (etcd 18089, 19179).
            Evidence::Keys if anchor.ends_with_a_delete() => {
                return Err(unproven("the last event can no longer be had from etcd"));
            }
            Evidence::Keys => feed.holds_newest_state(anchor).await?.then_some(Step::Wait),
        };
        match first {
            Some(first) => Ok((feed, first)),
            None => Err(feeding.another_history(&before, shown)),
        }
    }

    /// Judges the events that are delivered again from revision `first` on, and where they are few, what was loaded. Returns what follows
    /// them; `None` if the history is another one.
    async fn judge_events(
        &mut self,
        anchor: &Anchor,
        first: i64,
        member: FeedMember,
    ) -> Result<Option<Step>, FeedEnd> {
        let proving = self.compare_events(EventComparison::new(anchor, first));
        let compared = tokio::time::timeout(RESPONSE_TIMEOUT, proving).await;
        let compared = compared
            .map_err(|_| FeedEnd::Lost("the mirror's last event was not delivered again in time".into()))??;
        let step = match compared {
            Ok(step) => step,
            // It was the first event then: those of later revisions show more.
            Err(Verdict::LacksDelete(revision)) if member.may_lack_deletes => {
                return Err(compacted_past(revision));
            }
            Err(verdict) => {
                tracing::debug!(
                    mirror = self.feeding.mirror.name,
                    explanation = verdict.explanation(),
                    "the feed is of another history"
                );
                return Ok(None);
            }
        };
        let is_held = match &anchor.base {
            _ if anchor.proves_by_events_from(first) => true,
            // Few events prove little about what was loaded. Every one since the oldest state was delivered again.
            Some((tree, revision)) if revision + 1 == first => self.holds(tree, *revision).await?,
            _ => self.holds_newest_state(anchor).await?,
        };
        Ok(is_held.then_some(step))
    }

    /// Whether etcd holds the mirror's newest state. If it does, memory forgets its older states: they may be others.
    async fn holds_newest_state(&self, anchor: &Anchor) -> Result<bool, FeedEnd> {
        let Feeding { mirror, epoch, .. } = self.feeding;
        let is_held = self.holds(&anchor.tree, anchor.revision).await?;
        if is_held {
            mirror.forget_before(epoch, anchor.revision)?;
        }
        Ok(is_held)
    }

    /// Whether etcd holds the keys of `tree` at `revision`, as far as the newest of them and their number show.
    ///
    /// # Errors
    /// [`FeedEnd::Reload`] if etcd has compacted the revision, [`FeedEnd::Lost`] if it does not respond.
    async fn holds(&self, tree: &Tree, revision: i64) -> Result<bool, FeedEnd> {
        let Feeding {
            mirror, connection, ..
        } = self.feeding;
        let keys = Keys {
            tree: tree.clone(),
            from: mirror.scope.key(),
            end: mirror.scope.range_end(),
            revision,
        };
        keys.are_held_by(connection).await.map_err(|status| {
            if is_compaction(&status) {
                compacted_past(revision)
            } else {
                status.into()
            }
        })
    }

    /// Decides what becomes of a feed whose member's progress notifications cannot be trusted. If this holds for every
    /// endpoint, linearizable reads are forwarded anyway and the mirror follows the events alone.
    fn may_do_without_progress(&self, anchor: &Anchor, evidence: &Evidence) -> Result<(), FeedEnd> {
        let lowest = self.feeding.upstream.lowest_version();
        if lowest.is_some_and(|lowest| gates::PROGRESS_NOTIFICATIONS.is_open(lowest)) {
            return Err(FeedEnd::Lost(
                "progress notifications of the watch's member cannot be trusted".into(),
            ));
        }
        match evidence {
            Evidence::Events(_) if anchor.last_event < Some(anchor.revision) => Err(unproven(
                "only a progress notification can show that there are no other events",
            )),
            _ => Ok(()),
        }
    }

    /// Creates a watch of the mirror's scope from `start_revision`; also returns the header of the first response.
    async fn create(
        feeding: Feeding<'a>,
        before: &Before,
        start_revision: i64,
        brings_replaced: bool,
    ) -> Result<(Feed<'a>, ResponseHeader), FeedEnd> {
        let Feeding {
            set,
            mirror,
            connection,
            ..
        } = feeding;
        let (channel, origin) = connection.own_channel();
        let mut client =
            WatchClient::with_origin(channel, origin).max_decoding_message_size(set.max_message_bytes());
        let (requests, queue) = mpsc::channel(REQUEST_QUEUE);
        let create = WatchCreateRequest {
            key: mirror.scope.key(),
            range_end: mirror.scope.range_end(),
            start_revision,
            fragment: true,
            prev_kv: brings_replaced,
            ..WatchCreateRequest::default()
        };
        send(&requests, RequestUnion::CreateRequest(create)).await?;
        let mut call = tonic::Request::new(ReceiverStream::new(queue));
        // Makes a member that has lost its leader end the watch instead of leaving it silent.
        call.metadata_mut()
            .insert("hasleader", MetadataValue::from_static("true"));
        // A rangecache in the place of etcd ends the watch when it has lost its own.
        call.metadata_mut()
            .insert(FEED.0, MetadataValue::from_static("true"));
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
            feeding,
            before: before.clone(),
            requests,
            responses,
            assembler: Assembler::new(start_revision - 1, feeding.set.budget_of(mirror)),
            trusts_progress: false,
            brings_replaced,
        };
        Ok((feed, created.header.unwrap_or_default()))
    }

    /// Waits until the responses show whether the feed continues the mirror's history. If it does, returns what has
    /// arrived behind the mirror's revision. The caller bounds the wait.
    async fn compare_events(
        &mut self,
        mut comparison: EventComparison<'_>,
    ) -> Result<Result<Step, Verdict>, FeedEnd> {
        let mut pause = PROGRESS_PAUSE_FIRST;
        loop {
            // Without events behind the last one only a progress notification shows that there are none.
            let Ok(response) = tokio::time::timeout(pause, self.responses.message()).await else {
                self.request_progress().await?;
                pause = (pause * 2).min(PROGRESS_PAUSE_LAST);
                continue;
            };
            let response = response?.ok_or_else(|| FeedEnd::Lost("etcd ended the watch".into()))?;
            let Some(step) = self.step(&response)? else {
                continue;
            };
            let verdict = match &step {
                Step::Wait | Step::Fenced(_) => None,
                Step::Apply { changes, .. } => comparison.events(changes),
                Step::Advance(revision) => comparison.progress(*revision),
            };
            match verdict {
                None => {}
                Some(Verdict::Continues) => {
                    self.assembler.raise(comparison.revision());
                    return Ok(Ok(step.behind(comparison.revision())));
                }
                Some(verdict) => return Ok(Err(verdict)),
            }
        }
    }

    /// Puts the mirror in service, and takes the `first` step.
    pub(super) fn serve(self, first: Step) -> Result<Feed<'a>, FeedEnd> {
        let Feeding { mirror, epoch, .. } = self.feeding;
        mirror.put_in_service(epoch)?;
        self.take(first.into())?;
        Ok(self)
    }

    /// Requests a progress notification.
    pub(super) async fn request_progress(&self) -> Result<(), FeedEnd> {
        send(
            &self.requests,
            RequestUnion::ProgressRequest(WatchProgressRequest {}),
        )
        .await
    }

    /// Returns the effect of a response: events, a fragment of them, or progress. `None` if it has no effect.
    pub(super) fn step(&mut self, response: &WatchResponse) -> Result<Option<Step>, FeedEnd> {
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
    pub(super) fn take(&self, burst: Burst) -> Result<(), FeedEnd> {
        let Feeding { mirror, epoch, .. } = self.feeding;
        mirror.metrics.events_fenced.inc_by(burst.fenced);
        if !burst.changes.is_empty() {
            replaced::apply(self.feeding, burst.changes, burst.revision, self.brings_replaced)?;
        } else if burst.revision > 0 {
            mirror.advance(epoch, burst.revision)?;
        }
        Ok(())
    }
}

/// Whether the member that has just loaded the mirror still responds on the same connection: its history, and so the
/// one of every member in its quorum, has not been replaced since.
///
/// # Errors
/// [`FeedEnd::Reload`] if it does not respond, which proves nothing, or if the mirror's revision was compacted.
async fn still_responds(mirror: &Mirror, anchor: &Anchor, loader: &Arc<Connection>) -> Result<bool, FeedEnd> {
    let request = RangeRequest {
        revision: anchor.revision,
        ..header_request(mirror.scope.key())
    };
    let has_responded = range(loader, request).await;
    if !loader.has_one_lineage().await {
        return Err(unproven(
            "the hub that has sent the mirror's keys may have another history now",
        ));
    }
    match has_responded {
        Ok(_) => Ok(true),
        Err(status) if is_future_revision(&status) => Ok(false),
        Err(status) if is_compaction(&status) => Err(compacted_past(anchor.revision)),
        Err(status) => Err(unproven(FeedEnd::from(status).to_string())),
    }
}

/// End of a feed of which the evidence shows nothing.
fn unproven(explanation: impl Into<String>) -> FeedEnd {
    FeedEnd::Reload(LoadCause::Unproven, explanation.into())
}

/// End of a feed whose evidence at `revision` etcd has compacted: at least that revision, which the response does not name.
fn compacted_past(revision: i64) -> FeedEnd {
    let cause = LoadCause::Compacted(revision + 1);
    FeedEnd::Reload(cause, "etcd has compacted past the mirror".into())
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

#[cfg(test)]
mod tests;
