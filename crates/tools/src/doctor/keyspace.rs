//! Number of keys under each prefix, found with few calls.
//!
//! A Range with `limit` 1 returns the first key of a range and, like every Range, the number of keys in the range. So
//! one call per group of keys finds where the group starts, and the difference of two counts is its size. Such a call
//! costs etcd a walk through its index (some 70 ms for a million keys); it reads no value and involves no other
//! member. After each call the client pauses for four times the call's duration, and dividing stops when its time
//! budget is used up.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::members::{Member, PacedClient};
use super::model::{AuthFacts, KeyGroup, Keyspace, PrefixFacts, Report, SizeSample, is_group};
use super::size_estimate;
use etcd_store::cache::Entry;
use etcd_store::keyspace::scope;
use etcd_store::keyspace::{PrefixGroup, PrefixGrouper, common_prefix};
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_config::Config;
use rangecache_report::FindingId;
use rangecache_upstream::{Connection, compact_revision, header_request, is_compacted};

/// Groups into which one range is divided at most; a Kubernetes cluster has some 70 resources.
const MAX_GROUPS: usize = 128;
/// Number of groups from which on only groups with half of the keys are divided further.
const ENOUGH_GROUPS: usize = 8;
/// Most parts of a prefix.
const MAX_DEPTH: usize = 4;
/// A group with fewer keys is not divided.
const MIN_KEYS_TO_DIVIDE: u64 = 16;
/// Shortest time over which the rate of revisions is measured.
const RATE_WINDOW: Duration = Duration::from_secs(1);
/// Number of revisions from which on a store should have been compacted.
const LONG_HISTORY: i64 = 100_000;

/// Examines the scopes that may be read through `member`. `None` if there is none, or, with a finding, if `member` does not respond.
pub(super) async fn examine(
    config: &Config,
    deep: bool,
    member: &Member,
    auth: &AuthFacts,
    report: &mut Report,
) -> Option<Keyspace> {
    let connection = member.connection()?;
    let key = auth.readable_scopes().next()?.1.key();
    match read_keyspace(&mut PacedClient::new(connection), config, deep, auth, &key).await {
        Ok(keyspace) => {
            examine_compaction(connection, &key, keyspace.revision, report).await;
            Some(keyspace)
        }
        Err(error) => {
            let text = format!("{}: the keys cannot be counted: {error}", member.url);
            report.find(FindingId::KeysNotCounted, text);
            None
        }
    }
}

async fn read_keyspace(
    client: &mut PacedClient<'_>,
    config: &Config,
    deep: bool,
    auth: &AuthFacts,
    key: &Bytes,
) -> Result<Keyspace, String> {
    let (began, revision) = (Instant::now(), current_revision(client, key).await?);
    let mut groups = Vec::new();
    let mut count_took = Duration::ZERO;
    let mut useless_exclusions = Vec::new();
    // With permissions for some scopes only, keys that are not mirrored may not be readable.
    let others = if auth.readable.contains(&false) {
        Vec::new()
    } else {
        scope::gaps(&auth.scopes)
    };
    let mirrored = auth.readable_scopes().map(|(index, scope)| (scope, Some(index)));
    for (scope, mirror) in mirrored.chain(others.iter().map(|scope| (scope, None))) {
        let (start, end) = (scope.key(), scope.range_end());
        // A scope below the first part is no part of a group that begins above it.
        let common = common_prefix(&start, &end, MAX_DEPTH);
        let depth = common.iter().skip(1).filter(|byte| **byte == b'/').count().max(1);
        match divide(client, start.clone(), end, depth, revision).await {
            Ok(divided) => {
                count_took = count_took.max(divided.count_took);
                let is_useless = |out: &&String| divided.groups.is_empty() && start == out.as_bytes();
                useless_exclusions.extend(config.mirror.no_cache_prefix.iter().filter(is_useless).cloned());
                groups.extend(divided.with_mirror(mirror, &Bytes::new()));
            }
            // Not mirrored, and possibly not readable for this user.
            Err(_) if mirror.is_none() => {}
            Err(error) => return Err(error),
        }
    }
    subdivide(client, &mut groups, revision).await;
    groups.sort_by(|a, b| a.range.start.cmp(&b.range.start));
    if deep {
        size_estimate::read_all(client, &mut groups).await?;
    } else {
        size_estimate::read_samples(client, &mut groups, revision).await;
    }
    tokio::time::sleep_until(began + RATE_WINDOW).await;
    let later = current_revision(client, key).await?;
    #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
    let revisions_per_second = (later - revision) as f64 / began.elapsed().as_secs_f64();
    let prefixes: Vec<_> = groups.into_iter().map(KeyGroup::facts).collect();
    let sum = |of: fn(&SizeSample) -> u64| prefixes.iter().map(|prefix| of(&prefix.sizes)).sum();
    Ok(Keyspace {
        revision: later,
        keys: sum(|sizes| sizes.keys),
        bytes: sum(|sizes| sizes.encoded_bytes),
        is_exact: deep,
        revisions_per_second,
        count_took,
        useless_exclusions,
        resources: PrefixFacts::totals(&prefixes),
        prefixes,
        cost: client.cost,
    })
}

