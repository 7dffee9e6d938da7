//! Why memory did not answer, in words for whoever runs rangecache, and what to do about it.

use crate::telemetry::outcome::Read;
use crate::telemetry::{Outcome, Reason};

/// A cause in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Advice {
    /// A few words for it.
    pub(super) title: &'static str,
    /// What it means.
    pub(super) meaning: &'static str,
    /// What to do; empty where nothing need or can be done.
    pub(super) remedy: &'static str,
}

/// Who answered, as charts show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    /// Memory, at once.
    Memory,
    /// Memory, after waiting for the mirror to catch up.
    Waited,
    /// etcd.
    Etcd,
    /// Nobody.
    Nobody,
}

impl Group {
    /// All, as they are stacked from below.
    pub(super) const ALL: [Group; 4] = [Group::Memory, Group::Waited, Group::Etcd, Group::Nobody];

    pub(super) fn of(outcome: Outcome) -> Group {
        match outcome {
            Outcome::Hit(_) => Group::Memory,
            Outcome::Waited(_) => Group::Waited,
            Outcome::Streamed(_) | Outcome::Forwarded(_) | Outcome::Paged(_) => Group::Etcd,
            Outcome::Shed(_) | Outcome::Cancelled(_) => Group::Nobody,
        }
    }

    /// For legends.
    pub(super) fn title(self) -> &'static str {
        match self {
            Group::Memory => "from memory",
            Group::Waited => "from memory, after a wait",
            Group::Etcd => "by etcd",
            Group::Nobody => "refused or gone",
        }
    }

    /// In class names, and in the status.
    pub(super) fn name(self) -> &'static str {
        match self {
            Group::Memory => "memory",
            Group::Waited => "waited",
            Group::Etcd => "etcd",
            Group::Nobody => "nobody",
        }
    }
}

/// How it ended, in words.
pub(super) fn ending(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Hit(_) => "answered from memory",
        Outcome::Waited(_) => "answered from memory, after a wait",
        Outcome::Streamed(_) => "answered by etcd, as a stream",
        Outcome::Forwarded(_) => "answered by etcd",
        Outcome::Paged(_) => "answered by etcd, in pages",
        Outcome::Shed(_) => "refused; the client may try again",
        Outcome::Cancelled(_) => "not answered",
    }
}

/// Why it ended like that.
pub(super) fn of(outcome: Outcome) -> Advice {
    match outcome {
        Outcome::Hit(read) | Outcome::Waited(read) => of_read(read),
        Outcome::Streamed(reason)
        | Outcome::Forwarded(reason)
        | Outcome::Paged(reason)
        | Outcome::Shed(reason)
        | Outcome::Cancelled(reason) => of_reason(reason),
    }
}

fn of_read(read: Read) -> Advice {
    let (title, meaning) = match read {
        Read::Linearizable => ("linearizable", "Proven to be up to date by a quorum check."),
        Read::Serializable => (
            "serializable",
            "Not older than anything that was shown before; needs no quorum check.",
        ),
        Read::Pinned => ("at a past revision", "At a revision that the caller chose."),
        Read::Refused => ("refused as etcd would", "An error, in etcd's own words."),
    };
    Advice {
        title,
        meaning,
        remedy: "",
    }
}

