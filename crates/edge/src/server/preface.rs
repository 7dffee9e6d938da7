//! The first bytes of a connection, read within a deadline: a client that opens a connection and sends nothing must
//! not keep its connection permit for ever. Once HTTP/2 and HTTP/1 can be distinguished, hyper's own deadlines apply,
//! and the control frames of HTTP/2 are counted.

use std::io::{self, IoSlice};
use std::task::{Context, Poll, ready};
use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use super::control_frames::{ControlFrames, Handled, SETTINGS_ACKNOWLEDGEMENT};
use super::{connections::Open, pace::Delay};
use crate::limits::Intake;

/// Time for the client to send them: etcd's clients do so with the last packet of the handshake.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which the client may close a connection that was shut down.
const LINGER_TIMEOUT: Duration = Duration::from_millis(500);
/// The first bytes of every HTTP/2 connection.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Most bytes that are read again: the preface and what follows it in the place of the client's own acknowledgement.
const FIRST_BYTES: usize = PREFACE.len() + SETTINGS_ACKNOWLEDGEMENT.len();

/// A stream whose first bytes were read already; they are read again from here.
#[derive(Debug)]
pub(super) struct Prefaced<S> {
    first: [u8; FIRST_BYTES],
    /// `first[next..end]` is still to be read again.
    next: usize,
    end: usize,
    /// Bytes that were read and are to be handled in later turns of the connection.
    later: BytesMut,
    turn: ReadTurn,
    delay: Delay,
    stream: S,
    /// `None` for HTTP/1.
    frames: Option<ControlFrames>,
    flooded: CancellationToken,
    /// End of the time in which bytes are read and dropped, once the connection was shut down.
    linger: Option<Pin<Box<Sleep>>>,
    /// Place of the connection. The stream has it, because it outlives the HTTP connection after an upgrade.
    place: Option<Open>,
}

/// Turns of a connection.
#[derive(Clone, Copy, Debug)]
enum ReadTurn {
    /// Bytes are read.
    Running,
    /// The connection has had its frames of this turn.
    Over,
    /// Tasks of others run, and the handlers of the turn's requests.
    OfOthers,
}

impl<S> Prefaced<S> {
    /// Is cancelled once the client has sent too many control frames.
    pub(super) fn flooded(&self) -> CancellationToken {
        self.flooded.clone()
    }

    /// Whether the client uses HTTP/2.
    pub(super) fn is_http2(&self) -> bool {
        self.frames.is_some()
    }

    /// Keeps the connection's place until the stream is dropped.
    pub(super) fn keep(&mut self, place: Open) {
        self.place = Some(place);
    }
}

/// Reads until it is clear whether the client uses HTTP/2 or HTTP/1. Later reads wait for `intake`.
///
/// # Errors
/// The stream's; `TimedOut` or `UnexpectedEof` when the client sends too little.
pub(super) async fn read_preface<S: AsyncRead + Unpin>(
    mut stream: S,
    intake: Arc<Intake>,
) -> io::Result<Prefaced<S>> {
    let mut preface = [0; PREFACE.len()];
    let reading = async {
        let mut end = 0;
        while end < preface.len() && preface[..end] == PREFACE[..end] {
            match stream.read(&mut preface[end..]).await? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                read => end += read,
            }
        }
        Ok(end)
    };
    let mut end = tokio::time::timeout(PREFACE_TIMEOUT, reading)
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    let mut first = [0; FIRST_BYTES];
    let (read, rest) = first.split_at_mut(PREFACE.len());
    read.copy_from_slice(&preface);
    let is_http2 = preface == *PREFACE;
    if is_http2 {
        // The library applies its bound on header lists once the client has acknowledged it, which a client may never
        // do.
        rest.copy_from_slice(&SETTINGS_ACKNOWLEDGEMENT);
        end = FIRST_BYTES;
    }
    Ok(Prefaced {
        first,
        next: 0,
        end,
        later: BytesMut::new(),
        turn: ReadTurn::Running,
        delay: Delay::new(intake),
        stream,
        frames: is_http2.then(ControlFrames::new),
        flooded: CancellationToken::new(),
        linger: None,
        place: None,
    })
}

