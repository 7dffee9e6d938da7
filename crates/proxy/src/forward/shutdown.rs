//! Ends endless calls when the process stops, so that their clients resume on another endpoint at once and do not delay
//! the stop.
//!
//! Before the head of the response, [`end_at_stop`] cancels the call; after it, [`StopSignal`] ends the body between
//! two messages. The status is `Unavailable`, on which etcd's clients create their watches and keepalives again and
//! resume where they were. All other calls are left to complete.

use std::{future::Future, pin::Pin, task::Context};

use etcd_wire::grpc::{Method, Status};
use http::HeaderValue;
use rangecache_base::wake_gated::WakeGated;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::response::{CallResult, status_response};

/// Runs `send`, which sends an endless call; returns `Unavailable` if `drain` is cancelled before the head of the
/// response. `send` gets a token that is cancelled when the call ends for any reason, and ends the body of the request
/// with it.
pub(super) async fn end_at_stop<F>(
    drain: &CancellationToken,
    content_type: HeaderValue,
    send: impl FnOnce(CancellationToken) -> F,
) -> CallResult
where
    F: Future<Output = CallResult>,
{
    let call_ended = CancellationToken::new();
    // Moves into the body of the response; on every other path it is dropped on return.
    let guard = call_ended.clone().drop_guard();
    match drain.run_until_cancelled(send(call_ended)).await {
        Some(result) => result.map(|response| response.map(|body| body.holding(guard))),
        None => Ok(status_response(&Status::StoppingReconnect, content_type)),
    }
}

/// Signals the stop of the process to the body of an endless call.
#[derive(Debug)]
pub(crate) struct StopSignal {
    drain: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Looks at `drain`: bodies ask at every event.
    looks: WakeGated,
    is_stopping: bool,
}

impl StopSignal {
    /// Returns a signal for a call of `method`; `None` unless the method is endless.
    pub(crate) fn new(method: Method, drain: &CancellationToken) -> Option<StopSignal> {
        method.is_endless().then(|| StopSignal {
            drain: Box::pin(drain.clone().cancelled_owned()),
            looks: WakeGated::new(),
            is_stopping: false,
        })
    }

    /// Whether the process is stopping; otherwise registers `cx` to be woken when it stops.
    pub(crate) fn is_stopping(&mut self, cx: &mut Context<'_>) -> bool {
        let drain = self.drain.as_mut();
        self.is_stopping = self.is_stopping || self.looks.poll_if_woken(cx, |cx| drain.poll(cx)).is_ready();
        self.is_stopping
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use http::Response;

    use super::*;
    use crate::response::ResponseBody;

    fn content_type() -> HeaderValue {
        HeaderValue::from_static("application/grpc")
    }

    #[tokio::test]
    async fn call_without_response_head_ends_with_unavailable_on_stop() {
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
    async fn request_ends_when_the_body_of_its_response_is_dropped() {
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
    fn stop_signal_exists_only_for_endless_methods() {
        let drain = CancellationToken::new();
        assert!(StopSignal::new(Method::Watch, &drain).is_some());
        assert!(StopSignal::new(Method::Snapshot, &drain).is_none());
    }
}
