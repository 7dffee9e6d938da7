//! **fallback**: reads that memory cannot answer, fetched from etcd. [`Fallback::fetch`] has the order in which the
//! alternatives are tried.
//!
//! When a mirror is unavailable, all of its reads arrive here at once and must not overload etcd: large reads are
//! queued for one of a few turns, identical reads share a call, and reads beyond the bounds are refused with a
//! retryable status.
//!
//! | file | purpose |
//! |---|---|
//! | `page_series` | serves later pages of a list from one RangeStream |
//! | `page_source` | splits the RangeStream into pages |
//! | `sharing` | determines which clients may share a response or a series, and whether etcd would still return a page |
//! | `single_flight` | makes one call for identical reads; `shared_response` is its result |
//! | `unary_over_stream` | serves a large Range by a RangeStream of etcd |
//! | `stream_over_pages` | serves a RangeStream by unary pages, if etcd has no RangeStream |
//! | `expiring_map` | series, and lists that are too large to be held complete, remembered for a while |
//! | `reason` | reasons for not using a stream |

mod expiring_map;
mod page_series;
mod page_source;
mod reason;
mod shared_response;
mod sharing;
mod single_flight;
mod stream_over_pages;
mod unary_over_stream;

use std::sync::Arc;

use bytes::Bytes;
use etcd_store::cache::RangeQuery;
use etcd_wire::grpc::metadata::{grpc_content_type, shared_head};
use etcd_wire::grpc::method::RANGE;
use etcd_wire::grpc::{CallMetadata, Method, RangeResponseScanner, Status};
use http::request::Parts;
use rangecache_base::telemetry::{Outcome, outcome::Failure};
use rangecache_edge::limits::{ByteKind, BytesLedger, ClientAccount, Deadline, Gate, SlotPolicy, Slots};
use rangecache_mirror::Mirrors;
use rangecache_upstream::{ConnectionClass, NoRangeStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::flags::ForwardConfig;
use super::forward::{Forward, RequestBody, outcome_of, status_of};
use super::response::{CallResult, ResponseBody, status_response};
use crate::metrics::ProxyMetrics;
use expiring_map::TooLarge;
use page_series::{PageObserver, PageSeriesCache};
use reason::StreamFallback;
use shared_response::{NotShared, SharedResponse};
use sharing::ShareScope;
use single_flight::{CallRole, Leader, SingleFlight};
use stream_over_pages::{PageCalls, PageError, Pager};
use unary_over_stream::{Converted, convert};

pub(super) use page_series::PageAnswer;

/// Identical lists that share no response have the slots of large reads (`--forward-max-large`) divided by this.
const UNSHARED_DIVISOR: usize = 8;

/// Result of a call that several reads share.
type SharedResult = Result<Arc<SharedResponse>, NotShared>;

/// Fetches reads from etcd, within the bounds that protect etcd and this process.
#[derive(Debug)]
pub(super) struct Fallback {
    forward: Arc<Forward>,
    page_series: Arc<PageSeriesCache>,
    /// Calls in flight for large Ranges, by framed request.
    shared_calls: Arc<SingleFlight<SharedResult>>,
    /// Slots of large reads (`--forward-max-large`).
    large: Arc<Slots>,
    /// Slots of lists that share no response. Those that are too large to be held etcd encodes each as a whole, and all at
    /// once would keep it from confirming anything for a quarter of a second; those whose shared call has failed would
    /// all be sent at once when etcd is least able to respond (F5).
    unshared: Arc<Slots>,
    too_large: TooLarge,
    metrics: ProxyMetrics,
    /// Joins the tasks that end a leadership.
    tasks: TaskTracker,
}

/// A Range or RangeStream that memory cannot answer.
pub(super) struct UpstreamRead<'a> {
    /// Either Range or RangeStream.
    pub(super) method: Method,
    pub(super) parts: Parts,
    /// The client's request message with its gRPC prefix, unchanged.
    pub(super) framed: Bytes,
    pub(super) query: &'a RangeQuery,
    pub(super) metadata: &'a CallMetadata,
    /// Account of the client's connection.
    pub(super) account: &'a Arc<ClientAccount>,
    pub(super) deadline: Deadline,
    /// Outcome for metrics; updated here if the read is streamed, paged or refused.
    pub(super) outcome: &'a mut Outcome,
}

