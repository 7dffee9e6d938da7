//! Results of the examination: findings, and figures about endpoints, keyspace and mirrors.

use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;

use crate::diagnosis::{Finding, FindingId, Severity};
use etcd_store::keyspace::PrefixGroup;

/// Result of `rangecache doctor`.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Findings in the order in which they were found.
    pub(super) findings: Vec<Finding>,
    pub(super) endpoints: Vec<EndpointFacts>,
    pub(super) keyspace: Option<Keyspace>,
    pub(super) mirrors: Vec<MirrorEstimate>,
    /// `None` if no member's metrics can be read.
    pub(super) watches: Option<WatchFacts>,
}

/// Watches on the members whose metrics can be read.
#[derive(Clone, Debug, Serialize)]
pub(super) struct WatchFacts {
    pub(super) members: u64,
    pub(super) watchers: u64,
    pub(super) streams: u64,
    /// Events sent to watchers since the members started.
    pub(super) events_sent: u64,
    /// Puts and deletes since the first of the members started.
    pub(super) changes: u64,
}

impl Report {
    /// Adds a finding with the usual severity and remedy of `id`.
    pub(super) fn find(&mut self, id: FindingId, text: impl Into<String>) {
        self.add(Finding::new(id, text));
    }

    pub(super) fn add(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    /// Severity of the worst finding.
    pub(super) fn severity(&self) -> Severity {
        let severities = self.findings.iter().map(|finding| finding.severity);
        severities.max().unwrap_or(Severity::Good)
    }

    /// Exit code of the process: 0, or 1 if any finding is [`Severity::Bad`].
    pub(crate) fn exit_code(&self) -> u8 {
        u8::from(self.severity() == Severity::Bad)
    }
}

/// An endpoint in the report.
#[derive(Debug, Serialize)]
pub(super) struct EndpointFacts {
    pub(super) url: String,
    /// Why there is no connection or no status.
    pub(super) error: Option<String>,
    pub(super) version: Option<String>,
    pub(super) role: Option<&'static str>,
    pub(super) db_bytes: i64,
    pub(super) db_in_use_bytes: i64,
}

/// Result of quorum checks without credentials.
#[derive(Debug, Default)]
pub(super) struct QuorumFacts {
    /// Whether etcd's auth is on; `None` if no member answered.
    pub(super) auth_is_on: Option<bool>,
    /// Median of the round trips.
    pub(super) round_trip: Option<Duration>,
}

/// Permissions of rangecache's own user, or of anonymous callers while auth is off.
#[derive(Debug)]
pub(super) struct AuthFacts {
    /// Whether etcd accepts the user, or needs none.
    pub(super) is_accepted: bool,
    /// Whether each scope to be mirrored may be read.
    pub(super) readable: Vec<bool>,
}

impl AuthFacts {
    /// Whether members answer status calls.
    pub(super) fn may_read_status(&self) -> bool {
        self.is_accepted
    }

    /// Whether any scope may be read.
    pub(super) fn may_read_keys(&self) -> bool {
        self.is_accepted && self.readable.contains(&true)
    }
}

/// Keys in etcd.
#[derive(Debug)]
pub(super) struct Keyspace {
    /// etcd's revision at the end of the examination.
    pub(super) revision: i64,
    /// Number of readable keys.
    pub(super) keys: u64,
    /// Groups by prefix, in key order.
    pub(super) groups: Vec<KeyGroup>,
    /// Rate at which etcd's revision grows.
    pub(super) revisions_per_second: f64,
    /// Time that etcd took to count all keys of the largest range.
    pub(super) count_took: Duration,
    /// Whether every key was read, not only samples.
    pub(super) is_exact: bool,
    /// Cost of the examination for etcd.
    pub(super) cost: Cost,
}

impl Keyspace {
    /// Estimated size of all keys in etcd's encoding, in bytes.
    pub(super) fn encoded_bytes(&self) -> u64 {
        self.groups
            .iter()
            .map(|group| group.estimate().encoded_bytes)
            .sum()
    }
}

/// Keys of one prefix, with their sizes.
#[derive(Clone, Debug)]
pub(super) struct KeyGroup {
    pub(super) range: PrefixGroup,
    /// Prefix of the resource to which the keys belong; see `resources`.
    pub(super) resource: Bytes,
    /// Index of the scope that mirrors the keys.
    pub(super) mirror: Option<usize>,
    pub(super) sample: SizeSample,
}

impl KeyGroup {
    /// Printable prefix.
    pub(super) fn name(&self) -> String {
        if self.range.prefix.is_empty() {
            return "(all others)".to_owned();
        }
        String::from_utf8_lossy(&self.range.prefix)
            .escape_debug()
            .to_string()
    }

    /// Estimated sizes of all keys.
    pub(super) fn estimate(&self) -> SizeSample {
        self.sample.scaled(self.range.keys)
    }
}

/// Sizes of the keys of a group that were read: a sample, or all.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SizeSample {
    /// Number of keys read.
    pub(super) keys: u64,
    /// Size in etcd's encoding.
    pub(super) encoded_bytes: u64,
    /// Size in the cache.
    pub(super) memory_bytes: u64,
    /// Size in the cache, packed.
    pub(super) packed_bytes: u64,
    /// Size of the largest key-value, encoded.
    pub(super) largest_bytes: u64,
}

impl SizeSample {
    /// Sum of two samples.
    pub(super) fn join(self, other: SizeSample) -> SizeSample {
        SizeSample {
            keys: self.keys + other.keys,
            encoded_bytes: self.encoded_bytes + other.encoded_bytes,
            memory_bytes: self.memory_bytes + other.memory_bytes,
            packed_bytes: self.packed_bytes + other.packed_bytes,
            largest_bytes: self.largest_bytes.max(other.largest_bytes),
        }
    }

    /// Estimated sizes of `keys` such keys.
    pub(super) fn scaled(&self, keys: u64) -> SizeSample {
        let scaled = |bytes: u64| {
            let scaled = u128::from(bytes) * u128::from(keys) / u128::from(self.keys.max(1));
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        SizeSample {
            keys,
            encoded_bytes: scaled(self.encoded_bytes),
            memory_bytes: scaled(self.memory_bytes),
            packed_bytes: scaled(self.packed_bytes),
            largest_bytes: self.largest_bytes,
        }
    }
}

/// Calls that the examination made, their duration and the bytes that they read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    pub(super) calls: u64,
    pub(super) took: Duration,
    pub(super) read_bytes: u64,
}

/// Memory that a mirror would need.
#[derive(Debug, Serialize)]
pub(super) struct MirrorEstimate {
    #[serde(rename = "mirror")]
    pub(super) name: String,
    pub(super) keys: u64,
    #[serde(rename = "bytes")]
    pub(super) encoded_bytes: u64,
    /// Keys, values and nodes.
    pub(super) memory_bytes: u64,
    /// Keys, values and nodes once they are packed.
    pub(super) packed_bytes: u64,
    /// Past revisions, at the current rate of modifications.
    pub(super) history_bytes: u64,
}
