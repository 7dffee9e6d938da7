//! **fallback**: reads that memory cannot answer. [`Fallback::fetch`] has the order of the ways to get them from etcd.
//!
//! This is the last step of degradation: what cannot be answered from memory must not stampede etcd. Large reads take turns,
//! identical ones share a call, and a read beyond the bounds is refused with a retryable status.
//!
//! | file | what it does |
//! |---|---|
//! | `page_series` | later pages of a list, from one RangeStream; `page_source` cuts them, `page_header` checks that etcd would still return them, `expiring_map` keeps the series |
//! | `sharing` | which clients may share |
//! | `single_flight` | one call for identical reads; `shared_response` is its result |
//! | `unary_over_stream` | a large Range as a RangeStream |
//! | `stream_over_pages` | a RangeStream as unary pages |
//! | `reason`, `refused` | why a stream was not used; why a read was refused |

mod expiring_map;
mod page_header;
mod page_series;
mod page_source;
mod reason;
mod refused;
mod shared_response;
mod sharing;
mod single_flight;
mod stream_over_pages;
mod unary_over_stream;

pub(super) use page_series::PageAnswer;

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::forward::{Forward, RequestBody};
use super::idle::ResponseRegistry;
use super::response::{CallResult, ResponseBody, status_response};
use crate::cache::RangeQuery;
use crate::config::Config;
use crate::grpc::{CallMetadata, Method, RangeResponseScanner};
use crate::limits::{ByteBudget, Turns};
use crate::mirror::Mirrors;
use crate::telemetry::{Metrics, Outcome};
use crate::upstream::{ConnectionClass, NoRangeStream};
use page_series::{PageObserver, PageSeriesCache};
use refused::Refused;
use shared_response::SharedResponse;
use sharing::ShareScope;
use single_flight::{Role, SingleFlight};
use stream_over_pages::{PageCalls, PageError, Pager};
use unary_over_stream::{Converted, UnaryOverStream};

/// The result of a call that several reads share.
type SharedResult = Result<Arc<SharedResponse>, Refused>;

/// Gets reads from etcd.
#[derive(Debug)]
pub(super) struct Fallback {
    forward: Arc<Forward>,
    page_series: Arc<PageSeriesCache>,
    shared_calls: Arc<SingleFlight<SharedResult>>,
    /// Bytes of the responses that several reads share.
    shared_bytes: Arc<ByteBudget>,
    turns: Arc<Turns>,
    unary_over_stream: UnaryOverStream,
    responses: Arc<ResponseRegistry>,
    metrics: Arc<Metrics>,
}

/// A Range or RangeStream that memory cannot answer.
pub(super) struct Read<'a> {
    /// Range or RangeStream.
    pub(super) method: Method,
    pub(super) parts: Parts,
    /// The message with its prefix, unchanged.
    pub(super) framed: Bytes,
    pub(super) query: &'a RangeQuery,
    pub(super) metadata: &'a CallMetadata,
    /// The client's.
    pub(super) deadline: Option<Instant>,
    /// Changed when the read is not simply forwarded.
    pub(super) outcome: &'a mut Outcome,
}

/// What etcd returned for a read.
pub(super) enum Fetched {
    /// The call's result.
    Result(CallResult),
    /// A page in entries, of which the caller makes a response of its method.
    Page(PageAnswer),
}

impl Fallback {
    pub(super) fn new(
        config: &Config,
        forward: &Arc<Forward>,
        mirrors: &Arc<Mirrors>,
        responses: &Arc<ResponseRegistry>,
        metrics: &Arc<Metrics>,
        tasks: &TaskTracker,
    ) -> Arc<Fallback> {
        let gauges = &metrics.forwarding;
        let stream_bytes =
            ByteBudget::with_fair_growth(config.forward.stream_max_bytes, &gauges.stream_held_bytes);
        Arc::new(Fallback {
            forward: Arc::clone(forward),
            page_series: PageSeriesCache::new(
                config.forward.series_ttl,
                config.forward.stream_max_bytes,
                &stream_bytes,
                &forward.upstream,
                mirrors,
                metrics,
            ),
            shared_calls: SingleFlight::new(tasks),
            shared_bytes: ByteBudget::first_come(config.forward.shared_max_bytes, &gauges.shared_bytes),
            turns: Turns::new(
                config.forward.max_large as usize,
                config.forward.max_waiting,
                &gauges.large,
                &gauges.waiting,
            ),
            unary_over_stream: UnaryOverStream::new(&stream_bytes, config.forward.stream_max_wait),
            responses: Arc::clone(responses),
            metrics: Arc::clone(metrics),
        })
    }

