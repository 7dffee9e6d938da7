//! The HTTP/2 client library sends the head of a request as soon as it is there, and its body only once the head has been
//! taken from its queue: two writes for each request, and two reads for the peer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::rt::Executor;
use hyper_util::rt::TokioExecutor;
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio::io::AsyncWrite;

use super::buffer::WriteBuffer;

/// Executor for the tasks of an HTTP/2 client whose connection has a write buffer: the task that writes to the
/// connection lets others run before what it has collected is written.
#[derive(Debug)]
pub struct RequestBatching<S> {
    /// The buffer, until the connection's task is started.
    buffer: Arc<Mutex<Option<WriteBuffer<S>>>>,
}

impl<S> RequestBatching<S> {
    /// For the connection that writes to this buffer.
    #[must_use]
    pub fn new(buffer: WriteBuffer<S>) -> RequestBatching<S> {
        RequestBatching {
            buffer: Arc::new(Mutex::new(Some(buffer))),
        }
    }
}

impl<S> Clone for RequestBatching<S> {
    fn clone(&self) -> RequestBatching<S> {
        RequestBatching {
            buffer: Arc::clone(&self.buffer),
        }
    }
}

impl<F, S> Executor<F> for RequestBatching<S>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
    S: AsyncWrite + Unpin + Send + 'static,
{
    fn execute(&self, future: F) {
        // hyper's handshake starts the connection's task; all other tasks belong to requests, and are started later.
        match self.buffer.lock().take() {
            Some(buffer) => TokioExecutor::new().execute(BatchRequests {
                connection: future,
                buffer,
                waited: false,
            }),
            None => TokioExecutor::new().execute(future),
        }
    }
}

pin_project! {
    /// Writes what a poll of the connection has collected one scheduler turn later.
    struct BatchRequests<F, S> {
        #[pin]
        connection: F,
        buffer: WriteBuffer<S>,
        // A turn has passed since there was something to write.
        waited: bool,
    }
}

impl<F: Future, S: AsyncWrite + Unpin> Future for BatchRequests<F, S> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        this.buffer.collect();
        let polled = this.connection.poll(cx);
        if polled.is_pending() && !*this.waited && this.buffer.has_collected() {
            *this.waited = true;
            // Moves this task to the end of the run queue.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        *this.waited = false;
        this.buffer.poll_flush(cx);
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use bytes::Bytes;
    use http::Request;
    use http_body_util::Full;
    use hyper::client::conn::http2;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncRead, DuplexStream, ReadBuf};

    use super::*;
    use crate::write_batching::write_buffer;

    /// A socket that keeps what each write has sent.
    struct Recording {
        socket: DuplexStream,
        writes: Arc<Mutex<Vec<Vec<u8>>>>,
    }

    impl AsyncRead for Recording {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.socket).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Recording {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            self.writes.lock().push(buf.to_vec());
            Pin::new(&mut self.socket).poll_write(cx, buf)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.socket).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.socket).poll_shutdown(cx)
        }
    }

    fn contains(write: &[u8], text: &[u8]) -> bool {
        write.windows(text.len()).any(|part| part == text)
    }

    #[tokio::test]
    async fn heads_and_bodies_of_requests_leave_in_one_write() {
        let (socket, _peer) = tokio::io::duplex(1 << 16);
        let writes = Arc::new(Mutex::new(Vec::new()));
        let recording = Recording {
            socket,
            writes: Arc::clone(&writes),
        };
        let (stream, buffer) = write_buffer(recording, None);
        let client = http2::Builder::new(RequestBatching::new(buffer)).handshake(TokioIo::new(stream));
        let (mut sender, driver) = client.await.expect("a handshake without the peer");
        tokio::spawn(driver);
        // The connection announces its windows.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        writes.lock().clear();
        let mut calls = Vec::new();
        for message in ["first message", "second message"] {
            let request = Request::post("http://etcd/").body(Full::new(Bytes::from(message)));
            calls.push(tokio::spawn(sender.send_request(request.expect("a request"))));
        }
        while !writes
            .lock()
            .iter()
            .any(|write| contains(write, b"second message"))
        {
            tokio::task::yield_now().await;
        }
        let writes = writes.lock();
        assert!(contains(&writes[0], b"first message"), "{writes:?}");
        assert_eq!(writes.len(), 1, "{writes:?}");
    }
}
