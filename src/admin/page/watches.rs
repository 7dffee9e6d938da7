//! The section of the page about watches.

use maud::{Markup, html};

use super::parts::section;
use super::state::pair;
use crate::admin::status::model::WatchStatus;
use crate::diagnosis::format::{bytes, count, counted};
use crate::diagnosis::reasons::explain_reason;

/// Who serves the open watch streams; nothing if there was none since the start, as with `--watch-cache=off`.
pub(super) fn watches(status: &WatchStatus) -> Markup {
    if status.memory_streams == 0 && status.etcd_streams.is_empty() && status.events_sent == 0 {
        return html! {};
    }
    let content = html! {
        ul.cards {
            li.card {
                h3 { "Streams from memory" }
                dl {
                    (pair("streams", &count(status.memory_streams)))
                    (pair("watchers", &count(status.watchers)))
                    (pair("events sent", &count(status.events_sent)))
                    (pair("slowest watcher behind by", &counted(status.behind_revisions, "revision")))
                    (pair("memory", &bytes(status.memory_bytes)))
                }
            }
            @if !status.etcd_streams.is_empty() {
                li.card {
                    h3 { "Streams that etcd serves" }
                    dl {
                        @for stream in &status.etcd_streams {
                            (pair(explain_reason(stream.reason).title, &count(stream.count)))
                        }
                    }
                }
            }
        }
    };
    section("watches", "Watches", &content)
}
