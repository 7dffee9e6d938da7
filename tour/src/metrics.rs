//! Counters of etcd and rangecache, read from their metrics over HTTP/1.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rangecache_base::http_request::http_request;
use rangecache_base::net::Url;
use rangecache_edge::tls::{Connector, Protocol};

const TIMEOUT: Duration = Duration::from_secs(30);

/// A page of metrics has a few hundred kilobytes.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// URLs of the metrics.
pub(crate) struct Scrapes {
    pub(crate) etcd: Url,
    pub(crate) proxy: Url,
    pub(crate) connector: Arc<Connector>,
}

/// Counters at one moment.
#[derive(Default)]
pub(crate) struct Counters {
    /// Range calls that etcd has handled, and bytes that it has sent to clients; `None` if etcd serves no metrics at its
    /// client URL.
    etcd: Option<(f64, f64)>,
    /// Ranges by `outcome` or `outcome:reason`.
    ranges: BTreeMap<String, f64>,
}

/// Difference of the counters at two moments.
pub(crate) struct Difference {
    pub(crate) etcd: Option<(f64, f64)>,
    pub(crate) ranges: BTreeMap<String, f64>,
}

impl Scrapes {
    pub(crate) async fn take(&self) -> Result<Counters> {
        // The user's etcd may serve its metrics elsewhere, or not at all: then these columns stay empty.
        let etcd = match get(&self.connector, &self.etcd, "/metrics").await {
            Ok((200, text)) => Some((
                sum(&text, "grpc_server_handled_total", r#"grpc_method="Range""#),
                sum(&text, "etcd_network_client_grpc_sent_bytes_total", ""),
            )),
            _ => None,
        };
        let (status, text) = get(&self.connector, &self.proxy, "/metrics").await?;
        if status != 200 {
            bail!("{}/metrics returned HTTP status {status}", self.proxy);
        }
        let mut ranges = BTreeMap::new();
        for (labels, value) in samples(&text, "rangecache_range_total") {
            let outcome = label(labels, "outcome").unwrap_or("?");
            let name = match label(labels, "reason") {
                None | Some("" | "none") => outcome.to_owned(),
                Some(reason) => format!("{outcome}:{reason}"),
            };
            *ranges.entry(name).or_default() += value;
        }
        Ok(Counters { etcd, ranges })
    }
}

impl Counters {
    pub(crate) fn since(&self, earlier: &Self) -> Difference {
        let etcd = match (self.etcd, earlier.etcd) {
            (Some(now), Some(then)) => Some((now.0 - then.0, now.1 - then.1)),
            _ => None,
        };
        let ranges = self
            .ranges
            .iter()
            .map(|(name, now)| (name.clone(), now - earlier.ranges.get(name).unwrap_or(&0.0)))
            .filter(|(_, count)| *count > 0.0)
            .collect();
        Difference { etcd, ranges }
    }
}

/// The samples of one metric in the text format: labels (between the braces) and value.
fn samples<'a>(text: &'a str, metric: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
    text.lines().filter_map(move |line| {
        let rest = line.strip_prefix(metric)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once('}')?,
            None if rest.starts_with(' ') => ("", rest),
            None => return None,
        };
        Some((labels, value.split_whitespace().next()?.parse().ok()?))
    })
}

fn sum(text: &str, metric: &str, with_label: &str) -> f64 {
    samples(text, metric)
        .filter(|(labels, _)| labels.contains(with_label))
        .map(|(_, value)| value)
        .sum()
}

fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    labels
        .split(',')
        .find_map(|pair| pair.strip_prefix(name)?.strip_prefix("=\"")?.strip_suffix('"'))
}

/// `GET` over HTTP/1: status and body.
pub(crate) async fn get(connector: &Connector, url: &Url, path: &str) -> Result<(u16, String)> {
    let reading = async {
        let stream = connector.connect(url, Protocol::Http1).await?;
        let authority = url.authority();
        let (status, body) =
            http_request(stream, http::Method::GET, &authority, path, MAX_RESPONSE_BYTES).await?;
        Ok((status.as_u16(), body))
    };
    let read = tokio::time::timeout(TIMEOUT, reading).await;
    let read = read.unwrap_or_else(|_| Err(anyhow!("no response within {} s", TIMEOUT.as_secs())));
    read.with_context(|| format!("{url}{path} cannot be read"))
}
