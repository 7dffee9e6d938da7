//! Comparison of a whole tree with etcd, values included: the keys of a neighbour are those of another process's etcd, and
//! nothing but their values shows whether that is the same one. Two that continue a copy of one data folder have one cluster id.

use std::ops::ControlFlow;

use bytes::Bytes;

use super::begin::{Load, PAGE_TARGET_BYTES};
use super::error::LoadError;
use super::loaded::Loaded;
use super::read::{LoadReader, Sink};
use etcd_store::cache::{Tree, Unpacker};
use etcd_wire::etcdserverpb::RangeResponse;
use rangecache_upstream::page_limit;

/// Comparison of etcd's keys with those of a tree as they arrive.
struct Comparing<'a> {
    reader: &'a LoadReader<'a>,
    tree: &'a Tree,
    /// Entries that are the same.
    same: u64,
}

/// Reads every key at the revision of `loaded` from etcd and compares it.
///
/// # Errors
/// [`LoadError::Foreign`] if one differs; others if etcd does not answer.
pub(super) async fn compare_whole(load: &Load<'_>, loaded: &Loaded) -> Result<(), LoadError> {
    let connection = match &loaded.connection {
        Some(connection) => connection.clone(),
        None => load.connect(None).await?,
    };
    let reader = LoadReader::new(load, loaded.header);
    let mut comparing = Comparing {
        reader: &reader,
        tree: &loaded.tree,
        same: 0,
    };
    reader.read(&connection, false, &mut comparing).await?;
    if comparing.same == loaded.tree.len() {
        Ok(())
    } else {
        Err(LoadError::Foreign)
    }
}

impl Sink for Comparing<'_> {
    fn last_key(&self) -> Option<Bytes> {
        let last = self.tree.at(self.same.checked_sub(1)?)?;
        Some(Bytes::copy_from_slice(last.key()))
    }

    fn page_limit(&self) -> i64 {
        page_limit(PAGE_TARGET_BYTES, self.tree.mean_encoded_bytes())
    }

    async fn add(&mut self, response: RangeResponse) -> Result<(), LoadError> {
        self.reader.record(&response.kvs);
        let mut unpacker = Unpacker::default();
        let mut theirs = response.kvs.iter().peekable();
        let mut same = 0;
        self.tree.for_each_from(self.same, |ours| {
            let is_same = theirs
                .next_if(|theirs| unpacker.is_message(ours, theirs))
                .is_some();
            if is_same {
                same += 1;
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        });
        self.same += same;
        if theirs.peek().is_some() {
            return Err(LoadError::Foreign);
        }
        Ok(())
    }
}
