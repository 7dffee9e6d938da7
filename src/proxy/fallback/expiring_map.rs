//! A map whose entries expire, within a byte budget. An entry is only ever taken out, never read in place.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Entries by key. All live equally long, so the oldest expires first, and is evicted first when bytes run out.
#[derive(Debug)]
pub(super) struct ExpiringMap<K, V> {
    ttl: Duration,
    max_bytes: u64,
    state: Mutex<State<K, V>>,
}

#[derive(Debug)]
struct State<K, V> {
    by_key: HashMap<K, Entry<V>>,
    /// Keys by the numbers of their entries, oldest first.
    by_age: BTreeMap<u64, K>,
    next_number: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    age_number: u64,
    bytes: u64,
    expires: Instant,
}

impl<K: Clone + Eq + Hash, V> ExpiringMap<K, V> {
    /// Entries live for `ttl`; together they have at most `max_bytes`.
    pub(super) fn new(ttl: Duration, max_bytes: u64) -> ExpiringMap<K, V> {
        ExpiringMap {
            ttl,
            max_bytes,
            state: Mutex::new(State {
                by_key: HashMap::new(),
                by_age: BTreeMap::new(),
                next_number: 0,
                bytes: 0,
            }),
        }
    }

    /// Adds an entry of `bytes`, in place of one with the same key. The oldest entries are dropped until all fit; one that is
    /// larger than the budget is not added.
    pub(super) fn insert(&self, key: K, value: V, bytes: u64) {
        if bytes > self.max_bytes {
            return;
        }
        // Values are dropped after the lock is released: an open stream may take a moment.
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
        let entry = Entry {
            value,
            age_number,
            bytes,
            expires,
        };
        state.by_key.insert(key, entry);
        drop(state);
    }

    /// Takes the entry out, if it is there and has not expired.
    pub(super) fn remove(&self, key: &K) -> Option<V> {
        let entry = self.state.lock().remove(key)?;
        (entry.expires > Instant::now()).then_some(entry.value)
    }

    /// Drops entries that have expired; returns how many are left.
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

impl<K: Eq + Hash, V> State<K, V> {
    fn remove(&mut self, key: &K) -> Option<Entry<V>> {
        let entry = self.by_key.remove(key)?;
        self.by_age.remove(&entry.age_number);
        self.bytes -= entry.bytes;
        Some(entry)
    }

    fn oldest_expires(&self) -> Option<Instant> {
        let (_, key) = self.by_age.first_key_value()?;
        self.by_key.get(key).map(|entry| entry.expires)
    }

    fn remove_oldest(&mut self) -> Option<Entry<V>> {
        let (_, key) = self.by_age.pop_first()?;
        let entry = self.by_key.remove(&key)?;
        self.bytes -= entry.bytes;
        Some(entry)
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
    async fn entry_is_taken_once() {
        let map = map();
        map.insert("a", 1, 10);
        map.insert("a", 2, 20);
        assert_eq!(map.remove(&"a"), Some(2));
        assert_eq!(map.remove(&"a"), None);
        assert_empty(&map);
    }

    #[tokio::test(start_paused = true)]
    async fn entry_expires() {
        let map = map();
        map.insert("a", 1, 10);
        tokio::time::advance(TTL / 2).await;
        map.insert("b", 2, 10);
        tokio::time::advance(TTL / 2).await;
        assert_eq!(map.remove(&"a"), None, "expired, though not yet removed");
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
        assert_eq!(map.remove(&"e"), None, "larger than the budget");
        assert_eq!(map.remove(&"d"), Some(4), "not evicted for it");
        assert_empty(&map);
    }
}
