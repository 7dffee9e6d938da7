//! Loading a scope at one pinned revision: by RangeStream where etcd has it (KEP-5966), else page by page. What breaks is
//! taken up behind the last key that came, at the same revision, by whichever endpoint is there.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tonic::Code;

use super::cluster_state::Verdict;
use super::mirrors::Mirrors;
use super::state::Mirror;
use crate::cache::{Entry, MalformedKeyValue, ResponseHeader, Tree};
use crate::etcdserverpb::kv_client::KvClient;
use crate::etcdserverpb::{RangeRequest, RangeResponse};
use crate::keyspace::scope::Scope;
use crate::keyspace::successor;
use crate::net::Url;
use crate::upstream::{Channel, ConnectError, Connection, ReceiveWindow, current_header};

/// How long etcd may take for the next piece.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a long load is spoken of in the log.
const LOG_INTERVAL: Duration = Duration::from_secs(5);
/// What a page should hold, in bytes: large enough that etcd's count of the whole range, paid per page, is little
/// beside it; small enough to be held twice.
const PAGE_TARGET_BYTES: u64 = 8 << 20;
/// The first page, whose values may be of any size.
const FIRST_PAGE_KEYS: i64 = 64;
/// How often in a row a load goes on after a break that brought no key.
const MAX_RESUMES: u32 = 5;
/// Pause before it does.
const RESUME_PAUSE: Duration = Duration::from_millis(100);
/// How long to wait for any endpoint.
const ENDPOINT_PATIENCE: Duration = Duration::from_secs(10);
/// How fast a load may be. etcd answers other clients meanwhile: at its full speed a load would take a core of etcd's and one
/// of ours.
const LOAD_BYTES_PER_SECOND: f64 = 512e6;
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
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The load cannot go on with another history than it began with.
    #[error("etcd's history was replaced meanwhile")]
    HistoryReplaced,
    /// The tree's task died.
    #[error("building the tree failed")]
    Build,
}

/// What a load needs to know.
#[derive(Debug)]
pub(super) struct Load<'a> {
    /// For connections, for the budget, and for what is known of history.
    pub(super) mirrors: &'a Mirrors,
    /// What is loaded.
    pub(super) mirror: &'a Mirror,
}

/// What has come so far.
struct Gathered<'a> {
    load: &'a Load<'a>,
    /// etcd's header at the revision of the load.
    pinned: ResponseHeader,
    max_bytes: u64,
    entries: Vec<Entry>,
    bytes: u64,
    newest: Option<(i64, Bytes)>,
    began: Instant,
    spoke: Instant,
}

impl LoadError {
    /// Whether it befell the connection or the member, so that the load can go on by another.
    fn is_broken(&self) -> bool {
        match self {
            LoadError::TimedOut | LoadError::Connect(_) => true,
            LoadError::Status(status) => !matches!(
                status.code(),
                // Compacted, above all.
                Code::OutOfRange | Code::InvalidArgument | Code::PermissionDenied | Code::Unauthenticated
            ),
            _ => false,
        }
    }
}

