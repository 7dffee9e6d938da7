//! A stream while etcd serves it.

use std::task::{Context, Poll};

use http_body::Frame;

use super::Session;
use crate::cache::{Rope, WatchFields};
use crate::grpc::Status;
use crate::proxy::watch::etcd_stream::Next;
use crate::proxy::watch::plan::Refusal;
use crate::proxy::watch::receive::Received;
use crate::proxy::watch::request::WatchRequest;
use crate::telemetry::Reason;

impl Session {
    /// Next frame of a stream that etcd serves; `None` while there is nothing to send, and once memory serves it again.
    pub(super) fn poll_etcd(&mut self, cx: &mut Context<'_>) -> Option<Frame<Rope>> {
        loop {
            if let Some(response) = self.control.pop_front() {
                return Some(Frame::data(response));
            }
            if !self.etcd.as_ref()?.is_in_message() {
                if let Some(status) = self.end.take().or_else(|| self.poll_end(cx)) {
                    self.has_ended = true;
                    return Some(Frame::trailers(status.trailers()));
                }
                if !self.etcd.as_ref()?.is_of_current_history() {
                    self.cancel_handed_over();
                }
                self.poll_return(cx);
                if self.is_joining() {
                    return None;
                }
                self.forward_requests(cx);
                if !self.control.is_empty() || self.end.is_some() {
                    continue;
                }
            }
            let etcd = self.etcd.as_mut()?;
            let unanswered = etcd.relay.unanswered();
            match etcd.poll_next(cx) {
                // A response may have let the next request pass.
                Poll::Pending if unanswered != etcd.relay.unanswered() => {}
                Poll::Pending => return None,
                Poll::Ready(next) => {
                    if let Some(frame) = self.relay(next) {
                        return Some(frame);
                    }
                    if self.has_ended {
                        return None;
                    }
                }
            }
        }
    }

    /// Turns what etcd's stream has brought into a frame for the client, if it is one.
    fn relay(&mut self, next: Next) -> Option<Frame<Rope>> {
        match next {
            Next::Data(data) => return Some(Frame::data(data.into())),
            Next::Barrier(revision) => self.join_at(revision),
            Next::Cancel {
                id,
                reason,
                compact_revision,
            } => {
                let header = self.header(self.shown());
                self.send(&WatchFields {
                    header,
                    watch_id: id,
                    canceled: true,
                    compact_revision,
                    cancel_reason: &reason,
                    ..WatchFields::default()
                });
            }
            Next::Replaced => self.cancel_handed_over(),
            Next::End(trailers) => {
                self.has_ended = true;
                return Some(Frame::trailers(trailers));
            }
            Next::Abort(error) => {
                self.has_ended = true;
                self.abort = Some(error);
            }
        }
        None
    }

    /// Sends the client's requests to etcd, as long as etcd takes them.
    fn forward_requests(&mut self, cx: &mut Context<'_>) {
        while let Some(etcd) = &mut self.etcd {
            self.bytes.set_relayed(etcd.relay.held_bytes());
            if !etcd.accepts_request(cx) {
                return self.requests.read_ahead(cx);
            }
            let is_pinned = etcd.relay.is_pinned();
            if etcd.relay.is_unread() {
                if let Some(request) = self.unsent.pop_front() {
                    etcd.send(&request);
                    continue;
                }
                match self.requests.poll_bytes(cx) {
                    Poll::Pending => return,
                    Poll::Ready(None) => return etcd.close_requests(),
                    Poll::Ready(Some(bytes)) => etcd.send_bytes(bytes),
                }
                continue;
            }
            let request = match self.unsent.pop_front() {
                Some(request) => request,
                None => match self.requests.poll_next(cx) {
                    // etcd keeps the watchers of a stream whose client has closed its half, too.
                    Poll::Pending | Poll::Ready(Received::End) => return,
                    Poll::Ready(Received::Late) => {
                        self.end = Some(Status::RequestTimeout);
                        return;
                    }
                    Poll::Ready(Received::Message(Ok(request))) => request,
                    Poll::Ready(Received::Message(Err(_))) if etcd.relay.unanswered() > 0 => return,
                    Poll::Ready(Received::Message(Err(_))) if !etcd.relay.chooses_expected_id() => {
                        // It may be a create, whose id etcd would choose by those that this stream has at etcd.
                        return self.interrupt(Reason::Undecodable);
                    }
                    Poll::Ready(Received::Message(Err(_))) => {
                        etcd.relay.pin_unread();
                        self.metrics()
                            .record_created("etcd", Reason::Undecodable.as_str());
                        continue;
                    }
                },
            };
            match &request {
                // Which watcher it is about shows only then.
                WatchRequest::Cancel(_) if etcd.relay.unanswered() > 0 => {
                    self.unsent.push_front(request);
                    return;
                }
                WatchRequest::Create(create) if is_pinned => {
                    if create.watch_id == 0 && !etcd.relay.chooses_expected_id() {
                        return self.interrupt(Reason::OverBudget);
                    }
                    etcd.send(&request);
                }
                WatchRequest::Create(create) if !self.bytes.has_room_for_watcher(create) => {
                    self.unsent.push_front(request);
                    if etcd.relay.unanswered() > 0 {
                        return;
                    }
                    self.bytes.record_refusal();
                    if !etcd.relay.chooses_expected_id() {
                        // etcd would give the watcher an id that the stream has used before it came from memory.
                        return self.interrupt(Reason::OverBudget);
                    }
                    etcd.relay.pin();
                }
                // Of a watcher that memory has cancelled for a compaction: etcd does not know it.
                WatchRequest::Cancel(id) if self.watchers.contains_key(id) => {
                    etcd.relay.release(*id);
                    let id = *id;
                    return self.cancel(id);
                }
                WatchRequest::Create(create)
                    if create.watch_id != 0 && self.watchers.contains_key(&create.watch_id) =>
                {
                    return self.refuse(Refusal::DuplicateId);
                }
                _ => etcd.send(&request),
            }
        }
    }
}
