//! Errors of calls to which etcd did not respond.

use etcd_wire::grpc::Status;
use http::HeaderValue;
use rangecache_base::telemetry::{Outcome, Reason, outcome::Failure};
use rangecache_edge::limits::Exceeded;
use rangecache_upstream::{BoxError, NoEndpoint, is_reset};

use crate::call::Ended;
use crate::response::{CallResult, status_response};

/// Reason for which a call got no response from etcd.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    #[error(transparent)]
    NoEndpoint(#[from] NoEndpoint),
    #[error("the connection to etcd was lost: {0}")]
    Lost(BoxError),
    /// There is no room for the response, or no slot for the call.
    #[error(transparent)]
    Exceeded(#[from] Exceeded),
    /// etcd itself reset the stream. The call is not retried: the reset is etcd's response.
    #[error("etcd reset the stream: {0}")]
    Reset(BoxError),
    /// The client's request broke off before anything was sent.
    #[error("the request broke off: {0}")]
    Request(BoxError),
}

impl SendError {
    /// Classifies an error of the connection on which a call was sent.
    pub(crate) fn of_connection(error: BoxError) -> SendError {
        if is_reset(&error) {
            SendError::Reset(error)
        } else {
            SendError::Lost(error)
        }
    }

    /// Returns the client's result: a reset of etcd's is passed on as a reset, any other error as status `Unavailable`.
    pub(crate) fn into_result(self, content_type: HeaderValue) -> CallResult {
        match self {
            SendError::Reset(error) | SendError::Request(error) => Err(error),
            other => {
                let status = other.status();
                let mut response = status_response(&status, content_type);
                if let Some(outcome) = outcome_of(&status) {
                    response.extensions_mut().insert(Ended(outcome));
                }
                Ok(response)
            }
        }
    }

    /// Returns the error as a status, for responses that cannot be reset any more because they have begun or are
    /// shared.
    pub(crate) fn status(&self) -> Status {
        match self {
            SendError::NoEndpoint(error) => Status::NoEndpoint(error.to_string()),
            SendError::Lost(error) | SendError::Request(error) => Status::ConnectionLost(error.to_string()),
            SendError::Exceeded(cause) => status_of(*cause),
            SendError::Reset(error) => Status::StreamReset(error.to_string()),
        }
    }
}

/// Outcome of a call that was to be answered by etcd, and that rangecache has ended with `status`; `None` if that is one of
/// etcd's.
pub(crate) fn outcome_of(status: &Status) -> Option<Outcome> {
    Some(match status {
        Status::NoEndpoint(_) => Outcome::Failed(Failure::NoEndpoint),
        Status::ConnectionLost(_) => Outcome::Failed(Failure::ConnectionLost),
        Status::StreamReset(_) => Outcome::Failed(Failure::StreamReset),
        Status::SharedCallCancelled => Outcome::Failed(Failure::SharedCall),
        Status::UndecodableResponse | Status::HistoryReplaced => Outcome::Failed(Failure::UnusableResponse),
        Status::BufferBytes | Status::SortedTooLong(_) => Outcome::Shed(Reason::BufferBytes),
        Status::TooManyWaiting => Outcome::Shed(Reason::TooManyWaiting),
        Status::DeadlineExceeded => Outcome::Failed(Failure::Deadline),
        _ => return None,
    })
}

/// Status of a call that got no bytes or no slot.
pub(crate) fn status_of(cause: Exceeded) -> Status {
    match cause {
        Exceeded::Bytes => Status::BufferBytes,
        Exceeded::Waiting | Exceeded::Late => Status::TooManyWaiting,
        Exceeded::Deadline => Status::DeadlineExceeded,
    }
}