impl Load<'_> {
    /// Loads, on a connection of its own. Where the connection breaks, goes on by another behind the last key that came.
    ///
    /// # Errors
    /// [`LoadError`]; nothing of what came is kept.
    pub(super) async fn run(&self) -> Result<Loaded, LoadError> {
        let mut connection = self.connect(None).await?;
        let raft_index = connection.member_status().await?.raft_index;
        let pinned = current(&connection, &self.mirror.scope).await?;
        // So that a restore is known from the first moment on.
        self.mirrors
            .cluster_state
            .note_raft_index(raft_index, pinned.revision);
        let mut gathered = Gathered::new(self, pinned);
        let (mut resumes, mut keys) = (0, 0);
        loop {
            let error = match gathered.read(&connection).await {
                Ok(()) => return gathered.finish().await,
                Err(error) => error,
            };
            if gathered.entries.len() > keys {
                (resumes, keys) = (0, gathered.entries.len());
            }
            resumes += 1;
            if !error.is_broken() || resumes > MAX_RESUMES {
                return Err(error);
            }
            tracing::warn!(mirror = self.mirror.name, %error, keys,
                "the load was interrupted; going on behind the last key");
            tokio::time::sleep(RESUME_PAUSE).await;
            match self.reconnect(&connection, pinned).await {
                Ok(again) => connection = again,
                // Counted as one more that brought nothing.
                Err(error) if error.is_broken() => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn connect(&self, but: Option<&Url>) -> Result<Arc<Connection>, LoadError> {
        let deadline = Instant::now() + ENDPOINT_PATIENCE;
        let connecting = self
            .mirrors
            .upstream
            .dedicated(ReceiveWindow::DEDICATED, but, deadline);
        Ok(connecting.await?)
    }

    /// Another connection, if the history behind it is the one that the load began with (I4).
    async fn reconnect(
        &self,
        broken: &Connection,
        pinned: ResponseHeader,
    ) -> Result<Arc<Connection>, LoadError> {
        let connection = self.connect(Some(broken.url())).await?;
        let cluster_state = &self.mirrors.cluster_state;
        let before = cluster_state.before_check();
        let now = current(&connection, &self.mirror.scope).await?;
        let raft_index = connection.member_status().await?.raft_index;
        let same = now.cluster_id == pinned.cluster_id && now.revision >= pinned.revision;
        if !same || cluster_state.after_status(before, now.revision, raft_index) == Verdict::Replaced {
            cluster_state.forget();
            self.mirrors
                .replace_history("the history behind a connection is not the one that a load began with");
            return Err(LoadError::HistoryReplaced);
        }
        Ok(connection)
    }
}

/// etcd's header now, by a linearizable read of one key.
async fn current(connection: &Arc<Connection>, scope: &Scope) -> Result<ResponseHeader, LoadError> {
    let header = tokio::time::timeout(PIECE_TIMEOUT, current_header(connection, scope.key()))
        .await
        .map_err(|_| LoadError::TimedOut)??
        .filter(|header| header.revision > 0);
    Ok(header.ok_or(LoadError::NoRevision)?.into())
}

impl<'a> Gathered<'a> {
    fn new(load: &'a Load<'a>, pinned: ResponseHeader) -> Gathered<'a> {
        load.mirror.metrics.load_keys.set(0);
        load.mirror.metrics.load_bytes.set(0);
        let now = Instant::now();
        Gathered {
            load,
            pinned,
            max_bytes: load.mirrors.budget_of(load.mirror),
            entries: Vec::new(),
            bytes: 0,
            newest: None,
            began: now,
            spoke: now,
        }
    }

    /// Reads what is still to come.
    async fn read(&mut self, connection: &Arc<Connection>) -> Result<(), LoadError> {
        let (channel, origin) = connection.own_channel();
        let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        let reason = match self.load.mirrors.upstream.lacks_range_stream(connection) {
            Some(reason) => reason,
            None => match self.by_stream(&mut client).await {
                // An etcd, or a proxy in front of it, without the method: nothing has come yet.
                Err(LoadError::Status(status)) if status.code() == Code::Unimplemented => {
                    connection.refused_range_stream(status.message())
                }
                other => return other,
            },
        };
        self.load
            .mirrors
            .telemetry
            .metrics
            .forwarding
            .record_stream_fallback(reason.as_str());
        self.by_pages(&mut client).await
    }

    /// A request for all that is still to come.
    fn rest(&self) -> RangeRequest {
        let scope = &self.load.mirror.scope;
        RangeRequest {
            key: match self.entries.last() {
                Some(last) => successor(last.key()),
                None => scope.key(),
            },
            range_end: scope.range_end(),
            revision: self.pinned.revision,
            ..RangeRequest::default()
        }
    }

    async fn by_stream(&mut self, client: &mut KvClient<Channel>) -> Result<(), LoadError> {
        let call = client.range_stream(self.rest());
        let mut stream = tokio::time::timeout(PIECE_TIMEOUT, call)
            .await
            .map_err(|_| LoadError::TimedOut)??
            .into_inner();
        let mut is_whole = false;
        loop {
            let piece = tokio::time::timeout(PIECE_TIMEOUT, stream.message());
            let Some(chunk) = piece.await.map_err(|_| LoadError::TimedOut)?? else {
                break;
            };
            if let Some(response) = chunk.range_response {
                // The last chunk's.
                is_whole |= response.header.is_some();
                self.add(&response)?;
                self.pace().await;
            }
        }
        if is_whole {
            Ok(())
        } else {
            Err(LoadError::NoRevision)
        }
    }

    async fn by_pages(&mut self, client: &mut KvClient<Channel>) -> Result<(), LoadError> {
        loop {
            let request = RangeRequest {
                limit: self.page_limit(),
                ..self.rest()
            };
            let response = tokio::time::timeout(PIECE_TIMEOUT, client.range(request))
                .await
                .map_err(|_| LoadError::TimedOut)??
                .into_inner();
            self.add(&response)?;
            if !response.more || response.kvs.is_empty() {
                return Ok(());
            }
            self.pace().await;
        }
    }

    /// Waits until no more than [`LOAD_BYTES_PER_SECOND`] have come.
    async fn pace(&self) {
        #[allow(clippy::cast_precision_loss, reason = "a load has fewer than 2^53 bytes")]
        let seconds = self.bytes as f64 / LOAD_BYTES_PER_SECOND;
        tokio::time::sleep_until(self.began + Duration::from_secs_f64(seconds)).await;
    }

    fn page_limit(&self) -> i64 {
        match self.entries.len() as u64 {
            0 => FIRST_PAGE_KEYS,
            keys => i64::try_from(PAGE_TARGET_BYTES / (self.bytes / keys).max(1))
                .unwrap_or(i64::MAX)
                .clamp(1, 10_000),
        }
    }

    /// Takes one page or chunk.
    fn add(&mut self, response: &RangeResponse) -> Result<(), LoadError> {
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
        let metrics = &self.load.mirror.metrics;
        metrics
            .load_keys
            .set(i64::try_from(self.entries.len()).unwrap_or(i64::MAX));
        metrics
            .load_bytes
            .set(i64::try_from(self.bytes).unwrap_or(i64::MAX));
        if self.bytes + self.entries.len() as u64 * ENTRY_OVERHEAD_BYTES > self.max_bytes {
            return Err(LoadError::OverBudget {
                max_bytes: self.max_bytes,
            });
        }
        if self.spoke.elapsed() >= LOG_INTERVAL {
            self.spoke = Instant::now();
            tracing::info!(
                mirror = self.load.mirror.name,
                keys = self.entries.len(),
                bytes = self.bytes,
                seconds = self.began.elapsed().as_secs(),
                "loading"
            );
        }
        Ok(())
    }

    async fn finish(self) -> Result<Loaded, LoadError> {
        let Gathered {
            pinned,
            entries,
            newest,
            ..
        } = self;
        // A million keys take some tens of milliseconds, which calls on this thread need not wait for.
        let tree = tokio::task::spawn_blocking(move || Tree::from_sorted(entries))
            .await
            .map_err(|_| LoadError::Build)?;
        Ok(Loaded {
            tree,
            header: pinned,
            newest_key: newest.map(|(_, key)| key),
        })
    }
}
