//! Memory of mirrors as it becomes scarce: values are packed, those first that are not read, then left out, and plain again once there
//! is room. No other room asks which values are plain, packed or not held: trees carry them.
//!
//! | memory of all mirrors, of `--cache-max-bytes` | `--cache-pack=auto` |
//! |---|---|
//! | below a half | values that are read are unpacked; values that are not held are read again, at a low rate |
//! | above three quarters | a load packs, and of what is loaded what was neither read nor written for a while |
//! | above seven eighths | whatever can be |
//! | above the whole | a load leaves out values; the feed of the mirror waits until there is room: all is packed, then values are left out |
//!
//! Values of whole prefixes are left out, first of the one whose values cost most per read. Counts, keys and absence are still known,
//! and every watch is served; reads of the values are forwarded.
//!
//! A mirror whose keys alone do not fit is out of service, its reads are forwarded, and it waits until it may fit
//! ([`until_it_may_fit`]).
//!
//! The work is done in small steps off the threads that serve, with pauses between them. What is made of leaves, and what that
//! means for the history, is the matter of [`Tree::repack`](etcd_store::cache::Tree::repack).

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use etcd_store::cache::{Entry, MemoryError, NotHeld, Packing, Repacked, Repacking, Tree, TreeBuilder};
use etcd_store::keyspace::{prefix_end, successor};
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_base::{blocking::compute, panics::restarting};
use rangecache_upstream::{
    Connection, ConnectionClass, ReceiveWindow, Upstream, jittered, pause_after, range,
};
use tokio::time::Instant;

use super::view::{Epoch, Mirror, StaleEpoch, sizes};
use super::{flags::CachePack, set::MirrorSet};

/// Time in which a value must be read or written so that it counts as in use. Between two looks at one mirror.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// Length of the entries of one step in bytes: a millisecond, which calls may wait for if every core is busy.
const STEP_BYTES: u64 = 256 << 10;
/// Length of a step while the feed waits.
const URGENT_STEP_BYTES: u64 = 2 << 20;
/// Length of the entries of a mirror up to which a step needs no thread of its own: some tenths of a millisecond.
const AT_ONCE_BYTES: u64 = 64 << 10;
/// Pause after a step, in times of its duration: a fifth of one core.
const PAUSE_STEPS: u32 = 4;
/// Length of the values that are read at once.
const PIECE_BYTES: u64 = 512 << 10;
/// Timeout for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Key at which the next step on a mirror begins; empty at its first key.
type Hand = Box<[u8]>;

/// A builder for the next load of `mirror`, without keys.
pub(super) fn builder(set: &MirrorSet, mirror: &Mirror) -> TreeBuilder {
    TreeBuilder::new(packing(set, mirror))
}

fn packing(set: &MirrorSet, mirror: &Mirror) -> Packing {
    match set.live.load().cache_pack {
        CachePack::Never => Packing::Never,
        CachePack::Always => Packing::Always,
        CachePack::Auto => {
            let others = set.max_bytes() - set.budget_of(mirror);
            Packing::Above(scarce_from(set.max_bytes()).saturating_sub(others))
        }
    }
}

/// Leaves out values of a load until its keys take no more than `max_bytes`, if values may be packed. `None` if that fails.
pub(super) async fn make_room_of_load(
    mirror: &Mirror,
    mut keys: TreeBuilder,
    max_bytes: u64,
) -> Option<TreeBuilder> {
    if !keys.packs() {
        return Some(keys);
    }
    let reads = mirror.reads_by_prefix();
    let leaving_out = compute(false, move || {
        let left_out = keys.make_room(max_bytes, |prefix, bytes| cost(&reads, prefix, bytes));
        left_out.map(|prefixes| (keys, prefixes))
    });
    // What was just packed is not damaged.
    let (keys, prefixes) = leaving_out.await.ok()?.ok()?;
    for prefix in prefixes {
        warn_of_left_out(mirror, &prefix);
    }
    Some(keys)
}

/// Packs all of `mirror` that can be, then leaves out values, until its memory is within its budget; returns whether it is.
pub(super) async fn make_room(set: &MirrorSet, mirror: &Mirror, epoch: Epoch) -> Result<bool, StaleEpoch> {
    if set.within_budget(mirror) {
        return Ok(true);
    }
    if set.live.load().cache_pack == CachePack::Never {
        return Ok(false);
    }
    let all = (Hand::default(), Bytes::new());
    if !shrink(set, mirror, epoch, all, Repacking::PackAll, URGENT_STEP_BYTES).await? {
        return leave_out(set, mirror, epoch).await;
    }
    Ok(true)
}

