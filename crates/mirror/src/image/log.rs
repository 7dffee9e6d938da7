//! The log of an image: the events since its base, in the order in which they were applied.
//!
//! Each frame has whole revisions: those behind `after`, up to `revision`. What was cut off, or does not continue what is
//! before it, ends the log: the image is only older then.

use std::fs::File;
use std::io::{self, Read};

use bytes::{Buf as _, Bytes};

use super::base::take_message;
use super::frame::{EVENTS, FrameWriter, Frames, HEADER};
use super::header::Header;
use super::key::ImageKey;
use crate::lineage::Fingerprint;
use etcd_store::cache::{Batch, Change, ChangeKind, Entry};
use etcd_store::keyspace::scope::Scope;

/// Events of a frame, in bytes, after which the next one begins.
const FRAME_BYTES: usize = 1 << 20;

const PUT: u8 = 0;
const DELETE: u8 = 1;

/// Events of whole revisions.
#[derive(Debug)]
pub(super) struct Events {
    /// Every event up to this revision is before these.
    pub(super) after: i64,
    /// Every event up to this one is among them. The history of etcd at that time.
    pub(super) reached: Fingerprint,
    pub(super) changes: Vec<Change>,
}

/// A log that is being written.
pub(super) struct LogWriter(FrameWriter);

impl LogWriter {
    /// Begins a section of `header` in a file, of which the first `length` bytes are kept.
    pub(super) fn begin(
        file: File,
        length: u64,
        header: &Header,
        key: Option<&ImageKey>,
    ) -> io::Result<LogWriter> {
        FrameWriter::begin(file, length, &header.encoded(), key).map(LogWriter)
    }

    /// Bytes of the file.
    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// Appends the events of `batches` behind `after`, every one up to that of `reached`, and waits until they are on the
    /// disk.
    pub(super) fn append(&mut self, after: i64, reached: Fingerprint, batches: &[Batch]) -> io::Result<()> {
        let (mut frame_after, mut last, mut changes) = (after, after, Vec::new());
        let frame = |after: i64, revision: i64, changes: &[u8]| {
            let mut payload = Vec::with_capacity(40 + changes.len());
            for number in [after, revision, reached.compacted, reached.raft_gap] {
                payload.extend_from_slice(&number.to_le_bytes());
            }
            payload.extend_from_slice(&reached.cluster_id.to_le_bytes());
            payload.extend_from_slice(changes);
            payload
        };
        let new = batches.iter().flat_map(Batch::changes);
        for change in new.filter(|change| change.revision() > after) {
            if changes.len() > FRAME_BYTES && change.revision() > last {
                self.0.write(EVENTS, &frame(frame_after, last, &changes))?;
                changes.clear();
                frame_after = last;
            }
            last = change.revision();
            let message = change.entry.key_value();
            changes.push(match change.kind {
                ChangeKind::Put => PUT,
                ChangeKind::Delete => DELETE,
            });
            changes.extend_from_slice(&(message.len() as u64).to_le_bytes());
            changes.extend_from_slice(&message);
        }
        self.0
            .write(EVENTS, &frame(frame_after, reached.revision, &changes))?;
        self.0.file().sync_data()
    }
}

/// Reads the log of `base`, of `length` bytes; `apply` gets the events, one frame after another, until it refuses. Returns
/// the bytes that were used: behind them nothing follows that continues the log.
pub(super) fn read_log(
    from: impl Read,
    length: u64,
    key: Option<&ImageKey>,
    (base, scope): (&Header, &Scope),
    mut apply: impl FnMut(Events) -> bool,
) -> u64 {
    let mut frames = Frames::new(from, length, key);
    let (mut used, mut has_header) = (0, false);
    loop {
        let is_used = match frames.next() {
            Ok(Some((HEADER, header))) => {
                let of_base =
                    |header: &Header| header.image == base.image && header.check_encryption(key).is_ok();
                has_header = Header::decoded(&header, scope).is_ok_and(|header| of_base(&header));
                has_header
            }
            Ok(Some((EVENTS, payload))) if has_header => decoded(payload).is_some_and(&mut apply),
            _ => false,
        };
        if !is_used {
            return used;
        }
        used = frames.read_bytes();
    }
}

fn decoded(mut payload: Bytes) -> Option<Events> {
    let mut number = || payload.try_get_i64_le().ok();
    let (after, revision, compacted, raft_gap) = (number()?, number()?, number()?, number()?);
    let cluster_id = payload.try_get_u64_le().ok()?;
    let mut changes = Vec::new();
    while !payload.is_empty() {
        let kind = payload.try_get_u8().ok()?;
        let entry = Entry::from_key_value(&take_message(&mut payload)?).ok()?;
        changes.push(match kind {
            PUT => Change::put(entry),
            DELETE => Change::delete(entry),
            _ => return None,
        });
    }
    let is_within = |change: &Change| change.revision() > after && change.revision() <= revision;
    let is_whole = changes.iter().all(is_within) && changes.is_sorted_by_key(Change::revision);
    let reached = Fingerprint {
        cluster_id,
        revision,
        compacted,
        raft_gap,
    };
    (is_whole && after <= revision).then_some(Events {
        after,
        reached,
        changes,
    })
}
