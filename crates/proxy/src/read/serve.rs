//! [`serve`]: one read, from its request to the head of its response, whatever its wire format.

use std::sync::atomic::{AtomicU64, Ordering};

use etcd_store::cache::{RangeQuery, ResponseHeader, Selection};
use etcd_store::keyspace::figure_prefix;
use etcd_wire::grpc::{Status, metadata::HeadFields};
use http::{Request, Response};
use hyper::body::Incoming;
use rangecache_base::telemetry::outcome::{Kind, Read};
use rangecache_base::telemetry::{Outcome, Reason};
use tracing::{Instrument, field};

use super::{
    answer::MemoryAnswer, attempt::ReadRequest, body::EntrySource, decide::decide, stale::StaleRead,
};
use crate::call::CallRecord;
use crate::handles::{CallProtocol, Client, Proxy};
use crate::response::{CallResult, ResponseBody};

/// Wire format of reads: how a request is read, how its response is written, and how etcd is asked instead.
pub(crate) trait WireFormat: Sized {
    /// The kind of read that metrics count.
    const KIND: Kind;
    const PROTOCOL: CallProtocol;
    /// The unchanged request, for etcd, but for what [`ReadRequest`] has.
    type Original;

    /// Reads and decodes the request, whose header fields are `fields`. `record` counts its bytes as they arrive.
    ///
    /// # Errors
    /// Result of the call if the request is not returned: it was refused, or forwarded because it is not understood.
    async fn receive(
        proxy: &Proxy,
        fields: &HeadFields,
        request: Request<Incoming>,
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
    /// [`Unservable`], of a response that etcd would not send or memory cannot.
    fn respond(
        &self,
        request: &ReadRequest,
        header: ResponseHeader,
        selection: Selection,
        entries: EntrySource<'_>,
    ) -> Result<Response<ResponseBody>, Unservable>;

    /// Gets the response from etcd. The outcome in `record` is set, and is changed if etcd is asked in another way.
    async fn fetch(
        &self,
        proxy: &Proxy,
        request: &mut ReadRequest,
        original: Self::Original,
        record: &mut CallRecord,
    ) -> CallResult;
}

/// A read whose request was understood.
pub(crate) struct ReceivedRead<W: WireFormat> {
    pub(super) request: ReadRequest,
    pub(super) format: W,
    pub(super) original: W::Original,
}

/// Why there is no response with the entries.
#[derive(Debug)]
pub(crate) enum Unservable {
    /// The response has this many bytes in gRPC, more than etcd's library sends.
    TooLong(u64),
    /// Memory cannot send it, for this reason.
    For(Reason),
}

impl From<Reason> for Unservable {
    fn from(reason: Reason) -> Unservable {
        Unservable::For(reason)
    }
}

/// Serves a read in the format `W`, whose header fields are `fields`.
pub(crate) async fn serve<W: WireFormat>(
    client: &Client,
    fields: &HeadFields,
    request: Request<Incoming>,
    record: &mut CallRecord,
) -> CallResult {
    record.begin_read(W::KIND);
    // Of a disabled span no field is evaluated.
    let span = tracing::debug_span!(
        "read",
        id = next_id(),
        kind = ?W::KIND,
        client = %record.client_name(),
        prefix = field::Empty
    );
    // An instrumented future enters its span on every poll, so a disabled span is left out.
    if span.is_disabled() {
        return handle::<W>(client, fields, request, record).await;
    }
    record.log_in(span.clone());
    handle::<W>(client, fields, request, record)
        .instrument(span)
        .await
}

/// Number of a read in the log, so that its lines can be joined; from 1.
fn next_id() -> u64 {
    static IDS: AtomicU64 = AtomicU64::new(1);
    IDS.fetch_add(1, Ordering::Relaxed)
}

async fn handle<W: WireFormat>(
    client: &Client,
    fields: &HeadFields,
    request: Request<Incoming>,
    record: &mut CallRecord,
) -> CallResult {
    let proxy = &*client.proxy;
    let received = match W::receive(proxy, fields, request, record).await {
        Ok(received) => received,
        Err(result) => return *result,
    };
    let (request, prefixes) = (&received.request, &proxy.telemetry.metrics.prefixes);
    let prefix = figure_prefix(&request.query.key);
    if let Some(prefix) = prefix {
        prefixes.record_read(prefix);
    }
    record.is_list = W::KIND == Kind::Stream || request.query.is_large();
    if let Some(status) = W::refusal(&request.query) {
        record.outcome = Outcome::Hit(Read::Refused);
        return Ok(received.format.refuse(request, &status));
    }
    let decided = decide(client, W::PROTOCOL, request, record).await;
    if let (Some(waited), Some(prefix)) = (record.wait(), prefix) {
        prefixes.record_wait(prefix, waited);
    }
    let reason = match decided {
        Ok(answer) => match respond(proxy, &received.format, request, answer, record) {
            Ok(response) => return Ok(response),
            Err(reason) => reason,
        },
        Err(reason) => reason,
    };
    // Boxed, so that the future of a read from memory stays small.
    Box::pin(fetch(client, received, reason, record)).await
}

/// Responds from memory.
///
/// # Errors
/// Reason for which etcd has to respond after all.
fn respond<W: WireFormat>(
    proxy: &Proxy,
    format: &W,
    request: &ReadRequest,
    answer: MemoryAnswer,
    record: &mut CallRecord,
) -> Result<Response<ResponseBody>, Reason> {
    let (header, selection, outcome, scanned) = match answer {
        MemoryAnswer::Entries(header, selection, outcome, scanned) => (header, selection, outcome, scanned),
        MemoryAnswer::Refusal(status, outcome) => {
            record.outcome = outcome;
            return Ok(format.refuse(request, &status));
        }
    };
    record.outcome = outcome;
    record.keys = selection.len();
    let entries = match scanned {
        Some(scanned) => EntrySource::Scanned(scanned),
        None => EntrySource::Mirror {
            mirror: record.mirror(&proxy.mirrors),
            is_past: request.query.revision > 0,
        },
    };
    match format.respond(request, header, selection, entries) {
        Ok(response) => Ok(response),
        Err(Unservable::TooLong(bytes)) => {
            record.outcome = outcome.refused();
            Ok(format.refuse(request, &Status::LargerThanMax(bytes)))
        }
        Err(Unservable::For(reason)) => Err(reason),
    }
}

/// Gets the response from etcd, because memory could not answer for `reason`. Once no member of etcd answers, the response may
/// be a stale one from memory.
async fn fetch<W: WireFormat>(
    client: &Client,
    received: ReceivedRead<W>,
    reason: Reason,
    record: &mut CallRecord,
) -> CallResult {
    let proxy = &*client.proxy;
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
    let stale = StaleRead::of(proxy, &request, &client.account);
    let fetching = format.fetch(proxy, &mut request, original, record);
    match stale {
        None => fetching.await,
        Some(stale) => tokio::select! {
            biased;
            result = fetching => result,
            answer = stale.answer_once_silent() => {
                let answer = answer.recorded(record);
                let response = respond(proxy, &format, &request, answer, record);
                Ok(response.unwrap_or_else(|reason| {
                    record.outcome = Outcome::Shed(reason);
                    format.refuse(&request, &Status::MirrorBehind)
                }))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use etcd_wire::grpc::CallMetadata;
    use http::{HeaderMap, HeaderValue};

    use super::*;
    use crate::{call::testing::record, response::status_response, testing::Scene};

    /// A format in which no response can be made for this reason, and etcd answers with a status of its own.
    struct Told(fn() -> Unservable);

    const TOO_LONG: Told = Told(|| Unservable::TooLong(77));

    const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

    impl WireFormat for Told {
        const KIND: Kind = Kind::Unary;
        const PROTOCOL: CallProtocol = CallProtocol::Grpc;
        type Original = ();

        async fn receive(
            _: &Proxy,
            _: &HeadFields,
            _: Request<Incoming>,
            _: &mut CallRecord,
        ) -> Result<ReceivedRead<Told>, Box<CallResult>> {
            unreachable!("the request is there")
        }

        fn refuse(&self, _: &ReadRequest, status: &Status) -> Response<ResponseBody> {
            status_response(status, CONTENT_TYPE)
        }

        fn respond(
            &self,
            _: &ReadRequest,
            _: ResponseHeader,
            _: Selection,
            _: EntrySource<'_>,
        ) -> Result<Response<ResponseBody>, Unservable> {
            Err(self.0())
        }

        async fn fetch(
            &self,
            _: &Proxy,
            request: &mut ReadRequest,
            (): (),
            _: &mut CallRecord,
        ) -> CallResult {
            let bypasses = request.metadata.bypass.to_string();
            Ok(status_response(&Status::InvalidArgument(bypasses), CONTENT_TYPE))
        }
    }

    fn request() -> ReadRequest {
        let headers = HeaderMap::from_iter([(http::header::CONTENT_TYPE, CONTENT_TYPE)]);
        ReadRequest {
            query: RangeQuery {
                key: "k".into(),
                ..RangeQuery::default()
            },
            metadata: CallMetadata::from_headers(&headers).unwrap(),
            headers,
        }
    }

    /// The text of the status with which a read ends that memory could not answer for `reason`, and its outcome.
    async fn fetched(scene: &Scene, reason: Reason) -> (String, Outcome) {
        let received = ReceivedRead {
            request: request(),
            format: TOO_LONG,
            original: (),
        };
        let mut record = record();
        let result = fetch(&scene.client(), received, reason, &mut record).await;
        let text = result.unwrap().headers()["grpc-message"]
            .to_str()
            .unwrap()
            .to_owned();
        (text, record.outcome)
    }

    #[tokio::test]
    async fn read_of_a_mirror_that_is_behind_is_refused_without_asking_etcd_if_the_operator_wants_it() {
        let scene = Scene::new(&["--when-behind=fail"]);
        let (text, outcome) = fetched(&scene, Reason::Loading).await;
        assert_eq!(
            (text, outcome),
            (Status::MirrorBehind.to_string(), Outcome::Shed(Reason::Loading))
        );
        let (text, outcome) = fetched(&scene, Reason::NotMirrored).await;
        assert_eq!(
            (text.as_str(), outcome),
            ("false", Outcome::Forwarded(Reason::NotMirrored))
        );
        let (text, _) = fetched(&Scene::new(&[]), Reason::Loading).await;
        assert_eq!(text, "false");
    }

    #[tokio::test]
    async fn read_bypasses_every_shortcut_while_the_operator_forwards_all() {
        let (text, outcome) = fetched(&Scene::new(&[]), Reason::ForwardAll).await;
        assert_eq!(
            (text.as_str(), outcome),
            ("true", Outcome::Forwarded(Reason::ForwardAll))
        );
    }

    #[tokio::test]
    async fn response_that_etcd_could_not_send_is_refused_with_its_length() {
        let (scene, mut record) = (Scene::new(&[]), record());
        let selection = Selection::of_page(Vec::new(), 0, false);
        let outcome = Outcome::Hit(Read::Linearizable);
        let answer = MemoryAnswer::Entries(ResponseHeader::default(), selection, outcome, None);
        let response = respond(&scene.proxy, &TOO_LONG, &request(), answer, &mut record).unwrap();
        assert_eq!(response.headers()["grpc-status"], "8");
        let text = response.headers()["grpc-message"].to_str().unwrap();
        assert_eq!(text, Status::LargerThanMax(77).to_string());
        assert_eq!(record.outcome, outcome.refused());
    }

    #[tokio::test]
    async fn read_of_a_damaged_value_goes_to_etcd() {
        let (scene, mut record) = (Scene::new(&[]), record());
        let selection = Selection::of_page(Vec::new(), 0, false);
        let answer = MemoryAnswer::Entries(
            ResponseHeader::default(),
            selection,
            Outcome::Hit(Read::Linearizable),
            None,
        );
        let damaged = Told(|| Unservable::For(Reason::Damaged));
        let response = respond(&scene.proxy, &damaged, &request(), answer, &mut record);
        assert_eq!(response.err(), Some(Reason::Damaged));
    }
}
