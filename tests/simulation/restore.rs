//! Restores of all members from a backup.

use std::time::Duration;

use tokio::time::sleep;

use crate::auth::User;
use crate::caller::{KEYS, authenticated, connect, key};
use crate::chance::Chance;
use crate::cluster::{MEMBERS, State};
use crate::members::From;
use crate::store::{Change, History};
use crate::trace::Trace;
use crate::world::World;

/// Attempts at a revision whose loss shows in the newest keys.
const TRIES: usize = 10;

/// Stops all members, puts an older state in place of theirs, and starts them again. In half of the cases rangecache
/// sees none of them before the lost revisions were written again, in others it loses them once more.
pub async fn restore(world: &World) {
    let (chance, cluster, members) = (&world.chance, &world.cluster, &world.members);
    (0..MEMBERS).for_each(|member| members.kill(member));
    let lost = 1 + chance.below(if chance.one_in(3) { 120 } else { 40 });
    let (is_new_cluster, is_hidden) = (chance.one_in(3), chance.one_in(2));
    let (before, compactable) = cluster.change(|state| {
        let newest = state.history().newest().revision;
        let entries = state.history().len().saturating_sub(lost).max(1);
        let mut history = state.history().truncated(entries);
        let compactable = history.compactable;
        if is_new_cluster {
            // Its raft log has nothing to do with the one before.
            state.term = 1 + chance.below(20) as u64;
            history.begin_cluster(state.term, chance.below(60) as u64);
        } else {
            // The newest events are all that shows such a restore: docs/architecture.md says what follows without them.
            history.compactable = history.newest().revision;
        }
        let (from, to) = (state.history().newest(), history.newest());
        cluster.trace.line(format!(
            "restored: {from:?} becomes {to:?}, hidden: {is_hidden}, another cluster: {is_new_cluster}"
        ));
        state.replace_history(history);
        (newest, compactable)
    });
    for member in 0..MEMBERS {
        members.restart(member);
        cluster.change(|state| state.members[member].applied = state.history().len());
        if is_hidden {
            members.cut_off(member, From::Rangecache);
        }
    }
    if is_hidden {
        if chance.one_in(2) {
            cluster.change(|state| repeat_lost(state, chance, &cluster.trace));
        }
        // In case that no client writes directly.
        let writing = async {
            while cluster.look(|state| state.history().newest().revision) <= before + 1 {
                if let Some(client) = connect(&From::Clients.authority(0)).await {
                    let (client, _) = authenticated(client, Some(User::All)).await;
                    let _ = client.put(key(0), "again").await;
                }
                sleep(Duration::from_millis(10)).await;
            }
        };
        writing.await;
        if chance.one_in(3) {
            // So long that watches are continued at etcd.
            sleep(Duration::from_secs(11)).await;
        }
    } else if chance.one_in(3) {
        // Rangecache reaches the members for a moment.
        sleep(chance.millis(0..100)).await;
        (0..MEMBERS).for_each(|member| members.cut_off(member, From::Rangecache));
        sleep(chance.millis(500..4_000)).await;
    } else if !is_new_cluster {
        // Rangecache sees it before much is written.
        cluster.change(|state| state.history_mut().compactable = compactable);
    }
    (0..MEMBERS).for_each(|member| members.reconnect(member, From::Rangecache));
}

/// Writes what was lost again, as clients do that repeat what was not acknowledged, except for one revision: one that shows in the
/// newest keys, if there is one. Of a mirror that was loaded later nothing else can be compared.
fn repeat_lost(state: &mut State, chance: &Chance, trace: &Trace) {
    let before = &state.histories[state.histories.len() - 2];
    let newest = before.newest();
    let revisions = state.history().newest().revision + 1..=newest.revision;
    let lost: Vec<_> = revisions
        .clone()
        .map(|revision| before.changes_at(revision))
        .collect();
    // The newest event stays the same. What is below a compaction that was known before is not compared.
    let first = usize::try_from(newest.compacted - revisions.start()).unwrap_or(0);
    let repeated = |other: Option<usize>| {
        let mut history = state.history().truncated(state.history().len());
        for (index, changes) in lost.iter().enumerate() {
            if other == Some(index) {
                let key = key(chance.below(KEYS)).into();
                history.commit(&[Change::Put(key, b"another".to_vec(), 0)]);
            } else {
                history.commit(changes);
            }
        }
        history
    };
    let shows = |history: &History| {
        let differs = |key: String| {
            let at = |history: &History| history.get(key.as_bytes(), newest.revision).cloned();
            at(history) != at(before)
        };
        (0..KEYS).map(key).any(differs)
    };
    let others = first..lost.len().saturating_sub(1);
    let mut chosen = None;
    if !others.is_empty() {
        let mut tried = (0..TRIES).map(|_| repeated(Some(first + chance.below(others.len()))));
        chosen = tried.find(shows);
    }
    let history = chosen.unwrap_or_else(|| repeated(None));
    let other = revisions
        .clone()
        .find(|revision| history.events_at(*revision) != before.events_at(*revision));
    trace.line(format!("written again, but for revision {other:?}"));
    *state.history_mut() = history;
}
