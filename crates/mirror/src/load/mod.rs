//! Loads of a scope at one pinned revision: by RangeStream where etcd has it (KEP-5966), otherwise page by page.
//! After a broken connection the load continues behind the last key, at the same revision, on any endpoint whose history
//! holds the keys that have arrived.
//!
//! | file | subject |
//! |---|---|
//! | `adopt` | loads of what has changed since the mirror had its keys |
//! | `neighbour` | keys from another rangecache, for a start |
//! | `difference` | what differs, by keys and revisions |
//! | `read` | the requests of a load |
//! | `cause` | causes of loads, for the metric and the log |
//! | `pace`, `pacing` | the rate of loads, by etcd's latency |
//! | `over_budget` | waiting until a mirror fits into memory again |

mod adopt;
mod cause;
mod difference;
mod neighbour;
pub(super) mod over_budget;
mod pace;
mod pacing;
mod read;

pub(super) use adopt::{Adopted, Previous, Source};
pub(super) use cause::LoadCause;
pub(super) use pacing::LoadPacing;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tonic::Code;

use super::history::{Before, Keys, Position};
use super::residency::{cost, warn_of_left_out};
use super::set::MirrorSet;
use super::view::Mirror;
use etcd_store::cache::{MalformedKeyValue, Packing, ResponseHeader, Tree, TreeBuilder};
use etcd_store::keyspace::successor;
use etcd_wire::etcdserverpb::RangeResponse;
use rangecache_base::net::Url;
use rangecache_base::telemetry::Telemetry;
use rangecache_upstream::{
    ConnectError, Connection, ReceiveWindow, Upstream, first_page_limit, is_compaction, page_limit,
};
use read::{PIECE_TIMEOUT, Reader, Sink};

/// Interval of the log lines of a long load.
const LOG_INTERVAL: Duration = Duration::from_secs(5);
/// Target size of a page in bytes: large enough that etcd's count of the whole range, which each page costs, is small
/// in comparison; small enough for two pages in memory.
const PAGE_TARGET_BYTES: u64 = 8 << 20;
/// Consecutive connections without a new key after which a load fails.
const MAX_RESUMES: u32 = 5;
/// Pause before a load continues on another connection.
const RESUME_PAUSE: Duration = Duration::from_millis(100);
/// Timeout for connecting to any endpoint.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Keys whose tree is built at once: that takes less than handing it to another thread and back.
const BUILT_AT_ONCE_KEYS: u64 = 1_000;
/// Bytes of a page or chunk from which another thread packs it.
const PACKED_AT_ONCE_BYTES: usize = 64 << 10;

/// The connection of a load, unless the load was interrupted. As long as it responds, its member has kept the history of
/// the load.
pub(super) type LoadedBy = Option<Arc<Connection>>;

/// A scope's keys at one revision.
#[derive(Debug)]
pub(super) struct Loaded {
    /// Keys and values.
    pub(super) tree: Tree,
    /// etcd's header; the keys were read at its revision.
    pub(super) header: ResponseHeader,
    /// The connection of the load.
    pub(super) connection: LoadedBy,
    /// What the mirror had already; `None` if everything was read.
    pub(super) adopted: Option<Adopted>,
}

/// Failure of a load.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    /// etcd refused, or the connection was lost.
    #[error("etcd: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
    /// No page or chunk arrived in time.
    #[error("etcd sent nothing for {PIECE_TIMEOUT:?}")]
    TimedOut,
    /// The keys exceed the budget.
    #[error("the keys take more than the {max_bytes} bytes that --cache-max-bytes allows")]
    OverBudget {
        /// Bytes that the other mirrors leave of `--cache-max-bytes`.
        max_bytes: u64,
        /// Mean memory of the keys that have arrived.
        mean_bytes: u64,
    },
    /// An invalid KeyValue.
    #[error("etcd sent a key-value that is not understood: {0}")]
    Malformed(#[from] MalformedKeyValue),
    /// A response without a header or revision.
    #[error("etcd's response carries no revision")]
    NoRevision,
    /// A server with etcd's interface that is not etcd.
    #[error("the server has no cluster id, so it is not etcd")]
    NotEtcd,
    /// No endpoint could be connected to.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The member is of another cluster than the one that most endpoints lead to.
    #[error("the connection leads to another cluster")]
    AnotherCluster,
    /// The history behind the new connection differs from that of the load.
    #[error("etcd's history was replaced meanwhile")]
    HistoryReplaced,
    /// Two reads at one revision contradict each other.
    #[error("etcd's responses at one revision contradict each other")]
    Inconsistent,
    /// The keys of a neighbour are not of etcd's history.
    #[error("the neighbour's keys are of another cluster or history")]
    Foreign,
    /// What the mirror had before differs so much that a load costs little more than the difference.
    #[error("too much has changed")]
    TooDifferent,
    /// The task that builds the tree panicked.
    #[error("building the tree failed")]
    Build,
}

