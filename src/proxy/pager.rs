//! A RangeStream where etcd has none: unary Ranges at one revision, one at a time, cut into chunks.
//!
//! A page is asked for when the reader has taken the one before, so that a stream holds one page at most; while etcd works
//! on it, it counts as a large Range and waits its turn as they do. When the reader goes away the body is dropped, and the
//! page under way with it.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::request::Parts;
use http::{HeaderMap, Uri};
use http_body::Frame;
use http_body_util::BodyExt;
use prost::Message;
use tokio::time::Instant;

use super::forward::{Answered, Body, Forward, NotAnswered};
use super::large::{Large, Refused};
use crate::cache::{CHUNK_TARGET_BYTES, Entry, RangeQuery, Rope, SortTarget};
use crate::etcdserverpb::{RangeRequest, RangeResponse, RangeStreamResponse, ResponseHeader};
use crate::grpc::Status;
use crate::grpc::frame::{PREFIX_BYTES, Prefix, framed};
use crate::grpc::method::RANGE;
use crate::grpc::status::{GRPC_MESSAGE, GRPC_STATUS, ok_trailers};
use crate::upstream::ConnectionClass;

/// What a page should hold, in bytes: etcd counts the whole range for each.
const PAGE_TARGET_BYTES: u64 = 4 << 20;
/// A longer page is asked for again, in smaller pieces: values need not be of one size.
const PAGE_MAX_BYTES: u64 = 16 << 20;
/// Bound on an answer that cannot be paged because it is sorted.
const WHOLE_MAX_BYTES: u64 = 64 << 20;
/// Keys of the first page, whose values may be of any size.
const FIRST_PAGE_KEYS: i64 = 64;
/// A caller's limit up to which one page is asked for.
const ONE_PAGE_KEYS: i64 = 1000;
/// Keys of a page at most.
const PAGE_MAX_KEYS: i64 = 10_000;
/// How often a page is asked for that broke off: reading again changes nothing.
const TRIES: u32 = 5;
/// Pause in between.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Why there is no page.
pub(super) enum NoPages {
    /// Past a bound.
    Refused(Refused),
    /// etcd's status, as metadata.
    Etcd(HeaderMap),
    /// etcd reset the stream.
    Reset(hyper::Error),
    /// A status of our own.
    Own(Status),
}

impl NoPages {
    /// How a stream ends that has begun.
    fn trailers(self) -> HeaderMap {
        match self {
            NoPages::Refused(refused) => refused.status.trailers(),
            NoPages::Etcd(status) => status,
            NoPages::Reset(error) => NotAnswered::Reset(error).status().trailers(),
            NoPages::Own(status) => status.trailers(),
        }
    }
}

/// Asks for page after page.
pub(super) struct Pager {
    forward: Arc<Forward>,
    large: Arc<Large>,
    /// The caller's metadata.
    parts: Parts,
    /// What to ask next.
    request: RangeRequest,
    /// Keys that the caller still wants.
    wanted: Option<i64>,
    /// Whether the request may be asked in parts at all.
    in_parts: bool,
    /// The first page's header and count, which are the stream's.
    first: Option<(ResponseHeader, i64)>,
    deadline: Option<Instant>,
}

/// Framed chunks of one page.
struct Page {
    chunks: VecDeque<Bytes>,
    is_last: bool,
}

type Fetched = (Box<Pager>, Result<Page, NoPages>);

/// A RangeStream under way.
pub(super) struct Paged {
    ready: VecDeque<Bytes>,
    /// The page after those, asked for when they have gone.
    next: Next,
}

enum Next {
    Idle(Box<Pager>),
    Fetching(Pin<Box<dyn Future<Output = Fetched> + Send>>),
    End(Option<HeaderMap>),
}

impl fmt::Debug for Paged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paged")
            .field("ready", &self.ready.len())
            .finish_non_exhaustive()
    }
}

impl Pager {
    /// Whether `query` may be read in parts: one that is sorted is sorted as a whole.
    pub(super) fn may_page(query: &RangeQuery) -> bool {
        query.sort_target == SortTarget::Key as i32
    }

