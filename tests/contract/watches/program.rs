//! Generated watch programs: writes, compactions, and requests on some watch streams. A seed repeats a program.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use testkit::pb::{DeleteRangeRequest, RequestOp, WatchCreateRequest, prefix_end, request_op::Request};

/// Keys that are written, at the edges of the key order and under two prefixes.
const KEYS: [&[u8]; 18] = [
    b"\0",
    b"\0\0",
    b"a",
    b"a\0",
    b"a/",
    b"a/1",
    b"a/1\0",
    b"a/2",
    b"a/2/x",
    b"a/3",
    b"a0",
    b"b/1",
    b"b/2",
    b"b/3",
    b"c",
    b"\xff",
    b"\xff\0",
    b"\xff\xff",
];
/// Size of large values: three of them fill a request of etcd, and with previous values a response is cut.
const LARGE_VALUE: usize = 450 << 10;
/// Streams of a program, at most.
pub(super) const STREAMS: usize = 3;

/// Start of a watcher, relative to the store when it is created.
#[derive(Clone, Copy, Debug)]
pub(super) enum Start {
    Now,
    /// This share, in percent, of the way from the compacted to the current revision.
    Past(i64),
    AtCompaction,
    BeforeCompaction,
    /// This many revisions above the current one.
    Future(i64),
    Negative,
    Never,
}

/// The watcher that a cancel names.
#[derive(Clone, Copy, Debug)]
pub(super) enum Which {
    /// A watcher created on the stream, cancelled ones included.
    Known(usize),
    Unknown(i64),
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Create {
        stream: usize,
        start: Start,
        create: WatchCreateRequest,
        /// The next step does not wait for its `created`.
        is_pipelined: bool,
    },
    Cancel {
        stream: usize,
        which: Which,
    },
    Progress {
        stream: usize,
    },
    /// A request that is neither a create, nor a cancel, nor for progress.
    Nothing {
        stream: usize,
    },
    HalfClose {
        stream: usize,
    },
    /// Each list of operations is one transaction.
    Write(Vec<Vec<RequestOp>>),
    /// Compacts at this share, in percent, of the way from the compacted to the current revision.
    Compact(i64),
    /// Waits until every watcher has every event.
    Settle,
}

/// Writes that give the program a history of its own.
pub(super) fn history(random: &mut StdRng) -> Vec<Vec<RequestOp>> {
    (0..random.random_range(8..16))
        .map(|_| transaction(random, false))
        .collect()
}

/// Program of a seed.
pub(super) fn program(seed: u64) -> (StdRng, Vec<Step>) {
    let mut random = StdRng::seed_from_u64(seed);
    let streams = random.random_range(1..=STREAMS);
    let has_large = random.random_ratio(1, 5);
    let mut steps = Vec::new();
    for stream in 0..streams {
        steps.push(create(&mut random, stream));
    }
    for _ in 0..random.random_range(12..30) {
        let stream = random.random_range(0..streams);
        steps.push(match random.random_range(0..100) {
            0..40 => create(&mut random, stream),
            40..50 => Step::Cancel {
                stream,
                which: which(&mut random),
            },
            50..58 => Step::Progress { stream },
            58..60 => Step::Nothing { stream },
            60..61 => Step::HalfClose { stream },
            61..66 => Step::Compact(random.random_range(0..=100)),
            66..70 => Step::Settle,
            _ => Step::Write(
                (0..random.random_range(1..5))
                    .map(|_| transaction(&mut random, has_large))
                    .collect(),
            ),
        });
    }
    for stream in 0..streams {
        steps.push(Step::Progress { stream });
    }
    (random, steps)
}

fn which(random: &mut StdRng) -> Which {
    if random.random_ratio(1, 5) {
        Which::Unknown(*[77, 1 << 40, -1, i64::MIN].choose(random).unwrap())
    } else {
        Which::Known(random.random_range(0..8))
    }
}

