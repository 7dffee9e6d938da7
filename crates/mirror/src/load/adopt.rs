//! Adoption: a tree from before is brought to etcd's state by what differs, instead of by a load of everything.
//!
//! etcd's keys are read without their values and compared with the tree's ([`difference`](super::difference)); what is new or
//! changed is read at the same revision. What is not verified is compared with its values: two etcds that continue copies of one
//! data folder have one cluster id, and nothing else shows which of them a neighbour had its keys from. Otherwise that is right
//! only if the tree is of etcd's history, which is proven by the newest entries that seem unchanged: after a rollback an entry may
//! be equal in all but its value, because both histories wrote it at the same revision. No entry that both histories share from before is newer than that one, so it is among the newest.
//! The cluster and the raft log were compared before, as for every load.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use etcd_store::cache::{Entry, StoredEntry, Tree};
use etcd_store::keyspace::successor;
use etcd_wire::etcdserverpb::{RangeRequest, kv_client::KvClient};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use rangecache_base::net::Url;
use rangecache_upstream::{Channel, Connection, header_request, is_future_revision, page_limit, range};

use super::begin::{Load, LoadError, MAX_RESUMES, PAGE_TARGET_BYTES, RESUME_PAUSE};
use super::difference::{Difference, Span};
use super::gather::run;
use super::have::{Adopted, Have, Loaded};
use super::read::{LoadReader, page};
use crate::lineage::{Anchor, Fingerprint, Position};

/// Reads of changed and of compared values that are in flight at once.
const IN_FLIGHT: usize = 8;
/// Entries that are put into the tree at once.
const APPLIED_AT_ONCE: usize = 1_000;

/// Fails unless a feed may continue `have` as it is: etcd's position is of its history, and etcd has the events since. The feed that
/// continues it proves the rest.
///
/// # Errors
/// [`LoadError::Foreign`] if etcd's history is another one; others, also if etcd has compacted the revision.
pub(super) async fn is_continued(load: &Load<'_>, have: &Have) -> Result<(), LoadError> {
    let (connection, ..) = load.begin(None).await?;
    let key = load.mirror.scope.key();
    if let Some(before) = have.lineage.map(|lineage| lineage.before()) {
        let position = Position::read(&connection, key.clone(), &before).await?;
        if !position.continues(&before) {
            return Err(LoadError::Foreign);
        }
    }
    let request = RangeRequest {
        revision: have.anchor.revision,
        ..header_request(key)
    };
    match range(&connection, request).await {
        Ok(_) => Ok(()),
        Err(status) if is_future_revision(&status) => Err(LoadError::Foreign),
        Err(status) => Err(status.into()),
    }
}

/// Brings what the mirror has to etcd's present state. Begins again when a connection breaks or etcd compacts the revision
/// meanwhile.
///
/// # Errors
/// [`LoadError::HistoryReplaced`] if the mirror's own history is another one: every mirror is dropped then.
/// [`LoadError::Foreign`] if that of another process is. [`LoadError::TooDifferent`] if a load costs little more,
/// or what differs does not fit beside it.
pub(super) async fn adopt(load: &Load<'_>, have: &Have) -> Result<Loaded, LoadError> {
    let mut broken: Option<Url> = None;
    let mut attempts = 0;
    loop {
        let error = match adopt_once(load, have, &mut broken).await {
            Ok(loaded) => return Ok(loaded),
            Err(error) => error,
        };
        attempts += 1;
        if !(error.is_broken() || error.is_compaction()) || attempts > MAX_RESUMES {
            return Err(error);
        }
        tracing::info!(mirror = load.mirror.name, %error, "reading of what has changed was interrupted; it begins again");
        tokio::time::sleep(RESUME_PAUSE).await;
    }
}

