//! Answers that are ready together leave together.
//!
//! Each call's task wakes its connection's task when it has an answer, and the scheduler runs what was woken last first: a
//! check that answers 64 reads would make 64 writes to the socket, each of them a system call and a wake-up of the client.

use std::pin::Pin;
use std::task::{Context, Poll};

/// Polls `connection` one turn later than it is woken, when the tasks that were ready before it have run.
pub(super) fn gather<F: Future>(connection: Pin<&mut F>) -> Gather<'_, F> {
    Gather {
        connection,
        waited: false,
    }
}

/// See [`gather`].
pub(super) struct Gather<'a, F> {
    connection: Pin<&'a mut F>,
    waited: bool,
}

impl<F: Future> Future for Gather<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.waited = !self.waited;
        if self.waited {
            // To the end of the queue.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.connection.as_mut().poll(context)
    }
}
