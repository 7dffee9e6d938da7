//! Comparison of keys with etcd at one revision: etcd's history has the newest of them and no other ones as new, and it
//! has as many keys (I4).
//!
//! It proves what the events that a feed delivers again cannot prove: what was loaded. A lost history whose last
//! revisions were written again has the same cluster, raft log and revision; it differs in the keys that it changed last.
//! What lies below the oldest of [`NEWEST_KEYS`] is compared by number alone.

use std::{cmp::Reverse, collections::BinaryHeap, ops::ControlFlow, sync::Arc};

use bytes::Bytes;
use etcd_store::cache::{StoredEntry, Tree};
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse};
use rangecache_base::blocking::compute;
use rangecache_upstream::{Connection, is_future_revision, range};
use tokio::time::Instant;

use super::events::{MAX_BYTES, MAX_EVENTS};

/// Keys that are compared, by mod_revision: as many as a feed delivers events again.
const NEWEST_KEYS: usize = MAX_EVENTS;
/// Largest part in bytes: before 3.7 etcd reads the values of all of its keys into memory to select the newest.
const PART_BYTES: u64 = 64 << 20;
/// Largest part in keys.
const PART_KEYS: u64 = 100_000;
/// Keys that are selected at once: that takes less than handing the tree to another thread and back.
const SELECTED_AT_ONCE_KEYS: u64 = 1_000;

/// The keys of `tree`, which are all those from `from` to `end`, at one revision.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    pub(crate) tree: Tree,
    pub(crate) from: Bytes,
    pub(crate) end: Bytes,
    pub(crate) revision: i64,
}

/// Consecutive keys between two bounds.
#[derive(Debug)]
struct KeyRun {
    from: Bytes,
    end: Bytes,
    keys: u64,
    /// Entries that are compared: those among the newest of all parts.
    newest: Vec<StoredEntry>,
}

impl Keys {
    /// Whether etcd's history, as far as `connection` shows, holds these keys. Takes at most half of a core of etcd.
    ///
    /// # Errors
    /// etcd's status; see [`is_compaction`](rangecache_upstream::is_compaction).
    pub(crate) async fn are_held_by(self, connection: &Arc<Connection>) -> Result<bool, tonic::Status> {
        let revision = self.revision;
        // A million keys take some tens of milliseconds.
        let selecting = compute(self.tree.len() <= SELECTED_AT_ONCE_KEYS, move || self.parts());
        let (oldest, parts) = selecting
            .await
            .map_err(|_| tonic::Status::internal("selecting the newest keys failed"))?;
        let has_several = parts.len() > 1;
        for part in parts {
            let began = Instant::now();
            let is_same = match range(connection, part.request(revision, oldest)).await {
                Ok(response) => part.is_same(&response),
                // The member's history is shorter than ours.
                Err(status) if is_future_revision(&status) => false,
                Err(status) => return Err(status),
            };
            if !is_same {
                return Ok(false);
            }
            if has_several {
                tokio::time::sleep(began.elapsed()).await;
            }
        }
        Ok(true)
    }

    /// The lowest mod_revision of the keys that are compared, and all keys in parts.
    fn parts(&self) -> (i64, Vec<KeyRun>) {
        let oldest = oldest_of_newest(&self.tree);
        let mut parts = Vec::new();
        let mut part = KeyRun::from(self.from.clone());
        let mut bytes = 0;
        self.tree.for_each_from(0, |entry| {
            bytes += entry.encoded_len() as u64;
            if part.keys > 0 && (bytes > PART_BYTES || part.keys == PART_KEYS) {
                let next = KeyRun::from(Bytes::copy_from_slice(entry.key()));
                part.end = next.from.clone();
                parts.push(std::mem::replace(&mut part, next));
                bytes = entry.encoded_len() as u64;
            }
            part.keys += 1;
            if entry.mod_revision() >= oldest {
                part.newest.push(entry.clone());
            }
            ControlFlow::Continue(())
        });
        part.end = self.end.clone();
        parts.push(part);
        (oldest, parts)
    }
}

impl KeyRun {
    fn from(from: Bytes) -> KeyRun {
        KeyRun {
            from,
            end: Bytes::new(),
            keys: 0,
            newest: Vec::new(),
        }
    }

    fn request(&self, revision: i64, oldest: i64) -> RangeRequest {
        RangeRequest {
            key: self.from.clone(),
            range_end: self.end.clone(),
            revision,
            min_mod_revision: oldest,
            limit: i64::try_from(self.newest.len()).map_or(i64::MAX, |newest| newest + 1),
            ..RangeRequest::default()
        }
    }

    fn is_same(&self, theirs: &RangeResponse) -> bool {
        let same = |(ours, theirs): (&StoredEntry, &Bytes)| ours.is_message(theirs);
        // etcd's count is that of the range, whatever the filter selects.
        u64::try_from(theirs.count) == Ok(self.keys)
            && theirs.kvs.len() == self.newest.len()
            && self.newest.iter().zip(&theirs.kvs).all(same)
    }
}

