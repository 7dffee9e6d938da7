//! How many keys there are under which prefix, found with few calls.
//!
//! A Range with `limit` 1 tells the first key of a range and, as every Range does, how many keys the range has. So one call
//! for each group of keys finds where it begins, and the difference of two counts is its size. Such a call costs etcd a
//! walk through its index (some 70 ms for a million keys), no value is read, no other member is asked. After each call we
//! rest for four times as long as it took, and stop dividing when [`PATIENCE`] is over.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::CALL_TIMEOUT;
use super::members::Member;
use super::report::{Area, Report};
use super::weigh::{self, Weight};
use crate::cache::Entry;
use crate::config::Config;
use crate::etcdserverpb::kv_client::KvClient;
use crate::etcdserverpb::{RangeRequest, RangeResponse};
use crate::keyspace::scope::{self, Scope, scopes};
use crate::keyspace::{prefix_end, successor};
use crate::upstream::{Connection, compact_revision, is_compacted};

/// After this time nothing more is divided or weighed.
const PATIENCE: Duration = Duration::from_secs(20);
/// Groups that a range is divided into at most; a Kubernetes has some 70 resources.
const MAX_GROUPS: usize = 128;
/// With so many groups the picture is clear enough.
const ENOUGH_GROUPS: usize = 8;
/// Prefixes of up to so many parts.
const MAX_DEPTH: usize = 4;
/// Keys without a further slash that are groups by themselves, of one range.
const MAX_SINGLE: usize = 8;
/// A group with fewer keys is not divided.
const MIN_KEYS_TO_DIVIDE: u64 = 16;
/// The longest rest after a call.
const MAX_REST: Duration = Duration::from_secs(1);
/// How long the revision is watched for its rate, at least.
const RATE_WINDOW: Duration = Duration::from_secs(1);
/// A history of so many revisions should have been compacted.
const LONG_HISTORY: i64 = 100_000;

/// What etcd holds.
#[derive(Debug)]
pub(super) struct Keyspace {
    /// etcd's revision when it was looked at.
    pub(super) revision: i64,
    /// Keys, of all that may be read.
    pub(super) keys: u64,
    /// In key order.
    pub(super) groups: Vec<Group>,
    /// How many revisions etcd makes in a second.
    pub(super) revisions_per_second: f64,
    /// How long etcd took to walk its index through all keys of the largest range asked for.
    pub(super) count_took: Duration,
    /// Every key was weighed.
    pub(super) exact: bool,
    /// What it cost etcd.
    pub(super) cost: Cost,
}

/// Keys that are next to each other.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// Their prefix.
    pub(super) prefix: Bytes,
    pub(super) start: Bytes,
    /// As in a request: `\0` is the end of the keyspace.
    pub(super) end: Bytes,
    pub(super) keys: u64,
    /// Which scope mirrors them.
    pub(super) mirror: Option<usize>,
    pub(super) weight: Weight,
    depth: usize,
}

/// What our looking has cost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    pub(super) calls: u64,
    pub(super) took: Duration,
    pub(super) read_bytes: u64,
}

/// The calls of one look, paced and counted.
pub(super) struct Asker<'a> {
    connection: &'a Arc<Connection>,
    began: Instant,
    pub(super) cost: Cost,
}

impl Asker<'_> {
    /// One Range as rangecache's own user, followed by a rest.
    pub(super) async fn range(&mut self, request: RangeRequest) -> Result<RangeResponse, String> {
        let (channel, origin) = self.connection.own_channel();
        let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        let began = Instant::now();
        let answer = timeout(CALL_TIMEOUT, client.range(request)).await;
        let took = began.elapsed();
        self.cost.calls += 1;
        self.cost.took += took;
        let answer = match answer {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return Err(format!("{} ({:?})", status.message(), status.code())),
            Err(_) => return Err(format!("no answer within {CALL_TIMEOUT:?}")),
        };
        self.cost.read_bytes += answer.kvs.iter().map(|kv| kv.len() as u64).sum::<u64>();
        tokio::time::sleep((took * 4).min(MAX_REST)).await;
        Ok(answer)
    }

    pub(super) fn has_time(&self) -> bool {
        self.began.elapsed() < PATIENCE
    }
}

impl Group {
    /// Its prefix, as a person may read it on a terminal.
    pub(super) fn name(&self) -> String {
        if self.prefix.is_empty() {
            return "(all others)".to_owned();
        }
        String::from_utf8_lossy(&self.prefix).escape_debug().to_string()
    }
}

