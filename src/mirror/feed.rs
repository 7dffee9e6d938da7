//! The feed: the watch that keeps a mirror up to date, alone on its stream and on its connection (I9).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Code;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;

use super::assemble::{Assembler, Step};
use super::cluster_state::Verdict;
use super::load_cause::LoadCause;
use super::mirrors::Mirrors;
use super::state::{Anchor, Epoch, Mirror, StaleEpoch};
use crate::cache::Entry;
use crate::etcdserverpb::kv_client::KvClient;
use crate::etcdserverpb::watch_client::WatchClient;
use crate::etcdserverpb::watch_request::RequestUnion;
use crate::etcdserverpb::{
    RangeRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use crate::faults::{self, Fault};
use crate::telemetry::trace::{Span, SpanExt as _};
use crate::upstream::Connection;

/// Timeout for creating a watch and for a small read.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause between progress requests; it doubles up to [`PROGRESS_PAUSE_LAST`].
const PROGRESS_PAUSE_FIRST: Duration = Duration::from_millis(5);
/// Longest pause between progress requests while a reader waits; kube-apiserver's interval (KEP-2340).
const PROGRESS_PAUSE_LAST: Duration = Duration::from_millis(100);
/// Delay of the first progress request to a feed of the whole keyspace, which receives an event for every revision
/// anyway.
const PROGRESS_DELAY: Duration = Duration::from_millis(10);
/// Silence after which a feed is replaced while a reader waits for it.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3);
/// Silence after which a feed is replaced if its member is unhealthy and another one is healthy.
const SILENCE_TIMEOUT_UNHEALTHY: Duration = Duration::from_millis(200);
/// Bound on requests waiting to be written to the stream: one create, then one progress request at a time.
const REQUEST_QUEUE: usize = 8;

/// End of a feed.
#[derive(Debug, thiserror::Error)]
pub(super) enum FeedEnd {
    /// Connection, stream or member lost: the next feed resumes at the mirror's revision.
    #[error("{0}")]
    Lost(String),
    /// The contents cannot be resumed and have to be loaded again.
    #[error("{1}")]
    Reload(LoadCause, String),
    /// The mirror has outgrown its budget.
    #[error("the mirror takes more memory than --cache-max-bytes allows")]
    OverBudget,
    /// The epoch ended: history was replaced, or the contents were dropped.
    #[error("history was replaced")]
    StaleEpoch,
}

impl From<StaleEpoch> for FeedEnd {
    fn from(_: StaleEpoch) -> Self {
        FeedEnd::StaleEpoch
    }
}

impl From<tonic::Status> for FeedEnd {
    fn from(status: tonic::Status) -> Self {
        FeedEnd::Lost(format!("{} ({:?})", status.message(), status.code()))
    }
}

/// Follows etcd from the mirror's revision until the feed ends. `span` covers the creation of the watch.
pub(super) async fn follow(
    mirrors: &Mirrors,
    mirror: &Mirror,
    epoch: Epoch,
    connection: &Arc<Connection>,
    span: Option<Box<Span>>,
) -> FeedEnd {
    let opened = Feed::open(mirrors, mirror, epoch, connection).await;
    if let Some(mut span) = span {
        span.set_endpoint(connection.url());
        match &opened {
            Ok(feed) => span.set("rangecache.revision.served", feed.assembler.revision()),
            Err(end) => span.fail(end.to_string()),
        }
        mirrors.telemetry.tracer.end(*span);
    }
    match opened {
        Ok(feed) => match feed.run(mirrors, connection).await {
            Ok(never) => match never {},
            Err(end) => end,
        },
        Err(end) => end,
    }
}

struct Feed<'a> {
    mirror: &'a Mirror,
    epoch: Epoch,
    requests: mpsc::Sender<WatchRequest>,
    responses: tonic::Streaming<WatchResponse>,
    assembler: Assembler,
}

/// A value that does not exist: [`Feed::run`] returns only errors.
enum Never {}

impl<'a> Feed<'a> {
    /// Creates the watch, checks that it continues the mirror's history, and puts the mirror in service.
    async fn open(
        mirrors: &Mirrors,
        mirror: &'a Mirror,
        epoch: Epoch,
        connection: &Arc<Connection>,
    ) -> Result<Feed<'a>, FeedEnd> {
        let anchor = mirror.anchor(epoch)?.ok_or(FeedEnd::StaleEpoch)?;
        let (channel, origin) = connection.own_channel();
        let mut client = WatchClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        let (requests, queue) = mpsc::channel(REQUEST_QUEUE);
        let create = WatchCreateRequest {
            key: mirror.scope.key(),
            range_end: mirror.scope.range_end(),
            start_revision: anchor.revision + 1,
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
        let before = mirrors.cluster_state.before_check();
        let (same, revision) = continues(&anchor, connection).await?;
        let raft_index = connection.member_status().await?.raft_index;
        if !same || mirrors.cluster_state.after_status(before, revision, raft_index) == Verdict::Replaced {
            mirrors.cluster_state.forget();
            mirrors.replace_history("the history behind the watch is not the mirror's");
            return Err(FeedEnd::StaleEpoch);
        }
        mirror.put_in_service(epoch)?;
        Ok(Feed {
            mirror,
            epoch,
            requests,
            responses,
            assembler: Assembler::new(anchor.revision),
        })
    }

