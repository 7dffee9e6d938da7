//! Fuzz targets of the cache.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::cast_possible_wrap,
    clippy::cast_possible_truncation,
    reason = "compiled for tests and fuzz targets only"
)]

use std::{collections::BTreeMap, ops::ControlFlow};

use arbitrary::{Arbitrary, Unstructured};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use etcd_wire::etcdserverpb::RangeResponse;
use prost::Message as _;

use super::select::model::{HEADER, answered, expected};
use super::tree::model::{Model, check, is_same};
use super::{
    Chunks, Dialect, JsonAnswer, Packing, RangeQuery, Repacked, Repacking, Selected, Selection, SortTarget,
    Tree, repack::Replacements, select, testing::KeyValue,
};

/// A key of few bytes out of a small alphabet, so that keys meet and are prefixes of each other.
#[derive(Arbitrary, Debug)]
struct Key {
    number: u16,
    tail: u8,
}

impl Key {
    fn bytes(&self) -> Vec<u8> {
        let mut key = vec![b'/'];
        // Digits to base 4, of which 0 is a zero byte and 3 the highest byte.
        let digits = [0, b'a', b'b', 0xff];
        let mut number = self.number;
        while number > 0 {
            key.push(digits[usize::from(number % 4)]);
            number /= 4;
        }
        if self.tail > 250 {
            key.resize(key.len() + usize::from(self.tail - 250) * 60, b'x');
        }
        key
    }
}

#[derive(Arbitrary, Debug)]
enum TreeOp {
    Insert {
        key: Key,
        value_bytes: u8,
        lease: i64,
    },
    Remove(Key),
    /// Inserts keys next to each other, so that nodes split.
    Run {
        from: u16,
        length: u8,
    },
    /// Removes keys next to each other, so that nodes merge.
    RemoveRun {
        from: u16,
        length: u8,
    },
    Snapshot,
    Checkpoint,
    /// Continues with the oldest snapshot.
    Swap,
    /// Continues with a tree that was loaded from the same entries, packed or not.
    Reload(bool),
    Drop,
    Repack {
        from: u16,
        what: u8,
    },
    /// Values are not held.
    LeaveOut {
        from: u16,
        length: u8,
    },
    /// Values are held again.
    Hold {
        from: u16,
    },
    Look {
        key: Key,
        from: u16,
        to: u16,
    },
}

/// A program on a tree and on an ordered map: they hold the same, also in every snapshot, whatever was changed after it.
pub fn tree(data: &[u8]) {
    let mut data = Unstructured::new(data);
    let mut tree = Tree::new();
    let mut model = Model::new();
    let mut snapshots: Vec<(Tree, Model)> = Vec::new();
    let mut revision = 0;
    while let Ok(op) = TreeOp::arbitrary(&mut data) {
        revision += 1;
        match op {
            TreeOp::Insert {
                key,
                value_bytes,
                lease,
            } => {
                let kv = KeyValue {
                    lease,
                    ..KeyValue::new(key.bytes(), revision, vec![7; usize::from(value_bytes)])
                };
                insert(&mut tree, &mut model, kv);
            }
            TreeOp::Remove(key) => remove(&mut tree, &mut model, &key.bytes()),
            TreeOp::Run { from, length } => {
                for number in 0..u16::from(length % 64) {
                    let key = format!("/run/{:05}", from.saturating_add(number));
                    insert(
                        &mut tree,
                        &mut model,
                        KeyValue::new(key, revision, vec![b'r'; 200]),
                    );
                }
            }
            TreeOp::RemoveRun { from, length } => {
                for number in 0..u16::from(length % 64) {
                    let key = format!("/run/{:05}", from.saturating_add(number));
                    remove(&mut tree, &mut model, key.as_bytes());
                }
            }
            TreeOp::Snapshot if snapshots.len() < 4 => snapshots.push((tree.clone(), model.clone())),
            TreeOp::Checkpoint if snapshots.len() < 4 => snapshots.push((tree.checkpoint(), model.clone())),
            TreeOp::Snapshot | TreeOp::Checkpoint => {}
            TreeOp::Swap => {
                if let Some((older, its_model)) = snapshots.first_mut() {
                    std::mem::swap(older, &mut tree);
                    std::mem::swap(its_model, &mut model);
                }
            }
            TreeOp::Reload(is_packed) => {
                tree = Tree::load(model.values().map(KeyValue::entry), packing(is_packed));
            }
            TreeOp::Drop => snapshots.clear(),
            TreeOp::Repack { from, what } => {
                let what = match what % 3 {
                    0 => Repacking::PackCold,
                    1 => Repacking::PackAll,
                    _ => Repacking::UnpackHot,
                };
                let from = format!("/run/{from:05}");
                let repacked = tree.repack((from.as_bytes(), b""), what, 1 << 14).unwrap();
                put_repacked(&mut tree, &mut snapshots, &repacked);
            }
            TreeOp::LeaveOut { from, length } => {
                let [start, end] = [from, from.saturating_add(length.into())].map(|n| format!("/run/{n:05}"));
                let range = (start.as_bytes(), end.as_bytes());
                let repacked = tree.repack(range, Repacking::LeaveOut, 1 << 14).unwrap();
                put_repacked(&mut tree, &mut snapshots, &repacked);
            }
            TreeOp::Hold { from } => {
                let from = format!("/run/{from:05}").into_bytes();
                let values: Vec<_> = model.range(from..).take(40).map(|(_, kv)| kv.entry()).collect();
                let repacked = tree
                    .repack((b"", b""), Repacking::Hold(&values), u64::MAX)
                    .unwrap();
                put_repacked(&mut tree, &mut snapshots, &repacked);
            }
            TreeOp::Look { key, from, to } => look(&tree, &model, &key.bytes(), from.into(), to.into()),
        }
        if revision > 60 {
            break;
        }
    }
    for (tree, model) in snapshots.iter().chain([&(tree, model)]) {
        check(tree, model);
        look(tree, model, b"/run/00100", 3, model.len() as u64);
    }
}

