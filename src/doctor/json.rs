//! The report for scripts.

use serde_json::{Value, json};

use super::model::{Area, KeyGroup, Keyspace, Report, level};
use crate::diagnosis::Finding;

impl Report {
    /// Report as one JSON object. `result` is the worst level (`ok`, `warning` or `bad`); sizes are in bytes.
    pub(super) fn to_json(&self) -> Value {
        json!({
            "rangecache": env!("CARGO_PKG_VERSION"),
            "result": level(self.severity()),
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
            "endpoints": self.endpoints,
            "keyspace": self.keyspace.as_ref().map(keyspace),
            "mirrors": self.mirrors,
            "watches": self.watches,
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
    let resources = keyspace.resources();
    json!({
        "revision": keyspace.revision,
        "keys": keyspace.keys,
        "bytes": keyspace.encoded_bytes(),
        "exact": keyspace.is_exact,
        "revisions_per_second": keyspace.revisions_per_second,
        "resources": resources.iter().map(|resource| group(&resource.total)).collect::<Vec<_>>(),
        "prefixes": keyspace.groups.iter().map(group).collect::<Vec<_>>(),
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
        "packed_bytes": group.packed_bytes(),
        "largest_bytes": group.sample.largest_bytes,
        "mirrored": group.mirror.is_some(),
    })
}
