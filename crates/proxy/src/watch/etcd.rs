//! A Watch stream while etcd serves it, and its attempts to return to memory.
//!
//! A progress request makes etcd send a barrier: everything at or below its revision R was relayed before it. The
//! watchers join their hubs at R + 1, all or none, while nothing more is read from etcd. If they cannot, etcd's stream is
//! read on, and nothing was lost.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use etcd_store::cache::WatchFields;
use rangecache_base::telemetry::Reason;
use rangecache_edge::limits::Slot;

use super::etcd_stream::{EtcdStream, StreamStep};
use super::returning::{Joined, join};
use super::{downstream::Downstream, memory::Session, plan::DUPLICATE_ID, request::WatchRequest};

impl Session {
    /// Lets etcd serve the stream's requests and watchers, until there is something to send, or memory has to continue the stream.
    pub(super) fn poll_etcd(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Session {
            down,
            etcd: Some(etcd),
            ..
        } = self
        else {
            return Poll::Ready(());
        };
        if !etcd.is_in_message() {
            if !etcd.is_of_current_history() && etcd.relay.has_watchers_of_memory() {
                self.cancel_handed_over();
                return Poll::Ready(());
            }
            if let Some((revision, joined)) = ready!(etcd.poll_return(down, cx)) {
                self.return_to_memory(revision, joined);
                return Poll::Ready(());
            }
            etcd.forward_requests(down, cx);
            if down.has_output() {
                return Poll::Ready(());
            }
        }
        let unanswered = etcd.relay.unanswered();
        let step = match etcd.poll_next(cx) {
            // A response may have let the next request pass.
            Poll::Pending if unanswered != etcd.relay.unanswered() => return Poll::Ready(()),
            step => ready!(step),
        };
        match step {
            StreamStep::Data(data) => down.control.push_back(data.into()),
            StreamStep::Barrier(revision) => etcd.join_at(down, revision),
            StreamStep::Cancel {
                id,
                reason,
                compact_revision,
            } => {
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
            // Watchers that memory has handed over are cancelled next. Otherwise etcd ends the watchers as it sees fit.
            StreamStep::Replaced => {}
            StreamStep::End(end) => down.end = Some(end),
        }
        Poll::Ready(())
    }
}

impl EtcdStream {
    /// Sends the client's requests to etcd, as long as etcd takes them, until there is something to send to the client.
    fn forward_requests(&mut self, down: &mut Downstream, cx: &mut Context<'_>) {
        loop {
            down.bytes.set_relayed(self.relay.held_bytes());
            if !self.accepts_request(cx) {
                return down.requests.read_ahead(cx);
            }
            let is_forwarded = match self.relay.is_unread() && down.unsent.is_empty() {
                true => self.forward_bytes(down, cx),
                false => match down.next_request(cx) {
                    None => false,
                    Some(Ok(request)) => self.forward_request(down, request),
                    Some(Err(_)) => self.begin_unread(down),
                },
            };
            if !is_forwarded || down.has_output() {
                return;
            }
        }
    }

    /// Sends bytes of the client's to etcd; returns whether there were any.
    fn forward_bytes(&mut self, down: &mut Downstream, cx: &mut Context<'_>) -> bool {
        match down.requests.poll_bytes(cx) {
            Poll::Ready(Some(bytes)) => {
                self.send_bytes(bytes);
                return true;
            }
            Poll::Ready(None) => self.close_requests(),
            Poll::Pending => {}
        }
        false
    }

    /// Leaves the requests to etcd from one on that cannot be read; returns whether they may be sent.
    fn begin_unread(&mut self, down: &mut Downstream) -> bool {
        if self.relay.unanswered() > 0 {
            return false;
        }
        if self.relay.chooses_expected_id() {
            self.relay.pin_unread();
            let undecodable = Reason::Undecodable.as_str();
            down.metrics().record_created("etcd", undecodable);
        } else {
            // It may be a create, whose id etcd would choose by those that this stream has at etcd.
            down.interrupt(Reason::Undecodable);
        }
        true
    }

