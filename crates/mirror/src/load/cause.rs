//! Causes of loads.

use rangecache_base::telemetry::Reason;

/// Cause of a load: the label `reason` of `rangecache_mirror_reloads_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadCause {
    /// The first load of the process.
    Start,
    /// The load before failed.
    LoadFailed,
    /// The mirror was over budget and may fit now.
    MayFit,
    /// etcd has compacted this revision, past that of the mirror.
    Compacted(i64),
    /// Continuity of etcd's history with the mirror's cannot be proven.
    Unproven,
    /// etcd sent an event that is not understood.
    Malformed,
    /// The contents were dropped, for this reason.
    Dropped(Reason),
}

impl LoadCause {
    /// Value of the label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            LoadCause::Start => "start",
            LoadCause::LoadFailed => "load_failed",
            LoadCause::MayFit => "may_fit",
            LoadCause::Compacted(_) => "compacted",
            LoadCause::Unproven => "unproven",
            LoadCause::Malformed => "malformed",
            LoadCause::Dropped(reason) => reason.as_str(),
        }
    }
}
