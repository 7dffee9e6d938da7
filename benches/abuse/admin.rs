//! Requests to the admin port that are given up, and pages that are never read.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use h2::client::{Builder, Connection, SendRequest};
use tokio::net::TcpStream;

use crate::counts::{Counts, RECONNECT_PAUSE};

/// Requests of one connection: more than it may have in flight.
const REQUESTS: usize = 16;
/// Time after which a connection with its requests is closed.
const ABANDONED_AFTER: Duration = Duration::from_millis(20);

/// Activity of a misbehaving connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Admin {
    /// Is closed before its requests are answered.
    Abandons,
    /// Reads nothing of the pages that it requests.
    ReadsNothing,
}

/// Misbehaves on one connection after another, forever.
pub(crate) async fn run(address: String, admin: Admin, counts: Arc<Counts>) {
    loop {
        // An error is the end of a connection: the server's defence.
        let _ = match admin {
            Admin::Abandons => abandon(&address, &counts).await,
            Admin::ReadsNothing => read_nothing(&address, &counts).await,
        };
        counts.closed.fetch_add(1, Ordering::Relaxed);
        if matches!(admin, Admin::ReadsNothing) {
            tokio::time::sleep(RECONNECT_PAUSE).await;
        }
    }
}

async fn connect(
    address: &str,
    window: u32,
    counts: &Counts,
) -> Result<(SendRequest<Bytes>, Connection<TcpStream>)> {
    let tcp = TcpStream::connect(address).await?;
    counts.connections.fetch_add(1, Ordering::Relaxed);
    Ok(Builder::new().initial_window_size(window).handshake(tcp).await?)
}

async fn abandon(address: &str, counts: &Counts) -> Result<()> {
    let (mut sender, connection) = connect(address, 65_535, counts).await?;
    let mut sent = Vec::new();
    for _ in 0..REQUESTS {
        let request = http::Request::get(format!("http://{address}/nope")).body(())?;
        sent.push(sender.send_request(request, true)?);
        counts.calls.fetch_add(1, Ordering::Relaxed);
    }
    // The requests are written, and some may be answered.
    let _ = tokio::time::timeout(ABANDONED_AFTER, connection).await;
    Ok(())
}

async fn read_nothing(address: &str, counts: &Counts) -> Result<()> {
    let (mut sender, connection) = connect(address, 0, counts).await?;
    let requesting = async {
        let mut unread = Vec::new();
        for _ in 0..REQUESTS {
            sender = sender.ready().await?;
            let request = http::Request::get(format!("http://{address}/clients")).body(())?;
            unread.push(sender.send_request(request, true)?);
            counts.calls.fetch_add(1, Ordering::Relaxed);
        }
        // Held until the connection ends.
        std::future::pending::<Result<()>>().await
    };
    tokio::select! {
        ended = connection => Ok(ended?),
        failed = requesting => failed,
    }
}
