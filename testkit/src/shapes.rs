//! A store with every kind of key, and Range requests of every shape.

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::grpc::Client;
use crate::pb::{
    ASCEND, BY_CREATE, BY_KEY, BY_MOD, BY_VALUE, BY_VERSION, DESCEND, KeyValue, RangeRequest, RequestOp,
    prefix_end,
};

const PODS: &str = "/registry/pods/";

/// Keys at the edges of the key order, as contents or as ends.
const EDGE_KEYS: [&[u8]; 12] = [
    b"\0",
    b"\0\0",
    b"\0\0\x01",
    b"\x01",
    b"bin",
    b"bin\0",
    b"bin\0\0",
    b"bin\0\xff",
    b"bin\xff",
    b"bin\xff\xff",
    b"\xff",
    b"\xff\xff\xff",
];

fn pod(namespace: usize, number: usize) -> String {
    format!("{PODS}ns-{namespace}/pod-{number:02}")
}

/// Writes the older part of the store's history: about 130 revisions.
pub async fn write_first_part(etcd: &Client) {
    for lease in [7001, 7002] {
        etcd.grant_lease(lease, 3600).await.unwrap();
    }
    for namespace in 0..4 {
        for number in 0..12 {
            // Every third value is the same, so that sorting by value has ties.
            let value = if number % 3 == 0 {
                "same".to_owned()
            } else {
                // Long enough to be worth packing.
                format!("{namespace}-{number}{}", " of many like it".repeat(20))
            };
            etcd.put(pod(namespace, number), value).await.unwrap();
        }
    }
    for key in EDGE_KEYS {
        etcd.put(key, key).await.unwrap();
    }
    for number in 0..6 {
        let lease = 7001 + number % 2;
        etcd.put_with_lease(format!("/registry/events/e{number}"), "happened", lease)
            .await
            .unwrap();
    }
    etcd.put("/registry/sizes/empty", "").await.unwrap();
    etcd.put("/registry/sizes/one", "1").await.unwrap();
    etcd.put("/registry/sizes/large", vec![b'x'; 100 << 10])
        .await
        .unwrap();
    rewrite(etcd, 0).await;
}

/// Writes the newer part, which changes keys of the older part: about 70 revisions.
pub async fn write_second_part(etcd: &Client) {
    rewrite(etcd, 1).await;
    let batch = (0..20).map(|n| RequestOp::put(format!("/registry/batch/{n:02}"), "made in one revision"));
    etcd.transact(batch.collect()).await.unwrap();
    etcd.transact(vec![
        RequestOp::put(pod(0, 0), "moved with its neighbours"),
        RequestOp::put(pod(0, 2), "moved with its neighbours"),
        RequestOp::delete(pod(0, 3)),
        RequestOp::put("/registry/new", "in a mixed transaction"),
    ])
    .await
    .unwrap();
    etcd.delete_prefix("/registry/events/").await.unwrap();
    etcd.put_with_lease("/registry/events/again", "happened", 7001)
        .await
        .unwrap();
    etcd.put("/registry/sizes/large", vec![b'y'; 101 << 10])
        .await
        .unwrap();
    etcd.put("/registry/sizes/empty", "").await.unwrap();
    etcd.delete(b"bin\0").await.unwrap();
    etcd.put(b"bin\0\0", "again").await.unwrap();
}

/// Updates, deletes and recreates keys, some in one revision, so that versions and create revisions differ between keys.
async fn rewrite(etcd: &Client, salt: usize) {
    let (updated, created) = (pod(3, salt), "/registry/gone");
    let changes = vec![
        RequestOp::put(&updated, "soon gone"),
        RequestOp::put(created, "soon gone"),
        RequestOp::delete(&updated),
        RequestOp::delete(created),
    ];
    let nested = changes.into_iter().map(RequestOp::nested);
    etcd.transact(nested.collect()).await.unwrap();
    for namespace in 0..4 {
        for number in 0..12 {
            match (namespace * 5 + number * 3 + salt) % 7 {
                0 | 1 => drop(
                    etcd.put(pod(namespace, number), format!("updated {salt}"))
                        .await
                        .unwrap(),
                ),
                2 => drop(etcd.delete(pod(namespace, number)).await.unwrap()),
                3 => {
                    etcd.delete(pod(namespace, number)).await.unwrap();
                    etcd.put(pod(namespace, number), "same").await.unwrap();
                }
                _ => {}
            }
        }
    }
}

/// Revisions at which the behaviour of a store changes.
#[derive(Clone, Copy, Debug)]
pub struct Revisions {
    /// Revision compacted last; it is still readable.
    pub compacted: i64,
    /// The oldest revision that a mirror can have in its history.
    pub loaded: i64,
    /// Current revision of the store.
    pub current: i64,
}

