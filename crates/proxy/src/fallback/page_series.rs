//! Page series: lists that clients read in pages are served, from the second page on, by one RangeStream of etcd at the
//! list's revision.
//!
//! For each page, etcd counts all remaining keys of the list; for a stream, it iterates over them once. When a
//! forwarded page has `more`, a series is stored under the key at which the next page begins. The request for that
//! page opens a stream of all remaining keys, and this page and later ones are read from it. Their `count` is the
//! first page's count, less the keys of earlier pages.
//!
//! A series is an optimization that no call depends on:
//!
//! - A request for a page *removes* the series, so that no other request can use it, and stores it again under the
//!   key of the next page.
//! - A page that is requested twice, out of order or too late finds no series, and is forwarded. So is a page that the
//!   series fails to provide.
//! - Each page may be requested by Range or by RangeStream.
//! - Each page has a quorum check of its own at the list's revision, unless it is serializable: its header is as new as
//!   etcd's, and a compaction ends the list at once.
//! - While etcd's auth is on, a series can be continued only with the credentials of the client that started it, and
//!   etcd authorizes each page (I8).

use std::{sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use etcd_store::cache::{RangeQuery, ResponseHeader, Rope, Selection};
use etcd_store::keyspace::successor;
use etcd_wire::etcdserverpb::{RangeRequest, kv_client::KvClient};
use etcd_wire::grpc::{RangeResponseScanner, ResponseSummary};
use etcd_wire::grpc::{metadata::shared_metadata, status::is_ok};
use http::HeaderMap;
use http_body::Frame;
use rangecache_base::telemetry::metrics::gauge;
use rangecache_edge::limits::{ByteKind, Gate, HeldBytes};
use rangecache_mirror::freshness::{Proof, Unproven};
use rangecache_mirror::{Mirrors, freshness::authorize::Authorization, lineage::Before};
use rangecache_upstream::{MAX_MESSAGE_BYTES, ReceiveWindow, Upstream, gates};
use tokio::time::Instant;
use tonic::metadata::MetadataMap;

use super::page_source::{CHUNK_TIMEOUT, PageSource};
use super::sharing::{List, ShareScope, check_list, page_header};
use super::{expiring_map::ExpiringMap, reason::StreamFallback, unary_over_stream::stream_request};
use crate::{metrics::ProxyMetrics, response::Observer};

/// Interval at which expired series are dropped.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Estimated memory of a series in addition to its keys and stream.
const SERIES_OVERHEAD_BYTES: u64 = 256;

/// Identity of a page: its first key, its list, and the clients that may continue the list.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SeriesKey {
    key: Bytes,
    range_end: Bytes,
    revision: i64,
    keys_only: bool,
    scope: ShareScope,
}

/// Remaining pages of a list.
#[derive(Debug)]
struct Series {
    /// Number of keys on the remaining pages, at the list's revision.
    keys_left: u64,
    /// State before the page that starts the series was requested.
    before: Before,
    cluster_id: u64,
    /// `None` until the second page is requested.
    source: Option<PageSource>,
}

/// Series whose next page has not been requested yet.
#[derive(Debug)]
pub(super) struct PageSeriesCache {
    series: ExpiringMap<SeriesKey, Series>,
    upstream: Arc<Upstream>,
    mirrors: Arc<Mirrors>,
    metrics: ProxyMetrics,
}

/// Page that was read from a series.
pub(crate) struct PageAnswer {
    pub(crate) header: ResponseHeader,
    pub(crate) selection: Selection,
    /// Budget for the entries; kept until the response is sent.
    pub(crate) held: HeldBytes,
}

/// Request for a page.
#[derive(Clone, Copy)]
struct PageRequest<'a> {
    query: &'a RangeQuery,
    scope: &'a ShareScope,
    /// Headers of the client's request, with its credentials.
    headers: &'a HeaderMap,
    /// Slots of the streams that are opened.
    gate: Gate<'a>,
}

impl SeriesKey {
    /// Identity of the page that `query` requests, which [is one](RangeQuery::is_page).
    fn new(query: &RangeQuery, scope: ShareScope) -> SeriesKey {
        // Without `..`, so that a new field does not compile until it is decided here.
        let RangeQuery {
            key,
            range_end,
            revision,
            keys_only,
            // Each page may have its own.
            limit: _,
            serializable: _,
            // A page is in key order, with entries and without filters.
            sort_order: _,
            sort_target: _,
            count_only: _,
            min_mod_revision: _,
            max_mod_revision: _,
            min_create_revision: _,
            max_create_revision: _,
        } = query;
        SeriesKey {
            key: key.clone(),
            range_end: range_end.clone(),
            revision: *revision,
            keys_only: *keys_only,
            scope,
        }
    }