    /// Gets a read from etcd: **the order** of the ways to do so. Each way passes on what it cannot serve.
    pub(super) async fn fetch(self: &Arc<Self>, mut read: Read<'_>) -> Fetched {
        let scope = self.share_scope(&read);
        // A client that reads around the cache gets a call of its own, of whatever length.
        if read.metadata.bypass && read.method == Method::Range {
            return Fetched::Result(self.forward(read, ConnectionClass::Stream, None).await);
        }
        // 1. The next page of a list that an earlier call began.
        if let Some(page) = self.next_page(&mut read, scope.as_ref()).await {
            return Fetched::Page(page);
        }
        Fetched::Result(match read.method {
            // 2. etcd's own stream, or pages where etcd has none.
            Method::RangeStream => self.stream_or_pages(read, scope).await,
            // 3. Small reads are simply forwarded.
            _ if !read.query.is_large() => {
                let observer = self.observer(read.query, scope, RangeResponseScanner::unary());
                self.forward(read, ConnectionClass::Unary, observer).await
            }
            _ => self.large(read, scope).await,
        })
    }

    /// A large Range: shares a call in flight, or takes a turn, becomes a RangeStream or is forwarded.
    async fn large(self: &Arc<Self>, read: Read<'_>, scope: Option<ShareScope>) -> CallResult {
        // 4. Another client's call for the same range.
        let leader = match self.lead_or_join(&read, scope.as_ref()) {
            None => None,
            Some(Role::Lead(leader)) => Some(leader),
            Some(Role::Join(join)) => {
                return match self.join(join).await {
                    Ok(shared) => {
                        if shared.is_streamed {
                            *read.outcome = read.outcome.streamed();
                        }
                        Ok(shared.response())
                    }
                    Err(refused) => refuse(read, refused),
                };
            }
        };
        let turn = match self.turns.acquire().await {
            Ok(turn) => turn,
            Err(cause) => return refuse(read, cause.into()),
        };
        // 5. One RangeStream: all of its response is here when it ends, and etcd has nothing more to do.
        if let Some(converted) = self.convert(&read.parts, read.query, scope.as_ref()).await {
            drop((turn, leader));
            *read.outcome = read.outcome.streamed();
            return Ok(converted.into_response(&self.responses));
        }
        // 6. The unchanged call. The turn, and the leading of identical reads, end with the response.
        let observer = self.observer(read.query, scope, RangeResponseScanner::unary());
        let result = self.forward(read, ConnectionClass::Stream, observer).await;
        result.map(|response| response.map(|body| body.holding((turn, leader))))
    }

    fn share_scope(&self, read: &Read<'_>) -> Option<ShareScope> {
        let has_own_user = self.forward.upstream.credentials().are_valid();
        let auth = self.forward.cluster_state.auth();
        ShareScope::from_call(read.metadata, &read.parts.headers, auth, has_own_user)
    }

    async fn next_page(&self, read: &mut Read<'_>, scope: Option<&ShareScope>) -> Option<PageAnswer> {
        let page = self
            .page_series
            .next_page(read.query, scope?, &read.parts.headers)
            .await?;
        *read.outcome = read.outcome.streamed();
        Some(page)
    }

    /// Forwards the call unchanged.
    async fn forward(
        &self,
        read: Read<'_>,
        class: ConnectionClass,
        observer: Option<PageObserver>,
    ) -> CallResult {
        let body = RequestBody::Read(read.framed);
        let result = self
            .forward
            .forward_on(read.parts, body, read.method, class)
            .await;
        result.map(|response| response.map(|body| observed(body, observer)))
    }

    fn observer(
        &self,
        query: &RangeQuery,
        scope: Option<ShareScope>,
        scanner: RangeResponseScanner,
    ) -> Option<PageObserver> {
        self.page_series.observer(query, scope, scanner)
    }

