//! Changes of state that operators look for after an alert: the newest ones, in memory.

use std::{collections::VecDeque, time::SystemTime};

use parking_lot::Mutex;
use serde::{Serialize, Serializer};

/// Number of changes that are kept.
pub const KEPT: usize = 32;
/// Longest details that are kept, in bytes; the rest of longer ones is cut off.
const MAX_DETAILS_BYTES: usize = 200;

/// Kind of the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// A mirror is in service, from the revision in the details.
    MirrorInService,
    /// A mirror is out of service, for the reason in the details.
    MirrorOutOfService,
    /// A member of etcd is healthy.
    MemberHealthy,
    /// A member is not healthy.
    MemberUnhealthy,
    /// The connection that checks a member's health was lost.
    MemberLost,
    /// An endpoint of etcd is used from now on; its source is in the details.
    EndpointAdded,
    /// An endpoint of etcd is used no more.
    EndpointRemoved,
    /// A reload has changed a flag.
    FlagChanged,
    /// The flags could not be reloaded.
    FlagsRefused,
    /// An operator has switched memory off.
    MemoryOff,
    /// An operator has switched memory on again.
    MemoryOn,
}

/// A change of state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StateChange {
    /// Time of the change; in JSON UTC, RFC 3339.
    #[serde(serialize_with = "in_seconds")]
    pub at: SystemTime,
    /// Kind of the change.
    pub kind: ChangeKind,
    /// Mirror, endpoint or flag; empty if it is the whole process.
    pub subject: String,
    /// Revision, reason or error; may be empty.
    pub details: String,
}

fn in_seconds<S: Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_seconds(*at))
}

/// The newest [`KEPT`] changes.
#[derive(Debug, Default)]
pub struct StateChanges(Mutex<VecDeque<StateChange>>);

impl StateChanges {
    /// Records a change that happens now. The oldest one makes room.
    pub fn record(&self, kind: ChangeKind, subject: impl Into<String>, details: impl Into<String>) {
        let mut details = details.into();
        if details.len() > MAX_DETAILS_BYTES {
            let end = (0..=MAX_DETAILS_BYTES)
                .rev()
                .find(|end| details.is_char_boundary(*end));
            details.truncate(end.unwrap_or(0));
        }
        let change = StateChange {
            at: SystemTime::now(),
            kind,
            subject: subject.into(),
            details,
        };
        let mut kept = self.0.lock();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(change);
    }

    /// The changes, the oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<StateChange> {
        self.0.lock().iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_changes_are_kept_with_bounded_details() {
        let changes = StateChanges::default();
        for n in 0..=KEPT {
            changes.record(ChangeKind::MirrorOutOfService, n.to_string(), "é".repeat(n * 10));
        }
        let kept = changes.list();
        assert_eq!(kept.len(), KEPT);
        assert_eq!(
            (kept[0].subject.as_str(), kept[KEPT - 1].subject.as_str()),
            ("1", "32")
        );
        assert_eq!(kept[0].details.len(), 20);
        assert_eq!(kept[KEPT - 1].details.len(), MAX_DETAILS_BYTES);
    }
}