    /// Bytes of the keys and of the credentials.
    fn bytes(&self) -> u64 {
        (self.key.len() + self.range_end.len()) as u64 + self.scope.bytes()
    }

    /// Identity of the page that follows this one, if this one ends with `last_key` and the list is at `revision`.
    fn after(&self, last_key: &[u8], revision: i64) -> SeriesKey {
        SeriesKey {
            key: successor(last_key),
            revision,
            ..self.clone()
        }
    }
}

impl Series {
    /// Checks that `proof` shows the history of each page: that of the stream, which began then on a connection opened then, and that
    /// of the page that the stream continues, whose count is that of all others.
    fn check_proof(
        &self,
        proof: &Proof,
        (connection_opened, began): (Instant, Instant),
    ) -> Result<(), StreamFallback> {
        let is_of_first_page = proof.connection_opened() <= self.before.began();
        if is_of_first_page && proof.covers(connection_opened, began) {
            return Ok(());
        }
        Err(StreamFallback::NotProven)
    }

    /// The list, of which `request` is for a page.
    fn list<'a>(&'a self, request: PageRequest<'a>) -> List<'a> {
        List {
            before: &self.before,
            cluster_id: self.cluster_id,
            revision: request.query.revision,
            scope: request.scope,
        }
    }
}

impl PageSeriesCache {
    /// Creates an empty cache whose series expire after `ttl` (`--series-ttl`), and have at most `max_bytes`.
    pub(super) fn new(
        ttl: Duration,
        max_bytes: u64,
        upstream: &Arc<Upstream>,
        mirrors: &Arc<Mirrors>,
        metrics: &ProxyMetrics,
    ) -> Arc<PageSeriesCache> {
        Arc::new(PageSeriesCache {
            series: ExpiringMap::new(ttl, max_bytes),
            upstream: Arc::clone(upstream),
            mirrors: Arc::clone(mirrors),
            metrics: metrics.clone(),
        })
    }

    /// Drops expired series every second until the future is dropped.
    pub(super) async fn run(&self) {
        let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
        loop {
            ticks.tick().await;
            self.sweep();
        }
    }

    /// Drops expired series and updates the metric of stored ones.
    fn sweep(&self) {
        let count = self.series.remove_expired();
        self.metrics.forwarding.series.set(gauge(count));
    }

    /// Returns the page that `query` requests, if the series that precedes it is stored for the same `scope`; `None`
    /// if the page must be forwarded. `headers` are those of the client's request; a stream that is opened has a slot of
    /// `gate` until it begins.
    pub(super) async fn next_page(
        &self,
        query: &RangeQuery,
        scope: &ShareScope,
        headers: &HeaderMap,
        gate: Gate<'_>,
    ) -> Option<PageAnswer> {
        if query.revision <= 0 || !query.is_page() {
            return None;
        }
        let key = SeriesKey::new(query, scope.clone());
        let mut series = self.series.remove(&key)?;
        let limit = u64::try_from(query.limit).ok()?;
        if series.source.is_none() && series.keys_left <= limit {
            // The last page: a stream for one page costs etcd as much as forwarding it.
            return None;
        }
        let request = PageRequest {
            query,
            scope,
            headers,
            gate,
        };
        match self.cut_page(&mut series, request, limit).await {
            Ok((page, last_key)) => {
                self.metrics.forwarding.series_pages.inc();
                self.store(key.after(&last_key, key.revision), series);
                Some(page)
            }
            Err(reason) => {
                tracing::debug!(%reason, "a page series could not be continued; the page is forwarded");
                self.metrics.stream_fallbacks.record(reason.as_str());
                None
            }
        }
    }

