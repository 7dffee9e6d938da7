//! The client's side of a Watch stream: what stays, whichever source serves it.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use etcd_store::cache::{ResponseHeader, Rope, WatchFields};
use etcd_wire::grpc::{Method, Status};
use http::HeaderMap;
use rangecache_base::telemetry::{Reason, metrics::Counted};
use rangecache_edge::limits::Deadline;
use rangecache_mirror::Mirrors;
use rangecache_upstream::BoxError;
use tokio::time::Sleep;

use super::receive::{Received, Requests};
use super::request::{Create, Ids, NO_WATCHER, UnknownRequest, WatchRequest};
use super::{message::control, stream::StreamContext, stream_bytes::StreamBytes};
use crate::{forward::StopSignal, metrics::WatchMetrics};

/// The client's side of one stream.
pub(super) struct Downstream {
    pub(super) stream: StreamContext,
    stop: Option<StopSignal>,
    /// Deadline of the client's `grpc-timeout`.
    expires: Option<Pin<Box<Sleep>>>,
    pub(super) requests: Requests,
    /// Requests of the client that are handled next: at most a create request and the one behind it.
    pub(super) unsent: VecDeque<WatchRequest>,
    /// Ids of watchers, while memory serves the stream: the relay of etcd's responses has its own.
    pub(super) ids: Ids,
    /// Watchers that memory has cancelled for a compaction, by id. etcd keeps such a watcher, and its id, until the client
    /// cancels it.
    cancelled: BTreeMap<i64, Create>,
    /// Responses without events, and bytes of etcd's, to be sent next.
    pub(super) control: VecDeque<Rope>,
    pub(super) bytes: StreamBytes,
    /// Counts the stream by its source.
    open: Counted,
    /// Header fields of the last response.
    identity: ResponseHeader,
    /// Revision of the last event on the stream.
    pub(super) last_event: i64,
    /// Highest revision that was reported for the whole stream.
    pub(super) reported: i64,
    /// Trailers with which the stream ends, or the error with which it breaks off.
    pub(super) end: Option<Result<HeaderMap, BoxError>>,
}

impl Downstream {
    /// The client's side of a `stream` that ends at `deadline`, and whose first request stays in `requests`.
    pub(super) fn new(
        stream: StreamContext,
        requests: Requests,
        bytes: StreamBytes,
        deadline: Deadline,
    ) -> Downstream {
        let proxy = &stream.client.proxy;
        let expires = deadline.at().map(tokio::time::sleep_until);
        Downstream {
            open: proxy.telemetry.metrics.watches.open_memory(),
            stop: StopSignal::new(Method::Watch, &proxy.forward.drain),
            expires: expires.map(Box::pin),
            requests,
            unsent: VecDeque::new(),
            ids: Ids::default(),
            cancelled: BTreeMap::new(),
            control: VecDeque::new(),
            bytes,
            identity: ResponseHeader::default(),
            last_event: 0,
            reported: 0,
            end: None,
            stream,
        }
    }

    pub(super) fn mirrors(&self) -> &Mirrors {
        &self.stream.client.proxy.mirrors
    }

    pub(super) fn metrics(&self) -> &WatchMetrics {
        &self.stream.client.proxy.telemetry.metrics.watches
    }

    /// Counts a watcher of the mirror at this position.
    pub(super) fn open_watcher(&self, position: usize) -> Option<Counted> {
        let mirror = self.mirrors().at(position)?;
        Some(self.metrics().open_watcher(&mirror.name))
    }

    /// Counts the stream as memory's from now on.
    pub(super) fn serve_from_memory(&mut self) {
        self.bytes.set_relayed(0);
        self.open = self.metrics().open_memory();
    }

    /// Counts the stream as etcd's from now on, for `reason`.
    pub(super) fn serve_from_etcd(&mut self, reason: Reason) {
        self.open = self.metrics().open_etcd(reason.as_str());
    }

    /// Status with which the stream ends now, between two messages, whatever its source has to send.
    pub(super) fn poll_end(&mut self, cx: &mut Context<'_>) -> Option<Status> {
        if self.stop.as_mut().is_some_and(|stop| stop.is_stopping(cx)) {
            return Some(Status::StoppingReconnect);
        }
        if let Some(expires) = &mut self.expires
            && let Poll::Ready(()) = expires.as_mut().poll(cx)
        {
            return Some(Status::DeadlineExceeded);
        }
        None
    }

    /// Ends the stream with this status.
    pub(super) fn end_with(&mut self, status: &Status) {
        self.end = Some(Ok(status.trailers()));
    }

    /// Whether there is a response to send, or the end.
    pub(super) fn has_output(&self) -> bool {
        !self.control.is_empty() || self.end.is_some()
    }

