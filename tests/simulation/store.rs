//! The model's data: one history of a store as etcd keeps it, with every revision. It is the truth that responses and
//! watches are compared with.

use std::collections::BTreeMap;

use testkit::pb::{
    ASCEND, BY_CREATE, BY_KEY, BY_MOD, BY_VALUE, BY_VERSION, DESCEND, Event, KeyValue, RangeRequest,
    RangeResponse,
};
use testkit::watch_rules::{DELETE, previous};
use tokio::time::Instant;

use crate::auth::Auth;

/// Raft entries before the first write of the first cluster: configuration and leader elections.
const FIRST_RAFT_INDEX: u64 = 8;

/// A change of one key.
#[derive(Clone, Debug)]
pub enum Change {
    /// Key, value and lease.
    Put(Vec<u8>, Vec<u8>, i64),
    Delete(Vec<u8>),
}

/// A lease.
#[derive(Clone, Copy, Debug)]
struct Lease {
    /// Number of raft entries with its grant.
    granted: usize,
    /// Number of raft entries with its revocation.
    revoked: Option<usize>,
    expires: Instant,
}

/// State of the store after one raft entry.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub term: u64,
    pub revision: i64,
    /// Revisions below this one cannot be read.
    pub compacted: i64,
    pub auth: Auth,
}

/// Everything that one history of a cluster has contained.
#[derive(Clone, Debug)]
pub struct History {
    pub cluster_id: u64,
    /// Whether responses with `keys_only` have leases: from 3.7 on etcd takes them from its index, which has none.
    pub keys_only_has_lease: bool,
    /// Highest revision that may be compacted, [`i64::MAX`] unless rangecache has to see what is below.
    pub compactable: i64,
    /// Raft entries before the first one of `entries`.
    raft_index_before: u64,
    entries: Vec<Entry>,
    /// Events of each revision from 2 on; revision 1 is the empty store.
    revisions: Vec<Vec<Event>>,
    /// Every version of each key, oldest first. A version of 0 is a delete.
    keys: BTreeMap<Vec<u8>, Vec<KeyValue>>,
    leases: BTreeMap<i64, Lease>,
}

impl History {
    /// An empty store.
    pub fn new(cluster_id: u64, keys_only_has_lease: bool) -> Self {
        let first = Entry {
            term: 1,
            revision: 1,
            compacted: 0,
            auth: Auth::OFF,
        };
        Self {
            cluster_id,
            keys_only_has_lease,
            compactable: i64::MAX,
            raft_index_before: FIRST_RAFT_INDEX,
            entries: vec![first],
            revisions: Vec::new(),
            keys: BTreeMap::new(),
            leases: BTreeMap::new(),
        }
    }

    /// Number of raft entries so far.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// State after the first `applied` entries.
    pub fn after(&self, applied: usize) -> Entry {
        self.entries[applied - 1]
    }

    /// State after all entries.
    pub fn newest(&self) -> Entry {
        self.after(self.len())
    }

    /// Number of entries up to the last one at `revision`, which exists.
    pub fn entries_at(&self, revision: i64) -> usize {
        self.entries.partition_point(|entry| entry.revision <= revision)
    }

    /// Index in the raft log of the last of the first `applied` entries.
    pub fn raft_index(&self, applied: usize) -> u64 {
        self.raft_index_before + applied as u64
    }

    /// Makes this the history of a new cluster that begins with it, in `term` and behind `raft_index` other entries.
    pub fn begin_cluster(&mut self, term: u64, raft_index: u64) {
        self.cluster_id += 1;
        self.raft_index_before = raft_index;
        self.entries.iter_mut().for_each(|entry| entry.term = term);
    }

    fn push(&mut self, entry: Entry) {
        self.entries.push(entry);
    }

    /// Appends an entry that changes nothing.
    pub fn pass(&mut self) {
        let newest = self.newest();
        self.push(newest);
    }

    /// Appends an entry that changes nothing, in a new term.
    pub fn elect(&mut self, term: u64) {
        let newest = self.newest();
        self.push(Entry { term, ..newest });
    }

