//! Refusals: reads beyond a bound, and failed shared calls.

use crate::grpc::Status;
use crate::limits::NoTurn;
use crate::telemetry::Reason;

/// Refusal of a read, with its metric label and the client's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// Label of the outcome `shed`.
    pub(super) reason: Reason,
    /// Status that the client gets.
    pub(super) status: Status,
}

impl Refused {
    /// Refuses the reads of a shared call that failed with `status`.
    pub(super) fn shared_call(status: Status) -> Refused {
        Refused {
            reason: Reason::Gone,
            status,
        }
    }

    /// Refuses a read whose response does not fit `--buffer-max-bytes`.
    pub(super) fn buffer_bytes() -> Refused {
        Refused {
            reason: Reason::BufferBytes,
            status: Status::BufferBytes,
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
