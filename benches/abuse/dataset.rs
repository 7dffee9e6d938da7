//! Keys of the run, by what they are for.

use anyhow::Result;
use testkit::grpc::Client;
use testkit::pb::{BY_VALUE, DESCEND, RangeRequest, RequestOp};

/// Prefix that rangecache does not mirror: everything below it is forwarded.
pub(crate) const NOT_MIRRORED: &str = "/direct/";
/// Prefix of the honest client's list from memory.
pub(crate) const LIST: &str = "/list/";
/// Prefix of the values that are overwritten.
pub(crate) const HOT: &str = "/hot/";
/// Prefix of the values of 1 MB, below [`NOT_MIRRORED`].
pub(crate) const LARGE: &str = "/direct/large/";
/// Prefix of the large list from etcd, below [`NOT_MIRRORED`].
pub(crate) const WIDE: &str = "/direct/wide/";
/// Prefix of the honest client's list from etcd, below [`NOT_MIRRORED`].
pub(crate) const DIRECT_LIST: &str = "/direct/list/";

/// Keys below [`LIST`] and below [`DIRECT_LIST`].
const LIST_KEYS: usize = 1_000;
/// Keys below [`HOT`], of 100 KB each.
pub(crate) const HOT_KEYS: usize = 100;
/// Keys below [`LARGE`], of 1 MB each.
pub(crate) const LARGE_KEYS: usize = 20;
/// Keys below [`WIDE`], of 10 KB each.
const WIDE_KEYS: usize = 2_000;

/// Prefix of the many small keys, which are mirrored.
const MANY: &str = "/many/";
/// Keys below [`MANY`], of 100 B each.
const MANY_KEYS: usize = 100_000;
/// Operations of one transaction: etcd's default bound.
const BATCH: usize = 128;

/// The key of the honest client's `number`th GET.
pub(crate) fn get_key(number: usize) -> String {
    format!("{LIST}{:05}", number % LIST_KEYS)
}

/// The value of a hot key.
pub(crate) fn hot_value(number: usize) -> Vec<u8> {
    vec![b'a' + u8::try_from(number % 26).unwrap_or(0); 100_000]
}

/// Range over the keys that begin with `prefix`.
pub(crate) fn all(prefix: &str) -> RangeRequest {
    RangeRequest {
        key: prefix.into(),
        range_end: testkit::pb::prefix_end(prefix.as_bytes()),
        ..RangeRequest::default()
    }
}

/// The first of the many keys in the order of their values, without values: memory looks at all of them.
pub(crate) fn sorted() -> RangeRequest {
    RangeRequest {
        sort_order: DESCEND,
        sort_target: BY_VALUE,
        limit: 20_000,
        keys_only: true,
        ..all(MANY)
    }
}

/// Range over those of the many keys that were written from this revision on.
pub(crate) fn filtered(min_mod_revision: i64) -> RangeRequest {
    RangeRequest {
        min_mod_revision,
        ..all(MANY)
    }
}

/// Writes every key.
pub(crate) async fn write(etcd: &Client) -> Result<()> {
    let put = async |key: String, value: Vec<u8>| {
        let written = etcd.put(&key, &value).await;
        written.map_err(|status| anyhow::anyhow!("cannot write {key}: {status:?}"))
    };
    for number in 0..LIST_KEYS {
        put(get_key(number), vec![b'v'; 1_000]).await?;
        put(format!("{DIRECT_LIST}{number:05}"), vec![b'v'; 1_000]).await?;
    }
    for number in 0..HOT_KEYS {
        put(format!("{HOT}{number:03}"), hot_value(number)).await?;
    }
    for number in 0..LARGE_KEYS {
        put(format!("{LARGE}{number:02}"), vec![b'l'; 1_000_000]).await?;
    }
    for number in 0..WIDE_KEYS {
        put(format!("{WIDE}{number:05}"), vec![b'w'; 10_000]).await?;
    }
    let many: Vec<usize> = (0..MANY_KEYS).collect();
    for batch in many.chunks(BATCH) {
        let put = |number: &usize| {
            // In another order than the keys.
            let value = format!("{:0100}", number * 2_654_435_761 % 4_294_967_296);
            RequestOp::put(format!("{MANY}{number:06}"), value)
        };
        let written = etcd.transact(batch.iter().map(put).collect()).await;
        written.map_err(|status| anyhow::anyhow!("cannot write {MANY}: {status:?}"))?;
    }
    Ok(())
}
