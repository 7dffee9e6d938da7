//! Cost of single steps of the cache at ten thousand and at a million keys, next to an ordered map without snapshots
//! (`BTreeMap`) and one with snapshots (`imbl::OrdMap`).
//!
//! `cargo bench --bench micro -- update` runs the steps whose name contains `update`.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a benchmark, not part of the product"
)]

use std::{collections::BTreeMap, hint::black_box, ops::ControlFlow, sync::Arc, time::Duration};

use bytes::{Buf as _, Bytes};
use criterion::measurement::WallTime;
use criterion::{
    BatchSize, BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
};
use etcd_store::cache::{
    Answer, Change, Dialect, Entry, HistoryLimits, Packing, RangeQuery, ResponseHeader, Selected, Store,
    Tree, TreeBuilder, select,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

const SIZES: [usize; 2] = [10_000, 1_000_000];
const DIALECT: Dialect = Dialect {
    keys_only_has_lease: false,
    unknown_sort_is_refused: true,
};

#[derive(Clone, PartialEq, prost::Message)]
struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(int64, tag = "2")]
    create_revision: i64,
    #[prost(int64, tag = "3")]
    mod_revision: i64,
    #[prost(int64, tag = "4")]
    version: i64,
    #[prost(bytes = "vec", tag = "5")]
    value: Vec<u8>,
}

fn key(index: usize) -> Vec<u8> {
    format!("/registry/pods/namespace-{:04}/pod-{index:07}", index / 300).into_bytes()
}

fn entry(index: usize, revision: i64, value_bytes: usize) -> Entry {
    use prost::Message as _;
    let value = vec![b'v'; value_bytes];
    let kv = KeyValue {
        key: key(index),
        create_revision: revision,
        mod_revision: revision,
        version: 1,
        value,
    };
    Entry::from_key_value(&kv.encode_to_vec()).unwrap()
}

fn loaded(size: usize, value_bytes: usize) -> Tree {
    Tree::from_sorted((0..size).map(|index| entry(index, index as i64 + 1, value_bytes)))
}

/// A tree after as many puts as there are keys, in random order, so that entries are spread over the heap.
fn worn(size: usize, value_bytes: usize) -> Tree {
    let mut tree = loaded(size, value_bytes);
    let mut random = StdRng::seed_from_u64(1);
    for revision in 0..size {
        tree.insert(entry(
            random.random_range(0..size),
            revision as i64 + 1,
            value_bytes,
        ));
    }
    tree
}

fn random_puts(size: usize) -> impl FnMut() -> Entry {
    let mut random = StdRng::seed_from_u64(7);
    let mut revision = 2_000_000;
    move || {
        revision += 1;
        entry(random.random_range(0..size), revision, 100)
    }
}

fn updates(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update");
    for size in SIZES {
        let mut tree = worn(size, 100);
        let mut next = random_puts(size);
        group.bench_function(BenchmarkId::new("in place", size), |bencher| {
            bencher.iter_batched(&mut next, |entry| tree.insert(entry), BatchSize::SmallInput);
        });
        let mut snapshot = tree.clone();
        group.bench_function(BenchmarkId::new("snapshot after each", size), |bencher| {
            let step = |entry| {
                let old = tree.insert(entry);
                snapshot = tree.clone();
                old
            };
            bencher.iter_batched(&mut next, step, BatchSize::SmallInput);
        });
        let mut count = 0;
        group.bench_function(BenchmarkId::new("snapshot after 128", size), |bencher| {
            let step = |entry| {
                let old = tree.insert(entry);
                count += 1;
                if count % 128 == 0 {
                    snapshot = tree.clone();
                }
                old
            };
            bencher.iter_batched(&mut next, step, BatchSize::SmallInput);
        });
        drop((tree, snapshot));

        let pairs = || (0..size).map(|index| (Arc::<[u8]>::from(key(index)), entry(index, 1, 100)));
        let pair = |entry: Entry| (Arc::<[u8]>::from(entry.key()), entry);
        let mut map: BTreeMap<_, _> = pairs().collect();
        for (key, entry) in (0..size).map(|_| pair(next())) {
            map.insert(key, entry);
        }
        group.bench_function(BenchmarkId::new("BTreeMap", size), |bencher| {
            let step = |(key, entry)| map.insert(key, entry);
            bencher.iter_batched(|| pair(next()), step, BatchSize::SmallInput);
        });
        drop(map);
        let mut map: imbl::OrdMap<Arc<[u8]>, Entry> = pairs().collect();
        for (key, entry) in (0..size).map(|_| pair(next())) {
            map.insert(key, entry);
        }
        let mut snapshot = map.clone();
        group.bench_function(BenchmarkId::new("imbl, snapshot after each", size), |bencher| {
            let step = |(key, entry)| {
                let old = map.insert(key, entry);
                snapshot = map.clone();
                old
            };
            bencher.iter_batched(|| pair(next()), step, BatchSize::SmallInput);
        });
    }
}