impl Revisions {
    /// Whether a mirror must be able to answer a read at `revision`; 0 and below mean the current one, like in etcd.
    pub fn in_window(&self, revision: i64) -> bool {
        revision <= 0 || (revision >= self.loaded.max(self.compacted) && revision <= self.current)
    }
}

fn ranges() -> Vec<RangeRequest> {
    let mut ranges = vec![
        RangeRequest::everything(),
        RangeRequest::one(b"\0"),
        RangeRequest::range(b"\0", b"\x01"),
        RangeRequest::range(b"\0\0", b"\0"),
        RangeRequest::range(b"bin\0", b"\0"),
        RangeRequest::range(b"\xff\xff\xff", b"\0"),
        RangeRequest::range(b"\xff\xff\xff\xff", b"\0"),
        RangeRequest::range(b"bin\0", b"bin\xff"),
        RangeRequest::range(b"bin\xff", b"bin\xff\0"),
        RangeRequest::prefix(PODS),
        RangeRequest::prefix("/registry/pods/ns-2/"),
        RangeRequest::prefix("/registry/batch/"),
        RangeRequest::prefix("/registry/events/"),
        RangeRequest::prefix("/registry/sizes/"),
        RangeRequest::prefix("/registry/nothing/"),
        RangeRequest::range(pod(1, 3), pod(2, 5)),
        // An end before the key, and an end equal to the key: both ranges are empty.
        RangeRequest::range(pod(2, 5), pod(1, 3)),
        RangeRequest::range(pod(1, 5), pod(1, 5)),
        // The next page of a client: from the last key of the page before, plus a \0.
        RangeRequest::range(format!("{}\0", pod(1, 3)), prefix_end(PODS.as_bytes())),
        RangeRequest::one("/registry/no such key"),
        RangeRequest::one("/registry/sizes/large"),
        RangeRequest::one("/registry/sizes/empty"),
        RangeRequest::one("/registry/events/again"),
    ];
    ranges.extend([0, 3, 5].map(|number| RangeRequest::one(pod(0, number))));
    ranges.extend(EDGE_KEYS.map(RangeRequest::one));
    ranges
}

fn options(at: Revisions) -> Vec<RangeRequest> {
    let none = RangeRequest::default;
    let mut options = vec![
        none(),
        RangeRequest {
            keys_only: true,
            ..none()
        },
        RangeRequest {
            count_only: true,
            ..none()
        },
        RangeRequest {
            keys_only: true,
            count_only: true,
            ..none()
        },
        RangeRequest {
            serializable: true,
            ..none()
        },
        RangeRequest {
            serializable: true,
            limit: 2,
            keys_only: true,
            ..none()
        },
        RangeRequest {
            count_only: true,
            limit: 1,
            revision: at.current,
            ..none()
        },
    ];
    let limits = [
        1,
        2,
        3,
        11,
        12,
        13,
        36,
        1000,
        -1,
        i64::MIN,
        i64::MAX - 1,
        i64::MAX,
    ];
    options.extend(limits.map(|limit| RangeRequest { limit, ..none() }));
    let (old, new) = (at.compacted, at.current);
    let revisions = [
        -1,
        i64::MIN,
        1,
        old - 1,
        old,
        old + 1,
        at.loaded,
        at.loaded + 1,
        new - 1,
        new,
        new + 1,
        i64::MAX,
    ];
    for revision in revisions {
        options.push(RangeRequest { revision, ..none() });
        options.push(RangeRequest {
            revision,
            limit: 3,
            serializable: true,
            ..none()
        });
    }
    for sort_target in [BY_KEY, BY_VERSION, BY_CREATE, BY_MOD, BY_VALUE] {
        for sort_order in [0, ASCEND, DESCEND] {
            options.push(RangeRequest {
                sort_order,
                sort_target,
                ..none()
            });
            options.push(RangeRequest {
                sort_order,
                sort_target,
                limit: 5,
                ..none()
            });
            options.push(RangeRequest {
                sort_order,
                sort_target,
                limit: 13,
                keys_only: true,
                ..none()
            });
        }
    }
    let middle = (at.loaded + at.current) / 2;
    for filter in [
        RangeRequest {
            min_mod_revision: middle,
            ..none()
        },
        RangeRequest {
            max_mod_revision: middle,
            ..none()
        },
        RangeRequest {
            min_create_revision: middle,
            ..none()
        },
        RangeRequest {
            max_create_revision: middle,
            ..none()
        },
        RangeRequest {
            min_mod_revision: middle,
            max_mod_revision: middle + 9,
            ..none()
        },
        RangeRequest {
            min_mod_revision: middle,
            max_mod_revision: middle - 1,
            ..none()
        },
        RangeRequest {
            max_mod_revision: -1,
            ..none()
        },
        RangeRequest {
            min_mod_revision: i64::MAX,
            ..none()
        },
    ] {
        options.push(RangeRequest {
            limit: 2,
            ..filter.clone()
        });
        options.push(RangeRequest {
            limit: 2,
            sort_order: DESCEND,
            keys_only: true,
            ..filter.clone()
        });
        options.push(RangeRequest {
            count_only: true,
            revision: middle,
            ..filter.clone()
        });
        options.push(filter);
    }
    options
}

