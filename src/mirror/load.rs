//! Loading a scope at one pinned revision: by RangeStream where etcd has it (KEP-5966), else page by page.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tonic::Code;

use super::scope::Scope;
use crate::cache::{Entry, MalformedKeyValue, ResponseHeader, Tree};
use crate::etcdserverpb::kv_client::KvClient;
use crate::etcdserverpb::{RangeRequest, RangeResponse};
use crate::telemetry::Metrics;
use crate::telemetry::metrics::MirrorMetrics;
use crate::upstream::{Channel, Connection, NoRangeStream};

/// How long etcd may take for the next piece.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a long load is spoken of in the log.
const LOG_INTERVAL: Duration = Duration::from_secs(5);
/// What a page should hold, in bytes: large enough that etcd's count of the whole range, paid per page, is little
/// beside it; small enough to be held twice.
const PAGE_TARGET_BYTES: u64 = 8 << 20;
/// The first page, whose values may be of any size.
const FIRST_PAGE_KEYS: i64 = 64;
/// What an entry costs beside its own bytes, for the budget during a load.
pub(super) const ENTRY_OVERHEAD_BYTES: u64 = 48;

/// A scope's keys at one revision.
#[derive(Debug)]
pub(super) struct Loaded {
    /// The keys.
    pub(super) tree: Tree,
    /// etcd's header; its revision is the one that the keys were read at.
    pub(super) header: ResponseHeader,
    /// A key that was last changed, by which a later feed is held against this load.
    pub(super) newest_key: Option<Bytes>,
}

/// Why a load did not come to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    /// etcd refused or was lost.
    #[error("etcd: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
    /// No piece came in time.
    #[error("etcd sent nothing for {PIECE_TIMEOUT:?}")]
    TimedOut,
    /// It would not fit.
    #[error("the keys take more than the {max_bytes} bytes that --cache-max-bytes allows")]
    OverBudget {
        /// The bound that is left for this mirror.
        max_bytes: u64,
    },
    /// Something that is no key-value.
    #[error("etcd sent a key-value that is not understood: {0}")]
    Malformed(#[from] MalformedKeyValue),
    /// No header, or none with a revision.
    #[error("etcd's answer carries no revision")]
    NoRevision,
    /// The tree's task died.
    #[error("building the tree failed")]
    Build,
}

/// What a load needs to know.
#[derive(Debug)]
pub(super) struct Load<'a> {
    /// A connection of its own.
    pub(super) connection: &'a Arc<Connection>,
    /// What to load.
    pub(super) scope: &'a Scope,
    /// Why RangeStream is not to be tried, if there is a reason.
    pub(super) no_stream: Option<NoRangeStream>,
    /// Bound on the mirror's memory.
    pub(super) max_bytes: u64,
    /// Where progress shows.
    pub(super) metrics: &'a MirrorMetrics,
    /// Where it counts that there was no RangeStream.
    pub(super) fallbacks: &'a Metrics,
}

/// What has come so far.
struct Gathered<'a> {
    load: &'a Load<'a>,
    entries: Vec<Entry>,
    bytes: u64,
    newest: Option<(i64, Bytes)>,
    began: Instant,
    spoke: Instant,
}

impl Load<'_> {
    /// Loads.
    ///
    /// # Errors
    /// [`LoadError`]; nothing of what came is kept.
    pub(super) async fn run(&self) -> Result<Loaded, LoadError> {
        let (channel, origin) = self.connection.own_channel();
        let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        let mut gathered = Gathered::new(self);
        let streamed = match self.no_stream {
            Some(why) => Err(why),
            None => match gathered.by_stream(&mut client).await {
                // An etcd, or a proxy in front of it, without the method: nothing has come yet.
                Err(LoadError::Status(status)) if status.code() == Code::Unimplemented => {
                    let why = NoRangeStream::of_unimplemented(status.message());
                    if why == NoRangeStream::Unimplemented {
                        self.connection.note_no_range_stream();
                    }
                    Err(why)
                }
                other => Ok(other?),
            },
        };
        let header = match streamed {
            Ok(header) => header,
            Err(why) => {
                self.fallbacks.range_stream_fallback(why.as_str());
                gathered = Gathered::new(self);
                gathered.by_pages(&mut client).await?
            }
        };
        gathered.finish(header).await
    }
}