/// Load of one mirror.
#[derive(Debug)]
pub(super) struct Load<'a> {
    /// Every mirror: their memory together, and what drops them.
    pub(super) set: &'a MirrorSet,
    /// Connections.
    pub(super) upstream: &'a Arc<Upstream>,
    /// The rate of all loads.
    pub(super) pacing: &'a Arc<LoadPacing>,
    /// Tracks the task that measures etcd's latency.
    pub(super) tasks: &'a TaskTracker,
    /// Counts loads without RangeStream.
    pub(super) telemetry: &'a Telemetry,
    /// Whether values are packed.
    pub(super) packing: Packing,
    /// The mirror to load.
    pub(super) mirror: &'a Mirror,
}

/// The keys of a load that have arrived so far.
struct Gathered<'a> {
    reader: Arc<Reader<'a>>,
    max_bytes: u64,
    builder: TreeBuilder,
    began: Instant,
    last_logged: Instant,
}

impl LoadError {
    /// Whether the connection or the member failed, so that the load can continue on another.
    fn is_broken(&self) -> bool {
        match self {
            LoadError::TimedOut | LoadError::Connect(_) | LoadError::AnotherCluster => true,
            LoadError::Status(status) => !matches!(
                status.code(),
                // OutOfRange: compacted, above all.
                Code::OutOfRange | Code::InvalidArgument | Code::PermissionDenied | Code::Unauthenticated
            ),
            _ => false,
        }
    }

    /// Whether etcd has compacted the revision of the load.
    fn is_compaction(&self) -> bool {
        matches!(self, LoadError::Status(status) if is_compaction(status))
    }

    /// Whether a load of everything may do better than one of what has changed.
    fn may_be_avoided(&self) -> bool {
        !self.is_broken() && !matches!(self, LoadError::HistoryReplaced | LoadError::NotEtcd)
    }
}

