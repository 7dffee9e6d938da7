//! Scans: filtered and sorted reads, for which memory looks at every entry of a range.
//!
//! A scan yields after [`STEP_ENTRIES`], so that other calls and the feed wait for one step of each scan at most. As many scans
//! as there are worker threads have a turn, and pass it on after [`TURN_ENTRIES`]: clients, and the connections of a client, wait
//! for each other by entries. What a scan finds counts against `--buffer-max-bytes` as long as its response does.

use etcd_store::cache::{Scan, Selected};
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_edge::limits::{ByteKind, Exceeded, Gate, HeldBytes};
use rangecache_mirror::HeldView;

use crate::forward::{outcome_of, status_of};

/// Entries after which a scan yields. A scan of no more needs no turn.
pub(super) const STEP_ENTRIES: u64 = 256;
/// Entries after which a scan passes its turn on.
const TURN_ENTRIES: u64 = 64 * STEP_ENTRIES;

/// Guard of the entries that a scan has found: their view, and the memory of their order.
#[derive(Debug)]
pub(crate) struct ScannedEntries {
    pub(super) view: HeldView,
    _order: HeldBytes,
}

/// Reason for which a scan has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotScanned {
    #[error(transparent)]
    Exceeded(#[from] Exceeded),
    /// The scan needs more memory than a call may ever have.
    #[error("the scan needs more memory than a call may have")]
    TooLarge,
}

impl NotScanned {
    /// Status and outcome of the read.
    ///
    /// # Errors
    /// Reason for which etcd has to respond.
    pub(super) fn refusal(self) -> Result<(Status, Outcome), Reason> {
        Ok(match self {
            NotScanned::TooLarge => return Err(Reason::BufferBytes),
            NotScanned::Exceeded(cause) => {
                let status = status_of(cause);
                let outcome = match outcome_of(&status) {
                    Some(outcome @ Outcome::Shed(_)) => outcome,
                    _ => Outcome::Cancelled(Reason::Deadline),
                };
                (status, outcome)
            }
        })
    }
}

