//! Bugs of connections to etcd and hubs.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "87-take-a-body-for-messages",
        what: "five zeros of a JSON body count as a complete message",
        test: "--test end_to_end http1::http1_body_that_never_ends_is_cut_off_whatever_it_contains",
        shows: "an end",
        changes: &[Change {
            item: "MessageProgress::receive",
            find: "
if self.limit.covers == LimitCovers::Body {
    return;
}
",
            replace: "",
        }],
    },
    Bug {
        name: "112-silence-of-one-connection",
        what: "a member is silent as soon as it has no connection for checks",
        test: "--lib member_that_responds_on_any_connection_is_not_silent",
        shows: "clients' calls alone",
        changes: &[Change {
            item: "Endpoint::is_silent",
            find: "|| !self.is_connected()",
            replace: "|| self.live(ConnectionClass::Check).next().is_none()",
        }],
    },
    Bug {
        name: "122-silence-until-the-next-health-check",
        what: "a member that has left health checks unanswered is silent until the next one, whatever it has answered since",
        test: "--lib member_that_responds_on_any_connection_is_not_silent",
        shows: "a response since the last health check",
        changes: &[Change {
            item: "Endpoint::is_silent",
            find: "let has_responded = self.server.responses() != self.responses_seen.load(Ordering::Relaxed);",
            replace: "let has_responded = false;",
        }],
    },
    Bug {
        name: "158-leave-endpoints-at-once",
        what: "a list of endpoints replaces the former one although nothing of it serves",
        test: "-p rangecache-upstream --lib list_of_which_nothing_serves_costs_nothing_and_can_be_taken_back",
        shows: "panicked at",
        changes: &[Change {
            item: "EndpointList::leave_what_can_be",
            find: "} else if staying.iter().any(replaces) {",
            replace: "} else if staying.iter().any(replaces) || !staying.is_empty() {",
        }],
    },
    Bug {
        name: "159-added-endpoints-choose-the-cluster",
        what: "connections to endpoints that were added count at once, whatever cluster they lead to",
        test: "-p rangecache-upstream --lib connections_to_added_endpoints_count_once_one_leads_to_the_cluster_that_is_used",
        shows: "most of what was added leads to another cluster",
        changes: &[Change {
            item: "Clusters::add",
            find: "self.known.lock().added.insert(url.to_string());",
            replace: "self.known.lock().added.remove(&url.to_string());",
        }],
    },
    Bug {
        name: "160-any-member-behind-an-advertised-url",
        what: "the URL that a member advertises is used, whichever member responds there",
        test: "-p rangecache-upstream --lib members_are_found_where_they_respond_and_left_once_removed",
        shows: "panicked at",
        changes: &[Change {
            item: "is_at",
            find: "if header.member_id != member.id || upstream.is_left_out(Some(header.cluster_id)) {",
            replace: "if header.member_id == 0 || upstream.is_left_out(Some(header.cluster_id)) {",
        }],
    },
    Bug {
        name: "161-plaintext-beside-tls",
        what: "a member without TLS is used beside endpoints with TLS",
        test: "-p rangecache-upstream --lib urls_without_tls_are_not_used_beside_endpoints_with_tls",
        shows: "panicked at",
        changes: &[Change {
            item: "candidates",
            find: "&& (url.tls || !needs_tls)",
            replace: "&& (url.tls || !needs_tls || !url.tls)",
        }],
    },
    Bug {
        name: "164-no-comparison-in-another-history-of-a-hub",
        what: "contents are not compared again when a hub names another history",
        test: "-p rangecache-mirror --lib check_at_a_hub_needs_its_proof",
        shows: "panicked at",
        changes: &[Change {
            item: "Hubs::note",
            find: "Some(hub) if hub.history == history => hub,",
            replace: "Some(hub) => Hub { history, ..hub },",
        }],
    },
    Bug {
        name: "167-trust-a-peer-that-has-not-responded",
        what: "a read around the cache is not marked on a connection whose peer has not responded yet",
        test: "-p rangecache-upstream --lib read_around_hubs_is_marked_until_the_peer_is_known_to_be_etcd",
        shows: "no response",
        changes: &[Change {
            item: "Peer::may_lead_to_hub",
            find: "self.server.load(Ordering::Acquire) != Server::Etcd as u8",
            replace: "self.server.load(Ordering::Acquire) == Server::Hub as u8",
        }],
    },
    Bug {
        name: "168-one-connection-leaves-the-cluster-of-a-hub",
        what: "only the connection that is checked follows a hub to another cluster",
        test: "-p rangecache-upstream --lib connections_to_a_hub_lead_to_another_cluster_together",
        shows: "assertion `left == right` failed",
        changes: &[Change {
            item: "Clusters::record_told",
            find: "if connection.outlives_etcd() && self.is_left_out(Some(id)) {",
            replace: "if connection.outlives_etcd() && !self.is_left_out(Some(id)) {",
        }],
    },
    Bug {
        name: "169-a-hub-proves-what-it-has-not-seen",
        what: "a proof of a hub reaches back further than the connection on which it has checked",
        test: "-p rangecache-upstream --lib history_behind_a_hub_is_as_old_as_the_youngest_connection_that_has_shown_it",
        shows: "it is new",
        changes: &[Change {
            item: "Hubs::note",
            find: "hub.since = hub.since.max(checked_since);",
            replace: "hub.since = hub.since.min(checked_since);",
        }],
    },
    Bug {
        name: "171-send-a-lost-short-write-again",
        what: "a short write that was lost with its connection, and that etcd may have executed, is sent again",
        test: "--lib call_that_may_have_reached_etcd_is_sent_again_only_if_it_is_a_read",
        shows: "right: 1",
        changes: &[Change {
            item: "Connection::send_short",
            find: "Err(error) if is_not_processed(&error) => {",
            replace: "Err(error) if is_not_processed(&error) || error.is::<LeanError>() => {",
        }],
    },
    Bug {
        name: "172-cut-a-request-off",
        what: "what has been received of a request is taken for all of it",
        test: "--lib body_is_short_once_all_of_it_has_been_received",
        shows: "panicked at",
        changes: &[Change {
            item: "Outgoing::poll_short",
            find: "Poll::Pending if self.kept.is_some() => return Poll::Ready(Ok(false)),",
            replace: "Poll::Pending if self.kept.is_some() => self.rest = Rest::Nothing,",
        }],
    },
    Bug {
        name: "176-poll-the-socket-of-the-driver",
        what: "a call waits for the socket in the place of the driver, which then is not woken",
        test: "--lib tests::call_does_not_wait_for_the_socket_in_the_place_of_the_driver",
        shows: "all requests arrive",
        changes: &[Change {
            item: "LeanConnection::write_now",
            find: "Poll::Ready(state.is_blocked || matches!(state.poll_write(context), Poll::Ready(Ok(()))))",
            replace: "Poll::Ready(matches!(state.poll_write(context), Poll::Ready(Ok(()))))",
        }],
    },
    Bug {
        name: "177-what-a-leaving-server-has-not-processed-is-lost",
        what: "calls that a leaving server has not processed are lost",
        test: "--lib connection::tests::short_call_that_the_server_has_not_processed_is_returned",
        shows: "panicked at .*connection.rs",
        changes: &[Change {
            item: "is_not_processed",
            find: "matches!(error.downcast_ref::<LeanError>(), Some(LeanError::NotProcessed))",
            replace: "matches!(error.downcast_ref::<LeanError>(), Some(LeanError::Full))",
        }],
    },
    Bug {
        name: "184-compare-again-for-each-hub",
        what: "what was compared is remembered for the hub that has responded last",
        test: "-p rangecache-upstream --lib what_was_compared_with_one_hub_is_kept_while_others_answer",
        shows: "assertion failed",
        changes: &[Change {
            item: "Hubs::note",
            find: "if self.all.len() == MAX_HUBS {",
            replace: "if self.all.len() < MAX_HUBS && !self.all.is_empty() {",
        }],
    },
    Bug {
        name: "210-give-up-a-member-that-pauses",
        what: "a call of a client is lost with a member that does not answer a ping for 5 s",
        test: "--lib connection::tests::call_of_a_client_waits_for_a_member_that_pauses",
        shows: r"Kind\(BrokenPipe\)",
        changes: &[Change {
            item: "Timeouts::CLIENTS",
            find: "ping: SILENCE_TIMEOUT,",
            replace: "ping: Duration::from_secs(5),",
        }],
    },
    Bug {
        name: "211-keep-a-client-that-does-not-wait",
        what: "checks of a peer that announces windows of 0 continue to fail, for their client does not wait",
        test: "--lib tests::peer_that_has_to_be_waited_for_answers_checks_and_the_reason_is_known",
        shows: "no check is answered",
        changes: &[Change {
            item: "LeanState::apply",
            find: "self.is_leaving |= self.too_tight.is_some();",
            replace: "",
        }],
    },
    Bug {
        name: "212-end-a-request-with-its-head",
        what: "a call without a message is forwarded as a head alone, to which etcd never responds",
        test: "--test end_to_end bad_input::call_without_a_message_gets_etcds_response",
        shows: "no call waits for ever",
        changes: &[Change {
            item: "Connection::send",
            find: "request.body_mut().end_with_data();",
            replace: "",
        }],
    },
    Bug {
        name: "213-forward-trailers-of-requests",
        what: "trailers of a request reach etcd, which closes the connection of all clients",
        test: "--lib outgoing::tests::trailers_of_a_request_are_left_out",
        shows: "assertion failed: collected.trailers.*is_none",
        changes: &[Change {
            item: "Outgoing::poll_rest",
            find: "
if matches!(&polled, Poll::Ready(Some(Ok(frame))) if frame.is_trailers()) {
    self.rest = Rest::Nothing;
    return Poll::Ready(None);
}
",
            replace: "",
        }],
    },
    Bug {
        name: "232-stream-where-nothing-is-served",
        what: "a RangeStream goes to the only member that has the method, though it does not serve, and others do",
        test: "--lib pool::tests::streams_are_done_without",
        shows: r"called `Result::unwrap_err\(\)` on an `Ok` value",
        changes: &[Change {
            item: "Upstream::streaming",
            find: "connection.lacks_range_stream().is_none() && rank(connection) <= best;",
            replace: "connection.lacks_range_stream().is_none();",
        }],
    },
];
