//! Lists that are read in pages: from the second page on they come from one RangeStream at the list's revision.
//!
//! Each page costs etcd a count of all keys that are still to come; a stream costs it one walk over the keys. A page that is
//! forwarded and has `more` is remembered by the start of the next one. When that is requested, a stream of the whole rest is
//! opened, and this page and those after it are cut from it: their `count` is what the first page counted, less the keys read.
//!
//! No call waits for a series and nothing relies on one: a call for a page *takes* its series, and puts it back where the next
//! page begins. A page may be requested by Range or by RangeStream, and the next one by the other. A page that is requested
//! twice, out of order or late finds no series, and is forwarded, as is one that its series cannot give. With etcd's auth on, a
//! series belongs to the client that began it, and etcd authorises each of its pages (I8).

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::HeaderMap;
use http_body::Frame;
use tokio::time::Instant;

use super::expiring_map::ExpiringMap;
use super::page_header::{ListOrigin, page_header};
use super::page_source::{CHUNK_TIMEOUT, PageSource};
use super::reason::StreamFallback;
use super::sharing::ShareScope;
use super::unary_over_stream::stream_request;
use crate::cache::{RangeQuery, ResponseHeader, Rope, Selection};
use crate::etcdserverpb::RangeRequest;
use crate::etcdserverpb::kv_client::KvClient;
use crate::grpc::status::is_ok;
use crate::grpc::{RangeResponseScanner, ResponseSummary};
use crate::keyspace::successor;
use crate::limits::{ByteBudget, HeldBytes};
use crate::mirror::Mirrors;
use crate::mirror::freshness::authorize::{Authorization, caller_identity};
use crate::proxy::response::Observer;
use crate::telemetry::Metrics;
use crate::upstream::{ReceiveWindow, Upstream, gates};

/// Interval at which expired series are dropped.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Series that wait for their next page may hold the streams' budget divided by this.
const WAITING_DIVISOR: u64 = 4;
/// Memory of a series in addition to its keys and stream (an estimate).
const SERIES_OVERHEAD_BYTES: u64 = 256;

/// Identifies a page: its first key, the list that it is of, and the clients that may continue the list.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SeriesKey {
    key: Bytes,
    range_end: Bytes,
    revision: i64,
    keys_only: bool,
    scope: ShareScope,
}

/// The rest of a list of which a page was sent.
#[derive(Debug)]
struct Series {
    /// Number of keys from the next page on, at the list's revision.
    left: u64,
    /// The number of etcd's history from which the first page was read.
    history: u64,
    cluster_id: u64,
    /// Opened for the second page.
    source: Option<PageSource>,
}

/// The series that wait for their next page.
#[derive(Debug)]
pub(super) struct PageSeriesCache {
    series: ExpiringMap<SeriesKey, Series>,
    budget: Arc<ByteBudget>,
    upstream: Arc<Upstream>,
    mirrors: Arc<Mirrors>,
    metrics: Arc<Metrics>,
}

/// A page from a series, and what it counts against the budget.
pub(crate) struct PageAnswer {
    pub(crate) header: ResponseHeader,
    pub(crate) selection: Selection,
    pub(crate) held: HeldBytes,
}

/// A request for a page.
#[derive(Clone, Copy)]
struct PageRequest<'a> {
    query: &'a RangeQuery,
    scope: &'a ShareScope,
    /// The client's.
    headers: &'a HeaderMap,
}

impl SeriesKey {
    fn new(query: &RangeQuery, scope: ShareScope) -> SeriesKey {
        SeriesKey {
            key: query.key.clone(),
            range_end: query.range_end.clone(),
            revision: query.revision,
            keys_only: query.keys_only,
            scope,
        }
    }

    /// The key of the page after one that ends with `last_key`, of a list at `revision`.
    fn after(&self, last_key: &[u8], revision: i64) -> SeriesKey {
        SeriesKey {
            key: successor(last_key),
            revision,
            ..self.clone()
        }
    }
}

impl PageSeriesCache {
    /// Series expire after `ttl`. Their streams count against `budget`, which has `max_bytes`.
    pub(super) fn new(
        ttl: Duration,
        max_bytes: u64,
        budget: &Arc<ByteBudget>,
        upstream: &Arc<Upstream>,
        mirrors: &Arc<Mirrors>,
        metrics: &Arc<Metrics>,
    ) -> Arc<PageSeriesCache> {
        Arc::new(PageSeriesCache {
            series: ExpiringMap::new(ttl, max_bytes / WAITING_DIVISOR),
            budget: Arc::clone(budget),
            upstream: Arc::clone(upstream),
            mirrors: Arc::clone(mirrors),
            metrics: Arc::clone(metrics),
        })
    }

