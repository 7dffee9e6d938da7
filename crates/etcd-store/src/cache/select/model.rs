//! A plain reading of etcd's rules for a Range, over a list: the model of property tests and fuzz targets.

#![allow(
    clippy::unwrap_used,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "compiled for tests and fuzz targets only"
)]

use std::cmp::Ordering;

use bytes::Bytes;
use etcd_wire::etcdserverpb;
use prost::Message as _;

use super::{Selected, select};
use crate::cache::{Answer, Dialect, RangeQuery, ResponseHeader, Tree, testing::KeyValue};

pub(in crate::cache) const HEADER: ResponseHeader = ResponseHeader {
    cluster_id: u64::MAX,
    member_id: 3,
    revision: 1 << 40,
    raft_term: 0,
    leader_id: 0,
};

/// The encoded response of etcd with these key-values; `None` if two valid sorts give different responses, for which a
/// query has to be declined.
pub(in crate::cache) fn expected(kvs: &[KeyValue], query: &RangeQuery, dialect: Dialect) -> Option<Vec<u8>> {
    let one = etcds_answer(kvs, query, dialect, |kvs, compare| gos_sort(kvs, compare, false));
    let other = etcds_answer(kvs, query, dialect, |kvs, compare| gos_sort(kvs, compare, true));
    (one == other).then(|| one.encode_to_vec())
}

/// etcd's response, step by step as in its source, with the sort function of the caller.
fn etcds_answer(
    kvs: &[KeyValue],
    query: &RangeQuery,
    dialect: Dialect,
    sort: impl Fn(&mut [KeyValue], &dyn Fn(&KeyValue, &KeyValue) -> Ordering),
) -> etcdserverpb::RangeResponse {
    let in_interval = |kv: &&KeyValue| match (kv.key.as_slice(), &*query.range_end) {
        (sought, []) => sought == query.key,
        (sought, [0]) => sought >= &*query.key,
        (sought, end) => sought >= &*query.key && sought < end,
    };
    let mut found: Vec<KeyValue> = kvs.iter().filter(in_interval).cloned().collect();
    let count = found.len() as i64;
    let mut fetch = query.limit;
    let filters = [
        query.max_mod_revision,
        query.min_mod_revision,
        query.max_create_revision,
        query.min_create_revision,
    ];
    if query.sort_order != 0 || filters.iter().any(|filter| *filter != 0) {
        fetch = 0;
    }
    if fetch > 0 && fetch < i64::MAX {
        fetch += 1;
    }
    if fetch > 0 {
        found.truncate(usize::try_from(fetch).unwrap());
    }
    if query.count_only {
        found.clear();
    }
    let [max_mod, min_mod, max_create, min_create] = filters;
    found.retain(|kv| max_mod == 0 || kv.mod_revision <= max_mod);
    found.retain(|kv| min_mod == 0 || kv.mod_revision >= min_mod);
    found.retain(|kv| max_create == 0 || kv.create_revision <= max_create);
    found.retain(|kv| min_create == 0 || kv.create_revision >= min_create);
    let order = if query.sort_order == 0 && query.sort_target != 0 {
        1
    } else {
        query.sort_order
    };
    let compare = |left: &KeyValue, right: &KeyValue| match query.sort_target {
        0 => left.key.cmp(&right.key),
        1 => left.version.cmp(&right.version),
        2 => left.create_revision.cmp(&right.create_revision),
        3 => left.mod_revision.cmp(&right.mod_revision),
        _ => left.value.cmp(&right.value),
    };
    match order {
        1 => sort(&mut found, &compare),
        2 => sort(&mut found, &|left, right| compare(right, left)),
        _ => {}
    }
    let mut more = false;
    if query.limit > 0 && found.len() as i64 > query.limit {
        found.truncate(usize::try_from(query.limit).unwrap());
        more = true;
    }
    for kv in &mut found {
        if query.keys_only {
            kv.value.clear();
            if !dialect.keys_only_has_lease && query.sort_target != 4 {
                kv.lease = 0;
            }
        }
    }
    let kvs = found.iter().map(|kv| Bytes::from(kv.encode_to_vec())).collect();
    let header = etcdserverpb::ResponseHeader {
        cluster_id: HEADER.cluster_id,
        member_id: HEADER.member_id,
        revision: HEADER.revision,
        raft_term: HEADER.raft_term,
        leader_id: HEADER.leader_id,
    };
    etcdserverpb::RangeResponse {
        header: Some(header),
        kvs,
        more,
        count,
    }
}

/// A sort with Go's guarantees: stable for few elements, no change of sorted input. Otherwise equal elements may have
/// any order: this one, or with `reversed` the opposite one.
fn gos_sort(kvs: &mut [KeyValue], compare: &dyn Fn(&KeyValue, &KeyValue) -> Ordering, reversed: bool) {
    let stable = kvs.len() <= 12 || kvs.is_sorted_by(|left, right| compare(left, right).is_le());
    if reversed && !stable {
        kvs.reverse();
    }
    kvs.sort_by(compare);
}

/// The encoded answer from `tree`; `None` if it is declined.
pub(in crate::cache) fn answered(tree: &Tree, query: &RangeQuery, dialect: &Dialect) -> Option<Vec<u8>> {
    encoded(select(tree, query, dialect))
}

/// The encoded answer; `None` if it is declined.
pub(in crate::cache) fn encoded(selected: Selected) -> Option<Vec<u8>> {
    let Selected::Answer(selection) = selected else {
        return None;
    };
    let (count, more, len) = (selection.count, selection.more, selection.len());
    let answer = Answer::new(HEADER, selection);
    let length = answer.len();
    let bytes = answer.small(0).unwrap();
    assert_eq!(bytes.len() as u64, length);
    let response = etcdserverpb::RangeResponse::decode(bytes.as_slice()).unwrap();
    assert_eq!(
        (response.count as u64, response.more, response.kvs.len() as u64),
        (count, more, len)
    );
    Some(bytes)
}
