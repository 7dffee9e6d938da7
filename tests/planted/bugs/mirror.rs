//! Bugs of mirrors: views, sets, packing, verification, lifecycle.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "11-share-the-connection-of-a-feed",
        what: "feeds share the connections of clients' calls",
        test: "--test end_to_end feeds::feeds_have_connections_that_carry_nothing_else",
        shows: "connections whose first message opened a feed",
        changes: &[Change {
            item: "follow",
            find: ".dedicated(ReceiveWindow::DEDICATED, last.as_ref(), deadline)",
            replace: ".connection(rangecache_upstream::ConnectionClass::Stream, deadline)",
        }],
    },
    Bug {
        name: "38-stale-view-of-a-replaced-history",
        what: "the last view is served again after another history may have answered a client",
        test: "--lib view_is_passed_by_a_later_revision_and_by_an_answer_on_a_newer_connection",
        shows: "answered on a newer connection: true",
        changes: &[Change {
            item: "has_not_been_passed",
            find: "shown.is_some_and(|shown| shown <= revision) && answered_by <= proven_at",
            replace: "shown.is_some_and(|shown| shown <= revision)",
        }],
    },
    Bug {
        name: "59-leave-watches-with-a-removed-mirror",
        what: "a mirror that a reload removes keeps its watches, which get no more events",
        test: "--test end_to_end reload::mirrors_are_added_and_removed_while_others_serve_3_7",
        shows: "no message on the stream",
        changes: &[Change {
            item: "remove",
            find: "let _ = mirror.end_epoch(mirror.epoch(), Reason::NotMirrored);",
            replace: "",
        }],
    },
    Bug {
        name: "111-verify-by-another-cluster",
        what: "verification compares with whatever cluster answers",
        test: "--lib response_of_another_cluster_shows_no_difference",
        shows: "panicked",
        changes: &[Change {
            item: "check_cluster",
            find: "if history.may_be_of_cluster(cluster_id) {",
            replace: "if history.may_be_of_cluster(cluster_id) || cluster_id > 0 {",
        }],
    },
    Bug {
        name: "116-continue-watchers-of-removed-mirrors",
        what: "watchers of a removed mirror continue on any connection",
        test: "--test simulation watcher_of_a_mirror_that_is_removed_without_a_feed_does_not_continue_after_a_rollback",
        shows: "panicked",
        changes: &[Change {
            item: "MirrorSlot::opened_by",
            find: "self.removed.get().copied()",
            replace: "self.removed.get().copied().filter(|at| at.elapsed().is_zero())",
        }],
    },
    Bug {
        name: "135-packing-puts-in-service",
        what: "packing puts a mirror in service that has lost its feed",
        test: "--lib view_of_a_mirror_without_its_feed_is_packed_too_and_it_stays_out_of_service",
        shows: "view_of_a_mirror_without_its_feed_is_packed_too_and_it_stays_out_of_service .* FAILED",
        changes: &[Change {
            item: "Mirror::put_repacked",
            find: "
State::Out { reason, last } => last.as_ref().map(|view| State::Out {
    reason: *reason,
    last: Some(with_tree(view)),
}),
",
            replace: "State::Out { last, .. } => last.as_ref().map(|view| State::In(with_tree(view))),",
        }],
    },
    Bug {
        name: "136-give-up-before-packing",
        what: "a mirror that has outgrown its budget is disabled before it was packed",
        test: "--lib feed_makes_room_at_once_and_only_with_what_can_be_packed",
        shows: "feed_makes_room_at_once_and_only_with_what_can_be_packed .* FAILED",
        changes: &[Change {
            item: "make_room",
            find: "if set.live.load().cache_pack == CachePack::Never {",
            replace: "if set.live.load().cache_pack != CachePack::Always {",
        }],
    },
    Bug {
        name: "141-apply-without-the-replaced-value",
        what: "an event is applied without the value that it replaces, for which the feed did not ask",
        test: "--lib feed_asks_for_replaced_values_once_one_is_not_held",
        shows: "feed_asks_for_replaced_values_once_one_is_not_held .* FAILED",
        changes: &[Change {
            item: "Store::check_replaced",
            find: "None if !are_brought => return Err(NotApplied::NotBrought),",
            replace: "None if false && !are_brought => return Err(NotApplied::NotBrought),",
        }],
    },
    Bug {
        name: "143-leave-out-what-is-read",
        what: "values are left out of the largest prefix, however often it is read",
        test: "--lib prefix_that_is_read_keeps_its_values",
        shows: "prefix_that_is_read_keeps_its_values .* FAILED",
        changes: &[Change {
            item: "cost",
            find: "bytes / reads.saturating_add(1)",
            replace: "bytes / reads.clamp(1, 1)",
        }],
    },
    Bug {
        name: "178-watch-continues-under-a-number-of-another-mirror",
        what: "a watch continues under a number of a hub under which the contents of another mirror were found",
        test: "--test simulation load_of_before_a_rollback_is_not_continued_behind_a_hub",
        shows: r"left: \(true, true\)",
        changes: &[Change {
            item: "WatchedLoads::were_found_in",
            find: "
let slot = set.get(*position);
slot.is_some_and(|slot| slot.mirror.was_found_in(*generation, lineage))
",
            replace: "
let mut slots = set.every().filter(|_| *position < usize::MAX);
slots.any(|slot| slot.mirror.was_found_in(*generation, lineage))
",
        }],
    },
    Bug {
        name: "179-continue-a-watch-by-a-later-load",
        what: "a watch continues under a number of a hub under which a later load of its mirror was found",
        test: "--lib view::state::service::tests::contents_of_a_load_are_found_in_lineages_of_that_load_alone",
        shows: "panicked at",
        changes: &[Change {
            item: "Mirror::was_found_in",
            find: "(Some(loaded), _) if contents.generation == generation => loaded.found_under.contains(lineage),",
            replace: "(Some(loaded), _) if contents.generation >= generation => loaded.found_under.contains(lineage),",
        }],
    },
    Bug {
        name: "185-accept-an-open-connection",
        what: "the raft log behind an open connection is not compared again",
        test: "-p rangecache-mirror --lib other_raft_log_behind_an_open_connection_is_found_at_no_lower_revision",
        shows: "Elapsed",
        changes: &[Change {
            item: "MemberLogs::may_continue",
            find: "log.is_none_or(|log| log.before.log_continues(log.revision, status.raft_index))",
            replace: "log.is_none_or(|log| log.revision > 0 || log.before.log_continues(log.revision, status.raft_index))",
        }],
    },
    Bug {
        name: "196-take-most-of-a-machine",
        what: "without a memory limit mirrors take three quarters of the machine",
        test: "-p rangecache-mirror --lib cache_takes_three_quarters_of_a_limit_and_a_quarter_of_a_machine",
        shows: "panicked at",
        changes: &[Change {
            item: "default_cache_bytes",
            find: "MemoryLimit::Machine(bytes) => bytes / 4,",
            replace: "MemoryLimit::Machine(bytes) => bytes / 4 * 3,",
        }],
    },
    Bug {
        name: "203-hold-any-past-revision",
        what: "readers may hold any number of rebuilt past revisions",
        test: "-p rangecache-mirror --lib readers_of_many_past_revisions_hold_bounded_memory",
        shows: "states are held",
        changes: &[Change {
            item: "PastRevisions::get_or_build",
            find: "if !self.cache.contains_key(&revision) && self.held_bytes() > self.max_held_bytes {",
            replace: "if self.held_bytes() > u64::MAX / 2 && self.max_held_bytes == 0 {",
        }],
    },
];