    /// Drops expired series, until cancelled.
    pub(super) async fn run(&self) {
        let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
        loop {
            ticks.tick().await;
            self.sweep();
        }
    }

    fn sweep(&self) {
        let count = self.series.remove_expired();
        self.metrics
            .forwarding
            .series
            .set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The page that `query` asks for, if an earlier page of the list was sent in the same `scope`. `headers` are the client's.
    pub(super) async fn next_page(
        &self,
        query: &RangeQuery,
        scope: &ShareScope,
        headers: &HeaderMap,
    ) -> Option<PageAnswer> {
        if query.revision <= 0 || !query.is_page() {
            return None;
        }
        let key = SeriesKey::new(query, scope.clone());
        let mut series = self.series.remove(&key)?;
        let limit = u64::try_from(query.limit).ok()?;
        if series.source.is_none() && series.left <= limit {
            // The last page: a stream would save nothing.
            return None;
        }
        let request = PageRequest {
            query,
            scope,
            headers,
        };
        match self.cut_page(&mut series, request, limit).await {
            Ok((page, last_key)) => {
                self.metrics.forwarding.series_pages.inc();
                self.store(key.after(&last_key, key.revision), series);
                Some(page)
            }
            Err(reason) => {
                tracing::debug!(%reason, "a page series could not be continued; the page is forwarded");
                self.metrics.forwarding.record_stream_fallback(reason.as_str());
                None
            }
        }
    }

    /// Cuts the next page from the series; returns it and its last key.
    async fn cut_page(
        &self,
        series: &mut Series,
        request: PageRequest<'_>,
        limit: u64,
    ) -> Result<(PageAnswer, Vec<u8>), StreamFallback> {
        let granted = self.authorize(request).await?;
        self.page_header(series, request, granted).await?;
        let source = match &mut series.source {
            Some(source) => source,
            None => series
                .source
                .insert(self.open_stream(request, series.left).await?),
        };
        let keys = usize::try_from(limit.min(series.left)).map_err(|_| StreamFallback::Budget)?;
        let (entries, held) = source.next_page(keys).await?;
        let last_key = entries.last().ok_or(StreamFallback::Malformed)?.key().to_vec();
        let (count, more) = (series.left, series.left > limit);
        series.left -= entries.len() as u64;
        // Computed again, after all waiting: the minimum served revision (I11), and etcd's compaction, history and auth, must be current.
        let header = self.page_header(series, request, granted).await?;
        self.mirrors.cluster_state.record_served(header.revision);
        let page = PageAnswer {
            header,
            selection: Selection::of_page(entries, count, more),
            held,
        };
        Ok((page, last_key))
    }

    /// etcd's confirmation that the client may read this page; `None` where every client may.
    async fn authorize(&self, request: PageRequest<'_>) -> Result<Option<ResponseHeader>, StreamFallback> {
        if *request.scope == ShareScope::Everyone {
            return Ok(None);
        }
        let authorization = Authorization {
            key: request.query.key.clone(),
            range_end: request.query.range_end.clone(),
            caller: Some(request.headers),
            // The client's headers name the span already.
            trace: None,
            serializable: false,
        };
        let deadline = Instant::now() + CHUNK_TIMEOUT;
        let granted = self.mirrors.freshness.authorize(&authorization, deadline).await;
        Ok(Some(granted.map_err(|_| StreamFallback::Auth)?.header))
    }

    /// The header of the page, if etcd would still return the page now. As for reads from a mirror at a past revision, the known
    /// cluster state decides, without a call to etcd unless the minimum served revision is unknown. The result is the header with which etcd
    /// `granted` the page, if it did.
    async fn page_header(
        &self,
        series: &Series,
        request: PageRequest<'_>,
        granted: Option<ResponseHeader>,
    ) -> Result<ResponseHeader, StreamFallback> {
        let cluster_state = &self.mirrors.cluster_state;
        let revision = request.query.revision;
        if cluster_state.min_served_revision().is_none() && self.mirrors.freshness.prove().await.is_err() {
            return Err(StreamFallback::NotProven);
        }
        let origin = ListOrigin {
            history: series.history,
            cluster_id: series.cluster_id,
            revision,
        };
        let known = page_header(cluster_state, &origin, request.scope)?;
        Ok(granted.unwrap_or(known))
    }

    /// Opens a stream of all `keys` that are left from the page on.
    async fn open_stream(&self, request: PageRequest<'_>, keys: u64) -> Result<PageSource, StreamFallback> {
        let mut held = self.budget.hold();
        held.try_grow(ReceiveWindow::SHARED.stream.into())
            .map_err(|_| StreamFallback::Budget)?;
        let connection = self
            .upstream
            .streaming(Instant::now())
            .await
            .map_err(|_| StreamFallback::NoEndpoint)??;
        let (channel, origin) = connection.channel();
        let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        let mut call = tonic::Request::new(RangeRequest {
            limit: 0,
            ..stream_request(request.query)
        });
        if *request.scope != ShareScope::Everyone {
            *call.metadata_mut() = caller_identity(request.headers);
        }
        let opening = tokio::time::timeout(CHUNK_TIMEOUT, client.range_stream(call)).await;
        let stream = match opening {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) if status.code() == tonic::Code::Unimplemented => {
                return Err(connection.refused_range_stream(status.message()).into());
            }
            // etcd returns the same status for the forwarded page, if it is not the stream's own.
            Ok(Err(_)) => return Err(StreamFallback::Refused),
            Err(_) => return Err(StreamFallback::Late),
        };
        let reading = self.mirrors.pinned.read_at(request.query.revision);
        Ok(PageSource::new(Box::pin(stream), keys, held, reading))
    }

