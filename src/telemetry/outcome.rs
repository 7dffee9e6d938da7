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
    Streamed(Why),
    /// By etcd, the request's bytes as they came.
    Forwarded(Why),
    /// By etcd, which has no RangeStream: the stream was put together from pages.
    Paged(Why),
    /// Refused with a retryable status.
    Shed(Why),
    /// The caller went away, or its timeout passed, before there was an answer.
    Cancelled(Why),
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
pub enum Why {
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
        answered.chain(others.into_iter().flat_map(|of| Why::ALL.into_iter().map(of)))
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
            Outcome::Forwarded(why) => Outcome::Streamed(why),
            other => other,
        }
    }

    /// The values of the labels `outcome` and `reason`.
    #[must_use]
    pub fn labels(self) -> (&'static str, &'static str) {
        match self {
            Outcome::Hit(read) => ("hit", read.as_str()),
            Outcome::Waited(read) => ("waited", read.as_str()),
            Outcome::Streamed(why) => ("streamed", why.as_str()),
            Outcome::Forwarded(why) => ("forwarded", why.as_str()),
            Outcome::Paged(why) => ("paged", why.as_str()),
            Outcome::Shed(why) => ("shed", why.as_str()),
            Outcome::Cancelled(why) => ("cancelled", why.as_str()),
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

impl Why {
    /// Every reason, in the order in which they are declared.
    pub const ALL: [Why; 24] = [
        Why::NotMirrored,
        Why::Loading,
        Why::FeedLost,
        Why::OverBudget,
        Why::VersionGate,
        Why::VersionUnknown,
        Why::Auth,
        Why::CheckFailed,
        Why::NotFresh,
        Why::HistoryGone,
        Why::HistoryReplaced,
        Why::Mismatch,
        Why::Panicked,
        Why::SortTies,
        Why::Undecodable,
        Why::TooLarge,
        Why::RequireLeader,
        Why::BrokenRequest,
        Why::Deadline,
        Why::Gone,
        Why::TooManyWaiting,
        Why::TooManyCalls,
        Why::SharedBytes,
        Why::Bypass,
    ];

    /// The value of the label `reason`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Why::NotMirrored => "not_mirrored",
            Why::Loading => "loading",
            Why::FeedLost => "feed_lost",
            Why::OverBudget => "over_budget",
            Why::VersionGate => "version_gate",
            Why::VersionUnknown => "version_unknown",
            Why::Auth => "auth",
            Why::CheckFailed => "check_failed",
            Why::NotFresh => "not_fresh",
            Why::HistoryGone => "history_gone",
            Why::HistoryReplaced => "history_replaced",
            Why::Mismatch => "mismatch",
            Why::Panicked => "panicked",
            Why::SortTies => "sort_ties",
            Why::Undecodable => "undecodable",
            Why::TooLarge => "too_large",
            Why::RequireLeader => "require_leader",
            Why::BrokenRequest => "broken_request",
            Why::Deadline => "deadline",
            Why::Gone => "gone",
            Why::TooManyWaiting => "too_many_waiting",
            Why::TooManyCalls => "too_many_calls",
            Why::SharedBytes => "shared_bytes",
            Why::Bypass => "bypass",
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
        assert_eq!(Why::ALL.len(), Why::Bypass as usize + 1);
        let labels: BTreeSet<_> = Outcome::all().map(Outcome::labels).collect();
        assert_eq!(labels.len(), 2 * Read::ALL.len() + 5 * Why::ALL.len());
    }
}