fn put_repacked(tree: &mut Tree, snapshots: &mut [(Tree, Model)], repacked: &Repacked) {
    let mut seen = Replacements::default();
    for (tree, _) in snapshots.iter_mut() {
        tree.put_repacked(repacked, &mut seen);
    }
    tree.put_repacked(repacked, &mut seen);
}

fn packing(is_packed: bool) -> Packing {
    if is_packed {
        Packing::Always
    } else {
        Packing::Never
    }
}

fn insert(tree: &mut Tree, model: &mut Model, kv: KeyValue) {
    let replaced = tree.insert(kv.entry());
    let expected = model.insert(kv.key.clone(), kv);
    assert!(is_same(replaced.as_ref(), expected.as_ref()));
}

fn remove(tree: &mut Tree, model: &mut Model, key: &[u8]) {
    let removed = tree.remove(key);
    assert!(is_same(removed.as_ref(), model.remove(key).as_ref()));
}

fn look(tree: &Tree, model: &Model, key: &[u8], from: u64, to: u64) {
    let below = model.range(..key.to_vec()).count() as u64;
    assert_eq!(tree.rank(key), below);
    assert!(is_same(tree.get(key), model.get(key)));
    assert!(is_same(tree.at(from), model.values().nth(from as usize)));
    let between = model.values().take(to as usize).skip(from as usize);
    let count = between.clone().count() as u64;
    let sum: u64 = between.map(|kv| kv.field().len() as u64).sum();
    let summary = tree.summary_of_ranks(from, to);
    assert_eq!((summary.count, summary.encoded_bytes), (count, sum));
    let mut expected = model.values().skip(from as usize).take(20);
    tree.for_each_from(from, |entry| match expected.next() {
        Some(kv) => {
            assert!(kv.is(entry));
            ControlFlow::Continue(())
        }
        None => ControlFlow::Break(()),
    });
    assert!(expected.next().is_none());
}

/// A key-value of few revisions and values, so that they meet.
#[derive(Arbitrary, Debug)]
struct Stored {
    key: Key,
    numbers: [u8; 3],
    value: [u8; 2],
    lease: bool,
}

#[derive(Arbitrary, Debug)]
struct Asked {
    key: Key,
    end: End,
    limit: i8,
    extreme_limit: Option<bool>,
    sort: [i8; 2],
    flags: [bool; 2],
    filters: [i8; 4],
    keys_only_has_lease: bool,
    is_packed: bool,
    piece_bytes: u16,
}

#[derive(Arbitrary, Debug)]
enum End {
    None,
    Zero,
    Key(Key),
    Successor,
    All,
}

