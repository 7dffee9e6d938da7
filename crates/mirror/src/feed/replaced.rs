//! Values that events replace and that memory does not hold: they are read from etcd before the events are applied, for the
//! watchers that ask for them (`prev_kv`). Each such value is read once, for what replaces it is held.

use std::collections::HashSet;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};

use super::end::FeedEnd;
use super::member::Feeding;
use etcd_store::cache::{Change, Entry};
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_base::telemetry::Reason;
use rangecache_upstream::{is_compaction, range};

/// Reads that are in flight at once.
const IN_FLIGHT: usize = 16;

/// Applies the events of whole revisions up to `revision`, once they have the values that they replace. One that etcd has compacted
/// is left out, as etcd leaves it out.
///
/// # Errors
/// [`FeedEnd::Lost`] if etcd does not answer; [`FeedEnd::StaleEpoch`] if its value is another one than the mirror's, which is
/// dropped then.
pub(super) async fn apply(
    feeding: Feeding<'_>,
    mut changes: Vec<Change>,
    revision: i64,
) -> Result<(), FeedEnd> {
    let Feeding { mirror, epoch, .. } = feeding;
    let mut read = HashSet::new();
    while let Err(missing) = mirror.apply_with_replaced(epoch, changes, revision, &read)? {
        changes = missing.changes;
        bring(feeding, &mut changes, &missing.indexes).await?;
        read.extend(missing.indexes);
    }
    Ok(())
}

/// Reads what the changes at `indexes` replace.
async fn bring(feeding: Feeding<'_>, changes: &mut [Change], indexes: &[usize]) -> Result<(), FeedEnd> {
    let reads = indexes.iter().map(|index| {
        let change = &changes[*index];
        (
            *index,
            Bytes::copy_from_slice(change.key()),
            change.revision() - 1,
        )
    });
    let reads: Vec<_> = reads.collect();
    let mut reads = stream::iter(reads)
        .map(|(index, key, revision)| async move { (index, value_at(feeding, key, revision).await) })
        .buffer_unordered(IN_FLIGHT);
    while let Some((index, read)) = reads.next().await {
        changes[index].replaced = read?;
    }
    drop(reads);
    for index in indexes {
        let replaced = changes[*index].replaced.as_ref();
        if replaced.is_some_and(|replaced| feeding.mirror.is_held(feeding.epoch, replaced) == Ok(false)) {
            return Err(differs(feeding));
        }
    }
    Ok(())
}

/// Drops the mirror, because a value that it does not hold is another one in etcd than the one that it left out.
fn differs(feeding: Feeding<'_>) -> FeedEnd {
    let Feeding { mirror, epoch, .. } = feeding;
    tracing::error!(
        mirror = mirror.name,
        "a value that is not held differs in etcd; the mirror is being reloaded. Unless etcd was restored, please report it"
    );
    mirror.metrics.mismatches.inc();
    // A stale epoch means that the contents were dropped already.
    let _ = mirror.end_epoch(epoch, Reason::Mismatch);
    FeedEnd::StaleEpoch
}

/// The entry of a key at a revision; `None` if etcd has compacted it.
async fn value_at(feeding: Feeding<'_>, key: Bytes, revision: i64) -> Result<Option<Entry>, FeedEnd> {
    let request = RangeRequest {
        key,
        revision,
        ..RangeRequest::default()
    };
    match range(feeding.connection, request).await {
        Ok(response) => match response.kvs.first() {
            Some(key_value) => {
                let entry = Entry::from_key_value(key_value);
                entry.map(Some).map_err(|error| FeedEnd::Lost(error.to_string()))
            }
            None => Err(differs(feeding)),
        },
        Err(status) if is_compaction(&status) => Ok(None),
        Err(status) => Err(status.into()),
    }
}

#[cfg(test)]
mod tests;
