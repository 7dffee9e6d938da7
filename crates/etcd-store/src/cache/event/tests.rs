use bytes::Buf;
use etcd_wire::etcdserverpb;
use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::cache::testing::KeyValue;

/// An event of a random history: a put or a delete, with the pair before it or without.
#[derive(Clone, Debug)]
struct Sample {
    is_delete: bool,
    value_bytes: usize,
    prev_bytes: Option<usize>,
}

fn sample() -> impl Strategy<Value = Sample> {
    let length = || prop_oneof![0..200_usize, 900..1100_usize, 9000..30_000_usize];
    (any::<bool>(), length(), prop::option::of(length())).prop_map(|(is_delete, value_bytes, prev_bytes)| {
        Sample {
            is_delete,
            value_bytes,
            prev_bytes,
        }
    })
}

fn change(sample: &Sample) -> Change {
    let mut change = if sample.is_delete {
        let key_and_revision = KeyValue {
            create_revision: 0,
            version: 0,
            ..KeyValue::new("key", 7, "")
        };
        Change::delete(key_and_revision.entry())
    } else {
        Change::put(KeyValue::new("key", 7, vec![b'v'; sample.value_bytes]).entry())
    };
    change.replaced = sample
        .prev_bytes
        .map(|length| KeyValue::new("key", 3, vec![b'p'; length]).entry());
    change
}

fn message(entry: &Entry) -> bytes::Bytes {
    KeyValue::from(entry).encode_to_vec().into()
}

fn fields(watch_id: i64, fragment: bool) -> WatchFields<'static> {
    WatchFields {
        header: ResponseHeader {
            cluster_id: u64::MAX,
            member_id: 2,
            revision: 300,
            raft_term: 4,
            leader_id: 5,
        },
        watch_id,
        fragment,
        ..WatchFields::default()
    }
}

fn by_prost(fields: &WatchFields<'_>, events: Vec<etcdserverpb::Event>) -> Vec<u8> {
    let header = etcdserverpb::ResponseHeader {
        cluster_id: fields.header.cluster_id,
        member_id: fields.header.member_id,
        revision: fields.header.revision,
        raft_term: fields.header.raft_term,
        leader_id: fields.header.leader_id,
    };
    etcdserverpb::WatchResponse {
        header: Some(header),
        watch_id: fields.watch_id,
        created: fields.created,
        canceled: fields.canceled,
        compact_revision: fields.compact_revision,
        cancel_reason: fields.cancel_reason.to_owned(),
        fragment: fields.fragment,
        events,
    }
    .encode_to_vec()
}

proptest! {
    #[test]
    fn response_equals_prost_byte_for_byte(
        samples in prop::collection::vec(sample(), 0..8),
        watch_id in prop_oneof![Just(0), Just(1), Just(-1), Just(i64::MAX), any::<i64>()],
        (created, canceled, fragment, with_prev_kv) in any::<(bool, bool, bool, bool)>(),
        compact_revision in prop_oneof![Just(0), 1..1000_i64],
        cancel_reason in prop_oneof![Just(""), Just("etcdserver: mvcc: required revision has been compacted")],
        revision in prop_oneof![Just(0), any::<i64>()],
    ) {
        let fields = WatchFields {
            created,
            canceled,
            compact_revision,
            cancel_reason,
            header: ResponseHeader { revision, ..fields(0, false).header },
            ..fields(watch_id, fragment)
        };
        let changes: Vec<_> = samples.iter().map(change).collect();
        let mut rope = Rope::with_slab(0);
        rope.write(|slab| fields.encode(slab));
        prop_assert_eq!(rope.remaining(), fields.encoded_len());
        let mut expected = Vec::new();
        for change in &changes {
            let event = WatchEvent::new(change, with_prev_kv);
            let before = rope.remaining();
            event.write(&mut rope);
            prop_assert_eq!(rope.remaining() - before, event.encoded_len());
            let prev = change.replaced.as_ref().filter(|_| with_prev_kv);
            expected.push(etcdserverpb::Event {
                r#type: i32::from(change.kind == ChangeKind::Delete),
                kv: message(&change.entry),
                prev_kv: prev.map(message).unwrap_or_default(),
            });
        }
        let length = rope.remaining();
        prop_assert_eq!(rope.copy_to_bytes(length), by_prost(&fields, expected));
    }

    #[test]
    fn fragments_are_cut_where_etcd_cuts_them(
        lengths in prop::collection::vec(3..400_usize, 0..40),
        max_bytes in 1..2000_usize,
    ) {
        let fields = fields(3, false);
        let head = fields.encoded_len();
        // Written as etcd's rule reads: events are added to a response until its size reaches the bound, which the
        // event that reached it then leaves, unless it is alone.
        let mut expected = Vec::new();
        if head + lengths.iter().sum::<usize>() < max_bytes || lengths.len() < 2 {
            expected.push(lengths.len());
        } else {
            let mut at = 0;
            while at < lengths.len() {
                let size = |count: usize| head + FRAGMENT_BYTES + lengths[at..at + count].iter().sum::<usize>();
                let fitting = (1..=lengths.len() - at).take_while(|count| size(*count) < max_bytes);
                let count = fitting.last().unwrap_or(1);
                expected.push(count);
                at += count;
            }
        }
        prop_assert_eq!(fragments(&fields, &lengths, max_bytes), expected);
    }
}

#[test]
fn event_over_the_bound_is_sent_alone() {
    let fields = fields(0, false);
    assert_eq!(fragments(&fields, &[500, 10, 500, 500], 100), [1, 1, 1, 1]);
    assert_eq!(fragments(&fields, &[500], 100), [1]);
    assert_eq!(fragments(&fields, &[], 100), [0]);
}