/// The lowest mod_revision of the newest entries: [`NEWEST_KEYS`] of them and those of the same revision, or as many as
/// fit into [`MAX_BYTES`]. 0 if there is none.
fn oldest_of_newest(tree: &Tree) -> i64 {
    let mut newest = BinaryHeap::with_capacity(NEWEST_KEYS + 1);
    tree.for_each_from(0, |entry| {
        let revision = entry.mod_revision();
        let is_full = newest.len() == NEWEST_KEYS;
        if !is_full
            || newest
                .peek()
                .is_some_and(|Reverse((oldest, _))| *oldest < revision)
        {
            newest.push(Reverse((revision, entry.encoded_len() as u64)));
            if is_full {
                newest.pop();
            }
        }
        ControlFlow::Continue(())
    });
    let mut bytes = 0;
    let newest_first = newest.into_sorted_vec().into_iter().map(|Reverse(entry)| entry);
    let fitting = newest_first.enumerate().take_while(|(n, (_, len))| {
        bytes += len;
        *n == 0 || bytes <= MAX_BYTES
    });
    fitting.last().map_or(0, |(_, (revision, _))| revision)
}

#[cfg(test)]
mod tests {
    use etcd_store::cache::testing::KeyValue;
    use prost::Message as _;

    use super::*;

    fn keys(keys: &[(String, i64, &str)]) -> Keys {
        let entries = keys
            .iter()
            .map(|(key, revision, value)| KeyValue::new(key.as_str(), *revision, *value).entry());
        Keys {
            tree: Tree::from_sorted(entries),
            from: Bytes::from_static(b"a"),
            end: Bytes::from_static(b"z"),
            revision: 1_000,
        }
    }

    /// Keys of the revisions 1 to `count`, in the order of the keys.
    fn numbered(count: i64, value: &str) -> Keys {
        let all: Vec<_> = (1..=count).map(|n| (format!("k{n:06}"), n, value)).collect();
        keys(&all)
    }

    /// etcd's response to the request of a part, if it holds `theirs`.
    fn etcd(theirs: &Keys, request: &RangeRequest) -> RangeResponse {
        let mut response = RangeResponse::default();
        theirs.tree.for_each_from(0, |entry| {
            if entry.key() >= &request.key[..] && entry.key() < &request.range_end[..] {
                response.count += 1;
                if entry.mod_revision() >= request.min_mod_revision {
                    let entry = entry.read().unwrap();
                    let fields = entry.fields();
                    let key_value = KeyValue {
                        version: fields.version,
                        ..KeyValue::new(fields.key, fields.mod_revision, fields.value.contiguous())
                    };
                    response.kvs.push(key_value.encode_to_vec().into());
                }
            }
            ControlFlow::Continue(())
        });
        response
            .kvs
            .truncate(usize::try_from(request.limit).expect("a limit"));
        response
    }

    fn are_same(ours: &Keys, theirs: &Keys) -> bool {
        let (oldest, parts) = ours.parts();
        parts
            .iter()
            .all(|part| part.is_same(&etcd(theirs, &part.request(ours.revision, oldest))))
    }

    #[test]
    fn newest_keys_are_compared_and_the_others_counted() {
        let ours = numbered(200, "v");
        assert_eq!(ours.parts().0, 137, "64 keys");
        assert!(are_same(&ours, &ours));
        for (n, is_same) in [(200, false), (150, false), (137, false), (136, true), (1, true)] {
            let mut theirs = ours.clone();
            theirs
                .tree
                .insert(KeyValue::new(format!("k{n:06}"), n, "other").entry());
            assert_eq!(are_same(&ours, &theirs), is_same, "another value of {n}");
            let mut theirs = ours.clone();
            theirs.tree.remove(format!("k{n:06}").as_bytes());
            assert!(!are_same(&ours, &theirs), "without {n}");
            let mut theirs = ours.clone();
            theirs
                .tree
                .insert(KeyValue::new(format!("k{n:06}"), 201, "v").entry());
            assert!(!are_same(&ours, &theirs), "{n} is newer in etcd");
        }
        let empty = keys(&[]);
        assert!(are_same(&empty, &empty) && !are_same(&empty, &ours) && !are_same(&ours, &empty));
    }

    #[test]
    fn all_keys_of_the_oldest_revision_are_compared() {
        let all: Vec<_> = (0..100).map(|n| (format!("k{n:06}"), 7, "v")).collect();
        let ours = keys(&all);
        let (oldest, parts) = ours.parts();
        assert_eq!((oldest, parts[0].newest.len()), (7, 100));
        assert!(are_same(&ours, &ours));
    }

    #[test]
    fn newest_keys_are_bounded_in_bytes() {
        let value = "v".repeat(400 << 10);
        assert_eq!(numbered(10, &value).parts().0, 9);
        let value = "v".repeat(2 << 20);
        assert_eq!(numbered(3, &value).parts().0, 3);
    }

    #[test]
    fn parts_are_bounded_and_cover_every_key() {
        let value = "v".repeat(1 << 20);
        let ours = numbered(150, &value);
        let (_, parts) = ours.parts();
        assert_eq!(parts.len(), 3);
        assert_eq!(parts.iter().map(|part| part.keys).sum::<u64>(), 150);
        assert_eq!((&parts[0].from[..], &parts[2].end[..]), (&b"a"[..], &b"z"[..]));
        assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].from));
        assert!(are_same(&ours, &ours));
        let mut theirs = ours.clone();
        theirs.tree.insert(KeyValue::new("b", 1, "v").entry());
        assert!(!are_same(&ours, &theirs), "a key in front of all");
    }
}