/// Response to a read.
pub(super) enum Fetched {
    /// A complete response for the client.
    Result(CallResult),
    /// Entries of a page, which the caller encodes as a response of its method.
    Page(PageAnswer),
}

impl Fallback {
    /// Bounds large reads, and those that wait, from now on.
    pub(super) fn set_slots(&self, max_large: usize, max_waiting: u32) {
        self.large.set(max_large, max_waiting);
        self.unshared
            .set(max_large.div_ceil(UNSHARED_DIVISOR), max_waiting);
    }

    pub(super) fn new(
        flags: &ForwardConfig,
        forward: &Arc<Forward>,
        mirrors: &Arc<Mirrors>,
        ledger: &BytesLedger,
        metrics: &ProxyMetrics,
        tasks: &TaskTracker,
    ) -> Arc<Fallback> {
        let max_large = flags.max_large as usize;
        let slots = |max| {
            let metrics = metrics.slots.large();
            Slots::new(SlotPolicy::Kept, max, flags.max_waiting, None, metrics)
        };
        Arc::new(Fallback {
            forward: Arc::clone(forward),
            page_series: PageSeriesCache::new(
                flags.series_ttl,
                ledger.max_bytes(ByteKind::Series),
                &forward.upstream,
                mirrors,
                metrics,
            ),
            shared_calls: SingleFlight::new(tasks),
            large: slots(max_large),
            unshared: slots(max_large.div_ceil(UNSHARED_DIVISOR)),
            too_large: TooLarge::new(),
            metrics: metrics.clone(),
            tasks: tasks.clone(),
        })
    }

    /// Fetches a read from etcd. Defines **the order** of the alternatives; each one leaves what it cannot serve to the
    /// next.
    pub(super) async fn fetch(self: &Arc<Self>, mut read: UpstreamRead<'_>) -> Fetched {
        let scope = self.share_scope(&read);
        // A client that bypasses the cache gets its own call, whatever the size of the response.
        if read.metadata.bypass && read.method == Method::Range {
            return Fetched::Result(self.forward_small(read, ConnectionClass::Stream, None).await);
        }
        // 1. The next page of a list whose earlier page was served in the same share scope.
        if let Some(page) = self.next_page(&mut read, scope.as_ref()).await {
            return Fetched::Page(page);
        }
        Fetched::Result(match read.method {
            // 2. etcd's own stream, or unary pages if etcd cannot stream the request.
            Method::RangeStream => self.stream_or_pages(read, scope).await,
            // 3. Small reads, in turn.
            _ if !read.query.is_large() => {
                let observer = self.page_observer(read.query, scope, RangeResponseScanner::unary());
                self.forward_small(read, ConnectionClass::Unary, observer).await
            }
            _ => self.fetch_large(read, scope).await,
        })
    }

    /// Fetches a large Range: joins a shared call, or waits for a turn and is then converted to a RangeStream or
    /// forwarded.
    async fn fetch_large(self: &Arc<Self>, read: UpstreamRead<'_>, scope: Option<ShareScope>) -> CallResult {
        // 4. A call that is shared with identical reads.
        let leader = match self.lead_or_join(&read, scope.as_ref()) {
            None => None,
            Some(CallRole::Lead(leader)) => Some(leader),
            Some(CallRole::Join(join)) => {
                return match self.wait_for_shared_call(join).await {
                    Ok(shared) => {
                        if shared.is_streamed {
                            *read.outcome = read.outcome.streamed();
                        }
                        Ok(shared.response(&read.metadata.content_type))
                    }
                    Err(NotShared::Refused(status)) => refuse(read, status),
                    Err(NotShared::DoesNotFit { .. } | NotShared::OfTheCall) => {
                        self.fetch_alone(read, scope, None, &self.unshared).await
                    }
                };
            }
        };
        let is_too_large = self.too_large.contains(&read.framed);
        let slots = if is_too_large { &self.unshared } else { &self.large };
        self.fetch_alone(read, scope, leader, slots).await
    }