    fn store(&self, key: SeriesKey, series: Series) {
        if series.left > 0 {
            let held = series.source.as_ref().map_or(0, PageSource::held_bytes);
            let bytes = SERIES_OVERHEAD_BYTES + (key.key.len() + key.range_end.len()) as u64 + held;
            self.series.insert(key, series, bytes);
        }
        self.sweep();
    }

    /// The number of etcd's history now, for [`PageSeriesCache::expect_next`]: must be read before a page is requested.
    pub(super) fn history_number(&self) -> u64 {
        self.mirrors.cluster_state.history()
    }

    /// Expects the page after one that etcd sent. `history` is the one known when that page was requested.
    pub(super) fn expect_next(
        &self,
        query: &RangeQuery,
        scope: ShareScope,
        page: &ResponseSummary,
        history: u64,
    ) {
        let Ok(header) = page.header() else {
            return;
        };
        let left = page.count.saturating_sub(page.kvs);
        if !query.is_page() || !page.more || page.kvs == 0 || left == 0 {
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
        let key = SeriesKey::new(query, scope).after(&page.last_key, revision);
        self.store(key, series);
    }

    /// An observer of the response to `query`, if it may be a page. `scanner` is one for responses of its method.
    pub(super) fn observer(
        self: &Arc<Self>,
        query: &RangeQuery,
        scope: Option<ShareScope>,
        scanner: RangeResponseScanner,
    ) -> Option<PageObserver> {
        let scope = scope?;
        let may_stream = self
            .upstream
            .lowest_version()
            .is_some_and(|version| gates::RANGE_STREAM.is_open(version));
        (may_stream && query.is_page()).then(|| PageObserver {
            scanner: Some(scanner),
            query: query.clone(),
            scope,
            history: self.history_number(),
            cache: Arc::clone(self),
        })
    }
}

/// Observes a page that is forwarded.
#[derive(Debug)]
pub(super) struct PageObserver {
    /// `None` after bytes that it could not scan.
    scanner: Option<RangeResponseScanner>,
    query: RangeQuery,
    scope: ShareScope,
    history: u64,
    cache: Arc<PageSeriesCache>,
}

impl Observer for PageObserver {
    fn frame(&mut self, frame: &Frame<Rope>) {
        if let Some(data) = frame.data_ref() {
            // A forwarded frame is one slice.
            debug_assert_eq!(data.chunk().len(), data.remaining());
            let scanned = self
                .scanner
                .as_mut()
                .map(|scanner| scanner.scan(data.chunk(), |_| ()));
            if let Some(Err(_)) = scanned {
                self.scanner = None;
            }
        } else if let Some(trailers) = frame.trailers_ref()
            // Before the client has the trailers, so that its next call finds the series.
            && let Some(scanner) = self.scanner.take()
            && is_ok(trailers)
            && let Ok(page) = scanner.finish()
        {
            self.cache
                .expect_next(&self.query, self.scope.clone(), &page, self.history);
        }
    }
}
