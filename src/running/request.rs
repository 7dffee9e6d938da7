//! A request to the listener for operators.

use std::io;
use std::time::Duration;

use http::{Method, StatusCode};

use rangecache_base::http_request::http_request;
use rangecache_base::net::{Url, connect};

/// Bound on a response: a status has a few hundred kilobytes.
const MAX_RESPONSE_BYTES: usize = 16 << 20;
/// Time for a response: a reload reads files.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Status and body of the response. The host is named such that the listener accepts it, whatever its name is.
pub(super) async fn send(url: &Url, method: &Method, path: &str) -> io::Result<(StatusCode, String)> {
    let exchange = async {
        let stream = connect(url, TIMEOUT).await?;
        http_request(stream, method.clone(), "localhost", path, MAX_RESPONSE_BYTES).await
    };
    tokio::time::timeout(TIMEOUT, exchange)
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "it did not respond in time"))?
}

/// The body of the response to `GET`, whatever the status.
pub(crate) async fn get(url: &Url, path: &str) -> io::Result<String> {
    Ok(send(url, &Method::GET, path).await?.1)
}
