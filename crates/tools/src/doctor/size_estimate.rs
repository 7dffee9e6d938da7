//! Sizes of keys in etcd's encoding and in the cache, from samples or from all keys.

use bytes::Bytes;
use tokio::time::Instant;

use super::members::PacedClient;
use super::model::{KeyGroup, SizeSample};
use etcd_store::cache::{Entry, Packing, Tree};
use etcd_store::keyspace::successor;
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse};
use rangecache_upstream::{pace, page_limit};

/// Keys that one sample reads.
const SAMPLE_KEYS: i64 = 8;
/// Characters after a group's prefix at which samples start, in addition to the one at the start of the group.
const SAMPLE_POSITIONS: &[u8] = b"4amt";
/// Number of groups, the largest first, that are sampled; the others get the mean.
const MAX_SAMPLED: usize = 24;
/// Bytes that the tree needs for an entry in addition to the entry itself.
const NODE_BYTES: u64 = 30;
/// Target size of a page when every key is read.
const PAGE_BYTES: u64 = 4 << 20;
/// Rate at which every key is read: 32 MiB/s.
const DEEP_BYTES_PER_SECOND: f64 = 33_554_432.0;

impl SizeSample {
    fn add(&mut self, entry: &Entry) {
        let encoded = entry.encoded_len() as u64;
        self.keys += 1;
        self.encoded_bytes += encoded;
        self.memory_bytes += entry.loaded_bytes() + NODE_BYTES;
        self.largest_bytes = self.largest_bytes.max(encoded);
    }

    /// Adds what `entries`, which follow one another, take when they are packed. Of few keys that is rather too much.
    fn add_packed(&mut self, entries: Vec<Entry>) {
        let nodes = entries.len() as u64 * NODE_BYTES;
        let tree = Tree::load(entries, Packing::Always);
        self.packed_bytes += tree.memory().entries + nodes;
    }
}

/// Reads a few keys of each of the largest groups; groups without a sample get the mean of their resource, otherwise of
/// all.
pub(super) async fn read_samples(client: &mut PacedClient<'_>, groups: &mut [KeyGroup], revision: i64) {
    let mut by_size: Vec<&mut KeyGroup> = groups.iter_mut().collect();
    by_size.sort_by_key(|group| std::cmp::Reverse(group.range.keys));
    for group in by_size.into_iter().take(MAX_SAMPLED) {
        // Groups that cannot be read now get the mean, too.
        if !client.has_time() || sample(client, group, revision).await.is_err() {
            break;
        }
    }
    let mean_of = |groups: &[KeyGroup], is_wanted: &dyn Fn(&KeyGroup) -> bool| {
        let samples = groups
            .iter()
            .filter(|group| is_wanted(group))
            .map(|group| group.sample);
        let sum = samples.fold(SizeSample::default(), SizeSample::join);
        SizeSample {
            largest_bytes: 0,
            ..sum
        }
    };
    let all = mean_of(groups, &|_| true);
    let means: Vec<SizeSample> = groups
        .iter()
        .map(|of| mean_of(groups, &|group| group.resource == of.resource))
        .collect();
    for (group, mean) in groups.iter_mut().zip(means) {
        if group.sample.keys == 0 {
            group.sample = if mean.keys > 0 { mean } else { all };
        }
    }
}

async fn sample(client: &mut PacedClient<'_>, group: &mut KeyGroup, revision: i64) -> Result<(), String> {
    let mut last = Bytes::new();
    let first = read(client, group.range.start.clone(), &group.range.end, revision).await?;
    let common = add_sample(group, &first, &mut last)?;
    let mut positions = positions(&group.range.prefix);
    // If all names share more than the group's prefix, they differ only after that.
    if let Some(common) = common.filter(|common| common.len() > group.range.prefix.len()) {
        positions.extend(self::positions(&common));
    }
    positions.sort();
    for position in positions {
        if position <= last || !client.has_time() || group.sample.keys >= group.range.keys {
            continue;
        }
        if group.range.end.as_ref() != b"\0" && position >= group.range.end {
            break;
        }
        let response = read(client, position, &group.range.end, revision).await?;
        add_sample(group, &response, &mut last)?;
    }
    Ok(())
}

