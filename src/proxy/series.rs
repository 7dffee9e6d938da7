//! Lists that are read in pages: from the second page on they come from one RangeStream at the list's revision.
//!
//! Each page costs etcd a count of all keys that are still to come; a stream costs it one walk. A page that passes by and
//! has `more` is remembered by where the next one must begin. When that one is asked for, a stream of all the rest is
//! opened, and this page and those after it are cut from it: their `count` is what the first page counted, less what has
//! been read. etcd is held back by HTTP/2's flow control, so only the rest of a chunk and a window are held.
//!
//! Nobody waits for a series and nothing relies on one: whoever asks for a page *takes* its series, and puts it back where
//! the next page begins. A page may be asked for by Range or by RangeStream, and the next one by the other. A page that is asked for twice, out of order or late finds none, and is forwarded; so is
//! whatever a series cannot give. With etcd's auth on a series belongs to the caller who began it, and etcd authorises each
//! of its pages (I8).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use moka::notification::RemovalCause;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use parking_lot::Mutex;
use tokio::time::Instant;
use tonic::Streaming;

use super::budget::{Budget, Held};
use super::convert::{stream_request, suits};
use super::owner::Owner;
use crate::cache::{Entry, RangeQuery, ResponseHeader, Selection};
use crate::etcdserverpb::kv_client::KvClient;
use crate::etcdserverpb::{RangeRequest, RangeStreamResponse};
use crate::grpc::status::is_ok;
use crate::grpc::{RangeResponseScanner, ResponseSummary};
use crate::mirror::Mirrors;
use crate::mirror::freshness::authorize::{Authorization, identity_of};
use crate::mirror::pinned::Reading;
use crate::telemetry::Metrics;
use crate::upstream::{NoRangeStream, ReceiveWindow, Upstream, gates};

/// How long etcd may take for the next chunk; then the page is forwarded.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(5);
/// How often series that nobody goes on with are looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// What an entry costs beside its own bytes.
const ENTRY_OVERHEAD_BYTES: u64 = 64;
/// Series that wait for their next page may take this part of the bytes that streams may hold.
const SHARE: u64 = 4;

/// Where a page begins, of what, and for whom.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Place {
    key: Bytes,
    range_end: Bytes,
    revision: i64,
    keys_only: bool,
    owner: Owner,
}

/// A list of which a page has been seen.
#[derive(Debug)]
struct Series {
    /// Keys from its place on, at its revision.
    left: u64,
    /// etcd's history, and the cluster, that the first page was of.
    history: u64,
    cluster_id: u64,
    /// There once a second page has been asked for.
    source: Option<Source>,
}

/// The stream, and what of it has come but has not been asked for.
struct Source {
    stream: Streaming<RangeStreamResponse>,
    ready: VecDeque<Entry>,
    /// Keys of all of it, if the first page counted right.
    keys: u64,
    /// One stream's window, and what is ready.
    held: Held,
    _reading: Reading,
}

impl std::fmt::Debug for Source {
    // Not the entries: keys and values do not belong in a log (I10).
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").finish_non_exhaustive()
    }
}

/// A series that waits for its next page. Whoever takes it leaves nothing behind, whatever the cache still refers to.
type Slot = Arc<Mutex<Option<Series>>>;

/// See the module.
#[derive(Debug)]
pub(super) struct AllSeries {
    waiting: Cache<Place, Slot>,
    budget: Arc<Budget>,
    upstream: Arc<Upstream>,
    mirrors: Arc<Mirrors>,
    metrics: Arc<Metrics>,
}

/// A page from a series, and what it counts against the budget.
pub(super) struct PageAnswer {
    pub(super) header: ResponseHeader,
    pub(super) selection: Selection,
    pub(super) held: Held,
}

/// A page that is asked for, and by whom.
struct Asker<'a> {
    query: &'a RangeQuery,
    owner: &'a Owner,
    metadata: &'a HeaderMap,
}