    /// Appends a compaction of the revisions below `revision`.
    pub fn compact(&mut self, revision: i64) {
        let newest = self.newest();
        let compacted = newest.compacted.max(revision);
        self.push(Entry { compacted, ..newest });
    }

    /// Appends a change of auth.
    pub fn change_auth(&mut self, change: impl FnOnce(&mut Auth)) {
        let newest = self.newest();
        let mut auth = newest.auth;
        change(&mut auth);
        if auth != newest.auth {
            auth.revision += 1;
        }
        self.push(Entry { auth, ..newest });
    }

    /// State after each number of entries from `first` on.
    pub fn since(&self, first: usize) -> impl Iterator<Item = &Entry> {
        self.entries[first.max(1) - 1..].iter()
    }

    /// Appends one transaction, and returns the revision after it: deletes of keys that do not exist change nothing.
    pub fn commit(&mut self, changes: &[Change]) -> i64 {
        let newest = self.newest();
        let revision = newest.revision + 1;
        let mut events = Vec::new();
        for change in changes {
            let (key, value) = match change {
                Change::Put(key, value, lease) => (key, Some((value, *lease))),
                Change::Delete(key) => (key, None),
            };
            let before = self.get(key, newest.revision).cloned();
            // A nested transaction may have changed it before.
            let running = self.get(key, revision).cloned();
            let kv = match (value, &running) {
                (Some((value, lease)), running) => KeyValue {
                    key: key.clone(),
                    create_revision: running.as_ref().map_or(revision, |kv| kv.create_revision),
                    mod_revision: revision,
                    version: running.as_ref().map_or(1, |kv| kv.version + 1),
                    value: value.clone(),
                    lease,
                },
                (None, Some(_)) => KeyValue {
                    key: key.clone(),
                    mod_revision: revision,
                    ..KeyValue::default()
                },
                (None, None) => continue,
            };
            let mut event = Event {
                r#type: if value.is_none() { DELETE } else { 0 },
                kv: Some(kv.clone()),
                prev_kv: None,
            };
            event.prev_kv = previous(&event, before.as_ref());
            events.push(event);
            self.keys.entry(key.clone()).or_default().push(kv);
        }
        let revision = if events.is_empty() {
            newest.revision
        } else {
            self.revisions.push(events);
            revision
        };
        self.push(Entry { revision, ..newest });
        revision
    }

    /// The history up to its first `entries` entries, as a backup has it.
    pub fn truncated(&self, entries: usize) -> Self {
        let last = self.after(entries).revision;
        let mut keys = self.keys.clone();
        for versions in keys.values_mut() {
            versions.retain(|kv| kv.mod_revision <= last);
        }
        let mut leases = self.leases.clone();
        leases.retain(|_, lease| lease.granted <= entries);
        for lease in leases.values_mut() {
            lease.revoked = lease.revoked.filter(|revoked| *revoked <= entries);
        }
        Self {
            cluster_id: self.cluster_id,
            keys_only_has_lease: self.keys_only_has_lease,
            compactable: self.compactable,
            raft_index_before: self.raft_index_before,
            entries: self.entries[..entries].to_vec(),
            revisions: self.revisions[..usize::try_from(last - 1).unwrap()].to_vec(),
            keys,
            leases,
        }
    }

    /// Whether `lease` is granted, or none.
    pub fn has_lease(&self, lease: i64) -> bool {
        lease == 0
            || self
                .leases
                .get(&lease)
                .is_some_and(|found| found.revoked.is_none())
    }

    /// Appends the grant of a lease, unless it is granted. Returns whether it was not.
    pub fn grant(&mut self, id: i64, expires: Instant) -> bool {
        if self.has_lease(id) {
            return false;
        }
        let newest = self.newest();
        self.push(newest);
        let lease = Lease {
            granted: self.len(),
            revoked: None,
            expires,
        };
        self.leases.insert(id, lease);
        true
    }