/// Looks at all that `member` lets us read; `None`, and a finding, if it does not answer.
pub(super) async fn look(
    config: &Config,
    deep: bool,
    member: &Member,
    readable: &[bool],
    report: &mut Report,
) -> Option<Keyspace> {
    let connection = member.connection()?;
    let mut asker = Asker {
        connection,
        began: Instant::now(),
        cost: Cost::default(),
    };
    match look_with(&mut asker, config, deep, readable).await {
        Ok(keyspace) => {
            history(connection, config, readable, keyspace.revision, report).await;
            Some(keyspace)
        }
        Err(error) => {
            report.bad(
                Area::Keyspace,
                format!("{}: the keys cannot be counted: {error}", member.url),
                "look at etcd first; rangecache's own load would meet the same",
            );
            None
        }
    }
}

async fn look_with(
    asker: &mut Asker<'_>,
    config: &Config,
    deep: bool,
    readable: &[bool],
) -> Result<Keyspace, String> {
    let mirrors = scopes(&config.mirror.cache_prefix, &config.mirror.no_cache_prefix);
    let first_key = first_readable(&mirrors, readable).key();
    let (began, revision) = (Instant::now(), current(asker, &first_key).await?);
    let mut groups = Vec::new();
    let mut count_took = Duration::ZERO;
    // With some rights only, what is not mirrored need not be readable.
    let others = if readable.iter().all(|readable| *readable) {
        scope::gaps(&mirrors)
    } else {
        Vec::new()
    };
    let mirrored = mirrors
        .iter()
        .enumerate()
        .filter(|(index, _)| readable[*index])
        .map(|(index, scope)| (scope, Some(index)));
    for (scope, mirror) in mirrored.chain(others.iter().map(|scope| (scope, None))) {
        let found = match divide(asker, &scope.key(), &scope.range_end(), 1, revision).await {
            Ok(found) => {
                count_took = count_took.max(found.count_took);
                found.groups
            }
            // Not mirrored, and perhaps not to be read by our user.
            Err(_) if mirror.is_none() => continue,
            Err(error) => return Err(error),
        };
        groups.extend(found.into_iter().map(|group| Group { mirror, ..group }));
    }
    subdivide(asker, &mut groups, revision).await;
    groups.sort_by(|a, b| a.start.cmp(&b.start));
    if deep {
        weigh::all(asker, &mut groups).await?;
    } else {
        weigh::samples(asker, &mut groups, revision).await;
    }
    tokio::time::sleep_until(began + RATE_WINDOW).await;
    let later = current(asker, &first_key).await?;
    #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
    let revisions_per_second = (later - revision) as f64 / began.elapsed().as_secs_f64();
    Ok(Keyspace {
        revision: later,
        keys: groups.iter().map(|group| group.keys).sum(),
        groups,
        revisions_per_second,
        count_took,
        exact: deep,
        cost: asker.cost,
    })
}

fn first_readable<'a>(mirrors: &'a [Scope], readable: &[bool]) -> &'a Scope {
    let index = readable.iter().position(|readable| *readable).unwrap_or(0);
    &mirrors[index]
}

/// etcd's revision now, by a linearizable read of one key.
async fn current(asker: &mut Asker<'_>, key: &Bytes) -> Result<i64, String> {
    let request = RangeRequest {
        key: key.clone(),
        limit: 1,
        keys_only: true,
        ..RangeRequest::default()
    };
    let header = asker.range(request).await?.header;
    Ok(header.ok_or("the answer has no header")?.revision)
}

/// A range in groups.
struct Divided {
    groups: Vec<Group>,
    /// How long etcd took to count them all.
    count_took: Duration,
    /// Every group has a prefix of its own of the depth that was asked for.
    is_whole: bool,
}

/// Divides `[start, end)` into groups by prefixes of `depth` parts; the last one is what was left when there were too many.
async fn divide(
    asker: &mut Asker<'_>,
    start: &Bytes,
    end: &Bytes,
    depth: usize,
    revision: i64,
) -> Result<Divided, String> {
    let mut groups: Vec<Group> = Vec::new();
    let mut cursor = start.clone();
    let mut is_whole = true;
    let mut singles = 0;
    let mut count_took = Duration::ZERO;
    loop {
        let before = asker.cost.took;
        let answer = asker
            .range(RangeRequest {
                key: cursor.clone(),
                range_end: end.clone(),
                limit: 1,
                revision,
                serializable: true,
                keys_only: true,
                ..RangeRequest::default()
            })
            .await?;
        if groups.is_empty() {
            count_took = asker.cost.took - before;
        }
        let left = u64::try_from(answer.count).unwrap_or(0);
        if let Some(last) = groups.last_mut() {
            last.keys -= left.min(last.keys);
        }
        let Some(first) = answer.kvs.first() else {
            break;
        };
        let key = Entry::from_key_value(first).map_err(|error| error.to_string())?;
        let fits = groups.len() + 1 < MAX_GROUPS && asker.has_time();
        let (prefix, next) = match prefix_of(key.key(), depth) {
            _ if !fits => (&b""[..], None),
            Some(prefix) => (prefix, prefix_end(prefix)),
            None if singles < MAX_SINGLE => {
                singles += 1;
                (key.key(), Some(successor(key.key())))
            }
            None => (&b""[..], None),
        };
        let next = next.filter(|next| is_below(next, end));
        is_whole &= !prefix.is_empty();
        groups.push(Group {
            prefix: Bytes::copy_from_slice(prefix),
            start: cursor,
            end: next.clone().unwrap_or_else(|| end.clone()),
            keys: left,
            mirror: None,
            weight: Weight::default(),
            depth,
        });
        match next {
            Some(next) => cursor = next,
            None => break,
        }
    }
    Ok(Divided {
        groups,
        count_took,
        is_whole,
    })
}