fn lookups(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("lookup");
    for size in SIZES {
        let tree = worn(size, 100);
        let mut random = StdRng::seed_from_u64(3);
        let mut next = || key(random.random_range(0..size));
        group.bench_function(BenchmarkId::new("clone", size), |bencher| {
            bencher.iter(|| tree.clone())
        });
        group.bench_function(BenchmarkId::new("get", size), |bencher| {
            bencher.iter_batched(&mut next, |key| tree.get(&key).cloned(), BatchSize::SmallInput);
        });
        group.bench_function(BenchmarkId::new("rank", size), |bencher| {
            bencher.iter_batched(&mut next, |key| tree.rank(&key), BatchSize::SmallInput);
        });
        let mut random = StdRng::seed_from_u64(4);
        let mut next = || random.random_range(0..size as u64);
        group.bench_function(BenchmarkId::new("sum of ranks", size), |bencher| {
            let both = || (next(), size as u64 - 10);
            bencher.iter_batched(
                both,
                |(from, to)| tree.summary_of_ranks(from, to),
                BatchSize::SmallInput,
            );
        });
        drop(tree);
        let map: BTreeMap<_, _> = (0..size)
            .map(|index| (Arc::<[u8]>::from(key(index)), entry(index, 1, 100)))
            .collect();
        let mut random = StdRng::seed_from_u64(3);
        let mut next = || key(random.random_range(0..size));
        group.bench_function(BenchmarkId::new("BTreeMap get", size), |bencher| {
            bencher.iter_batched(
                &mut next,
                |key| map.get(key.as_slice()).cloned(),
                BatchSize::SmallInput,
            );
        });
    }
}

fn scans(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan");
    group.sample_size(10);
    for size in SIZES {
        group.throughput(Throughput::Elements(size as u64));
        let tree = loaded(size, 100);
        group.bench_function(BenchmarkId::new("tree", size), |bencher| {
            bencher.iter(|| {
                let mut visited = 0;
                tree.for_each_from(0, |entry| {
                    black_box(entry);
                    visited += 1;
                    ControlFlow::Continue(())
                });
                visited
            });
        });
        let map: imbl::OrdMap<Arc<[u8]>, Entry> = (0..size)
            .map(|index| (Arc::<[u8]>::from(key(index)), entry(index, 1, 100)))
            .collect();
        group.bench_function(BenchmarkId::new("imbl", size), |bencher| {
            bencher.iter(|| {
                let mut visited = 0;
                for pair in &map {
                    black_box(pair);
                    visited += 1;
                }
                visited
            });
        });
    }
}

fn everything() -> RangeQuery {
    RangeQuery {
        key: "/".into(),
        range_end: "0".into(),
        ..RangeQuery::default()
    }
}

fn answer(tree: &Tree, query: &RangeQuery) -> Answer {
    match select(tree, query, &DIALECT) {
        Selected::Answer(selection) => Answer::new(
            ResponseHeader {
                revision: 1 << 30,
                ..ResponseHeader::default()
            },
            selection,
        ),
        _ => unreachable!("nothing is sorted, and all values are held"),
    }
}

/// Consumes every chunk like a socket, without reading the bytes; returns the number of chunks.
fn drain(mut answer: Answer) -> usize {
    let mut bytes = 0;
    while let Ok(Some(mut piece)) = answer.next_piece(128 << 10) {
        while piece.has_remaining() {
            let mut slices = [std::io::IoSlice::new(&[]); 64];
            let filled = piece.chunks_vectored(&mut slices);
            let seen: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
            bytes += seen;
            piece.advance(seen);
        }
    }
    bytes
}

fn lists(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("list");
    group.sample_size(10);
    for (name, size, value_bytes) in [
        ("100 B", 100_000, 100),
        ("1 KB", 20_000, 1024),
        ("10 KB", 15_000, 10_240),
    ] {
        for (state, tree) in [
            ("loaded", loaded(size, value_bytes)),
            ("worn", worn(size, value_bytes)),
        ] {
            group.throughput(Throughput::Bytes(answer(&tree, &everything()).len()));
            group.bench_function(BenchmarkId::new(name, state), |bencher| {
                bencher.iter(|| drain(answer(&tree, &everything())));
            });
            if value_bytes == 100 {
                let query = RangeQuery {
                    keys_only: true,
                    ..everything()
                };
                group.bench_function(BenchmarkId::new("keys only", state), |bencher| {
                    bencher.iter(|| drain(answer(&tree, &query)));
                });
            }
        }
    }
}

