//! Kept-alive HTTP/1 connections to etcd. A connection carries one request at a time; after a complete response it waits
//! for the next one.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::net::Url;
use crate::upstream::Outgoing;

/// Connections without a request that are kept.
const MAX_IDLE: usize = 16;
/// Time after which a connection without a request is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which such connections are looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Time within which a connection is ready again after a complete response.
const READY_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections that wait for a request.
#[derive(Debug, Default)]
pub(crate) struct Http1Pool {
    idle: Mutex<IdleConnections>,
}

#[derive(Debug, Default)]
struct IdleConnections {
    /// The newest is the last.
    connections: Vec<Idle>,
    /// No more are kept: the process waits for their tasks.
    is_stopping: bool,
}

#[derive(Debug)]
struct Idle {
    connection: Http1Connection,
    since: Instant,
}

/// An HTTP/1 connection to etcd, closed when dropped.
pub(super) struct Http1Connection {
    url: Url,
    pub(super) sender: SendRequest<Outgoing>,
    /// Without it hyper would notice that nothing is read any longer only when etcd sends data.
    _close: DropGuard,
}

impl fmt::Debug for Http1Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http1Connection")
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

impl Http1Connection {
    /// Creates a connection to `url` whose task ends with `close`.
    pub(super) fn new(url: &Url, sender: SendRequest<Outgoing>, close: DropGuard) -> Http1Connection {
        Http1Connection {
            url: url.clone(),
            sender,
            _close: close,
        }
    }
}

impl Http1Pool {
    /// Takes a connection to `url` that is ready for a request; `None` if there is none.
    pub(super) fn take(&self, url: &Url) -> Option<Http1Connection> {
        let idle = &mut self.idle.lock().connections;
        // The newest: it is the least likely to have been closed.
        let is_usable = |idle: &Idle| idle.connection.url == *url && idle.connection.sender.is_ready();
        let at = idle.iter().rposition(is_usable)?;
        Some(idle.remove(at).connection)
    }

    /// Keeps a connection whose request was answered. `tasks` joins the wait for its end.
    pub(super) fn give_back(self: &Arc<Self>, mut connection: Http1Connection, tasks: &TaskTracker) {
        let pool = Arc::clone(self);
        tasks.spawn(async move {
            let ready = tokio::time::timeout(READY_TIMEOUT, connection.sender.ready()).await;
            if matches!(ready, Ok(Ok(()))) {
                pool.keep(connection);
            }
        });
    }

    fn keep(&self, connection: Http1Connection) {
        let since = Instant::now();
        let mut idle = self.idle.lock();
        if idle.is_stopping {
            return;
        }
        idle.connections.push(Idle { connection, since });
        if idle.connections.len() > MAX_IDLE {
            idle.connections.remove(0);
        }
    }

    /// Closes connections that have waited too long, and all of them once `drain` is cancelled, until the future is
    /// dropped.
    pub(crate) async fn run(&self, drain: &CancellationToken) {
        let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
        while drain.run_until_cancelled(ticks.tick()).await.is_some() {
            let is_kept =
                |idle: &Idle| idle.since.elapsed() < IDLE_TIMEOUT && !idle.connection.sender.is_closed();
            self.idle.lock().connections.retain(is_kept);
        }
        {
            let mut idle = self.idle.lock();
            idle.is_stopping = true;
            idle.connections.clear();
        }
        std::future::pending().await
    }
}