impl Load<'_> {
    /// Loads on a dedicated connection. When the connection breaks, continues on another one behind the last key. Of
    /// `previous`, what the mirror had before, or what a neighbour has, only what differs is read; it is taken once everything
    /// has to be.
    ///
    /// # Errors
    /// [`LoadError`]; the keys that have arrived are dropped.
    pub(super) async fn run(&self, previous: &mut Option<Previous>) -> Result<Loaded, LoadError> {
        // What was dropped for a reason of its own is read from etcd alone.
        if previous.is_none() && !self.mirror.was_in_service() {
            *previous = self.ask_neighbours().await;
        }
        // Nothing to keep, and nothing that tells how large the values are.
        previous.take_if(|keys| keys.tree.is_empty());
        if let Some(keys) = previous {
            match self.adopt(keys).await {
                Err(error) if error.may_be_avoided() => {
                    tracing::info!(mirror = self.mirror.name, %error, "loading everything instead of what has changed");
                    *previous = None;
                }
                adopted => return adopted,
            }
        }
        let (mut connection, _, pinned) = self.begin(None).await?;
        let mut gathered = Gathered::new(self, pinned);
        let (mut resumes, mut keys) = (0, 0);
        let mut is_interrupted = false;
        loop {
            let error = match gathered.read(&connection).await {
                Ok(()) => return gathered.finish((!is_interrupted).then_some(connection)).await,
                Err(error) => error,
            };
            is_interrupted = true;
            if gathered.builder.len() > keys {
                (resumes, keys) = (0, gathered.builder.len());
            }
            resumes += 1;
            if !error.is_broken() || resumes > MAX_RESUMES {
                return Err(error);
            }
            tracing::warn!(mirror = self.mirror.name, %error, keys,
                "load interrupted; continuing behind the last key");
            tokio::time::sleep(RESUME_PAUSE).await;
            match self.reconnect(&connection, &gathered).await {
                Ok(again) => connection = again,
                // The next iteration fails as well, and is counted.
                Err(error) if error.is_broken() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// A connection, preferably not to the endpoint `but`, the state before its first read, and the header of that: the
    /// load's revision.
    async fn begin(&self, but: Option<&Url>) -> Result<(Arc<Connection>, Before, ResponseHeader), LoadError> {
        let connection = self.connect(but).await?;
        let before = self.set.cluster_state.before_check();
        let raft_index = connection.member_status().await?.raft_index;
        let pinned = self.position(&connection, &before).await?;
        if pinned.cluster_id == 0 {
            return Err(LoadError::NotEtcd);
        }
        // A restore is detected from now on.
        self.set
            .cluster_state
            .note_raft_index(&before, raft_index, pinned.revision);
        Ok((connection, before, pinned))
    }

    async fn connect(&self, but: Option<&Url>) -> Result<Arc<Connection>, LoadError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let connecting = self.upstream.dedicated(ReceiveWindow::LOAD, but, deadline);
        Ok(connecting.await?)
    }

    /// Connects again, preferably to another endpoint, and checks that its history is that of the load (I4).
    async fn reconnect(
        &self,
        broken: &Connection,
        gathered: &Gathered<'_>,
    ) -> Result<Arc<Connection>, LoadError> {
        let connection = self.connect(Some(broken.url())).await?;
        let before = self.set.cluster_state.before_check();
        let now = self.position(&connection, &before).await?;
        if let Some(keys) = gathered.keys().await?
            && !keys.are_held_by(&connection).await?
        {
            return Err(self.another_history(&before, now.revision));
        }
        Ok(connection)
    }

    /// Header of a linearizable read on `connection`, whose history is the one known `before`.
    async fn position(
        &self,
        connection: &Arc<Connection>,
        before: &Before,
    ) -> Result<ResponseHeader, LoadError> {
        let position = Position::read(connection, self.mirror.scope.key(), before).await?;
        if self.upstream.is_left_out(connection.cluster_id()) {
            return Err(LoadError::AnotherCluster);
        }
        if position.header.revision <= 0 {
            return Err(LoadError::NoRevision);
        }
        if !position.continues(before) {
            return Err(self.another_history(before, position.header.revision));
        }
        Ok(position.header)
    }

    /// Drops every mirror, because a connection is of another history, at `revision`, than the one known
    /// `before`.
    fn another_history(&self, before: &Before, revision: i64) -> LoadError {
        let explanation = "the history behind a connection is not the one in which a load began";
        self.set.replace_history(before, revision, explanation);
        LoadError::HistoryReplaced
    }
}

impl<'a> Gathered<'a> {
    fn new(load: &'a Load<'a>, pinned: ResponseHeader) -> Gathered<'a> {
        let now = Instant::now();
        Gathered {
            reader: Arc::new(Reader::new(load, pinned)),
            max_bytes: load.set.budget_of(load.mirror),
            builder: TreeBuilder::new(load.packing),
            began: now,
            last_logged: now,
        }
    }

    /// Reads the remaining keys.
    async fn read(&mut self, connection: &Arc<Connection>) -> Result<(), LoadError> {
        let reader = Arc::clone(&self.reader);
        reader.read(connection, false, self).await
    }

    /// Leaves out values until there is room again, if values may be packed; returns the memory of the keys that have arrived.
    async fn make_room(&mut self) -> Result<u64, LoadError> {
        let load = self.reader.load;
        let (mirror, max_bytes) = (load.mirror, self.max_bytes / 16 * 15);
        if load.packing != Packing::Never {
            let mut builder = std::mem::take(&mut self.builder);
            let reads = mirror.reads_by_prefix();
            let leaving_out = tokio::task::spawn_blocking(move || {
                let left_out = builder.make_room(max_bytes, |prefix, bytes| cost(&reads, prefix, bytes));
                left_out.map(|prefixes| (builder, prefixes))
            });
            // What was just packed is not damaged.
            let left_out = leaving_out.await.map_err(|_| LoadError::Build)?;
            let (builder, prefixes) = left_out.map_err(|_| LoadError::Build)?;
            self.builder = builder;
            for prefix in prefixes {
                warn_of_left_out(mirror, &prefix);
            }
        }
        Ok(self.builder.memory_bytes())
    }

    /// The keys that have arrived, which are all up to the last one; `None` before the first.
    async fn keys(&self) -> Result<Option<Keys>, LoadError> {
        let Some(end) = self.builder.last_key().map(successor) else {
            return Ok(None);
        };
        Ok(Some(Keys {
            tree: build(self.builder.clone()).await?,
            from: self.reader.load.mirror.scope.key(),
            end,
            revision: self.reader.pinned.revision,
        }))
    }

    async fn finish(self, connection: LoadedBy) -> Result<Loaded, LoadError> {
        Ok(Loaded {
            tree: build(self.builder).await?,
            header: self.reader.pinned,
            connection,
            adopted: None,
        })
    }
}

