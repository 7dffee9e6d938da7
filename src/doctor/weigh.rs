//! What keys weigh: encoded, as etcd sends them, and in the cache.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::keyspace::{Asker, Group};
use crate::cache::Entry;
use crate::etcdserverpb::{RangeRequest, RangeResponse};
use crate::keyspace::successor;

/// Keys that one sample reads.
const SAMPLE_KEYS: i64 = 8;
/// Where samples begin, behind a group's prefix; the first one begins with the group.
const SAMPLE_PLACES: &[u8] = b"4amt";
/// The largest groups, which are weighed each by itself; the others by the mean.
const MAX_WEIGHED: usize = 24;
/// What the tree takes for an entry beside the entry itself.
const NODE_BYTES: u64 = 22;
/// What a page should hold when every key is weighed.
const PAGE_BYTES: u64 = 4 << 20;
/// How fast every key is read then.
const DEEP_BYTES_PER_SECOND: f64 = 33_554_432.0;

/// What was weighed of a group, or all of it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Weight {
    /// Keys weighed.
    pub(super) keys: u64,
    /// As etcd sends them.
    encoded_bytes: u64,
    /// In the cache.
    memory_bytes: u64,
    /// The largest of them, encoded.
    pub(super) largest_bytes: u64,
}

impl Weight {
    fn add(&mut self, entry: &Entry) {
        let encoded = entry.encoded_len() as u64;
        self.keys += 1;
        self.encoded_bytes += encoded;
        self.memory_bytes += entry.memory_bytes() + NODE_BYTES;
        self.largest_bytes = self.largest_bytes.max(encoded);
    }

    fn join(self, other: Weight) -> Weight {
        Weight {
            keys: self.keys + other.keys,
            encoded_bytes: self.encoded_bytes + other.encoded_bytes,
            memory_bytes: self.memory_bytes + other.memory_bytes,
            largest_bytes: self.largest_bytes.max(other.largest_bytes),
        }
    }

    /// What `keys` such keys weigh, encoded.
    pub(super) fn encoded_of(&self, keys: u64) -> u64 {
        scaled(self.encoded_bytes, keys, self.keys)
    }

    /// What `keys` such keys take in the cache.
    pub(super) fn memory_of(&self, keys: u64) -> u64 {
        scaled(self.memory_bytes, keys, self.keys)
    }
}