/// Why the page has to be forwarded although there is a series; counted.
struct Broken(&'static str);

impl From<NoRangeStream> for Broken {
    fn from(reason: NoRangeStream) -> Self {
        Broken(reason.as_str())
    }
}

impl Place {
    fn of(query: &RangeQuery, owner: Owner) -> Place {
        Place {
            key: query.key.clone(),
            range_end: query.range_end.clone(),
            revision: query.revision,
            keys_only: query.keys_only,
            owner,
        }
    }

    fn weight(&self, slot: &Slot) -> u64 {
        let held = slot
            .lock()
            .as_ref()
            .and_then(|series| series.source.as_ref())
            .map_or(0, |source| source.held.bytes());
        256 + (self.key.len() + self.range_end.len()) as u64 + held
    }
}

impl AllSeries {
    pub(super) fn new(
        ttl: Duration,
        max_bytes: u64,
        budget: &Arc<Budget>,
        upstream: &Arc<Upstream>,
        mirrors: &Arc<Mirrors>,
        metrics: &Arc<Metrics>,
    ) -> Arc<AllSeries> {
        let waiting = Cache::builder()
            .max_capacity(max_bytes / SHARE)
            .weigher(|place: &Place, slot| u32::try_from(place.weight(slot)).unwrap_or(u32::MAX))
            .eviction_policy(EvictionPolicy::lru())
            .time_to_live(ttl)
            // The cache may let go of its values late; a stream must end at once. What was removed has been taken.
            .eviction_listener(|_, slot: Slot, cause| {
                if cause != RemovalCause::Explicit {
                    drop(slot.lock().take());
                }
            })
            .build();
        Arc::new(AllSeries {
            waiting,
            budget: Arc::clone(budget),
            upstream: Arc::clone(upstream),
            mirrors: Arc::clone(mirrors),
            metrics: Arc::clone(metrics),
        })
    }

    /// Ends series that nobody has gone on with, for ever.
    pub(super) async fn sweep(&self) {
        let mut beat = tokio::time::interval(SWEEP_INTERVAL);
        loop {
            beat.tick().await;
            self.settle();
        }
    }

    fn settle(&self) {
        self.waiting.run_pending_tasks();
        let count = i64::try_from(self.waiting.entry_count()).unwrap_or(i64::MAX);
        self.metrics.forwarding.series.set(count);
    }

    /// The page that `query` asks for, if it goes on with one that was seen of the same `owner`, whose `metadata` came with
    /// it.
    pub(super) async fn page(
        &self,
        query: &RangeQuery,
        owner: &Owner,
        metadata: &HeaderMap,
    ) -> Option<PageAnswer> {
        if query.revision <= 0 || !is_page(query) {
            return None;
        }
        let place = Place::of(query, owner.clone());
        let mut series = self.waiting.remove(&place)?.lock().take()?;
        let limit = u64::try_from(query.limit).ok()?;
        if series.source.is_none() && series.left <= limit {
            // The last page: a stream would spare nothing.
            return None;
        }
        let asker = Asker {
            query,
            owner,
            metadata,
        };
        match self.cut(&mut series, &asker, limit).await {
            Ok((page, last_key)) => {
                self.metrics.forwarding.series_pages.inc();
                self.put(next_place(&place, &last_key, place.revision), series);
                Some(page)
            }
            Err(Broken(reason)) => {
                tracing::debug!(reason, "a series of pages could not go on");
                self.metrics.forwarding.record_stream_fallback(reason);
                None
            }
        }
    }

    /// Cuts the next page from the series; returns it and its last key.
    async fn cut(
        &self,
        series: &mut Series,
        asker: &Asker<'_>,
        limit: u64,
    ) -> Result<(PageAnswer, Vec<u8>), Broken> {
        let granted = self.granted(asker).await?;
        self.header(series, asker, granted).await?;
        let source = match &mut series.source {
            Some(source) => source,
            None => series.source.insert(self.open(asker, series.left).await?),
        };
        let keys = usize::try_from(limit.min(series.left)).map_err(|_| Broken("budget"))?;
        while source.ready.len() < keys {
            source.pull().await?;
        }
        let entries: Vec<Entry> = source.ready.drain(..keys).collect();
        let last_key = entries.last().ok_or(Broken("malformed"))?.key().to_vec();
        let held = source.held.split(entries.iter().map(cost_bytes).sum());
        let (count, more) = (series.left, series.left > limit);
        series.left -= entries.len() as u64;
        // Asked for last, so that the floor is the floor of now (I11), and so are etcd's compaction, history and auth.
        let header = self.header(series, asker, granted).await?;
        self.mirrors.cluster_state.record_served(header.revision);
        let page = PageAnswer {
            header,
            selection: Selection::of_page(entries, count, more),
            held,
        };
        Ok((page, last_key))
    }

    /// etcd's word that this caller may read this page, where that has to be asked for.
    async fn granted(&self, asker: &Asker<'_>) -> Result<Option<ResponseHeader>, Broken> {
        if *asker.owner == Owner::Anybody {
            return Ok(None);
        }
        let authorization = Authorization {
            key: asker.query.key.clone(),
            range_end: asker.query.range_end.clone(),
            caller: Some(asker.metadata),
            // Its caller's metadata names the phase already.
            trace: None,
            serializable: false,
        };
        let deadline = Instant::now() + CHUNK_TIMEOUT;
        let granted = self.mirrors.freshness.authorize(&authorization, deadline).await;
        Ok(Some(granted.map_err(|_| Broken("auth"))?.header))
    }

    /// The header of a page now, if etcd would still give that page: as for pinned reads from a mirror, what is known of
    /// etcd decides, and nothing is asked, unless the floor is hidden. It is the one with which etcd `granted` the page,
    /// if it did.
    async fn header(
        &self,
        series: &Series,
        asker: &Asker<'_>,
        granted: Option<ResponseHeader>,
    ) -> Result<ResponseHeader, Broken> {
        let cluster_state = &self.mirrors.cluster_state;
        let revision = asker.query.revision;
        if cluster_state.min_served_revision().is_none() && self.mirrors.freshness.prove().await.is_err() {
            return Err(Broken("not_proven"));
        }
        let floor = cluster_state.min_served_revision().ok_or(Broken("not_proven"))?;
        let known = cluster_state.known().max(floor);
        let identity = cluster_state.identity().ok_or(Broken("not_proven"))?;
        if cluster_state.auth() != asker.owner.auth() {
            return Err(Broken("auth"));
        }
        let same = cluster_state.history() == series.history && identity.cluster_id == series.cluster_id;
        if !same || known < revision {
            return Err(Broken("history_replaced"));
        }
        if revision < cluster_state.compacted() {
            return Err(Broken("compacted"));
        }
        Ok(granted.unwrap_or(ResponseHeader {
            revision: known,
            ..*identity
        }))
    }

    /// Opens a stream of all `keys` that are left from the page on.
    async fn open(&self, asker: &Asker<'_>, keys: u64) -> Result<Source, Broken> {
        let mut held = self.budget.nothing();
        held.try_grow(ReceiveWindow::SHARED.stream.into())
            .map_err(|_| Broken("budget"))?;
        let connection = self
            .upstream
            .streaming(Instant::now())
            .await
            .map_err(|_| Broken("no_endpoint"))??;
        let (channel, origin) = connection.channel();
        let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        let mut request = tonic::Request::new(RangeRequest {
            limit: 0,
            ..stream_request(asker.query)
        });
        if *asker.owner != Owner::Anybody {
            *request.metadata_mut() = identity_of(asker.metadata);
        }
        let opening = tokio::time::timeout(CHUNK_TIMEOUT, client.range_stream(request)).await;
        let stream = match opening {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) if status.code() == tonic::Code::Unimplemented => {
                return Err(connection.refused_range_stream(status.message()).into());
            }
            // Whatever it is, etcd says it again to the page as it came.
            Ok(Err(_)) => return Err(Broken("refused")),
            Err(_) => return Err(Broken("late")),
        };
        Ok(Source {
            stream,
            ready: VecDeque::new(),
            keys,
            held,
            _reading: self.mirrors.pinned.read_at(asker.query.revision),
        })
    }

    fn put(&self, place: Place, series: Series) {
        if series.left > 0 {
            self.waiting.insert(place, Arc::new(Mutex::new(Some(series))));
        }
        self.settle();
    }

    /// The history that is known now, for [`AllSeries::note`]: to be asked before a page is.
    pub(super) fn history(&self) -> u64 {
        self.mirrors.cluster_state.history()
    }

    /// A page has been given by etcd: the next one is expected. `history` is the one known when it was asked for.
    pub(super) fn note(&self, query: &RangeQuery, owner: Owner, found: &ResponseSummary, history: u64) {
        let Ok(header) = found.header() else {
            return;
        };
        let left = found.count.saturating_sub(found.kvs);
        if !is_page(query) || !found.more || found.kvs == 0 || left == 0 {
            return;
        }
        let revision = if query.revision > 0 {
            query.revision
        } else {
            header.revision
        };
        let series = Series {
            left,
            history,
            cluster_id: header.cluster_id,
            source: None,
        };
        self.put(
            next_place(&Place::of(query, owner), &found.last_key, revision),
            series,
        );
    }

    /// Watches the answer to `query` pass by, if it may be a page. `walk` goes through answers of its kind.
    pub(super) fn watch(
        self: &Arc<Self>,
        query: &RangeQuery,
        owner: Option<Owner>,
        walk: RangeResponseScanner,
    ) -> Option<Box<PageWatch>> {
        let owner = owner?;
        let may_stream = self
            .upstream
            .lowest_version()
            .is_some_and(|version| gates::RANGE_STREAM.is_open(version));
        (may_stream && is_page(query)).then(|| {
            Box::new(PageWatch {
                walk: Some(walk),
                query: query.clone(),
                owner,
                history: self.history(),
                all: Arc::clone(self),
            })
        })
    }
}

