//! The end of calls that never end by themselves, when the process stops: their clients resume elsewhere at once, instead of
//! holding the stop up. Between two messages such a call ends with `Unavailable`, on which etcd's clients make their watches
//! and keepalives again from where they were. Calls that come to an end are left to reach it.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::grpc::Method;

/// Becomes ready when the process stops; polled with the body of an endless call.
#[derive(Debug)]
pub(super) struct Stop {
    waiting: Pin<Box<WaitForCancellationFutureOwned>>,
    has_come: bool,
}

impl Stop {
    pub(super) fn of(method: Method, drain: &CancellationToken) -> Option<Stop> {
        method.is_endless().then(|| Stop {
            waiting: Box::pin(drain.clone().cancelled_owned()),
            has_come: false,
        })
    }

    /// Whether it has come; if not, `cx` is woken when it does.
    pub(super) fn has_come(&mut self, cx: &mut Context<'_>) -> bool {
        self.has_come = self.has_come || matches!(self.waiting.as_mut().poll(cx), Poll::Ready(()));
        self.has_come
    }
}
