//! Outcomes of Range and RangeStream, with reasons: the label values of metrics, spans and docs.

/// Declares an enum whose variants are label values, so that the list of all variants and their labels cannot miss one.
macro_rules! labels {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident => $label:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl $name {
            /// Every variant, in the order of declaration.
            pub const ALL: &[$name] = &[$($name::$variant),+];

            /// Value of the label `reason`.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => $label,)+
                }
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }
    };
}

/// The method of a read. Each has a counter of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// KV/Range.
    Unary,
    /// KV/RangeStream.
    Stream,
}

/// Outcome of a Range or RangeStream, with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Answered from memory at once.
    Hit(Read),
    /// Answered from memory, after waiting for the mirror to catch up.
    Waited(Read),
    /// Answered by etcd: a unary Range converted to a RangeStream, or a page taken from one.
    Streamed(Reason),
    /// Answered by etcd, with the request forwarded unchanged.
    Forwarded(Reason),
    /// Answered by etcd, which has no RangeStream: the stream was assembled from pages.
    Paged(Reason),
    /// Refused with a retryable status.
    Shed(Reason),
    /// Sent to etcd, or meant for it, without getting its response.
    Failed(Failure),
    /// Given up by the caller before there was a response, with what it waited for: the reason for which etcd was to answer, or
    /// [`Reason::Gone`] before that was known.
    Cancelled(Reason),
}

labels! {
    /// Kind of a read that was answered from memory.
    pub enum Read {
        /// Proven by a quorum check.
        Linearizable => "linearizable",
        /// Not older than anything that was served before (I11).
        Serializable => "serializable",
        /// At a revision that the caller chose.
        Pinned => "pinned",
        /// Within the bounds that the caller set: `rangecache-min-revision`, `rangecache-max-staleness`.
        Bounded => "bounded",
        /// From the last view, while no member of etcd answers (`--serve-stale`).
        Stale => "stale",
        /// An error, with etcd's own text.
        Refused => "refused",
    }
}

labels! {
    /// Why a call did not get etcd's response.
    pub enum Failure {
        /// No endpoint was connected in time.
        NoEndpoint => "no_endpoint",
        /// The connection was lost before the response had begun.
        ConnectionLost => "connection_lost",
        /// etcd reset the stream of a call that several reads share.
        StreamReset => "stream_reset",
        /// The call that several reads share ended without a result.
        SharedCall => "shared_call",
        /// The caller's timeout expired before etcd's response.
        Deadline => "deadline",
        /// The response cannot be used: it cannot be decoded, or its pages are of different histories.
        UnusableResponse => "unusable_response",
    }
}

labels! {
    /// Why a Range was not answered from memory.
    pub enum Reason {
        /// The range is not, or not wholly, inside one mirror.
        NotMirrored => "not_mirrored",
        /// The mirror is being loaded.
        Loading => "loading",
        /// The mirror's watch was lost and is being re-established.
        FeedLost => "feed_lost",
        /// The mirror does not fit its memory budget and is disabled.
        OverBudget => "over_budget",
        /// etcd is too old for its progress notifications to be trusted.
        VersionGate => "version_gate",
        /// No endpoint has reported its version yet.
        VersionUnknown => "version_unknown",
        /// The read has credentials, and the endpoint is another rangecache: that one has etcd authorize it.
        BehindHub => "behind_hub",
        /// etcd did not authorize the caller for the range; or etcd's auth is on and rangecache has no user of its own;
        /// or auth was not known to be off.
        Auth => "auth",
        /// The quorum check failed.
        CheckFailed => "check_failed",
        /// The mirror did not reach the proven revision in time.
        NotFresh => "not_fresh",
        /// The revision is older than the history that is kept, but etcd may still have it.
        HistoryGone => "history_gone",
        /// etcd's history was replaced (a restore); the mirror is being reloaded.
        HistoryReplaced => "history_replaced",
        /// Verification found that the mirror differs from etcd; it is being reloaded.
        Mismatch => "mismatch",
        /// The mirror's task panicked; it is being reloaded.
        Panicked => "panicked",
        /// A packed value in memory is damaged; the mirror is being reloaded.
        Damaged => "damaged",
        /// The order is that of the values, and some of them are packed.
        PackedValues => "packed_values",
        /// Values of the response are not held.
        ValuesNotHeld => "values_not_held",
        /// Several keys are equal in the requested order, and only etcd knows how it orders them.
        SortTies => "sort_ties",
        /// The request has a field or a value that rangecache does not know.
        Undecodable => "undecodable",
        /// A serializable read asked for a member that has a leader.
        RequireLeader => "require_leader",
        /// The request body ended or failed before the message was complete.
        BrokenRequest => "broken_request",
        /// The caller's own timeout expired before the call began.
        Deadline => "deadline",
        /// The caller cancelled the call or closed its connection.
        Gone => "gone",
        /// Too many reads are waiting for etcd, or etcd did not get to this one in time.
        TooManyWaiting => "too_many_waiting",
        /// Too many calls are in flight, altogether or costly ones of the client.
        TooManyCalls => "too_many_calls",
        /// The bytes of the call do not fit `--buffer-max-bytes`.
        BufferBytes => "buffer_bytes",
        /// The caller asked to bypass the cache.
        Bypass => "bypass",
        /// The operator has switched memory off (`POST /forward-all`).
        ForwardAll => "forward_all",
    }
}

