//! Loads of everything, whose keys are gathered as they arrive.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use etcd_store::cache::{ResponseHeader, Tree, TreeBuilder};
use etcd_store::keyspace::successor;
use etcd_wire::etcdserverpb::RangeResponse;
use rangecache_base::blocking::compute;
use rangecache_upstream::{Connection, first_page_limit, page_limit};
use tokio::time::Instant;

use super::begin::{Load, LoadError, MAX_RESUMES, PAGE_TARGET_BYTES, RESUME_PAUSE};
use super::have::{Loaded, LoadedBy};
use super::read::{LoadReader, Sink};
use crate::lineage::{Anchor, Keys};
use crate::memory::make_room_of_load;

/// Interval of the log lines of a long load.
const LOG_INTERVAL: Duration = Duration::from_secs(5);
/// Keys whose tree is built at once.
const BUILT_AT_ONCE_KEYS: u64 = 1_000;

/// The keys of a load that have arrived so far.
struct Gathered<'a> {
    reader: LoadReader<'a>,
    max_bytes: u64,
    builder: TreeBuilder,
    began: Instant,
    last_logged: Instant,
}

/// Loads everything. When the connection breaks, continues on another one behind the last key.
pub(super) async fn load_all(load: &Load<'_>) -> Result<Loaded, LoadError> {
    let (mut connection, _, pinned) = load.begin(None).await?;
    let mut gathered = Gathered::new(load, pinned);
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
        tracing::warn!(mirror = load.mirror.name, %error, keys,
            "load interrupted; continuing behind the last key");
        tokio::time::sleep(RESUME_PAUSE).await;
        match gathered.reconnect(&connection).await {
            Ok(again) => connection = again,
            // The next iteration fails as well, and is counted.
            Err(error) if error.is_broken() => {}
            Err(error) => return Err(error),
        }
    }
}

impl<'a> Gathered<'a> {
    fn new(load: &'a Load<'a>, pinned: ResponseHeader) -> Gathered<'a> {
        let now = Instant::now();
        Gathered {
            reader: LoadReader::new(load, pinned),
            max_bytes: load.set.budget_of(load.mirror),
            builder: load.builder.clone(),
            began: now,
            last_logged: now,
        }
    }

    /// Reads the remaining keys.
    async fn read(&mut self, connection: &Arc<Connection>) -> Result<(), LoadError> {
        let reader = self.reader;
        reader.read(connection, false, self).await
    }

    /// Connects again, preferably to another endpoint, and checks that its history is that of the load (I4).
    async fn reconnect(&self, broken: &Connection) -> Result<Arc<Connection>, LoadError> {
        let load = self.reader.load;
        let connection = load.connect(Some(broken.url())).await?;
        let before = load.set.cluster_state.before_check();
        let now = load.position(&connection, &before).await?;
        if let Some(keys) = self.keys().await?
            && !keys.are_held_by(&connection).await?
        {
            return Err(load.another_history(&before, now.revision));
        }
        Ok(connection)
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
            anchor: Anchor::loaded(build(self.builder).await?, self.reader.pinned.revision),
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
        self.builder = push_all(std::mem::take(&mut self.builder), response.kvs).await?;
        if self.builder.memory_bytes() > self.max_bytes {
            let builder = std::mem::take(&mut self.builder);
            let made = make_room_of_load(load.mirror, builder, self.max_bytes / 16 * 15).await;
            self.builder = made.ok_or(LoadError::Build)?;
        }
        let (keys, memory_bytes) = (self.builder.len(), self.builder.memory_bytes());
        load.mirror.record_loading(memory_bytes);
        if memory_bytes > self.max_bytes {
            return Err(LoadError::OverBudget {
                max_bytes: self.max_bytes,
                mean_bytes: memory_bytes / keys.max(1),
            });
        }
        if self.last_logged.elapsed() >= LOG_INTERVAL {
            self.last_logged = Instant::now();
            let (bytes, seconds) = (self.builder.encoded_bytes(), self.began.elapsed().as_secs());
            tracing::info!(
                mirror = load.mirror.name,
                keys,
                bytes,
                seconds,
                bytes_per_second = bytes / seconds.max(1),
                "loading"
            );
        }
        Ok(())
    }
}

/// Adds one page or chunk to what has arrived.
pub(super) async fn push_all(
    mut builder: TreeBuilder,
    key_values: Vec<Bytes>,
) -> Result<TreeBuilder, LoadError> {
    let is_slow = builder.is_slow(key_values.iter().map(Bytes::len).sum());
    let push = move || {
        for key_value in key_values {
            builder.push(key_value)?;
        }
        Ok(builder)
    };
    run(!is_slow, push).await?
}

/// The tree of the keys that have arrived.
pub(super) async fn build(builder: TreeBuilder) -> Result<Tree, LoadError> {
    run(builder.len() <= BUILT_AT_ONCE_KEYS, move || builder.finish()).await
}

/// Result of [`compute`], as that of a load.
pub(super) async fn run<T: Send + 'static>(
    is_small: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, LoadError> {
    compute(is_small, work).await.map_err(|_| LoadError::Build)
}