    /// Sends `request` to etcd, or answers it; returns whether the next one may be looked at.
    fn forward_request(&mut self, down: &mut Downstream, request: WatchRequest) -> bool {
        let is_pinned = self.relay.is_pinned();
        match &request {
            // Which watcher it is about shows only then.
            WatchRequest::Cancel(_) if self.relay.unanswered() > 0 => {
                down.unsent.push_front(request);
                return false;
            }
            WatchRequest::Create(create) if is_pinned => {
                match create.watch_id == 0 && !self.relay.chooses_expected_id() {
                    true => down.interrupt(Reason::OverBudget),
                    false => self.send(&request),
                }
            }
            WatchRequest::Create(create) if !down.bytes.has_room_for_watcher(create) => {
                down.unsent.push_front(request);
                if self.relay.unanswered() > 0 {
                    return false;
                }
                down.bytes.record_refusal();
                match self.relay.chooses_expected_id() {
                    true => self.relay.pin(),
                    // etcd would give the watcher an id that the stream has used before it came from memory.
                    false => down.interrupt(Reason::OverBudget),
                }
            }
            // Of a watcher that memory has cancelled for a compaction: etcd does not know it.
            WatchRequest::Cancel(id) if down.is_cancelled(*id) => {
                self.relay.release(*id);
                down.release(*id);
            }
            // Nor does it know that the id is taken. It refuses an empty range whatever the id is.
            WatchRequest::Create(create)
                if create.watch_id != 0 && down.is_cancelled(create.watch_id) && !create.is_empty_range() =>
            {
                down.refuse(DUPLICATE_ID);
            }
            _ => self.send(&request),
        }
        true
    }

    /// Begins, continues or gives up an attempt to return to memory; returns the revision of its barrier and the watchers that
    /// have joined memory behind it. Pending while they join: nothing more of etcd's is read. Called between two messages.
    fn poll_return(&mut self, down: &Downstream, cx: &mut Context<'_>) -> Poll<Option<(i64, Vec<Joined>)>> {
        let returning = &mut self.returning;
        let failed = match returning.poll_joining(cx) {
            Some(Ok(joined)) => return Poll::Ready(Some(joined)),
            Some(Err(reason)) => Some(reason),
            None => returning.is_due(cx).then_some(Reason::NotFresh),
        };
        match failed {
            None => {}
            Some(reason) if returning.is_attempting() => {
                tracing::debug!(reason = reason.as_str(), "a watch stream stays at etcd");
                self.relay.stay();
                self.returning.postpone(cx);
            }
            Some(_) => match self.begin_return(down, cx) {
                Some(turn) => self.returning.begin(turn, cx),
                None => self.returning.postpone(cx),
            },
        }
        match self.returning.is_joining() {
            true => Poll::Pending,
            false => Poll::Ready(None),
        }
    }

    /// Requests a barrier, if memory can serve every watcher; returns the slot of the attempt.
    fn begin_return(&mut self, down: &Downstream, cx: &mut Context<'_>) -> Option<Slot> {
        // Their bytes are counted already.
        let can_serve = |create: &_| down.stream.place(create).is_some();
        if !self.is_of_current_history() || !self.relay.may_return(can_serve) || !self.accepts_request(cx) {
            return None;
        }
        let client = &down.stream.client;
        let slot = client.proxy.watch_returns.try_acquire(&client.account)?;
        self.request_barrier();
        Some(slot)
    }

    /// Lets the watchers join memory behind the barrier of `revision`.
    fn join_at(&mut self, down: &Downstream, revision: i64) {
        // Otherwise it was given up while the barrier was on its way to the client.
        if !self.returning.is_attempting() {
            return;
        }
        let (stream, cluster_state) = (&down.stream, &down.mirrors().cluster_state);
        // Read first: a number belongs to the current history if that is current afterwards.
        let history = cluster_state.history();
        let watchers = self.relay.carried(revision).into_iter();
        let watchers = watchers.map(|watcher| Some((stream.place(&watcher.create)?, watcher)));
        let watchers: Option<Vec<_>> = watchers.collect();
        let watchers = watchers.filter(|_| self.is_of_current_history());
        let mut places = watchers.iter().flatten().map(|(place, _)| *place);
        let caller = places.find_map(|place| stream.caller(place));
        let (client, signal) = (Arc::clone(&stream.client), Arc::clone(&stream.signal));
        self.returning.join(async move {
            let watchers = watchers.ok_or(Reason::Loading)?;
            let joined = join(&client, &signal, history, caller.as_ref(), watchers).await?;
            Ok((revision, joined))
        });
    }
}
