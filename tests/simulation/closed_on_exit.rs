//! A client's connection that is reset when the process of its server exits.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A connection; see the module.
pub struct ClosedOnExit<S> {
    stream: S,
    exited: CancellationToken,
    /// Wakes the reader, which every connection has.
    exiting: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<S> ClosedOnExit<S> {
    /// A connection over `stream` until `exited`.
    pub fn new(stream: S, exited: CancellationToken) -> Self {
        Self {
            stream,
            exiting: Box::pin(exited.clone().cancelled_owned()),
            exited,
        }
    }

    fn check(&self) -> io::Result<()> {
        if self.exited.is_cancelled() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClosedOnExit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check()?;
        if self.exiting.as_mut().poll(cx).is_ready() {
            return Poll::Ready(self.check());
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClosedOnExit<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
