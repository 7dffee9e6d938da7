//! The section of the page about clients.

use maud::html;

use super::parts::{Section, table};
use crate::admin::status::clients::ClientStatus;
use crate::diagnosis::format::{bytes, count, rate};

/// Table of the clients and their costs, the most costly first; nothing before the first client.
pub(super) fn clients(clients: &[ClientStatus]) -> Option<Section> {
    let titles = [
        "client",
        "calls/s",
        "from etcd/s",
        "per second",
        "in flight",
        "watches",
        "calls",
        "lists",
        "sent",
        "refused",
        "user agent",
    ];
    let rows = html! {
        @for client in clients {
            tr {
                th scope="row" { (client.kind) " " code { (client.name) } }
                td { (rate(client.calls_per_second)) }
                td { (rate(client.etcd_calls_per_second)) }
                td { (bytes(whole(client.bytes_per_second))) }
                td { (count(client.calls_in_flight)) }
                td { (count(client.watches)) }
                td { (count(client.calls)) }
                td { (count(client.lists)) }
                td { (bytes(client.sent_bytes)) }
                td { (count(client.refused)) }
                td { (client.user_agent) }
            }
        }
    };
    let content = table("Clients", titles, &rows);
    (!clients.is_empty()).then(|| Section::new("clients", "Clients", content))
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is not negative and far below 2^53"
)]
fn whole(rate: f64) -> u64 {
    rate as u64
}
