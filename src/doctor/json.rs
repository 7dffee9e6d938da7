//! The report for scripts.

use serde_json::{Value, json};

use super::model::{Area, KeyGroup, Keyspace, Report, level};
use crate::diagnosis::Finding;

impl Report {
    /// Report as one JSON object. `result` is `ok`, `warning` or `bad`; sizes are in bytes.
    pub(super) fn to_json(&self) -> Value {
        json!({
            "rangecache": env!("CARGO_PKG_VERSION"),
            "result": self.result(),
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
            "endpoints": self.endpoints,
            "keyspace": self.keyspace.as_ref().map(keyspace),
            "mirrors": self.mirrors,
            "watches": self.watches,
        })
    }
}

fn finding((area, finding): &(Area, Finding)) -> Value {
    let given = |text: &'_ String| Some(text.clone()).filter(|text| !text.is_empty());
    let (subject, remedy) = (given(&finding.subject), given(&finding.remedy));
    json!({
        "id": finding.id,
        "area": area.as_str(),
        "subject": subject,
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
    let sizes = group.estimate();
    json!({
        "prefix": group.name(),
        "keys": group.range.keys,
        "bytes": sizes.encoded_bytes,
        "memory_bytes": sizes.memory_bytes,
        "packed_bytes": sizes.packed_bytes,
        "largest_bytes": sizes.largest_bytes,
        "mirrored": group.mirror.is_some(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::FindingId;

    #[test]
    fn findings_have_ids_and_what_is_not_known_is_not_ok() {
        let mut report = Report::default();
        report.find(Area::Watches, FindingId::WatchesUnknown, "unknown");
        let down = Finding::new(FindingId::MemberNotConnected, "down").about("http://a:1");
        report.add(Area::Endpoints, down);
        let json = report.to_json();
        assert_eq!(
            json["findings"][0],
            json!({
                "id": "watches-unknown", "area": "watches", "subject": null, "level": "note",
                "text": "unknown", "remedy": null,
            })
        );
        let down = &json["findings"][1];
        assert_eq!(
            (&down["id"], &down["subject"], &down["level"]),
            (
                &"member-not-connected".into(),
                &"http://a:1".into(),
                &"warning".into()
            )
        );
        assert_eq!(json["result"], "warning");
        let mut noted = Report::default();
        noted.find(Area::Watches, FindingId::WatchesUnknown, "unknown");
        assert_eq!(noted.to_json()["result"], "ok", "a note needs no action");
    }
}
