//! Ends of a mirror's events, for the watches that take them.

use rangecache_base::telemetry::Reason;

/// Why a reader gets no more events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaderEnd {
    /// The mirror was dropped because etcd has compacted `compact_revision`, and is loaded again. Events up to the end
    /// were taken before.
    Compacted {
        /// etcd's compaction revision.
        compact_revision: i64,
    },
    /// The mirror was dropped for this reason, and its events are right. Events up to the end were taken before.
    Dropped(Reason),
    /// etcd's history was replaced, or the mirror differed from etcd. What was not taken must not be sent (W10).
    Replaced {
        /// Revision of etcd after that, at least 1.
        revision: i64,
    },
    /// The log no longer reaches back to the reader's position.
    Trimmed,
    /// The mirror has had no feed for ten seconds, or has lost it before it reached the revision at which the watcher
    /// joined, or nothing shows that etcd has its last event.
    FeedLost,
}