/// Bodies of KeyValues with values like those of one kind of object: the same fields, other numbers and names.
fn objects(size: usize, value_bytes: usize) -> Vec<Bytes> {
    use prost::Message as _;
    let mut random = StdRng::seed_from_u64(9);
    let mut object = |index: usize| {
        let mut value = String::new();
        while value.len() < value_bytes {
            let field = value.len() / 64 % 40;
            let number: u32 = random.random();
            value += &format!(
                "\"field-{field:02}\":{{\"type\":\"ready\",\"value\":\"{number:08x}\",\"since\":\"2026-01-01T00:00:00Z\"}},"
            );
        }
        let kv = KeyValue {
            key: key(index),
            create_revision: 1,
            mod_revision: 1 + index as i64,
            version: 1,
            value: value.into_bytes(),
        };
        Bytes::from(kv.encode_to_vec())
    };
    (0..size).map(&mut object).collect()
}

fn built(objects: &[Bytes], packing: Packing) -> Tree {
    let mut builder = TreeBuilder::new(packing);
    for object in objects {
        builder.push(object.clone()).unwrap();
    }
    builder.finish()
}

/// Loads, lists and reads of packed values beside plain ones.
fn packing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("packing");
    group.sample_size(10);
    for (name, size, value_bytes) in [
        ("100 B", 100_000, 100),
        ("1 KB", 20_000, 1024),
        ("10 KB", 5_000, 10_240),
    ] {
        let objects = objects(size, value_bytes);
        for (state, packing) in [("plain", Packing::Never), ("packed", Packing::Always)] {
            let tree = built(&objects, packing);
            let bytes = tree.summary().encoded_bytes;
            eprintln!(
                "{name}, {state}: {:.3} bytes of memory per encoded byte",
                tree.memory_bytes() as f64 / bytes as f64
            );
            group.throughput(Throughput::Bytes(bytes));
            group.bench_function(BenchmarkId::new("load", format!("{name} {state}")), |bencher| {
                bencher.iter(|| built(&objects, packing));
            });
            group.bench_function(BenchmarkId::new("list", format!("{name} {state}")), |bencher| {
                bencher.iter(|| drain(answer(&tree, &everything())));
            });
            group.throughput(Throughput::Elements(1));
            gets(
                &mut group,
                BenchmarkId::new("get", format!("{name} {state}")),
                &tree,
                size,
            );
        }
    }
}

/// Reads of random keys, one at a time.
fn gets(group: &mut BenchmarkGroup<'_, WallTime>, id: BenchmarkId, tree: &Tree, size: usize) {
    let mut random = StdRng::seed_from_u64(5);
    let mut get = || RangeQuery {
        key: key(random.random_range(0..size)).into(),
        ..RangeQuery::default()
    };
    group.bench_function(id, |bencher| {
        bencher.iter_batched(
            &mut get,
            |query| answer(tree, &query).small(5),
            BatchSize::SmallInput,
        );
    });
}

fn queries(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("query");
    for size in SIZES {
        let tree = worn(size, 100);
        gets(&mut group, BenchmarkId::new("get", size), &tree, size);
        let mut random = StdRng::seed_from_u64(6);
        let mut page = || RangeQuery {
            key: key(random.random_range(0..size)).into(),
            limit: 500,
            ..everything()
        };
        group.bench_function(BenchmarkId::new("page of 500", size), |bencher| {
            bencher.iter_batched(
                &mut page,
                |query| drain(answer(&tree, &query)),
                BatchSize::SmallInput,
            );
        });
        let query = RangeQuery {
            count_only: true,
            ..everything()
        };
        group.bench_function(BenchmarkId::new("count", size), |bencher| {
            bencher.iter(|| answer(&tree, &query).small(5));
        });
    }
}

fn histories(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("history");
    for size in SIZES {
        let limits = HistoryLimits {
            max_age: Duration::from_secs(3600),
            max_bytes: 1 << 30,
            checkpoint_every_events: 128,
        };
        let mut store = Store::new(worn(size, 100), 2_000_000, limits, Duration::ZERO);
        let mut next = random_puts(size);
        group.bench_function(BenchmarkId::new("apply one", size), |bencher| {
            let step = |entry: Entry| {
                let revision = entry.mod_revision();
                store.apply(vec![Change::put(entry)], revision, Duration::ZERO)
            };
            bencher.iter_batched(&mut next, step, BatchSize::SmallInput);
        });
        let mut random = StdRng::seed_from_u64(8);
        let (oldest, newest) = (store.oldest_revision(), store.revision());
        group.bench_function(BenchmarkId::new("snapshot at any revision", size), |bencher| {
            let revision = || random.random_range(oldest..newest);
            bencher.iter_batched(
                revision,
                |revision| store.snapshot_at(revision).unwrap().into_tree(),
                BatchSize::SmallInput,
            );
        });
    }
}

criterion_group! {
    name = micro;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = updates, lookups, scans, lists, packing, queries, histories
}
criterion_main!(micro);
