//! The section of the page about prefixes.

use maud::html;

use super::parts::{Section, table};
use crate::admin::memory::size_in_words;
use crate::admin::prefixes::PrefixStatus;
use crate::diagnosis::format::{count, rate};

/// The prefixes that cost most; nothing without mirrored keys.
pub(super) fn prefixes(prefixes: &[PrefixStatus]) -> Option<Section> {
    let titles = ["prefix", "keys", "size", "reads/s", "writes/s", "new watches/s"];
    let rows = html! {
        @for of in prefixes {
            tr {
                th scope="row" { code { (of.prefix) } }
                td { (count(of.size.count)) }
                td { (size_in_words(&of.size)) }
                td { (rate(of.reads_per_second)) }
                td { (rate(of.writes_per_second)) }
                td { (rate(of.watches_per_second)) }
            }
        }
    };
    let content = table("Prefixes", titles, &rows);
    (!prefixes.is_empty()).then(|| Section::new("prefixes", "Prefixes", content))
}