    /// Reads the next page from the series; returns it with its last key. Opens the stream for the second page.
    async fn cut_page(
        &self,
        series: &mut Series,
        request: PageRequest<'_>,
        limit: u64,
    ) -> Result<(PageAnswer, Vec<u8>), StreamFallback> {
        let granted = self.authorize(request).await?;
        // Computed before a stream is opened, so that no stream is opened for a page that may not be served.
        self.check_list(series, request)?;
        let source = match &mut series.source {
            Some(source) => source,
            None => series
                .source
                .insert(self.open_stream(request, series.keys_left).await?),
        };
        let keys = usize::try_from(limit.min(series.keys_left)).map_err(|_| StreamFallback::Budget)?;
        let (entries, held) = source.next_page(keys).await?;
        let opened = source.opened;
        let last_key = entries.last().ok_or(StreamFallback::Malformed)?.key().to_vec();
        let (count, more) = (series.keys_left, series.keys_left > limit);
        series.keys_left -= entries.len() as u64;
        // Checked after the entries were read: meanwhile etcd may have compacted the revision, replaced its history or
        // enabled auth. No await follows.
        let header = match granted {
            Some(granted) => {
                self.check_list(series, request)?;
                series.check_proof(&granted, opened)?;
                granted.header
            }
            None => self.proven_header(series, request, opened).await?,
        };
        if !self
            .mirrors
            .cluster_state
            .record_served(series.before.history_id(), header.revision)
        {
            return Err(StreamFallback::HistoryReplaced);
        }
        let page = PageAnswer {
            header,
            selection: Selection::of_page(entries, count, more),
            held,
        };
        Ok((page, last_key))
    }

    /// Requests etcd's confirmation that the client may read this page. `None` if auth is off.
    async fn authorize(&self, request: PageRequest<'_>) -> Result<Option<Proof>, StreamFallback> {
        if *request.scope == ShareScope::Everyone {
            return Ok(None);
        }
        let authorization = Authorization {
            key: request.query.key.clone(),
            range_end: request.query.range_end.clone(),
            caller: Some(request.headers),
            // The client's headers already carry the trace context.
            trace: None,
            revision: request.query.revision,
            serializable: false,
        };
        let deadline = Instant::now() + CHUNK_TIMEOUT;
        match self.mirrors.freshness.authorize(&authorization, deadline).await {
            Ok(granted) => Ok(Some(granted)),
            Err(Unproven::Compacted(_)) => Err(StreamFallback::Compacted),
            Err(Unproven::For(_)) => Err(StreamFallback::Auth),
        }
    }

    /// Returns the header of a page that needs no authorization: that of a quorum check at the list's revision which is
    /// sent now, or for a serializable page the known one. Fails if etcd would not return the page, and if nothing shows that
    /// the history of the header is that of the entries. These came by a stream that began then, on a connection opened then.
    async fn proven_header(
        &self,
        series: &Series,
        request: PageRequest<'_>,
        opened: (Instant, Instant),
    ) -> Result<ResponseHeader, StreamFallback> {
        let is_min_served_known = self.mirrors.cluster_state.min_served_revision().is_some();
        if request.query.serializable && is_min_served_known {
            if self.mirrors.cluster_state.last_heard_on() > series.before.began() {
                return Err(StreamFallback::NotProven);
            }
            return page_header(&self.mirrors.cluster_state, &series.list(request));
        }
        let revision = request.query.revision;
        let proof = match self.mirrors.freshness.prove_at(revision, None).await {
            Ok(proof) => proof,
            Err(Unproven::Compacted(_)) => return Err(StreamFallback::Compacted),
            Err(Unproven::For(_)) => return Err(StreamFallback::NotProven),
        };
        self.check_list(series, request)?;
        series.check_proof(&proof, opened)?;
        Ok(proof.header)
    }

    /// Checks that etcd would still return the page, by the known cluster state.
    fn check_list(&self, series: &Series, request: PageRequest<'_>) -> Result<(), StreamFallback> {
        check_list(&self.mirrors.cluster_state, &series.list(request))?;
        Ok(())
    }

