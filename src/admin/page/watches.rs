//! The section of the page about watches.

use maud::{Markup, html};

use super::charts::{self, Layer};
use super::parts::{Section, key, plot};
use super::state::pair;
use crate::admin::status::model::{Status, WatchStatus};
use crate::admin::status::samples::OpenWatches;
use crate::diagnosis::format::{bytes, count, counted, rate};
use crate::diagnosis::reasons::explain_reason;

/// Open watch streams over time by what serves them, and how memory serves its own.
pub(super) fn watches(status: &Status) -> Section {
    let watches = &status.watches;
    let layer = |class, of: fn(OpenWatches) -> u64| Layer {
        class,
        values: status
            .samples
            .0
            .iter()
            .map(|sample| as_height(of(sample.added.watches)))
            .collect(),
    };
    let layers = [
        layer("memory", |open| open.memory),
        layer("etcd", |open| open.etcd),
    ];
    let content = html! {
        p.quiet { "Open watch streams, by what serves them." }
        ul.legend {
            (key("memory", "from memory", Some("watches-memory"), &count(watches.open.memory)))
            (key("etcd", "by etcd", Some("watches-etcd"), &count(watches.open.etcd)))
        }
        (plot(&charts::stacked(&layers, "Open watch streams, by what serves them"), rate))
        (details(watches))
    };
    Section::new("watches", "Watches", content)
}

/// Figures of the streams that memory serves, and the reasons why etcd serves the others; nothing if memory has served
/// none, as with `--watch-cache=off`.
fn details(watches: &WatchStatus) -> Markup {
    html! {
        dl.pairs {
            @if watches.memory_streams > 0 || watches.events_sent > 0 {
                (pair("watchers served from memory", &count(watches.watchers)))
                (pair("events sent from memory", &count(watches.events_sent)))
                (pair("slowest watcher behind by", &counted(watches.behind_revisions, "revision")))
                (pair("memory", &bytes(watches.memory_bytes)))
            }
            @for stream in &watches.etcd_streams {
                (pair(&format!("by etcd: {}", explain_reason(stream.reason).title), &count(stream.count)))
            }
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "a height")]
fn as_height(open: u64) -> f64 {
    open as f64
}