/// Why memory had no answer.
pub(super) fn of_reason(reason: Reason) -> Advice {
    let (title, meaning, remedy) = match reason {
        Reason::NotMirrored => (
            "not mirrored",
            "The range is not, or not wholly, inside one mirror.",
            "If such keys are read often, mirror them: add their prefix to --cache-prefix, or take it out of \
             --no-cache-prefix. A range over two prefixes needs one mirror that holds both.",
        ),
        Reason::Loading => (
            "loading",
            "The mirror is being loaded from etcd.",
            "Wait. If it begins again and again, the log says why loads fail.",
        ),
        Reason::FeedLost => (
            "watch lost",
            "The mirror's watch on etcd broke and is being made again; it goes on where it was.",
            "Nothing if it was once. If it repeats, look at etcd's members and at the network.",
        ),
        Reason::OverBudget => (
            "too large for its memory",
            "The mirror does not fit into --cache-max-bytes and has stepped aside. It comes back by itself once it fits.",
            "Raise --cache-max-bytes, and the memory limit with it; or mirror less with --cache-prefix or \
             --no-cache-prefix.",
        ),
        Reason::VersionGate => (
            "etcd is too old",
            "This etcd's progress notifications cannot be trusted, so that linearizable reads cannot be proven.",
            "Upgrade every member to 3.4.31, 3.5.13, 3.6.0 or later.",
        ),
        Reason::VersionUnknown => (
            "version not known",
            "No member has told its version yet.",
            "If it lasts, see whether members answer: etcdctl endpoint status. A proxy in between must let \
             Maintenance.Status through.",
        ),
        Reason::Auth => (
            "auth",
            "etcd's auth is on (or not known to be off), and rangecache has no user of its own, or etcd does not let the \
             caller read the range.",
            "Give rangecache a user that may read what is mirrored (--user). If it has one, look at the roles of \
             the callers.",
        ),
        Reason::CheckFailed => (
            "quorum check failed",
            "etcd did not confirm its revision, so that nothing could be proven.",
            "Look at etcd's quorum: etcdctl endpoint status --cluster.",
        ),
        Reason::NotFresh => (
            "mirror too late",
            "The mirror did not reach the proven revision within --freshness-timeout.",
            "Look at how far the mirrors are behind, and whether rangecache has enough CPU. A slow member of etcd \
             has the same effect.",
        ),
        Reason::HistoryGone => (
            "older than the history",
            "The revision that was asked for is older than what is kept; etcd may still have it.",
            "If clients read that far back, raise --history-max-age or --history-max-bytes.",
        ),
        Reason::HistoryReplaced => (
            "etcd was restored",
            "etcd's history was replaced, and the mirror is being loaded anew.",
            "Nothing if etcd was restored from a backup on purpose. Otherwise see which cluster --endpoints names.",
        ),
        Reason::Mismatch => (
            "differed from etcd",
            "Verification found that the mirror differed from etcd; it is being loaded anew.",
            "Compare the members (etcdctl endpoint hashkv --cluster). If they agree with each other, please report \
             a bug in rangecache.",
        ),
        Reason::Panicked => (
            "a bug",
            "The mirror's task panicked; the mirror is being loaded anew.",
            "Please report it, with the place that the log names.",
        ),
        Reason::SortTies => (
            "order of equals",
            "Sorted by something that several keys have in common: their order among each other is etcd's alone.",
            "",
        ),
        Reason::Undecodable => (
            "not understood",
            "The request has a field, a size or an encoding that rangecache does not know.",
            "If a client compresses its requests, turn that off. A newer etcd may have new fields: see whether \
             there is a newer rangecache.",
        ),
        Reason::RequireLeader => (
            "asks for a member with a leader",
            "A serializable read that needs a member with a leader: only etcd can tell.",
            "",
        ),
        Reason::BrokenRequest => (
            "request broke off",
            "The request ended before its message was whole.",
            "If it repeats, look at the client and at the network.",
        ),
        Reason::Deadline => (
            "caller's timeout",
            "The caller's own timeout passed.",
            "Look at the slowest calls, and at etcd if they waited for it.",
        ),
        Reason::Gone => (
            "caller went away",
            "The caller cancelled, or its connection ended, before there was an answer.",
            "",
        ),
        Reason::TooManyWaiting => (
            "too many wait for etcd",
            "Memory could not answer, and --forward-max-waiting large reads waited for etcd already.",
            "Find out why memory cannot answer. If etcd has room, raise --forward-max-large and \
             --forward-max-waiting.",
        ),
        Reason::TooManyCalls => (
            "too many calls",
            "--max-calls calls were under way.",
            "Find the client that has so many, or raise --max-calls.",
        ),
        Reason::SharedBytes => (
            "no memory for shared answers",
            "Answers that identical reads share would take more than --forward-shared-max-bytes.",
            "Find out why memory cannot answer, or raise --forward-shared-max-bytes.",
        ),
        Reason::Bypass => (
            "asked to",
            "The caller asked to read around the cache (rangecache-bypass).",
            "",
        ),
    };
    Advice {
        title,
        meaning,
        remedy,
    }
}
