//! Every number of every round as JSON, to compare runs.

use serde_json::{Value, json};

use crate::report::{Report, Row};
use crate::table::Heading;

/// The whole report as JSON. Figures are in nanoseconds, bytes, calls per second, bytes per second or plain factors.
pub(crate) fn write(heading: &Heading, report: &Report) -> String {
    let document = json!({
        "machine": heading.machine,
        "versions": heading.versions,
        "rounds": heading.rounds,
        "load_before": heading.load_before,
        "rows": report.rows.iter().map(row).collect::<Vec<_>>(),
        "notes": report.notes,
    });
    format!("{document:#}\n")
}

fn row(row: &Row) -> Value {
    let figures: serde_json::Map<String, Value> = row
        .figures
        .iter()
        .map(|(kind, stat)| {
            (
                kind.name().into(),
                json!({"median": stat.median, "min": stat.min, "max": stat.max}),
            )
        })
        .collect();
    let rounds: serde_json::Map<String, Value> = row
        .series
        .iter()
        .flatten()
        .map(|(kind, blocks)| {
            let blocks: Vec<Value> = blocks
                .iter()
                .map(|block| {
                    json!({
                        "calls": block.calls,
                        "bytes": block.bytes,
                        "errors": block.errors,
                        "first_error": block.first_error,
                        "seconds": block.seconds,
                        "p50_ns": block.percentiles_ns[0],
                        "p99_ns": block.percentiles_ns[1],
                        "p999_ns": block.percentiles_ns[2],
                        "cpu_client_ns": block.cpu_client_ns,
                        "cpu_proxy_ns": block.cpu_proxy_ns,
                        "cpu_etcd_ns": block.cpu_etcd_ns,
                        "extra": block.extra,
                    })
                })
                .collect();
            (kind.name().into(), blocks.into())
        })
        .collect();
    json!({
        "goal": row.goal,
        "what": row.what,
        "unit": format!("{:?}", row.unit),
        "figures": figures,
        "asked": row.goal_text(),
        "reached": row.reached(),
        "rounds": rounds,
    })
}