/// Leaves out values until the memory of `mirror` is within its budget; returns whether it is.
async fn leave_out(set: &MirrorSet, mirror: &Mirror, epoch: Epoch) -> Result<bool, StaleEpoch> {
    // No more than necessary, of a small budget either.
    let bytes = URGENT_STEP_BYTES.min(set.max_bytes() / 16);
    let mut tried = Vec::new();
    while !set.within_budget(mirror) {
        let tree = mirror.current_tree(epoch)?;
        let Some((prefix, is_new)) = tree.and_then(|tree| costliest(mirror, &tree, &tried)) else {
            return Ok(false);
        };
        if is_new {
            warn_of_left_out(mirror, &prefix);
        }
        let range = (prefix.as_slice().into(), prefix_end(&prefix).unwrap_or_default());
        shrink(set, mirror, epoch, range, Repacking::LeaveOut, bytes).await?;
        tried.push(prefix);
    }
    Ok(true)
}

/// Makes leaves again, from the first key of the range to the last, until the memory of `mirror` is within its budget; returns whether
/// it is.
async fn shrink(
    set: &MirrorSet,
    mirror: &Mirror,
    epoch: Epoch,
    (mut hand, end): (Hand, Bytes),
    what: Repacking<'static>,
    bytes: u64,
) -> Result<bool, StaleEpoch> {
    while !set.within_budget(mirror) {
        step(mirror, epoch, (&mut hand, &end), what, bytes).await?;
        if hand.is_empty() {
            return Ok(set.within_budget(mirror));
        }
    }
    Ok(true)
}

/// Makes one step from the hand on and below a key, and moves the hand.
async fn step(
    mirror: &Mirror,
    epoch: Epoch,
    (hand, end): (&mut Hand, &Bytes),
    what: Repacking<'static>,
    bytes: u64,
) -> Result<(), StaleEpoch> {
    let (from, end) = (std::mem::take(hand), end.clone());
    let Some(tree) = mirror.current_tree(epoch)? else {
        return Ok(());
    };
    let is_small = tree.summary().encoded_bytes <= AT_ONCE_BYTES;
    let making = compute(is_small, move || tree.repack((&from, &end), what, bytes));
    // An error: the process stops.
    let repacked = put(mirror, epoch, making.await.map_err(|_| StaleEpoch)?)?;
    let to = match what {
        Repacking::UnpackHot => Some("plain"),
        Repacking::PackCold | Repacking::PackAll => Some("packed"),
        _ => None,
    };
    if let Some(to) = to {
        mirror
            .metrics
            .repacked_bytes
            .of(to)
            .inc_by(repacked.encoded_bytes());
    }
    *hand = repacked.next().unwrap_or_default().into();
    Ok(())
}

/// Puts other leaves into the mirror; reports damaged memory.
fn put(
    mirror: &Mirror,
    epoch: Epoch,
    repacked: Result<Repacked, MemoryError>,
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
    let reads = mirror.reads_by_prefix();
    sizes([tree])
        .into_iter()
        .filter(|(prefix, size)| !prefix.is_empty() && !tried.contains(prefix) && size.held_bytes() > 0)
        .map(|(prefix, size)| (prefix, size.has_all_values(), size.held_bytes()))
        .max_by_key(|(prefix, is_new, bytes)| (!is_new, cost(&reads, prefix, *bytes)))
        .map(|(prefix, is_new, _)| (prefix, is_new))
}

/// Cost of values of these bytes: their bytes for each of the `reads` of their prefix.
fn cost(reads: &HashMap<Vec<u8>, u64>, prefix: &[u8], bytes: u64) -> u64 {
    let reads = reads.get(prefix).copied().unwrap_or(0);
    bytes / reads.saturating_add(1)
}

/// Logs that the values of a prefix are no longer held.
fn warn_of_left_out(mirror: &Mirror, prefix: &[u8]) {
    tracing::warn!(
        mirror = mirror.name,
        prefix = %prefix.escape_ascii(),
        "memory is too scarce for all values: those of a prefix are left out, and reads of them are forwarded. Raise \
         --cache-max-bytes, or mirror less with --cache-prefix or --no-cache-prefix"
    );
}

/// Packs and unpacks what is loaded, and reads again values that were left out, for ever.
pub(super) async fn run(set: &MirrorSet, upstream: &Upstream) {
    tokio::join!(
        restarting("packing", || repack_all(set)),
        restarting("residency", || hold_all(set, upstream)),
    );
}

/// Packs and unpacks what is loaded, for ever.
async fn repack_all(set: &MirrorSet) {
    let mut hands = HashMap::new();
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        for (position, slot) in set.present() {
            let hand = hands.entry(position).or_default();
            let epoch = slot.mirror.epoch();
            // Contents that were dropped meanwhile are loaded again.
            let _ = go_round(set, &slot.mirror, epoch, hand).await;
        }
    }
}

