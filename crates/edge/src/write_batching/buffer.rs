//! Write buffer: what one poll of a connection writes leaves in few writes.
//!
//! The HTTP/2 library writes each frame of 256 bytes or more on its own: 60 events for 60 watchers on one connection, or
//! 64 values of 1 KB, would be as many system calls and wake-ups of the client. A list consists of frames of 16 KB, because
//! clients accept no longer ones, and a system call for each of them costs both sides more than the copy into this buffer,
//! which stays in the processor's cache.

use std::io::{self, IoSlice};
use std::task::{Context, Poll, ready};
use std::{fmt, pin::Pin, sync::Arc};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that every connection may collect; as many as the HTTP/2 library's own buffer has.
const SMALL_BYTES: usize = 16 << 10;
/// Bytes that a connection with [`Room`] may collect. With the frame of 16 KB that no longer fits and leaves in the same write,
/// they are less than two segments of the loopback interface, 65,483 bytes each: the rest of a longer write would cost the
/// client a wake-up of its own.
const LARGE_BYTES: usize = 111 << 10;
/// Length up to which a write is collected without [`Room`]: beyond it, copying takes longer than a system call.
const MAX_COPIED_BYTES: usize = 8 << 10;
/// Pieces of one write: as many as the HTTP/2 library passes on, and the collected bytes.
const MAX_PIECES: usize = 65;
/// Length of the HTTP/2 frame that acknowledges a ping: its head and eight bytes of the ping.
const PING_ACK_BYTES: usize = 9 + 8;
/// Head of that frame: length, type, flag, stream.
const PING_ACK_HEAD: [u8; 9] = [0, 0, 8, 6, 1, 0, 0, 0, 0];

/// Place of one connection in a budget, for its large buffer. Dropping it gives back what it has taken.
pub trait Room: fmt::Debug + Send {
    /// Takes `bytes` from the budget, without waiting. Returns whether it had them.
    fn take(&mut self, bytes: usize) -> bool;
    /// Gives back what was taken.
    fn give_back(&mut self);
}

/// A stream and what is to be written to it. Only the task of its connection uses it, so that the lock is free; an
/// upgraded connection's task has it alone.
#[derive(Debug)]
struct Shared<S> {
    stream: S,
    /// Pieces that were accepted.
    collected: Vec<u8>,
    /// Bytes of `collected` that were written.
    written: usize,
    /// The connection is being polled, and [`WriteBuffer::poll_flush`] follows.
    collects: bool,
    /// `None` for a connection that never collects more than [`SMALL_BYTES`].
    room: Option<Box<dyn Room>>,
    /// `room` has taken [`LARGE_BYTES`].
    has_room: bool,
    /// The stream was written to since it was flushed. TLS keeps bytes that the socket did not accept.
    unflushed: bool,
    /// Error of a write after the poll to which it belongs.
    failed: Option<io::ErrorKind>,
}

/// The connection's side: a stream that collects writes during a poll of the connection.
#[derive(Debug)]
pub struct Collecting<S>(Arc<Mutex<Shared<S>>>);

/// The other side: what was collected.
#[derive(Debug)]
pub struct WriteBuffer<S>(Arc<Mutex<Shared<S>>>);

/// A stream with a write buffer, and the buffer. Without `room`, only small writes are collected.
pub fn write_buffer<S>(stream: S, room: Option<Box<dyn Room>>) -> (Collecting<S>, WriteBuffer<S>) {
    let shared = Arc::new(Mutex::new(Shared {
        stream,
        collected: Vec::new(),
        written: 0,
        collects: false,
        room,
        has_room: false,
        unflushed: false,
        failed: None,
    }));
    (Collecting(Arc::clone(&shared)), WriteBuffer(shared))
}

impl<S: AsyncWrite + Unpin> WriteBuffer<S> {
    /// Whether something was collected that was not written.
    pub(super) fn has_collected(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// Whether nothing but acknowledgements of pings was collected and not written.
    pub(super) fn has_only_ping_acks(&self) -> bool {
        let shared = self.0.lock();
        let unwritten = &shared.collected[shared.written..];
        let mut frames = unwritten.chunks(PING_ACK_BYTES);
        !unwritten.is_empty()
            && !shared.unflushed
            && frames.all(|frame| frame.len() == PING_ACK_BYTES && frame.starts_with(&PING_ACK_HEAD))
    }

    /// Begins to collect.
    pub(super) fn collect(&self) {
        self.0.lock().collects = true;
    }

    /// Stops to collect, and writes what was collected. If not all of it can be written now, the task is woken when
    /// there is room. An error is that of the connection's next read or write.
    pub(super) fn poll_flush(&self, cx: &mut Context<'_>) {
        let mut shared = self.0.lock();
        shared.collects = false;
        if let Poll::Ready(Err(error)) = shared.poll_flush(cx) {
            shared.failed = Some(error.kind());
            shared.free();
            cx.waker().wake_by_ref();
        }
    }
}

impl<S> Shared<S> {
    fn is_empty(&self) -> bool {
        self.written == self.collected.len()
    }

