//! A stream that memory cannot serve any longer: etcd continues it, and the client does not notice (W9).

use std::sync::Arc;
use std::task::{Context, Poll};

use http_body::Frame;

use super::Session;
use crate::cache::{Rope, WatchFields};
use crate::grpc::Status;
use crate::mirror::watch_hub::Reader;
use crate::proxy::watch::etcd_stream::{EtcdStream, Next};
use crate::proxy::watch::handover::Carried;
use crate::proxy::watch::plan::Refusal;
use crate::proxy::watch::receive::Received;
use crate::proxy::watch::relay::Relay;
use crate::proxy::watch::request::{Create, WatchRequest};
use crate::telemetry::Reason;

impl Session {
    /// Lets etcd continue the stream from the revision up to which each watcher's events were sent. `create` is a
    /// request that was not answered.
    pub(super) fn leave(&mut self, reason: Reason, create: Option<Create>) {
        tracing::debug!(reason = reason.as_str(), "a watch stream leaves memory");
        let history = self.mirrors().cluster_state.current();
        let number = self.mirrors().cluster_state.history();
        let mut carried = Vec::new();
        for (id, watcher) in &self.watchers {
            if let Some(reader) = &watcher.reader {
                // Revisions of another history mean nothing at etcd.
                if reader.history() != number {
                    return self.interrupt(reason);
                }
                carried.push(Carried {
                    id: *id,
                    create: watcher.create.clone(),
                    through: covered(reader, watcher.since),
                });
            }
        }
        if create.is_some() {
            self.metrics().record_created("etcd", reason.as_str());
        }
        self.metrics().record_handover("etcd", reason.as_str());
        self.open = self.metrics().open_etcd(reason.as_str());
        for watcher in &carried {
            self.remove(watcher.id);
        }
        // The watchers that are left were cancelled for a compaction; etcd would keep their ids, too.
        let taken = self.watchers.keys().copied().collect();
        let shown = self.progress.reported.max(self.last_event);
        let relay = Relay::new(self.ids.clone(), carried, taken, shown);
        let forward = Arc::clone(&self.stream.client.proxy.forward);
        self.progress.requested = None;
        self.progress.owed.clear();
        self.unsent = create.map(WatchRequest::Create);
        self.etcd = Some(EtcdStream::open(
            forward,
            self.stream.parts.clone(),
            relay,
            history,
        ));
    }

    /// Ends the stream; its client connects again and resumes.
    pub(super) fn interrupt(&mut self, reason: Reason) {
        self.metrics().record_created("interrupted", reason.as_str());
        self.end = Some(Status::WatchInterrupted);
    }

    /// Next frame of a stream that etcd serves; `None` while there is nothing to send.
    pub(super) fn poll_etcd(&mut self, cx: &mut Context<'_>) -> Option<Frame<Rope>> {
        loop {
            if let Some(response) = self.control.pop_front() {
                return Some(Frame::data(response));
            }
            let etcd = self.etcd.as_mut()?;
            let in_message = etcd.is_in_message();
            if !in_message && let Some(status) = self.end.take().or_else(|| self.poll_end(cx)) {
                return Some(self.end_with(status));
            }
            if !in_message {
                self.forward_requests(cx);
                if !self.control.is_empty() || self.end.is_some() {
                    continue;
                }
            }
            let etcd = self.etcd.as_mut()?;
            let accepted = etcd.relay.accepts_request();
            match etcd.poll_next(cx) {
                // A response may have let the next request pass.
                Poll::Pending if !accepted && etcd.relay.accepts_request() => {}
                Poll::Pending => return None,
                Poll::Ready(Next::Data(data)) => return Some(Frame::data(data.into())),
                Poll::Ready(Next::Cancel {
                    id,
                    reason,
                    compact_revision,
                }) => {
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
                Poll::Ready(Next::End(trailers)) => {
                    self.has_ended = true;
                    return Some(Frame::trailers(trailers));
                }
            }
        }
    }

    /// Sends the client's requests to etcd, as long as etcd takes them.
    fn forward_requests(&mut self, cx: &mut Context<'_>) {
        while let Some(etcd) = &mut self.etcd
            && etcd.accepts_request(cx)
        {
            let request = match self.unsent.take() {
                Some(request) => request,
                None => match self.requests.poll_next(cx) {
                    Poll::Pending => return,
                    Poll::Ready(Received::End) => return etcd.close_requests(),
                    Poll::Ready(Received::Late) => {
                        self.end = Some(Status::RequestTimeout);
                        return;
                    }
                    Poll::Ready(Received::Message(Ok(request))) => request,
                    Poll::Ready(Received::Message(Err(_))) => return self.interrupt(Reason::Undecodable),
                },
            };
            match &request {
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

    fn end_with(&mut self, status: Status) -> Frame<Rope> {
        self.has_ended = true;
        Frame::trailers(status.trailers())
    }
}

/// Revision up to which a watcher's events were sent, or there was none. Not below the revision after which it begins.
fn covered(reader: &Reader, since: i64) -> i64 {
    reader.covered().max(since.saturating_sub(1))
}
