//! Watches: how many clients have on each member, and how often etcd has sent each change, as far as its metrics can
//! be read.

use futures_util::future::join_all;
use http::Method;
use tokio::time::timeout;

use super::members::{CALL_TIMEOUT, Member};
use super::model::{Report, WatchFacts};
use etcd_store::keyspace::scope::scopes;
use rangecache_base::http_request::http_request;
use rangecache_base::net::Url;
use rangecache_config::Config;
use rangecache_edge::tls::{Connector, Protocol};
use rangecache_report::FindingId;
use rangecache_report::format::counted;

/// Longest metrics of a member that are read, in bytes.
const MAX_METRICS_BYTES: usize = 16 << 20;

/// Adds a finding on the watches of all members that can be reached.
pub(super) async fn examine(config: &Config, connector: &Connector, members: &[Member], report: &mut Report) {
    let reachable = members.iter().filter(|member| member.connection().is_some());
    let reading = reachable.map(|member| timeout(CALL_TIMEOUT, read(connector, &member.url)));
    let read = join_all(reading).await;
    if read.is_empty() {
        // That no member is connected is the finding of another step.
        return;
    }
    let known = read.into_iter().filter_map(|read| read.ok().flatten());
    let Some(facts) = known.reduce(|one, other| WatchFacts {
        members: one.members + other.members,
        watchers: one.watchers + other.watchers,
        streams: one.streams + other.streams,
        events_sent: one.events_sent + other.events_sent,
        // Each member applies every change.
        changes: one.changes.max(other.changes),
    }) else {
        let text =
            "unknown: etcd's metrics cannot be read at its client URLs (`--listen-metrics-urls` of etcd)";
        return report.find(FindingId::WatchesUnknown, text);
    };
    let feeds = scopes(&config.mirror.cache_prefix, &config.mirror.no_cache_prefix).len() as u64;
    let text = format!(
        "{} in {}, counted on {}; {} sent for {} since the members started",
        counted(facts.watchers, "watcher"),
        counted(facts.streams, "stream"),
        counted(facts.members, "member"),
        counted(facts.events_sent, "event"),
        counted(facts.changes, "change"),
    );
    report.find(FindingId::WatchesCounted, text);
    let saved = facts.watchers.saturating_sub(feeds);
    if saved > 0 {
        let how = if config.watch.is_from_memory() {
            ""
        } else {
            " (with --watch-cache=auto)"
        };
        let feeds = counted(feeds, "feed");
        let text = format!(
            "if clients watch mirrored keys through rangecache{how}, etcd has {feeds} instead, and sends each change once to each: \
             up to {saved} fewer"
        );
        report.find(FindingId::WatchesSaved, text);
    }
    report.watches = Some(facts);
}

/// Reads the metrics of a member; `None` if they are not there.
async fn read(connector: &Connector, url: &Url) -> Option<WatchFacts> {
    let stream = connector.connect(url, Protocol::Http1).await.ok()?;
    let (_, text) = http_request(
        stream,
        Method::GET,
        &url.authority(),
        "/metrics",
        MAX_METRICS_BYTES,
    )
    .await
    .ok()?;
    parse(&text)
}

fn parse(metrics: &str) -> Option<WatchFacts> {
    let value = |name: &str| {
        let samples = metrics.lines().filter(|line| !line.starts_with('#'));
        let mut of_name = samples.filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = of_name.next()?.trim().parse::<f64>().ok()?;
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count is whole, and far below 2^53"
        )]
        Some(value.max(0.0) as u64)
    };
    Some(WatchFacts {
        members: 1,
        watchers: value("etcd_debugging_mvcc_watcher_total")?,
        streams: value("etcd_debugging_mvcc_watch_stream_total")?,
        events_sent: value("etcd_debugging_mvcc_events_total")?,
        changes: value("etcd_mvcc_put_total")? + value("etcd_mvcc_delete_total")?,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::doctor::testing::{connected, etcd, nothing, status};
    use rangecache_base::telemetry::Metrics;

    /// Ids of what is found on the watches of the members at `urls`.
    async fn found(urls: &[String]) -> Vec<FindingId> {
        let (config, members) = connected(urls, &[]).await;
        let connector = config.connector(&Arc::new(Metrics::new())).unwrap();
        let mut report = Report::default();
        examine(&config, &connector, &members, &mut report).await;
        report.findings.iter().map(|finding| finding.id).collect()
    }

    #[tokio::test]
    async fn watches_are_unknown_only_if_a_connected_member_shows_no_metrics() {
        let etcd = etcd(status(1), &[]).await;
        assert_eq!(found(&[etcd.url.to_string()]).await, [FindingId::WatchesUnknown]);
        assert_eq!(found(&[nothing()]).await, []);
    }

    #[test]
    fn metrics_of_etcd_are_found_and_others_are_not_taken_for_them() {
        let metrics = "# HELP etcd_debugging_mvcc_watcher_total Total number of watchers.\n\
            # TYPE etcd_debugging_mvcc_watcher_total gauge\n\
            etcd_debugging_mvcc_watcher_total 12\n\
            etcd_debugging_mvcc_watcher_total_of_another 7\n\
            etcd_debugging_mvcc_watch_stream_total 3\n\
            etcd_debugging_mvcc_events_total 1.2e+06\n\
            etcd_mvcc_put_total 90000\n\
            etcd_mvcc_delete_total 10000\n";
        let facts = parse(metrics).unwrap();
        assert_eq!((facts.watchers, facts.streams), (12, 3));
        assert_eq!((facts.events_sent, facts.changes), (1_200_000, 100_000));
        assert!(parse("go_goroutines 7\n").is_none());
    }
}