fn positions(prefix: &[u8]) -> Vec<Bytes> {
    let position = |byte: &u8| Bytes::from([prefix, &[*byte]].concat());
    SAMPLE_POSITIONS.iter().map(position).collect()
}

async fn read(
    client: &mut PacedClient<'_>,
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
    client.range(request).await
}

/// Adds the keys of `response` after `last`, the last key that was added; returns the prefix that all of them share.
fn add_sample(
    group: &mut KeyGroup,
    response: &RangeResponse,
    last: &mut Bytes,
) -> Result<Option<Bytes>, String> {
    let (mut first, mut added) = (None, Vec::new());
    for key_value in &response.kvs {
        let entry = Entry::from_key_value(key_value).map_err(|error| error.to_string())?;
        let key = Bytes::copy_from_slice(entry.key());
        if key > *last {
            group.sample.add(&entry);
            added.push(entry);
            *last = key.clone();
        }
        first.get_or_insert(key);
    }
    group.sample.add_packed(added);
    Ok(first.map(|first| {
        let shared = first.iter().zip(last.iter()).take_while(|(a, b)| a == b).count();
        first.slice(..shared)
    }))
}

/// Reads every key, page by page. Sets the number of keys of each group to the number that was read.
pub(super) async fn read_all(client: &mut PacedClient<'_>, groups: &mut [KeyGroup]) -> Result<(), String> {
    let (began, mut bytes) = (Instant::now(), 0_u64);
    for group in groups {
        let mut key = group.range.start.clone();
        loop {
            let mean = group.sample.scaled(1).encoded_bytes;
            let limit = match group.sample.keys {
                0 => SAMPLE_KEYS,
                _ => page_limit(PAGE_BYTES, mean),
            };
            let response = client
                .range(RangeRequest {
                    key: key.clone(),
                    range_end: group.range.end.clone(),
                    limit,
                    serializable: true,
                    ..RangeRequest::default()
                })
                .await?;
            let mut page = Vec::with_capacity(response.kvs.len());
            for key_value in &response.kvs {
                let entry = Entry::from_key_value(key_value).map_err(|error| error.to_string())?;
                group.sample.add(&entry);
                bytes += entry.encoded_len() as u64;
                key = successor(entry.key());
                page.push(entry);
            }
            group.sample.add_packed(page);
            pace(began, bytes, DEEP_BYTES_PER_SECOND).await;
            if !response.more || response.kvs.is_empty() {
                break;
            }
        }
        group.range.keys = group.sample.keys;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn estimate_from_samples_is_within_two_percent_of_the_tree() {
        for value_bytes in [0, 100, 1024, 10_240] {
            let entries: Vec<Entry> = (0..20_000)
                .map(|n| entry(&format!("/registry/pods/default/pod-{n:06}"), value_bytes))
                .collect();
            let mut sample = SizeSample::default();
            entries.iter().step_by(100).for_each(|entry| sample.add(entry));
            let tree = Tree::from_sorted(entries);
            let (estimated, actual) = (sample.scaled(20_000).memory_bytes, tree.memory_bytes());
            assert!(
                estimated.abs_diff(actual) * 50 < actual,
                "{value_bytes}: {estimated} for {actual}"
            );
            assert_eq!(sample.scaled(20_000).encoded_bytes, tree.summary().encoded_bytes);
        }
    }

    #[test]
    fn estimate_of_what_is_packed_is_no_less_than_it_takes_and_not_twice_as_much() {
        for value_bytes in [100, 1024, 10_240] {
            let entries: Vec<Entry> = (0..20_000)
                .map(|n| entry(&format!("/registry/pods/default/pod-{n:06}"), value_bytes))
                .collect();
            let mut sample = SizeSample::default();
            for eight in entries.chunks(8).step_by(100) {
                eight.iter().for_each(|entry| sample.add(entry));
                sample.add_packed(eight.to_vec());
            }
            let tree = Tree::load(entries, Packing::Always);
            let (estimated, actual) = (sample.scaled(20_000).packed_bytes, tree.memory_bytes());
            assert!(
                estimated * 11 / 10 >= actual && estimated < 2 * actual,
                "{value_bytes}: {estimated} for {actual}"
            );
        }
    }
}