/// Every range with every combination of options, and requests that etcd refuses.
pub fn by_hand(at: Revisions) -> Vec<RangeRequest> {
    let mut shapes = vec![
        RangeRequest::default(),
        RangeRequest {
            range_end: b"\0".to_vec(),
            ..RangeRequest::default()
        },
        RangeRequest {
            count_only: true,
            ..RangeRequest::default()
        },
        RangeRequest {
            sort_order: 7,
            ..RangeRequest::everything()
        },
        RangeRequest {
            sort_order: 7,
            limit: 3,
            ..RangeRequest::everything()
        },
        RangeRequest {
            sort_order: -1,
            ..RangeRequest::one("a")
        },
    ];
    for range in ranges() {
        for option in options(at) {
            shapes.push(RangeRequest {
                key: range.key.clone(),
                range_end: range.range_end.clone(),
                ..option
            });
        }
    }
    shapes
}

/// A random request, mostly of parts that have a response.
pub fn at_random(random: &mut StdRng, at: Revisions) -> RangeRequest {
    let mut request = ranges().choose(random).unwrap().clone();
    if random.random_bool(0.4) {
        request.key = key_at_random(random);
        let end = random.random_range(0..6);
        request.range_end = match end {
            0 => Vec::new(),
            1 => b"\0".to_vec(),
            2 if request.key.iter().any(|b| *b != 0xff) => prefix_end(&request.key),
            3 => [&request.key[..], b"\0"].concat(),
            _ => key_at_random(random),
        };
    }
    if random.random_bool(0.5) {
        request.limit = *[1, 2, 5, 12, 13, 20, 100, i64::MAX, -5].choose(random).unwrap();
    }
    if random.random_bool(0.5) {
        request.revision = random.random_range(at.compacted - 2..=at.current + 1);
    }
    if random.random_bool(0.4) {
        request.sort_order = random.random_range(0..=2);
        request.sort_target = random.random_range(0..=4);
    }
    for filter in [
        &mut request.min_mod_revision,
        &mut request.max_mod_revision,
        &mut request.min_create_revision,
        &mut request.max_create_revision,
    ] {
        if random.random_bool(0.12) {
            *filter = random.random_range(-1..=at.current + 2);
        }
    }
    request.serializable = random.random_bool(0.3);
    request.keys_only = random.random_bool(0.25);
    request.count_only = random.random_bool(0.1);
    request
}

fn key_at_random(random: &mut StdRng) -> Vec<u8> {
    match random.random_range(0..4) {
        0 => EDGE_KEYS.choose(random).unwrap().to_vec(),
        1 => (0..random.random_range(1..4))
            .map(|_| *[0, 1, b'b', b'i', 0xff].choose(random).unwrap())
            .collect(),
        _ => {
            let mut key = pod(random.random_range(0..4), random.random_range(0..13)).into_bytes();
            key.truncate(random.random_range(1..=key.len()));
            key
        }
    }
}

/// Whether the order in etcd's response is undefined: its sort is unstable, so that more than 12 keys with equal sort
/// keys among them may come in any order. `all` are the keys of the range at that revision.
pub fn order_is_open(request: &RangeRequest, all: &[KeyValue]) -> bool {
    let filters = [
        request.min_mod_revision,
        request.max_mod_revision,
        request.min_create_revision,
        request.max_create_revision,
    ];
    let fetches_all = request.sort_order != 0 || filters != [0; 4] || request.limit <= 0;
    let fetched = if fetches_all {
        all.len()
    } else {
        usize::try_from(request.limit).unwrap().saturating_add(1)
    };
    let passes = |kv: &&KeyValue| {
        (request.min_mod_revision == 0 || kv.mod_revision >= request.min_mod_revision)
            && (request.max_mod_revision == 0 || kv.mod_revision <= request.max_mod_revision)
            && (request.min_create_revision == 0 || kv.create_revision >= request.min_create_revision)
            && (request.max_create_revision == 0 || kv.create_revision <= request.max_create_revision)
    };
    let mut sort_keys: Vec<Vec<u8>> = all
        .iter()
        .take(fetched)
        .filter(passes)
        .map(|kv| match request.sort_target {
            BY_VERSION => kv.version.to_be_bytes().to_vec(),
            BY_CREATE => kv.create_revision.to_be_bytes().to_vec(),
            BY_MOD => kv.mod_revision.to_be_bytes().to_vec(),
            BY_VALUE => kv.value.clone(),
            _ => kv.key.clone(),
        })
        .collect();
    let sorted = sort_keys.len();
    sort_keys.sort();
    sort_keys.dedup();
    !request.count_only && sorted > 12 && sort_keys.len() < sorted
}
