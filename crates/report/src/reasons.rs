//! Outcomes and reasons of reads in words for operators, and what to do about them.

use super::ids::named;
use rangecache_base::telemetry::outcome::{Failure, Read};
use rangecache_base::telemetry::{Outcome, Reason};

/// Reason of an outcome in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// A few words.
    pub title: &'static str,
    /// Whole sentences.
    pub meaning: &'static str,
    /// Remedy; empty if no action is needed or possible.
    pub remedy: &'static str,
}

named! {
    /// Outcome of a read, as charts show it; in the order in which they stack it from below. Names are those of classes and of JSON.
    pub enum OutcomeClass {
        /// Memory, without waiting for the mirror.
        Memory = "memory",
        /// Memory, after waiting for the mirror to catch up.
        Waited = "waited",
        /// etcd.
        Etcd = "etcd",
        /// There was no response: etcd could not be reached, or did not complete it.
        Failed = "failed",
        /// There was no response: the read was refused or cancelled.
        Unanswered = "unanswered",
    }
}

impl OutcomeClass {
    /// Class of this outcome.
    #[must_use]
    pub fn from_outcome(outcome: Outcome) -> OutcomeClass {
        match outcome {
            Outcome::Hit(_) => OutcomeClass::Memory,
            Outcome::Waited(_) => OutcomeClass::Waited,
            Outcome::Streamed(_) | Outcome::Forwarded(_) | Outcome::Paged(_) => OutcomeClass::Etcd,
            Outcome::Failed(_) => OutcomeClass::Failed,
            Outcome::Shed(_) | Outcome::Cancelled(_) => OutcomeClass::Unanswered,
        }
    }

    /// Text in legends.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            OutcomeClass::Memory => "from memory",
            OutcomeClass::Waited => "from memory, after a wait",
            OutcomeClass::Etcd => "by etcd",
            OutcomeClass::Failed => "failed",
            OutcomeClass::Unanswered => "refused or cancelled",
        }
    }
}

/// Describes in words how a read ended.
#[must_use]
pub fn describe_outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Hit(_) => "answered from memory",
        Outcome::Waited(_) => "answered from memory, after a wait",
        Outcome::Streamed(_) => "answered by etcd, as a stream",
        Outcome::Forwarded(_) => "answered by etcd",
        Outcome::Paged(_) => "answered by etcd, in pages",
        Outcome::Failed(_) => "failed without etcd's response; the client may retry",
        Outcome::Shed(_) => "refused; the client may retry",
        Outcome::Cancelled(_) => "not answered",
    }
}

/// Why a read ended with this outcome.
#[must_use]
pub fn explain(outcome: Outcome) -> Explanation {
    match outcome {
        Outcome::Hit(read) | Outcome::Waited(read) => explain_read(read),
        Outcome::Streamed(reason)
        | Outcome::Forwarded(reason)
        | Outcome::Paged(reason)
        | Outcome::Shed(reason)
        | Outcome::Cancelled(reason) => explain_reason(reason),
        Outcome::Failed(failure) => explain_failure(failure),
    }
}