    async fn run(mut self, mirrors: &Mirrors, connection: &Connection) -> Result<Never, FeedEnd> {
        let mut wanted = self.mirror.wanted();
        let mut pause = PROGRESS_PAUSE_FIRST;
        let mut next_request: Option<Instant> = None;
        let mut last_response = Instant::now();
        loop {
            let behind = *wanted.borrow_and_update() > self.assembler.revision();
            if !behind {
                next_request = None;
                pause = PROGRESS_PAUSE_FIRST;
                last_response = Instant::now();
            } else if next_request.is_none() {
                let delay = if self.mirror.scope.is_everything() {
                    PROGRESS_DELAY
                } else {
                    Duration::ZERO
                };
                next_request = Some(Instant::now() + delay);
                last_response = Instant::now();
            }
            let due = next_request.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                // Responses first: while there are any, no progress request is needed.
                biased;
                response = self.responses.message() => {
                    let response = response?.ok_or_else(|| FeedEnd::Lost("etcd ended the watch".into()))?;
                    last_response = Instant::now();
                    self.handle(&response)?;
                    if !mirrors.within_budget(self.mirror) {
                        return Err(FeedEnd::OverBudget);
                    }
                }
                () = self.mirror.epoch_ended(self.epoch) => return Err(FeedEnd::StaleEpoch),
                changed = wanted.changed() => {
                    changed.map_err(|_| FeedEnd::StaleEpoch)?;
                }
                () = tokio::time::sleep_until(due), if next_request.is_some() => {
                    let silent = last_response.elapsed();
                    if silent > SILENCE_TIMEOUT {
                        return Err(FeedEnd::Lost(format!("the watch has been silent for {SILENCE_TIMEOUT:?}")));
                    }
                    if silent > SILENCE_TIMEOUT_UNHEALTHY && mirrors.upstream.has_better_than(connection.url()) {
                        return Err(FeedEnd::Lost("the watch is silent and its member is unhealthy".into()));
                    }
                    self.mirror.record_progress_request();
                    send(&self.requests, RequestUnion::ProgressRequest(WatchProgressRequest {})).await?;
                    next_request = Some(Instant::now() + pause);
                    pause = (pause * 2).min(PROGRESS_PAUSE_LAST);
                }
            }
        }
    }

    /// Handles one response: events, a fragment of them, progress, or the end of the watch.
    fn handle(&mut self, response: &WatchResponse) -> Result<(), FeedEnd> {
        faults::trip(Fault::Feed);
        if response.canceled {
            return Err(cancelled(response));
        }
        if response.created {
            return Ok(());
        }
        let step = self.assembler.add(response).map_err(|error| {
            FeedEnd::Reload(
                LoadCause::Malformed,
                format!("an event is not understood: {error}"),
            )
        })?;
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
            LoadCause::Compacted,
            format!(
                "etcd has compacted up to {} past the mirror",
                response.compact_revision
            ),
        );
    }
    FeedEnd::Lost(format!("etcd cancelled the watch: {}", response.cancel_reason))
}

/// Reads the key that was changed last, at the mirror's revision, from the member that will feed the mirror, and
/// compares the entries. After a replacement of history without a feed (a restore, followed by writes past the
/// mirror's revision) they differ with near certainty. Returns whether they are equal, and etcd's current revision.
async fn continues(anchor: &Anchor, connection: &Arc<Connection>) -> Result<(bool, i64), FeedEnd> {
    let (channel, origin) = connection.own_channel();
    let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
    let request = RangeRequest {
        key: anchor.key.clone().unwrap_or_else(|| Bytes::from_static(b"\0")),
        revision: anchor.revision,
        ..RangeRequest::default()
    };
    let response = tokio::time::timeout(RESPONSE_TIMEOUT, client.range(request))
        .await
        .map_err(|_| FeedEnd::Lost("no response to a read in time".into()))?;
    let response = match response {
        Ok(response) => response.into_inner(),
        Err(status) if status.code() == Code::OutOfRange && status.message().contains("compacted") => {
            return Err(FeedEnd::Reload(
                LoadCause::Compacted,
                "etcd has compacted past the mirror".into(),
            ));
        }
        // A revision in the future: this member's history is shorter than the mirror's.
        Err(status) if status.code() == Code::OutOfRange => return Ok((false, 0)),
        Err(status) => return Err(status.into()),
    };
    let revision = response.header.map_or(0, |header| header.revision);
    let Some(key) = &anchor.key else {
        return Ok((true, revision));
    };
    let theirs = response
        .kvs
        .first()
        .map(|key_value| Entry::from_key_value(key_value));
    let same = match (anchor.tree.get(key), theirs) {
        (None, None) => true,
        (Some(ours), Some(Ok(theirs))) => ours.encoded().contiguous() == theirs.encoded().contiguous(),
        _ => false,
    };
    Ok((same, revision))
}
