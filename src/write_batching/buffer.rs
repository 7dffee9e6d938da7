//! Write buffer: what one poll of a connection writes in small pieces leaves in one write, and what it writes in large
//! ones in full segments.
//!
//! The HTTP/2 library writes each frame of 256 bytes or more on its own: 60 events for 60 watchers on one connection, or
//! 64 values of 1 KB, would be as many system calls and wake-ups of the client. The frames of a list have 16 KB each, and
//! are not copied again, but a segment takes four of them, and costs the kernel and the client about as much as one of a
//! single frame.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that are collected at most; as many as the HTTP/2 library's own buffer has.
const MAX_COLLECTED_BYTES: usize = 16 << 10;
/// Size up to which a piece is copied: beyond it, copying takes longer than a system call.
const MAX_COPIED_BYTES: usize = 8 << 10;
/// Pieces of one write: as many as the HTTP/2 library passes on, and the collected bytes.
const MAX_PIECES: usize = 65;
/// Large writes of one poll up to which they leave at once: the first one is often the only one.
const UNCORKED_WRITES: usize = 1;
/// Length of the HTTP/2 frame that acknowledges a ping: its head and eight bytes of the ping.
const PING_ACK_BYTES: usize = 9 + 8;
/// Head of that frame: length, type, flag, stream.
const PING_ACK_HEAD: [u8; 9] = [0, 0, 8, 6, 1, 0, 0, 0, 0];

/// Corking and record length for the large writes of a stream.
#[derive(Debug)]
pub struct LargeWrites<S> {
    /// With `true`, the kernel sends only full segments from now on; with `false`, everything.
    pub set_corked: fn(&S, bool),
    /// Length of the records into which the stream divides what is written; `None` if it does not. A frame of HTTP/2 is
    /// nine bytes longer than the longest record of TLS: each frame would take a second record for them.
    pub record_bytes: Option<usize>,
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
    large_writes: Option<LargeWrites<S>>,
    /// Number of large writes since [`WriteBuffer::collect`].
    large: usize,
    /// The stream was written to since it was flushed. TLS keeps bytes that the socket did not accept.
    unflushed: bool,
    /// Error of a write after the poll to which it belongs.
    failed: Option<io::ErrorKind>,
}

/// The connection's side: a stream that collects small writes during a poll of the connection.
#[derive(Debug)]
pub struct Collecting<S>(Arc<Mutex<Shared<S>>>);

/// The other side: what was collected.
#[derive(Debug)]
pub struct WriteBuffer<S>(Arc<Mutex<Shared<S>>>);

/// A stream with a write buffer, and the buffer. Without `large_writes`, they leave one by one.
pub fn write_buffer<S>(stream: S, large_writes: Option<LargeWrites<S>>) -> (Collecting<S>, WriteBuffer<S>) {
    let shared = Arc::new(Mutex::new(Shared {
        stream,
        collected: Vec::new(),
        written: 0,
        collects: false,
        large_writes,
        large: 0,
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
            shared.clear();
            cx.waker().wake_by_ref();
        }
        shared.uncork();
    }
}

impl<S> Shared<S> {
    fn is_empty(&self) -> bool {
        self.written == self.collected.len()
    }

    /// Idle connections, of which there are many, have no buffer.
    fn clear(&mut self) {
        self.collected = Vec::new();
        self.written = 0;
    }

    /// Counts a large write, and holds back what does not fill a segment from the second one on.
    fn begin_large(&mut self) {
        self.large += 1;
        if self.large == UNCORKED_WRITES + 1
            && let Some(large_writes) = &self.large_writes
        {
            (large_writes.set_corked)(&self.stream, true);
        }
    }

    fn uncork(&mut self) {
        if std::mem::take(&mut self.large) > UNCORKED_WRITES
            && let Some(large_writes) = &self.large_writes
        {
            (large_writes.set_corked)(&self.stream, false);
        }
    }

    /// Of `bytes` that are to be written after what was collected, those that fill records, if they fill one. The caller
    /// writes the others again, to be collected.
    fn whole_records(&self, bytes: usize) -> usize {
        let record_bytes = self.large_writes.as_ref().and_then(|large| large.record_bytes);
        let unwritten = self.collected.len() - self.written;
        let excess = record_bytes.map_or(0, |record_bytes| (unwritten + bytes) % record_bytes);
        if excess < bytes { bytes - excess } else { bytes }
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
            if written > rest {
                self.clear();
                return Poll::Ready(Ok(written - rest));
            }
        }
        self.clear();
        Poll::Ready(Ok(0))
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
        if self.collects && bytes <= MAX_COPIED_BYTES {
            if self.collected.len() + bytes > MAX_COLLECTED_BYTES {
                ready!(self.poll_write_collected(cx, &[]))?;
            }
            if self.collected.capacity() == 0 {
                self.collected.reserve_exact(MAX_COLLECTED_BYTES);
            }
            pieces
                .iter()
                .for_each(|piece| self.collected.extend_from_slice(piece));
            return Poll::Ready(Ok(bytes));
        }
        let mut place;
        let mut pieces = pieces;
        if self.collects && bytes > 0 {
            self.begin_large();
            let whole = self.whole_records(bytes);
            if whole < bytes {
                place = [IoSlice::new(&[]); MAX_PIECES];
                pieces = first_bytes(pieces, whole, &mut place);
            }
        }
        let written = ready!(self.poll_write_collected(cx, pieces))?;
        if written > 0 || bytes == 0 {
            return Poll::Ready(Ok(written));
        }
        self.unflushed = true;
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }
}

