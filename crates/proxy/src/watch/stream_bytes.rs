//! Memory of one stream, as counted against `--watch-max-bytes`: the stream, its watchers, and the events of a message
//! from the moment it is begun until its last byte is written to the client's connection. A stream without room begins
//! no message.

use std::task::{Context, Poll};
use std::{pin::Pin, sync::Arc, time::Duration};

use rangecache_edge::limits::{ByteKind, ClientAccount, Exceeded, HeldBytes};
use tokio::time::Instant;

use super::request::Create;
use crate::response::FrameBytes;

/// Bytes of a stream without its watchers: its state, its request's head, and a short message.
const STREAM_BYTES: u64 = 4 << 10;
/// Length of messages that the stream's own bytes cover.
const SHORT_MESSAGE_BYTES: u64 = 2 << 10;
/// Longest wait for room, after which etcd continues the stream.
const ROOM_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait of the feed of a leaf's mirror, which awaits the events that prove it for
/// [`FEED_RESPONSE_TIMEOUT`](rangecache_mirror::FEED_RESPONSE_TIMEOUT), and would create its watch again and again.
const FEED_ROOM_TIMEOUT: Duration = Duration::from_secs(2);

type RoomFuture = Pin<Box<dyn Future<Output = Result<HeldBytes, Exceeded>> + Send>>;

/// Bytes of one stream that count until dropped.
pub(super) struct StreamBytes {
    /// The stream and its watchers, in the part of the budget for these.
    admitted: HeldBytes,
    /// The stream and its watchers, in the whole budget.
    own: HeldBytes,
    /// The part of it for watchers that etcd serves.
    relayed: u64,
    /// Events of the begun message that were not produced.
    unproduced: HeldBytes,
    /// Frame that was produced last.
    frame: Option<Box<HeldBytes>>,
    /// Wait for the room of a message that was refused.
    waiting: Option<RoomFuture>,
}

impl StreamBytes {
    /// Counts a new stream.
    ///
    /// # Errors
    /// There is no room for it.
    pub(super) fn begin(account: &Arc<ClientAccount>) -> Result<StreamBytes, Exceeded> {
        let mut bytes = StreamBytes {
            admitted: account.hold(ByteKind::WatchStream),
            own: account.hold(ByteKind::Watch),
            relayed: 0,
            unproduced: account.hold(ByteKind::Watch),
            frame: None,
            waiting: None,
        };
        bytes.admitted.try_grow(STREAM_BYTES)?;
        bytes.own.set(STREAM_BYTES);
        Ok(bytes)
    }

    /// Whether there is room for the watcher of `create`.
    pub(super) fn has_room_for_watcher(&self, create: &Create) -> bool {
        let ledger = self.admitted.account().ledger();
        let kind = ByteKind::WatchStream;
        ledger.used_bytes(kind) + create.watcher_bytes() <= ledger.max_bytes(kind)
    }

    /// Records that there was no room for a watcher.
    pub(super) fn record_refusal(&self) {
        self.admitted.record_refusal();
    }

    /// Counts the watcher of `create`.
    pub(super) fn add_watcher(&mut self, create: &Create) {
        self.set_own(self.own.bytes() + create.watcher_bytes());
    }

    /// Counts the watcher of `create` no longer.
    pub(super) fn remove_watcher(&mut self, create: &Create) {
        self.set_own(self.own.bytes().saturating_sub(create.watcher_bytes()));
    }

    /// Counts `bytes` for the watchers that etcd serves.
    pub(super) fn set_relayed(&mut self, bytes: u64) {
        if bytes != self.relayed {
            let without = self.own.bytes().saturating_sub(self.relayed);
            self.relayed = bytes;
            self.set_own(without + bytes);
        }
    }

    fn set_own(&mut self, bytes: u64) {
        self.admitted.set(bytes);
        self.own.set(bytes);
    }

    /// Whether a message with `bytes` of events may begin. Otherwise the stream waits for room, not as long if it `is_feed` of a leaf.
    pub(super) fn admit(&mut self, bytes: u64, is_feed: bool) -> bool {
        if bytes <= SHORT_MESSAGE_BYTES || bytes <= self.unproduced.bytes() {
            return true;
        }
        let more = bytes - self.unproduced.bytes();
        if self.unproduced.grow_if_free(more) {
            return true;
        }
        let mut held = self.unproduced.split(u64::MAX);
        let max_wait = if is_feed { FEED_ROOM_TIMEOUT } else { ROOM_TIMEOUT };
        let deadline = Instant::now() + max_wait;
        self.waiting = Some(Box::pin(
            async move { held.grow(more, deadline).await.map(|()| held) },
        ));
        false
    }

