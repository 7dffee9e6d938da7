//! [`serve`]: one read, from its request to the head of its response, whatever its wire format.

use http::{Request, Response};
use hyper::body::Incoming;
use tokio::sync::OwnedSemaphorePermit;
use tracing::Instrument;

use super::answer::MemoryAnswer;
use super::attempt::ReadRequest;
use super::body::EntrySource;
use super::decide::decide;
use super::shadow;
use super::stale::StaleRead;
use crate::proxy::call::CallRecord;
use crate::proxy::handles::{CallProtocol, Client, Proxy};
use crate::proxy::response::{CallResult, ResponseBody};
use etcd_store::cache::{RangeQuery, ResponseHeader, Selection};
use etcd_store::keyspace::figure_prefix;
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::outcome::{Kind, Read};
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_edge::limits::CallBytes;

/// Wire format of reads: how a request is read, how its response is written, and how etcd is asked instead.
pub(in crate::proxy) trait WireFormat: Sized {
    /// The kind of read that metrics count.
    const KIND: Kind;
    const PROTOCOL: CallProtocol;
    /// Whether etcd's responses can be compared with memory's (`--shadow`).
    const IS_COMPARED: bool;
    /// The unchanged request, for etcd, but for what [`ReadRequest`] has.
    type Original;

    /// Reads and decodes the request. `call` counts its bytes as they arrive.
    ///
    /// # Errors
    /// Result of the call if the request is not returned: it was refused, or forwarded because it is not understood.
    async fn receive(
        proxy: &Proxy,
        request: Request<Incoming>,
        call: &mut CallBytes,
        record: &mut CallRecord,
    ) -> Result<ReceivedRead<Self>, Box<CallResult>>;

    /// The status with which etcd refuses `query` in this format alone; `None` if it does not.
    fn refusal(_query: &RangeQuery) -> Option<Status> {
        None
    }

    /// The response that refuses the read with `status`.
    fn refuse(&self, request: &ReadRequest, status: &Status) -> Response<ResponseBody>;

    /// The response with the selected entries, which `entries` keeps in memory.
    ///
    /// # Errors
    /// [`TooLong`] if etcd would not send it.
    fn respond(
        &self,
        request: &ReadRequest,
        header: ResponseHeader,
        selection: Selection,
        entries: EntrySource<'_>,
    ) -> Result<Response<ResponseBody>, TooLong>;

    /// Gets the response from etcd. The outcome in `record` is set, and is changed if etcd is asked in another way.
    async fn fetch(
        &self,
        proxy: &Proxy,
        request: &mut ReadRequest,
        original: Self::Original,
        call: &CallBytes,
        record: &mut CallRecord,
    ) -> CallResult;
}

/// A read whose request was understood.
pub(in crate::proxy) struct ReceivedRead<W: WireFormat> {
    pub(super) request: ReadRequest,
    pub(super) format: W,
    pub(super) original: W::Original,
}

/// The response has this many bytes in gRPC, more than etcd's library sends.
#[derive(Debug)]
pub(in crate::proxy) struct TooLong(pub(super) u64);

/// Serves a read in the format `W`. `call` counts its bytes.
pub(in crate::proxy) async fn serve<W: WireFormat>(
    client: &Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    record.begin_read(W::KIND);
    let span = tracing::debug_span!("read", kind = ?W::KIND);
    // An instrumented future enters its span on every poll, so a disabled span is left out.
    if span.is_disabled() {
        return handle::<W>(client, request, call, record).await;
    }
    handle::<W>(client, request, call, record).instrument(span).await
}

async fn handle<W: WireFormat>(
    client: &Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    let proxy = &*client.proxy;
    let mut received = match W::receive(proxy, request, call, record).await {
        Ok(received) => received,
        Err(result) => return *result,
    };
    let request = &mut received.request;
    if let Some(prefix) = figure_prefix(&request.query.key) {
        proxy.telemetry.metrics.prefixes.record_read(prefix);
    }
    record.is_list = W::KIND == Kind::Stream || request.query.is_large();
    if let Some(status) = W::refusal(&request.query) {
        record.outcome = Outcome::Hit(Read::Refused);
        return Ok(received.format.refuse(&received.request, &status));
    }
    let (reason, turn) = match decide(client, W::PROTOCOL, &received.request, record).await {
        Ok(answer) => match turn_to_compare::<W>(proxy, &answer, record) {
            None => {
                return Ok(respond(
                    proxy,
                    &received.format,
                    &received.request,
                    answer,
                    record,
                ));
            }
            Some(turn) => (Reason::Shadow, Some(turn)),
        },
        Err(reason) => (reason, None),
    };
    // Boxed, so that the future of a read from memory stays small.
    Box::pin(fetch(proxy, received, (reason, turn), call, record)).await
}

/// A turn for the comparison, if the read is one that etcd is to answer although memory could (`--shadow`).
fn turn_to_compare<W: WireFormat>(
    proxy: &Proxy,
    answer: &MemoryAnswer,
    record: &CallRecord,
) -> Option<OwnedSemaphorePermit> {
    let is_comparable =
        W::IS_COMPARED && matches!(answer, MemoryAnswer::Entries(..)) && record.stale_age.is_none();
    is_comparable.then(|| proxy.shadow.choose())?
}

/// Responds from memory.
fn respond<W: WireFormat>(
    proxy: &Proxy,
    format: &W,
    request: &ReadRequest,
    answer: MemoryAnswer,
    record: &mut CallRecord,
) -> Response<ResponseBody> {
    match answer {
        MemoryAnswer::Entries(header, selection, outcome) => {
            record.outcome = outcome;
            record.keys = selection.len();
            let entries = EntrySource::Mirror {
                mirror: record.mirror(&proxy.mirrors),
                is_past: request.query.revision > 0,
            };
            format
                .respond(request, header, selection, entries)
                .unwrap_or_else(|TooLong(bytes)| {
                    record.outcome = outcome.refused();
                    format.refuse(request, &Status::LargerThanMax(bytes))
                })
        }
        MemoryAnswer::Refusal(status, outcome) => {
            record.outcome = outcome;
            format.refuse(request, &status)
        }
    }
}

/// Gets the response from etcd, because memory could not answer for `reason`, and compares it if there is a `turn`. Once no
/// member of etcd answers, the response may be a stale one from memory.
async fn fetch<W: WireFormat>(
    proxy: &Proxy,
    received: ReceivedRead<W>,
    (reason, turn): (Reason, Option<OwnedSemaphorePermit>),
    call: &CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    let ReceivedRead {
        mut request,
        format,
        original,
    } = received;
    if proxy.refuses_reads(reason) {
        record.outcome = Outcome::Shed(reason);
        return Ok(format.refuse(&request, &Status::MirrorBehind));
    }
    record.outcome = Outcome::Forwarded(reason);
    request.metadata.bypass |= reason == Reason::ForwardAll;
    let stale = StaleRead::of(proxy, &request);
    let fetching = format.fetch(proxy, &mut request, original, call, record);
    let result = match stale {
        None => fetching.await,
        Some(stale) => tokio::select! {
            biased;
            result = fetching => result,
            answer = stale.answer_once_silent() => {
                let answer = answer.recorded(record);
                return Ok(respond(proxy, &format, &request, answer, record));
            }
        },
    };
    match turn {
        None => result,
        Some(turn) => result.map(|response| shadow::observe(proxy, request.query, turn, response)),
    }
}