    async fn stream_or_pages(self: &Arc<Self>, read: Read<'_>, scope: Option<ShareScope>) -> CallResult {
        let no_stream = if read.query.may_page() {
            let observer = self.observer(read.query, scope, RangeResponseScanner::stream());
            match self.forward.open_stream(&read.parts, &read.framed).await {
                Ok(Ok(response)) => return Ok(response.map(|body| observed(body, observer))),
                Ok(Err(no_stream)) => no_stream,
                Err(error) => return error.into_result(read.metadata.content_type.clone()),
            }
        } else {
            // etcd's stream repeats keys if it sorts chunk by chunk: this one shape is read whole, and then cut.
            NoRangeStream::Shape
        };
        self.metrics.forwarding.record_stream_fallback(no_stream.as_str());
        if let Outcome::Forwarded(reason) = *read.outcome {
            *read.outcome = Outcome::Paged(reason);
        }
        let content_type = read.metadata.content_type.clone();
        let calls = PageCalls::new(&self.forward, &self.turns, read.parts.clone());
        match Pager::new(calls, read.query, read.deadline).start().await {
            Ok(stream) => Ok(ResponseBody::from_source(stream).into_response(content_type)),
            Err(PageError::Refused(refused)) => refuse(read, refused),
            Err(PageError::Etcd(status)) => {
                let mut response = ResponseBody::empty().into_response(content_type);
                response.headers_mut().extend(status);
                Ok(response)
            }
            Err(PageError::Reset(error)) => Err(error.into()),
            Err(PageError::Local(status)) => Ok(status_response(&status, content_type)),
        }
    }

    /// The role of a large Range among identical ones; `None` if it may not share.
    fn lead_or_join(
        self: &Arc<Self>,
        read: &Read<'_>,
        scope: Option<&ShareScope>,
    ) -> Option<Role<SharedResult>> {
        if scope != Some(&ShareScope::Everyone) {
            return None;
        }
        Some(self.shared_calls.lead_or_join(&read.framed, || {
            let mut parts = read.parts.clone();
            // Each client keeps its own deadline; the shared call has none.
            parts.headers.remove("grpc-timeout");
            let (fallback, framed, query) = (Arc::clone(self), read.framed.clone(), read.query.clone());
            async move { fallback.shared_call(parts, framed, &query).await }
        }))
    }

    /// Waits for the shared call and returns its response.
    async fn join(&self, join: single_flight::Join<SharedResult>) -> SharedResult {
        let _waiting = self.turns.count_waiting()?;
        let cancelled = || Refused::shared_call(crate::grpc::Status::SharedCallCancelled);
        let shared = join.join().await.ok_or_else(cancelled)??;
        self.metrics.forwarding.joined.inc();
        Ok(shared)
    }

    /// The one call for several reads. All of its response is here when it ends.
    async fn shared_call(&self, parts: Parts, framed: Bytes, query: &RangeQuery) -> SharedResult {
        let _turn = self.turns.acquire().await?;
        if let Some(converted) = self.convert(&parts, query, Some(&ShareScope::Everyone)).await {
            return Ok(Arc::new(converted.into()));
        }
        let body = RequestBody::Read(framed);
        let sent = self.forward.send(parts, body, ConnectionClass::Stream).await;
        let answered = sent.map_err(|error| Refused::shared_call(error.status()))?;
        let shared =
            SharedResponse::collect(answered, &self.forward.cluster_state, &self.shared_bytes).await?;
        Ok(Arc::new(shared))
    }

    /// Serves a large Range by a RangeStream, if that is possible.
    async fn convert(
        &self,
        parts: &Parts,
        query: &RangeQuery,
        scope: Option<&ShareScope>,
    ) -> Option<Converted> {
        if !query.is_streamable() {
            return None;
        }
        let history = self.page_series.history_number();
        let converted = match self.unary_over_stream.convert(&self.forward, parts, query).await {
            Ok(converted) => converted,
            Err(reason) => {
                tracing::debug!(%reason, "a large Range could not be served by a RangeStream");
                self.metrics.forwarding.record_stream_fallback(reason.as_str());
                return None;
            }
        };
        if let (Some(summary), Some(scope)) = (&converted.summary, scope) {
            self.page_series
                .expect_next(query, scope.clone(), summary, history);
        }
        Some(converted)
    }

    /// Drops page series that have expired, until cancelled.
    pub(super) async fn run(&self) {
        self.page_series.run().await;
    }
}

fn observed(body: ResponseBody, observer: Option<PageObserver>) -> ResponseBody {
    match observer {
        Some(observer) => body.observed_by(observer),
        None => body,
    }
}

/// The response to a read that is refused at a bound.
fn refuse(read: Read<'_>, refused: Refused) -> CallResult {
    *read.outcome = Outcome::Shed(refused.reason);
    Ok(status_response(
        &refused.status,
        read.metadata.content_type.clone(),
    ))
}
