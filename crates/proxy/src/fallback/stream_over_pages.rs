//! Serves a RangeStream by unary Ranges, if etcd has no RangeStream or cannot stream the request: pages at one
//! revision, split into chunks.
//!
//! A page is requested when the client has read the previous one, so that a stream buffers at most one page. Each
//! request needs a slot, like a large Range. When the client cancels, the body is dropped, and the page in flight is
//! cancelled.

use std::task::{Context, Poll};
use std::{collections::VecDeque, fmt, pin::Pin, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use etcd_store::cache::{ChunkSize, Entry, RangeQuery};
use etcd_store::keyspace::successor;
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse, RangeStreamResponse, ResponseHeader};
use etcd_wire::grpc::frame::{PREFIX_BYTES, Prefix, framed};
use etcd_wire::grpc::metadata::{HeadFields, head_bytes, kept_head};
use etcd_wire::grpc::method::RANGE;
use etcd_wire::grpc::status::{GRPC_MESSAGE, GRPC_STATUS, is_ok, ok_trailers};
use etcd_wire::grpc::{Method, Status};
use http::{HeaderMap, header::CONTENT_LENGTH, request::Parts};
use http_body::Frame;
use prost::Message;
use rangecache_edge::limits::{ByteKind, ClientAccount, Deadline, HeldBytes, Slots};
use rangecache_upstream::{BoxError, ConnectionClass, first_page_limit, page_limit};
use tokio::time::Instant;

use crate::forward::{Forward, RequestBody, ResponseReader, SendError, UpstreamResponse, status_of};
use crate::response::{BodySource, Polled};

/// Target size of a page, in bytes. etcd counts all remaining keys for each page, so that small pages are expensive.
const PAGE_TARGET_BYTES: u64 = 4 << 20;
/// Bound on a page, in bytes. A larger one is requested again with fewer keys.
const PAGE_MAX_BYTES: u64 = 16 << 20;
/// Bound, in bytes, on a response that cannot be split into pages because it is sorted.
const WHOLE_MAX_BYTES: u64 = 64 << 20;
/// Client's limit up to which all keys are requested on one page.
const ONE_PAGE_KEYS: i64 = 1000;
/// Number of attempts to get a page if the connection is lost or etcd is unavailable. Reads can be repeated safely.
const MAX_TRIES: u32 = 5;
/// Pause before a failed page is requested again.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Failure to get a page, which ends the stream.
#[derive(Debug)]
pub(super) enum PageError {
    /// etcd returned this status (headers or trailers).
    Etcd(HeaderMap),
    /// etcd reset the HTTP/2 stream.
    Reset(BoxError),
    /// rangecache ends the stream with this status.
    Local(Status),
}

impl PageError {
    /// Trailers that end a stream whose headers have been sent.
    fn trailers(self) -> HeaderMap {
        match self {
            PageError::Etcd(status) => status,
            PageError::Reset(error) => SendError::Reset(error).status().trailers(),
            PageError::Local(status) => status.trailers(),
        }
    }
}

/// Source of pages; replaced by a script in tests.
pub(super) trait FetchPage: Send + Sync + 'static {
    /// Memory of the client's request that is kept for further pages, in bytes.
    fn request_bytes(&self) -> u64;

    /// Sends `request` and returns the response; stops reading one that is larger than `max_bytes`.
    fn fetch_page(
        &self,
        request: &RangeRequest,
        max_bytes: Option<u64>,
    ) -> impl Future<Output = Result<PageResponse, PageError>> + Send;
}

/// Result of one request for a page.
#[derive(Debug)]
pub(super) enum PageResponse {
    /// A page, its encoded length in bytes, the budget for it, and when its connection was opened.
    Page(RangeResponse, u64, Option<HeldBytes>, Instant),
    /// The response has this many bytes, more than `max_bytes`.
    TooLarge(u64),
    /// etcd's status, other than OK (headers or trailers).
    Status(HeaderMap),
    /// The connection was lost in the middle of the response.
    Lost(Status),
}