/// The first `bytes` of `pieces`, in `place`.
fn first_bytes<'a, 'p>(
    pieces: &'a [IoSlice<'_>],
    bytes: usize,
    place: &'p mut [IoSlice<'a>; MAX_PIECES],
) -> &'p [IoSlice<'a>] {
    let (mut left, mut count) = (bytes, 0);
    for (place, piece) in place.iter_mut().zip(pieces) {
        if left == 0 {
            break;
        }
        *place = IoSlice::new(&piece[..piece.len().min(left)]);
        left -= place.len();
        count += 1;
    }
    &place[..count]
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
    use std::collections::VecDeque;
    use std::task::Waker;

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
        /// Arguments of the `set_corked` calls, in order.
        corked: Mutex<Vec<bool>>,
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

    /// A socket whose large writes are corked, in records of this length.
    fn corking(record_bytes: Option<usize>) -> (Collecting<Socket>, WriteBuffer<Socket>) {
        let set_corked = |socket: &Socket, corked| socket.corked.lock().push(corked);
        let large_writes = LargeWrites {
            set_corked,
            record_bytes,
        };
        write_buffer(Socket::default(), Some(large_writes))
    }

    fn corked(buffer: &WriteBuffer<Socket>) -> Vec<bool> {
        buffer.0.lock().stream.corked.lock().clone()
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

    #[test]
    fn large_writes_of_one_poll_are_corked_from_the_second_on() {
        let (mut stream, buffer) = corking(None);
        for writes in [1, 4] {
            assert_eq!(corked(&buffer), [false; 0], "a large write alone");
            buffer.collect();
            for _ in 0..writes {
                assert!(matches!(write(&mut stream, &[2; 9000]), Poll::Ready(Ok(9000))));
            }
            buffer.poll_flush(&mut context());
        }
        assert_eq!(corked(&buffer), [true, false]);
    }

    #[test]
    fn nothing_is_held_back_while_the_socket_is_full() {
        let (mut stream, buffer) = corking(None);
        buffer.0.lock().stream.takes = [9000, 9000, 0, 0].into();
        buffer.collect();
        assert!(write(&mut stream, &[1; 9000]).is_ready());
        assert!(write(&mut stream, &[2; 9000]).is_ready());
        assert!(write(&mut stream, &[3; 10]).is_ready());
        assert!(write(&mut stream, &[4; 9000]).is_pending());
        buffer.poll_flush(&mut context());
        assert!(!buffer.0.lock().is_empty(), "the socket is full");
        assert_eq!(corked(&buffer), [true, false]);
    }

    #[test]
    fn frames_leave_in_whole_records() {
        const RECORD: usize = 16 << 10;
        let (mut stream, buffer) = corking(Some(RECORD));
        let frame = [5; RECORD + 9];
        buffer.collect();
        for _ in 0..20 {
            let mut rest = &frame[..];
            while !rest.is_empty() {
                let Poll::Ready(Ok(written)) = write(&mut stream, rest) else {
                    panic!("the socket takes everything");
                };
                rest = &rest[written..];
            }
        }
        buffer.poll_flush(&mut context());
        let lengths = buffer
            .0
            .lock()
            .stream
            .writes
            .iter()
            .map(Vec::len)
            .collect::<Vec<_>>();
        let (last, whole) = lengths.split_last().unwrap();
        assert_eq!(whole, [RECORD; 20]);
        assert_eq!(*last, 20 * 9);
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
        assert_eq!(accepted, MAX_COLLECTED_BYTES / 1000);
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
            sizes in prop::collection::vec(prop_oneof![1_usize..600, 1_usize..20_000], 1..60),
            takes in prop::collection::vec(prop_oneof![Just(0), 1_usize..30_000], 0..80),
            polls in prop::collection::vec(any::<bool>(), 60),
            record_bytes in prop_oneof![Just(None), (100_usize..20_000).prop_map(Some)],
        ) {
            let (mut stream, buffer) = corking(record_bytes);
            buffer.0.lock().stream.takes = takes.into();
            let mut sent = Vec::new();
            for (number, (size, ends_poll)) in sizes.into_iter().zip(polls).enumerate() {
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
            prop_assert!(corked(&buffer).chunks(2).all(|pair| pair == [true, false]), "corked");
        }
    }
}
