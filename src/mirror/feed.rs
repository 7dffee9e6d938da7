//! The feed: one watch, alone on its stream and on its connection (I9), that keeps a mirror in step.

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
use crate::telemetry::trace::Span;
use crate::upstream::Connection;

/// How long etcd may take to create a watch, or to answer a small read.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause between progress requests; it doubles up to [`PROGRESS_PAUSE_LAST`].
const PROGRESS_PAUSE_FIRST: Duration = Duration::from_millis(5);
/// Longest pause between progress requests while somebody waits (KEP-2340).
const PROGRESS_PAUSE_LAST: Duration = Duration::from_millis(100);
/// A feed of the whole keyspace gets an event for every revision, so it is given this long before it is asked.
const PROGRESS_PATIENCE: Duration = Duration::from_millis(10);
/// A feed that says nothing for so long while somebody waits for it is left for another.
const STALLED: Duration = Duration::from_secs(3);
/// The same, where its member is unwell and another is not.
const STALLED_UNWELL: Duration = Duration::from_millis(200);
/// Requests waiting to be written to the stream. One create and a few progress requests are all there ever are.
const REQUEST_QUEUE: usize = 8;

/// Why a feed ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum FeedEnd {
    /// Connection, stream or member lost: resume where it stopped.
    #[error("{0}")]
    Lost(String),
    /// What is here cannot be resumed: load anew.
    #[error("{1}")]
    Reload(&'static str, String),
    /// The mirror has outgrown its budget.
    #[error("the mirror takes more memory than --cache-max-bytes allows")]
    OverBudget,
    /// History was replaced meanwhile.
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

/// Follows etcd from the mirror's revision on. Returns only when the feed has ended. `span` is that of its beginning.
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
            Err(end) => span.error = Some(end.to_string().into()),
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

enum Never {}

impl<'a> Feed<'a> {
    /// Creates the watch, and makes sure that it continues what the mirror holds.
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
        // A member that has lost its leader ends the feed, instead of leaving it silent.
        call.metadata_mut()
            .insert("hasleader", MetadataValue::from_static("true"));
        let opening = async {
            let mut responses = client.watch(call).await?.into_inner();
            let created = responses.message().await?;
            Ok::<_, tonic::Status>((responses, created))
        };
        let (responses, created) = tokio::time::timeout(ANSWER_TIMEOUT, opening)
            .await
            .map_err(|_| FeedEnd::Lost("no answer to a watch in time".into()))??;
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
            mirrors.replace_history("the history behind the feed is not the mirror's");
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
        let mut heard = Instant::now();
        loop {
            let behind = *wanted.borrow_and_update() > self.assembler.revision();
            if !behind {
                next_request = None;
                pause = PROGRESS_PAUSE_FIRST;
                heard = Instant::now();
            } else if next_request.is_none() {
                let patience = if self.mirror.scope.is_everything() {
                    PROGRESS_PATIENCE
                } else {
                    Duration::ZERO
                };
                next_request = Some(Instant::now() + patience);
                heard = Instant::now();
            }
            let due = next_request.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                // Responses first: while there are any, there is no need to ask.
                biased;
                response = self.responses.message() => {
                    let response = response?.ok_or_else(|| FeedEnd::Lost("etcd ended the watch".into()))?;
                    heard = Instant::now();
                    self.take(&response)?;
                    if !mirrors.within_budget(self.mirror) {
                        return Err(FeedEnd::OverBudget);
                    }
                }
                () = self.mirror.epoch_ended(self.epoch) => return Err(FeedEnd::StaleEpoch),
                changed = wanted.changed() => {
                    changed.map_err(|_| FeedEnd::StaleEpoch)?;
                }
                () = tokio::time::sleep_until(due), if next_request.is_some() => {
                    let silent = heard.elapsed();
                    if silent > STALLED {
                        return Err(FeedEnd::Lost(format!("the watch has been silent for {STALLED:?}")));
                    }
                    if silent > STALLED_UNWELL && mirrors.upstream.has_better_than(connection.url()) {
                        return Err(FeedEnd::Lost("the watch is silent and its member is unwell".into()));
                    }
                    self.mirror.record_progress_request();
                    send(&self.requests, RequestUnion::ProgressRequest(WatchProgressRequest {})).await?;
                    next_request = Some(Instant::now() + pause);
                    pause = (pause * 2).min(PROGRESS_PAUSE_LAST);
                }
            }
        }
    }

    /// Takes one response: events, a fragment of them, progress, or the end.
    fn take(&mut self, response: &WatchResponse) -> Result<(), FeedEnd> {
        faults::trip(Fault::Feed);
        if response.canceled {
            return Err(cancelled(response));
        }
        if response.created {
            return Ok(());
        }
        let step = self
            .assembler
            .take(response)
            .map_err(|error| FeedEnd::Reload("malformed", format!("an event is not understood: {error}")))?;
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
    match tokio::time::timeout(ANSWER_TIMEOUT, requests.send(request)).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(FeedEnd::Lost("the watch takes no requests".into())),
    }
}

fn cancelled(response: &WatchResponse) -> FeedEnd {
    if response.compact_revision > 0 {
        return FeedEnd::Reload(
            "compacted",
            format!(
                "etcd has compacted up to {} past the mirror",
                response.compact_revision
            ),
        );
    }
    FeedEnd::Lost(format!("etcd cancelled the watch: {}", response.cancel_reason))
}

/// Reads the key that was changed last, at the mirror's revision, from the member that will feed it. If history was
/// replaced while no feed stood (a restore that was then written past the mirror's revision), it is hardly the same.
/// Also returns etcd's revision.
async fn continues(anchor: &Anchor, connection: &Arc<Connection>) -> Result<(bool, i64), FeedEnd> {
    let (channel, origin) = connection.own_channel();
    let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
    let request = RangeRequest {
        key: anchor.key.clone().unwrap_or_else(|| Bytes::from_static(b"\0")),
        revision: anchor.revision,
        ..RangeRequest::default()
    };
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.range(request))
        .await
        .map_err(|_| FeedEnd::Lost("no answer to a read in time".into()))?;
    let response = match answer {
        Ok(response) => response.into_inner(),
        Err(status) if status.code() == Code::OutOfRange && status.message().contains("compacted") => {
            return Err(FeedEnd::Reload(
                "compacted",
                "etcd has compacted past the mirror".into(),
            ));
        }
        // etcd has not come to the mirror's revision.
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
