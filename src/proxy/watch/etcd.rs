//! A Watch stream while etcd serves it, and its attempts to return to memory.
//!
//! A progress request makes etcd send a barrier: everything at or below its revision R was relayed before it. The
//! watchers join their hubs at R + 1, all or none, while nothing more is read from etcd. If they cannot, etcd's stream is
//! read on, and nothing was lost.

use std::sync::Arc;
use std::task::{Context, Poll};

use http_body::Frame;

use super::downstream::Downstream;
use super::etcd_stream::{EtcdStream, StreamStep};
use super::plan::DUPLICATE_ID;
use super::receive::Received;
use super::relay::Relay;
use super::request::WatchRequest;
use super::returning::{Attempt, Joined, Returning, join};
use crate::proxy::response::Polled;
use etcd_store::cache::WatchFields;
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::Reason;
use rangecache_mirror::WatchedLoads;
use rangecache_mirror::lineage::History;

/// etcd's call for one stream.
#[derive(Debug)]
pub(super) struct EtcdSource {
    stream: EtcdStream,
    returning: Returning,
}

/// Why etcd no longer serves the stream.
pub(super) enum EtcdEnd {
    /// The watchers have joined memory, with every event above this revision. What etcd has sent behind it was never read.
    Joined(i64, Vec<Joined>),
    /// The history of watchers that memory has handed over was replaced.
    Replaced,
}

impl EtcdSource {
    /// Opens the call that continues the watchers of `relay`, which are of `history`, because memory cannot serve the stream
    /// for `reason`. `watched` is described at [`EtcdStream::open`].
    pub(super) fn open(
        down: &mut Downstream,
        reason: Reason,
        relay: Relay,
        history: Arc<History>,
        watched: WatchedLoads,
    ) -> EtcdSource {
        down.bytes.set_relayed(relay.held_bytes());
        down.serve_from_etcd(reason);
        let (client, parts) = (&down.stream.client, down.stream.parts.clone());
        EtcdSource {
            stream: EtcdStream::open(client, parts, relay, history, watched),
            returning: Returning::new(reason),
        }
    }

    /// Relay of the stream: which of etcd's responses reach the client, and what is known of the watchers.
    pub(super) fn relay(&mut self) -> &mut Relay {
        &mut self.stream.relay
    }

    /// Next frame of the stream.
    ///
    /// # Errors
    /// Why memory has to continue the stream.
    pub(super) fn poll(&mut self, down: &mut Downstream, cx: &mut Context<'_>) -> Result<Polled, EtcdEnd> {
        let sent = |frame| Ok(Poll::Ready(Some(Ok(frame))));
        loop {
            if let Some(response) = down.control.pop_front() {
                return sent(Frame::data(response));
            }
            if !self.stream.is_in_message() {
                if let Some(status) = down.end.take().or_else(|| down.poll_end(cx)) {
                    return sent(Frame::trailers(status.trailers()));
                }
                if !self.stream.is_of_current_history() && self.stream.relay.has_watchers_of_memory() {
                    return Err(EtcdEnd::Replaced);
                }
                if let Some((revision, joined)) = self.poll_return(down, cx) {
                    return Err(EtcdEnd::Joined(revision, joined));
                }
                if self.is_joining() {
                    return Ok(Poll::Pending);
                }
                self.forward_requests(down, cx);
                if !down.control.is_empty() || down.end.is_some() {
                    continue;
                }
            }
            let unanswered = self.stream.relay.unanswered();
            match self.stream.poll_next(cx) {
                // A response may have let the next request pass.
                Poll::Pending if unanswered != self.stream.relay.unanswered() => {}
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(StreamStep::Data(data)) => return sent(Frame::data(data.into())),
                Poll::Ready(StreamStep::Barrier(revision)) => self.join_at(down, revision),
                Poll::Ready(StreamStep::Cancel {
                    id,
                    reason,
                    compact_revision,
                }) => {
                    let header = down.header(down.shown());
                    down.send(&WatchFields {
                        header,
                        watch_id: id,
                        canceled: true,
                        compact_revision,
                        cancel_reason: &reason,
                        ..WatchFields::default()
                    });
                }
                // Otherwise etcd ends the watchers as it sees fit. The stream does not return.
                Poll::Ready(StreamStep::Replaced) if self.stream.relay.has_watchers_of_memory() => {
                    return Err(EtcdEnd::Replaced);
                }
                Poll::Ready(StreamStep::Replaced) => {}
                Poll::Ready(StreamStep::End(trailers)) => return sent(Frame::trailers(trailers)),
                Poll::Ready(StreamStep::Abort(error)) => return Ok(Poll::Ready(Some(Err(error)))),
            }
        }
    }

