//! The request for a read that rangecache makes by itself.

use etcd_store::cache::RangeQuery;
use etcd_wire::etcdserverpb::RangeRequest;

/// A request with every field of `query`. A new field of either is an error of the compiler here: a read is never sent
/// without what its client asked for.
pub(super) fn range_request(query: &RangeQuery) -> RangeRequest {
    let RangeQuery {
        key,
        range_end,
        limit,
        revision,
        sort_order,
        sort_target,
        serializable,
        keys_only,
        count_only,
        min_mod_revision,
        max_mod_revision,
        min_create_revision,
        max_create_revision,
    } = query;
    RangeRequest {
        key: key.clone(),
        range_end: range_end.clone(),
        limit: *limit,
        revision: *revision,
        sort_order: *sort_order,
        sort_target: *sort_target,
        serializable: *serializable,
        keys_only: *keys_only,
        count_only: *count_only,
        min_mod_revision: *min_mod_revision,
        max_mod_revision: *max_mod_revision,
        min_create_revision: *min_create_revision,
        max_create_revision: *max_create_revision,
    }
}