impl Sink for Gathered<'_> {
    fn last_key(&self) -> Option<Bytes> {
        self.builder.last_key().map(Bytes::copy_from_slice)
    }

    fn page_limit(&self) -> i64 {
        match self.builder.len() {
            0 => first_page_limit(),
            keys => page_limit(PAGE_TARGET_BYTES, self.builder.encoded_bytes() / keys),
        }
    }

    async fn add(&mut self, response: RangeResponse) -> Result<(), LoadError> {
        let load = self.reader.load;
        self.reader.record(&response.kvs);
        self.builder = push_all(std::mem::take(&mut self.builder), response.kvs, load.packing).await?;
        let (keys, memory_bytes) = (self.builder.len(), self.builder.memory_bytes());
        let memory_bytes = if memory_bytes > self.max_bytes {
            self.make_room().await?
        } else {
            memory_bytes
        };
        load.mirror.record_loading(memory_bytes);
        if memory_bytes > self.max_bytes {
            return Err(LoadError::OverBudget {
                max_bytes: self.max_bytes,
                mean_bytes: memory_bytes / keys.max(1),
            });
        }
        if self.last_logged.elapsed() >= LOG_INTERVAL {
            self.last_logged = Instant::now();
            tracing::info!(
                mirror = load.mirror.name,
                keys,
                bytes = self.builder.encoded_bytes(),
                seconds = self.began.elapsed().as_secs(),
                bytes_per_second = self.reader.pacing.rate(),
                "loading"
            );
        }
        Ok(())
    }
}

/// Adds one page or chunk to what has arrived.
async fn push_all(
    mut builder: TreeBuilder,
    key_values: Vec<Bytes>,
    packing: Packing,
) -> Result<TreeBuilder, LoadError> {
    let bytes: usize = key_values.iter().map(Bytes::len).sum();
    let push = move || {
        for key_value in key_values {
            builder.push(key_value)?;
        }
        Ok(builder)
    };
    if packing == Packing::Never || bytes <= PACKED_AT_ONCE_BYTES {
        return push();
    }
    // Milliseconds, in which this thread can serve calls.
    tokio::task::spawn_blocking(push)
        .await
        .map_err(|_| LoadError::Build)?
}

/// The tree of the keys that have arrived.
async fn build(builder: TreeBuilder) -> Result<Tree, LoadError> {
    if builder.len() <= BUILT_AT_ONCE_KEYS {
        return Ok(builder.finish());
    }
    // In a blocking thread: a million keys take milliseconds, in which this thread can serve calls.
    tokio::task::spawn_blocking(move || builder.finish())
        .await
        .map_err(|_| LoadError::Build)
}

#[cfg(test)]
mod tests;
