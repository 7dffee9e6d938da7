//! One Watch stream that is served from memory. It runs inside the body of its response, without a task of its own:
//! whatever it sends is produced when the client has room.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes};
use http_body::Frame;
use tokio::time::{Instant, Sleep};

use super::etcd_stream::EtcdStream;
use super::message::{EventMessages, control};
use super::plan::Refusal;
use super::progress::Progress;
use super::receive::{Received, Requests};
use super::request::{Create, Ids, WatchRequest};
use super::start::{Answer, Started};
use super::stream::Stream;
use super::stream_bytes::StreamBytes;
use super::watcher::Watcher;
use crate::cache::{ResponseHeader, Rope, WatchFields};
use crate::grpc::{Method, Status};
use crate::mirror::watch_hub::Reader;
use crate::proxy::forward::StopSignal;
use crate::proxy::response::{BodySource, FrameBytes, Polled};
use crate::telemetry::Reason;
use crate::telemetry::metrics::{OpenStream, Source};
use crate::upstream::BoxError;

mod attempts;
mod creating;
mod departure;
mod events;
mod leaving;
mod notify;
mod relaying;
mod resuming;
mod returning;

/// Requests and filtered responses that one poll looks at, before other streams get their turn.
const MAX_STEPS: usize = 64;

/// A create request whose watcher is being started.
struct Starting {
    create: Create,
    started: Pin<Box<dyn Future<Output = Result<Answer, NotStarted>> + Send>>,
}

/// Why memory does not serve a watcher.
enum NotStarted {
    /// etcd decides about the create request, for this reason.
    For(Reason),
    /// etcd has refused the create request with this message; memory continues to serve the stream.
    Refused(Bytes),
    /// etcd has not refused it, and serves the stream.
    NotRefused(Reason),
}

impl fmt::Debug for Starting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Starting").finish_non_exhaustive()
    }
}

/// How the first create request of a stream is answered.
pub(super) enum First {
    Refuse(Refusal),
    Compacted(i64),
    Started(Started),
}

/// One stream.
#[derive(Debug)]
pub(super) struct Session {
    stream: Stream,
    stop: Option<StopSignal>,
    /// Deadline of the client's `grpc-timeout`.
    expires: Option<Pin<Box<Sleep>>>,
    requests: Requests,
    ids: Ids,
    watchers: BTreeMap<i64, Watcher>,
    starting: Option<Starting>,
    /// Responses without events, to be sent next.
    control: VecDeque<Rope>,
    /// Events that are being sent. Nothing else is sent before their last piece (W4).
    message: Option<EventMessages>,
    /// Watcher whose events were sent last: the others get their turn first.
    last_turn: i64,
    /// Revision of the last event on the stream.
    last_event: i64,
    progress: Progress,
    bytes: StreamBytes,
    /// Counts the stream by its source.
    open: OpenStream,
    /// Header fields of the last response.
    identity: ResponseHeader,
    /// Waits for the feed of one of the stream's mirrors, while the events of the others wait for it.
    resuming: Option<resuming::Resuming>,
    /// Set once etcd serves the stream.
    etcd: Option<EtcdStream>,
    /// Set before etcd serves the stream.
    leaving: Option<departure::Departure>,
    /// Set while etcd serves the stream.
    returning: Option<attempts::Returning>,
    /// Requests of the client that are handled next: at most a create request and the one behind it.
    unsent: VecDeque<WatchRequest>,
    /// Status with which the stream ends.
    end: Option<Status>,
    /// Error with which the stream breaks off.
    abort: Option<BoxError>,
    has_ended: bool,
}

impl Session {
    /// A stream whose first request was received and stays in `requests`.
    pub(super) fn new(stream: Stream, requests: Requests, bytes: StreamBytes, arrived: Instant) -> Session {
        let proxy = &stream.client.proxy;
        let expires = stream
            .timeout
            .map(|timeout| tokio::time::sleep_until(arrived + timeout));
        Session {
            open: proxy.telemetry.metrics.watches.open_memory(),
            stop: StopSignal::new(Method::Watch, &proxy.forward.drain),
            expires: expires.map(Box::pin),
            requests,
            ids: Ids::default(),
            watchers: BTreeMap::new(),
            starting: None,
            control: VecDeque::new(),
            message: None,
            last_turn: 0,
            last_event: 0,
            progress: Progress::new(proxy.watch_progress_interval.unwrap_or_default()),
            bytes,
            identity: ResponseHeader::default(),
            etcd: None,
            resuming: None,
            leaving: None,
            returning: None,
            unsent: VecDeque::new(),
            end: None,
            abort: None,
            has_ended: false,
            stream,
        }
    }

    /// Answers the first request, which is `create`.
    pub(super) fn begin(&mut self, create: &Create, first: First) {
        self.requests.consume();
        match first {
            First::Refuse(refusal) => self.refuse(refusal),
            First::Compacted(revision) => self.created_compacted(create, revision),
            First::Started(started) => self.created(create, started),
        }
    }

