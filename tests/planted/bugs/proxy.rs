//! Bugs of calls, forwarding, fallbacks.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "17-give-frames-back-too-early",
        what: "frames that wait in a client's connection are given back to the budget too early, when they are produced",
        test: "--lib frames_count_until_they_are_written",
        shows: "both frames wait in the connection",
        changes: &[Change {
            item: "Delivery::poll_frame",
            find: "_held: held,",
            replace: "_held: held.filter(|_| false),",
        }],
    },
    Bug {
        name: "43-give-up-unread-watches",
        what: "a watch from memory that is not read for a minute is reset, though it keeps nothing but a position",
        test: "--lib unread_watch_from_memory_is_given_up_only_while_others_wait_for_room",
        shows: "no time limit",
        changes: &[Change {
            item: "WatchedSource::is_idle",
            find: "
if state.source.may_stay_unread() {
    return false;
}
",
            replace: "",
        }],
    },
    Bug {
        name: "50-take-others-for-own-name",
        what: "with --caller-is=certificate, memory answers callers of every name",
        test: "--test end_to_end callers_of_other_names_are_forwarded_3_7",
        shows: "a longer name",
        changes: &[Change {
            item: "Client::identifies",
            find: "|| (self.has_own_name && by == CallProtocol::Grpc)",
            replace: "|| (self.has_own_name || by == CallProtocol::Grpc)",
        }],
    },
    Bug {
        name: "71-keep-the-length-of-another-request",
        what: "requests for pages of a stream keep the length of the client's request, for which a proxy before etcd resets them",
        test: "--test end_to_end -- --ignored streams::equal::streams_through_two_rangecaches_equal_unary_responses_3_6",
        shows: r"reset Some\(1\)",
        changes: &[Change {
            item: "PageCalls::new",
            find: "parts.headers.remove(CONTENT_LENGTH);",
            replace: "",
        }],
    },
    Bug {
        name: "80-give-back-the-head-of-a-watch",
        what: "the header list of a watch counts no longer once the watch is served",
        test: "--test end_to_end memory::heads_of_watches_count_until_they_end",
        shows: "memory: .* each",
        changes: &[Change {
            item: "ResponseBody::deliver",
            find: "record.bytes.shrink_to(CALL_BYTES + source.request_bytes());",
            replace: "record.bytes.shrink_to(CALL_BYTES + source.request_bytes().min(0));",
        }],
    },
    Bug {
        name: "88-keep-few-http1-connections",
        what: "connections of a burst of HTTP/1 requests are closed after it",
        test: "--test end_to_end http1::bursts_of_http1_requests_share_few_connections_to_etcd",
        shows: "connections to etcd",
        changes: &[Change {
            item: "Http1Pool::new",
            find: "max_idle: MAX_IDLE.min(max_connections / 4),",
            replace: "max_idle: 16.min(max_connections / 4),",
        }],
    },
    Bug {
        name: "91-answer-callers-whom-the-certificate-names",
        what: "memory answers callers without a token for whom rangecache's certificate names a user",
        test: "--test end_to_end certificate_with_a_user_name_reads_nothing_from_memory",
        shows: "auth is on",
        changes: &[Change {
            item: "Client::identifies",
            find: "|| !self.proxy.forward.upstream.connector().names_a_user()",
            replace: "|| self.proxy.forward.upstream.credentials().common_name().is_none()",
        }],
    },
    Bug {
        name: "102-leave-json-unread",
        what: "revisions in forwarded JSON are not recorded",
        test: "--test end_to_end stale::last_view_is_not_older_than_a_json_response",
        shows: "older than the write",
        changes: &[Change {
            item: "ForwardedBody::poll_frame",
            find: "record_scanned(scanned, Unreadable::Json, &self.cluster_state, &self.history);",
            replace: "let _ = (scanned, &self.cluster_state, &self.history);",
        }],
    },
    Bug {
        name: "103-count-failed-reads-as-etcds",
        what: "reads that etcd could not answer count as its responses",
        test: "--test end_to_end outage::calls_that_etcd_cannot_answer_are_counted_as_failed",
        shows: "left: [0-9]+",
        changes: &[Change {
            item: "CallRecord::begin_response",
            find: "self.outcome = ended.unwrap_or(self.outcome);",
            replace: r#"tracing::debug!(?ended, "responds");"#,
        }],
    },
    Bug {
        name: "124-pages-of-any-connection",
        what: "a RangeStream that is assembled from pages continues on connections of another history",
        test: "--lib page_of_a_connection_that_was_opened_since_the_first_page_ends_the_stream",
        shows: r#"right: "14""#,
        changes: &[Change {
            item: "Pager::first_page",
            find: "if opened > first.requested {",
            replace: "if false && opened > first.requested {",
        }],
    },
    Bug {
        name: "166-continue-a-list-of-another-history",
        what: "a list in pages continues although the connection that is checked was opened after its first page",
        test: "--test simulation page_after_a_rollback_does_not_continue_a_list_of_before",
        shows: "assertion `left == right` failed",
        changes: &[Change {
            item: "Series::check_proof",
            find: "let is_of_first_page = proof.connection_opened() <= self.before.began();",
            replace: "let is_of_first_page = true;",
        }],
    },
    Bug {
        name: "181-forward-what-makes-a-read-a-check",
        what: "the JSON of a client has what makes its read a check",
        test: "--test end_to_end key_that_checks_read_is_answered_to_clients_of_a_leaf_as_by_etcd",
        shows: "rangecache-check",
        changes: &[Change {
            item: "prepare",
            find: "remove_own_metadata(headers);",
            replace: "",
        }],
    },
    Bug {
        name: "182-share-the-metadata-of-one-client",
        what: "a call that clients share has all metadata of the first",
        test: "--test end_to_end metadata_of_one_client_fails_no_read_that_shares_its_call",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "Fallback::lead_or_join",
            find: "let parts = shared_head(RANGE, &read.parts.headers);",
            replace: "let parts = http::request::Parts::clone(&read.parts);",
        }],
    },
    Bug {
        name: "183-share-every-error",
        what: "an error that one head may have caused is shared",
        test: "--lib error_that_metadata_may_cause_is_not_shared",
        shows: "assertion .left == right. failed",
        changes: &[Change {
            item: "SharedResponse::for_all",
            find: "self.head.status == StatusCode::OK && code.is_some_and(|code| CODES_FOR_ALL.contains(&code));",
            replace: "self.head.status == StatusCode::OK || code.is_some_and(|code| CODES_FOR_ALL.contains(&code));",
        }],
    },
    Bug {
        name: "233-share-nothing-while-auth-is-unknown",
        what: "identical lists are not shared while it is unknown whether auth is on",
        test: "--test end_to_end listing_clients_share_calls_to_etcd",
        shows: "64 calls in flight",
        changes: &[Change {
            item: "ShareScope::from_call",
            find: "(Auth::Off | Auth::Unknown, false)",
            replace: "(Auth::Off, false)",
        }],
    },
    Bug {
        name: "234-send-all-after-a-shared-call-failed",
        what: "reads whose shared call has failed are sent to etcd all at once",
        test: "--test end_to_end reads_whose_shared_call_has_failed_are_sent_a_few_at_a_time",
        shows: "the reads are in flight, or wait",
        changes: &[Change {
            item: "Fallback::fetch_large",
            find: "self.fetch_alone(read, scope, None, &self.unshared).await",
            replace: "self.fetch_alone(read, scope, None, &self.large).await",
        }],
    },
    Bug {
        name: "193-count-reads-whose-clients-left-as-etcds",
        what: "a read whose client left before etcd answered counts as its response",
        test: "--lib read_that_etcd_has_not_answered_when_its_client_leaves_is_not_etcds",
        shows: "panicked at",
        changes: &[Change {
            item: "CallRecord::drop",
            find: "self.outcome = self.outcome_without_response();",
            replace: r#"tracing::debug!(outcome = ?self.outcome_without_response(), "left");"#,
        }],
    },
    Bug {
        name: "194-report-what-auth-explains",
        what: "while auth is on and rangecache has no user, reads count by what follows from it",
        test: "--lib causes::tests::of_two_causes",
        shows: "panicked at",
        changes: &[Change {
            item: "Causes::first",
            find: "
self.lacks_user.then_some(Reason::Auth),
self.version_unknown.then_some(Reason::VersionUnknown),
",
            replace: "
self.version_unknown.then_some(Reason::VersionUnknown),
self.lacks_user.then_some(Reason::Auth),
",
        }],
    },
];