    /// Fetches a large Range by a call of its own, once `slots` has one for it.
    async fn fetch_alone(
        self: &Arc<Self>,
        read: UpstreamRead<'_>,
        scope: Option<ShareScope>,
        leader: Option<Leader<SharedResult>>,
        slots: &Arc<Slots>,
    ) -> CallResult {
        let slot = match slots.acquire(read.account, read.deadline).await {
            Ok(slot) => slot,
            Err(cause) => return refuse(read, status_of(cause)),
        };
        // 5. One RangeStream. The response is complete here and etcd has nothing left to do, so that the slot and the
        // leadership end before the client reads.
        if let Some(converted) = self
            .convert(
                &read.parts,
                &read.framed,
                read.query,
                scope.as_ref(),
                read.account,
            )
            .await
        {
            drop((slot, leader));
            *read.outcome = read.outcome.streamed();
            return Ok(converted.into_response());
        }
        // 6. The unchanged call. etcd buffers the response until the client has read it, so the body keeps both; but a
        // client that reads slowly must not delay identical reads for long.
        let observer = self.page_observer(read.query, scope, RangeResponseScanner::unary());
        let result = self.forward(read, ConnectionClass::Stream, observer, None).await;
        let leader = leader.map(|leader| self.lead_for_a_while(leader));
        result.map(|response| response.map(|body| body.holding((slot, leader))))
    }

    /// Keeps the leadership until the returned guard is dropped, at most for the time that a read waits for buffers.
    fn lead_for_a_while(&self, leader: Leader<SharedResult>) -> DropGuard {
        let (ended, max_wait) = (CancellationToken::new(), self.forward.max_wait);
        let waiting = ended.clone();
        self.tasks.spawn(async move {
            waiting.run_until_cancelled(tokio::time::sleep(max_wait)).await;
            drop(leader);
        });
        ended.drop_guard()
    }

    /// Clients that may share the response to this read; `None` if none may.
    fn share_scope(&self, read: &UpstreamRead<'_>) -> Option<ShareScope> {
        let has_own_user = self.forward.upstream.credentials().are_valid();
        let auth = self.forward.cluster_state.auth();
        ShareScope::from_call(read.metadata, &read.parts.headers, auth, has_own_user)
    }

    /// Serves a page from the series that an earlier page started.
    async fn next_page(&self, read: &mut UpstreamRead<'_>, scope: Option<&ShareScope>) -> Option<PageAnswer> {
        let gate = self.gate(read);
        let page = self
            .page_series
            .next_page(read.query, scope?, &read.parts.headers, gate)
            .await?;
        *read.outcome = read.outcome.streamed();
        Some(page)
    }

    /// Forwards the call unchanged when it has a slot of the small reads, which ends when the response begins: a client
    /// that does not read it keeps no slot.
    async fn forward_small(
        &self,
        read: UpstreamRead<'_>,
        class: ConnectionClass,
        observer: Option<PageObserver>,
    ) -> CallResult {
        let gate = self.gate(&read);
        self.forward(read, class, observer, Some(gate)).await
    }

