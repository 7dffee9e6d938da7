//! A GET by HTTP/1, for readiness, metrics and etcd's profiles.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The status code and the body. HTTP/1.0, so that the body ends with the connection and is never chunked.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = tokio::time::timeout(Duration::from_secs(30), exchange)
        .await
        .with_context(|| format!("GET {address}{path} took more than 30 s"))?
        .with_context(|| format!("GET {address}{path}"))?;
    let answer = String::from_utf8_lossy(&answer);
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        bail!("GET {address}{path}: no HTTP answer")
    };
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .context("no status code")?;
    Ok((status, body.to_owned()))
}

/// A metric's value, summed over the series whose line starts with `series` (a name, or a name with its first labels).
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
