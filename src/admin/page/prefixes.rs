//! The section of the page about prefixes.

use maud::html;

use super::parts::Section;
use crate::admin::prefixes::PrefixStatus;
use crate::diagnosis::format::{bytes, count, rate};

/// The prefixes that cost most; nothing without mirrored keys.
pub(super) fn prefixes(prefixes: &[PrefixStatus]) -> Option<Section> {
    let content = html! {
        div.scroll tabindex="0" role="region" aria-label="Prefixes" {
            table {
                thead {
                    tr {
                        th scope="col" { "prefix" }
                        th scope="col" { "keys" }
                        th scope="col" { "size" }
                        th scope="col" { "reads/s" }
                        th scope="col" { "writes/s" }
                        th scope="col" { "new watches/s" }
                    }
                }
                tbody {
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
                }
            }
        }
    };
    (!prefixes.is_empty()).then(|| Section::new("prefixes", "Prefixes", content))
}

fn size(of: &PrefixStatus) -> String {
    match of.not_held_bytes {
        0 => bytes(of.bytes),
        part => format!("{}, {} of it only in etcd", bytes(of.bytes), bytes(part)),
    }
}