/// Fetches pages from etcd by unary Ranges.
#[derive(Debug)]
pub(super) struct PageCalls {
    forward: Arc<Forward>,
    slots: Arc<Slots>,
    /// Head of a unary Range with the metadata of the client's request.
    parts: Parts,
    /// Account of the client's connection.
    account: Arc<ClientAccount>,
}

impl PageCalls {
    /// Creates unary calls with the metadata of the client's RangeStream request, `parts`.
    pub(super) fn new(
        forward: &Arc<Forward>,
        slots: &Arc<Slots>,
        parts: &Parts,
        account: &Arc<ClientAccount>,
    ) -> PageCalls {
        let mut parts = kept_head(RANGE, &parts.headers);
        // The pager enforces the deadline for all pages together. Pages are decoded here, so they must not be
        // compressed. The requests have lengths of their own: etcd ignores a wrong one, a proxy resets the call.
        parts.headers.remove("grpc-timeout");
        parts.headers.remove("grpc-accept-encoding");
        parts.headers.remove(CONTENT_LENGTH);
        PageCalls {
            forward: Arc::clone(forward),
            slots: Arc::clone(slots),
            parts,
            account: Arc::clone(account),
        }
    }
}

impl FetchPage for PageCalls {
    fn request_bytes(&self) -> u64 {
        head_bytes(&self.parts.uri, &HeadFields::of(&self.parts.headers))
    }

    async fn fetch_page(
        &self,
        request: &RangeRequest,
        max_bytes: Option<u64>,
    ) -> Result<PageResponse, PageError> {
        let slot = self.slots.acquire(&self.account, Deadline::NONE).await;
        let _slot = slot.map_err(|cause| PageError::Local(status_of(cause)))?;
        let body = RequestBody::Read(framed(request));
        let sent = self
            .forward
            .send(self.parts.clone(), body, ConnectionClass::Stream)
            .await;
        let UpstreamResponse { response, in_flight } = sent.map_err(|error| match error {
            SendError::Reset(error) => PageError::Reset(error),
            other => PageError::Local(other.status()),
        })?;
        let (head, body) = response.into_parts();
        let mut reader = ResponseReader::new(body, Method::Range, &self.forward.cluster_state);
        let mut data = BytesMut::new();
        let mut held = self.account.hold(ByteKind::Converted);
        loop {
            match reader.data().await {
                Ok(Some(piece)) => {
                    let deadline = Instant::now() + self.forward.max_wait;
                    held.grow(piece.len() as u64, deadline)
                        .await
                        .map_err(|cause| PageError::Local(status_of(cause)))?;
                    data.extend_from_slice(&piece);
                }
                Ok(None) => break,
                Err(error) => return Ok(PageResponse::Lost(SendError::Lost(error).status())),
            }
            let length_bytes = Prefix::parse(&data).map(|prefix| u64::from(prefix.length_bytes));
            if let (Some(length_bytes), Some(max_bytes)) = (length_bytes, max_bytes)
                && length_bytes > max_bytes
            {
                return Ok(PageResponse::TooLarge(length_bytes));
            }
        }
        let status = reader.into_trailers().unwrap_or(head.headers);
        if !is_ok(&status) {
            return Ok(PageResponse::Status(extract_status(&status)));
        }
        held.leave_line();
        let data = data.freeze();
        let message = data.get(PREFIX_BYTES..).map(|message| data.slice_ref(message));
        let response = message.and_then(|message| RangeResponse::decode(message).ok());
        match response {
            Some(response) if data.first() == Some(&0) => {
                let opened = in_flight.connection().unchanged_since();
                Ok(PageResponse::Page(
                    response,
                    data.len() as u64,
                    Some(held),
                    opened,
                ))
            }
            _ => Err(PageError::Local(Status::UndecodableResponse)),
        }
    }
}

