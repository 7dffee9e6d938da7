//! Decodes the messages of a client's Watch stream, encodes those for etcd, and allocates the ids of its watchers.
//!
//! Decoding is strict: a message that rangecache does not understand completely is one for etcd.

use bytes::Bytes;
use etcd_store::keyspace::Interval;
use etcd_wire::etcdserverpb::{WatchCreateRequest, WatchRequest as Wire};
use etcd_wire::{etcdserverpb::watch_request::RequestUnion, grpc::frame::framed};
use prost::Message as _;
use tokio::time::Instant;

/// Longest message that is decoded, in bytes: two keys and a few numbers.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// Memory of a watcher without its key and range end, in bytes, with the topic of its range in the hub: it may be the only
/// watcher of it.
pub(super) const WATCHER_BYTES: u64 = 512;
/// Id in responses that are about no watcher, and of watchers that were not created.
pub(super) const NO_WATCHER: i64 = -1;
/// etcd's filter of puts.
const NO_PUT: i32 = 0;
/// etcd's filter of deletes.
const NO_DELETE: i32 = 1;

/// Request message of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchRequest {
    /// Creates a watcher.
    Create(Create),
    /// Cancels the watcher with this id.
    Cancel(i64),
    /// Requests a progress notification for the whole stream.
    Progress,
    /// Message without content, which etcd ignores.
    Nothing,
}

/// Request to create a watcher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Create {
    /// First key; never empty.
    pub(super) key: Bytes,
    /// End of the range as etcd's API defines it: empty for one key, `\0` for every key from the first one on.
    pub(super) range_end: Bytes,
    /// First revision whose events are sent; 0 for the events from now on.
    pub(super) start_revision: i64,
    /// Id that the client chose; 0 for one that the server allocates.
    pub(super) watch_id: i64,
    pub(super) options: Options,
}

/// Options of a watcher: additions to its events, and events that it does not get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) progress_notify: bool,
    pub(super) prev_kv: bool,
    pub(super) fragment: bool,
    pub(super) no_put: bool,
    pub(super) no_delete: bool,
}

impl Options {
    /// Whether there are events that the watcher does not get.
    pub(super) fn has_filter(self) -> bool {
        // All fields are named, so that a new option does not compile before it is decided here.
        let Options {
            progress_notify: _,
            prev_kv: _,
            fragment: _,
            no_put,
            no_delete,
        } = self;
        no_put || no_delete
    }
}

/// The message is for etcd: it has a field or a value that rangecache does not know, or is not encoded canonically.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnknownRequest;

impl WatchRequest {
    /// Decodes a message without its gRPC prefix.
    ///
    /// # Errors
    /// [`UnknownRequest`].
    pub(super) fn decode(message: &Bytes) -> Result<WatchRequest, UnknownRequest> {
        if message.len() > MAX_MESSAGE_BYTES {
            return Err(UnknownRequest);
        }
        let request = Wire::decode(message.clone()).map_err(|_| UnknownRequest)?;
        // Unknown and repeated fields do not survive.
        if request.encode_to_vec() != *message {
            return Err(UnknownRequest);
        }
        Ok(match request.request_union {
            None => WatchRequest::Nothing,
            Some(RequestUnion::CreateRequest(create)) => WatchRequest::Create(Create::from_wire(create)?),
            Some(RequestUnion::CancelRequest(cancel)) => WatchRequest::Cancel(cancel.watch_id),
            Some(RequestUnion::ProgressRequest(_)) => WatchRequest::Progress,
        })
    }
}

/// A request as one message for etcd.
pub(super) fn encode(union: RequestUnion) -> Bytes {
    framed(&Wire {
        request_union: Some(union),
    })
}