impl<'a> Gathered<'a> {
    fn new(load: &'a Load<'a>) -> Gathered<'a> {
        load.metrics.load_keys.set(0);
        load.metrics.load_bytes.set(0);
        let now = Instant::now();
        Gathered {
            load,
            entries: Vec::new(),
            bytes: 0,
            newest: None,
            began: now,
            spoke: now,
        }
    }

    async fn by_stream(&mut self, client: &mut KvClient<Channel>) -> Result<ResponseHeader, LoadError> {
        let request = RangeRequest {
            key: self.load.scope.key(),
            range_end: self.load.scope.range_end(),
            ..RangeRequest::default()
        };
        let call = client.range_stream(request);
        let mut stream = tokio::time::timeout(PIECE_TIMEOUT, call)
            .await
            .map_err(|_| LoadError::TimedOut)??
            .into_inner();
        let mut header = None;
        loop {
            let piece = tokio::time::timeout(PIECE_TIMEOUT, stream.message());
            let Some(chunk) = piece.await.map_err(|_| LoadError::TimedOut)?? else {
                break;
            };
            let Some(response) = chunk.range_response else {
                continue;
            };
            header = self.add(response)?.or(header);
        }
        header.ok_or(LoadError::NoRevision)
    }

    async fn by_pages(&mut self, client: &mut KvClient<Channel>) -> Result<ResponseHeader, LoadError> {
        let mut request = RangeRequest {
            key: self.load.scope.key(),
            range_end: self.load.scope.range_end(),
            limit: FIRST_PAGE_KEYS,
            ..RangeRequest::default()
        };
        let mut first = None;
        loop {
            let call = client.range(request.clone());
            let response = tokio::time::timeout(PIECE_TIMEOUT, call)
                .await
                .map_err(|_| LoadError::TimedOut)??
                .into_inner();
            let more = response.more;
            let header = self.add(response)?.ok_or(LoadError::NoRevision)?;
            // The first page's revision is the whole load's.
            let first = *first.get_or_insert(header);
            let Some(last) = self.entries.last().filter(|_| more) else {
                return Ok(first);
            };
            request.key = [last.key(), b"\0"].concat().into();
            request.revision = first.revision;
            let mean_bytes = (self.bytes / self.entries.len() as u64).max(1);
            request.limit = i64::try_from(PAGE_TARGET_BYTES / mean_bytes)
                .unwrap_or(i64::MAX)
                .clamp(1, 10_000);
        }
    }

    /// Takes one page or chunk; returns its header, if it has one with a revision.
    fn add(&mut self, response: RangeResponse) -> Result<Option<ResponseHeader>, LoadError> {
        self.entries.reserve(response.kvs.len());
        for key_value in &response.kvs {
            let entry = Entry::from_key_value(key_value)?;
            self.bytes += entry.encoded_len() as u64;
            let mod_revision = entry.mod_revision();
            if self
                .newest
                .as_ref()
                .is_none_or(|(newest, _)| mod_revision > *newest)
            {
                self.newest = Some((mod_revision, Bytes::copy_from_slice(entry.key())));
            }
            self.entries.push(entry);
        }
        self.load
            .metrics
            .load_keys
            .set(i64::try_from(self.entries.len()).unwrap_or(i64::MAX));
        self.load
            .metrics
            .load_bytes
            .set(i64::try_from(self.bytes).unwrap_or(i64::MAX));
        if self.bytes + self.entries.len() as u64 * ENTRY_OVERHEAD_BYTES > self.load.max_bytes {
            return Err(LoadError::OverBudget {
                max_bytes: self.load.max_bytes,
            });
        }
        if self.spoke.elapsed() >= LOG_INTERVAL {
            self.spoke = Instant::now();
            tracing::info!(
                mirror = self.load.scope.name(),
                keys = self.entries.len(),
                bytes = self.bytes,
                seconds = self.began.elapsed().as_secs(),
                "loading"
            );
        }
        Ok(response
            .header
            .filter(|header| header.revision > 0)
            .map(ResponseHeader::from))
    }

    async fn finish(self, header: ResponseHeader) -> Result<Loaded, LoadError> {
        let Gathered { entries, newest, .. } = self;
        // A million keys take some tens of milliseconds, which calls on this thread need not wait for.
        let tree = tokio::task::spawn_blocking(move || Tree::from_sorted(entries))
            .await
            .map_err(|_| LoadError::Build)?;
        Ok(Loaded {
            tree,
            header,
            newest_key: newest.map(|(_, key)| key),
        })
    }
}