    /// Opens a stream of the remaining `keys`, the requested page included.
    async fn open_stream(&self, request: PageRequest<'_>, keys: u64) -> Result<PageSource, StreamFallback> {
        let mut held = request.gate.account.hold(ByteKind::Series);
        held.try_grow(ReceiveWindow::SHARED.stream.into())
            .map_err(|_| StreamFallback::Budget)?;
        let _slot = request.gate.acquire().await.map_err(|_| StreamFallback::Busy)?;
        let connection = self
            .upstream
            .streaming(Instant::now())
            .await
            .map_err(|_| StreamFallback::NoEndpoint)??;
        let (channel, origin) = connection.channel();
        let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let mut call = tonic::Request::new(RangeRequest {
            limit: 0,
            ..stream_request(request.query)
        });
        *call.metadata_mut() = MetadataMap::from_headers(shared_metadata(request.headers));
        let began = Instant::now();
        let opening = tokio::time::timeout(CHUNK_TIMEOUT, client.range_stream(call)).await;
        let stream = match opening {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) if status.code() == tonic::Code::Unimplemented => {
                return Err(connection.refused_range_stream(status.message()).into());
            }
            // Not returned to the client: the forwarded page gets its own status from etcd.
            Ok(Err(_)) => return Err(StreamFallback::Refused),
            Err(_) => return Err(StreamFallback::Late),
        };
        self.mirrors.cluster_state.note_answered(connection.opened());
        let reading = self.mirrors.pinned.read_at(request.query.revision);
        Ok(PageSource::new(
            Box::pin(stream),
            keys,
            held,
            reading,
            (connection.opened(), began),
        ))
    }

    /// Stores `series` under the identity of its next page, unless the list is complete.
    fn store(&self, key: SeriesKey, series: Series) {
        if series.keys_left > 0 {
            let held = series.source.as_ref().map_or(0, PageSource::held_bytes);
            // The map keeps its keys twice.
            let bytes = SERIES_OVERHEAD_BYTES + 2 * key.bytes() + held;
            self.series.insert(key, series, bytes);
        }
        self.sweep();
    }

    /// State before a page of a list is requested from etcd, for [`PageSeriesCache::expect_next`].
    pub(super) fn begin_list(&self) -> Before {
        self.mirrors.cluster_state.before_check()
    }

    /// Starts a series after a forwarded `page`, the response to `query`. `before` is the state before the page was requested: if history
    /// was replaced since, the series is never used.
    pub(super) fn expect_next(
        &self,
        query: &RangeQuery,
        scope: ShareScope,
        page: &ResponseSummary,
        before: Before,
    ) {
        let Ok(header) = page.header() else {
            return;
        };
        let keys_left = page.count.saturating_sub(page.kvs);
        if !query.is_page() || !page.more || page.kvs == 0 || keys_left == 0 {
            return;
        }
        let revision = if query.revision > 0 {
            query.revision
        } else {
            header.revision
        };
        let series = Series {
            keys_left,
            before,
            cluster_id: header.cluster_id,
            source: None,
        };
        let key = SeriesKey::new(query, scope).after(&page.last_key, revision);
        self.store(key, series);
    }

    /// Returns an observer for the response to `query`, if that may be a page. `scanner` must be one for its method.
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
            before: self.begin_list(),
            cache: Arc::clone(self),
        })
    }
}

/// Scans a forwarded page, and starts a series when it is complete.
#[derive(Debug)]
pub(super) struct PageObserver {
    /// `None` after an error: the response starts no series.
    scanner: Option<RangeResponseScanner>,
    query: RangeQuery,
    scope: ShareScope,
    before: Before,
    cache: Arc<PageSeriesCache>,
}

impl Observer for PageObserver {
    fn frame(&mut self, frame: &Frame<Rope>) {
        if let Some(data) = frame.data_ref() {
            // Forwarded frames have one piece; a frame of several pieces would be scanned only in part.
            debug_assert_eq!(data.chunk().len(), data.remaining());
            let scanned = self
                .scanner
                .as_mut()
                .map(|scanner| scanner.scan(data.chunk(), |_| ()));
            if let Some(Err(_)) = scanned {
                self.scanner = None;
            }
        } else if let Some(trailers) = frame.trailers_ref()
            // The observer runs before the trailers are sent: the client's next request finds the series.
            && let Some(scanner) = self.scanner.take()
            && is_ok(trailers)
            && let Ok(page) = scanner.finish()
        {
            self.cache
                .expect_next(&self.query, self.scope.clone(), &page, self.before.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn weight_of_a_series_includes_its_credentials() {
        let list = RangeQuery {
            key: "a".into(),
            range_end: "b".into(),
            ..RangeQuery::default()
        };
        let credentials = HeaderValue::from_str(&"t".repeat(60_000)).unwrap();
        let of = |scope| SeriesKey::new(&list, scope).bytes();
        assert_eq!(of(ShareScope::Everyone), 2);
        assert_eq!(of(ShareScope::Credentials(vec![credentials])), 60_002);
    }
}