/// Requests the pages of a range one after the other, all at the first page's revision.
pub(super) struct Pager<G> {
    calls: G,
    /// The next request.
    request: RangeRequest,
    /// Number of keys left of the client's limit; `None` without a limit.
    keys_left: Option<i64>,
    /// Whether the range can be split into pages: it is not sorted, not counted only, and has more than one key.
    is_paged: bool,
    /// The first page, with which the others must agree.
    first: Option<FirstPage>,
    deadline: Deadline,
}

/// First page of a stream.
#[derive(Clone, Copy, Debug)]
struct FirstPage {
    /// Header, which the stream reports.
    header: ResponseHeader,
    /// Count, which the stream reports.
    count: i64,
    /// Time at or before which it was requested. A connection that was opened by then has the same member process since:
    /// all members stop before a backup is put in place of their data, so that its later pages are of the same history.
    requested: Instant,
}

/// Page of which key-values are still to be sent.
#[derive(Debug)]
struct Page {
    kvs: VecDeque<Bytes>,
    /// Fields for the last chunk of the stream, if this is the last page.
    tail: Option<Tail>,
    /// Budget for the key-values, which share one allocation.
    _held: Option<HeldBytes>,
}

/// Fields that only the last chunk of a stream has.
#[derive(Debug)]
struct Tail {
    header: ResponseHeader,
    more: bool,
    count: i64,
}

impl<G: FetchPage> Pager<G> {
    /// Creates a pager for `query` that must complete by `deadline`.
    pub(super) fn new(calls: G, query: &RangeQuery, deadline: Deadline) -> Box<Pager<G>> {
        let is_paged = query.may_page() && !query.count_only && !query.range_end.is_empty();
        let keys_left = Some(query.limit).filter(|limit| *limit > 0);
        let limit = match keys_left {
            _ if !is_paged => query.limit,
            Some(limit) if limit <= ONE_PAGE_KEYS => limit,
            _ => first_page_limit(),
        };
        let request = RangeRequest {
            limit,
            ..query.to_request()
        };
        Box::new(Pager {
            calls,
            request,
            keys_left,
            is_paged,
            first: None,
            deadline,
        })
    }

    /// Fetches the first page, and returns the stream that begins with it.
    ///
    /// # Errors
    /// [`PageError`] if there is no first page. Nothing has been sent to the client then.
    pub(super) async fn start(self: Box<Self>) -> Result<PagedStream<G>, PageError> {
        let request_bytes = self.calls.request_bytes();
        let (pager, page) = self.fetch().await;
        let page = page?;
        Ok(PagedStream {
            next: if page.tail.is_some() {
                NextPage::End(Some(ok_trailers()))
            } else {
                NextPage::Idle(pager)
            },
            page: Some(page),
            size: ChunkSize::default(),
            request_bytes,
        })
    }

    /// Fetches the next page before the deadline. Consumes and returns the pager, so that the future owns what it uses.
    async fn fetch(mut self: Box<Self>) -> FetchResult<G> {
        let page = match self.deadline.at() {
            Some(deadline) => tokio::time::timeout_at(deadline, self.fetch_with_retries())
                .await
                .unwrap_or(Err(PageError::Local(Status::DeadlineExceeded))),
            None => self.fetch_with_retries().await,
        };
        (self, page)
    }

