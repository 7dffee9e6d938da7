//! Bugs of reads.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "10-serve-another-identitys-answer",
        what: "a read is authorized as rangecache's own user, who may read every mirrored key",
        test: "--test end_to_end identities::responses_respect_permissions_while_they_change_3_7",
        shows: "permission denied",
        changes: &[Change {
            item: "answer_authorized",
            find: "caller: Some(&request.headers),",
            replace: "caller: None,",
        }],
    },
    Bug {
        name: "12-past-header-from-memory",
        what: "a read at a past revision is answered with the mirror's revision in its header, without a quorum check",
        test: "--test end_to_end past_revisions::past_read_has_a_header_at_or_above_every_acknowledged_write",
        shows: "after a write at",
        changes: &[Change {
            item: "required_proof",
            find: "
let is_reached = query.revision <= mirror_revision;
if query.serializable
",
            replace: "
let is_reached = query.revision <= mirror_revision;
if (query.serializable || query.revision > 0)
",
        }],
    },
    Bug {
        name: "37-answer-linearizable-reads-stale",
        what: "a linearizable read of the newest state is answered from the last view while no member answers",
        test: "--test end_to_end stale::linearizable_read_is_never_answered_stale",
        shows: "answered without etcd",
        changes: &[Change {
            item: "StaleRead::of",
            find: "
let may_be_stale = (query.serializable || query.revision > 0)
    && proxy.mirrors.serve_stale()
",
            replace: "let may_be_stale = proxy.mirrors.serve_stale()",
        }],
    },
    Bug {
        name: "58-answer-serializable-reads-while-memory-is-off",
        what: "a serializable read is still answered from memory after POST /forward-all",
        test: "--test end_to_end forward_all::reads_and_watches_go_to_etcd_while_memory_is_switched_off_3_7",
        shows: r#"left: .*"serializable""#,
        changes: &[Change {
            item: "decide",
            find: "if proxy.mirrors.forwards_all() {",
            replace: "if proxy.mirrors.forwards_all() && !query.serializable {",
        }],
    },
    Bug {
        name: "68-refuse-by-the-last-view",
        what: "while no member answers, a read at a revision that the last view knows to be compacted is refused",
        test: "--test end_to_end stale::compacted_revision_is_not_refused_without_etcd",
        shows: "refused without etcd",
        changes: &[Change {
            item: "StaleRead::answer",
            find: "
Ok(answer @ MemoryAnswer::Entries(..)) => Some(StaleAnswer { answer, age }),
// Only etcd refuses a read: another history may have the revision that the last view lacks.
Ok(MemoryAnswer::Refusal(..)) | Err(_) => None,
",
            replace: "
Ok(answer) => Some(StaleAnswer { answer, age }),
Err(_) => None,
",
        }],
    },
    Bug {
        name: "180-take-what-leaves-forward-for-their-checks",
        what: "a read of the key that checks read is taken for a check if a leaf has forwarded it",
        test: "--test end_to_end key_that_checks_read_is_answered_to_clients_of_a_leaf_as_by_etcd",
        shows: "rangecache-explain",
        changes: &[Change {
            item: "is_leaf_check",
            find: "
metadata.marks.check
    && metadata.is_of_rangecache
",
            replace: "metadata.is_of_rangecache",
        }],
    },
    Bug {
        name: "200-scan-without-a-pause",
        what: "a scan of memory does not yield, so that other calls wait for the whole of it",
        test: "--lib other_tasks_run_between_the_steps_of_a_scan",
        shows: "other_tasks_run_between_the_steps_of_a_scan .* FAILED",
        changes: &[Change {
            item: "scan_in_turns",
            find: "tokio::task::yield_now().await;",
            replace: "",
        }],
    },
    Bug {
        name: "201-keep-the-turn-of-a-scan",
        what: "a scan keeps its turn to its end, so that a short one of another client waits for all of it",
        test: "--lib short_scan_waits_for_a_part_of_a_long_one",
        shows: "the long one is in progress",
        changes: &[Change {
            item: "scan_in_turns",
            find: "slot = slot.renew(gate.account, gate.deadline).await?;",
            replace: "",
        }],
    },
    Bug {
        name: "202-leave-an-order-uncounted",
        what: "the memory of a sorted response counts while it is sorted, and not while it is unread",
        test: "--lib order_of_a_scan_counts_until_its_response_ends",
        shows: "order_of_a_scan_counts_until_its_response_ends .* FAILED",
        changes: &[Change {
            item: "scan_in_turns",
            find: "Selected::Answer(selection) => selection.order_bytes(),",
            replace: "Selected::Answer(_) => 0,",
        }],
    },
];
