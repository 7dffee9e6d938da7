//! Fuzz target of images: files as they were written, cut off, changed in one byte, and with frames of any content in them.

#![allow(clippy::unwrap_used, reason = "compiled for tests and fuzz targets only")]

use arbitrary::{Arbitrary, Unstructured};
use etcd_store::cache::{TreeBuilder, testing::KeyValue};
use etcd_store::keyspace::scope::Scope;
use prost::Message as _;

use super::file::{Header, encoded_end, read_image};
use super::frame::{END, ENTRIES, sealed};
use crate::lineage::Fingerprint;

/// Most bytes of an image's tree.
const MAX_BYTES: u64 = 1 << 20;

#[derive(Arbitrary, Debug)]
struct Input {
    /// Lengths of the values of each piece.
    pieces: Vec<Vec<u8>>,
    /// Frames with a right seal behind the pieces: kind, whether the content is compressed, and the content.
    more: Vec<(u8, bool, Vec<u8>)>,
    /// A byte that is changed.
    damage: Option<(u16, u8)>,
    /// Bytes that are missing at the end.
    cut: u16,
}

/// An image that is as it was written has its keys, one that is damaged or cut off is of no use, and no content of a frame does harm.
pub fn image(data: &[u8]) {
    let Ok(input) = Input::arbitrary(&mut Unstructured::new(data)) else {
        return;
    };
    let scope = Scope::prefix(b"/");
    let reached = Fingerprint {
        cluster_id: 7,
        revision: 100,
        compacted: 1,
        raft_gap: 1,
    };
    let header = Header::new(&scope, &reached, false);
    let (mut frames, mut count) = (Vec::new(), 0_u64);
    for lengths in &input.pieces {
        let mut piece = Vec::new();
        for length in lengths {
            let value = vec![b'v'; usize::from(*length)];
            let message = KeyValue::new(format!("/{count:08}"), 2, value).encode_to_vec();
            piece.extend_from_slice(&(message.len() as u64).to_le_bytes());
            piece.extend_from_slice(&message);
            count += 1;
        }
        if !piece.is_empty() {
            frames.push((ENTRIES, lz4_flex::block::compress_prepend_size(&piece)));
        }
    }
    for (kind, is_packed, content) in &input.more {
        let content = if *is_packed {
            lz4_flex::block::compress_prepend_size(content)
        } else {
            content.clone()
        };
        frames.push((*kind, content));
    }
    frames.push((END, encoded_end(count)));
    let mut bytes = sealed(&header.encoded(), frames.into_iter());
    let damage = input.damage.filter(|(_, change)| *change != 0);
    if let Some((at, change)) = damage {
        let at = usize::from(at) % bytes.len();
        bytes[at] ^= change;
    }
    let kept = bytes.len() - usize::from(input.cut).min(bytes.len());
    bytes.truncate(kept);
    let limits = (TreeBuilder::default(), MAX_BYTES);
    let read = read_image(&bytes[..], kept as u64, None, &scope, limits, |_| {});
    // What follows an end is not read, and a frame of any content may be one.
    if !input.more.is_empty() {
        return;
    }
    match read {
        Ok((_, read)) => {
            assert!(damage.is_none() && input.cut == 0, "a damaged image was read");
            assert_eq!(read.tree.len(), count);
        }
        Err(error) => assert!(
            damage.is_some() || input.cut > 0 || count > 1000,
            "a whole image is of no use: {error}"
        ),
    }
}
