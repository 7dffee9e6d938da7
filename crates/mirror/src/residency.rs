//! Values that are not held, once packing is not enough: whole prefixes, first the one whose values cost most per read. Counts,
//! keys and absence are still known, and every watch is served; reads of the values are forwarded.
//!
//! Values are left out by the load, and by the feed, which waits until there is room. They are read again once memory has
//! room for them, at a low rate.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::pace::pause_after;
use super::set::MirrorSet;
use super::view::{Epoch, Mirror, StaleEpoch, divide};
use etcd_store::cache::{CorruptBlock, Entry, NotHeld, Repacked, Summary, Tree};
use etcd_store::keyspace::{prefix_end, successor};
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_upstream::{Connection, ReceiveWindow, Upstream, range};

/// Pause between two looks for values that can be held again.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// Length of the entries of one step in bytes.
const STEP_BYTES: u64 = 2 << 20;
/// Length of the values that are read at once.
const PIECE_BYTES: u64 = 512 << 10;
/// Timeout for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Cost of values of these bytes: their bytes for each of the `reads` of their prefix.
pub(super) fn cost(reads: &HashMap<Vec<u8>, u64>, prefix: &[u8], bytes: u64) -> u64 {
    let reads = reads.get(prefix).copied().unwrap_or(0);
    bytes / reads.saturating_add(1)
}

/// Leaves out values until the memory of `mirror` is within its budget; returns whether it is. To be called by the feed.
pub(super) async fn leave_out(set: &MirrorSet, mirror: &Mirror, epoch: Epoch) -> Result<bool, StaleEpoch> {
    let mut tried = Vec::new();
    while !set.within_budget(mirror) {
        let Some(tree) = mirror.current_tree(epoch)? else {
            return Ok(false);
        };
        let Some((prefix, is_new)) = costliest(mirror, &tree, &tried) else {
            return Ok(false);
        };
        drop(tree);
        if is_new {
            warn_of_left_out(mirror, &prefix);
        }
        leave_out_prefix(set, mirror, epoch, &prefix).await?;
        tried.push(prefix);
    }
    Ok(true)
}

/// Logs that the values of a prefix are no longer held.
pub(super) fn warn_of_left_out(mirror: &Mirror, prefix: &[u8]) {
    tracing::warn!(
        mirror = mirror.name,
        prefix = %prefix.escape_ascii(),
        "memory is too scarce for all values: those of a prefix are left out, and reads of them are forwarded. Raise \
         --cache-max-bytes, or mirror less with --cache-prefix or --no-cache-prefix"
    );
}

/// Leaves out values of a prefix until the memory is within the budget.
async fn leave_out_prefix(
    set: &MirrorSet,
    mirror: &Mirror,
    epoch: Epoch,
    prefix: &[u8],
) -> Result<(), StaleEpoch> {
    let (start, end) = (prefix.to_vec(), prefix_end(prefix).unwrap_or_default());
    let range = Arc::new((start, end));
    // No more than necessary, of a small budget either.
    let bytes = STEP_BYTES.min(set.max_bytes() / 16);
    let mut from: Box<[u8]> = Box::default();
    while !set.within_budget(mirror) {
        let Some(tree) = mirror.current_tree(epoch)? else {
            return Ok(());
        };
        let range = Arc::clone(&range);
        let leaving_out =
            tokio::task::spawn_blocking(move || tree.leave_out_values((&range.0, &range.1), &from, bytes));
        // An error: the process stops.
        let left_out = leaving_out.await.map_err(|_| StaleEpoch)?;
        let repacked = put(mirror, epoch, left_out)?;
        match repacked.next() {
            Some(next) => from = next.into(),
            None => break,
        }
    }
    Ok(())
}

