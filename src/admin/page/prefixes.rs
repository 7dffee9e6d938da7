//! The section of the page about prefixes.

use maud::html;

use super::parts::{Section, table};
use crate::admin::prefixes::PrefixStatus;
use crate::diagnosis::format::{bytes, count, rate};

/// The prefixes that cost most; nothing without mirrored keys.
pub(super) fn prefixes(prefixes: &[PrefixStatus]) -> Option<Section> {
    let titles = ["prefix", "keys", "size", "reads/s", "writes/s", "new watches/s"];
    let rows = html! {
        @for of in prefixes {
            tr {
                th scope="row" { code { (of.prefix) } }
                td { (count(of.keys)) }
                td { (size(of)) }
                td { (rate(of.reads_per_second)) }
                td { (rate(of.writes_per_second)) }
                td { (rate(of.watches_per_second)) }
            }
        }
    };
    let content = table("Prefixes", titles, &rows);
    (!prefixes.is_empty()).then(|| Section::new("prefixes", "Prefixes", content))
}

fn size(of: &PrefixStatus) -> String {
    match of.not_held_bytes {
        0 => bytes(of.bytes),
        part => format!("{}, {} of it only in etcd", bytes(of.bytes), bytes(part)),
    }
}
