//! Bugs of proofs that a history continues.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "09-ignore-cluster-id",
        what: "another cluster is accepted as the known one",
        test: "--lib freshness::tests::lower_revision_or_term_or_another_cluster_is_reported_as_replaced_history",
        shows: "HistoryReplaced",
        changes: &[Change {
            item: "Before::continues_with",
            find: "let is_same_cluster = self.history.note_cluster(header.cluster_id);",
            replace: "let is_same_cluster = self.history.note_cluster(header.cluster_id) || header.cluster_id > 0;",
        }],
    },
    Bug {
        name: "14-check-raises-no-minimum",
        what: "a quorum check covers unreadable responses, but later serializable reads may be older than its revision",
        test: "--lib lineage::cluster_state::tests::check_that_covers_an_unreadable_response_raises_the_minimum_to_its_revision",
        shows: "the response may have shown revision 12",
        changes: &[Change {
            item: "ClusterState::after_check",
            find: "history.note_shown(header.revision);",
            replace: "",
        }],
    },
    Bug {
        name: "39-age-from-the-arrival-of-a-check",
        what: "the age of a view counts from the arrival of the check that proves it, not from when the check was sent",
        test: "--test end_to_end bounds::bounded_read_is_never_older_than_asked_3_7",
        shows: "older than asked",
        changes: &[Change {
            item: "ClusterState::after_check",
            find: "history.note_proof(before.began(), header.revision);",
            replace: "history.note_proof(Instant::now().max(before.began()), header.revision);",
        }],
    },
    Bug {
        name: "40-age-of-another-revision",
        what: "the age of a view is that of the last check, whatever revision it proved",
        test: "--test end_to_end bounds::bounded_read_is_never_older_than_asked_3_7",
        shows: "older than asked",
        changes: &[Change {
            item: "Proofs::of",
            find: ".find(|(_, proven)| *proven <= revision)",
            replace: ".find(|(_, proven)| *proven <= revision || revision > 0)",
        }],
    },
    Bug {
        name: "104-keep-the-first-leader",
        what: "the leader in the header of memory is that of the first check",
        test: "--lib lineage::cluster_state::tests::identity_follows_the_leader",
        shows: r"left: Some\(7\)",
        changes: &[Change {
            item: "History::note_identity",
            find: "
let revision = identity.revision;
**identity == ResponseHeader { revision, ..header }
",
            replace: "
let (revision, leader_id) = (identity.revision, identity.leader_id);
**identity == ResponseHeader { revision, leader_id, ..header }
",
        }],
    },
    Bug {
        name: "105-compare-the-number-of-keys-alone",
        what: "keys that etcd has to hold are compared by their number alone",
        test: "--test simulation loaded_mirror_rolled_back_below_its_load_is_not_served",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "KeyRun::is_same",
            find: "
&& theirs.kvs.len() == self.newest.len()
&& self.newest.iter().zip(&theirs.kvs).all(same)
",
            replace: "&& (self.newest.iter().zip(&theirs.kvs).all(same) || !theirs.kvs.is_empty())",
        }],
    },
    Bug {
        name: "107-accept-any-position",
        what: "a load or feed begins on any member, whatever its revision and raft log",
        test: "--lib history_continues_in_the_same_cluster",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Position::continues",
            find: "self.holds_compaction && before.continues_with(&self.header, self.raft_index)",
            replace: "before.continues_with(&self.header, self.raft_index) || self.header.revision > 0",
        }],
    },
    Bug {
        name: "108-accept-a-write-at-a-known-revision",
        what: "a write that got a revision which was known before proves no other history",
        test: "--lib write_at_a_revision_that_was_known_before_replaces_the_history",
        shows: "panicked",
        changes: &[Change {
            item: "Before::write_continues",
            find: "revision == 0 || revision >= lowest ||",
            replace: "revision >= 0 || revision >= lowest ||",
        }],
    },
];