    /// Fetches the next page; repeats the request with fewer keys if the page is too large, and after retryable
    /// failures.
    async fn fetch_with_retries(&mut self) -> Result<Page, PageError> {
        let mut tries = 0;
        let begun = Instant::now();
        loop {
            let failure = match self.calls.fetch_page(&self.request, self.max_bytes()).await? {
                PageResponse::Page(response, bytes, held, opened) => {
                    let first = self.first_page(&response, begun, opened)?;
                    return self.accept(first, response, bytes, held);
                }
                PageResponse::TooLarge(bytes) if !self.is_paged => {
                    return Err(PageError::Local(Status::SortedTooLong(bytes)));
                }
                PageResponse::TooLarge(bytes) => {
                    let mean_bytes = (bytes / self.request.limit.max(1).unsigned_abs()).max(1);
                    self.request.limit = page_limit(PAGE_TARGET_BYTES, mean_bytes)
                        .min(self.request.limit / 2)
                        .max(1);
                    continue;
                }
                // Unavailable is retried only in mid-stream, during an election for example: the client cannot resume a
                // stream. Before the first page the client gets the status, and may retry itself.
                PageResponse::Status(status) if self.first.is_some() && is_unavailable(&status) => {
                    PageError::Etcd(status)
                }
                PageResponse::Status(status) => return Err(PageError::Etcd(status)),
                PageResponse::Lost(status) => PageError::Local(status),
            };
            tries += 1;
            if tries == MAX_TRIES {
                return Err(failure);
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Bound on the next response, in bytes. `None` for single keys and counts, which cannot be split.
    fn max_bytes(&self) -> Option<u64> {
        if self.is_paged {
            (self.request.limit != 1).then_some(PAGE_MAX_BYTES)
        } else {
            (!self.request.range_end.is_empty()).then_some(WHOLE_MAX_BYTES)
        }
    }

    /// Returns the first page, which `page` is if there is none yet: it was requested at `begun` or later, on a connection that
    /// was `opened` then.
    ///
    /// # Errors
    /// `page` has no header, or is not known to be of the first page's history.
    fn first_page(
        &mut self,
        page: &RangeResponse,
        begun: Instant,
        opened: Instant,
    ) -> Result<FirstPage, PageError> {
        let header = page.header.ok_or(PageError::Local(Status::UndecodableResponse))?;
        let first = *self.first.get_or_insert(FirstPage {
            header,
            count: page.count,
            requested: begun.max(opened),
        });
        if header.cluster_id != first.header.cluster_id
            || header.revision < first.header.revision
            || header.raft_term < first.header.raft_term
        {
            return Err(PageError::Local(Status::HistoryReplaced));
        }
        if opened > first.requested {
            let explanation = "the next page would be of another connection".to_owned();
            return Err(PageError::Local(Status::ConnectionLost(explanation)));
        }
        Ok(first)
    }

    /// Prepares the request for the page after this one of `bytes`.
    fn accept(
        &mut self,
        first: FirstPage,
        page: RangeResponse,
        bytes: u64,
        held: Option<HeldBytes>,
    ) -> Result<Page, PageError> {
        let keys = i64::try_from(page.kvs.len()).unwrap_or(i64::MAX);
        if let Some(keys_left) = &mut self.keys_left {
            *keys_left -= keys;
        }
        let last = page
            .kvs
            .last()
            .filter(|_| self.is_paged && page.more && self.keys_left != Some(0));
        let tail = match last {
            None => Some(Tail {
                header: first.header,
                more: page.more,
                count: first.count,
            }),
            Some(last) => {
                let last =
                    Entry::from_key_value(last).map_err(|_| PageError::Local(Status::UndecodableResponse))?;
                self.request.key = successor(last.key());
                // Later pages are read at the first page's revision. They are linearizable, because a member that is
                // behind would refuse the revision as a future one in a serializable read.
                if self.request.revision <= 0 {
                    self.request.revision = first.header.revision;
                }
                self.request.serializable = false;
                let mean_bytes = (bytes / keys.max(1).unsigned_abs()).max(1);
                let limit = page_limit(PAGE_TARGET_BYTES, mean_bytes);
                self.request.limit = self.keys_left.map_or(limit, |keys_left| limit.min(keys_left));
                None
            }
        };
        Ok(Page {
            kvs: page.kvs.into(),
            tail,
            _held: held,
        })
    }
}

/// Whether the gRPC status is Unavailable.
fn is_unavailable(status: &HeaderMap) -> bool {
    status
        .get(GRPC_STATUS)
        .is_some_and(|code| code.as_bytes() == b"14")
}

/// Copies the gRPC status from other metadata.
fn extract_status(metadata: &HeaderMap) -> HeaderMap {
    let mut status = HeaderMap::new();
    for name in [GRPC_STATUS, GRPC_MESSAGE] {
        if let Some(value) = metadata.get(&name) {
            status.insert(name, value.clone());
        }
    }
    status
}

/// The pager and its next page.
type FetchResult<G> = (Box<Pager<G>>, Result<Page, PageError>);

/// Body of a RangeStream: yields the chunks of one page after the other.
pub(super) struct PagedStream<G> {
    /// Page that is being sent.
    page: Option<Page>,
    /// Number of entries of the next chunk; adapts to the size of previous chunks.
    size: ChunkSize,
    /// State of the following page.
    next: NextPage<G>,
    request_bytes: u64,
}

/// State of the page after the current one.
enum NextPage<G> {
    /// Requested when the current page has been sent.
    Idle(Box<Pager<G>>),
    /// In flight. Dropped, and thereby cancelled, with the body.
    Fetching(Pin<Box<dyn Future<Output = FetchResult<G>> + Send>>),
    /// No further page; the trailers, until they are sent.
    End(Option<HeaderMap>),
}

impl<G> fmt::Debug for PagedStream<G> {
    // Omits the page: keys and values must not be logged (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedStream").finish_non_exhaustive()
    }
}

impl<G: FetchPage> BodySource for PagedStream<G> {
    fn request_bytes(&self) -> u64 {
        self.request_bytes
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        loop {
            if let Some(chunk) = self.page.as_mut().and_then(|page| page.cut_chunk(&mut self.size)) {
                return Poll::Ready(Some(Ok(Frame::data(chunk.into()))));
            }
            self.page = None;
            self.next = match std::mem::replace(&mut self.next, NextPage::End(None)) {
                NextPage::Idle(pager) => NextPage::Fetching(Box::pin(pager.fetch())),
                NextPage::Fetching(mut fetching) => match fetching.as_mut().poll(cx) {
                    Poll::Pending => {
                        self.next = NextPage::Fetching(fetching);
                        return Poll::Pending;
                    }
                    Poll::Ready((pager, Ok(page))) => {
                        let is_last = page.tail.is_some();
                        self.page = Some(page);
                        if is_last {
                            NextPage::End(Some(ok_trailers()))
                        } else {
                            NextPage::Idle(pager)
                        }
                    }
                    Poll::Ready((_, Err(error))) => NextPage::End(Some(error.trailers())),
                },
                NextPage::End(trailers) => {
                    return Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))));
                }
            };
        }
    }
}

impl Page {
    /// Removes the next chunk and returns it as a framed message; `None` if the page is empty. Chunk sizes follow the
    /// same rule as in streams from memory.
    fn cut_chunk(&mut self, size: &mut ChunkSize) -> Option<Bytes> {
        if self.kvs.is_empty() && self.tail.is_none() {
            return None;
        }
        let (mut chunk, mut bytes) = (RangeResponse::default(), 0);
        while !size.is_full(chunk.kvs.len() as u64, bytes)
            && let Some(kv) = self.kvs.pop_front()
        {
            bytes += kv.len() as u64;
            chunk.kvs.push(kv);
        }
        if self.kvs.is_empty()
            && let Some(tail) = self.tail.take()
        {
            chunk.header = Some(tail.header);
            chunk.more = tail.more;
            chunk.count = tail.count;
        }
        let is_full = size.is_full(chunk.kvs.len() as u64, bytes);
        let framed = framed(&RangeStreamResponse {
            range_response: Some(chunk),
        });
        // A short chunk at the end of a page does not reach the target size, and must not be taken for a small one.
        if is_full {
            size.record((framed.len() - PREFIX_BYTES) as u64);
        }
        Some(framed)
    }
}

#[cfg(test)]
mod tests;