/// etcd's current revision, by a linearizable read of one key.
async fn current_revision(client: &mut PacedClient<'_>, key: &Bytes) -> Result<i64, String> {
    let header = client.range(header_request(key.clone())).await?.header;
    Ok(header.ok_or("the response has no header")?.revision)
}

/// A range divided into groups.
struct Divided {
    groups: Vec<PrefixGroup>,
    /// Time that etcd took to count all keys of the range.
    count_took: Duration,
    /// Whether no group is a remainder.
    is_complete: bool,
}

impl Divided {
    /// The groups as parts of the resource `parent`.
    fn with_mirror(self, mirror: Option<usize>, parent: &Bytes) -> impl Iterator<Item = KeyGroup> {
        let groups = self.groups.into_iter();
        groups.map(move |range| KeyGroup::new(range, mirror, parent))
    }
}

/// Divides `[start, end)` at `revision` by prefixes of `depth` parts.
async fn divide(
    client: &mut PacedClient<'_>,
    start: Bytes,
    end: Bytes,
    depth: usize,
    revision: i64,
) -> Result<Divided, String> {
    let mut grouper = PrefixGrouper::new(start, end.clone(), depth, MAX_GROUPS);
    let mut count_took = None;
    while let Some(cursor) = grouper.cursor().cloned() {
        let before = client.cost.took;
        let request = RangeRequest {
            key: cursor,
            range_end: end.clone(),
            limit: 1,
            revision,
            serializable: true,
            keys_only: true,
            ..RangeRequest::default()
        };
        let response = client.range(request).await?;
        count_took.get_or_insert(client.cost.took - before);
        let remaining = u64::try_from(response.count).unwrap_or(0);
        let first = match response.kvs.first() {
            Some(first) => Some(Entry::from_key_value(first).map_err(|error| error.to_string())?),
            None => None,
        };
        grouper.add(first.as_ref().map(Entry::key), remaining, client.has_time());
    }
    Ok(Divided {
        is_complete: grouper.is_complete(),
        groups: grouper.into_groups(),
        count_took: count_took.unwrap_or_default(),
    })
}

/// Divides groups that hold many of the keys further, one part of their prefixes at a time, until there are enough
/// groups; and groups of resources, so that each resource has a total.
async fn subdivide(client: &mut PacedClient<'_>, groups: &mut Vec<KeyGroup>, revision: i64) {
    let total: u64 = groups.iter().map(|group| group.range.keys).sum();
    for depth in 2..=MAX_DEPTH {
        let too_few = groups.len() < ENOUGH_GROUPS;
        let is_large = |group: &KeyGroup| {
            let keys = group.range.keys;
            keys >= MIN_KEYS_TO_DIVIDE
                && group.range.depth + 1 == depth
                && ((too_few && keys * 10 >= total)
                    || (depth == 2 && keys * 2 >= total)
                    || is_group(&group.range.prefix))
        };
        let (large, mut rest): (Vec<_>, Vec<_>) = groups.drain(..).partition(is_large);
        for group in large {
            rest.extend(parts(client, group, depth, revision).await);
        }
        *groups = rest;
    }
}

/// The parts of `group`, or `group` itself if that is more informative.
async fn parts(client: &mut PacedClient<'_>, group: KeyGroup, depth: usize, revision: i64) -> Vec<KeyGroup> {
    if !client.has_time() {
        return vec![group];
    }
    let (start, end) = (group.range.start.clone(), group.range.end.clone());
    let Ok(divided) = divide(client, start, end, depth, revision).await else {
        return vec![group];
    };
    // A few prefixes and a large remainder say less than the whole group.
    let remainder = divided.groups.last().map_or(0, |last| last.keys);
    if divided.groups.is_empty() || (!divided.is_complete && remainder * 2 > group.range.keys) {
        return vec![group];
    }
    divided.with_mirror(group.mirror, &group.resource).collect()
}

/// Adds a finding about the revisions that etcd keeps.
async fn examine_compaction(connection: &Arc<Connection>, key: &Bytes, revision: i64, report: &mut Report) {
    if !is_compacted(connection, key, 1).await {
        if revision > LONG_HISTORY {
            let text = format!("etcd was never compacted: it keeps all {revision} revisions");
            report.find(FindingId::NeverCompacted, text);
        }
    } else if let Some(compacted) = compact_revision(connection, key, 1).await {
        let ago = revision - compacted;
        let text = format!("etcd is compacted up to revision {compacted}, {ago} ago");
        report.find(FindingId::Compacted, text);
    }
}
