//! The report for scripts.

use serde_json::{Value, json};

use super::model::{Area, KeyGroup, Keyspace, Report, level};
use crate::diagnosis::Finding;

impl Report {
    /// Report as one JSON object. `result` is the worst level (`ok`, `warning` or `bad`); sizes are in bytes.
    pub(super) fn to_json(&self) -> Value {
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
        let watches = self.watches.as_ref().map(|watches| {
            json!({
                "members": watches.members,
                "watchers": watches.watchers,
                "streams": watches.streams,
                "events_sent": watches.events_sent,
                "changes": watches.changes,
            })
        });
        let mirrors: Vec<_> = self
            .mirrors
            .iter()
            .map(|mirror| {
                json!({
                    "mirror": mirror.name,
                    "keys": mirror.keys,
                    "bytes": mirror.encoded_bytes,
                    "memory_bytes": mirror.memory_bytes,
                    "history_bytes": mirror.history_bytes,
                })
            })
            .collect();
        json!({
            "rangecache": env!("CARGO_PKG_VERSION"),
            "result": level(self.severity()),
            "findings": findings,
            "endpoints": endpoints,
            "keyspace": self.keyspace.as_ref().map(keyspace),
            "mirrors": mirrors,
            "watches": watches,
        })
    }
}

fn finding((area, finding): &(Area, Finding)) -> Value {
    let remedy = Some(&finding.remedy).filter(|text| !text.is_empty());
    json!({
        "area": area.as_str(),
        "level": level(finding.severity),
        "text": finding.text(),
        "remedy": remedy,
    })
}

fn keyspace(keyspace: &Keyspace) -> Value {
    let groups: Vec<_> = keyspace.groups.iter().map(group).collect();
    let resources = keyspace.resources();
    let resources: Vec<_> = resources.iter().map(|resource| group(&resource.total)).collect();
    json!({
        "revision": keyspace.revision,
        "keys": keyspace.keys,
        "bytes": keyspace.groups.iter().map(KeyGroup::encoded_bytes).sum::<u64>(),
        "exact": keyspace.is_exact,
        "revisions_per_second": keyspace.revisions_per_second,
        "resources": resources,
        "prefixes": groups,
        "cost": {
            "calls": keyspace.cost.calls,
            "seconds": keyspace.cost.took.as_secs_f64(),
            "read_bytes": keyspace.cost.read_bytes,
        },
    })
}

fn group(group: &KeyGroup) -> Value {
    json!({
        "prefix": group.name(),
        "keys": group.range.keys,
        "bytes": group.encoded_bytes(),
        "memory_bytes": group.memory_bytes(),
        "largest_bytes": group.sample.largest_bytes,
        "mirrored": group.mirror.is_some(),
    })
}
