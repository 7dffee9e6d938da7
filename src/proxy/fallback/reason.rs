//! Why a read that could have used etcd's RangeStream did not.

use crate::upstream::NoRangeStream;

/// Label values of `rangecache_range_stream_fallback_total`; docs/consistency.md has them in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.as_str())]
pub(super) enum StreamFallback {
    /// No endpoint can serve the request as a stream.
    NoRangeStream(NoRangeStream),
    /// No endpoint is connected.
    NoEndpoint,
    /// The stream ended early: the connection was lost, or etcd returned an error in mid-stream.
    Broken,
    /// `--stream-max-bytes` are held.
    Budget,
    /// The stream is not what etcd would send for the request.
    Malformed,
    /// etcd refused the stream with a status that the unary call may not get.
    Refused,
    /// etcd did not send the next chunk in time.
    Late,
    /// The client's rights could not be proven, or auth was switched.
    Auth,
    /// etcd's current revision is not known.
    NotProven,
    /// etcd's history is not the one that the list's first page was read from.
    HistoryReplaced,
    /// The list's revision has been compacted.
    Compacted,
}

impl StreamFallback {
    /// The label value.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            StreamFallback::NoRangeStream(reason) => reason.as_str(),
            StreamFallback::NoEndpoint => "no_endpoint",
            StreamFallback::Broken => "broken",
            StreamFallback::Budget => "budget",
            StreamFallback::Malformed => "malformed",
            StreamFallback::Refused => "refused",
            StreamFallback::Late => "late",
            StreamFallback::Auth => "auth",
            StreamFallback::NotProven => "not_proven",
            StreamFallback::HistoryReplaced => "history_replaced",
            StreamFallback::Compacted => "compacted",
        }
    }
}

impl From<NoRangeStream> for StreamFallback {
    fn from(reason: NoRangeStream) -> Self {
        StreamFallback::NoRangeStream(reason)
    }
}