impl Source {
    /// Takes the next chunk.
    async fn pull(&mut self) -> Result<(), Broken> {
        let chunk = tokio::time::timeout(CHUNK_TIMEOUT, self.stream.message())
            .await
            .map_err(|_| Broken("late"))?
            .map_err(|_| Broken("broken"))?
            // The stream has ended before the keys that the first page counted.
            .ok_or(Broken("malformed"))?;
        let Some(response) = chunk.range_response else {
            return Ok(());
        };
        // Told at the end: another count is another history's.
        if response.header.is_some() && u64::try_from(response.count) != Ok(self.keys) {
            return Err(Broken("malformed"));
        }
        for key_value in &response.kvs {
            let entry = Entry::from_key_value(key_value).map_err(|_| Broken("malformed"))?;
            self.held
                .try_grow(cost_bytes(&entry))
                .map_err(|_| Broken("budget"))?;
            self.ready.push_back(entry);
        }
        Ok(())
    }
}

fn cost_bytes(entry: &Entry) -> u64 {
    entry.encoded_len() as u64 + ENTRY_OVERHEAD_BYTES
}

/// Whether it is a page in key order.
fn is_page(query: &RangeQuery) -> bool {
    query.limit > 0 && suits(query)
}

fn next_place(page: &Place, last_key: &[u8], revision: i64) -> Place {
    Place {
        key: [last_key, b"\0"].concat().into(),
        revision,
        ..page.clone()
    }
}

/// Watches one page pass by.
#[derive(Debug)]
pub(super) struct PageWatch {
    /// `None` once it has met something that it does not understand.
    walk: Option<RangeResponseScanner>,
    query: RangeQuery,
    owner: Owner,
    history: u64,
    all: Arc<AllSeries>,
}

impl PageWatch {
    /// Looks at the next bytes that go to the client, before they go.
    pub(super) fn see(&mut self, data: &Bytes) {
        if self
            .walk
            .as_mut()
            .is_some_and(|walk| walk.scan(data, |_| ()).is_err())
        {
            self.walk = None;
        }
    }

    /// The answer ends with these trailers: when its caller knows, the next page is expected.
    pub(super) fn ended(&mut self, trailers: &HeaderMap) {
        if let Some(walk) = self.walk.take()
            && is_ok(trailers)
            && let Ok(found) = walk.finish()
        {
            self.all
                .note(&self.query, self.owner.clone(), &found, self.history);
        }
    }
}
