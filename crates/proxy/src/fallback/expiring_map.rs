//! Map whose entries expire, with an upper bound on their bytes. Entries can only be inserted and removed, not
//! borrowed. One of them has the requests whose responses did not fit the bytes for complete responses ([`TooLarge`]).

use std::collections::{BTreeMap, HashMap};
use std::{hash::Hash, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Entries by key. All have the same time to live: the oldest entry expires first, and is evicted first when bytes run
/// out.
#[derive(Debug)]
pub(super) struct ExpiringMap<K, V> {
    ttl: Duration,
    max_bytes: u64,
    state: Mutex<MapState<K, V>>,
}

#[derive(Debug)]
struct MapState<K, V> {
    by_key: HashMap<K, MapEntry<V>>,
    /// Keys by the age number of their entries, oldest first. Has the same keys as `by_key`.
    by_age: BTreeMap<u64, K>,
    /// Age number of the next entry; increases.
    next_number: u64,
    /// Sum of the entries' bytes.
    bytes: u64,
}

#[derive(Debug)]
struct MapEntry<V> {
    value: V,
    age_number: u64,
    bytes: u64,
    expires: Instant,
}

impl<K: Clone + Eq + Hash, V> ExpiringMap<K, V> {
    /// Creates a map whose entries expire after `ttl` and have at most `max_bytes` together.
    pub(super) fn new(ttl: Duration, max_bytes: u64) -> ExpiringMap<K, V> {
        ExpiringMap {
            ttl,
            max_bytes,
            state: Mutex::new(MapState {
                by_key: HashMap::new(),
                by_age: BTreeMap::new(),
                next_number: 0,
                bytes: 0,
            }),
        }
    }

    /// Inserts an entry of `bytes`, and replaces one with the same key. The oldest entries are evicted until it fits;
    /// an entry larger than the bound is dropped instead.
    pub(super) fn insert(&self, key: K, value: V, bytes: u64) {
        if bytes > self.max_bytes {
            return;
        }
        // Dropped after the lock is released: dropping a value may close a stream, which takes longer than the map's
        // work.
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        dropped.extend(state.remove(&key));
        while state.bytes + bytes > self.max_bytes
            && let Some(value) = state.remove_oldest()
        {
            dropped.push(value);
        }
        let age_number = state.next_number;
        state.next_number += 1;
        state.bytes += bytes;
        state.by_age.insert(age_number, key.clone());
        let expires = Instant::now() + self.ttl;
        let entry = MapEntry {
            value,
            age_number,
            bytes,
            expires,
        };
        state.by_key.insert(key, entry);
        drop(state);
    }

    /// Whether `key` has an entry that has not expired.
    pub(super) fn contains(&self, key: &K) -> bool {
        let state = self.state.lock();
        let entry = state.by_key.get(key);
        entry.is_some_and(|entry| entry.expires > Instant::now())
    }

    /// Removes and returns the value of `key`; `None` if there is none or it has expired.
    pub(super) fn remove(&self, key: &K) -> Option<V> {
        let entry = self.state.lock().remove(key)?;
        (entry.expires > Instant::now()).then_some(entry.value)
    }

    /// Drops expired entries; returns the number of remaining ones.
    pub(super) fn remove_expired(&self) -> usize {
        let now = Instant::now();
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        while state.oldest_expires().is_some_and(|expires| expires <= now)
            && let Some(value) = state.remove_oldest()
        {
            dropped.push(value);
        }
        state.by_key.len()
    }
}

impl<K: Eq + Hash, V> MapState<K, V> {
    /// Removes the entry of `key` from both maps.
    fn remove(&mut self, key: &K) -> Option<MapEntry<V>> {
        let entry = self.by_key.remove(key)?;
        self.by_age.remove(&entry.age_number);
        self.bytes -= entry.bytes;
        Some(entry)
    }

    /// Time at which the oldest entry expires.
    fn oldest_expires(&self) -> Option<Instant> {
        let (_, key) = self.by_age.first_key_value()?;
        self.by_key.get(key).map(|entry| entry.expires)
    }

    fn remove_oldest(&mut self) -> Option<MapEntry<V>> {
        let (_, key) = self.by_age.pop_first()?;
        let entry = self.by_key.remove(&key)?;
        self.bytes -= entry.bytes;
        Some(entry)
    }
}

/// Time until another attempt.
const TTL: Duration = Duration::from_secs(60);
/// Bound on the bytes of the requests.
const MAX_BYTES: u64 = 256 << 10;

/// Framed requests of lists that were too large: for a while they are neither converted nor shared again, because etcd would
/// read most of the response twice. They are forwarded, and flow control bounds their buffered bytes.
#[derive(Debug)]
pub(super) struct TooLarge(ExpiringMap<Bytes, ()>);

impl TooLarge {
    pub(super) fn new() -> TooLarge {
        TooLarge(ExpiringMap::new(TTL, MAX_BYTES))
    }

    pub(super) fn contains(&self, framed: &Bytes) -> bool {
        self.0.contains(framed)
    }

    /// Adds a request.
    pub(super) fn add(&self, framed: &Bytes) {
        // A copy: `framed` may keep a larger buffer alive.
        let copy = Bytes::copy_from_slice(framed);
        let bytes = copy.len() as u64;
        self.0.insert(copy, (), bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn map() -> ExpiringMap<&'static str, u32> {
        ExpiringMap::new(TTL, 100)
    }

    fn assert_empty(map: &ExpiringMap<&'static str, u32>) {
        let state = map.state.lock();
        assert!(state.by_key.is_empty() && state.by_age.is_empty());
        assert_eq!(state.bytes, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn inserted_entry_can_be_removed_once() {
        let map = map();
        map.insert("a", 1, 10);
        map.insert("a", 2, 20);
        assert_eq!(map.remove(&"a"), Some(2));
        assert_eq!(map.remove(&"a"), None);
        assert_empty(&map);
    }

    #[tokio::test(start_paused = true)]
    async fn expired_entry_is_not_returned() {
        let map = map();
        map.insert("a", 1, 10);
        tokio::time::advance(TTL / 2).await;
        map.insert("b", 2, 10);
        tokio::time::advance(TTL / 2).await;
        assert_eq!(map.remove(&"a"), None, "expired, but not dropped yet");
        map.insert("c", 3, 10);
        tokio::time::advance(TTL / 2).await;
        assert_eq!(map.remove_expired(), 1);
        assert_eq!(map.remove(&"c"), Some(3));
        assert_empty(&map);
    }

    #[tokio::test(start_paused = true)]
    async fn oldest_entries_are_evicted_to_fit_the_budget() {
        let map = map();
        map.insert("a", 1, 40);
        map.insert("b", 2, 40);
        map.insert("c", 3, 60);
        assert_eq!(map.remove(&"a"), None);
        assert_eq!(map.remove(&"b"), Some(2));
        assert_eq!(map.remove(&"c"), Some(3));
        map.insert("d", 4, 100);
        map.insert("e", 5, 101);
        assert_eq!(map.remove(&"e"), None, "larger than the bound");
        assert_eq!(
            map.remove(&"d"),
            Some(4),
            "not evicted for an entry that cannot fit"
        );
        assert_empty(&map);
    }
}
