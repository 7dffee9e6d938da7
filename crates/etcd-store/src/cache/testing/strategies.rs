//! Strategies for property tests.

use proptest::prelude::*;

use super::{KeyValue, key};
use crate::cache::{Packing, Repacked, Repacking, Tree};

/// Values of all relevant sizes: empty, short, around the threshold of copying, and large enough to be cut.
fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        3 => Just(0_usize),
        8 => 1_usize..200,
        2 => 900_usize..1200,
        1 => 4000_usize..70_000,
    ]
    .prop_flat_map(|length| any::<u8>().prop_map(move |byte| vec![byte; length]))
}

pub(in crate::cache) fn packing() -> impl Strategy<Value = Packing> {
    prop_oneof![
        Just(Packing::Never),
        Just(Packing::Always),
        (0..400_000_u64).prop_map(Packing::Above)
    ]
}

/// Revisions, versions and leases whose varints have every length.
pub(in crate::cache) fn number() -> impl Strategy<Value = i64> {
    (any::<i64>(), 0..63_u32).prop_map(|(number, shift)| (number >> shift).saturating_abs())
}

prop_compose! {
    pub(in crate::cache) fn key_value()(
        key in prop::collection::vec(any::<u8>(), 1..300),
        create_revision in number(),
        mod_revision in number(),
        version in number(),
        value in value(),
        lease in prop_oneof![Just(0), any::<i64>()],
    ) -> KeyValue {
        KeyValue { key, create_revision, mod_revision, version, value, lease }
    }
}

/// Another way to keep the same entries.
#[derive(Clone, Copy, Debug)]
pub(in crate::cache) enum Remaking {
    Repack(Repacking<'static>),
    /// Without the values of the keys up to this number.
    LeaveOut(usize),
    /// With the values again.
    Hold,
}

impl Remaking {
    /// Other leaves for `tree`, which has the entries `held`, from a key on.
    pub(in crate::cache) fn of<'a>(
        self,
        tree: &Tree,
        from: &[u8],
        max_bytes: u64,
        held: impl Iterator<Item = &'a KeyValue>,
    ) -> Repacked {
        match self {
            Remaking::Repack(what) => tree.repack((from, b""), what, max_bytes),
            Remaking::LeaveOut(to) => tree.repack((from, &key(to)), Repacking::LeaveOut, max_bytes),
            Remaking::Hold => {
                let values: Vec<_> = held
                    .skip_while(|kv| kv.key.as_slice() < from)
                    .map(KeyValue::entry)
                    .collect();
                tree.repack((from, b""), Repacking::Hold(&values), max_bytes)
            }
        }
        .unwrap()
    }
}

pub(in crate::cache) fn remaking(keys: usize) -> impl Strategy<Value = Remaking> {
    let repacking = prop::sample::select(vec![
        Repacking::PackCold,
        Repacking::PackAll,
        Repacking::UnpackHot,
    ]);
    prop_oneof![
        3 => repacking.prop_map(Remaking::Repack),
        2 => (0..keys).prop_map(Remaking::LeaveOut),
        1 => Just(Remaking::Hold),
    ]
}
