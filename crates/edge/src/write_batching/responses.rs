//! Responses that become ready together are sent in one write.
//!
//! Each call's task wakes its connection's task when its response is ready, and the scheduler runs the task woken last first:
//! a quorum check that completes 64 reads would cause 64 writes to the socket, each a system call and a wake-up of the client.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::AsyncWrite;

use super::buffer::WriteBuffer;

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
