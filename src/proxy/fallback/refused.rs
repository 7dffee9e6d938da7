//! Refusals: reads beyond a bound, and failed shared calls.

use crate::grpc::Status;
use crate::limits::{NoShare, NoTurn};
use crate::proxy::forward::{status_without_turn, without_share};
use crate::telemetry::{Outcome, Reason};

/// Refusal of a read, with its metric label and the client's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// Label of the outcome.
    pub(super) reason: Reason,
    /// Status that the client gets.
    pub(super) status: Status,
}

impl Refused {
    /// Outcome of the read: cancelled at its caller's deadline, otherwise shed.
    pub(super) fn outcome(&self) -> Outcome {
        match self.reason {
            Reason::Deadline => Outcome::Cancelled(Reason::Deadline),
            reason => Outcome::Shed(reason),
        }
    }

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

impl From<NoShare> for Refused {
    fn from(cause: NoShare) -> Refused {
        let (reason, status) = without_share(cause);
        Refused { reason, status }
    }
}

impl From<NoTurn> for Refused {
    fn from(cause: NoTurn) -> Refused {
        Refused {
            reason: match cause {
                NoTurn::TooManyWaiting | NoTurn::Late => Reason::TooManyWaiting,
                NoTurn::Deadline => Reason::Deadline,
            },
            status: status_without_turn(cause),
        }
    }
}
