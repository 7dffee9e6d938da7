//! What is known of KV.RangeStream (KEP-5966), endpoint by endpoint.
//!
//! A version says who has it, until somebody answers otherwise: a proxy in front of a new etcd, or an etcd that was
//! replaced by an older one a moment ago. What an answer taught is forgotten when a connection to the endpoint is made
//! again and when its version changes, so that a rolling upgrade is noticed, and a downgrade too.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::Version;

/// How etcd's refusals of a *request* begin; every other `Unimplemented` is about the method.
const SHAPE_REFUSED: &str = "RangeStream does not support";

/// Why a read that could be a RangeStream to etcd is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRangeStream {
    /// `--range-stream=off`.
    Off,
    /// Every endpoint that is there is older than 3.7.
    Version,
    /// The endpoint answered that it has no such method, now or since it was last connected.
    Unimplemented,
    /// It has the method but refuses requests of this shape, or answers them otherwise than a Range.
    Shape,
}

impl NoRangeStream {
    /// The label in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            NoRangeStream::Off => "off",
            NoRangeStream::Version => "version",
            NoRangeStream::Unimplemented => "unimplemented",
            NoRangeStream::Shape => "shape",
        }
    }

    /// What an answer of `Unimplemented` with this text to a RangeStream means: [`NoRangeStream::Shape`] or
    /// [`NoRangeStream::Unimplemented`].
    pub(super) fn of_unimplemented(message: &str) -> NoRangeStream {
        if message.starts_with(SHAPE_REFUSED) {
            NoRangeStream::Shape
        } else {
            NoRangeStream::Unimplemented
        }
    }
}

/// What an endpoint's connections know of the server behind it, together.
#[derive(Debug, Default)]
pub(super) struct Server {
    version: Mutex<Option<Version>>,
    lacks_range_stream: AtomicBool,
}

impl Server {
    /// The version that it told last.
    pub(super) fn version(&self) -> Option<Version> {
        *self.version.lock()
    }

    /// It told its version; returns whether that is news.
    pub(super) fn told(&self, version: Version) -> bool {
        let is_news = self.version.lock().replace(version) != Some(version);
        if is_news {
            self.lacks_range_stream.store(false, Ordering::Relaxed);
        }
        is_news
    }

    /// A connection was made again: another server may be behind it.
    pub(super) fn reconnected(&self) {
        self.lacks_range_stream.store(false, Ordering::Relaxed);
    }

    /// It answered that it has no RangeStream; returns whether that is news.
    pub(super) fn note_no_range_stream(&self) -> bool {
        !self.lacks_range_stream.swap(true, Ordering::Relaxed)
    }

    /// Why RangeStream need not be tried, if there is a reason.
    pub(super) fn no_range_stream(&self) -> Option<NoRangeStream> {
        if self.lacks_range_stream.load(Ordering::Relaxed) {
            Some(NoRangeStream::Unimplemented)
        } else if self.version().is_some_and(|version| !version.has_range_stream()) {
            Some(NoRangeStream::Version)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_answer_taught_is_forgotten_with_the_server() {
        let server = Server::default();
        assert_eq!(server.no_range_stream(), None, "not known: worth a try");
        assert!(server.told(Version::new(3, 6, 16)));
        assert_eq!(server.no_range_stream(), Some(NoRangeStream::Version));
        assert!(server.told(Version::new(3, 7, 3)));
        assert_eq!(server.no_range_stream(), None);

        assert!(server.note_no_range_stream() && !server.note_no_range_stream());
        assert_eq!(server.no_range_stream(), Some(NoRangeStream::Unimplemented));
        assert!(!server.told(Version::new(3, 7, 3)), "the same version is no news");
        assert_eq!(server.no_range_stream(), Some(NoRangeStream::Unimplemented));
        server.reconnected();
        assert_eq!(server.no_range_stream(), None);

        server.note_no_range_stream();
        server.told(Version::new(3, 7, 4));
        assert_eq!(server.no_range_stream(), None);
    }

    #[test]
    fn only_a_refused_shape_is_the_requests_own() {
        for text in [
            "RangeStream does not support custom sort orders",
            "RangeStream does not support revision filters",
        ] {
            assert_eq!(
                NoRangeStream::of_unimplemented(text),
                NoRangeStream::Shape,
                "{text}"
            );
        }
        for text in [
            "unknown method RangeStream for service etcdserverpb.KV",
            "unknown service etcdserverpb.KV",
            "RangeStream is not supported by the gRPC proxy",
            "",
        ] {
            assert_eq!(
                NoRangeStream::of_unimplemented(text),
                NoRangeStream::Unimplemented,
                "{text}"
            );
        }
    }
}
