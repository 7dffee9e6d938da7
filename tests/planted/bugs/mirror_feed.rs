//! Bugs of feeds.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "03-trust-progress-too-early",
        what: "progress is trusted in the middle of a fragmented revision",
        test: "--lib feed::assemble::tests::progress_between_fragments_does_not_advance_the_revision",
        shows: "advance to 12",
        changes: &[Change {
            item: "Assembler::add",
            find: "if response.events.is_empty() && !response.fragment && !self.fragment_is_open {",
            replace: "if response.events.is_empty() && !response.fragment {",
        }],
    },
    Bug {
        name: "04-use-the-header-revision",
        what: "events advance the mirror to the revision of their header",
        test: "--lib feed::assemble::tests::last_event_advances_the_revision_and_the_header_does_not",
        shows: "up to 99",
        changes: &[Change {
            item: "Assembler::add",
            find: "match changes.last().map(Change::revision) {",
            replace: "match response.header.as_ref().map(|header| header.revision) {",
        }],
    },
    Bug {
        name: "05-split-a-transaction",
        what: "a fragment of a revision is shown before the last fragment has arrived",
        test: "--test end_to_end never_stale::revision_of_many_events_is_seen_whole",
        shows: "of 3000 keys",
        changes: &[Change {
            item: "Assembler::add",
            find: "
if self.fragment_is_open {
    if self.open_bytes > self.max_bytes {
        return Err(Unusable::TooLong {
            max_bytes: self.max_bytes,
        });
    }
    return Ok(Step::Wait);
}
",
            replace: "",
        }],
    },
    Bug {
        name: "07-stale-after-reconnect",
        what: "a re-created watch starts at the current revision",
        test: "--test end_to_end faults::lost_feed_catches_up_on_thousands_of_revisions",
        shows: "after thousands of missed revisions",
        changes: &[
            Change {
                item: "Anchor::evidence",
                find: "near.dedup();",
                replace: "near.clear();",
            },
            Change {
                item: "Feed::open_by",
                find: "Evidence::Loader(_) | Evidence::Keys => anchor.revision + 1,",
                replace: "
Evidence::Loader(_) => anchor.revision + 1,
Evidence::Keys => 0,
",
            },
            Change {
                item: "Feed::open_by",
                find: "Evidence::Keys if anchor.ends_with_a_delete() => {",
                replace: "Evidence::Keys if anchor.revision < 0 => {",
            },
            Change {
                item: "Feed::open_by",
                find: "Evidence::Keys => feed.holds_newest_state(anchor).await?.then_some(Step::Wait),",
                replace: "Evidence::Keys => Some(Step::Wait),",
            },
        ],
    },
    Bug {
        name: "08-accept-an-older-feed",
        what: "events of a lagging member are applied",
        test: "--lib feed::assemble::tests::events_at_or_below_the_revision_are_fenced",
        shows: "apply 2 up to 10",
        changes: &[Change {
            item: "Assembler::add",
            find: "Some(revision) if revision > self.revision => {",
            replace: "Some(revision) if !changes.is_empty() => {",
        }],
    },
    Bug {
        name: "15-resume-without-comparing",
        what: "a feed resumes behind the last event, and compares nothing",
        test: "--test end_to_end rollbacks::rollback_of_one_member_is_never_served_stale_3_7",
        shows: "stale .* after etcd answered again",
        changes: &[
            Change {
                item: "Anchor::evidence",
                find: "near.dedup();",
                replace: "near.clear();",
            },
            Change {
                item: "Feed::open_by",
                find: "Evidence::Keys if anchor.ends_with_a_delete() => {",
                replace: "Evidence::Keys if anchor.revision < 0 => {",
            },
            Change {
                item: "Feed::open_by",
                find: "Evidence::Keys => feed.holds_newest_state(anchor).await?.then_some(Step::Wait),",
                replace: "Evidence::Keys => Some(Step::Wait),",
            },
        ],
    },
    Bug {
        name: "16-stay-with-a-stale-feed",
        what: "a feed that answers progress requests at an old revision is never left",
        test: "--test end_to_end lagging::feed_that_stays_at_an_old_revision_is_left_3_7",
        shows: "no response from memory",
        changes: &[
            Change {
                item: "Lateness::judge",
                find: ".is_some_and(|(_, since)| since.elapsed() > LAG_TIMEOUT);",
                replace: ".is_some_and(|(_, since)| since.elapsed() > LAG_TIMEOUT * 100);",
            },
            Change {
                item: "Feed::run",
                find: "if burst.has_events || self.assembler.revision() > before {",
                replace: "if before >= 0 {",
            },
        ],
    },
    Bug {
        name: "48-continue-on-any-history",
        what: "etcd continues watchers of memory on a connection whose history was not compared with theirs",
        test: "--test end_to_end watch_that_leaves_memory_after_a_rollback_gets_nothing_of_the_new_history_3_7",
        shows: "watch_id: 1, created: true",
        changes: &[Change {
            item: "is_of_history",
            find: ") -> bool {",
            replace: "
) -> bool {
    if history.number() < u64::MAX {
        return true;
    }
",
        }],
    },
    Bug {
        name: "51-compare-the-last-event-alone",
        what: "a resumed feed is compared by its last event alone",
        test: "--test end_to_end rollbacks::rollback_with_the_same_last_event_is_never_served_stale_3_7",
        shows: "stale .* after etcd answered again",
        changes: &[
            Change {
                item: "Anchor::evidence",
                find: ".chain(recent).chain(self.last_event);",
                replace: ".chain(recent).take(0).chain(self.last_event);",
            },
            Change {
                item: "Feed::judge_events",
                find: "_ if anchor.proves_by_events_from(first) => true,",
                replace: "_ if first > 0 => true,",
            },
        ],
    },
    Bug {
        name: "117-compare-the-newest-state-alone",
        what: "of a mirror with few events its newest state alone is compared, and older ones are served",
        test: "--test simulation past_of_a_mirror_that_was_loaded_before_a_rollback_is_not_served",
        shows: "assertion .left == right. failed",
        changes: &[
            Change {
                item: "Feed::holds_newest_state",
                find: "mirror.forget_before(epoch, anchor.revision)?;",
                replace: "mirror.forget_before(epoch, 0)?;",
            },
            Change {
                item: "Feed::judge_events",
                find: "self.holds(tree, *revision).await?,",
                replace: "*revision > 0 || self.holds(tree, *revision).await?,",
            },
        ],
    },
    Bug {
        name: "236-take-any-lost-event-for-a-delete",
        what: "an event that is missing is taken for a delete that etcd has compacted, though it is none",
        test: "-p rangecache-mirror --lib same_last_event_after_others_is_another_history",
        shows: "same_last_event_after_others_is_another_history .* FAILED",
        changes: &[Change {
            item: "missing",
            find: "ChangeKind::Put => Verdict::Another(explanation),",
            replace: "ChangeKind::Put if explanation.is_empty() => Verdict::Another(explanation), ChangeKind::Put => Verdict::LacksDelete(ours.revision()),",
        }],
    },
    Bug {
        name: "120-compare-one-connection-at-a-time",
        what: "a comparison with a member that does not respond delays those with others",
        test: "--test simulation member_that_does_not_respond_delays_no_comparison_with_another",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "is_of_history",
            find: "let Ok(_turn) = connection.history_turn().acquire().await else {",
            replace: "
static TURN: tokio::sync::Semaphore = tokio::sync::Semaphore::const_new(1);
let Ok(_turn) = TURN.acquire().await else {
",
        }],
    },
    Bug {
        name: "153-lose-the-events-before-an-end",
        what: "events that arrive together with the end of a feed are lost",
        test: "-p rangecache-mirror --lib responses_that_are_there_together_are_applied_together_also_before_an_end",
        shows: "panicked at",
        changes: &[Change {
            item: "Feed::run",
            find: "
self.take(burst)?;
received?;
",
            replace: "
received?;
self.take(burst)?;
",
        }],
    },
    Bug {
        name: "162-feed-stays-on-an-endpoint-that-is-left",
        what: "a feed stays on an endpoint that is used no more",
        test: "--test end_to_end feed_moves_to_the_endpoint_that_a_reload_names",
        shows: "the feed has moved",
        changes: &[Change {
            item: "Feed::follow",
            find: r#"() = feeding.connection.until_removed() => FeedEnd::Lost("its endpoint is used no more".into()),"#,
            replace: "",
        }],
    },
    Bug {
        name: "170-watch-continues-under-any-number-of-a-hub",
        what: "a watch continues under a number of a hub under which no contents were found",
        test: "--test simulation load_of_before_a_rollback_is_not_continued_behind_a_hub",
        shows: r"left: \(true, true\)",
        changes: &[Change {
            item: "is_of_history",
            find: "&& watched.is_none_or(|watched| watched.were_found_in(set, lineage))",
            replace: "",
        }],
    },
    Bug {
        name: "174-accept-one-event-of-many",
        what: "one event that etcd still has proves a feed, if there were many",
        test: "--lib feed::opening::tests::one_event_that_is_left_of_many_proves_a_feed_with_the_keys_alone",
        shows: "panicked at .*feed/opening/tests.rs",
        changes: &[Change {
            item: "Anchor::proves_by_events_from",
            find: "self.recent_is_full && self.recent.len() >= ENOUGH_EVENTS && oldest >= Some(first)",
            replace: "self.recent_is_full && self.recent.len() >= ENOUGH_EVENTS && oldest <= Some(first)",
        }],
    },
    Bug {
        name: "224-ask-for-no-replaced-values",
        what: "a feed does not ask for values that are not held",
        test: "--lib replaced_value_that_is_not_held_comes_with_its_event",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Feed::create",
            find: "prev_kv: brings_replaced,",
            replace: "prev_kv: false,",
        }],
    },
    Bug {
        name: "230-compare-what-its-own-revision-superseded",
        what: "each event of the mirror's last revision is compared with the tree, also one that the same revision superseded",
        test: "--test end_to_end stream_leaves_memory_after_two_events_of_one_key",
        // The stream's watcher is cancelled, before or in place of what the test awaits.
        shows: "canceled: true|assertion failed: next",
        changes: &[Change {
            item: "EventComparison::are_held",
            find: ".all(|change| !later.insert(change.key()) || is_held(change))",
            replace: ".all(|change| later.insert(change.key()) | is_held(change) && is_held(change))",
        }],
    },
];
