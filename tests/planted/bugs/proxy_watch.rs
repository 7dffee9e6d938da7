//! Bugs of watch streams.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "21-handover-at-p",
        what: "etcd continues a watcher with a revision that memory has sent",
        test: "--lib watch::relay",
        shows: "watcher_zero_is_created_first_and_every_start_follows_what_was_sent .*FAILED",
        changes: &[Change {
            item: "Relay::creates",
            find: ".to_wire(id, watcher.fence.saturating_add(1))",
            replace: ".to_wire(id, watcher.fence)",
        }],
    },
    Bug {
        name: "22-progress-while-behind",
        what: "progress is reported at the mirror's revision, also for a watcher that has events to get",
        test: "--test end_to_end progress_is_not_reported_before_the_events",
        shows: "before the event after",
        changes: &[Change {
            item: "Watcher::progress",
            find: "let revision = self.reader.covered().min(self.reader.reached());",
            replace: "let revision = self.reader.reached();",
        }],
    },
    Bug {
        name: "23-interrupt-fragments",
        what: "responses to requests are sent between the fragments of a revision",
        test: "--test end_to_end fragments_are_not_interrupted",
        shows: "interrupted by",
        changes: &[
            Change {
                item: "Session::next_piece",
                find: "let message = self.message.as_mut()?;",
                replace: "
if self.message.as_ref().is_some_and(EventMessages::is_between_fragments) {
    self.poll_request(&mut Context::from_waker(std::task::Waker::noop()));
    if let Some(response) = self.down.control.pop_front() {
        return Some(response);
    }
}
let message = self.message.as_mut()?;
",
            },
            Change {
                item: "EventMessages::is_complete",
                find: "
/// Whether every piece was produced.
pub(super) fn is_complete
",
                replace: "
/// Whether a response has ended, and others follow.
pub(super) fn is_between_fragments(&self) -> bool {
    self.missing == 0
}

/// Whether every piece was produced.
pub(super) fn is_complete
",
            },
        ],
    },
    Bug {
        name: "24-watch-raises-no-minimum",
        what: "the revision of an event that a watch shows is not recorded, so that a later read may be older",
        test: "--test end_to_end serializable_read_is_not_older_than_what_a_watch",
        shows: "a read at .* after an event",
        changes: &[Change {
            item: "Session::message_of",
            find: "if !down.mirrors().cluster_state.record_served(history, revision) {",
            replace: "if down.mirrors().cluster_state.history() != history {",
        }],
    },
    Bug {
        name: "25-filter-deletes-as-puts",
        what: "a watch that wants no puts gets no deletes either",
        test: "--test end_to_end live_responses_of_watches_equal_etcds_byte_for_byte_3_7",
        shows: "left == right",
        changes: &[Change {
            item: "is_wanted",
            find: "
ChangeKind::Put => !options.no_put,
ChangeKind::Delete => !options.no_delete,
",
            replace: "ChangeKind::Put | ChangeKind::Delete => !options.no_put,",
        }],
    },
    Bug {
        name: "27-handover-skips-a-revision",
        what: "etcd continues a watcher one revision too late",
        test: "--lib watch::relay",
        shows: "watcher_zero_is_created_first_and_every_start_follows_what_was_sent .*FAILED",
        changes: &[Change {
            item: "Relay::creates",
            find: ".to_wire(id, watcher.fence.saturating_add(1))",
            replace: ".to_wire(id, watcher.fence.saturating_add(2))",
        }],
    },
    Bug {
        name: "28-relay-created",
        what: "the client gets the created of a watcher that etcd continues",
        test: "--lib watch::relay",
        shows: "created is not relayed",
        changes: &[Change {
            item: "Relay::created",
            find: "RelayAction::Drop",
            replace: "RelayAction::Pass",
        }],
    },
    Bug {
        name: "29-return-repeats-a-revision",
        what: "memory repeats the revision of the barrier that etcd has sent",
        test: "--test end_to_end stream_returns_to_memory_without_loss_or_repetition_3_7",
        shows: "an event was lost or repeated",
        changes: &[Change {
            item: "join",
            find: "first_revision: watcher.through.saturating_add(1),",
            replace: "first_revision: watcher.through,",
        }],
    },
    Bug {
        name: "30-return-skips-a-revision",
        what: "memory continues a watcher one revision too late",
        test: "--test end_to_end stream_returns_to_memory_without_loss_or_repetition_3_7",
        shows: "an event was lost or repeated",
        changes: &[Change {
            item: "join",
            find: "first_revision: watcher.through.saturating_add(1),",
            replace: "first_revision: watcher.through.saturating_add(2),",
        }],
    },
    Bug {
        name: "31-return-at-an-older-barrier",
        what: "a stream returns at the progress notification of an earlier request, which is older than one of its watchers",
        test: "--lib watch::relay",
        shows: "barrier_is_not_older_than_a_watcher_or_an_event .*FAILED",
        changes: &[Change {
            item: "Relay::is_barrier",
            find: "
&& self
    .watchers
    .values()
    .all(|watcher| watcher.may_return_at(revision))
",
            replace: "",
        }],
    },
    Bug {
        name: "32-no-cancel-after-a-restore",
        what: "a watch is not cancelled when etcd is restored, and continues in the other history",
        test: "--test end_to_end restore_under_open_watches_ends_them",
        shows: "every watch ends: not within",
        changes: &[Change {
            item: "Session::ended",
            find: r#"return self.cancel_compacted(id, revision.max(1), "replaced");"#,
            replace: "
let _ = revision;
return self.down.interrupt(Reason::Loading);
",
        }],
    },
    Bug {
        name: "33-header-ahead-of-events",
        what: "the header of an event response names the mirror's revision, though more events follow",
        test: "--test end_to_end client_that_resumes_by_headers_alone",
        shows: "no message on the stream",
        changes: &[Change {
            item: "Session::message_of",
            find: "header: down.header(revision),",
            replace: "header: down.header(down.mirrors().cluster_state.known().max(revision)),",
        }],
    },
    Bug {
        name: "34-progress-at-the-stores-revision",
        what: "progress on request is etcd's newest known revision, whatever was sent",
        test: "--test end_to_end progress_is_not_reported_before_the_events",
        shows: "before the event after",
        changes: &[Change {
            item: "Progress::poll_requested",
            find: "let revision = watchers.progress().filter(|revision| *revision >= least);",
            replace: "
let revision = watchers.progress().filter(|revision| *revision >= least);
let revision = revision.map(|revision| revision.max(down.mirrors().cluster_state.known()));
",
        }],
    },
    Bug {
        name: "41-watch-without-authorization",
        what: "memory serves a watch with credentials although etcd has not authorized the caller",
        test: "--test end_to_end watches_from_memory_are_authorized_by_etcd_3_7",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "authorize",
            find: "
let proof = freshness.authorize(&authorization, deadline).await?;
Ok((proof.history, proof.header.revision))
",
            replace: "
match freshness.authorize(&authorization, deadline).await {
    Ok(proof) => Ok((proof.history, proof.header.revision)),
    Err(_) => {
        let cluster_state = &client.proxy.mirrors.cluster_state;
        Ok((cluster_state.history(), cluster_state.known()))
    }
}
",
        }],
    },
    Bug {
        name: "53-count-a-watch-by-its-start",
        what: "a watch that etcd serves counts as answered by memory",
        test: "--test end_to_end calls::stream_that_leaves_memory_counts_as_etcds",
        shows: "left: .*memory",
        changes: &[Change {
            item: "Session::source",
            find: "Some(match self.etcd {",
            replace: "Some(match self.etcd.as_ref().filter(|_| self.has_ended) {",
        }],
    },
    Bug {
        name: "63-send-behind-a-barrier",
        what: "a request reaches etcd behind the barrier at which the stream returns, and is lost",
        test: "--lib owed_progress_is_passed_at_the_barrier_too",
        shows: "would be lost with etcd's stream",
        changes: &[Change {
            item: "Relay::progress",
            find: "} else if self.is_barrier(head.revision) {",
            replace: "
} else if self.is_barrier(head.revision) {
    self.mode = Mode::Tapped;
",
        }],
    },
    Bug {
        name: "64-wait-for-a-dropped-mirror",
        what: "a stream waits, always ready, for a mirror that was dropped",
        test: "--test simulation -- --ignored --exact --nocapture chosen_seeds",
        shows: "time stands still",
        changes: &[Change {
            item: "Session::leave_memory",
            find: "match (self.leaving.take(), self.awaited()) {",
            replace: "
let earlier = self.leaving.take().and_then(|(leave, _)| leave.create);
let leave = Leave { create: leave.create.or(earlier), ..leave };
match (self.leaving.take(), self.awaited()) {
",
        }],
    },
    Bug {
        name: "67-progress-below-a-start",
        what: "progress is reported below the start of a watcher while another one of the stream waits for room",
        test: "--test end_to_end progress_is_not_below_the_start_of_a_watcher_while_another_waits_for_room",
        shows: "below the start",
        changes: &[Change {
            item: "Progress::poll_requested",
            find: "
let starts = watchers.all().map(|watcher| watcher.since);
let least = starts.fold(down.last_event.max(down.reported), i64::max);
",
            replace: "let least = down.last_event.max(down.reported);",
        }],
    },
    Bug {
        name: "72-leave-progress-requests-unread",
        what: "progress requests of a client stay with the HTTP/2 library while an earlier one waits",
        test: "--test end_to_end client_may_ask_for_progress_without_waiting",
        shows: "broken pipe",
        changes: &[
            Change {
                item: "Session::poll_request",
                find: "self.down.requests.read_ahead(cx);",
                replace: "
if self.progress.requested.is_none() {
    self.down.requests.read_ahead(cx);
}
",
            },
            Change {
                item: "Progress::take_up",
                find: "let count = 1 + down.requests.take_progress(MAX_PROGRESS_RUN - 1);",
                replace: "let count = 1 + down.requests.take_progress(MAX_PROGRESS_RUN.min(0));",
            },
        ],
    },
    Bug {
        name: "94-serve-a-compacted-start",
        what: "a watch of the past is served without a check of what other clients have compacted",
        test: "--test end_to_end watches_around_a_compaction_of_another_client_equal_etcds_3_7",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "start",
            find: "(None, _) if past > 0 => prove_past(&client, past, check.as_deref_mut()).await,",
            replace: "(None, _) if past < 0 => prove_past(&client, past, check.as_deref_mut()).await,",
        }],
    },
    Bug {
        name: "96-watchers-at-etcd-are-free",
        what: "watchers that etcd serves count against no budget",
        test: "--test end_to_end watchers_that_etcd_serves_count",
        shows: "they count",
        changes: &[Change {
            item: "EtcdStream::forward_requests",
            find: "down.bytes.set_relayed(self.relay.held_bytes());",
            replace: "",
        }],
    },
    Bug {
        name: "97-end-at-a-long-key",
        what: "an event whose key is long ends its stream",
        test: "--test end_to_end stream_with_a_long_key_continues_at_etcd",
        shows: "the stream ended",
        changes: &[Change {
            item: "EtcdStream::next_buffered",
            find: "Parsed::LongKey(head) => (self.relay.long_key(&head), head),",
            replace: "Parsed::LongKey(_) => return Some(interrupted()),",
        }],
    },
    Bug {
        name: "98-keep-a-compacted-value",
        what: "a watch that begins at etcd's compaction gets the previous value that etcd has compacted",
        test: "--test end_to_end watches_around_a_compaction_of_another_client_equal_etcds_3_7",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "event",
            find: "WatchEvent::new(change, options.prev_kv && change.revision() > prev_kv_after)",
            replace: "WatchEvent::new(change, options.prev_kv && change.revision() > prev_kv_after.min(0))",
        }],
    },
    Bug {
        name: "99-begin-the-silence-again",
        what: "the silence before a notification begins again when a stream returns to memory",
        test: "--lib watcher_returns_with_the_time_of_what_the_client_got_last",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Relay::carried",
            find: "quiet_since: watcher.quiet_since,",
            replace: "quiet_since: None,",
        }],
    },
    Bug {
        name: "114-pass-the-progress-of-a-return",
        what: "a response to a progress request of rangecache is passed for a later one of the client",
        test: "--lib progress_of_a_return_that_was_given_up_is_not_a_response_to_a_later_request",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Relayed::lets_pass",
            find: "|| !(is_of_earlier || self.may_lack_events(revision))",
            replace: "|| !(is_of_earlier && self.may_lack_events(revision))",
        }],
    },
    Bug {
        name: "115-pass-ids-of-etcds-choice",
        what: "a pinned stream gets whatever id etcd chooses",
        test: "--lib pinned_stream_knows_whether_etcd_would_give_another_id",
        shows: "panicked",
        changes: &[Change {
            item: "Relay::request",
            find: "if matches!(request, WatchRequest::Cancel(_)) {",
            replace: "if matches!(request, WatchRequest::Progress) {",
        }],
    },
    Bug {
        name: "119-show-two-histories-on-one-stream",
        what: "a stream over several mirrors continues while one of them has no feed",
        test: "--test simulation stream_over_two_mirrors_gets_nothing_of_another_history",
        shows: "panicked",
        changes: &[Change {
            item: "Session::take_events",
            find: "let awaits_feed = self.awaits_feed(cx);",
            replace: "let awaits_feed = false;",
        }],
    },
    Bug {
        name: "121-ids-during-a-cancel",
        what: "a stream is left to etcd's choice of ids while a cancel is unanswered",
        test: "--lib pinned_stream_knows_whether_etcd_would_give_another_id",
        shows: "panicked",
        changes: &[Change {
            item: "Relay::chooses_expected_id",
            find: "self.has_all_creates || self.cancels.is_empty() && self.next_id().is_some_and(is_lowest)",
            replace: "self.has_all_creates || self.next_id().is_some_and(is_lowest)",
        }],
    },
    Bug {
        name: "123-continue-watchers-ahead-of-their-mirror",
        what: "watchers that are ahead of their mirror continue at etcd",
        test: "--test simulation watcher_that_is_ahead_of_its_mirror_does_not_continue_at_etcd_after_a_rollback",
        shows: "panicked",
        changes: &[Change {
            item: "Session::hand_over",
            find: "
if self.watchers.unproven().is_some() {
    return self.down.interrupt(Reason::NotFresh);
}
",
            replace: "",
        }],
    },
    Bug {
        name: "125-answer-before-a-replaced-history-ends",
        what: "a stream whose watchers are of a replaced history, and wait for room, is shown the new one",
        test: "--test simulation stream_that_waits_for_room_ends_watchers_of_a_lost_history_before_it_shows_the_next",
        shows: "panicked",
        changes: &[Change {
            item: "Session::compare_histories",
            find: "self.cancel_replaced();",
            replace: "",
        }],
    },
    Bug {
        name: "165-keep-the-feeds-of-leaves",
        what: "a hub that has lost its feed keeps those of its leaves",
        test: "-p rangecache --test end_to_end rollback_of_one_member_is_never_served_stale_behind_a_hub",
        shows: "stale",
        changes: &[Change {
            item: "Session::ended_by_etcd",
            find: "let ends = self.down.stream.metadata.marks.feed && self.watchers.all().any(is_without_feed);",
            replace: "let ends = !self.down.stream.metadata.marks.feed && self.watchers.all().any(is_without_feed);",
        }],
    },
    Bug {
        name: "235-wait-for-room-longer-than-a-leaf",
        what: "a hub's stream without room is continued by etcd only after its leaf has given up",
        test: "--lib long_message_waits_for_room_and_a_short_one_needs_none",
        shows: "a leaf awaits its events",
        changes: &[Change {
            item: "FEED_ROOM_TIMEOUT",
            find: "from_secs(2)",
            replace: "from_secs(10)",
        }],
    },
];
