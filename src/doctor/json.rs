//! The report for scripts.

use serde_json::{Value, json};

use super::keyspace::{Group, Keyspace};
use super::report::{Finding, Report};

impl Report {
    /// The report as one JSON object. `result` is the worst level: `ok`, `warning` or `bad`; sizes are in bytes.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let findings: Vec<_> = self.findings.iter().map(finding).collect();
        let endpoints: Vec<_> = self
            .endpoints
            .iter()
            .map(|endpoint| {
                json!({
                    "url": endpoint.url,
                    "error": endpoint.error,
                    "version": endpoint.version,
                    "role": endpoint.role,
                    "db_bytes": endpoint.db_bytes,
                    "db_in_use_bytes": endpoint.db_in_use_bytes,
                })
            })
            .collect();
        let mirrors: Vec<_> = self
            .needs
            .iter()
            .map(|need| {
                json!({
                    "mirror": need.name,
                    "keys": need.keys,
                    "bytes": need.encoded_bytes,
                    "memory_bytes": need.memory_bytes,
                    "history_bytes": need.history_bytes,
                })
            })
            .collect();
        json!({
            "rangecache": env!("CARGO_PKG_VERSION"),
            "result": self.level().as_str(),
            "findings": findings,
            "endpoints": endpoints,
            "keyspace": self.keyspace.as_ref().map(keyspace),
            "mirrors": mirrors,
        })
    }
}

fn finding(finding: &Finding) -> Value {
    json!({
        "area": finding.area.as_str(),
        "level": finding.level.as_str(),
        "text": finding.text,
        "remedy": finding.remedy,
    })
}

fn keyspace(keyspace: &Keyspace) -> Value {
    let groups: Vec<_> = keyspace.groups.iter().map(group).collect();
    json!({
        "revision": keyspace.revision,
        "keys": keyspace.keys,
        "bytes": keyspace.groups.iter().map(Group::encoded_bytes).sum::<u64>(),
        "exact": keyspace.exact,
        "revisions_per_second": keyspace.revisions_per_second,
        "prefixes": groups,
        "cost": {
            "calls": keyspace.cost.calls,
            "seconds": keyspace.cost.took.as_secs_f64(),
            "read_bytes": keyspace.cost.read_bytes,
        },
    })
}

fn group(group: &Group) -> Value {
    json!({
        "prefix": group.name(),
        "keys": group.keys,
        "bytes": group.encoded_bytes(),
        "memory_bytes": group.memory_bytes(),
        "largest_bytes": group.weight.largest_bytes,
        "mirrored": group.mirror.is_some(),
    })
}
