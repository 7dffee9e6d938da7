//! Opening of a feed: creates the watch, and proves that it continues the mirror's history.

use std::time::Duration;

use tokio::sync::mpsc;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;

use super::assemble::{Assembler, Step};
use super::burst::Burst;
use super::continuity::{Continuity, ContinuityProof, Judgement, compare, compare_base, still_responds};
use super::end::FeedEnd;
use super::member::Feeding;
use super::replaced;
use crate::lineage::Before;
use crate::load::{LoadCause, LoadedBy};
use crate::view::Anchor;
use etcd_wire::etcdserverpb::watch_client::WatchClient;
use etcd_wire::etcdserverpb::watch_request::RequestUnion;
use etcd_wire::etcdserverpb::{
    ResponseHeader, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use etcd_wire::grpc::fields::FEED;
use rangecache_base::faults::{self, Fault};
use rangecache_upstream::gates;

/// Timeout for creating a watch and for a small read.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
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

/// A feed that continues the mirror's history.
pub(super) struct ProvenFeed<'a> {
    feed: Feed<'a>,
    /// First step of the feed, without the events that the mirror has.
    first: Step,
}

impl<'a> ProvenFeed<'a> {
    /// Puts the mirror in service.
    pub(super) fn serve(self) -> Result<Feed<'a>, FeedEnd> {
        let feeding = self.feed.feeding;
        feeding.mirror.put_in_service(feeding.epoch)?;
        self.feed.take(self.first.into())?;
        Ok(self.feed)
    }
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
    /// Creates the watch, and proves that it continues the mirror's history. `loaded_by` is the connection that loaded the
    /// mirror, until a feed was created.
    pub(super) async fn open(
        feeding: Feeding<'a>,
        loaded_by: &mut LoadedBy,
    ) -> Result<ProvenFeed<'a>, FeedEnd> {
        let anchor = feeding.mirror.anchor(feeding.epoch)?.ok_or(FeedEnd::StaleEpoch)?;
        let by_events = |compacted| {
            anchor
                .first_event(compacted)
                .map_or(ContinuityProof::Comparison, ContinuityProof::FirstEvent)
        };
        let lineages = feeding.connection.proven_lineages();
        let mut proof = loaded_by
            .clone()
            .map_or_else(|| by_events(0), ContinuityProof::Load);
        loop {
            let opened = Feed::open_by(feeding, &anchor, &proof).await;
            // What does not prove anything is followed by the next proof.
            let cause = match opened {
                Ok(proven) => {
                    match &proof {
                        ContinuityProof::Load(by) => {
                            feeding.note_lineage(by.standing().map(|standing| standing.lineage))?
                        }
                        ContinuityProof::FirstEvent(_) | ContinuityProof::Comparison => {
                            feeding.note_lineage(feeding.connection.lineage_since(&lineages))?;
                        }
                    }
                    *loaded_by = None;
                    return Ok(proven);
                }
                Err(FeedEnd::Reload(cause @ (LoadCause::Compacted(_) | LoadCause::Unproven), _))
                    if !matches!(proof, ContinuityProof::Comparison) =>
                {
                    cause
                }
                Err(end) => return Err(end),
            };
            proof = match (proof, cause) {
                (ContinuityProof::Load(_), _) => by_events(0),
                (ContinuityProof::FirstEvent(event), LoadCause::Compacted(compacted))
                    if compacted > event =>
                {
                    by_events(compacted)
                }
                _ => ContinuityProof::Comparison,
            };
        }
    }

    /// Creates the watch, and proves by `proof` that it continues the history of `anchor`.
    async fn open_by(
        feeding: Feeding<'a>,
        anchor: &Anchor,
        proof: &ContinuityProof,
    ) -> Result<ProvenFeed<'a>, FeedEnd> {
        let Feeding {
            mirror,
            epoch,
            connection,
            ..
        } = feeding;
        let before = feeding.set.cluster_state.before_check();
        let start_revision = match proof {
            ContinuityProof::FirstEvent(event) => *event,
            ContinuityProof::Load(_) | ContinuityProof::Comparison => anchor.revision + 1,
        };
        let brings_replaced = anchor.tree.summary().not_held_bytes > 0;
        let (mut feed, created) = Feed::create(feeding, &before, start_revision, brings_replaced).await?;
        let shown = created.revision;
        let member = feeding.check_member(&before, created).await?;
        feed.trusts_progress = member.has_true_progress();
        if !feed.trusts_progress {
            feed.may_do_without_progress(anchor, proof)?;
        }
        let first = match proof {
            ContinuityProof::FirstEvent(event) => {
                let proving = feed.prove(Continuity::new(anchor, *event));
                let proven = tokio::time::timeout(RESPONSE_TIMEOUT, proving).await;
                let first = proven.map_err(|_| {
                    FeedEnd::Lost("the mirror's last event was not delivered again in time".into())
                })??;
                let is_held = match &anchor.base {
                    _ if first.is_none() || anchor.proves_by_events_from(*event) => true,
                    // Few events prove little about what was loaded. Every one since the oldest state was delivered again.
                    Some(base) if base.1 + 1 == *event => compare_base(mirror, base, connection).await?,
                    _ => compare(mirror, epoch, anchor, connection).await?,
                };
                if !is_held {
                    return Err(feeding.another_history(&before, shown));
                }
                first
            }
            ContinuityProof::Load(loaded_by) => {
                let continues = still_responds(mirror, anchor, loaded_by).await?;
                continues.then_some(Step::Wait)
            }
            // After the watch was created: if the revision can still be read, no delete behind it was compacted before
            // (etcd 18089, 19179).
            ContinuityProof::Comparison if anchor.ends_with_a_delete() => {
                // A delete leaves nothing to compare.
                return Err(FeedEnd::Reload(
                    LoadCause::Unproven,
                    "the last event can no longer be had from etcd".into(),
                ));
            }
            ContinuityProof::Comparison => {
                let is_held = compare(mirror, epoch, anchor, connection).await?;
                is_held.then_some(Step::Wait)
            }
        };
        let Some(first) = first else {
            if let ContinuityProof::FirstEvent(event) = proof
                && anchor.has_delete_from(*event)
                && member.may_lack_deletes()
            {
                return Err(FeedEnd::Reload(
                    LoadCause::Unproven,
                    "this version of etcd may have compacted the mirror's last event".into(),
                ));
            }
            return Err(feeding.another_history(&before, shown));
        };
        Ok(ProvenFeed { feed, first })
    }

    /// Decides what becomes of a feed whose member's progress notifications cannot be trusted. If this holds for every
    /// endpoint, linearizable reads are forwarded anyway and the mirror follows the events alone.
    fn may_do_without_progress(&self, anchor: &Anchor, proof: &ContinuityProof) -> Result<(), FeedEnd> {
        let lowest = self.feeding.upstream.lowest_version();
        if lowest.is_some_and(|lowest| gates::PROGRESS_NOTIFICATIONS.is_open(lowest)) {
            return Err(FeedEnd::Lost(
                "progress notifications of the watch's member cannot be trusted".into(),
            ));
        }
        match proof {
            ContinuityProof::FirstEvent(_) if anchor.last_event < Some(anchor.revision) => {
                Err(FeedEnd::Reload(
                    LoadCause::Unproven,
                    "only a progress notification can show that there are no other events".into(),
                ))
            }
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
    async fn prove(&mut self, mut continuity: Continuity<'_>) -> Result<Option<Step>, FeedEnd> {
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
            let judgement = match &step {
                Step::Wait | Step::Fenced(_) => Judgement::Open,
                Step::Apply { changes, .. } => continuity.events(changes),
                Step::Advance(revision) => continuity.progress(*revision),
            };
            match judgement {
                Judgement::Open => {}
                Judgement::Another(explanation) => {
                    tracing::debug!(
                        mirror = self.feeding.mirror.name,
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