    /// Sends the client's requests to etcd, as long as etcd takes them.
    fn forward_requests(&mut self, down: &mut Downstream, cx: &mut Context<'_>) {
        let etcd = &mut self.stream;
        loop {
            down.bytes.set_relayed(etcd.relay.held_bytes());
            if !etcd.accepts_request(cx) {
                return down.requests.read_ahead(cx);
            }
            let is_pinned = etcd.relay.is_pinned();
            if etcd.relay.is_unread() {
                if let Some(request) = down.unsent.pop_front() {
                    etcd.send(&request);
                    continue;
                }
                match down.requests.poll_bytes(cx) {
                    Poll::Pending => return,
                    Poll::Ready(None) => return etcd.close_requests(),
                    Poll::Ready(Some(bytes)) => etcd.send_bytes(bytes),
                }
                continue;
            }
            let request = match down.unsent.pop_front() {
                Some(request) => request,
                None => match down.requests.poll_next(cx) {
                    // etcd keeps the watchers of a stream whose client has closed its half, too.
                    Poll::Pending | Poll::Ready(Received::End) => return,
                    Poll::Ready(Received::Late) => {
                        down.end = Some(Status::RequestTimeout);
                        return;
                    }
                    Poll::Ready(Received::Message(Ok(request))) => request,
                    Poll::Ready(Received::Message(Err(_))) if etcd.relay.unanswered() > 0 => return,
                    Poll::Ready(Received::Message(Err(_))) if !etcd.relay.chooses_expected_id() => {
                        // It may be a create, whose id etcd would choose by those that this stream has at etcd.
                        return down.interrupt(Reason::Undecodable);
                    }
                    Poll::Ready(Received::Message(Err(_))) => {
                        etcd.relay.pin_unread();
                        down.metrics()
                            .record_created("etcd", Reason::Undecodable.as_str());
                        continue;
                    }
                },
            };
            match &request {
                // Which watcher it is about shows only then.
                WatchRequest::Cancel(_) if etcd.relay.unanswered() > 0 => {
                    down.unsent.push_front(request);
                    return;
                }
                WatchRequest::Create(create) if is_pinned => {
                    if create.watch_id == 0 && !etcd.relay.chooses_expected_id() {
                        return down.interrupt(Reason::OverBudget);
                    }
                    etcd.send(&request);
                }
                WatchRequest::Create(create) if !down.bytes.has_room_for_watcher(create) => {
                    down.unsent.push_front(request);
                    if etcd.relay.unanswered() > 0 {
                        return;
                    }
                    down.bytes.record_refusal();
                    if !etcd.relay.chooses_expected_id() {
                        // etcd would give the watcher an id that the stream has used before it came from memory.
                        return down.interrupt(Reason::OverBudget);
                    }
                    etcd.relay.pin();
                }
                // Of a watcher that memory has cancelled for a compaction: etcd does not know it.
                WatchRequest::Cancel(id) if down.is_cancelled(*id) => {
                    etcd.relay.release(*id);
                    down.release(*id);
                    return;
                }
                // Nor does it know that the id is taken. It refuses an empty range whatever the id is.
                WatchRequest::Create(create)
                    if create.watch_id != 0
                        && down.is_cancelled(create.watch_id)
                        && !create.is_empty_range() =>
                {
                    return down.refuse(DUPLICATE_ID);
                }
                _ => etcd.send(&request),
            }
        }
    }

    /// Whether the stream has left etcd's at a barrier, and memory has not taken it over yet.
    fn is_joining(&self) -> bool {
        let attempt = self.returning.attempt.as_ref();
        attempt.is_some_and(|attempt| attempt.joining.is_some())
    }

    /// Begins, continues or gives up an attempt to return to memory; returns the revision of its barrier and the watchers that
    /// have joined memory behind it. Called between two messages.
    fn poll_return(&mut self, down: &Downstream, cx: &mut Context<'_>) -> Option<(i64, Vec<Joined>)> {
        loop {
            let Some(attempt) = &mut self.returning.attempt else {
                if self.returning.next.as_mut().poll(cx).is_pending() {
                    return None;
                }
                self.returning.attempt = self.begin_return(down, cx);
                if self.returning.attempt.is_none() {
                    self.returning.postpone();
                }
                continue;
            };
            let failed = match &mut attempt.joining {
                Some((revision, joining)) => match joining.as_mut().poll(cx) {
                    Poll::Ready(Ok(joined)) => return Some((*revision, joined)),
                    Poll::Ready(Err(reason)) => Some(reason),
                    Poll::Pending => None,
                },
                None => None,
            };
            let is_late = attempt.expires.as_mut().poll(cx).is_ready();
            let reason = failed.or(is_late.then_some(Reason::NotFresh))?;
            tracing::debug!(reason = reason.as_str(), "a watch stream stays at etcd");
            self.stream.relay.stay();
            self.returning.postpone();
        }
    }

    /// Requests a barrier, if memory can serve every watcher.
    fn begin_return(&mut self, down: &Downstream, cx: &mut Context<'_>) -> Option<Attempt> {
        let etcd = &mut self.stream;
        // Their bytes are counted already.
        let can_serve = |create: &_| down.stream.place(create).is_some();
        if !etcd.is_of_current_history() || !etcd.relay.may_return(can_serve) || !etcd.accepts_request(cx) {
            return None;
        }
        let turns = Arc::clone(&down.stream.client.proxy.watch_returns);
        let turn = turns.try_acquire_owned().ok()?;
        etcd.request_barrier();
        Some(Attempt::new(turn))
    }

    /// Lets the watchers join memory behind the barrier of `revision`.
    fn join_at(&mut self, down: &Downstream, revision: i64) {
        let (etcd, stream) = (&self.stream, &down.stream);
        // Without an attempt it was given up while the barrier was on its way to the client.
        let Some(attempt) = &mut self.returning.attempt else {
            return;
        };
        let cluster_state = &down.mirrors().cluster_state;
        // Read first: a number belongs to the current history if that is current afterwards.
        let history = cluster_state.history();
        let watchers = etcd.relay.carried(revision).into_iter();
        let watchers = watchers.map(|watcher| Some((stream.place(&watcher.create)?, watcher)));
        let watchers: Option<Vec<_>> = watchers.collect();
        let watchers = watchers.filter(|_| etcd.is_of_current_history());
        let mut places = watchers.iter().flatten().map(|(place, _)| *place);
        let caller = places.find_map(|place| stream.caller(place));
        let (client, signal) = (Arc::clone(&stream.client), Arc::clone(&stream.signal));
        let joining = async move {
            let watchers = watchers.ok_or(Reason::Loading)?;
            join(&client, &signal, history, caller.as_ref(), watchers).await
        };
        attempt.joining = Some((revision, Box::pin(joining)));
    }
}
