//! Bugs of proofs of freshness.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "01-skip-the-check",
        what: "a read uses the proof of the last quorum check",
        test: "--test end_to_end never_stale::reads_of_the_whole_keyspace_are_never_stale",
        shows: "stale by its|header at|states|the sum of 0 accounts|required revision is a future revision",
        changes: &[Change {
            item: "Freshness::prove_at",
            find: ") -> Result<Proof, Unproven> {",
            replace: "
) -> Result<Proof, Unproven> {
    if let Some(header) = self.cluster_state.identity() {
        let history = self.cluster_state.history();
        let (at, now) = (revision.max(0), Instant::now());
        let (sent, connection_opened) = (now, now);
        return Ok(Proof { header: *header, history, at, sent, connection_opened });
    }
",
        }],
    },
    Bug {
        name: "02-join-a-check-in-flight",
        what: "a read joins the quorum check that is in flight when it arrives",
        test: "--lib freshness::tests::read_during_a_check_in_flight_gets_the_next_check",
        shows: "panicked at",
        changes: &[
            Change {
                item: "Freshness::send_if_due",
                find: "let Some(round) = rounds.gathering.take() else {",
                replace: "let Some(round) = rounds.gathering.clone() else {",
            },
            Change {
                item: "Freshness::finish",
                find: "let mut rounds = self.rounds.lock();",
                replace: "
let mut rounds = self.rounds.lock();
rounds.gathering = None;
",
            },
        ],
    },
    Bug {
        name: "13-compaction-of-others",
        what: "a quorum check for reads at a past revision reads the newest state, so that compactions by others are not seen",
        test: "--test end_to_end past_revisions::compaction_by_another_client_ends_past_reads_at_once",
        shows: "sidecar [0-9], way [0-9]: Ok",
        changes: &[
            Change {
                item: "Freshness::checkable",
                find: "let is_past = revision >= self.cluster_state.compacted() && revision <= self.cluster_state.known();",
                replace: "let is_past = revision < 0;",
            },
            Change {
                item: "Freshness::settle",
                find: "Ok(proof) if proof.at > 0 && proof.at <= revision => Some(Ok(proof)),",
                replace: "Ok(proof) if proof.at <= revision => Some(Ok(proof)),",
            },
        ],
    },
    Bug {
        name: "110-serve-buffered-pages-by-any-check",
        what: "pages that were buffered are served by a check on any connection",
        test: "--lib check_covers_what_one_of_the_two_connections_has_seen_as_well",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Proof::covers",
            find: "
if self.sent >= began {
    self.connection_opened <= began
} else {
    opened <= self.sent
}
",
            replace: "self.sent >= began || opened <= self.sent",
        }],
    },
    Bug {
        name: "113-first-check-by-the-raft-log-alone",
        what: "the first check on a connection proves a history by the raft log alone",
        test: "--test simulation mirror_whose_feed_is_half_open_is_not_served_after_a_rollback_to_its_revision",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Freshness::history_continues",
            find: "if connection.is_of_history(history.number(), lineage) {",
            replace: "
if connection.is_of_history(history.number(), lineage)
    || history.number() < u64::MAX
{
    connection.set_history(history.number(), Lineage::Member);
",
        }],
    },
    Bug {
        name: "163-accept-a-hub-without-proof",
        what: "a check is accepted that a hub has only forwarded",
        test: "-p rangecache --test end_to_end what_a_hub_cannot_prove_is_not_answered_by_its_leaf",
        shows: "panicked at",
        changes: &[Change {
            item: "Freshness::attempt",
            find: "let lineage = checked.lineage.filter(|of| !lacks_log || *of != Lineage::Member);",
            replace: "let lineage = checked.lineage.or((!lacks_log).then_some(Lineage::Member));",
        }],
    },
];
