//! Reads the beginnings of etcd's WatchResponses as they pass through: whom a response is for and what it is, but not
//! its events.
//!
//! etcd encodes fields in the order of their tags, so that the events come last.

use etcd_wire::protobuf::{Fields, Malformed, Value};

/// Bytes of a message that are read in order to find its beginning, which includes the key of its first event. etcd permits
/// longer keys.
pub(super) const MAX_HEAD_BYTES: usize = 64 << 10;

/// Beginning of a WatchResponse.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Head {
    /// Cluster and revision in the header.
    pub(super) cluster_id: u64,
    pub(super) revision: i64,
    pub(super) watch_id: i64,
    pub(super) created: bool,
    pub(super) canceled: bool,
    pub(super) compact_revision: i64,
    pub(super) cancel_reason: String,
    /// More events of the same response follow in the next message.
    pub(super) fragment: bool,
    /// Revision of the first event; `None` without events.
    pub(super) first_event: Option<i64>,
}

/// Result of [`Head::parse`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Parsed {
    Head(Head),
    /// The key of the first event is longer than [`MAX_HEAD_BYTES`]: the head lacks the event's revision.
    LongKey(Head),
    /// More of the message is needed.
    Incomplete,
    /// Not a response of etcd's.
    Malformed,
}

impl Head {
    /// Whether the response is a progress notification.
    pub(super) fn is_progress(&self) -> bool {
        !self.created && !self.canceled && !self.fragment && self.first_event.is_none()
    }

    /// Parses the bytes of a message that have arrived, without the gRPC prefix; `is_whole` if that is all of it. Only
    /// the whole message shows that there are no events.
    pub(super) fn parse(message: &[u8], is_whole: bool) -> Parsed {
        let mut head = Head::default();
        match head.read(message) {
            Ok(End::Message) if is_whole => Parsed::Head(head),
            Ok(End::FirstEvent) => Parsed::Head(head),
            Ok(End::WithinFirstEvent) if message.len() > MAX_HEAD_BYTES => Parsed::LongKey(head),
            _ if is_whole || message.len() > MAX_HEAD_BYTES => Parsed::Malformed,
            _ => Parsed::Incomplete,
        }
    }

    fn read(&mut self, message: &[u8]) -> Result<End, Malformed> {
        let mut fields = Fields::new(message);
        while let Some(field) = fields.next() {
            match field? {
                (1, Value::Bytes(header)) => self.read_header(header)?,
                (2, Value::Number(id)) => self.watch_id = id.cast_signed(),
                (3, Value::Number(flag)) => self.created = flag != 0,
                (4, Value::Number(flag)) => self.canceled = flag != 0,
                (5, Value::Number(revision)) => self.compact_revision = revision.cast_signed(),
                (6, Value::Bytes(reason)) => {
                    self.cancel_reason = String::from_utf8_lossy(reason).into_owned();
                }
                (7, Value::Number(flag)) => self.fragment = flag != 0,
                (11, Value::Bytes(event)) => match event_revision(event) {
                    Ok(revision) => {
                        self.first_event = Some(revision);
                        return Ok(End::FirstEvent);
                    }
                    Err(Malformed) if fields.is_cut_off() => return Ok(End::WithinFirstEvent),
                    Err(Malformed) => return Err(Malformed),
                },
                _ => {}
            }
        }
        Ok(End::Message)
    }