/// Puts other leaves into the mirror; reports a damaged block.
pub(super) fn put(
    mirror: &Mirror,
    epoch: Epoch,
    repacked: Result<Repacked, CorruptBlock>,
) -> Result<Repacked, StaleEpoch> {
    let Ok(repacked) = repacked else {
        mirror.report_damage();
        return Err(StaleEpoch);
    };
    if !repacked.is_empty() {
        mirror.put_repacked(epoch, &repacked)?;
    }
    Ok(repacked)
}

/// The prefix whose values are left out next, and whether all of them are held: first one of which some are left out already,
/// because lists of it are forwarded anyway.
fn costliest(mirror: &Mirror, tree: &Tree, tried: &[Vec<u8>]) -> Option<(Vec<u8>, bool)> {
    let mut found: BTreeMap<Vec<u8>, Summary> = BTreeMap::new();
    divide(tree, |prefix, summary| {
        if !prefix.is_empty() && !tried.iter().any(|tried| tried == prefix) {
            *found.entry(prefix.to_vec()).or_default() += summary;
        }
    });
    let reads = mirror.reads_by_prefix();
    found
        .into_iter()
        .map(|(prefix, summary)| {
            let (held, is_new) = (
                summary.encoded_bytes - summary.not_held_bytes,
                summary.not_held_bytes == 0,
            );
            let cost = cost(&reads, &prefix, held);
            (held, (!is_new, cost), (prefix, is_new))
        })
        .filter(|(held, ..)| *held > 0)
        .max_by_key(|(_, order, _)| *order)
        .map(|(.., prefix)| prefix)
}

/// Reads values again as long as there is room, for ever.
pub(super) async fn run(set: &MirrorSet, upstream: &Upstream) {
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        for mirror in set.all() {
            if has_room(set, 0) && mirror.metrics.not_held_bytes.get() > 0 {
                // What fails is tried again at the next look.
                let _ = hold_again(set, upstream, mirror).await;
            }
        }
    }
}

/// Whether `bytes` of values can be held. What was just left out must not be.
fn has_room(set: &MirrorSet, bytes: u64) -> bool {
    let (used, max) = (set.used_bytes(), set.max_bytes());
    used < max / 2 && used.saturating_add(bytes) < max / 8 * 5
}

/// Reads the values of `mirror` that are not held, in the order of their keys, until there is no room, or no such value; `None` if
/// etcd does not respond, or the mirror is dropped.
async fn hold_again(set: &MirrorSet, upstream: &Upstream, mirror: &Mirror) -> Option<()> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    let connecting = upstream.dedicated(ReceiveWindow::SHARED, None, deadline);
    let connection = connecting.await.ok()?;
    let mut from = Vec::new();
    loop {
        let epoch = mirror.epoch();
        let view = mirror.view().ok()?;
        let Some(piece) = view.tree.next_not_held(&from, PIECE_BYTES) else {
            break;
        };
        if !has_room(set, piece.bytes) {
            break;
        }
        let began = Instant::now();
        let values = read(&connection, &piece, view.revision).await?;
        drop(view);
        let took = began.elapsed();
        let tree = mirror.current_tree(epoch).ok()??;
        put(mirror, epoch, Ok(tree.hold_values(&values))).ok()?;
        from = successor(&piece.last).to_vec();
        tokio::time::sleep(pause_after(piece.bytes, took)).await;
    }
    if mirror.metrics.not_held_bytes.get() == 0 {
        tracing::info!(mirror = mirror.name, "all values are held again");
    }
    Some(())
}

/// The entries from the first to the last of `piece` at a revision of the mirror; `None` if etcd does not send them.
async fn read(connection: &Arc<Connection>, piece: &NotHeld, revision: i64) -> Option<Vec<Entry>> {
    let request = RangeRequest {
        key: piece.first.to_vec().into(),
        range_end: successor(&piece.last),
        revision,
        // Data at a revision is the same on all members.
        serializable: true,
        ..RangeRequest::default()
    };
    let response = range(connection, request).await.ok()?;
    let entries = response.kvs.iter();
    entries
        .map(|key_value| Entry::from_key_value(key_value).ok())
        .collect()
}

#[cfg(test)]
mod tests;
