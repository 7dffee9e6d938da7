//! Sections of the page that are tables: gRPC calls by code, prefixes and clients.

use maud::{Markup, html};
use rangecache_base::telemetry::clients::ClientFigures;

use super::parts::{Section, table};
use super::reads::window;
use crate::status::model::{CodeStatus, Status};
use crate::{memory::size_in_words, prefixes::PrefixStatus};
use rangecache_report::format::{bytes, count, rate};

/// Title of a column, and its cell in the row of an item.
type Column<T> = (&'static str, fn(&T) -> Markup);

const CALLS: &[Column<CodeStatus>] = &[
    ("code", |of| html! { code { (of.grpc_code) } }),
    ("calls", |of| html! { (count(of.calls)) }),
    ("from memory", |of| html! { (count(of.memory)) }),
    ("by etcd", |of| html! { (count(of.etcd)) }),
    ("failed", |of| html! { (count(of.failed)) }),
    ("refused", |of| html! { (count(of.refused)) }),
    ("cancelled", |of| html! { (count(of.none)) }),
];

const PREFIXES: &[Column<PrefixStatus>] = &[
    ("prefix", |of| html! { code { (of.prefix) } }),
    ("keys", |of| html! { (count(of.size.count)) }),
    ("size", |of| html! { (size_in_words(&of.size)) }),
    ("reads/s", |of| html! { (rate(of.reads_per_second)) }),
    ("writes/s", |of| html! { (rate(of.writes_per_second)) }),
    ("new watches/s", |of| html! { (rate(of.watches_per_second)) }),
];

const CLIENTS: &[Column<ClientFigures>] = &[
    (
        "client",
        |of| html! { (of.name.kind().as_str()) " " code { (of.name.as_str()) } },
    ),
    ("calls/s", |of| html! { (rate(of.rates.calls)) }),
    ("from etcd/s", |of| html! { (rate(of.rates.from_etcd)) }),
    ("per second", |of| html! { (bytes(whole(of.rates.bytes))) }),
    ("in flight", |of| html! { (count(of.in_flight)) }),
    ("watches", |of| html! { (count(of.watches)) }),
    ("calls", |of| html! { (count(of.calls)) }),
    ("lists", |of| html! { (count(of.lists)) }),
    ("sent", |of| html! { (bytes(of.sent_bytes)) }),
    ("refused", |of| html! { (count(of.refused)) }),
    ("user agent", |of| html! { (of.agent) }),
];

/// Calls of every method by their code and what answered them, the most frequent code first; nothing without calls.
pub(super) fn calls(status: &Status) -> Option<Section> {
    let content = html! {
        p.quiet { "gRPC calls of every method that ended in the last " (window(status)) ", by code." }
        (rows("Calls by code", CALLS, &status.calls))
    };
    (!status.calls.is_empty()).then(|| Section::new("calls", "Calls by status code", content))
}

/// The prefixes that cost most; nothing without mirrored keys.
pub(super) fn prefixes(prefixes: &[PrefixStatus]) -> Option<Section> {
    let content = rows("Prefixes", PREFIXES, prefixes);
    (!prefixes.is_empty()).then(|| Section::new("prefixes", "Prefixes", content))
}

/// The clients and their costs, the most costly first; nothing before the first client.
pub(super) fn clients(clients: &[ClientFigures]) -> Option<Section> {
    let content = rows("Clients", CLIENTS, clients);
    (!clients.is_empty()).then(|| Section::new("clients", "Clients", content))
}

/// Table with a row for each item; its first cell is the row's title.
fn rows<T>(label: &str, columns: &[Column<T>], items: &[T]) -> Markup {
    let titles = columns.iter().map(|(title, _)| *title);
    let rows = html! {
        @for item in items {
            tr {
                @for (at, (_, cell)) in columns.iter().enumerate() {
                    @if at == 0 { th scope="row" { (cell(item)) } } @else { td { (cell(item)) } }
                }
            }
        }
    };
    table(label, titles, &rows)
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is not negative and far below 2^53"
)]
fn whole(rate: f64) -> u64 {
    rate as u64
}