fn scaled(bytes: u64, keys: u64, of_keys: u64) -> u64 {
    let scaled = u128::from(bytes) * u128::from(keys) / u128::from(of_keys.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// Weighs a few keys of each of the largest groups; what was not weighed gets the mean of the others.
pub(super) async fn samples(asker: &mut Asker<'_>, groups: &mut [Group], revision: i64) {
    let mut by_size: Vec<&mut Group> = groups.iter_mut().collect();
    by_size.sort_by_key(|group| std::cmp::Reverse(group.keys));
    for group in by_size.into_iter().take(MAX_WEIGHED) {
        // What cannot be read now is guessed like the rest.
        if !asker.has_time() || sample(asker, group, revision).await.is_err() {
            break;
        }
    }
    let all = groups
        .iter()
        .fold(Weight::default(), |sum, group| sum.join(group.weight));
    for group in groups.iter_mut().filter(|group| group.weight.keys == 0) {
        group.weight = Weight {
            keys: all.keys,
            largest_bytes: 0,
            ..all
        };
    }
}

async fn sample(asker: &mut Asker<'_>, group: &mut Group, revision: i64) -> Result<(), String> {
    let mut last = Bytes::new();
    let first = read(asker, group.start.clone(), &group.end, revision).await?;
    let common = take(group, &first, &mut last)?;
    let mut places = places(&group.prefix);
    // Where all names have more in common than the group's prefix, that is where they differ.
    if let Some(common) = common.filter(|common| common.len() > group.prefix.len()) {
        places.extend(self::places(&common));
    }
    places.sort();
    for place in places {
        if place <= last || !asker.has_time() || group.weight.keys >= group.keys {
            continue;
        }
        if group.end.as_ref() != b"\0" && place >= group.end {
            break;
        }
        let answer = read(asker, place, &group.end, revision).await?;
        take(group, &answer, &mut last)?;
    }
    Ok(())
}

fn places(prefix: &[u8]) -> Vec<Bytes> {
    let place = |byte: &u8| Bytes::from([prefix, &[*byte]].concat());
    SAMPLE_PLACES.iter().map(place).collect()
}

async fn read(
    asker: &mut Asker<'_>,
    key: Bytes,
    end: &Bytes,
    revision: i64,
) -> Result<RangeResponse, String> {
    let request = RangeRequest {
        key,
        range_end: end.clone(),
        limit: SAMPLE_KEYS,
        revision,
        serializable: true,
        ..RangeRequest::default()
    };
    asker.range(request).await
}

/// Weighs what came, `last` being the last key that was weighed; returns what the keys begin with, all of them.
fn take(group: &mut Group, answer: &RangeResponse, last: &mut Bytes) -> Result<Option<Bytes>, String> {
    let mut first = None;
    for key_value in &answer.kvs {
        let entry = Entry::from_key_value(key_value).map_err(|error| error.to_string())?;
        let key = Bytes::copy_from_slice(entry.key());
        if key > *last {
            group.weight.add(&entry);
            *last = key.clone();
        }
        first.get_or_insert(key);
    }
    Ok(first.map(|first| {
        let alike = first.iter().zip(last.iter()).take_while(|(a, b)| a == b).count();
        first.slice(..alike)
    }))
}

/// Weighs every key, page by page; where a group ends by now, and how many keys it has, is taken as it is found.
pub(super) async fn all(asker: &mut Asker<'_>, groups: &mut [Group]) -> Result<(), String> {
    let (began, mut bytes) = (Instant::now(), 0_u64);
    for group in groups {
        let mut key = group.start.clone();
        loop {
            let mean = group.weight.encoded_of(1).max(1);
            let limit = match group.weight.keys {
                0 => SAMPLE_KEYS,
                _ => i64::try_from(PAGE_BYTES / mean).unwrap_or(1).clamp(1, 10_000),
            };
            let answer = asker
                .range(RangeRequest {
                    key: key.clone(),
                    range_end: group.end.clone(),
                    limit,
                    serializable: true,
                    ..RangeRequest::default()
                })
                .await?;
            for key_value in &answer.kvs {
                let entry = Entry::from_key_value(key_value).map_err(|error| error.to_string())?;
                group.weight.add(&entry);
                bytes += entry.encoded_len() as u64;
                key = successor(entry.key());
            }
            #[allow(clippy::cast_precision_loss, reason = "fewer than 2^53 bytes")]
            let due = Duration::from_secs_f64(bytes as f64 / DEEP_BYTES_PER_SECOND);
            tokio::time::sleep_until(began + due).await;
            if !answer.more || answer.kvs.is_empty() {
                break;
            }
        }
        group.keys = group.weight.keys;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Tree;

    /// A KeyValue in etcd's encoding.
    fn entry(key: &str, value_bytes: usize) -> Entry {
        let mut bytes = vec![0x0a, u8::try_from(key.len()).unwrap()];
        bytes.extend_from_slice(key.as_bytes());
        // Revisions of three bytes each, and a version.
        bytes.extend([0x10, 0xff, 0xff, 0x03, 0x18, 0xff, 0xff, 0x03, 0x20, 1]);
        if value_bytes > 0 {
            bytes.push(0x2a);
            prost::encode_length_delimiter(value_bytes, &mut bytes).unwrap();
            bytes.resize(bytes.len() + value_bytes, b'v');
        }
        Entry::from_key_value(&bytes).unwrap()
    }

    /// What is said beforehand is what the cache counts.
    #[test]
    fn the_weight_is_the_trees() {
        for value_bytes in [0, 100, 1024, 10_240] {
            let entries: Vec<Entry> = (0..20_000)
                .map(|n| entry(&format!("/registry/pods/default/pod-{n:06}"), value_bytes))
                .collect();
            let mut weight = Weight::default();
            entries.iter().step_by(100).for_each(|entry| weight.add(entry));
            let tree = Tree::from_sorted(entries);
            let (said, is) = (weight.memory_of(20_000), tree.memory_bytes());
            assert!(said.abs_diff(is) * 50 < is, "{value_bytes}: {said} for {is}");
            assert_eq!(weight.encoded_of(20_000), tree.summary().encoded_bytes);
        }
    }
}