fn is_below(key: &Bytes, end: &Bytes) -> bool {
    end.as_ref() == b"\0" || key < end
}

/// Divides what holds many of the keys further, one part of their prefixes after the other, until the picture is clear.
async fn subdivide(asker: &mut Asker<'_>, groups: &mut Vec<Group>, revision: i64) {
    let total: u64 = groups.iter().map(|group| group.keys).sum();
    for depth in 2..=MAX_DEPTH {
        let is_unclear = groups.len() < ENOUGH_GROUPS;
        let is_large = |group: &Group| {
            group.keys >= MIN_KEYS_TO_DIVIDE
                && group.depth + 1 == depth
                && ((is_unclear && group.keys * 10 >= total) || (depth == 2 && group.keys * 2 >= total))
        };
        let (large, mut rest): (Vec<_>, Vec<_>) = groups.drain(..).partition(is_large);
        for group in large {
            rest.extend(parts(asker, group, depth, revision).await);
        }
        *groups = rest;
    }
}

/// The parts of `group`, or itself where that tells more.
async fn parts(asker: &mut Asker<'_>, group: Group, depth: usize, revision: i64) -> Vec<Group> {
    if !asker.has_time() {
        return vec![group];
    }
    let Ok(divided) = divide(asker, &group.start, &group.end, depth, revision).await else {
        return vec![group];
    };
    // A few prefixes and a large rest tell less than the whole.
    let rest = divided.groups.last().map_or(0, |last| last.keys);
    if divided.groups.is_empty() || (!divided.is_whole && rest * 2 > group.keys) {
        return vec![group];
    }
    let mirror = group.mirror;
    divided
        .groups
        .into_iter()
        .map(|part| Group { mirror, ..part })
        .collect()
}

/// The first `depth` parts of `key`, with the slash that ends them; `None` if it has no more parts than that. A key without
/// a slash belongs to those that begin alike.
fn prefix_of(key: &[u8], depth: usize) -> Option<&[u8]> {
    let lead = usize::from(key.first() == Some(&b'/'));
    let slashes = key
        .iter()
        .enumerate()
        .skip(lead)
        .filter(|(_, byte)| **byte == b'/');
    match slashes.map(|(at, _)| at).nth(depth - 1) {
        Some(at) => Some(&key[..=at]),
        None if depth == 1 => key.get(..=lead).or(Some(key)),
        None => None,
    }
}

/// What etcd keeps of the past.
async fn history(
    connection: &Arc<Connection>,
    config: &Config,
    readable: &[bool],
    revision: i64,
    report: &mut Report,
) {
    let mirrors = scopes(&config.mirror.cache_prefix, &config.mirror.no_cache_prefix);
    let key = first_readable(&mirrors, readable).key();
    if !is_compacted(connection, &key, 1).await {
        if revision > LONG_HISTORY {
            report.warn(
                Area::Keyspace,
                format!("etcd was never compacted: it keeps all {revision} revisions"),
                "set etcd's --auto-compaction-retention; its database grows without end",
            );
        }
        return;
    }
    if let Some(compacted) = compact_revision(connection, &key, 1).await {
        report.good(
            Area::Keyspace,
            format!(
                "etcd has compacted up to revision {compacted}, {} ago",
                revision - compacted
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_end_with_a_slash_where_there_is_one() {
        for (key, depth, prefix) in [
            ("/registry/pods/a/b", 1, Some("/registry/")),
            ("/registry/pods/a/b", 2, Some("/registry/pods/")),
            ("/registry/pods", 2, None),
            ("cilium/state/x", 1, Some("cilium/")),
            ("/health", 1, Some("/h")),
            ("lonely", 1, Some("l")),
            ("/", 1, Some("/")),
            ("//x", 1, Some("//")),
            ("a", 2, None),
        ] {
            let found = prefix_of(key.as_bytes(), depth);
            assert_eq!(found, prefix.map(str::as_bytes), "{key} {depth}");
        }
    }
}