    /// Frees the buffer. Idle connections, of which there are many, have none.
    fn free(&mut self) {
        self.collected = Vec::new();
        self.written = 0;
        if std::mem::take(&mut self.has_room)
            && let Some(room) = &mut self.room
        {
            room.give_back();
        }
    }

    /// Whether `bytes` more can be collected without writing what was collected before.
    fn can_collect(&mut self, bytes: usize) -> bool {
        let collected = self.collected.len() + bytes;
        if bytes <= MAX_COPIED_BYTES && collected <= SMALL_BYTES {
            return true;
        }
        if collected > LARGE_BYTES {
            return false;
        }
        if !self.has_room
            && let Some(room) = &mut self.room
        {
            self.has_room = room.take(LARGE_BYTES);
        }
        self.has_room
    }

    fn collect(&mut self, pieces: &[IoSlice<'_>]) {
        let capacity = if self.has_room { LARGE_BYTES } else { SMALL_BYTES };
        if self.collected.capacity() < capacity {
            self.collected.reserve_exact(capacity - self.collected.len());
        }
        for piece in pieces {
            self.collected.extend_from_slice(piece);
        }
    }

    fn check(&self) -> io::Result<()> {
        match self.failed {
            Some(kind) => Err(kind.into()),
            None => Ok(()),
        }
    }
}

impl<S: AsyncWrite + Unpin> Shared<S> {
    /// Writes what was collected, then of `pieces` what fits. Returns the bytes of `pieces` that were written: 0 only if
    /// there are none, or if the stream takes one piece at a time.
    fn poll_write_collected(
        &mut self,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut written_pieces = 0;
        while !self.is_empty() {
            let mut all = [IoSlice::new(&[]); MAX_PIECES];
            let mut count = 0;
            let collected = IoSlice::new(&self.collected[self.written..]);
            for (place, piece) in all.iter_mut().zip(std::iter::once(&collected).chain(pieces)) {
                *place = IoSlice::new(piece);
                count += 1;
            }
            let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &all[..count]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unflushed = true;
            let rest = self.collected.len() - self.written;
            self.written += written.min(rest);
            written_pieces = written.saturating_sub(rest);
        }
        if self.collects {
            // The same poll collects more.
            self.collected.clear();
            self.written = 0;
        } else {
            self.free();
        }
        Poll::Ready(Ok(written_pieces))
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_collected(cx, &[]))?;
        if self.unflushed {
            ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write_pieces(&mut self, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.check()?;
        let bytes = pieces.iter().map(|piece| piece.len()).sum::<usize>();
        if self.collects && self.can_collect(bytes) {
            self.collect(pieces);
            return Poll::Ready(Ok(bytes));
        }
        let written = ready!(self.poll_write_collected(cx, pieces))?;
        if written > 0 || bytes == 0 {
            return Poll::Ready(Ok(written));
        }
        self.unflushed = true;
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Collecting<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.0.lock();
        shared.check()?;
        if !shared.collects {
            // The task of an upgraded connection may have nothing to write until its client has read the rest.
            let _ = shared.poll_flush(cx)?;
        }
        Pin::new(&mut shared.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Collecting<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.0.lock().poll_write_pieces(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.lock().poll_write_pieces(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.lock().stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.0.lock();
        shared.check()?;
        if shared.collects {
            return Poll::Ready(Ok(()));
        }
        shared.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.0.lock();
        shared.check()?;
        ready!(shared.poll_write_collected(cx, &[]))?;
        Pin::new(&mut shared.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::{collections::VecDeque, task::Waker};

    use proptest::prelude::*;

    use super::*;

    /// A socket that takes the scripted number of bytes with each write, 0 for none at the moment, then everything.
    #[derive(Debug, Default)]
    struct Socket {
        takes: VecDeque<usize>,
        writes: Vec<Vec<u8>>,
        fails: bool,
        /// Outcomes of the next flushes, `true` for success; then all succeed.
        flushes: VecDeque<bool>,
    }

    impl AsyncWrite for Socket {
        fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            self.poll_write_vectored(cx, &[IoSlice::new(buf)])
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bufs: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            if self.fails {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let mut all = bufs
                .iter()
                .flat_map(|buf| buf.iter().copied())
                .collect::<Vec<_>>();
            match self.takes.pop_front() {
                Some(0) => return Poll::Pending,
                Some(taken) => all.truncate(taken),
                None => {}
            }
            let written = all.len();
            self.writes.push(all);
            Poll::Ready(Ok(written))
        }

        fn is_write_vectored(&self) -> bool {
            true
        }

        fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            match self.flushes.pop_front() {
                Some(false) => Poll::Pending,
                _ => Poll::Ready(Ok(())),
            }
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncRead for Socket {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    /// Bytes that connections may collect together.
    #[derive(Clone, Debug)]
    struct Budget(Arc<AtomicUsize>);

    impl Budget {
        fn new(bytes: usize) -> Budget {
            Budget(Arc::new(AtomicUsize::new(bytes)))
        }

        fn free(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }

        /// A connection with room from this budget.
        fn connection(&self) -> (Collecting<Socket>, WriteBuffer<Socket>) {
            let (budget, taken) = (self.clone(), 0);
            write_buffer(Socket::default(), Some(Box::new(RoomOfOne { budget, taken })))
        }
    }

    #[derive(Debug)]
    struct RoomOfOne {
        budget: Budget,
        taken: usize,
    }

    impl Room for RoomOfOne {
        fn take(&mut self, bytes: usize) -> bool {
            assert_eq!(self.taken, 0, "taken twice");
            let rest = self.budget.free().checked_sub(bytes);
            if let Some(rest) = rest {
                self.budget.0.store(rest, Ordering::Relaxed);
                self.taken = bytes;
            }
            rest.is_some()
        }

        fn give_back(&mut self) {
            self.budget
                .0
                .fetch_add(std::mem::take(&mut self.taken), Ordering::Relaxed);
        }
    }

    impl Drop for RoomOfOne {
        fn drop(&mut self) {
            self.give_back();
        }
    }

    /// Bytes of the buffer's memory.
    fn held(buffer: &WriteBuffer<Socket>) -> usize {
        buffer.0.lock().collected.capacity()
    }

    /// Lengths of the writes that have left.
    fn lengths(buffer: &WriteBuffer<Socket>) -> Vec<usize> {
        buffer.0.lock().stream.writes.iter().map(Vec::len).collect()
    }

    fn context() -> Context<'static> {
        Context::from_waker(Waker::noop())
    }

    fn write(stream: &mut Collecting<Socket>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let (first, rest) = bytes.split_at(bytes.len() / 3);
        Pin::new(stream).poll_write_vectored(&mut context(), &[IoSlice::new(first), IoSlice::new(rest)])
    }

    fn flush(stream: &mut Collecting<Socket>) -> Poll<io::Result<()>> {
        Pin::new(stream).poll_flush(&mut context())
    }

    #[test]
    fn small_writes_of_one_poll_leave_in_one() {
        let (mut stream, buffer) = write_buffer(Socket::default(), None);
        for round in 1..=2 {
            buffer.collect();
            for _ in 0..40 {
                assert!(matches!(write(&mut stream, &[7; 300]), Poll::Ready(Ok(300))));
                assert!(flush(&mut stream).is_ready());
            }
            buffer.poll_flush(&mut context());
            assert_eq!(buffer.0.lock().stream.writes.len(), round);
            assert_eq!(buffer.0.lock().collected.capacity(), 0, "an idle connection");
        }
    }

    #[test]
    fn large_write_leaves_with_what_was_collected() {
        let (mut stream, buffer) = write_buffer(Socket::default(), None);
        buffer.collect();
        assert!(write(&mut stream, &[1; 10]).is_ready());
        assert!(matches!(write(&mut stream, &[2; 9000]), Poll::Ready(Ok(9000))));
        let writes = buffer.0.lock().stream.writes.clone();
        assert_eq!(writes, [[[1; 10].as_slice(), &[2; 9000]].concat()]);
    }

    #[test]
    fn connection_that_is_not_polled_writes_at_once() {
        let (mut stream, buffer) = write_buffer(Socket::default(), None);
        assert!(write(&mut stream, &[1; 10]).is_ready());
        assert_eq!(buffer.0.lock().stream.writes.len(), 1, "an upgraded connection");
    }

    /// A frame of a list.
    static FRAME: [u8; (16 << 10) + 9] = [5; (16 << 10) + 9];

    #[test]
    fn seven_frames_of_a_list_leave_in_one_write() {
        let budget = Budget::new(LARGE_BYTES);
        let (mut stream, buffer) = budget.connection();
        for _ in 0..2 {
            buffer.collect();
            for _ in 0..20 {
                assert!(matches!(write(&mut stream, &FRAME), Poll::Ready(Ok(bytes)) if bytes == FRAME.len()));
                assert!(flush(&mut stream).is_ready());
            }
            assert_eq!((budget.free(), held(&buffer)), (0, LARGE_BYTES));
            buffer.poll_flush(&mut context());
            assert_eq!(
                std::mem::take(&mut buffer.0.lock().stream.writes)
                    .iter()
                    .map(Vec::len)
                    .collect::<Vec<_>>(),
                [7, 7, 6].map(|frames| frames * FRAME.len())
            );
            assert_eq!(
                (budget.free(), held(&buffer)),
                (LARGE_BYTES, 0),
                "an idle connection"
            );
        }
    }

    #[test]
    fn small_response_takes_no_room() {
        let budget = Budget::new(LARGE_BYTES);
        let (mut stream, buffer) = budget.connection();
        buffer.collect();
        assert!(write(&mut stream, &[1; 300]).is_ready());
        assert_eq!((budget.free(), held(&buffer)), (LARGE_BYTES, SMALL_BYTES));
    }

    #[test]
    fn write_that_does_not_fit_the_buffer_takes_no_room() {
        let budget = Budget::new(LARGE_BYTES);
        let (mut stream, buffer) = budget.connection();
        buffer.collect();
        assert!(write(&mut stream, &vec![1; LARGE_BYTES + 1]).is_ready());
        assert_eq!(
            (budget.free(), lengths(&buffer)),
            (LARGE_BYTES, vec![LARGE_BYTES + 1])
        );
    }

    #[test]
    fn full_socket_keeps_the_room_until_everything_is_written() {
        let budget = Budget::new(LARGE_BYTES);
        let (mut stream, buffer) = budget.connection();
        buffer.0.lock().stream.takes = [9_000, 0, 0].into();
        buffer.collect();
        for _ in 0..3 {
            assert!(write(&mut stream, &FRAME).is_ready());
        }
        buffer.poll_flush(&mut context());
        buffer.collect();
        buffer.poll_flush(&mut context());
        assert_eq!((budget.free(), held(&buffer)), (0, LARGE_BYTES));
        buffer.collect();
        buffer.poll_flush(&mut context());
        assert_eq!(lengths(&buffer), [9_000, 3 * FRAME.len() - 9_000]);
        assert_eq!((budget.free(), held(&buffer)), (LARGE_BYTES, 0));
    }

    #[test]
    fn connection_that_ends_gives_its_room_back() {
        let budget = Budget::new(LARGE_BYTES);
        for fails in [false, true] {
            let (mut stream, buffer) = budget.connection();
            buffer.0.lock().stream.takes = [0].into();
            buffer.0.lock().stream.fails = fails;
            buffer.collect();
            assert!(write(&mut stream, &FRAME).is_ready());
            buffer.poll_flush(&mut context());
            assert_eq!(budget.free(), if fails { LARGE_BYTES } else { 0 });
            drop((stream, buffer));
            assert_eq!(budget.free(), LARGE_BYTES);
        }
    }

    #[test]
    fn frames_leave_one_by_one_without_room() {
        let budget = Budget::new(LARGE_BYTES - 1);
        let (mut stream, buffer) = budget.connection();
        buffer.collect();
        assert!(write(&mut stream, &[1; 10]).is_ready());
        assert!(write(&mut stream, &FRAME).is_ready());
        assert!(write(&mut stream, &FRAME).is_ready());
        assert_eq!(lengths(&buffer), [10 + FRAME.len(), FRAME.len()]);
        budget.0.fetch_add(1, Ordering::Relaxed);
        assert!(write(&mut stream, &FRAME).is_ready());
        assert_eq!(lengths(&buffer).len(), 2, "collected");
    }

    #[test]
    fn stream_is_flushed_until_it_has_sent_what_it_keeps() {
        let (mut stream, buffer) = write_buffer(Socket::default(), None);
        for bytes in [10, 9_000] {
            buffer.0.lock().stream.flushes = [false, false, true].into();
            buffer.collect();
            assert!(write(&mut stream, &vec![1; bytes]).is_ready());
            for unflushed in [2, 1, 0] {
                buffer.poll_flush(&mut context());
                assert_eq!(buffer.0.lock().stream.flushes.len(), unflushed);
                buffer.collect();
            }
        }
    }

    #[test]
    fn upgraded_connection_sends_the_rest_when_it_is_read() {
        let (mut stream, buffer) = write_buffer(Socket::default(), None);
        buffer.0.lock().stream.takes = [0].into();
        buffer.collect();
        assert!(write(&mut stream, &[1; 10]).is_ready());
        buffer.poll_flush(&mut context());
        drop(buffer);
        let mut read = ReadBuf::new(&mut []);
        assert!(
            Pin::new(&mut stream)
                .poll_read(&mut context(), &mut read)
                .is_pending()
        );
        assert_eq!(stream.0.lock().stream.writes, [[1; 10]]);
    }

    #[test]
    fn full_socket_bounds_what_is_collected() {
        let (mut stream, buffer) = write_buffer(Socket::default(), None);
        buffer.0.lock().stream.takes = [0; 100].into();
        buffer.collect();
        let accepted = (0..100)
            .filter(|_| write(&mut stream, &[3; 1000]).is_ready())
            .count();
        assert_eq!(accepted, SMALL_BYTES / 1000);
        let (mut stream, buffer) = Budget::new(LARGE_BYTES).connection();
        buffer.0.lock().stream.takes = [0; 100].into();
        buffer.collect();
        let accepted = (0..100).filter(|_| write(&mut stream, &FRAME).is_ready()).count();
        assert_eq!(accepted, LARGE_BYTES / FRAME.len());
    }

    #[test]
    fn error_of_the_last_write_is_that_of_the_next() {
        let (mut stream, buffer) = write_buffer(Socket::default(), None);
        buffer.0.lock().stream.fails = true;
        buffer.collect();
        assert!(matches!(write(&mut stream, &[1; 10]), Poll::Ready(Ok(10))));
        buffer.poll_flush(&mut context());
        assert!(matches!(write(&mut stream, &[1; 10]), Poll::Ready(Err(_))));
    }

    proptest! {
        #[test]
        fn bytes_arrive_in_order_whatever_the_socket_takes(
            sizes in prop::collection::vec(prop_oneof![1_usize..600, 1_usize..20_000, 1_usize..150_000], 1..60),
            takes in prop::collection::vec(prop_oneof![Just(0), 1_usize..30_000, 1_usize..150_000], 0..80),
            polls in prop::collection::vec(any::<bool>(), 60),
            room in prop::collection::vec(any::<bool>(), 60),
        ) {
            let budget = Budget::new(0);
            let (mut stream, buffer) = budget.connection();
            buffer.0.lock().stream.takes = takes.into();
            let mut sent = Vec::new();
            for (number, ((size, ends_poll), has_room)) in sizes.into_iter().zip(polls).zip(room).enumerate() {
                let is_taken = buffer.0.lock().has_room;
                budget.0.store(if has_room && !is_taken { LARGE_BYTES } else { 0 }, Ordering::Relaxed);
                let bytes = vec![u8::try_from(number).unwrap(); size];
                let mut rest = bytes.as_slice();
                while !rest.is_empty() {
                    buffer.collect();
                    match write(&mut stream, rest) {
                        Poll::Ready(Ok(written)) => {
                            prop_assert!(written > 0);
                            rest = &rest[written..];
                        }
                        Poll::Ready(Err(error)) => panic!("{error}"),
                        Poll::Pending => buffer.poll_flush(&mut context()),
                    }
                }
                sent.extend_from_slice(&bytes);
                if ends_poll {
                    buffer.poll_flush(&mut context());
                }
            }
            while Pin::new(&mut stream).poll_shutdown(&mut context()).is_pending() {}
            prop_assert_eq!(buffer.0.lock().stream.writes.concat(), sent);
            buffer.poll_flush(&mut context());
            prop_assert_eq!(held(&buffer), 0);
            prop_assert!(!buffer.0.lock().has_room);
        }
    }
}
