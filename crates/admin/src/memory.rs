//! Memory of mirrors in figures and words: which of their values are plain, packed, or only in etcd.

use etcd_store::cache::Summary;
use rangecache_base::telemetry::{Reason, metrics::unsigned};
use rangecache_mirror::view::Mirror;
use serde::{Serialize, Serializer};

use rangecache_report::{Finding, FindingId, format::bytes, reasons::explain_reason};

/// Memory of a mirror, in bytes.
#[derive(Debug, Default, Serialize)]
pub(crate) struct MirrorMemory {
    /// Keys, values and history.
    pub(crate) memory_bytes: u64,
    pub(crate) history_bytes: u64,
    /// Packed keys and values (`--cache-pack`), a part of `memory_bytes`.
    pub(crate) packed_bytes: u64,
    /// Bytes of the same as etcd sends them.
    pub(crate) packed_encoded_bytes: u64,
    /// Bytes of keys and values whose values only etcd has, because memory is too small, as etcd sends them.
    pub(crate) not_held_bytes: u64,
    /// The tree that finds keys, a part of `memory_bytes`.
    pub(crate) index_bytes: u64,
    /// Replaced entries that only responses in flight keep.
    pub(crate) held_bytes: u64,
}

impl MirrorMemory {
    pub(super) fn of(mirror: &Mirror) -> MirrorMemory {
        let gauges = &mirror.metrics;
        MirrorMemory {
            memory_bytes: mirror.memory_bytes(),
            history_bytes: unsigned(gauges.history_bytes.get()),
            packed_bytes: unsigned(gauges.packed_bytes.get()),
            packed_encoded_bytes: unsigned(gauges.packed_encoded_bytes.get()),
            not_held_bytes: unsigned(gauges.not_held_bytes.get()),
            index_bytes: unsigned(gauges.index_bytes.get()),
            held_bytes: mirror.held_bytes(),
        }
    }

    /// Parts of the memory: titles and values.
    pub(super) fn parts(&self) -> [(&'static str, String); 4] {
        let packed = match self.packed_bytes {
            0 => "none".to_owned(),
            packed => format!("{} for {}", bytes(packed), bytes(self.packed_encoded_bytes)),
        };
        [
            ("plain values", bytes(self.plain_bytes())),
            ("packed values", packed),
            ("index", bytes(self.index_bytes)),
            ("past revisions", bytes(self.history_bytes)),
        ]
    }

    /// Keys and values that are not packed.
    pub(super) fn plain_bytes(&self) -> u64 {
        let others = self.history_bytes + self.packed_bytes + self.index_bytes;
        self.memory_bytes.saturating_sub(others)
    }

    /// Size of what only etcd has; `None` if that is nothing.
    pub(super) fn only_in_etcd(&self) -> Option<String> {
        (self.not_held_bytes > 0).then(|| bytes(self.not_held_bytes))
    }

    /// A finding if values of the mirror `name` do not fit.
    pub(super) fn finding(&self, name: &str) -> Option<Finding> {
        let size = self.only_in_etcd()?;
        let title = format!("{size} of the values of {name} are only in etcd");
        Some(
            Finding::new(FindingId::ValuesNotHeld, title)
                .about(name)
                .with_meaning(explain_reason(Reason::ValuesNotHeld).meaning),
        )
    }
}

/// Writes the fields of `/status` about the size of a prefix.
pub(super) fn prefix_size<S: Serializer>(size: &Summary, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct PrefixSize {
        keys: u64,
        bytes: u64,
        not_held_bytes: u64,
    }
    let size = PrefixSize {
        keys: size.count,
        bytes: size.encoded_bytes,
        not_held_bytes: size.not_held_bytes,
    };
    size.serialize(serializer)
}

/// Size of a prefix in words.
pub(super) fn size_in_words(size: &Summary) -> String {
    match size.not_held_bytes {
        0 => bytes(size.encoded_bytes),
        part => format!(
            "{}, {} of it only in etcd",
            bytes(size.encoded_bytes),
            bytes(part)
        ),
    }
}
