//! The section of the page about gRPC calls.

use std::time::Duration;

use maud::html;

use super::parts::{Section, table};
use crate::admin::status::model::Status;
use crate::diagnosis::format::{count, long};

/// Calls of every method by their code and what answered them, the most frequent code first; nothing without calls.
pub(super) fn calls(status: &Status) -> Option<Section> {
    let window = Duration::from_secs_f64(status.reads.window_seconds.round().max(1.0));
    let titles = [
        "code",
        "calls",
        "from memory",
        "by etcd",
        "failed",
        "refused",
        "cancelled",
    ];
    let rows = html! {
        @for code in &status.calls {
            tr {
                th scope="row" { code { (code.grpc_code) } }
                td { (count(code.calls)) }
                @for calls in [code.memory, code.etcd, code.failed, code.refused, code.none] {
                    td { (count(calls)) }
                }
            }
        }
    };
    let content = html! {
        p.quiet { "gRPC calls of every method that ended in the last " (long(window)) ", by code." }
        (table("Calls by code", titles, &rows))
    };
    (!status.calls.is_empty()).then(|| Section::new("calls", "Calls by status code", content))
}