    /// For `query`, which came with `parts`.
    pub(super) fn new(
        forward: &Arc<Forward>,
        large: &Arc<Large>,
        mut parts: Parts,
        query: &RangeQuery,
        deadline: Option<Instant>,
    ) -> Box<Pager> {
        parts.uri = Uri::from_static(RANGE);
        // The deadline is kept here; and a page has to be read.
        parts.headers.remove("grpc-timeout");
        parts.headers.remove("grpc-accept-encoding");
        let in_parts = Pager::may_page(query) && !query.count_only && !query.range_end.is_empty();
        let wanted = Some(query.limit).filter(|limit| *limit > 0);
        let limit = match wanted {
            _ if !in_parts => query.limit,
            Some(limit) if limit <= ONE_PAGE_KEYS => limit,
            _ => FIRST_PAGE_KEYS,
        };
        let request = RangeRequest {
            key: query.key.clone(),
            range_end: query.range_end.clone(),
            limit,
            revision: query.revision,
            sort_order: query.sort_order,
            sort_target: query.sort_target,
            serializable: query.serializable,
            keys_only: query.keys_only,
            count_only: query.count_only,
            ..RangeRequest::default()
        };
        Box::new(Pager {
            forward: Arc::clone(forward),
            large: Arc::clone(large),
            parts,
            request,
            wanted,
            in_parts,
            first: None,
            deadline,
        })
    }

    /// Asks for the first page.
    ///
    /// # Errors
    /// How the call ends when there is none.
    pub(super) async fn start(self: Box<Self>) -> Result<Paged, NoPages> {
        let (pager, page) = self.fetch().await;
        let Page { chunks, is_last } = page?;
        Ok(Paged {
            ready: chunks,
            next: if is_last {
                Next::End(Some(ok_trailers()))
            } else {
                Next::Idle(pager)
            },
        })
    }

    async fn fetch(mut self: Box<Self>) -> Fetched {
        let page = match self.deadline {
            Some(deadline) => tokio::time::timeout_at(deadline, self.page())
                .await
                .unwrap_or_else(|_| Err(NoPages::Own(Status::DeadlineExceeded))),
            None => self.page().await,
        };
        (self, page)
    }