fn create(random: &mut StdRng, stream: usize) -> Step {
    let start = match random.random_range(0..100) {
        0..40 => Start::Now,
        40..70 => Start::Past(random.random_range(0..=100)),
        70..77 => Start::AtCompaction,
        77..84 => Start::BeforeCompaction,
        84..94 => Start::Future(random.random_range(1..12)),
        94..97 => Start::Negative,
        _ => Start::Never,
    };
    let (key, range_end) = range(random);
    let filters = match random.random_range(0..10) {
        0 => vec![0],
        1 => vec![1],
        2 => vec![1, 0, 1],
        _ => Vec::new(),
    };
    let watch_id = match random.random_range(0..10) {
        0..6 => 0,
        6..9 => random.random_range(1..6),
        _ => *[i64::MAX, 1 << 33, 9].choose(random).unwrap(),
    };
    Step::Create {
        stream,
        start,
        create: WatchCreateRequest {
            key,
            range_end,
            start_revision: 0,
            progress_notify: random.random_ratio(1, 4),
            filters,
            prev_kv: random.random_bool(0.5),
            watch_id,
            fragment: random.random_ratio(1, 3),
        },
        is_pipelined: !matches!(start, Start::Now) && random.random_ratio(1, 3),
    }
}

/// `key` and `range_end` of every kind, some of them refused.
fn range(random: &mut StdRng) -> (Vec<u8>, Vec<u8>) {
    let key = |random: &mut StdRng| KEYS.choose(random).unwrap().to_vec();
    match random.random_range(0..100) {
        0..20 => (key(random), Vec::new()),
        20..25 => (b"missing".to_vec(), Vec::new()),
        25..45 => {
            let prefix = *[&b"a/"[..], b"a", b"b/", b"a/1", b"nothing/"]
                .choose(random)
                .unwrap();
            (prefix.to_vec(), prefix_end(prefix))
        }
        // Every second pair is in the wrong order, and refused.
        45..55 => (key(random), key(random)),
        55..70 => {
            let (one, other) = (key(random), key(random));
            (
                one.clone().min(other.clone()),
                [&one.max(other)[..], b"\0"].concat(),
            )
        }
        70..85 => (key(random), b"\0".to_vec()),
        85..95 => (b"\0".to_vec(), b"\0".to_vec()),
        95..97 => (Vec::new(), b"\0".to_vec()),
        97..98 => (Vec::new(), Vec::new()),
        _ => {
            let key = key(random);
            (key.clone(), [&key[..], b"\0"].concat())
        }
    }
}

/// Puts and deletes of keys in one revision; in one of four, some of the keys that it puts are deleted again.
fn transaction(random: &mut StdRng, may_be_large: bool) -> Vec<RequestOp> {
    let mut operations = changes(random, may_be_large);
    if random.random_ratio(3, 4) {
        return operations;
    }
    for index in (0..operations.len()).rev() {
        if let Some(Request::RequestPut(put)) = &operations[index].request
            && random.random_bool(0.5)
        {
            let delete = RequestOp::delete(&put.key);
            operations.insert(random.random_range(index + 1..=operations.len()), delete);
        }
    }
    operations.into_iter().map(RequestOp::nested).collect()
}

/// Puts and deletes of different keys.
fn changes(random: &mut StdRng, may_be_large: bool) -> Vec<RequestOp> {
    let is_large = may_be_large && random.random_ratio(1, 4);
    let count = match random.random_range(0..4) {
        _ if is_large => 3,
        0 => random.random_range(2..8),
        _ => 1,
    };
    let mut keys = KEYS.to_vec();
    (0..count)
        .map(|_| {
            let key = keys.swap_remove(random.random_range(0..keys.len()));
            if !is_large && random.random_ratio(1, 3) {
                return RequestOp::delete(key);
            }
            let size = if is_large {
                LARGE_VALUE
            } else {
                *[0, 1, 20, 2_000].choose(random).unwrap()
            };
            RequestOp::put(key, vec![random.random_range(b'a'..=b'z'); size])
        })
        .collect()
}

/// Deletes every key.
pub(super) fn delete_everything() -> Vec<RequestOp> {
    let delete = DeleteRangeRequest {
        key: b"\0".to_vec(),
        range_end: b"\0".to_vec(),
    };
    vec![RequestOp {
        request: Some(Request::RequestDeleteRange(delete)),
    }]
}
