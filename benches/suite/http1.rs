//! `GET` over HTTP/1, and values of metrics.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, anyhow};

/// `GET http://ADDRESS/PATH`: status and body.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Result<(u16, String)> {
    let url = format!("http://{address}{path}");
    let response = testkit::http::get(&url).await;
    let response = response.map_err(|error| anyhow!("GET {url}: {error}"))?;
    Ok((response.status, response.body))
}

/// A metric of the process that serves its metrics at `address`.
pub(crate) async fn read_metric(address: SocketAddr, series: &str) -> Result<f64> {
    let (_, text) = get(address, "/metrics").await?;
    metric(&text, series).with_context(|| format!("{address} has no metric {series}"))
}

/// Sum of the samples whose line starts with `series`: a metric's name, or the name and its first labels.
pub(crate) fn metric(text: &str, series: &str) -> Option<f64> {
    let mut sum = None;
    for line in text.lines() {
        let Some(rest) = line.strip_prefix(series) else {
            continue;
        };
        if !rest.starts_with(['{', ' ', ',', '}']) {
            continue;
        }
        if let Some(value) = rest
            .rsplit(' ')
            .next()
            .and_then(|value| value.parse::<f64>().ok())
        {
            sum = Some(sum.unwrap_or(0.0) + value);
        }
    }
    sum
}