/// A query on a tree against a reading of etcd's rules over a list, down to the bytes; the chunks of a stream and the text
/// of the gateway have the same content.
pub fn query(data: &[u8]) {
    let mut data = Unstructured::new(data);
    let Ok(asked) = Asked::arbitrary(&mut data) else {
        return;
    };
    let mut kvs = BTreeMap::new();
    while let Ok(stored) = Stored::arbitrary(&mut data) {
        let [create, modified, version] = stored.numbers.map(|number| i64::from(number % 32) + 1);
        let kv = KeyValue {
            key: stored.key.bytes(),
            create_revision: create,
            mod_revision: modified,
            version,
            value: vec![
                stored.value[0];
                usize::from(stored.value[1] % 40) * if asked.is_packed { 20 } else { 1 }
            ],
            lease: i64::from(stored.lease),
        };
        kvs.insert(kv.key.clone(), kv);
        if data.is_empty() || kvs.len() == 200 {
            break;
        }
    }
    let kvs: Vec<KeyValue> = kvs.into_values().collect();
    let query = asked.query();
    let dialect = Dialect {
        keys_only_has_lease: asked.keys_only_has_lease,
        unknown_sort_is_refused: false,
    };
    if query.check(&dialect).is_err() {
        return;
    }
    let tree = Tree::load(kvs.iter().map(KeyValue::entry), packing(asked.is_packed));
    let expected = expected(&kvs, &query, dialect);
    let answer = answered(&tree, &query, &dialect);
    // Packed values are not compared.
    let is_declined = asked.is_packed && answer.is_none() && query.sort_target == SortTarget::Value as i32;
    assert!(is_declined || answer == expected, "{query:?}");
    let (Some(response), Selected::Answer(selection)) = (answer, select(&tree, &query, &dialect)) else {
        return;
    };
    check_text(&response, selection.clone(), usize::from(asked.piece_bytes));
    check_chunks(&response, selection);
}

impl Asked {
    fn query(&self) -> RangeQuery {
        let key = self.key.bytes();
        let range_end = match &self.end {
            End::None => Vec::new(),
            End::Zero => vec![0],
            End::Key(end) => end.bytes(),
            End::Successor => [&key[..], &[0]].concat(),
            End::All => vec![0xff; 3],
        };
        let [
            min_mod_revision,
            max_mod_revision,
            min_create_revision,
            max_create_revision,
        ] = self.filters.map(|filter| i64::from(filter / 8));
        RangeQuery {
            key: key.into(),
            range_end: range_end.into(),
            limit: match self.extreme_limit {
                Some(true) => i64::MAX,
                Some(false) => i64::MIN,
                None => self.limit.into(),
            },
            sort_order: i32::from(self.sort[0]) % 4,
            sort_target: i32::from(self.sort[1]) % 5,
            keys_only: self.flags[0],
            count_only: self.flags[1],
            min_mod_revision,
            max_mod_revision,
            min_create_revision,
            max_create_revision,
            ..RangeQuery::default()
        }
    }
}

/// The gateway's text of a selection, in pieces, against the encoded response.
fn check_text(response: &[u8], selection: Selection, piece_bytes: usize) {
    let mut answer = JsonAnswer::new(HEADER, selection);
    let text: String = std::iter::from_fn(|| {
        answer
            .next_piece(piece_bytes)
            .unwrap_or_else(|error| panic!("{error}"))
    })
    .collect();
    let value: serde_json::Value =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let decoded = decode(response);
    let number = |value: &serde_json::Value| value.as_str().map_or(0, |text| text.parse().unwrap_or(-1));
    assert_eq!(number(&value["count"]), decoded.count, "{text}");
    assert_eq!(
        value["more"].as_bool().unwrap_or_default(),
        decoded.more,
        "{text}"
    );
    let none = Vec::new();
    let kvs = value["kvs"].as_array().unwrap_or(&none);
    assert_eq!(kvs.len(), decoded.kvs.len(), "{text}");
    for (shown, kv) in kvs.iter().zip(&decoded.kvs) {
        let shown = KeyValue {
            key: base64(&shown["key"]),
            create_revision: number(&shown["create_revision"]),
            mod_revision: number(&shown["mod_revision"]),
            version: number(&shown["version"]),
            value: base64(&shown["value"]),
            lease: number(&shown["lease"]),
        };
        assert_eq!(shown.encode_to_vec(), *kv, "{text}");
    }
}

fn base64(value: &serde_json::Value) -> Vec<u8> {
    let text = value.as_str().unwrap_or_default();
    STANDARD
        .decode(text)
        .unwrap_or_else(|_| panic!("{text} is not base64"))
}

/// The chunks of a stream, merged as a client merges them, against the encoded response.
fn check_chunks(response: &[u8], selection: Selection) {
    let mut merged = RangeResponse::default();
    for chunk in Chunks::new(HEADER, selection) {
        let chunk = chunk.small(0).unwrap_or_else(|error| panic!("{error}"));
        assert!(merged.merge(&*chunk).is_ok());
    }
    assert_eq!(merged.encode_to_vec(), response);
}

fn decode(response: &[u8]) -> RangeResponse {
    RangeResponse::decode(response).unwrap_or_else(|error| panic!("{error}"))
}