impl<S: AsyncRead + Unpin> Prefaced<S> {
    /// Reads what follows the first bytes, in turn with other connections. Fails once the client floods, which ends the
    /// connection.
    fn poll_read_stream(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        ready!(self.delay.poll_end(cx));
        match self.turn {
            ReadTurn::Running => {}
            ReadTurn::Over => {
                self.turn = ReadTurn::OfOthers;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            ReadTurn::OfOthers => {
                ready!(self.delay.intake().poll_handled(cx));
                self.turn = ReadTurn::Running;
            }
        }
        let before = buf.filled().len();
        let is_later = !self.later.is_empty();
        if is_later {
            let piece = self.later.len().min(buf.remaining());
            buf.put_slice(&self.later[..piece]);
        } else {
            let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
            if let (Poll::Pending, Some(frames)) = (&polled, &mut self.frames) {
                frames.begin_turn();
            }
            ready!(polled)?;
            self.delay.intake().record_received(buf.filled().len() - before);
        }
        let Some(frames) = &mut self.frames else {
            return Poll::Ready(Ok(()));
        };
        let read = &mut buf.filled_mut()[before..];
        let handled = match frames.read(read) {
            Handled::All => read.len(),
            Handled::Turn(handled) => {
                frames.begin_turn();
                self.turn = ReadTurn::Over;
                if !is_later {
                    self.later.extend_from_slice(&read[handled..]);
                }
                handled
            }
            Handled::Flooded => {
                self.flooded.cancel();
                buf.set_filled(before);
                return Poll::Ready(Err(io::Error::other("too many control frames")));
            }
        };
        self.delay.intake().record_resets(frames.take_resets());
        let is_end = read.is_empty();
        if is_later {
            self.later.advance(handled);
            if self.later.is_empty() {
                self.later = BytesMut::new();
            }
        }
        buf.set_filled(before + handled);
        if handled == 0 && !is_end {
            // Reading nothing would be the end of the stream.
            return self.poll_read_stream(cx, buf);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads and drops what the client still sends, up to its end or [`LINGER_TIMEOUT`]: a socket that is closed with
    /// unread bytes drops the bytes that it has yet to send.
    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut discarded = [0; 8 << 10];
        let timeout = self
            .linger
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER_TIMEOUT)));
        while timeout.as_mut().poll(cx).is_pending() {
            let mut buf = ReadBuf::new(&mut discarded);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buf))?;
            if buf.filled().is_empty() {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }

    fn wrote(&mut self, written: &Poll<io::Result<usize>>) {
        if let (Poll::Ready(Ok(bytes)), Some(frames)) = (written, &mut self.frames) {
            frames.wrote(*bytes);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefaced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.next == self.end {
            return self.poll_read_stream(cx, buf);
        }
        let read = buf.remaining().min(self.end - self.next);
        buf.put_slice(&self.first[self.next..self.next + read]);
        self.next += read;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Prefaced<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(&written);
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        if self.frames.is_some() {
            return self.poll_discard(cx);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::AsyncWriteExt;

    use super::*;

    async fn all_of(sent: &'static [u8], pieces: usize) -> Vec<u8> {
        let (mut client, server) = tokio::io::duplex(64);
        let sending = tokio::spawn(async move {
            for piece in sent.chunks(pieces) {
                client.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
        });
        let mut prefaced = read_preface(server, Arc::default()).await.unwrap();
        let mut all = Vec::new();
        prefaced.read_to_end(&mut all).await.unwrap();
        sending.await.unwrap();
        all
    }

    #[tokio::test]
    async fn preface_is_read_again_without_loss() {
        let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n and frames";
        for pieces in [1, 7, 24, 100] {
            let read = all_of(http2, pieces).await;
            let (preface, rest) = read.split_at(PREFACE.len());
            assert_eq!(preface, PREFACE);
            assert_eq!(
                rest,
                [&SETTINGS_ACKNOWLEDGEMENT[..], b" and frames"].concat(),
                "{pieces}"
            );
            assert_eq!(
                all_of(b"GET / HTTP/1.1\r\n\r\n", pieces).await,
                b"GET / HTTP/1.1\r\n\r\n"
            );
            assert_eq!(all_of(b"PRIVATE", pieces).await, b"PRIVATE");
        }
    }

    #[tokio::test]
    async fn requests_beyond_a_turn_are_read_in_later_turns_without_loss() {
        // HEADERS of 20 bytes and DATA of 30.
        let headers = [[0, 0, 20, 1, 4, 0, 0, 0, 1], [0, 0, 30, 0, 1, 0, 0, 0, 1]];
        let request = [&headers[0][..], &[7; 20], &headers[1], &[8; 30]].concat();
        let requests = request.repeat(100);
        let (mut client, server) = tokio::io::duplex(64 << 10);
        client.write_all(PREFACE).await.unwrap();
        client.write_all(&requests).await.unwrap();
        drop(client);
        let mut prefaced = read_preface(server, Arc::default()).await.unwrap();
        let (mut read, mut turns) = (Vec::new(), 0);
        loop {
            let mut bytes = [0; 8 << 10];
            let mut buf = ReadBuf::new(&mut bytes);
            let polled = poll_fn(|cx| Poll::Ready(Pin::new(&mut prefaced).poll_read(cx, &mut buf))).await;
            match polled {
                Poll::Pending => turns += 1,
                Poll::Ready(read) => {
                    read.unwrap();
                    if buf.filled().is_empty() {
                        break;
                    }
                }
            }
            read.extend_from_slice(buf.filled());
        }
        assert_eq!(read[..FIRST_BYTES], prefaced.first);
        assert_eq!(read[FIRST_BYTES..], requests);
        assert_eq!(turns, 6, "15 requests in each but the last");
        assert_eq!(prefaced.later.capacity(), 0, "nothing is kept");
    }

    #[tokio::test(start_paused = true)]
    async fn silent_client_times_out() {
        for sent in [&b""[..], b"P", &PREFACE[..23]] {
            let (mut client, server) = tokio::io::duplex(64);
            client.write_all(sent).await.unwrap();
            let error = read_preface(server, Arc::default()).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        let (client, server) = tokio::io::duplex(64);
        drop(client);
        let error = read_preface(server, Arc::default()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