impl Create {
    fn from_wire(create: WatchCreateRequest) -> Result<Create, UnknownRequest> {
        let is_unknown = |filter: &i32| !matches!(*filter, NO_PUT | NO_DELETE);
        if create.watch_id < 0 || create.filters.iter().any(is_unknown) {
            return Err(UnknownRequest);
        }
        Ok(Create {
            key: if create.key.is_empty() {
                Bytes::from_static(b"\0")
            } else {
                create.key
            },
            range_end: create.range_end,
            start_revision: create.start_revision,
            watch_id: create.watch_id,
            options: Options {
                progress_notify: create.progress_notify,
                prev_kv: create.prev_kv,
                fragment: create.fragment,
                no_put: create.filters.contains(&NO_PUT),
                no_delete: create.filters.contains(&NO_DELETE),
            },
        })
    }

    /// The message for etcd, with this id and start.
    pub(super) fn to_wire(&self, watch_id: i64, start_revision: i64) -> WatchCreateRequest {
        let Options {
            progress_notify,
            prev_kv,
            fragment,
            no_put,
            no_delete,
        } = self.options;
        let filters = [(no_put, NO_PUT), (no_delete, NO_DELETE)].into_iter();
        WatchCreateRequest {
            key: self.key.clone(),
            range_end: self.range_end.clone(),
            start_revision,
            progress_notify,
            filters: filters
                .filter_map(|(is_set, filter)| is_set.then_some(filter))
                .collect(),
            prev_kv,
            watch_id,
            fragment,
        }
    }

    /// Memory of the watcher, in bytes. The hub has a second copy of the keys.
    pub(super) fn watcher_bytes(&self) -> u64 {
        WATCHER_BYTES + 2 * (self.key.len() + self.range_end.len()) as u64
    }

    /// Keys that the watcher watches.
    pub(super) fn interval(&self) -> Interval<'_> {
        match &*self.range_end {
            b"" => Interval::Single(&self.key),
            b"\0" => Interval::From(&self.key),
            end => Interval::Range(&self.key, end),
        }
    }

    /// Whether the range holds no key, which etcd refuses.
    pub(super) fn is_empty_range(&self) -> bool {
        matches!(self.interval(), Interval::Range(key, end) if end <= key)
    }
}

/// A watcher of a stream on its way from one source to the other. The revision alone decides which source sends an event: the old
/// one up to `through`, the new one from the next revision on (W9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Carried {
    pub(super) id: i64,
    pub(super) create: Create,
    /// The client has every event of the watcher up to this revision, and none above it. For a watcher of the future
    /// the revision before its start.
    pub(super) through: i64,
    /// Time of the last event or notification that the client got, or of the creation: an interval later it gets a
    /// notification. `None` if it asked for none.
    pub(super) quiet_since: Option<Instant>,
}

/// Allocator of watcher ids, by etcd's rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ids {
    next: i64,
}

