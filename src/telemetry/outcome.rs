//! How a Range ended, and why: the one vocabulary of metrics, spans and docs.

/// Which call it was: each has a counter of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// KV/Range.
    Unary,
    /// KV/RangeStream.
    Stream,
}

/// How a Range ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// From memory, which was as new as it had to be.
    Hit(Read),
    /// From memory, after waiting for the mirror to catch up.
    Waited(Read),
    /// By etcd, as a RangeStream that was made of it, or as a page of one.
    Streamed(Reason),
    /// By etcd, the request's bytes as they came.
    Forwarded(Reason),
    /// By etcd, which has no RangeStream: the stream was put together from pages.
    Paged(Reason),
    /// Refused with a retryable status.
    Shed(Reason),
    /// The caller went away, or its timeout passed, before there was an answer.
    Cancelled(Reason),
}

/// What kind of read memory answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// Proven by a quorum check.
    Linearizable,
    /// Not older than anything shown before (I11).
    Serializable,
    /// At a revision of the caller's choice.
    Pinned,
    /// An error in etcd's own words.
    Refused,
}

/// Why a Range was not answered from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The range is not, or not wholly, inside one mirror.
    NotMirrored,
    /// The mirror is being loaded.
    Loading,
    /// The mirror's watch is being made again.
    FeedLost,
    /// The mirror would not fit its budget and has stepped aside.
    OverBudget,
    /// etcd is too old for its progress notifications to be trusted.
    VersionGate,
    /// No endpoint has told its version yet.
    VersionUnknown,
    /// etcd did not authorise the caller for the range; or its auth is on and rangecache has no user of its own; or it was
    /// not known to be off.
    Auth,
    /// The quorum check failed.
    CheckFailed,
    /// The mirror did not reach the proven revision in time.
    NotFresh,
    /// The revision is older than the history that is kept, but etcd may still have it.
    HistoryGone,
    /// etcd's history was replaced (a restore); the mirror is being loaded anew.
    HistoryReplaced,
    /// Verification found that the mirror differs from etcd; it is being loaded anew.
    Mismatch,
    /// The mirror's task panicked; it is being loaded anew.
    Panicked,
    /// The order of equal sort keys is etcd's alone.
    SortTies,
    /// The request has something that rangecache does not understand.
    Undecodable,
    /// The answer would be larger than a message may be.
    TooLarge,
    /// A serializable read asked for a member that has a leader.
    RequireLeader,
    /// The body ended or broke before the message was whole.
    BrokenRequest,
    /// The caller's own timeout passed.
    Deadline,
    /// The caller went away.
    Gone,
    /// Too many large Ranges wait for etcd.
    TooManyWaiting,
    /// Too many calls are under way.
    TooManyCalls,
    /// Shared answers would take more memory than they may.
    SharedBytes,
    /// The caller asked to read around the cache.
    Bypass,
}

impl Outcome {
    /// Every outcome that there can be.
    pub fn all() -> impl Iterator<Item = Outcome> {
        let answered = [Outcome::Hit, Outcome::Waited]
            .into_iter()
            .flat_map(|of| Read::ALL.into_iter().map(of));
        let others = [
            Outcome::Streamed,
            Outcome::Forwarded,
            Outcome::Paged,
            Outcome::Shed,
            Outcome::Cancelled,
        ];
        answered.chain(others.into_iter().flat_map(|of| Reason::ALL.into_iter().map(of)))
    }

    /// The same, where memory had an answer that must not be sent.
    #[must_use]
    pub fn refused(self) -> Outcome {
        match self {
            Outcome::Hit(_) => Outcome::Hit(Read::Refused),
            Outcome::Waited(_) => Outcome::Waited(Read::Refused),
            other => other,
        }
    }

    /// What was to be forwarded has become a stream.
    #[must_use]
    pub fn streamed(self) -> Outcome {
        match self {
            Outcome::Forwarded(reason) => Outcome::Streamed(reason),
            other => other,
        }
    }

    /// The values of the labels `outcome` and `reason`.
    #[must_use]
    pub fn labels(self) -> (&'static str, &'static str) {
        match self {
            Outcome::Hit(read) => ("hit", read.as_str()),
            Outcome::Waited(read) => ("waited", read.as_str()),
            Outcome::Streamed(reason) => ("streamed", reason.as_str()),
            Outcome::Forwarded(reason) => ("forwarded", reason.as_str()),
            Outcome::Paged(reason) => ("paged", reason.as_str()),
            Outcome::Shed(reason) => ("shed", reason.as_str()),
            Outcome::Cancelled(reason) => ("cancelled", reason.as_str()),
        }
    }
}

impl Read {
    /// Every kind.
    pub const ALL: [Read; 4] = [
        Read::Linearizable,
        Read::Serializable,
        Read::Pinned,
        Read::Refused,
    ];

    /// The value of the label `reason`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Read::Linearizable => "linearizable",
            Read::Serializable => "serializable",
            Read::Pinned => "pinned",
            Read::Refused => "refused",
        }
    }
}

impl Reason {
    /// Every reason, in the order in which they are declared.
    pub const ALL: [Reason; 24] = [
        Reason::NotMirrored,
        Reason::Loading,
        Reason::FeedLost,
        Reason::OverBudget,
        Reason::VersionGate,
        Reason::VersionUnknown,
        Reason::Auth,
        Reason::CheckFailed,
        Reason::NotFresh,
        Reason::HistoryGone,
        Reason::HistoryReplaced,
        Reason::Mismatch,
        Reason::Panicked,
        Reason::SortTies,
        Reason::Undecodable,
        Reason::TooLarge,
        Reason::RequireLeader,
        Reason::BrokenRequest,
        Reason::Deadline,
        Reason::Gone,
        Reason::TooManyWaiting,
        Reason::TooManyCalls,
        Reason::SharedBytes,
        Reason::Bypass,
    ];

    /// The value of the label `reason`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::NotMirrored => "not_mirrored",
            Reason::Loading => "loading",
            Reason::FeedLost => "feed_lost",
            Reason::OverBudget => "over_budget",
            Reason::VersionGate => "version_gate",
            Reason::VersionUnknown => "version_unknown",
            Reason::Auth => "auth",
            Reason::CheckFailed => "check_failed",
            Reason::NotFresh => "not_fresh",
            Reason::HistoryGone => "history_gone",
            Reason::HistoryReplaced => "history_replaced",
            Reason::Mismatch => "mismatch",
            Reason::Panicked => "panicked",
            Reason::SortTies => "sort_ties",
            Reason::Undecodable => "undecodable",
            Reason::TooLarge => "too_large",
            Reason::RequireLeader => "require_leader",
            Reason::BrokenRequest => "broken_request",
            Reason::Deadline => "deadline",
            Reason::Gone => "gone",
            Reason::TooManyWaiting => "too_many_waiting",
            Reason::TooManyCalls => "too_many_calls",
            Reason::SharedBytes => "shared_bytes",
            Reason::Bypass => "bypass",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_outcome_is_left_out_of_all() {
        // One that was added would move the last of its kind on.
        assert_eq!(Read::ALL.len(), Read::Refused as usize + 1);
        assert_eq!(Reason::ALL.len(), Reason::Bypass as usize + 1);
        let labels: BTreeSet<_> = Outcome::all().map(Outcome::labels).collect();
        assert_eq!(labels.len(), 2 * Read::ALL.len() + 5 * Reason::ALL.len());
    }
}