    /// Forwards the call unchanged, with an observer that may start a page series.
    async fn forward(
        &self,
        read: UpstreamRead<'_>,
        class: ConnectionClass,
        observer: Option<PageObserver>,
        gate: Option<Gate<'_>>,
    ) -> CallResult {
        let content_type = read.metadata.content_type.clone();
        let body = RequestBody::Read(read.framed);
        let sent = self
            .forward
            .respond(read.parts, body, read.method, class, read.account, gate)
            .await;
        sent.map(|response| response.map(|body| with_observer(body, observer)))
            .or_else(|error| error.into_result(content_type))
    }

    /// Forwards a Range or RangeStream that could not be decoded, like a small read.
    pub(super) async fn forward_undecoded(
        &self,
        parts: Parts,
        framed: Bytes,
        method: Method,
        account: &Arc<ClientAccount>,
        deadline: Deadline,
    ) -> CallResult {
        let content_type = grpc_content_type(&parts.headers);
        let gate = Gate {
            slots: &self.forward.small,
            account,
            deadline,
        };
        let (body, class) = (RequestBody::Read(framed), ConnectionClass::of(method));
        let sent = self
            .forward
            .respond(parts, body, method, class, account, Some(gate));
        sent.await.or_else(|error| error.into_result(content_type))
    }

    /// Access of `read` to the slots of small reads.
    fn gate<'a>(&'a self, read: &UpstreamRead<'a>) -> Gate<'a> {
        Gate {
            slots: &self.forward.small,
            account: read.account,
            deadline: read.deadline,
        }
    }

    /// Observer that starts a page series if the response is a page; `None` if it cannot be one.
    fn page_observer(
        &self,
        query: &RangeQuery,
        scope: Option<ShareScope>,
        scanner: RangeResponseScanner,
    ) -> Option<PageObserver> {
        self.page_series.observer(query, scope, scanner)
    }

    async fn stream_or_pages(
        self: &Arc<Self>,
        read: UpstreamRead<'_>,
        scope: Option<ShareScope>,
    ) -> CallResult {
        let no_stream = if read.query.may_page() {
            let observer = self.page_observer(read.query, scope, RangeResponseScanner::stream());
            let gate = self.gate(&read);
            let opened = self.forward.open_stream(&read.parts, &read.framed, gate);
            match opened.await {
                Ok(Ok(response)) => return Ok(response.map(|body| with_observer(body, observer))),
                Ok(Err(no_stream)) => no_stream,
                Err(error) => return error.into_result(read.metadata.content_type.clone()),
            }
        } else {
            // etcd sorts each chunk of a stream separately, so that sorted streams repeat keys. The pager reads such
            // a range as one response and splits it.
            NoRangeStream::Shape
        };
        self.metrics.stream_fallbacks.record(no_stream.as_str());
        if let Outcome::Forwarded(reason) = *read.outcome {
            *read.outcome = Outcome::Paged(reason);
        }
        let content_type = read.metadata.content_type.clone();
        let calls = PageCalls::new(&self.forward, &self.large, &read.parts, read.account);
        match Pager::new(calls, read.query, read.deadline).start().await {
            Ok(stream) => Ok(ResponseBody::from_source(stream).into_response(content_type)),
            Err(PageError::Etcd(status)) => {
                let mut response = ResponseBody::empty().into_response(content_type);
                response.headers_mut().extend(status);
                Ok(response)
            }
            Err(PageError::Reset(error)) => Err(error),
            Err(PageError::Local(status)) => {
                if let Some(outcome) = outcome_of(&status) {
                    *read.outcome = outcome;
                }
                Ok(status_response(&status, content_type))
            }
        }
    }

    /// Returns whether a large Range leads or joins; `None` if its response may not be shared.
    fn lead_or_join(
        self: &Arc<Self>,
        read: &UpstreamRead<'_>,
        scope: Option<&ShareScope>,
    ) -> Option<CallRole<SharedResult>> {
        if scope != Some(&ShareScope::Everyone) || self.too_large.contains(&read.framed) {
            return None;
        }
        Some(self.shared_calls.lead_or_join(&read.framed, || {
            // Without the first client's deadline: each client waits until its own.
            let parts = shared_head(RANGE, &read.parts.headers);
            let (fallback, framed, query) = (Arc::clone(self), read.framed.clone(), read.query.clone());
            let account = Arc::clone(read.account);
            async move { fallback.shared_call(parts, framed, &query, &account).await }
        }))
    }