    /// Appends the revocation of a lease, which deletes its keys, unless it is not granted. Returns whether it was.
    pub fn revoke(&mut self, id: i64) -> bool {
        if id == 0 || !self.has_lease(id) {
            return false;
        }
        let newest = self.newest().revision;
        let keys = self.keys.keys().filter(|key| {
            let found = self.get(key, newest);
            found.is_some_and(|kv| kv.lease == id)
        });
        let deletes: Vec<_> = keys.cloned().map(Change::Delete).collect();
        self.commit(&deletes);
        let revoked = self.len();
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.revoked = Some(revoked);
        }
        true
    }

    /// The lease that expires first, and when.
    pub fn first_to_expire(&self) -> Option<(Instant, i64)> {
        let granted = self.leases.iter().filter(|(_, lease)| lease.revoked.is_none());
        granted.map(|(id, lease)| (lease.expires, *id)).min()
    }

    /// Events of all revisions, in order, with previous values.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.revisions.iter().flatten()
    }

    /// Events of one revision; none at or below 1, or above the newest.
    pub fn events_at(&self, revision: i64) -> &[Event] {
        let index = usize::try_from(revision - 2).ok();
        index
            .and_then(|index| self.revisions.get(index))
            .map_or(&[], Vec::as_slice)
    }

    /// The changes that made one revision.
    pub fn changes_at(&self, revision: i64) -> Vec<Change> {
        let changes = self.events_at(revision).iter().map(|event| {
            let kv = event.kv.clone().expect("an event has a kv");
            match event.r#type {
                DELETE => Change::Delete(kv.key),
                _ => Change::Put(kv.key, kv.value, kv.lease),
            }
        });
        changes.collect()
    }

    /// A key at a revision.
    pub fn get(&self, key: &[u8], revision: i64) -> Option<&KeyValue> {
        let versions = self.keys.get(key)?;
        let known = versions.partition_point(|kv| kv.mod_revision <= revision);
        versions[..known].last().filter(|kv| kv.version > 0)
    }

    /// Response to a Range at `revision`, without header.
    pub fn range(&self, request: &RangeRequest, revision: i64) -> RangeResponse {
        let in_range = |key: &[u8]| match &request.range_end[..] {
            b"" => key == request.key,
            b"\0" => key >= &request.key[..],
            end => &request.key[..] <= key && key < end,
        };
        let keys = self.keys.keys().filter(|key| in_range(key));
        let all: Vec<_> = keys.filter_map(|key| self.get(key, revision)).collect();
        let mut response = RangeResponse {
            count: i64::try_from(all.len()).unwrap(),
            ..RangeResponse::default()
        };
        if request.count_only {
            return response;
        }
        let within =
            |value: i64, min: i64, max: i64| (min == 0 || value >= min) && (max == 0 || value <= max);
        let mut found: Vec<_> = all
            .into_iter()
            .filter(|kv| {
                within(
                    kv.mod_revision,
                    request.min_mod_revision,
                    request.max_mod_revision,
                )
            })
            .filter(|kv| {
                within(
                    kv.create_revision,
                    request.min_create_revision,
                    request.max_create_revision,
                )
            })
            .cloned()
            .collect();
        if request.sort_order == ASCEND || request.sort_order == DESCEND {
            let compare = |a: &KeyValue, b: &KeyValue| match request.sort_target {
                BY_KEY => a.key.cmp(&b.key),
                BY_VERSION => a.version.cmp(&b.version),
                BY_CREATE => a.create_revision.cmp(&b.create_revision),
                BY_MOD => a.mod_revision.cmp(&b.mod_revision),
                BY_VALUE => a.value.cmp(&b.value),
                other => panic!("no sort target {other}"),
            };
            // Keys that compare equal stay in key order, as in etcd with so few keys.
            if request.sort_order == DESCEND {
                found.sort_by(|a, b| compare(b, a));
            } else {
                found.sort_by(compare);
            }
        }
        if let Some(limit) = usize::try_from(request.limit).ok().filter(|limit| *limit > 0) {
            response.more = found.len() > limit;
            found.truncate(limit);
        }
        if request.keys_only {
            for kv in &mut found {
                kv.value.clear();
                kv.lease = if self.keys_only_has_lease { kv.lease } else { 0 };
            }
        }
        response.kvs = found;
        response
    }
}
