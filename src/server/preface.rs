//! The first bytes of a connection, read within a deadline: a client that opens a connection and sends nothing must not keep
//! its connection permit for ever. Once HTTP/2 and HTTP/1 can be distinguished, hyper's own deadlines apply.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// Time for the client to send them: etcd's clients do so with the last packet of the handshake.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// The first bytes of every HTTP/2 connection.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A stream whose first bytes were read already; they are read again from here.
#[derive(Debug)]
pub(super) struct Prefaced<S> {
    first: [u8; PREFACE.len()],
    /// `first[next..end]` is still to be read again.
    next: usize,
    end: usize,
    stream: S,
}

/// Reads until it is clear whether the client uses HTTP/2 or HTTP/1.
///
/// # Errors
/// The stream's; `TimedOut` or `UnexpectedEof` when the client sends too little.
pub(super) async fn read_preface<S: AsyncRead + Unpin>(mut stream: S) -> io::Result<Prefaced<S>> {
    let mut first = [0; PREFACE.len()];
    let reading = async {
        let mut end = 0;
        while end < first.len() && first[..end] == PREFACE[..end] {
            match stream.read(&mut first[end..]).await? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                read => end += read,
            }
        }
        Ok(end)
    };
    let end = tokio::time::timeout(PREFACE_TIMEOUT, reading)
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    Ok(Prefaced {
        first,
        next: 0,
        end,
        stream,
    })
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefaced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.next == self.end {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let read = buf.remaining().min(self.end - self.next);
        buf.put_slice(&self.first[self.next..self.next + read]);
        self.next += read;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefaced<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
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
        let mut prefaced = read_preface(server).await.unwrap();
        let mut all = Vec::new();
        prefaced.read_to_end(&mut all).await.unwrap();
        sending.await.unwrap();
        all
    }

    #[tokio::test]
    async fn preface_is_read_again_without_loss() {
        let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n and frames";
        for pieces in [1, 7, 24, 100] {
            assert_eq!(all_of(http2, pieces).await, http2, "{pieces}");
            assert_eq!(
                all_of(b"GET / HTTP/1.1\r\n\r\n", pieces).await,
                b"GET / HTTP/1.1\r\n\r\n"
            );
            assert_eq!(all_of(b"PRIVATE", pieces).await, b"PRIVATE");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silent_client_times_out() {
        for sent in [&b""[..], b"P", &PREFACE[..23]] {
            let (mut client, server) = tokio::io::duplex(64);
            client.write_all(sent).await.unwrap();
            let error = read_preface(server).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        let (client, server) = tokio::io::duplex(64);
        drop(client);
        let error = read_preface(server).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
