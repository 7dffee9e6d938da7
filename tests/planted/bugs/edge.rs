//! Bugs of `rangecache-edge`.

use super::{Bug, Change};

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "36-serve-one-connection-first",
        what: "the connection whose call got a turn stays the next one, until no call of it waits",
        test: "--test end_to_end burst_of_one_connection_delays_another_by_one_call",
        shows: r#""burst", "burst", "burst""#,
        changes: &[Change {
            item: "Line::pop",
            find: "connections.take_turn(connection, BTreeMap::pop_first)",
            replace: "connections.change(connection, BTreeMap::pop_first)",
        }],
    },
    Bug {
        name: "47-first-come-whatever-client",
        what: "calls wait for their turn in the order of their arrival, whatever client and connection they come from",
        test: "--test end_to_end burst_of_one_client_on_many_connections_delays_another_by_one_call",
        shows: r#""noisy", "noisy", "noisy""#,
        changes: &[Change {
            item: "ClientAccount::owner",
            find: "
client: self.client(),
connection: self.number,
",
            replace: "
client: self.client() * 0,
connection: self.number * 0,
",
        }],
    },
    Bug {
        name: "62-first-holder-waits-for-those-behind",
        what: "the first holder of a budget waits for those that wait for it",
        test: "--lib first_holder_that_needs_the_bytes_of_waiting_ones_is_refused_at_once",
        shows: "nothing waited for a deadline",
        changes: &[Change {
            item: "HeldBytes::may_fit_later",
            find: "
(true, false) => state.waiting,
(true, true) => state.waiting - self.bytes,
",
            replace: "
(true, false) => 0,
(true, true) => 0,
",
        }],
    },
    Bug {
        name: "69-keep-the-room-of-a-sent-list",
        what: "a connection that has sent a list keeps its place in the buffers although it has freed the memory",
        test: "--lib seven_frames_of_a_list_leave_in_one_write",
        shows: "an idle connection",
        changes: &[Change {
            item: "Shared::free",
            find: "
if std::mem::take(&mut self.has_room)
    && let Some(room) = &mut self.room
{
    room.give_back();
}
",
            replace: "self.has_room = false;",
        }],
    },
    Bug {
        name: "70-leave-the-rest-to-the-next-write",
        what: "the end of a response stays in TLS until the connection's next write, because the stream is flushed only once",
        test: "--lib stream_is_flushed_until_it_has_sent_what_it_keeps",
        shows: "left: 2",
        changes: &[Change {
            item: "Shared::poll_flush",
            find: "
ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
self.unflushed = false;
",
            replace: "
self.unflushed = false;
ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
",
        }],
    },
    Bug {
        name: "73-unacknowledged-ping",
        what: "the acknowledgement of a ping waits for a request for ever",
        test: "--lib write_batching::tests",
        shows: "acknowledgements_of_pings_leave_without_a_request_in_time",
        changes: &[Change {
            item: "BatchRequests::poll",
            find: "if polled.is_pending() && !is_late {",
            replace: "if polled.is_pending() {",
        }],
    },
    Bug {
        name: "82-give-every-connection-a-large-window",
        what: "receive windows are not taken from their budget",
        test: "--lib server::connections::tests",
        shows: "first_connections_have_large_windows.*panicked",
        changes: &[Change {
            item: "Windows::take",
            find: "*free -= u64::from(more);",
            replace: "*free -= u64::from(more).min(0);",
        }],
    },
    Bug {
        name: "83-let-late-handshakes-keep-their-places",
        what: "handshakes that are late do not give way",
        test: "--lib handshakes::tests",
        shows: "the late one gives way",
        changes: &[Change {
            item: "Handshakes::replace_late",
            find: "&& oldest.get().0.elapsed() >= late",
            replace: "&& oldest.get().0.elapsed() >= late * 100",
        }],
    },
    Bug {
        name: "84-read-first-messages-of-any-length",
        what: "the first message of a TLS handshake may have any length",
        test: "--test end_to_end handshakes::first_message_over_16_kib_ends_its_connection",
        shows: "rangecache closes it",
        changes: &[Change {
            item: "read_hello",
            find: "while received < MAX_HELLO_BYTES {",
            replace: "while received < 64 * MAX_HELLO_BYTES {",
        }],
    },
    Bug {
        name: "85-end-a-place-at-an-upgrade",
        what: "a connection that is upgraded to a WebSocket gives up its place",
        test: "--test end_to_end websockets::websockets_of_one_address_are_bounded_like_its_connections",
        shows: "a fourth one",
        changes: &[Change {
            item: "serve_connection",
            find: "stream.keep(place);",
            replace: "let _place = place;",
        }],
    },
    Bug {
        name: "89-count-connections-alone",
        what: "a client takes the buffers by many connections",
        test: "--lib limits::bytes",
        shows: "client_with_many_connections_takes_no_more_than_its_part_while_others_are_connected",
        changes: &[Change {
            item: "Part::permits",
            find: "ask.is_alone || ask.of_client <= fair.max(max / CLIENT_DIVISOR)",
            replace: "ask.is_alone || fair > 0",
        }],
    },
    Bug {
        name: "92-name-of-the-newest-certificate",
        what: "a connection counts as named if the newest certificate has a name, not its own",
        test: "--lib name_of_a_connection_is_that_of_the_certificate_which_it_presented",
        shows: "panicked at .*src/tls/tests.rs",
        changes: &[Change {
            item: "Connector::handshake",
            find: "Ok((Either::Right(Box::new(stream.into())), named))",
            replace: "
let named = tls.current.current().common_name.is_some().then(|| tls.named.clone());
Ok((Either::Right(Box::new(stream.into())), named))
",
        }],
    },
    Bug {
        name: "214-leave-out-the-date",
        what: "answers from memory over HTTP/1 have no date",
        test: "--test end_to_end gateway::generated_json_ranges_equal_etcds_3_7",
        shows: r#""date""#,
        changes: &[Change {
            item: "server",
            find: ".max_buf_size(MAX_HEADER_BYTES as usize)",
            replace: "
.auto_date_header(false)
.max_buf_size(MAX_HEADER_BYTES as usize)
",
        }],
    },
];