    /// Waits for the shared call and returns its response.
    async fn wait_for_shared_call(&self, join: single_flight::JoinedCall<SharedResult>) -> SharedResult {
        // Counted like a read that waits for a slot: one bound covers both.
        let _waiting = self.large.count_waiting()?;
        let cancelled = || NotShared::Refused(Status::SharedCallCancelled);
        let shared = join.wait().await.ok_or_else(cancelled)??;
        self.metrics.forwarding.joined.inc();
        Ok(shared)
    }

    /// Makes one call for several reads, and returns its complete response. Runs in a task of `shared_calls`.
    async fn shared_call(
        &self,
        parts: Parts,
        framed: Bytes,
        query: &RangeQuery,
        account: &Arc<ClientAccount>,
    ) -> SharedResult {
        let _slot = self.large.acquire(account, Deadline::NONE).await?;
        if let Some(converted) = self
            .convert(&parts, &framed, query, Some(&ShareScope::Everyone), account)
            .await
        {
            return SharedResponse::from(converted).for_all();
        }
        if self.too_large.contains(&framed) {
            return Err(NotShared::DoesNotFit { is_too_large: true });
        }
        let body = RequestBody::Read(framed.clone());
        let sent = self.forward.send(parts, body, ConnectionClass::Stream).await;
        let collected = SharedResponse::collect(sent?, &self.forward.cluster_state, account).await;
        if let Err(NotShared::DoesNotFit { is_too_large: true }) = collected {
            self.too_large.add(&framed);
        }
        collected?.for_all()
    }

    /// Serves a large Range by a RangeStream; `None` if it must be forwarded instead.
    async fn convert(
        &self,
        parts: &Parts,
        framed: &Bytes,
        query: &RangeQuery,
        scope: Option<&ShareScope>,
        account: &Arc<ClientAccount>,
    ) -> Option<Converted> {
        // Only of etcd is it known that both return the same.
        if !query.is_streamable() || self.forward.upstream.is_emulation() {
            return None;
        }
        if self.too_large.contains(framed) {
            self.metrics
                .stream_fallbacks
                .record(StreamFallback::TooLarge.as_str());
            return None;
        }
        // Read before the call: if history is replaced during the call, the page must not start a series.
        let begin = self.page_series.begin_list();
        let converted = match convert(&self.forward, parts, query, account).await {
            Ok(converted) => converted,
            Err(reason) => {
                tracing::debug!(%reason, "a large Range could not be served by a RangeStream; the call is forwarded");
                self.metrics.stream_fallbacks.record(reason.as_str());
                if reason == StreamFallback::TooLarge {
                    self.too_large.add(framed);
                }
                return None;
            }
        };
        if let (Some(summary), Some(scope)) = (&converted.summary, scope) {
            self.page_series.expect_next(query, scope.clone(), summary, begin);
        }
        Some(converted)
    }

    /// Drops expired page series until the future is dropped.
    pub(super) async fn run(&self) {
        self.page_series.run().await;
    }
}

/// Attaches `observer` to `body`, if there is an observer.
fn with_observer(body: ResponseBody, observer: Option<PageObserver>) -> ResponseBody {
    match observer {
        Some(observer) => body.observed_by(observer),
        None => body,
    }
}

/// Ends a read with this status of rangecache, and sets its outcome.
fn refuse(read: UpstreamRead<'_>, status: Status) -> CallResult {
    *read.outcome = outcome_of(&status).unwrap_or(Outcome::Failed(Failure::SharedCall));
    let content_type = read.metadata.content_type.clone();
    Ok(status_response(&status, content_type))
}