    fn read_header(&mut self, header: &[u8]) -> Result<(), Malformed> {
        for field in Fields::new(header) {
            match field? {
                (1, Value::Number(cluster_id)) => self.cluster_id = cluster_id,
                (3, Value::Number(revision)) => self.revision = revision.cast_signed(),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Revision of the last event of a whole message; `None` without events, or if it is malformed.
pub(super) fn last_event(message: &[u8]) -> Option<i64> {
    let mut last = None;
    for field in Fields::new(message) {
        if let (11, Value::Bytes(event)) = field.ok()? {
            last = Some(event_revision(event).ok()?);
        }
    }
    last
}

/// Position at which the beginning of a message ends.
enum End {
    /// There are no events in the bytes that have arrived.
    Message,
    /// At the revision of the first event.
    FirstEvent,
    /// The bytes that have arrived end before the revision of the first event.
    WithinFirstEvent,
}

/// `mod_revision` of the key-value pair of an event, of which the start is enough.
fn event_revision(event: &[u8]) -> Result<i64, Malformed> {
    for field in Fields::new(event) {
        if let (2, Value::Bytes(kv)) = field? {
            for field in Fields::new(kv) {
                if let (3, Value::Number(revision)) = field? {
                    return Ok(revision.cast_signed());
                }
            }
        }
    }
    Err(Malformed)
}

#[cfg(test)]
mod tests {
    use etcd_store::cache::testing::KeyValue;
    use etcd_wire::etcdserverpb::{Event, ResponseHeader, WatchResponse};
    use prost::Message as _;

    use super::*;

    fn event(key: &str, revision: i64) -> Event {
        Event {
            r#type: 1,
            kv: KeyValue::new(key, revision, vec![7; 3000]).encode_to_vec().into(),
            ..Event::default()
        }
    }

    fn response(events: &[Event]) -> WatchResponse {
        WatchResponse {
            header: Some(ResponseHeader {
                cluster_id: u64::MAX,
                member_id: 3,
                revision: i64::MAX,
                raft_term: 9,
                leader_id: 3,
            }),
            watch_id: 7,
            events: events.to_vec(),
            ..WatchResponse::default()
        }
    }

    #[test]
    fn head_of_events_is_known_before_the_message_ends() {
        let message = WatchResponse {
            fragment: true,
            ..response(&[event("a", 40), event("b", 41)])
        }
        .encode_to_vec();
        let known_from =
            (0..message.len()).find(|cut| Head::parse(&message[..*cut], false) != Parsed::Incomplete);
        assert!(known_from.unwrap() < 100, "{known_from:?}");
        for cut in [known_from.unwrap(), 2000, message.len()] {
            let Parsed::Head(head) = Head::parse(&message[..cut], false) else {
                panic!("{cut}");
            };
            let expected = Head {
                cluster_id: u64::MAX,
                revision: i64::MAX,
                watch_id: 7,
                fragment: true,
                first_event: Some(40),
                ..Head::default()
            };
            assert_eq!(head, expected);
        }
        assert_eq!(last_event(&message), Some(41));
    }

    #[test]
    fn response_without_events_is_known_only_with_its_last_byte() {
        let responses = [
            response(&[]),
            WatchResponse {
                created: true,
                ..response(&[])
            },
            WatchResponse {
                canceled: true,
                compact_revision: 12,
                cancel_reason: "compacted".to_owned(),
                ..response(&[])
            },
        ];
        for response in responses {
            let message = response.encode_to_vec();
            for cut in 0..message.len() {
                assert_eq!(Head::parse(&message[..cut], false), Parsed::Incomplete);
            }
            let Parsed::Head(head) = Head::parse(&message, true) else {
                panic!("{response:?}");
            };
            assert_eq!(head.is_progress(), !response.created && !response.canceled);
            assert_eq!(
                (head.created, head.canceled),
                (response.created, response.canceled)
            );
            assert_eq!(
                (head.compact_revision, head.cancel_reason),
                (response.compact_revision, response.cancel_reason)
            );
            assert_eq!(last_event(&message), None);
        }
    }

    #[test]
    fn fields_of_a_newer_etcd_are_skipped() {
        let unknown = [
            &[0x40, 0x80, 1][..],
            &[0x41, 1, 2, 3, 4, 5, 6, 7, 8],
            &[0x4a, 2, 7, 7],
            &[0x4d, 1, 2, 3, 4],
        ]
        .concat();
        // In the header, in the response, in the event and in its key-value.
        let header = [&[0x18, 9][..], &unknown].concat();
        let kv = [&[0x0a, 1, b'k'][..], &unknown, &[0x18, 40]].concat();
        let event = [&unknown, &[0x12, u8::try_from(kv.len()).unwrap()][..], &kv].concat();
        let mut message = vec![0x0a, u8::try_from(header.len()).unwrap()];
        message.extend(header);
        message.extend([0x10, 7]);
        message.extend(&unknown);
        message.extend([0x5a, u8::try_from(event.len()).unwrap()]);
        message.extend(event);
        let expected = Head {
            revision: 9,
            watch_id: 7,
            first_event: Some(40),
            ..Head::default()
        };
        assert_eq!(Head::parse(&message, true), Parsed::Head(expected));
        assert_eq!(last_event(&message), Some(40));
    }

    #[test]
    fn malformed_message_and_endless_head_are_refused() {
        assert_eq!(Head::parse(b"\x0a\x05ab", true), Parsed::Malformed);
        assert_eq!(Head::parse(&[0x0b, 0, 0, 0, 0], true), Parsed::Malformed);
        let endless = WatchResponse {
            cancel_reason: "r".repeat(MAX_HEAD_BYTES),
            ..response(&[])
        }
        .encode_to_vec();
        assert_eq!(Head::parse(&endless[..MAX_HEAD_BYTES], false), Parsed::Incomplete);
        assert_eq!(Head::parse(&endless[..=MAX_HEAD_BYTES], false), Parsed::Malformed);
    }

    #[test]
    fn head_before_a_long_key_is_known_but_for_the_revision_of_its_event() {
        let message = response(&[event(&"k".repeat(MAX_HEAD_BYTES), 4)]).encode_to_vec();
        assert_eq!(Head::parse(&message[..MAX_HEAD_BYTES], false), Parsed::Incomplete);
        let Parsed::LongKey(head) = Head::parse(&message[..=MAX_HEAD_BYTES], false) else {
            panic!("the key is long");
        };
        assert_eq!(
            (head.watch_id, head.revision, head.first_event),
            (7, i64::MAX, None)
        );
        let Parsed::Head(head) = Head::parse(&message, true) else {
            panic!("the message is whole");
        };
        assert_eq!(head.first_event, Some(4));
    }
}
