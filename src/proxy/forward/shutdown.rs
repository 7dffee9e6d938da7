//! The end of endless calls when the process stops: their clients resume elsewhere at once, instead of delaying the stop.
//!
//! Before the head of the response, [`end_at_stop`] cancels the call; after it, [`StopSignal`] ends the body between two
//! messages. Both end with `Unavailable`, on which etcd's clients re-create their watches and keepalives from where they were.
//! Calls that end by themselves are left to finish.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::HeaderValue;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::grpc::{Method, Status};
use crate::proxy::response::{CallResult, status_response};

/// Sends an endless call by `send`, unless `drain` comes before the head of its response. The token that `send` gets is
/// cancelled when the call ends, in whatever way: the request's body ends with it.
pub(super) async fn end_at_stop<F>(
    drain: &CancellationToken,
    content_type: HeaderValue,
    send: impl FnOnce(CancellationToken) -> F,
) -> CallResult
where
    F: Future<Output = CallResult>,
{
    let ended = CancellationToken::new();
    let guard = ended.clone().drop_guard();
    match drain.run_until_cancelled(send(ended)).await {
        Some(result) => result.map(|response| response.map(|body| body.holding(guard))),
        None => Ok(status_response(&Status::StoppingReconnect, content_type)),
    }
}

/// Reports to the body of an endless call that the process stops.
#[derive(Debug)]
pub(crate) struct StopSignal {
    drain: Pin<Box<WaitForCancellationFutureOwned>>,
    is_stopping: bool,
}

impl StopSignal {
    /// A signal for calls of `method`; `None` for calls that end by themselves.
    pub(super) fn new(method: Method, drain: &CancellationToken) -> Option<StopSignal> {
        method.is_endless().then(|| StopSignal {
            drain: Box::pin(drain.clone().cancelled_owned()),
            is_stopping: false,
        })
    }

    /// Whether the process stops; if not, `cx` is woken when it does.
    pub(super) fn is_stopping(&mut self, cx: &mut Context<'_>) -> bool {
        self.is_stopping = self.is_stopping || matches!(self.drain.as_mut().poll(cx), Poll::Ready(()));
        self.is_stopping
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use http::Response;

    use super::*;
    use crate::proxy::response::ResponseBody;

    fn content_type() -> HeaderValue {
        HeaderValue::from_static("application/grpc")
    }

    #[tokio::test]
    async fn call_without_a_head_ends_with_unavailable_at_the_stop() {
        let drain = CancellationToken::new();
        let mut request = None;
        let call = end_at_stop(&drain, content_type(), |ended| {
            request = Some(ended);
            pending()
        });
        drain.cancel();
        let response = call.await.unwrap();
        assert_eq!(response.headers()["grpc-status"], "14");
        assert!(request.unwrap().is_cancelled(), "the request is closed");
    }

    #[tokio::test]
    async fn request_of_an_answered_call_ends_with_its_body() {
        let drain = CancellationToken::new();
        let mut request = None;
        let response = end_at_stop(&drain, content_type(), |ended| {
            request = Some(ended);
            async { Ok(Response::new(ResponseBody::empty())) }
        });
        let response = response.await.unwrap();
        let request = request.unwrap();
        drain.cancel();
        assert!(!request.is_cancelled());
        drop(response);
        assert!(request.is_cancelled());
    }

    #[test]
    fn only_endless_methods_have_a_signal() {
        let drain = CancellationToken::new();
        assert!(StopSignal::new(Method::Watch, &drain).is_some());
        assert!(StopSignal::new(Method::Snapshot, &drain).is_none());
    }
}