    /// Ends the stream; its client connects again and resumes.
    pub(super) fn interrupt(&mut self, reason: Reason) {
        self.metrics().record_created("interrupted", reason.as_str());
        self.end_with(&Status::WatchInterrupted);
    }

    /// Puts a create request that was not answered before the requests behind it.
    pub(super) fn handle_first(&mut self, create: Option<Create>) {
        if let Some(create) = create {
            self.unsent.push_front(WatchRequest::Create(create));
        }
    }

    /// Next request of the client: one that was not answered, or one that has arrived, unless only etcd can read it. Ends the stream
    /// at one that is late.
    pub(super) fn next_request(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Option<Result<WatchRequest, UnknownRequest>> {
        if let Some(request) = self.unsent.pop_front() {
            return Some(Ok(request));
        }
        match self.requests.poll_next(cx) {
            // etcd keeps the watchers of a stream whose client has closed its half, too.
            Poll::Pending | Poll::Ready(Received::End) => None,
            Poll::Ready(Received::Late) => {
                self.end_with(&Status::RequestTimeout);
                None
            }
            Poll::Ready(Received::Message(request)) => Some(request),
        }
    }

    /// Revision in the header of a response that is about no event: the highest that was shown to a client, or that a
    /// mirror is at.
    pub(super) fn shown(&self) -> i64 {
        let cluster_state = &self.mirrors().cluster_state;
        let history = cluster_state.history();
        let shown = cluster_state.min_served_revision().unwrap_or(0);
        let views = self.mirrors().all().filter_map(|mirror| mirror.view().ok());
        let of_history = views.filter(|view| view.history == history);
        let revision = of_history.map(|view| view.revision).fold(shown, i64::max);
        // Before a byte leaves (W16).
        if cluster_state.record_served(history, revision) {
            revision
        } else {
            shown
        }
    }

    /// Header with this revision.
    pub(super) fn header(&mut self, revision: i64) -> ResponseHeader {
        if let Some(identity) = self.mirrors().cluster_state.identity() {
            self.identity = *identity;
        }
        ResponseHeader {
            revision,
            ..self.identity
        }
    }

    /// Sends a response without events.
    pub(super) fn send(&mut self, fields: &WatchFields<'_>) {
        self.metrics().record_response();
        self.control.push_back(control(fields));
    }

    /// Passes on etcd's refusal of a create request, a whole message with its gRPC prefix.
    pub(super) fn pass_refusal(&mut self, response: Bytes) {
        self.metrics().record_created("etcd", Reason::Auth.as_str());
        self.metrics().record_response();
        self.control.push_back(response.into());
    }

    /// Answers a create request as etcd refuses it, with this `cancel_reason`.
    pub(super) fn refuse(&mut self, cancel_reason: &str) {
        self.metrics().record_created("memory", "refused");
        let header = self.header(self.shown());
        self.send(&WatchFields {
            header,
            watch_id: NO_WATCHER,
            created: true,
            canceled: true,
            cancel_reason,
            ..WatchFields::default()
        });
    }

    /// Answers a cancel request.
    pub(super) fn send_cancelled(&mut self, id: i64) {
        self.metrics().record_cancelled("client");
        let header = self.header(self.shown());
        self.send(&WatchFields {
            header,
            watch_id: id,
            canceled: true,
            ..WatchFields::default()
        });
    }

    /// Cancels the watcher `id` of `create`, whose bytes count already, because etcd has compacted what it needs, or because
    /// its history was replaced (W10).
    pub(super) fn cancel_compacted(
        &mut self,
        id: i64,
        create: Create,
        compact_revision: i64,
        reason: &'static str,
    ) {
        self.cancelled.insert(id, create);
        self.metrics().record_cancelled(reason);
        let header = self.header(0);
        self.send(&WatchFields {
            header,
            watch_id: id,
            canceled: true,
            compact_revision,
            ..WatchFields::default()
        });
    }

    /// Cancels the watcher `id` of `create` with a revision of the history that has replaced its own.
    pub(super) fn cancel_of_replaced(&mut self, id: i64, create: Create) {
        let revision = self.mirrors().cluster_state.known().max(1);
        self.cancel_compacted(id, create, revision, "replaced");
    }

    /// Allocates the id of a watcher, which the client may have `requested`; `None` if that one is taken. `is_open` says which
    /// ids memory serves.
    pub(super) fn allocate_id(&mut self, requested: i64, is_open: impl Fn(i64) -> bool) -> Option<i64> {
        let cancelled = &self.cancelled;
        self.ids
            .allocate(requested, |id| is_open(id) || cancelled.contains_key(&id))
    }

    /// Ids of the watchers that memory has cancelled for a compaction.
    pub(super) fn cancelled_ids(&self) -> impl Iterator<Item = i64> {
        self.cancelled.keys().copied()
    }

    /// Whether memory has cancelled a watcher for a compaction, and the client has not.
    pub(super) fn has_cancelled(&self) -> bool {
        !self.cancelled.is_empty()
    }

    /// Whether the watcher `id` is one of those.
    pub(super) fn is_cancelled(&self, id: i64) -> bool {
        self.cancelled.contains_key(&id)
    }

    /// Answers the client's cancel of a watcher that memory has cancelled, if `id` is that of one.
    pub(super) fn release(&mut self, id: i64) {
        if let Some(create) = self.cancelled.remove(&id) {
            self.bytes.remove_watcher(&create);
            self.send_cancelled(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{task::Waker, time::Duration};

    use super::super::testing::{downstream, take_control};
    use super::{super::plan::EMPTY_RANGE, *};
    use crate::testing::Scene;

    fn ended(down: &mut Downstream) -> Option<String> {
        let end = down.poll_end(&mut Context::from_waker(Waker::noop()));
        end.map(|status| status.to_string())
    }

    #[tokio::test(start_paused = true)]
    async fn stream_ends_at_its_clients_deadline_or_when_the_process_stops() {
        let scene = Scene::new(&[]);
        let mut timed = downstream(&scene, &[("grpc-timeout", "5S")], Bytes::new());
        let mut endless = downstream(&scene, &[], Bytes::new());
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!((ended(&mut timed), ended(&mut endless)), (None, None));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(ended(&mut timed), Some(Status::DeadlineExceeded.to_string()));
        assert_eq!(ended(&mut endless), None);
        scene.drain.cancel();
        let stopping = Some(Status::StoppingReconnect.to_string());
        assert_eq!(
            (ended(&mut timed), ended(&mut endless)),
            (stopping.clone(), stopping)
        );
    }

    #[tokio::test]
    async fn watcher_cancelled_for_a_compaction_keeps_its_id_until_its_client_cancels_it() {
        let scene = Scene::new(&[]);
        let mut down = downstream(&scene, &[], Bytes::new());
        down.cancel_compacted(3, Create::default(), 8, "compacted");
        let cancelled = take_control(&mut down).pop().unwrap();
        assert_eq!((cancelled.watch_id, cancelled.compact_revision), (3, 8));
        assert!(cancelled.canceled && !cancelled.created);
        assert_eq!(cancelled.header.unwrap().revision, 0, "as etcd's");
        assert_eq!(down.allocate_id(3, |_| false), None);
        down.release(4);
        assert!(
            take_control(&mut down).is_empty(),
            "etcd does not answer for an unknown id"
        );
        down.release(3);
        let released = take_control(&mut down).pop().unwrap();
        assert_eq!((released.watch_id, released.canceled), (3, true));
        assert_eq!(released.compact_revision, 0);
        assert_eq!(down.allocate_id(3, |_| false), Some(3));
    }

    #[tokio::test]
    async fn refusal_has_no_watcher_and_etcds_text() {
        let scene = Scene::new(&[]);
        scene.check(40);
        let mut down = downstream(&scene, &[], Bytes::new());
        down.refuse(EMPTY_RANGE);
        let refused = take_control(&mut down).pop().unwrap();
        assert_eq!(
            (refused.watch_id, refused.cancel_reason.as_str()),
            (-1, "mvcc: watcher range is empty")
        );
        assert!(refused.created && refused.canceled);
        assert_eq!(refused.header.unwrap().cluster_id, 7);
    }

    #[tokio::test]
    async fn response_about_no_event_shows_no_revision_below_one_that_a_client_has() {
        let scene = Scene::new(&[]);
        let mut down = downstream(&scene, &[], Bytes::new());
        let cluster_state = &scene.mirrors.cluster_state;
        assert!(cluster_state.record_served(cluster_state.history(), 12));
        assert_eq!(down.shown(), 12);
        down.send_cancelled(1);
        let cancelled = take_control(&mut down).pop().unwrap();
        assert_eq!(cancelled.header.unwrap().revision, 12);
    }

    #[tokio::test]
    async fn create_request_that_was_not_answered_is_handled_before_those_behind_it() {
        let scene = Scene::new(&[]);
        let mut down = downstream(&scene, &[], Bytes::new());
        down.unsent.push_back(WatchRequest::Progress);
        down.handle_first(None);
        down.handle_first(Some(Create::default()));
        let expected = [WatchRequest::Create(Create::default()), WatchRequest::Progress];
        assert_eq!(down.unsent, expected);
    }
}