    /// Whether events may be taken: the stream does not wait for room, or has got it.
    ///
    /// # Errors
    /// There was no room in time, or can never be.
    pub(super) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Exceeded>> {
        let Some(waiting) = &mut self.waiting else {
            return Poll::Ready(Ok(()));
        };
        let Poll::Ready(held) = waiting.as_mut().poll(cx) else {
            return Poll::Pending;
        };
        self.waiting = None;
        Poll::Ready(held.map(|held| self.unproduced = held))
    }

    /// Gives back the room that no message uses.
    pub(super) fn release_room(&mut self) {
        self.unproduced.shrink(u64::MAX);
    }

    /// Records that a frame with `bytes` of the begun message was produced; `is_last` if it was its last one.
    pub(super) fn produced(&mut self, bytes: usize, is_last: bool) {
        if self.unproduced.bytes() == 0 {
            return;
        }
        self.frame = Some(Box::new(self.unproduced.split(bytes as u64)));
        if is_last {
            self.release_room();
        }
    }

    /// Takes what the last frame counts against.
    pub(super) fn frame_bytes(&mut self) -> FrameBytes {
        FrameBytes::Own(self.frame.take())
    }

    /// Bytes that are released only when the client reads.
    pub(super) fn unread(&self) -> u64 {
        self.unproduced.bytes()
    }
}

#[cfg(test)]
mod tests {
    use rangecache_edge::limits::{BufferMetrics, BytesLedger};
    use rangecache_mirror::FEED_RESPONSE_TIMEOUT;

    use super::*;
    use crate::metrics::WatchMetrics;

    /// The account of a connection, with room for eight streams.
    fn account(watches: &WatchMetrics) -> Arc<ClientAccount> {
        let (max_bytes, buffers) = (8 * STREAM_BYTES, BufferMetrics::default());
        BytesLedger::new(max_bytes, max_bytes, &buffers, watches.budgets()).account(0, Arc::default())
    }

    #[test]
    fn stream_and_its_watchers_count_until_dropped_and_leave_room_for_events() {
        let watches = WatchMetrics::default();
        let account = account(&watches);
        let mut streams: Vec<_> = (0..5)
            .map(|_| StreamBytes::begin(&account).expect("room"))
            .collect();
        let create = Create {
            key: vec![b'k'; 256].into(),
            ..Create::default()
        };
        let mut watchers = 0;
        while streams[0].has_room_for_watcher(&create) {
            streams[0].add_watcher(&create);
            watchers += 1;
        }
        assert_eq!(watchers, 4, "up to three quarters");
        assert!(StreamBytes::begin(&account).is_err());
        assert_eq!(watches.budgets()[0].refused.get(), 1);
        (0..watchers).for_each(|_| streams[0].remove_watcher(&create));
        streams[0].set_relayed(4 * create.watcher_bytes());
        assert!(!streams[1].has_room_for_watcher(&create), "etcd serves four");
        streams[0].set_relayed(create.watcher_bytes());
        assert!(streams[1].has_room_for_watcher(&create));
        streams[0].set_relayed(0);
        let kinds = [ByteKind::Watch, ByteKind::WatchStream];
        let used = || kinds.map(|kind| account.ledger().used_bytes(kind));
        assert_eq!(used(), [20 << 10; 2]);
        assert_eq!(watches.budgets()[1].used.get(), 20 << 10);
        drop(streams);
        assert_eq!(used(), [0; 2]);
        assert_eq!(watches.budgets()[1].used.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn long_message_waits_for_room_and_a_short_one_needs_none() {
        let account = account(&WatchMetrics::default());
        let mut streams = [(); 2].map(|()| StreamBytes::begin(&account).expect("room"));
        let [stream, other] = &mut streams;
        let used = || account.ledger().used_bytes(ByteKind::Watch);
        let empty = used();
        assert!(stream.admit(SHORT_MESSAGE_BYTES, false));
        assert_eq!(used(), empty, "the stream's own bytes cover it");
        let long = 5 * STREAM_BYTES;
        assert!(stream.admit(long, false));
        assert!(stream.admit(long, false), "it has the room");
        assert_eq!((used(), stream.unread()), (empty + long, long));
        assert!(!other.admit(long, false));
        assert!(other.admit(SHORT_MESSAGE_BYTES, false));
        stream.release_room();
        let room = std::future::poll_fn(|cx| other.poll_room(cx)).await;
        assert_eq!((room, other.unread()), (Ok(()), long));
        assert!(!stream.admit(long, true));
        let etcd_continues = std::future::poll_fn(|cx| stream.poll_room(cx));
        let waited = tokio::time::timeout(FEED_RESPONSE_TIMEOUT / 2, etcd_continues).await;
        assert_eq!(waited, Ok(Err(Exceeded::Bytes)), "a leaf awaits its events");
    }
}