    /// Handles the requests that have arrived, until there is something to send.
    fn poll_requests(&mut self, cx: &mut Context<'_>) {
        for _ in 0..MAX_STEPS {
            if !self.control.is_empty() || self.end.is_some() || self.etcd.is_some() {
                return;
            }
            // A progress request is answered before the next request, as etcd does.
            if self.progress.requested.is_some() {
                return self.requests.read_ahead(cx);
            }
            self.poll_leaving(cx);
            if self.etcd.is_some() || self.end.is_some() {
                return;
            }
            if self.leaving.is_some() {
                return self.requests.read_ahead(cx);
            }
            if let Some(mut starting) = self.starting.take() {
                match starting.started.as_mut().poll(cx) {
                    Poll::Pending => {
                        self.starting = Some(starting);
                        self.requests.read_ahead(cx);
                        return;
                    }
                    Poll::Ready(Ok(Answer::Started(started))) => self.created(&starting.create, started),
                    Poll::Ready(Ok(Answer::Compacted(revision))) => {
                        self.created_compacted(&starting.create, revision);
                    }
                    Poll::Ready(Err(NotStarted::Refused(response))) => self.refused(response),
                    Poll::Ready(Err(NotStarted::For(reason))) => self.not_started(starting.create, reason),
                    Poll::Ready(Err(NotStarted::NotRefused(reason))) => {
                        self.leave(reason, Some(starting.create));
                    }
                }
                continue;
            }
            if let Some(request) = self.unsent.pop_front() {
                self.handle(request);
                continue;
            }
            match self.requests.poll_next(cx) {
                Poll::Pending | Poll::Ready(Received::End) => return,
                Poll::Ready(Received::Late) => self.end = Some(Status::RequestTimeout),
                Poll::Ready(Received::Message(Ok(request))) => self.handle(request),
                Poll::Ready(Received::Message(Err(_))) => self.leave(Reason::Undecodable, None),
            }
        }
        cx.waker().wake_by_ref();
    }

    fn handle(&mut self, request: WatchRequest) {
        match request {
            WatchRequest::Create(create) => self.create(create),
            WatchRequest::Cancel(id) => self.cancel(id),
            WatchRequest::Progress => self.request_progress(),
            WatchRequest::Nothing => {}
        }
    }

    /// Revision in the header of a response that is about no event: the highest that was shown to a client, or that a
    /// mirror is at.
    fn shown(&self) -> i64 {
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
    fn header(&mut self, revision: i64) -> ResponseHeader {
        if let Some(identity) = self.mirrors().cluster_state.identity() {
            self.identity = *identity;
        }
        ResponseHeader {
            revision,
            ..self.identity
        }
    }

    fn send(&mut self, fields: &WatchFields<'_>) {
        self.metrics().record_response();
        self.control.push_back(control(fields));
    }

    fn mirrors(&self) -> &crate::mirror::Mirrors {
        &self.stream.client.proxy.mirrors
    }

    fn metrics(&self) -> &crate::telemetry::metrics::WatchMetrics {
        &self.stream.client.proxy.telemetry.metrics.watches
    }

    /// Status with which the stream ends now, between two messages.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Option<Status> {
        if self.stop.as_mut().is_some_and(|stop| stop.is_stopping(cx)) {
            return Some(Status::StoppingReconnect);
        }
        if let Some(expires) = &mut self.expires
            && expires.as_mut().poll(cx).is_ready()
        {
            return Some(Status::DeadlineExceeded);
        }
        let mut readers = self
            .watchers
            .values()
            .filter_map(|watcher| watcher.reader.as_ref());
        if self.stream.require_leader && readers.any(Reader::has_no_leader) {
            return Some(Status::NoLeader);
        }
        None
    }

    /// Next frame; `None` while there is nothing to send.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Option<Frame<Rope>> {
        loop {
            if self.etcd.is_some() {
                let frame = self.poll_etcd(cx);
                if frame.is_some() || self.etcd.is_some() {
                    return frame;
                }
            }
            if let Some(message) = &mut self.message {
                let piece = message.next_piece();
                let is_last = message.is_complete();
                if is_last {
                    self.message = None;
                }
                if let Some(piece) = piece {
                    self.bytes.produced(piece.remaining(), is_last);
                    return Some(Frame::data(piece));
                }
            }
            if let Some(status) = self.poll_end(cx) {
                self.has_ended = true;
                return Some(Frame::trailers(status.trailers()));
            }
            self.poll_requested(cx);
            self.poll_requests(cx);
            if let Some(response) = self.control.pop_front() {
                return Some(Frame::data(response));
            }
            if self.etcd.is_some() {
                continue;
            }
            if let Some(status) = self.end.take() {
                self.has_ended = true;
                return Some(Frame::trailers(status.trailers()));
            }
            self.poll_events(cx);
            if self.message.is_some() || !self.control.is_empty() || self.end.is_some() || self.etcd.is_some()
            {
                continue;
            }
            if self.poll_requested(cx) {
                continue;
            }
            self.poll_periodic(cx);
            let response = self.control.pop_front()?;
            return Some(Frame::data(response));
        }
    }
}

impl BodySource for Session {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        if self.has_ended {
            return Poll::Ready(None);
        }
        // What arrives during the poll wakes the stream again (W17).
        let signal = Arc::clone(&self.stream.signal);
        let frame = signal.look(cx, |cx| self.poll_next(cx));
        match (frame, self.abort.take()) {
            (Some(frame), _) => Poll::Ready(Some(Ok(frame))),
            (None, Some(error)) => Poll::Ready(Some(Err(error))),
            (None, None) => Poll::Pending,
        }
    }

    fn may_be_idle(&self) -> bool {
        true
    }

    fn may_stay_unread(&self) -> bool {
        self.etcd.is_none()
    }

    fn frame_bytes(&mut self) -> FrameBytes {
        match self.etcd {
            None => self.bytes.frame_bytes(),
            Some(_) => FrameBytes::Connection,
        }
    }

    fn unread_bytes(&self) -> u64 {
        self.bytes.unread()
    }

    fn request_bytes(&self) -> u64 {
        self.stream.head_bytes()
    }

    fn source(&self) -> Option<Source> {
        let source = if self.etcd.is_some() {
            Source::Etcd
        } else {
            Source::Memory
        };
        Some(source)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for watcher in self.watchers.values() {
            if let Some(mirror) = self.mirrors().at(watcher.mirror) {
                self.metrics().add_watchers(&mirror.name, -1);
            }
        }
    }
}