/// Makes `scan` of the entries of `view`.
///
/// # Errors
/// [`NotScanned`], for lack of a slot or of memory.
pub(super) async fn scan_in_turns(
    mut scan: Scan<'_>,
    view: HeldView,
    gate: Gate<'_>,
) -> Result<(Selected, ScannedEntries), NotScanned> {
    let mut slot = gate.acquire().await?;
    let mut order = gate.account.hold(ByteKind::Request);
    let mut left = TURN_ENTRIES;
    let selected = loop {
        let more = scan.memory_bytes().saturating_sub(order.bytes());
        if more > 0 {
            if !order.could_hold(scan.memory_bytes()) {
                return Err(NotScanned::TooLarge);
            }
            order.try_grow(more)?;
        }
        if let Some(selected) = scan.step(STEP_ENTRIES) {
            break selected;
        }
        tokio::task::yield_now().await;
        left -= STEP_ENTRIES;
        if left == 0 {
            left = TURN_ENTRIES;
            slot = slot.renew(gate.account, gate.deadline).await?;
        }
    };
    let order_bytes = match &selected {
        Selected::Answer(selection) => selection.order_bytes(),
        _ => 0,
    };
    // Dropped before its memory is released.
    drop(scan);
    order.shrink_to(order_bytes);
    Ok((selected, ScannedEntries { view, _order: order }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use etcd_store::cache::{Dialect, RangeQuery, Selecting, Tree, begin_select, testing::KeyValue};
    use rangecache_edge::limits::{BufferMetrics, Deadline};

    use super::*;
    use crate::{handles::Client, testing::Scene};

    const DIALECT: Dialect = Dialect {
        keys_only_has_lease: false,
        unknown_sort_is_refused: true,
    };

    fn tree(keys: i64) -> Tree {
        // 7919 is a prime: no two keys have the same revision.
        let entry = |n: i64| KeyValue::new(format!("k{n:06}"), 1 + n * 7919 % keys, "value").entry();
        Tree::from_sorted((0..keys).map(entry))
    }

    /// Every key, by revision from the last on.
    fn sorted() -> RangeQuery {
        RangeQuery {
            key: "k".into(),
            range_end: "l".into(),
            sort_order: 2,
            sort_target: 3,
            ..RangeQuery::default()
        }
    }

    async fn scanned(
        scene: &Scene,
        client: &Client,
        tree: &Tree,
        query: &RangeQuery,
    ) -> Result<(Selected, ScannedEntries), NotScanned> {
        let Selecting::Scan(scan) = begin_select(tree, query, &DIALECT) else {
            panic!("no scan: {query:?}")
        };
        let view = scene.mirrors.at(0).unwrap().hold_view(false);
        scan_in_turns(scan, view, scene.proxy.scan_gate(&client.account, Deadline::NONE)).await
    }

    fn held_bytes(scene: &Scene) -> u64 {
        scene.telemetry.metrics.group::<BufferMetrics>().used_bytes()
    }

    #[tokio::test]
    async fn other_tasks_run_between_the_steps_of_a_scan() {
        let (scene, tree, mut turns) = (Scene::new(&[]), tree(20_000), 0);
        let (client, query) = (scene.client(), sorted());
        let others = async {
            loop {
                turns += 1;
                tokio::task::yield_now().await;
            }
        };
        let selected = tokio::select! {
            biased;
            scanned = scanned(&scene, &client, &tree, &query) => scanned.unwrap().0,
            () = others => unreachable!("it never ends"),
        };
        assert!(matches!(selected, Selected::Answer(selection) if selection.len() == 20_000));
        assert!(turns >= 20_000 / STEP_ENTRIES, "{turns}");
    }

    #[tokio::test]
    async fn order_of_a_scan_counts_until_its_response_ends() {
        let (scene, tree) = (Scene::new(&[]), tree(20_000));
        let client = scene.client();
        let (selected, entries) = scanned(&scene, &client, &tree, &sorted()).await.unwrap();
        let Selected::Answer(selection) = selected else {
            panic!("{selected:?}")
        };
        assert!(selection.order_bytes() > 0);
        assert_eq!(held_bytes(&scene), selection.order_bytes());
        drop(entries);
        assert_eq!(held_bytes(&scene), 0);
        // What passes alternately has gaps, and what passes as a whole has none.
        let filtered = |min_mod_revision| RangeQuery {
            sort_order: 0,
            sort_target: 0,
            min_mod_revision,
            ..sorted()
        };
        let all = scanned(&scene, &client, &tree, &filtered(1)).await.unwrap();
        assert_eq!(held_bytes(&scene), 0);
        let some = scanned(&scene, &client, &tree, &filtered(10_000)).await.unwrap();
        assert!(held_bytes(&scene) > 0);
        drop((all, some));
        assert_eq!(held_bytes(&scene), 0);
    }

    #[tokio::test]
    async fn scan_without_room_is_refused_and_one_that_never_has_room_is_etcds() {
        let (scene, tree) = (Scene::new(&["--buffer-max-bytes=16MiB"]), tree(20_000));
        let client = scene.client();
        let mut kept = Vec::new();
        let refused = loop {
            match scanned(&scene, &client, &tree, &sorted()).await {
                Ok((_, entries)) => kept.push(entries),
                Err(refused) => break refused,
            }
        };
        assert_eq!(refused, NotScanned::Exceeded(Exceeded::Bytes));
        assert!(!kept.is_empty());
        assert!(matches!(
            refused.refusal(),
            Ok((Status::BufferBytes, Outcome::Shed(Reason::BufferBytes)))
        ));
        drop(kept);
        assert!(scanned(&scene, &client, &tree, &sorted()).await.is_ok());
        let small = Scene::new(&["--buffer-max-bytes=1MiB"]);
        let client = small.client();
        let refused = scanned(&small, &client, &tree, &sorted()).await.unwrap_err();
        assert_eq!(refused, NotScanned::TooLarge);
        assert!(matches!(refused.refusal(), Err(Reason::BufferBytes)));
        assert_eq!(held_bytes(&small), 0);
    }

    #[tokio::test]
    async fn short_scan_waits_for_a_part_of_a_long_one() {
        let scene = Arc::new(Scene::new(&["--worker-threads=1"]));
        let (long, short) = (tree(100_000), tree(1_000));
        let (one, other, query) = (scene.client(), scene.client(), sorted());
        let ended = std::cell::Cell::new(false);
        let scans = async {
            tokio::join!(
                biased;
                async {
                    scanned(&scene, &one, &long, &query).await.unwrap();
                    ended.set(true);
                },
                async {
                    scanned(&scene, &other, &short, &query).await.unwrap();
                    assert!(!ended.get(), "the long one is in progress");
                },
            )
        };
        scans.await;
    }
}
