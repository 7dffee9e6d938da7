//! Results of the examination: findings, and figures about endpoints, keyspace and mirrors. One struct, which is the report for
//! scripts.

use std::time::Duration;

use bytes::Bytes;
use serde::{Serialize, Serializer};

use etcd_store::keyspace::PrefixGroup;
use etcd_store::keyspace::scope::Scope;
use rangecache_report::{Finding, FindingId, Severity};

/// Result of `rangecache doctor`; sizes are in bytes.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// Version of rangecache.
    #[serde(rename = "rangecache")]
    pub(super) version: &'static str,
    /// Severity of the worst finding. Notes need no action, so that they count as good.
    pub(super) result: Severity,
    /// Findings in the order in which they were found, with their areas.
    #[serde(serialize_with = "in_areas")]
    pub(super) findings: Vec<Finding>,
    pub(super) endpoints: Vec<EndpointFacts>,
    pub(super) keyspace: Option<Keyspace>,
    pub(super) mirrors: Vec<MirrorEstimate>,
    /// `None` if no member's metrics can be read.
    pub(super) watches: Option<WatchFacts>,
}

impl Report {
    /// Adds a finding with the usual severity and remedy of `id`.
    pub(super) fn find(&mut self, id: FindingId, text: impl Into<String>) {
        self.add(Finding::new(id, text));
    }

    pub(super) fn add(&mut self, finding: Finding) {
        if finding.severity > Severity::Note {
            self.result = self.result.max(finding.severity);
        }
        self.findings.push(finding);
    }

    /// Exit code of the process: 0, or 1 if any finding is [`Severity::Bad`].
    pub(crate) fn exit_code(&self) -> u8 {
        u8::from(self.result == Severity::Bad)
    }
}

fn in_areas<S: Serializer>(findings: &[Finding], serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct InArea<'a> {
        area: &'static str,
        #[serde(flatten)]
        finding: &'a Finding,
    }
    serializer.collect_seq(findings.iter().map(|finding| InArea {
        area: finding.id.area().as_str(),
        finding,
    }))
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

/// Watches on the members whose metrics can be read.
#[derive(Debug, Serialize)]
pub(super) struct WatchFacts {
    pub(super) members: u64,
    pub(super) watchers: u64,
    pub(super) streams: u64,
    /// Events sent to watchers since the members started.
    pub(super) events_sent: u64,
    /// Puts and deletes since the first of the members started.
    pub(super) changes: u64,
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
    /// Whether etcd accepts the user, or needs none; members answer status calls only then.
    pub(super) is_accepted: bool,
    /// The scopes to be mirrored.
    pub(super) scopes: Vec<Scope>,
    /// Whether each of them may be read.
    pub(super) readable: Vec<bool>,
}

impl AuthFacts {
    /// Whether any scope may be read.
    pub(super) fn may_read_keys(&self) -> bool {
        self.is_accepted && self.readable.contains(&true)
    }

    /// The scopes that may be read, with their indexes.
    pub(super) fn readable_scopes(&self) -> impl Iterator<Item = (usize, &Scope)> {
        let scopes = self.scopes.iter().enumerate();
        scopes.filter(|(index, _)| self.readable[*index])
    }
}

/// Keys in etcd.
#[derive(Debug, Serialize)]
pub(super) struct Keyspace {
    /// etcd's revision at the end of the examination.
    pub(super) revision: i64,
    /// Number of readable keys.
    pub(super) keys: u64,
    /// Estimated size of all keys in etcd's encoding.
    pub(super) bytes: u64,
    /// Whether every key was read, not only samples.
    #[serde(rename = "exact")]
    pub(super) is_exact: bool,
    /// Rate at which etcd's revision grows.
    pub(super) revisions_per_second: f64,
    /// Time that etcd took to count all keys of the largest range.
    #[serde(skip)]
    pub(super) count_took: Duration,
    /// Prefixes of `--no-cache-prefix` under which there is no key.
    #[serde(skip)]
    pub(super) useless_exclusions: Vec<String>,
    /// Totals of the prefixes by resource: what one list reads.
    pub(super) resources: Vec<PrefixFacts>,
    /// In key order.
    pub(super) prefixes: Vec<PrefixFacts>,
    /// Cost of the examination for etcd.
    pub(super) cost: Cost,
}

/// Keys of a prefix or of a resource, with their estimated sizes.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PrefixFacts {
    /// Printable prefix.
    pub(super) prefix: String,
    #[serde(flatten)]
    pub(super) sizes: SizeSample,
    /// Index of the scope that mirrors the keys.
    #[serde(rename = "mirrored", serialize_with = "is_some")]
    pub(super) mirror: Option<usize>,
    /// Prefix of the resource to which the keys belong; see [`resource_of`].
    #[serde(skip)]
    pub(super) resource: Bytes,
}

#[allow(clippy::ref_option, reason = "serde passes references")]
fn is_some<S: Serializer>(mirror: &Option<usize>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bool(mirror.is_some())
}

impl PrefixFacts {
    /// Totals per resource, in the order of its first prefix. A resource is what one list reads: in a Kubernetes keyspace a type of
    /// objects in all namespaces. Keys of it that are mirrored and those that are not have totals of their own.
    pub(super) fn totals(prefixes: &[PrefixFacts]) -> Vec<PrefixFacts> {
        let mut totals: Vec<PrefixFacts> = Vec::new();
        for part in prefixes {
            match totals.iter_mut().find(|total| total.has(part)) {
                // Estimates: samples of different density would distort the sum.
                Some(total) => total.sizes = total.sizes.join(part.sizes),
                None => totals.push(PrefixFacts {
                    prefix: printable(&part.resource),
                    ..part.clone()
                }),
            }
        }
        totals
    }

