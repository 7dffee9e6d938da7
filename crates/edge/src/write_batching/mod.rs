//! Write batching: frames that become ready together leave in one write. Each write is a system call and a wake-up of the
//! peer.
//!
//! **Responses.** Each call's task wakes its connection's task when its response is ready, and the scheduler runs the task woken last
//! first: a quorum check that completes 64 reads would cause 64 writes to the socket. The connection is polled once the calls that
//! were woken together have their responses.
//!
//! **Requests.** The HTTP/2 client library sends the head of a request as soon as it is there, and its body only once the head has
//! been taken from its queue: two writes for each request, and two reads for the peer. The connection writes once the bodies of the
//! requests that it has begun are there, too. etcd's gRPC library sends a ping with the response to most requests, by which it
//! measures how much may be in flight. The acknowledgement leaves with the next request.
//!
//! `buffer` collects what one poll of a connection writes. A leaf; `server` and `upstream` use it.

mod buffer;

use std::task::{Context, Poll};
use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use hyper::rt::Executor;
use hyper_util::rt::TokioExecutor;
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio::io::AsyncWrite;
use tokio::time::{Sleep, sleep};

pub use buffer::{Collecting, Room, WriteBuffer, write_buffer};

/// Polls `connection` one scheduler turn after it is woken, when the tasks that were ready before it have run, and then
/// writes what it has put into `buffer`.
pub fn batch_responses<'a, F: Future, S: AsyncWrite + Unpin>(
    connection: Pin<&'a mut F>,
    buffer: &'a WriteBuffer<S>,
) -> BatchResponses<'a, F, S> {
    BatchResponses {
        connection,
        buffer,
        waited: false,
    }
}

/// The future of [`batch_responses`].
pub struct BatchResponses<'a, F, S> {
    connection: Pin<&'a mut F>,
    buffer: &'a WriteBuffer<S>,
    /// Whether one scheduler turn was skipped since the last poll of `connection`.
    waited: bool,
}

impl<F: Future, S: AsyncWrite + Unpin> Future for BatchResponses<'_, F, S> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.waited = !self.waited;
        if self.waited {
            // Moves this task to the end of the run queue.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.buffer.collect();
        let polled = self.connection.as_mut().poll(context);
        self.buffer.poll_flush(context);
        polled
    }
}

/// Longest time for which the acknowledgement of a ping waits for a request. The peer waits for seconds before it takes a
/// connection for dead.
pub const PING_ACK_DELAY: Duration = Duration::from_millis(20);

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
                timer: None,
            }),
            None => TokioExecutor::new().execute(future),
        }
    }
}

pin_project! {
    /// Writes what a poll of the connection has collected one scheduler turn later, and acknowledgements of pings with it.
    struct BatchRequests<F, S> {
        #[pin]
        connection: F,
        buffer: WriteBuffer<S>,
        // A turn has passed since there was something to write.
        waited: bool,
        // When acknowledgements of pings leave on their own. It runs until it ends, whether they have left or not: setting a
        // timer can cost a system call.
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future, S: AsyncWrite + Unpin> Future for BatchRequests<F, S> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        this.buffer.collect();
        let polled = this.connection.poll(cx);
        let timer = this.timer;
        let is_late = timer
            .as_mut()
            .is_some_and(|timer| timer.as_mut().poll(cx).is_ready());
        if is_late {
            *timer = None;
        }
        if polled.is_pending() && !is_late {
            if this.buffer.has_only_ping_acks() {
                if timer.is_none() {
                    let timer = timer.insert(Box::pin(sleep(PING_ACK_DELAY)));
                    // Registers the task.
                    let _ = timer.as_mut().poll(cx);
                }
                *this.waited = false;
                return Poll::Pending;
            }
            if !*this.waited && this.buffer.has_collected() {
                *this.waited = true;
                // Moves this task to the end of the run queue.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
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
    use tokio::io::{AsyncRead, AsyncWriteExt as _, DuplexStream, ReadBuf};

    use super::{write_buffer, *};

    const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    const SETTINGS_ACK: &[u8] = &[0, 0, 0, 4, 1, 0, 0, 0, 0];
    const PING: &[u8] = b"\0\0\x08\x06\0\0\0\0\0a ping!!";
    const PING_ACK: &[u8] = b"\0\0\x08\x06\x01\0\0\0\0a ping!!";

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

    fn contains(write: &[u8], bytes: &[u8]) -> bool {
        write.windows(bytes.len()).any(|part| part == bytes)
    }

    /// A connection, its peer, and what is written to the peer from now on.
    async fn connection() -> (
        http2::SendRequest<Full<Bytes>>,
        DuplexStream,
        Arc<Mutex<Vec<Vec<u8>>>>,
    ) {
        let (socket, mut peer) = tokio::io::duplex(1 << 16);
        let writes = Arc::new(Mutex::new(Vec::new()));
        let recording = Recording {
            socket,
            writes: Arc::clone(&writes),
        };
        let (stream, buffer) = write_buffer(recording, None);
        let client = http2::Builder::new(RequestBatching::new(buffer)).handshake(TokioIo::new(stream));
        let (sender, driver) = client.await.expect("a handshake without the peer");
        tokio::spawn(driver);
        peer.write_all(SETTINGS).await.expect("an open connection");
        // The connection announces its windows, and acknowledges the peer's settings.
        wait_for(&writes, SETTINGS_ACK).await;
        writes.lock().clear();
        (sender, peer, writes)
    }

    async fn wait_for(writes: &Mutex<Vec<Vec<u8>>>, bytes: &[u8]) {
        while !writes.lock().iter().any(|write| contains(write, bytes)) {
            tokio::task::yield_now().await;
        }
    }

    fn request(message: &'static str) -> Request<Full<Bytes>> {
        let request = Request::post("http://etcd/").body(Full::new(Bytes::from(message)));
        request.expect("a request")
    }

    #[tokio::test]
    async fn heads_and_bodies_of_requests_leave_in_one_write() {
        let (mut sender, _peer, writes) = connection().await;
        let mut calls = Vec::new();
        for message in ["first message", "second message"] {
            calls.push(tokio::spawn(sender.send_request(request(message))));
        }
        wait_for(&writes, b"second message").await;
        let writes = writes.lock();
        assert!(contains(&writes[0], b"first message"), "{writes:?}");
        assert_eq!(writes.len(), 1, "{writes:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn acknowledgements_of_pings_leave_with_the_next_request() {
        let (mut sender, mut peer, writes) = connection().await;
        peer.write_all(PING).await.expect("an open connection");
        // Every task that can run has run when the clock, which is paused, is moved.
        sleep(PING_ACK_DELAY / 2).await;
        assert!(writes.lock().is_empty(), "{writes:?}");
        let _call = tokio::spawn(sender.send_request(request("message")));
        wait_for(&writes, b"message").await;
        let writes = writes.lock();
        assert!(contains(&writes[0], PING_ACK), "{writes:?}");
        assert_eq!(writes.len(), 1, "{writes:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn acknowledgements_of_pings_leave_without_a_request_in_time() {
        let (_sender, mut peer, writes) = connection().await;
        for _ in 0..2 {
            peer.write_all(PING).await.expect("an open connection");
            sleep(PING_ACK_DELAY * 2).await;
            assert_eq!(*writes.lock(), [PING_ACK]);
            writes.lock().clear();
        }
    }
}