impl Reason {
    /// Whether a mirror is out of step with etcd for a while, so that all of its reads would go to etcd at once.
    #[must_use]
    pub fn is_behind(self) -> bool {
        matches!(
            self,
            Reason::Loading
                | Reason::FeedLost
                | Reason::CheckFailed
                | Reason::NotFresh
                | Reason::HistoryReplaced
                | Reason::Mismatch
                | Reason::Panicked
                | Reason::Damaged
        )
    }
}

impl Outcome {
    /// Every combination of outcome and reason.
    pub fn all() -> impl Iterator<Item = Outcome> {
        let answered = [Outcome::Hit, Outcome::Waited]
            .into_iter()
            .flat_map(|of| Read::ALL.iter().copied().map(of));
        let others = [
            Outcome::Streamed,
            Outcome::Forwarded,
            Outcome::Paged,
            Outcome::Shed,
            Outcome::Cancelled,
        ];
        let answered = answered.chain(
            others
                .into_iter()
                .flat_map(|of| Reason::ALL.iter().copied().map(of)),
        );
        answered.chain(Failure::ALL.iter().copied().map(Outcome::Failed))
    }

    /// Whether the response came from memory.
    #[must_use]
    pub fn is_from_memory(self) -> bool {
        matches!(self, Outcome::Hit(_) | Outcome::Waited(_))
    }

    /// The outcome of a read whose response from memory is an error.
    #[must_use]
    pub fn refused(self) -> Outcome {
        match self {
            Outcome::Hit(_) => Outcome::Hit(Read::Refused),
            Outcome::Waited(_) => Outcome::Waited(Read::Refused),
            other => other,
        }
    }

    /// The outcome of a forwarded read that was converted to a stream.
    #[must_use]
    pub fn streamed(self) -> Outcome {
        match self {
            Outcome::Forwarded(reason) => Outcome::Streamed(reason),
            other => other,
        }
    }

    /// Values of the labels `outcome` and `reason`.
    #[must_use]
    pub fn labels(self) -> (&'static str, &'static str) {
        match self {
            Outcome::Hit(read) => ("hit", read.as_str()),
            Outcome::Waited(read) => ("waited", read.as_str()),
            Outcome::Streamed(reason) => ("streamed", reason.as_str()),
            Outcome::Forwarded(reason) => ("forwarded", reason.as_str()),
            Outcome::Paged(reason) => ("paged", reason.as_str()),
            Outcome::Shed(reason) => ("shed", reason.as_str()),
            Outcome::Failed(failure) => ("failed", failure.as_str()),
            Outcome::Cancelled(reason) => ("cancelled", reason.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn all_outcomes_have_labels_of_their_own() {
        let labels: BTreeSet<_> = Outcome::all().map(Outcome::labels).collect();
        let expected = 2 * Read::ALL.len() + 5 * Reason::ALL.len() + Failure::ALL.len();
        assert_eq!(labels.len(), expected);
    }
}
