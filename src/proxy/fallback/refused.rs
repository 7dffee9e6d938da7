//! Reads that get no response of etcd: beyond a bound, or after a shared call that failed.

use crate::proxy::forward::{outcome_of, status_without_turn};
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::outcome::Failure;
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_edge::limits::NoTurn;

/// End of a read without a response of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// Outcome of the read.
    pub(super) outcome: Outcome,
    /// Status that the client gets.
    pub(super) status: Status,
}

impl Refused {
    /// Ends the reads of a shared call that failed with `status`.
    pub(super) fn shared_call(status: Status) -> Refused {
        Refused {
            outcome: outcome_of(&status).unwrap_or(Outcome::Failed(Failure::SharedCall)),
            status,
        }
    }

    /// Refuses a read whose response does not fit `--buffer-max-bytes`.
    pub(super) fn buffer_bytes() -> Refused {
        Refused {
            outcome: Outcome::Shed(Reason::BufferBytes),
            status: Status::BufferBytes,
        }
    }
}

impl From<NoTurn> for Refused {
    fn from(cause: NoTurn) -> Refused {
        Refused {
            outcome: match cause {
                NoTurn::TooManyWaiting | NoTurn::Late => Outcome::Shed(Reason::TooManyWaiting),
                NoTurn::Deadline => Outcome::Failed(Failure::Deadline),
            },
            status: status_without_turn(cause),
        }
    }
}