    /// Whether `part` belongs to this total.
    pub(super) fn has(&self, part: &PrefixFacts) -> bool {
        self.resource == part.resource && self.mirror == part.mirror
    }
}

/// Keys of one prefix while they are counted and sampled.
#[derive(Debug)]
pub(super) struct KeyGroup {
    pub(super) range: PrefixGroup,
    /// Prefix of the resource to which the keys belong; see [`resource_of`].
    pub(super) resource: Bytes,
    /// Index of the scope that mirrors the keys.
    pub(super) mirror: Option<usize>,
    pub(super) sample: SizeSample,
}

impl KeyGroup {
    /// A group without a sample; one without a common prefix is a remainder of the resource `parent`.
    pub(super) fn new(range: PrefixGroup, mirror: Option<usize>, parent: &Bytes) -> KeyGroup {
        let of = if range.prefix.is_empty() {
            parent
        } else {
            &range.prefix
        };
        KeyGroup {
            resource: Bytes::copy_from_slice(resource_of(of)),
            range,
            mirror,
            sample: SizeSample::default(),
        }
    }

    pub(super) fn facts(self) -> PrefixFacts {
        PrefixFacts {
            prefix: printable(&self.range.prefix),
            sizes: self.sample.scaled(self.range.keys),
            mirror: self.mirror,
            resource: self.resource,
        }
    }
}

/// Prefix of the resource that a key or a prefix belongs to: its first two parts, `/registry/pods/`; the first three of
/// resources in a group, `/registry/apps.example.com/jobs/`, and of the two kinds of Kubernetes' services. A prefix with fewer
/// parts is its own resource. Keys without parts are one resource, the empty prefix: what begins with the same letter has
/// nothing in common.
pub(super) fn resource_of(prefix: &[u8]) -> &[u8] {
    let ends = ends(prefix);
    if ends.is_empty() && prefix.first() != Some(&b'/') {
        return &[];
    }
    let parts = if has_resources(prefix) { 3 } else { 2 };
    ends.get(parts - 1).map_or(prefix, |end| &prefix[..=*end])
}

/// Whether the second part of `prefix` is a group of resources.
fn has_resources(prefix: &[u8]) -> bool {
    let ends = ends(prefix);
    let (Some(first), Some(second)) = (ends.first(), ends.get(1)) else {
        return false;
    };
    let part = &prefix[first + 1..*second];
    part.contains(&b'.') || part == b"services"
}

/// Whether `prefix` is a group of resources as a whole, which belongs divided.
pub(super) fn is_group(prefix: &[u8]) -> bool {
    has_resources(prefix) && ends(prefix).len() == 2
}

/// Positions of the slashes that end parts.
fn ends(prefix: &[u8]) -> Vec<usize> {
    let lead = usize::from(prefix.first() == Some(&b'/'));
    let slashes = prefix.iter().enumerate().skip(lead);
    slashes
        .filter(|(_, byte)| **byte == b'/')
        .map(|(at, _)| at)
        .collect()
}

fn printable(prefix: &[u8]) -> String {
    match prefix {
        b"" => "(all others)".to_owned(),
        prefix => String::from_utf8_lossy(prefix).escape_debug().to_string(),
    }
}

/// Sizes of keys that were read, a sample or all; or estimates from those.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct SizeSample {
    /// Number of keys.
    pub(super) keys: u64,
    /// Size in etcd's encoding.
    #[serde(rename = "bytes")]
    pub(super) encoded_bytes: u64,
    /// Size in the cache: keys, values and nodes.
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
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Cost {
    pub(super) calls: u64,
    #[serde(rename = "seconds", serialize_with = "in_seconds")]
    pub(super) took: Duration,
    pub(super) read_bytes: u64,
}

fn in_seconds<S: Serializer>(took: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(took.as_secs_f64())
}

/// Memory that a mirror would need.
#[derive(Debug, Serialize)]
pub(super) struct MirrorEstimate {
    #[serde(rename = "mirror")]
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) sizes: SizeSample,
    /// Past revisions, at the current rate of modifications.
    pub(super) history_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_what_one_list_reads() {
        for (prefix, resource, group) in [
            ("/registry/pods/kube-system/", "/registry/pods/", false),
            ("/registry/pods/", "/registry/pods/", false),
            ("/registry/", "/registry/", false),
            ("/registry/health", "/registry/health", false),
            ("/registry/apps.example.com/", "/registry/apps.example.com/", true),
            (
                "/registry/apps.example.com/jobs/a/",
                "/registry/apps.example.com/jobs/",
                false,
            ),
            ("/registry/services/", "/registry/services/", true),
            ("/registry/services/specs/a/", "/registry/services/specs/", false),
            ("cilium/state/x/", "cilium/state/", false),
            ("lonely", "", false),
            ("l", "", false),
            ("/lonely", "/lonely", false),
            ("", "", false),
        ] {
            let found = String::from_utf8_lossy(resource_of(prefix.as_bytes()));
            assert_eq!(found, resource, "{prefix}");
            assert_eq!(is_group(prefix.as_bytes()), group, "{prefix}");
        }
        let pods = Bytes::from_static(b"/registry/pods/");
        let remainder = KeyGroup::new(PrefixGroup::default(), None, &pods);
        assert_eq!(remainder.resource, pods);
    }
}