/// Continues where the last look ended, at most once through the mirror, as long as there is a reason.
async fn go_round(set: &MirrorSet, mirror: &Mirror, epoch: Epoch, hand: &mut Hand) -> Result<(), StaleEpoch> {
    let first = hand.clone();
    let mut is_past_the_end = false;
    while let Some(what) = due(set, mirror) {
        let began = Instant::now();
        // What is unpacked must not be packed again at once.
        let room = (set.max_bytes() / 8 * 5).saturating_sub(set.used_bytes());
        let bytes = if what == Repacking::UnpackHot {
            room.min(STEP_BYTES)
        } else {
            // A step must not pack so much that there is room to unpack it again.
            STEP_BYTES.min(set.max_bytes() / 16)
        };
        step(mirror, epoch, (hand, &Bytes::new()), what, bytes).await?;
        is_past_the_end |= hand.is_empty();
        if is_past_the_end && *hand >= first {
            break;
        }
        tokio::time::sleep(began.elapsed() * PAUSE_STEPS).await;
    }
    Ok(())
}

/// Change that is due to the leaves of `mirror` now.
fn due(set: &MirrorSet, mirror: &Mirror) -> Option<Repacking<'static>> {
    let (used, max) = (set.used_bytes(), set.max_bytes());
    let unpack = || (used < max / 2 && mirror.metrics.packed_bytes.get() > 0).then_some(Repacking::UnpackHot);
    match set.live.load().cache_pack {
        CachePack::Always => Some(Repacking::PackCold),
        CachePack::Never => unpack(),
        CachePack::Auto if used > max / 8 * 7 => Some(Repacking::PackAll),
        CachePack::Auto if used > scarce_from(max) => Some(Repacking::PackCold),
        CachePack::Auto => unpack(),
    }
}

fn scarce_from(max_bytes: u64) -> u64 {
    max_bytes / 4 * 3
}

/// Reads values again as long as there is room, for ever.
async fn hold_all(set: &MirrorSet, upstream: &Upstream) {
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        for mirror in set.all() {
            if has_room(set, 0) && !mirror.metrics.has_all_values() {
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
    let mut from = Bytes::new();
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
        from = successor(&piece.last);
        let tree = mirror.current_tree(epoch).ok()??;
        let held = tree.repack((&piece.first, &from), Repacking::Hold(&values), u64::MAX);
        put(mirror, epoch, held).ok()?;
        drop(tree);
        tokio::time::sleep(pause_after(piece.bytes, took)).await;
    }
    if mirror.metrics.has_all_values() {
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

/// Leaves out all values of all mirrors, for tests.
#[cfg(debug_assertions)]
pub(super) fn leave_out_all(set: &MirrorSet) {
    for mirror in set.all() {
        let epoch = mirror.epoch();
        if let Ok(Some(tree)) = mirror.current_tree(epoch) {
            let _ = put(
                mirror,
                epoch,
                tree.repack((b"", b""), Repacking::LeaveOutAll, u64::MAX),
            );
        }
    }
}

/// Pause between two counts, in probe intervals: a count costs etcd some tens of milliseconds per million keys.
const PAUSE_PROBES: u32 = 30;
/// Number of counts after which the mirror is loaded anyway: values may have become smaller.
const MAX_COUNTS: u32 = 20;
/// Timeout for connecting for a count.
const COUNT_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until etcd's keys, at `mean_bytes` each, would take at most nine tenths of the budget, or until
/// [`MAX_COUNTS`] counts have been made, or `epoch` has ended. Until then a mirror over budget is out of service, and its reads are
/// forwarded.
pub(crate) async fn until_it_may_fit(
    set: &MirrorSet,
    upstream: &Upstream,
    probe_interval: Duration,
    mirror: &Mirror,
    epoch: Epoch,
    mean_bytes: u64,
) {
    let waiting = async {
        for _ in 0..MAX_COUNTS {
            tokio::time::sleep(jittered(probe_interval * PAUSE_PROBES)).await;
            if let Some(count) = count(upstream, mirror).await {
                let needed = count.saturating_mul(mean_bytes);
                if needed <= set.budget_of(mirror) / 10 * 9 {
                    return;
                }
            }
        }
    };
    tokio::select! {
        () = waiting => {}
        () = mirror.epoch_ended(epoch) => {}
    }
}

/// Number of etcd's keys in the mirror's scope; `None` without a response in time.
async fn count(upstream: &Upstream, mirror: &Mirror) -> Option<u64> {
    let deadline = Instant::now() + COUNT_TIMEOUT;
    let connection = upstream.connection(ConnectionClass::Check, deadline).await.ok()?;
    let request = RangeRequest {
        key: mirror.scope.key(),
        range_end: mirror.scope.range_end(),
        serializable: true,
        count_only: true,
        ..RangeRequest::default()
    };
    u64::try_from(range(&connection, request).await.ok()?.count).ok()
}

#[cfg(test)]
mod packing_tests;
#[cfg(test)]
mod tests;
