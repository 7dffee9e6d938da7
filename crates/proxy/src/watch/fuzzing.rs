//! Fuzz target of watches: messages of both sides, and streams that etcd continues for memory.

#![allow(clippy::panic, reason = "compiled for tests and fuzz targets only")]

mod etcd;
mod stream;

use arbitrary::Unstructured;
use bytes::Bytes;
use etcd_store::cache::testing::KeyValue;
use etcd_wire::etcdserverpb::{WatchRequest as Wire, WatchResponse, watch_request::RequestUnion};
use prost::Message as _;

use super::request::{MAX_MESSAGE_BYTES, WatchRequest};
use super::tap::{Head, MAX_HEAD_BYTES, Parsed, last_event};

/// A client's message, a message of etcd's, or a program on a stream that etcd continues.
pub fn watch_session(data: &[u8]) {
    match data.split_first() {
        Some((0..32, message)) => check_request(&Bytes::copy_from_slice(message)),
        Some((32..64, message)) => check_head(message),
        Some((_, program)) => stream::run(Unstructured::new(program)),
        None => {}
    }
}

/// A request that is understood is the same request when it is written for etcd again.
fn check_request(message: &Bytes) {
    let read = Wire::decode(message.clone());
    let is_canonical = read.as_ref().is_ok_and(|read| read.encode_to_vec() == *message);
    let Ok(understood) = WatchRequest::decode(message) else {
        // Left to etcd: for its form, its length, or a value that etcd decides about.
        if let (true, Ok(read)) = (is_canonical && message.len() <= MAX_MESSAGE_BYTES, read) {
            let Some(RequestUnion::CreateRequest(create)) = read.request_union else {
                panic!("{read:?} is not understood");
            };
            assert!(create.watch_id < 0 || create.filters.iter().any(|filter| !(0..2).contains(filter)));
        }
        return;
    };
    assert!(is_canonical);
    let union = read.unwrap_or_default().request_union;
    match (understood, union) {
        (WatchRequest::Create(create), Some(RequestUnion::CreateRequest(mut sent))) => {
            let mut again = create.to_wire(create.watch_id, create.start_revision);
            // etcd watches the first key if there is none, and filters are a set.
            if sent.key.is_empty() {
                sent.key = Bytes::from_static(b"\0");
            }
            for filters in [&mut sent.filters, &mut again.filters] {
                filters.sort_unstable();
                filters.dedup();
            }
            assert_eq!(again, sent);
        }
        (WatchRequest::Cancel(id), Some(RequestUnion::CancelRequest(sent))) => assert_eq!(id, sent.watch_id),
        (WatchRequest::Progress, Some(RequestUnion::ProgressRequest(_))) | (WatchRequest::Nothing, None) => {}
        other => panic!("{other:?}"),
    }
}

/// The beginning of a response has what the response has, and is the same however many bytes have arrived.
fn check_head(message: &[u8]) {
    let parsed = Head::parse(message, true);
    for cut in (0..message.len()).step_by(1 + message.len() / 40) {
        match Head::parse(&message[..cut], false) {
            Parsed::Incomplete => {}
            Parsed::Malformed | Parsed::LongKey(_) => assert!(cut > MAX_HEAD_BYTES),
            early @ Parsed::Head(_) => assert_eq!(early, parsed, "{cut}"),
        }
    }
    let Ok(response) = WatchResponse::decode(message) else {
        return;
    };
    // etcd writes fields once and in order, with every event's key-value; another message may be refused.
    if response.encode_to_vec() != message {
        return;
    }
    let revision = |event: &etcd_wire::etcdserverpb::Event| {
        let kv = KeyValue::decode(&*event.kv).ok()?;
        (kv.mod_revision != 0 && kv.encode_to_vec() == event.kv).then_some(kv.mod_revision)
    };
    let Some(revisions) = response.events.iter().map(revision).collect::<Option<Vec<i64>>>() else {
        return;
    };
    let header = response.header.unwrap_or_default();
    let expected = Head {
        cluster_id: header.cluster_id,
        revision: header.revision,
        watch_id: response.watch_id,
        created: response.created,
        canceled: response.canceled,
        compact_revision: response.compact_revision,
        cancel_reason: response.cancel_reason,
        fragment: response.fragment,
        first_event: revisions.first().copied(),
    };
    assert_eq!(parsed, Parsed::Head(expected));
    assert_eq!(last_event(message), revisions.last().copied());
}
