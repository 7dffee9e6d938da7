//! Responses of one stream, as gRPC messages: short ones whole, events piece by piece as the client reads (I5).

use std::collections::VecDeque;

use bytes::Buf as _;
use etcd_store::cache::{Change, ChangeKind, Rope, WatchEvent, WatchFields, fragments};
use etcd_wire::grpc::frame::{PREFIX_BYTES, put_prefix};
use rangecache_mirror::fan_out::Picked;

use super::request::Options;

/// Length of the pieces in which a response is produced, in bytes.
const PIECE_BYTES: usize = 32 << 10;
/// Bound of etcd's fragments: its default of `--max-request-bytes`, and 512 KiB.
const FRAGMENT_BYTES: usize = (1536 + 512) << 10;

/// Encodes a response without events.
pub(super) fn control(fields: &WatchFields<'_>) -> Rope {
    start(fields, 0)
}

/// Begins the message of a response with these fields and `event_bytes` of events.
fn start(fields: &WatchFields<'_>, event_bytes: usize) -> Rope {
    let mut prefix = [0; PREFIX_BYTES];
    let head_bytes = fields.encoded_len();
    put_prefix(&mut prefix, (head_bytes + event_bytes) as u64);
    let mut rope = Rope::with_slab(PREFIX_BYTES + head_bytes + event_bytes.min(PIECE_BYTES));
    rope.write(|slab| {
        slab.extend_from_slice(&prefix);
        fields.encode(slab);
    });
    rope
}

/// Events of one watcher on their way to the client: one response, or the fragments of one.
#[derive(Debug)]
pub(super) struct EventMessages {
    picked: Picked,
    options: Options,
    /// Events up to this revision have no previous key-value pair.
    prev_kv_after: i64,
    fields: WatchFields<'static>,
    /// Number of events and their bytes, of each response that was not begun.
    responses: VecDeque<(usize, usize)>,
    /// Events of `picked` that were encoded or filtered.
    passed: usize,
    /// Events of the current response that were not encoded.
    missing: usize,
}

impl EventMessages {
    /// Revision of the last event of `picked` that a watcher with these `options` gets; `None` without any.
    pub(super) fn last_revision(picked: &Picked, options: Options) -> Option<i64> {
        if !options.has_filter() {
            return Some(picked.last_revision());
        }
        picked
            .iter()
            .filter(|change| is_wanted(change, options))
            .last()
            .map(Change::revision)
    }

    /// Prepares the events of `picked` for a watcher with these `options`, at least one; those up to `prev_kv_after` without
    /// the previous key-value pair. `fields` are those of the response with `fragment` false.
    pub(super) fn new(
        picked: Picked,
        options: Options,
        prev_kv_after: i64,
        fields: WatchFields<'static>,
    ) -> EventMessages {
        let wanted = picked.iter().filter(|change| is_wanted(change, options));
        let lengths = wanted.map(|change| event(change, options, prev_kv_after).encoded_len());
        let responses = if options.fragment {
            let lengths: Vec<usize> = lengths.collect();
            let mut rest = lengths.as_slice();
            let cut = fragments(&fields, &lengths, FRAGMENT_BYTES).into_iter();
            cut.map(|count| {
                let (fragment, later) = rest.split_at(count);
                rest = later;
                (count, fragment.iter().sum())
            })
            .collect()
        } else {
            let whole = lengths.fold((0, 0), |(count, bytes), length| (count + 1, bytes + length));
            VecDeque::from([whole])
        };
        EventMessages {
            picked,
            options,
            prev_kv_after,
            fields,
            responses,
            passed: 0,
            missing: 0,
        }
    }

    /// Number of events that are sent.
    pub(super) fn events(&self) -> usize {
        self.responses.iter().map(|(count, _)| count).sum()
    }

    /// Next piece; `None` after the last.
    pub(super) fn next_piece(&mut self) -> Option<Rope> {
        let mut rope = if self.missing > 0 {
            Rope::with_slab(PIECE_BYTES)
        } else {
            let (count, bytes) = self.responses.pop_front()?;
            self.missing = count;
            self.fields.fragment = !self.responses.is_empty();
            start(&self.fields, bytes)
        };
        for change in self.picked.iter_from(self.passed) {
            if self.missing == 0 || rope.remaining() >= PIECE_BYTES {
                break;
            }
            self.passed += 1;
            if is_wanted(change, self.options) {
                event(change, self.options, self.prev_kv_after).write(&mut rope);
                self.missing -= 1;
            }
        }
        Some(rope)
    }

    /// Whether every piece was produced.
    pub(super) fn is_complete(&self) -> bool {
        self.missing == 0 && self.responses.is_empty()
    }
}

/// The event as a watcher with these `options` gets it.
fn event(change: &Change, options: Options, prev_kv_after: i64) -> WatchEvent<'_> {
    WatchEvent::new(change, options.prev_kv && change.revision() > prev_kv_after)
}

/// Whether the filters of a watcher let `change` through.
fn is_wanted(change: &Change, options: Options) -> bool {
    match change.kind {
        ChangeKind::Put => !options.no_put,
        ChangeKind::Delete => !options.no_delete,
    }
}
