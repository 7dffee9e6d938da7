//! The end of calls that never end by themselves, when the process stops: their clients resume elsewhere at once, instead of
//! holding the stop up. Between two messages such a call ends with `Unavailable`, on which etcd's clients make their watches
//! and keepalives again from where they were. Calls that come to an end are left to reach it.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::status::{Code, Status};

/// Whether the call to `path` goes on until its client ends it.
pub(super) fn is_endless(path: &str) -> bool {
    match path {
        "/etcdserverpb.Watch/Watch"
        | "/etcdserverpb.Lease/LeaseKeepAlive"
        | "/v3electionpb.Election/Observe"
        | "/grpc.health.v1.Health/Watch" => true,
        // The JSON gateway, in all its versions.
        _ => {
            path.starts_with("/v3")
                && ["/watch", "/lease/keepalive", "/election/observe"]
                    .iter()
                    .any(|end| path.ends_with(end))
        }
    }
}

/// What such a call ends with.
pub(super) fn status() -> Status {
    Status::new(Code::Unavailable, "rangecache: stopping; connect again")
}

/// Becomes ready when the process stops; polled with the body of an endless call.
#[derive(Debug)]
pub(super) struct Stop {
    waiting: Pin<Box<WaitForCancellationFutureOwned>>,
    has_come: bool,
}

impl Stop {
    pub(super) fn of(path: &str, drain: &CancellationToken) -> Option<Stop> {
        is_endless(path).then(|| Stop {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_ends_is_ended() {
        for path in [
            "/etcdserverpb.Watch/Watch",
            "/etcdserverpb.Lease/LeaseKeepAlive",
            "/v3/watch",
            "/v3beta/lease/keepalive",
        ] {
            assert!(is_endless(path), "{path}");
        }
        for path in [
            "/etcdserverpb.KV/Put",
            "/etcdserverpb.KV/RangeStream",
            "/etcdserverpb.Maintenance/Snapshot",
            "/v3lockpb.Lock/Lock",
            "/v3/kv/range",
            "/health",
        ] {
            assert!(!is_endless(path), "{path}");
        }
    }
}
