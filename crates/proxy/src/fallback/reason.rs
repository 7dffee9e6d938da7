//! Reasons for which a read did not use a RangeStream of etcd although the request allows it.

use rangecache_upstream::NoRangeStream;

/// Label values of `rangecache_range_stream_fallback_total`; docs/consistency.md lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.as_str())]
pub(super) enum StreamFallback {
    /// No endpoint can serve the request as a stream.
    NoRangeStream(NoRangeStream),
    /// No endpoint is connected.
    NoEndpoint,
    /// The connection was lost, or etcd returned an error in mid-stream.
    Broken,
    /// The share of `--buffer-max-bytes` is in use.
    Budget,
    /// The response takes more than half of that share, now or less than a minute ago.
    TooLarge,
    /// The stream cannot be decoded, or its count differs from the expected one.
    Malformed,
    /// etcd refused the stream with a status that it might not return for the unary call.
    Refused,
    /// etcd did not send the next chunk within 5 s.
    Late,
    /// etcd did not confirm that the client may read the page, or auth was enabled or disabled since the first page.
    Auth,
    /// There was no turn for another stream.
    Busy,
    /// etcd's current revision is unknown.
    NotProven,
    /// etcd's history was replaced since the list's first page was read.
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
            StreamFallback::TooLarge => "too_large",
            StreamFallback::Malformed => "malformed",
            StreamFallback::Refused => "refused",
            StreamFallback::Late => "late",
            StreamFallback::Auth => "auth",
            StreamFallback::Busy => "busy",
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

#[cfg(test)]
mod tests {
    use rangecache_mirror::STREAM_FALLBACKS;

    use super::*;

    #[test]
    fn every_reason_has_a_series_from_the_start() {
        let lacks = [
            NoRangeStream::Off,
            NoRangeStream::Version,
            NoRangeStream::Unimplemented,
            NoRangeStream::Shape,
        ];
        let others = [
            StreamFallback::NoEndpoint,
            StreamFallback::Broken,
            StreamFallback::Budget,
            StreamFallback::TooLarge,
            StreamFallback::Malformed,
            StreamFallback::Refused,
            StreamFallback::Late,
            StreamFallback::Auth,
            StreamFallback::Busy,
            StreamFallback::NotProven,
            StreamFallback::HistoryReplaced,
            StreamFallback::Compacted,
        ];
        let mut reasons: Vec<_> = lacks
            .into_iter()
            .map(StreamFallback::from)
            .chain(others)
            .map(StreamFallback::as_str)
            .collect();
        let mut known = STREAM_FALLBACKS.to_vec();
        reasons.sort_unstable();
        known.sort_unstable();
        assert_eq!(reasons, known);
    }
}
