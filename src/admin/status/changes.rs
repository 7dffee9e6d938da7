//! Newest changes of state.

use serde::{Serialize, Serializer};

use crate::admin::handles::Handles;
use rangecache_base::telemetry::state_changes::{ChangeKind, StateChange};

/// A change of state.
#[derive(Debug, Serialize)]
pub(crate) struct ChangeStatus {
    /// UTC, RFC 3339.
    pub(crate) at: String,
    #[serde(serialize_with = "name")]
    pub(crate) kind: ChangeKind,
    /// Mirror, endpoint or flag; empty if it is the whole process.
    pub(crate) subject: String,
    /// Revision, reason, values of the flag or error; may be empty.
    pub(crate) details: String,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn name<S: Serializer>(kind: &ChangeKind, serializer: S) -> Result<S::Ok, S::Error> {
    kind.as_str().serialize(serializer)
}

/// Changes of mirrors, members, flags and memory, the newest first.
pub(super) fn changes(handles: &Handles) -> Vec<ChangeStatus> {
    newest_first(
        handles.telemetry.state_changes.list(),
        handles.upstream.state_changes(),
    )
}

fn newest_first(of_process: Vec<StateChange>, of_members: Vec<StateChange>) -> Vec<ChangeStatus> {
    let mut all = of_process;
    all.extend(of_members);
    all.sort_by_key(|change| std::cmp::Reverse(change.at));
    let changes = all.into_iter().map(|change| ChangeStatus {
        at: humantime::format_rfc3339_seconds(change.at).to_string(),
        kind: change.kind,
        subject: change.subject,
        details: change.details,
    });
    changes.collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn changes_of_both_lists_are_in_one_the_newest_first() {
        let change = |seconds, subject: &str| StateChange {
            at: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
            kind: ChangeKind::MemberLost,
            subject: subject.to_owned(),
            details: String::new(),
        };
        let all = newest_first(vec![change(1, "a"), change(3, "c")], vec![change(2, "b")]);
        let subjects: Vec<_> = all.iter().map(|change| change.subject.as_str()).collect();
        assert_eq!(subjects, ["c", "b", "a"]);
        assert_eq!(all[0].at, "1970-01-01T00:00:03Z");
        assert_eq!(serde_json::to_value(&all[0]).unwrap()["kind"], "member_lost");
    }
}
