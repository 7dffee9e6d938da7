//! Why etcd did not answer a forwarded call.

use http::HeaderValue;

use crate::grpc::Status;
use crate::proxy::response::{CallResult, status_response};
use crate::upstream::NoEndpoint;

/// Why etcd did not answer a call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    #[error(transparent)]
    NoEndpoint(#[from] NoEndpoint),
    #[error("the connection to etcd was lost: {0}")]
    Lost(hyper::Error),
    /// etcd itself reset the stream: that is its response.
    #[error("etcd reset the stream: {0}")]
    Reset(hyper::Error),
}

impl SendError {
    /// `error` of a connection that was used for a call.
    pub(crate) fn from_hyper(error: hyper::Error) -> SendError {
        if is_reset(&error) {
            SendError::Reset(error)
        } else {
            SendError::Lost(error)
        }
    }

    /// The response for the client.
    pub(crate) fn into_result(self, content_type: HeaderValue) -> CallResult {
        match self {
            SendError::Reset(error) => Err(error.into()),
            other => Ok(status_response(&other.status(), content_type)),
        }
    }

    /// The status for a client whose stream cannot be reset any more.
    pub(crate) fn status(&self) -> Status {
        match self {
            SendError::NoEndpoint(error) => Status::NoEndpoint(error.to_string()),
            SendError::Lost(error) => Status::ConnectionLost(error.to_string()),
            SendError::Reset(error) => Status::StreamReset(error.to_string()),
        }
    }
}

/// Whether etcd itself reset the stream, as opposed to a lost connection.
pub(super) fn is_reset(error: &hyper::Error) -> bool {
    std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<h2::Error>())
        .is_some_and(|h2| h2.is_reset() && h2.is_remote())
}
