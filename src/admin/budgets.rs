//! The bounds that flags set, and what is used of them.

use serde::Serialize;

use super::Admin;
use super::status::Mirror;

/// A bound, and what is used of it.
#[derive(Debug, Serialize)]
pub(super) struct Budget {
    pub(super) name: String,
    /// Without its dashes.
    pub(super) flag: &'static str,
    pub(super) in_bytes: bool,
    pub(super) used: u64,
    pub(super) limit: u64,
    pub(super) ratio: f64,
    #[serde(skip)]
    pub(super) at_the_bound: &'static str,
}

impl Budget {
    /// Whether somebody should look before the bound is reached. History is meant to be used up.
    pub(super) fn is_nearly_used_up(&self) -> bool {
        self.ratio >= 0.9 && self.flag != "history-max-bytes"
    }
}

/// Those that somebody may have to raise.
pub(super) fn budgets(admin: &Admin, mirrors: &[Mirror]) -> Vec<Budget> {
    let metrics = &admin.telemetry.metrics;
    let gauge = |value: i64| u64::try_from(value).unwrap_or(0);
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "bounds are whole and far below 2^53"
    )]
    let budget =
        |name: &str, limit: &'static str, flag: &'static str, used: u64, at_the_bound: &'static str| {
            let limit_value = metrics.process.limit(limit)?;
            Some(Budget {
                name: name.to_owned(),
                flag,
                in_bytes: limit.ends_with("_bytes"),
                used,
                limit: limit_value as u64,
                ratio: used as f64 / limit_value.max(1.0),
                at_the_bound,
            })
        };
    let connections = gauge(metrics.connections.open.get());
    let mut budgets = vec![budget(
        "Memory of all mirrors",
        "cache_max_bytes",
        "cache-max-bytes",
        mirrors.iter().map(|mirror| mirror.memory_bytes).sum(),
        "At the bound a mirror steps aside, and its reads go to etcd.",
    )];
    budgets.extend(mirrors.iter().map(|mirror| {
        budget(
            &format!("History of {}", mirror.name),
            "history_max_bytes",
            "history-max-bytes",
            mirror.history_bytes,
            "At the bound the oldest revisions go; reads of them go to etcd.",
        )
    }));
    budgets.extend([
        budget(
            "Client connections",
            "max_connections",
            "max-connections",
            connections,
            "At the bound further connections wait.",
        ),
        budget(
            "Calls under way",
            "max_calls",
            "max-calls",
            (admin.tasks.len() as u64).saturating_sub(connections),
            "At the bound calls are refused with Unavailable.",
        ),
        budget(
            "Large reads under way to etcd",
            "forward_max_large",
            "forward-max-large",
            gauge(metrics.forwarding.large.get()),
            "At the bound further ones wait.",
        ),
        budget(
            "Large reads that wait for etcd",
            "forward_max_waiting",
            "forward-max-waiting",
            gauge(metrics.forwarding.waiting.get()),
            "At the bound further ones are refused with Unavailable.",
        ),
        budget(
            "Answers that reads share",
            "forward_shared_max_bytes",
            "forward-shared-max-bytes",
            gauge(metrics.forwarding.shared_bytes.get()),
            "At the bound such reads are refused with ResourceExhausted.",
        ),
        budget(
            "Streams from etcd that are held",
            "stream_max_bytes",
            "stream-max-bytes",
            gauge(metrics.forwarding.stream_held_bytes.get()),
            "At the bound reads are forwarded as they came.",
        ),
    ]);
    budgets.into_iter().flatten().collect()
}