/// Attempts it once, if possible not at the endpoint `broken`, which becomes that of this attempt.
async fn adopt_once(load: &Load<'_>, have: &Have, broken: &mut Option<Url>) -> Result<Loaded, LoadError> {
    let (connection, before, pinned) = load.begin(broken.as_ref()).await?;
    *broken = Some(connection.url().clone());
    let tree = &have.anchor.tree;
    let another_history = || match have.lineage {
        None => load.another_history(&before, pinned.revision),
        Some(_) => LoadError::Foreign,
    };
    let is_same_cluster = |lineage: Fingerprint| lineage.cluster_id == pinned.cluster_id;
    if !have.lineage.is_none_or(is_same_cluster) {
        return Err(another_history());
    }
    let held_bytes = AtomicU64::new(tree.memory_bytes());
    load.mirror.record_loading(tree.memory_bytes());
    let reader = LoadReader::new(load, pinned);
    let mut difference = Difference::new(tree.clone(), !have.verified);
    reader.read(&connection, have.verified, &mut difference).await?;
    let compared = difference.finish()?;
    if !are_held(&reader, &connection, compared.newest).await? {
        return Err(another_history());
    }
    let client = reader.client(&connection);
    let reads = stream::iter(compared.spans).map(|span| {
        let (reader, client, held_bytes) = (&reader, client.clone(), &held_bytes);
        async move { read_span(reader, client, span, tree.mean_encoded_bytes(), held_bytes).await }
    });
    let entries: Vec<Vec<Entry>> = reads.buffered(IN_FLIGHT).try_collect().await?;
    let changes = compared.removed.len() + entries.iter().map(Vec::len).sum::<usize>();
    let (tree, removed) = (tree.clone(), compared.removed);
    let applying = run(changes <= APPLIED_AT_ONCE, move || apply(tree, &removed, entries));
    let Some((tree, (keys, bytes))) = applying.await? else {
        return Err(another_history());
    };
    Ok(Loaded {
        anchor: Anchor::loaded(tree, pinned.revision),
        connection: Some(connection),
        adopted: Some(Adopted {
            source: have.from,
            keys,
            bytes,
        }),
    })
}

/// Whether etcd has `entries` at the revision of the load, with their values.
async fn are_held(
    reader: &LoadReader<'_>,
    connection: &Arc<Connection>,
    entries: Vec<StoredEntry>,
) -> Result<bool, LoadError> {
    let reads = stream::iter(entries).map(|ours| async move {
        let theirs = range(connection, at(reader, ours.key())).await?;
        Ok(theirs.kvs.first().is_some_and(|theirs| ours.is_message(theirs)))
    });
    reads
        .buffer_unordered(IN_FLIGHT)
        .try_all(std::future::ready)
        .await
}

/// A read of one key at the revision of the load.
fn at(reader: &LoadReader<'_>, key: &[u8]) -> RangeRequest {
    RangeRequest {
        key: Bytes::copy_from_slice(key),
        revision: reader.pinned.revision,
        ..RangeRequest::default()
    }
}

/// The entries of a span, in pages of keys that take `mean_bytes` each. Adds their memory to `held_bytes`.
///
/// # Errors
/// [`LoadError::TooDifferent`] once that is more than the mirror may have: a load of everything packs, and leaves values out.
async fn read_span(
    reader: &LoadReader<'_>,
    mut client: KvClient<Channel>,
    span: Span,
    mean_bytes: u64,
    held_bytes: &AtomicU64,
) -> Result<Vec<Entry>, LoadError> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut request = RangeRequest {
        range_end: successor(&span.last),
        limit: page_limit(PAGE_TARGET_BYTES, mean_bytes),
        ..at(reader, &span.first)
    };
    loop {
        let response = page(&mut client, request.clone()).await?;
        reader.record(&response.kvs);
        for key_value in &response.kvs {
            let entry = Entry::from_key_value(key_value)?;
            held_bytes.fetch_add(entry.memory_bytes(), Ordering::Relaxed);
            entries.push(entry);
        }
        let (load, held_bytes) = (reader.load, held_bytes.load(Ordering::Relaxed));
        load.mirror.record_loading(held_bytes);
        if held_bytes > load.set.budget_of(load.mirror) {
            return Err(LoadError::TooDifferent);
        }
        match entries.last() {
            Some(last) if response.more => request.key = successor(last.key()),
            Some(last) if entries.len() as u64 == span.keys && last.key() == &*span.last => {
                return Ok(entries);
            }
            _ => return Err(LoadError::Inconsistent),
        }
    }
}

/// `tree` without the keys `removed` and with `entries`, and how many keys and bytes of it are kept; `None` if it has an entry
/// with another value.
fn apply(mut tree: Tree, removed: &[Bytes], entries: Vec<Vec<Entry>>) -> Option<(Tree, (u64, u64))> {
    for key in removed {
        tree.remove(key);
    }
    if tree.contradicts(entries.iter().flatten()) {
        return None;
    }
    let (mut read_keys, mut read_bytes) = (0, 0);
    for entry in entries.into_iter().flatten() {
        // Unchanged ones lie between those that were changed.
        if tree
            .get(entry.key())
            .is_some_and(|ours| ours.is_as_old_as(&entry))
        {
            continue;
        }
        read_keys += 1;
        read_bytes += entry.encoded_len() as u64;
        tree.insert(entry);
    }
    let kept = (tree.len() - read_keys, tree.summary().encoded_bytes - read_bytes);
    tree.reset_totals();
    Some((tree, kept))
}

#[cfg(test)]
mod tests;
