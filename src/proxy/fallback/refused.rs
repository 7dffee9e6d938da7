//! Reads that are refused at a bound.

use crate::grpc::Status;
use crate::limits::NoTurn;
use crate::telemetry::Reason;

/// A read that is refused, or whose shared call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// For metrics.
    pub(super) reason: Reason,
    /// For the client.
    pub(super) status: Status,
}

impl Refused {
    /// The call that several reads shared ended with `status`.
    pub(super) fn shared_call(status: Status) -> Refused {
        Refused {
            reason: Reason::Gone,
            status,
        }
    }
}

impl From<NoTurn> for Refused {
    fn from(cause: NoTurn) -> Refused {
        match cause {
            NoTurn::TooManyWaiting => Refused {
                reason: Reason::TooManyWaiting,
                status: Status::TooManyWaiting,
            },
            NoTurn::Stopping => Refused {
                reason: Reason::Gone,
                status: Status::Stopping,
            },
        }
    }
}
