//! Counts a prefix at two revisions of a store: now, and before the last write.

#![allow(clippy::print_stdout, reason = "an example shows what it finds")]

use std::error::Error;
use std::time::Duration;

use etcd_store::cache::{Change, Entry, HistoryLimits, Store, Tree};
use etcd_store::keyspace::prefix_end;

fn main() -> Result<(), Box<dyn Error>> {
    let begin = Duration::ZERO;
    let mut store = Store::new(Tree::new(), 1, HistoryLimits::default(), begin);
    for (revision, key) in [(2_u8, "/pods/a"), (3, "/pods/b"), (4, "/nodes/a"), (5, "/pods/c")] {
        store.apply(vec![Change::put(entry(key, revision)?)], revision.into(), begin)?;
    }
    let end = prefix_end(b"/pods/").ok_or("no key follows the prefix")?;
    for revision in [5, 4] {
        let tree = store.snapshot_at(revision)?.into_tree();
        let (from, to) = (tree.rank(b"/pods/"), tree.rank(&end));
        println!("revision {revision}: {} pods in {} keys", to - from, tree.len());
    }
    Ok(())
}

/// An entry without a value, which was created at `revision`.
fn entry(key: &str, revision: u8) -> Result<Entry, Box<dyn Error>> {
    let head = [0x0a, u8::try_from(key.len())?];
    let key_value = [
        &head[..],
        key.as_bytes(),
        &[0x10, revision, 0x18, revision, 0x20, 1],
    ]
    .concat();
    Ok(Entry::from_key_value(&key_value)?)
}
