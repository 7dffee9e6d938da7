//! Strategies for property tests.

use proptest::prelude::*;

use super::KeyValue;
use crate::cache::{Packing, Repacking};

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

pub(in crate::cache) fn repacking() -> impl Strategy<Value = Repacking> {
    prop::sample::select(vec![
        Repacking::PackCold,
        Repacking::PackAll,
        Repacking::UnpackHot,
    ])
}