/// Declares how the variants of an enum are explained: title, meaning and remedy, which is empty if no action is needed or possible.
macro_rules! explanations {
    ($(#[$doc:meta])* $visible:vis fn $name:ident($of:ident); $($variant:ident: $title:literal, $meaning:literal, $remedy:literal;)+) => {
        $(#[$doc])*
        $visible fn $name(of: $of) -> Explanation {
            let (title, meaning, remedy) = match of { $($of::$variant => ($title, $meaning, $remedy),)+ };
            Explanation { title, meaning, remedy }
        }
    };
}

explanations! {
    fn explain_failure(Failure);
    NoEndpoint: "no member connected",
        "No endpoint was connected within --connect-timeout.",
        "Check whether etcd's members run and can be reached from here; each endpoint has its error.";
    ConnectionLost: "connection to etcd lost",
        "The connection broke before the response began, and no other endpoint answered in time.",
        "Nothing if a member was restarted. If it repeats, check etcd's members and the network.";
    StreamReset: "stream reset by etcd",
        "etcd reset the stream of a call that several reads share.",
        "See etcd's log.";
    SharedCall: "shared call ended",
        "The call that several reads share ended without a result.",
        "Nothing if rangecache was stopping. Otherwise see its log.";
    Deadline: "client's timeout",
        "The client's own timeout passed before etcd's response.",
        "Check the endpoints, and etcd's latencies; the timeout may be shorter than they are.";
    UnusableResponse: "response not usable",
        "etcd's response could not be decoded, or the pages of one stream came from different histories.",
        "Nothing after a restore. Otherwise compare the versions of etcd and rangecache.";
}

explanations! {
    fn explain_read(Read);
    Linearizable: "linearizable",
        "A quorum check proved that memory was up to date.", "";
    Serializable: "serializable",
        "Not older than any earlier response; needs no quorum check.", "";
    Pinned: "at a past revision",
        "At a revision that the client chose.", "";
    Bounded: "within the caller's bounds",
        "Proven by an earlier quorum check, which the caller's metadata permits.", "";
    Stale: "stale",
        "From the last view, because no member of etcd answered (--serve-stale).", "";
    Refused: "refused like etcd",
        "An error with etcd's own message.", "";
}

explanations! {
    /// Why memory could not answer.
    #[must_use]
    pub fn explain_reason(Reason);
    NotMirrored: "not mirrored",
        "The range is not inside one mirror, or only in part.",
        "If such keys are read often, mirror them: add their prefix to --cache-prefix, or remove it from \
         --no-cache-prefix. A range over two prefixes needs one mirror that holds both.";
    Loading: "loading",
        "The mirror is being loaded from etcd.",
        "Wait. If loading starts again and again, the log says why loads fail.";
    FeedLost: "watch lost",
        "The mirror's watch on etcd broke and is being re-established; it resumes where it broke.",
        "Nothing if this happened once. If it repeats, check etcd's members and the network.";
    OverBudget: "too large for its memory",
        "The keys of the mirror do not fit into --cache-max-bytes, or with --cache-pack=never its values: it is disabled (over \
         budget). It is loaded again once it fits.",
        "Raise --cache-max-bytes, and the memory limit with it; or mirror less with --cache-prefix or \
         --no-cache-prefix.";
    VersionGate: "etcd is too old",
        "This etcd's progress notifications cannot be trusted, so linearizable reads cannot be proven.",
        "Upgrade every member to 3.4.31, 3.5.13, 3.6.0 or later.";
    VersionUnknown: "version not known",
        "No member has reported its version yet, or the server is not etcd.",
        "If this lasts, check whether members respond: etcdctl endpoint status. A proxy in front of etcd must let \
         Maintenance.Status through. A server without a cluster id, such as Kine, is not etcd: remove rangecache there.";
    Auth: "auth",
        "etcd's auth is on (or not known to be off), and rangecache has no user of its own, or etcd does not permit the \
         client to read the range, or the client has no token and etcd would take it for the user of --cert.",
        "Give rangecache a user that may read what is mirrored (--user). If it has one, check the roles of the clients.";
    CheckFailed: "quorum check failed",
        "etcd did not confirm its revision, so nothing could be proven.",
        "Check etcd's quorum: etcdctl endpoint status --cluster.";
    NotFresh: "mirror too late",
        "The mirror did not reach the proven revision within --freshness-timeout.",
        "Check how far the mirrors are behind, and whether rangecache has enough CPU. A slow member of etcd has the same \
         effect.";
    HistoryGone: "older than the history",
        "The requested revision is older than the kept history; etcd may still have it.",
        "If clients read that far back, raise --history-max-age or --history-max-bytes.";
    HistoryReplaced: "etcd was restored",
        "etcd's history was replaced, and the mirror is being loaded again.",
        "Nothing if etcd was restored from a backup on purpose. Otherwise check which cluster --endpoints names.";
    Mismatch: "differed from etcd",
        "Verification found that the mirror differed from etcd; it is being loaded again.",
        "Compare the members (etcdctl endpoint hashkv --cluster). If they agree with each other, please report a bug in \
         rangecache.";
    Panicked: "a bug",
        "The mirror's task panicked; the mirror is being loaded again.",
        "Please report it with the source location in the log.";
    Damaged: "memory was damaged",
        "A packed value (--cache-pack) did not have its checksum; the mirror is being loaded again.",
        "If this repeats, the memory of the machine is faulty: move the workload, and test it.";
    PackedValues: "order of packed values",
        "The sort order is that of the values, and some of them are packed (--cache-pack).",
        "If such reads are frequent, set --cache-pack=never.";
    ValuesNotHeld: "values not held",
        "Memory is too scarce for all values: those of the prefixes that cost most are only in etcd. Counts, keys and \
         watches are still served from memory.",
        "Raise --cache-max-bytes and the memory limit, or leave out prefixes that are rarely read (--no-cache-prefix).";
    SortTies: "order of equal keys",
        "The sort order has equal values, and their order among each other is defined by etcd alone.", "";
    Undecodable: "not understood",
        "The request has a field, a size or an encoding that rangecache does not know.",
        "If a client compresses its requests, turn that off. A newer etcd may have new fields: check for a newer \
         rangecache.";
    BehindHub: "for the hub to answer",
        "The read has credentials, and the endpoint is another rangecache: that one has etcd authorize the caller, and \
         answers from its own memory.", "";
    RequireLeader: "needs a member with a leader",
        "A serializable read that requires a member with a leader: only etcd can decide that.", "";
    BrokenRequest: "incomplete request",
        "The request ended before its message was complete.",
        "If this repeats, check the client and the network.";
    Deadline: "client's timeout",
        "The client's own timeout passed while the call waited for its client's others.",
        "See /clients.";
    Gone: "cancelled by the client",
        "The client cancelled, or its connection was closed, before there was a response.", "";
    TooManyWaiting: "too many reads waiting",
        "Memory could not answer, and --forward-max-waiting reads were already waiting for etcd, or etcd did not get to \
         the read in 30 s. Or too many filtered and sorted reads waited for memory (rangecache_scans_waiting).",
        "Find out why memory cannot answer, or which client sorts and filters. If etcd has capacity, raise --forward-max-large, --forward-max-small and \
         --forward-max-waiting.";
    TooManyCalls: "too many calls",
        "--max-calls calls were in flight.",
        "Find the client that makes so many, or raise --max-calls.";
    BufferBytes: "no memory for buffers",
        "Requests and responses in flight would take more than --buffer-max-bytes, or more than one connection may take of it.",
        "Find the client that does not read its responses or complete its requests, or raise --buffer-max-bytes.";
    ForwardAll: "memory switched off",
        "An operator has sent POST /forward-all: etcd answers everything.",
        "rangecache ctl use-memory (DELETE /forward-all) lets memory answer again.";
    Bypass: "bypass requested",
        "The client requested to read from etcd (rangecache-bypass).", "";
}

#[cfg(test)]
mod tests {
    use super::*;
    use rangecache_upstream::gates::PROGRESS_NOTIFICATIONS;

    #[test]
    fn version_gate_names_the_versions_of_the_gate() {
        let remedy = explain_reason(Reason::VersionGate).remedy;
        assert!(
            remedy.contains(&PROGRESS_NOTIFICATIONS.versions().to_string()),
            "{remedy}"
        );
    }

    #[test]
    fn every_reason_has_a_title_and_a_meaning_of_its_own() {
        let mut titles: Vec<_> = Reason::ALL
            .iter()
            .map(|reason| explain_reason(*reason).title)
            .collect();
        titles.sort_unstable();
        titles.dedup();
        assert_eq!(titles.len(), Reason::ALL.len());
        for reason in Reason::ALL {
            assert!(explain_reason(*reason).meaning.ends_with('.'), "{reason:?}");
        }
    }
}