impl Ids {
    /// Returns the id of a watcher whose client asked for `requested`; `None` if another watcher has that id. Ids for
    /// clients that asked for 0 ascend and skip those that `is_taken`.
    pub(super) fn allocate(&mut self, requested: i64, is_taken: impl Fn(i64) -> bool) -> Option<i64> {
        if requested != 0 {
            return (!is_taken(requested)).then_some(requested);
        }
        while is_taken(self.next) {
            self.next += 1;
        }
        self.next += 1;
        Some(self.next - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use etcd_wire::etcdserverpb::{WatchCancelRequest, WatchProgressRequest};

    use super::*;

    fn encode(union: RequestUnion) -> Bytes {
        let request_union = Some(union);
        Wire { request_union }.encode_to_vec().into()
    }

    fn create(change: impl FnOnce(&mut WatchCreateRequest)) -> Result<WatchRequest, UnknownRequest> {
        let mut create = WatchCreateRequest {
            key: "k".into(),
            ..WatchCreateRequest::default()
        };
        change(&mut create);
        WatchRequest::decode(&encode(RequestUnion::CreateRequest(create)))
    }

    fn created(change: impl FnOnce(&mut WatchCreateRequest)) -> Create {
        match create(change) {
            Ok(WatchRequest::Create(create)) => create,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_kind_of_request_is_decoded() {
        let cancel = RequestUnion::CancelRequest(WatchCancelRequest { watch_id: i64::MAX });
        assert_eq!(
            WatchRequest::decode(&encode(cancel)),
            Ok(WatchRequest::Cancel(i64::MAX))
        );
        let progress = RequestUnion::ProgressRequest(WatchProgressRequest {});
        assert_eq!(
            WatchRequest::decode(&encode(progress)),
            Ok(WatchRequest::Progress)
        );
        assert_eq!(WatchRequest::decode(&Bytes::new()), Ok(WatchRequest::Nothing));
        let all = created(|create| {
            create.range_end = "l".into();
            create.start_revision = 7;
            create.watch_id = 9;
            create.filters = vec![1, 0, 1];
            (create.prev_kv, create.fragment, create.progress_notify) = (true, true, true);
        });
        let options = Options {
            progress_notify: true,
            prev_kv: true,
            fragment: true,
            no_put: true,
            no_delete: true,
        };
        assert_eq!((all.start_revision, all.watch_id, all.options), (7, 9, options));
        assert_eq!(all.interval(), Interval::Range(b"k", b"l"));
        assert_eq!(created(|_| ()).options, Options::default());
    }

    #[test]
    fn message_with_anything_unknown_is_not_understood() {
        let negative_id = create(|create| create.watch_id = -1);
        let filter = create(|create| create.filters = vec![2]);
        let long = create(|create| create.key = vec![0; MAX_MESSAGE_BYTES].into());
        for (what, decoded) in [("id", negative_id), ("filter", filter), ("length", long)] {
            assert_eq!(decoded, Err(UnknownRequest), "{what}");
        }
        let raw = [
            ("unknown field of the message", vec![0x20, 1]),
            (
                "unknown field of the create",
                vec![0x0a, 5, 0x0a, 1, b'k', 0x48, 1],
            ),
            ("repeated field", vec![0x0a, 6, 0x0a, 1, b'a', 0x0a, 1, b'k']),
            ("two requests", vec![0x0a, 3, 0x0a, 1, b'k', 0x1a, 0]),
            ("overlong number", vec![0x0a, 6, 0x0a, 1, b'k', 0x18, 0x81, 0]),
            ("cut off", vec![0x0a, 9, 0x0a, 1]),
        ];
        for (what, bytes) in raw {
            assert_eq!(WatchRequest::decode(&bytes.into()), Err(UnknownRequest), "{what}");
        }
    }

    #[test]
    fn ranges_are_read_as_etcd_reads_them() {
        let range = |key: &'static str, end: &'static str| {
            created(|create| (create.key, create.range_end) = (key.into(), end.into()))
        };
        assert_eq!(range("", "").interval(), Interval::Single(b"\0"));
        assert_eq!(range("", "\0").interval(), Interval::From(b"\0"));
        assert_eq!(range("k", "\0").interval(), Interval::From(b"k"));
        assert_eq!(range("k", "").interval(), Interval::Single(b"k"));
        for (key, end, is_empty) in [
            ("k", "k", true),
            ("k", "a", true),
            ("k", "\0\0", true),
            ("k", "\0", false),
            ("k", "", false),
            ("k", "l", false),
            ("", "\0\0", false),
        ] {
            assert_eq!(range(key, end).is_empty_range(), is_empty, "{key:?} {end:?}");
        }
    }

    #[test]
    fn ids_ascend_and_skip_those_that_clients_chose() {
        let mut ids = Ids::default();
        let mut taken = HashSet::new();
        let mut allocate = |requested, taken: &mut HashSet<i64>| {
            let id = ids.allocate(requested, |id| taken.contains(&id));
            taken.extend(id);
            id
        };
        assert_eq!(allocate(1, &mut taken), Some(1));
        assert_eq!(allocate(0, &mut taken), Some(0));
        assert_eq!(allocate(0, &mut taken), Some(2));
        assert_eq!(allocate(1, &mut taken), None, "a refused create consumes no id");
        assert_eq!(allocate(i64::MAX, &mut taken), Some(i64::MAX));
        taken.remove(&0);
        assert_eq!(
            allocate(0, &mut taken),
            Some(3),
            "a free id is not allocated again"
        );
        taken.remove(&1);
        assert_eq!(allocate(1, &mut taken), Some(1), "but a client may choose it");
    }
}
