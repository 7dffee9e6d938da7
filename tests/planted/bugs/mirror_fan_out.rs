//! Bugs of watchers of mirrors.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "18-events-ahead-of-the-fan-out",
        what: "a watcher takes events that the fan-out has added before it has reached their revision",
        test: "--lib fan_out::tests::revision_is_not_reached",
        shows: "events ahead of the fan-out",
        changes: &[Change {
            item: "Topic::take",
            find: ".take_while(|pick| pick.last_revision <= reached)",
            replace: ".take_while(|pick| pick.last_revision <= reached.max(i64::MAX))",
        }],
    },
    Bug {
        name: "19-clear-the-signal-after-the-look",
        what: "a stream clears its signal after it has looked at its readers",
        test: "--lib fan_out::tests::signal_during_a_look",
        shows: "a lost wake-up",
        changes: &[Change {
            item: "Signal::look",
            find: "
// Before the look; also acquires what was published before the signal was set.
self.is_set.swap(false, Ordering::AcqRel);
look(context)
",
            replace: "
let looked = look(context);
self.is_set.swap(false, Ordering::AcqRel);
looked
",
        }],
    },
    Bug {
        name: "20-wake-before-the-fan-out-has-reached",
        what: "streams are woken before the fan-out has reached what they are woken for",
        test: "--lib fan_out::tests::every_stream_of_many",
        shows: "a lost wake-up",
        changes: &[Change {
            item: "HubTask::add",
            find: "self.is_behind = log.batches.len() == BATCHES_AT_ONCE;",
            replace: "
self.registry.wake_touched().await;
self.is_behind = log.batches.len() == BATCHES_AT_ONCE;
",
        }],
    },
    Bug {
        name: "26-divide-a-revision",
        what: "a response ends at its bound in the middle of a revision",
        test: "--test end_to_end fragments_of_a_watch_equal_etcds",
        shows: "left == right|no message on the stream",
        changes: &[Change {
            item: "Pick::until",
            find: "
if event.revision() != revision {
    if end >= max_events || bytes >= max_bytes {
        break;
    }
",
            replace: "
if end >= max_events || bytes >= max_bytes {
    break;
}
if event.revision() != revision {
",
        }],
    },
    Bug {
        name: "42-pass-over-refused-events",
        what: "events for which there is no room count as sent",
        test: "--lib refused_events_are_taken_later",
        shows: "progress ahead of refused events",
        changes: &[
            Change {
                item: "Reader::take_if",
                find: "if !admit(&picked) {",
                replace: "
self.advance(picked.last_revision());
if !admit(&picked) {
",
            },
            Change {
                item: "Reader::take_if",
                find: "self.advance(picked.last_revision());",
                replace: "",
            },
        ],
    },
    Bug {
        name: "44-keep-events-of-dropped-mirrors",
        what: "a client that does not read keeps the events of a mirror that was loaded again",
        test: "--lib unread_events_of_a_dropped_mirror_are_kept_for_seconds",
        shows: "left: Dropped|a lost wake-up",
        changes: &[Change {
            item: "HubTask::drop_ended",
            find: "topic.trim_through(i64::MAX);",
            replace: "drop(topic);",
        }],
    },
    Bug {
        name: "45-lose-a-batch-under-load",
        what: "a watcher for which several batches wait loses the second",
        test: "--test linearizability random_faults_keep_every_response_linearizable",
        shows: "defects of watches",
        changes: &[Change {
            item: "Topic::take",
            find: "// The events are looked at without the lock: the fan-out needs it for every batch.",
            replace: "
if taken.len() > 3 {
    taken.remove(1);
}
// The events are looked at without the lock: the fan-out needs it for every batch.
",
        }],
    },
    Bug {
        name: "46-continue-behind-missed-events",
        what: "a watcher continues behind events that the log no longer had for the fan-out",
        test: "--lib events_that_the_hub_missed_end_the_watchers_that_need_them",
        shows: "a lost wake-up|assertion",
        changes: &[Change {
            item: "Registry::miss",
            find: "
if let Some(slot) = slots.get(number as usize).and_then(Option::as_ref) {
    slot.topic.miss(event.revision);
",
            replace: "if slots.get(number as usize).is_some() {",
        }],
    },
    Bug {
        name: "49-wake-faster-than-streams-run",
        what: "the fan-out wakes streams faster than they run",
        test: "--lib call_gets_its_turns_while_thousands_of_streams_are_woken",
        shows: "streams ran between two turns",
        changes: &[
            Change {
                item: "WAKE_BATCH",
                find: "const WAKE_BATCH: usize = 64;",
                replace: "const WAKE_BATCH: usize = 256;",
            },
            Change {
                item: "TopicSlot::wake",
                find: "
for _ in 0..*woken / WOKEN_PER_YIELD {
                    tokio::task::yield_now().await;
                }
",
                replace: "tokio::task::yield_now().await;",
            },
        ],
    },
    Bug {
        name: "95-keep-every-unused-topic",
        what: "topics whose watchers are gone are kept without a bound",
        test: "--lib topics_without_watchers_are_kept_up_to_a_bound",
        shows: r"Held \{",
        changes: &[Change {
            item: "Registry::sweep",
            find: "if is_kept && unused_bytes + bytes <= bounds.max_unused_bytes {",
            replace: "if is_kept {",
        }],
    },
    Bug {
        name: "109-keep-watchers-ahead-of-their-mirror",
        what: "watchers ahead of their mirror stay when another feed resumes",
        test: "--lib watchers_that_are_ahead_of_a_mirror_end_when_another_feed_continues",
        shows: "panicked",
        changes: &[Change {
            item: "Registry::cut_ahead_of",
            find: "ahead.for_each(|watcher| watcher.cut());",
            replace: "ahead.for_each(drop);",
        }],
    },
    Bug {
        name: "118-no-bound-on-lists-of-events",
        what: "the lists of events of watches have no bound",
        test: "--lib lists_of_events_stay_within_their_bound",
        shows: "panicked",
        changes: &[Change {
            item: "Registry::sweep",
            find: "if lists_bytes > bounds.max_list_bytes {",
            replace: "if lists_bytes > u64::MAX {",
        }],
    },
    Bug {
        name: "173-put-an-event-before-itself",
        what: "events that are trimmed in part are put before themselves once more",
        test: "--lib fan_out::topic::tests::events_that_are_trimmed_in_part_stay_whole_and_come_once",
        shows: "a watcher that joins needs those before",
        changes: &[Change {
            item: "Topic::trim_through",
            find: "picks.complete_after = picks.complete_after.max(whole);",
            replace: "picks.complete_after = picks.complete_after.max(whole.max(revision));",
        }],
    },
];