    async fn page(&mut self) -> Result<Page, NoPages> {
        let mut tries = 0;
        loop {
            match self.ask().await? {
                Asked::Page(response, bytes) => return self.take(response, bytes),
                Asked::TooLong(bytes) => {
                    if !self.in_parts {
                        return Err(NoPages::Own(Status::SortedTooLong(bytes)));
                    }
                    let mean_bytes = (bytes / self.request.limit.max(1).unsigned_abs()).max(1);
                    self.request.limit = page_keys(mean_bytes).min(self.request.limit / 2).max(1);
                }
                Asked::Broken(reason) => {
                    tries += 1;
                    if tries == TRIES {
                        return Err(reason);
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    /// One unary call.
    async fn ask(&self) -> Result<Asked, NoPages> {
        let _permit = self.large.turn(None).await.map_err(NoPages::Refused)?;
        let sent = self
            .forward
            .send(
                self.parts.clone(),
                Body::Read(framed(&self.request)),
                ConnectionClass::Stream,
            )
            .await;
        let Answered {
            response,
            in_flight: _in_flight,
        } = sent.map_err(|not| match not {
            NotAnswered::Reset(error) => NoPages::Reset(error),
            other => NoPages::Own(other.status()),
        })?;
        let (head, mut body) = response.into_parts();
        let (mut data, mut trailers) = (BytesMut::new(), None);
        while let Some(frame) = body.frame().await {
            match frame.map(Frame::into_data) {
                Ok(Ok(piece)) => {
                    data.extend_from_slice(&piece);
                    if let Some(bytes) = self.too_long(&data) {
                        return Ok(Asked::TooLong(bytes));
                    }
                }
                Ok(Err(frame)) => trailers = frame.into_trailers().ok(),
                Err(error) => {
                    return Ok(Asked::Broken(NoPages::Own(NotAnswered::Lost(error).status())));
                }
            }
        }
        let status = trailers.unwrap_or(head.headers);
        match status.get(GRPC_STATUS).map(|code| code.as_bytes()) {
            Some(b"0") => {}
            // The leader changed, say: of a stream that has begun, the page can be asked for again.
            Some(b"14") if self.first.is_some() => {
                return Ok(Asked::Broken(NoPages::Etcd(status_alone(&status))));
            }
            _ => return Err(NoPages::Etcd(status_alone(&status))),
        }
        let data = data.freeze();
        let message = data.get(PREFIX_BYTES..).map(|message| data.slice_ref(message));
        let response = message.and_then(|message| RangeResponse::decode(message).ok());
        match response {
            Some(response) if data.first() == Some(&0) => Ok(Asked::Page(response, data.len() as u64)),
            _ => Err(not_understood()),
        }
    }

    /// The length of the message, if it is too long for a page.
    fn too_long(&self, data: &[u8]) -> Option<u64> {
        let bytes = u64::from(Prefix::parse(data)?.length_bytes);
        let max_bytes = if !self.in_parts {
            // One key, or a count, is as long as it is.
            if self.request.range_end.is_empty() {
                return None;
            }
            WHOLE_MAX_BYTES
        } else if self.request.limit == 1 {
            return None;
        } else {
            PAGE_MAX_BYTES
        };
        (bytes > max_bytes).then_some(bytes)
    }

    /// Makes chunks of a page, and the request for the next.
    fn take(&mut self, page: RangeResponse, bytes: u64) -> Result<Page, NoPages> {
        let header = page.header.ok_or_else(not_understood)?;
        self.forward
            .cluster_state
            .record_forwarded(header.cluster_id, header.revision);
        let (first, count) = *self.first.get_or_insert((header, page.count));
        if header.cluster_id != first.cluster_id
            || header.revision < first.revision
            || header.raft_term < first.raft_term
        {
            return Err(NoPages::Own(Status::HistoryReplaced));
        }
        let keys = i64::try_from(page.kvs.len()).unwrap_or(i64::MAX);
        if let Some(wanted) = &mut self.wanted {
            *wanted -= keys;
        }
        let last = page
            .kvs
            .last()
            .filter(|_| self.in_parts && page.more && self.wanted != Some(0));
        let tail = match last {
            None => Some((first, page.more, count)),
            Some(last) => {
                let last = Entry::from_key_value(last).map_err(|_| not_understood())?;
                self.request.key = [last.key(), b"\0"].concat().into();
                // What the first page was read at; and a member that lags behind it must catch up.
                if self.request.revision <= 0 {
                    self.request.revision = first.revision;
                }
                self.request.serializable = false;
                let mean_bytes = (bytes / keys.max(1).unsigned_abs()).max(1);
                let limit = page_keys(mean_bytes);
                self.request.limit = self.wanted.map_or(limit, |wanted| limit.min(wanted));
                None
            }
        };
        Ok(Page {
            is_last: tail.is_some(),
            chunks: chunks(page.kvs, tail),
        })
    }
}

/// What came of one call.
enum Asked {
    /// A page and its length.
    Page(RangeResponse, u64),
    /// More than a page may hold, given up.
    TooLong(u64),
    /// The connection was lost in mid-answer, or the member could not serve.
    Broken(NoPages),
}

/// How many keys a page should have whose entries take `mean_bytes` each.
fn page_keys(mean_bytes: u64) -> i64 {
    i64::try_from(PAGE_TARGET_BYTES / mean_bytes)
        .unwrap_or(i64::MAX)
        .clamp(1, PAGE_MAX_KEYS)
}

fn not_understood() -> NoPages {
    NoPages::Own(Status::UndecodableResponse)
}

/// The gRPC status among other metadata.
fn status_alone(metadata: &HeaderMap) -> HeaderMap {
    let mut status = HeaderMap::new();
    for name in [GRPC_STATUS, GRPC_MESSAGE] {
        if let Some(value) = metadata.get(&name) {
            status.insert(name, value.clone());
        }
    }
    status
}

/// Cuts entries into framed chunks; the last one carries `tail` (header, `more`, count), if that is given.
fn chunks(kvs: Vec<Bytes>, tail: Option<(ResponseHeader, bool, i64)>) -> VecDeque<Bytes> {
    let mut all = VecDeque::new();
    let (mut chunk, mut bytes) = (RangeResponse::default(), 0);
    for kv in kvs {
        if bytes >= CHUNK_TARGET_BYTES {
            all.push_back(framed_chunk(std::mem::take(&mut chunk)));
            bytes = 0;
        }
        bytes += kv.len() as u64;
        chunk.kvs.push(kv);
    }
    if let Some((header, more, count)) = tail {
        (chunk.header, chunk.more, chunk.count) = (Some(header), more, count);
    }
    all.push_back(framed_chunk(chunk));
    all
}

fn framed_chunk(response: RangeResponse) -> Bytes {
    framed(&RangeStreamResponse {
        range_response: Some(response),
    })
}

impl Paged {
    /// The next frame of the stream.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Rope>>> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                debug_assert!(chunk.has_remaining());
                return Poll::Ready(Some(Frame::data(chunk.into())));
            }
            self.next = match std::mem::replace(&mut self.next, Next::End(None)) {
                Next::Idle(pager) => Next::Fetching(Box::pin(pager.fetch())),
                Next::Fetching(mut fetching) => match fetching.as_mut().poll(cx) {
                    Poll::Pending => {
                        self.next = Next::Fetching(fetching);
                        return Poll::Pending;
                    }
                    Poll::Ready((pager, Ok(Page { chunks, is_last }))) => {
                        self.ready = chunks;
                        if is_last {
                            Next::End(Some(ok_trailers()))
                        } else {
                            Next::Idle(pager)
                        }
                    }
                    Poll::Ready((_, Err(reason))) => Next::End(Some(reason.trailers())),
                },
                Next::End(trailers) => return Poll::Ready(trailers.map(Frame::trailers)),
            };
        }
    }
}
