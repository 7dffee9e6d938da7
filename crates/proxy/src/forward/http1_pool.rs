//! Kept-alive HTTP/1 connections to etcd. A connection carries one request at a time; after a complete response it waits
//! for the next one. A burst of requests opens a few connections at once, and its other requests take those that are
//! returned meanwhile.

use std::{sync::Arc, time::Duration};

use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use rangecache_base::net::Url;
use rangecache_edge::limits::{ClientAccount, Deadline, Slot, Slots};
use rangecache_upstream::Outgoing;
use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

/// Connections without a request that are kept: as many as were needed at once within [`IDLE_TIMEOUT`], up to this number.
const MAX_IDLE: usize = 256;
/// Connections that are opened at once.
const MAX_OPENING: usize = 16;
/// Time after which a connection without a request is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which such connections are looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Time within which a connection is ready again after a complete response.
const READY_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections that wait for a request, and requests that wait for a connection.
#[derive(Debug)]
pub(crate) struct Http1Pool {
    max_idle: usize,
    /// The newest connection is the last. `None` once no more are kept: the process waits for their tasks.
    idle: Mutex<Option<Vec<Http1Connection>>>,
    /// Slots for the connections that may be opened at once.
    opening: Arc<Slots>,
    /// Wakes a request that waits for a connection.
    returned: Notify,
}

/// Connection on which a request is sent.
pub(super) enum NextConnection {
    /// A connection that waited for a request.
    Kept(Http1Connection),
    /// A connection that the request opens, with the permission to do so.
    Open(Slot),
}

/// An HTTP/1 connection to etcd, closed when dropped.
#[derive(Debug)]
pub(super) struct Http1Connection {
    pub(super) url: Url,
    pub(super) sender: SendRequest<Outgoing>,
    /// Time at which the connection was opened or returned.
    pub(super) since: Instant,
    /// Counts the connection, also after an upgrade.
    pub(super) _slot: Slot,
    /// Without it hyper would notice that nothing is read any longer only when etcd sends data.
    pub(super) _close: DropGuard,
}

impl Http1Pool {
    /// A pool of connections of which `max_connections` may be open.
    pub(crate) fn new(max_connections: usize) -> Http1Pool {
        Http1Pool {
            // A part, so that connections to another endpoint can be opened.
            max_idle: MAX_IDLE.min(max_connections / 4),
            idle: Mutex::new(Some(Vec::new())),
            opening: Slots::uncounted(MAX_OPENING, None),
            returned: Notify::new(),
        }
    }

    /// Waits for a connection to `url`, or for the permission to open one, whichever comes first.
    pub(super) async fn next(&self, url: &Url, account: &ClientAccount) -> NextConnection {
        let opening = self.opening.acquire(account, Deadline::NONE);
        tokio::pin!(opening);
        loop {
            // Created before the look: a connection that is returned in between is not missed.
            let returned = self.returned.notified();
            if let Some(connection) = self.take(url) {
                return NextConnection::Kept(connection);
            }
            tokio::select! {
                biased;
                () = returned => {}
                // Any number may wait, without a time limit.
                Ok(place) = opening.as_mut() => return NextConnection::Open(place),
            }
        }
    }

    /// Takes a connection to `url` that is ready for a request; `None` if there is none.
    fn take(&self, url: &Url) -> Option<Http1Connection> {
        let mut idle = self.idle.lock();
        let idle = idle.as_mut()?;
        // The newest: it is the least likely to have been closed.
        let is_usable = |idle: &Http1Connection| idle.url == *url && idle.sender.is_ready();
        let at = idle.iter().rposition(is_usable)?;
        Some(idle.remove(at))
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

    fn keep(&self, mut connection: Http1Connection) {
        connection.since = Instant::now();
        if let Some(idle) = &mut *self.idle.lock() {
            idle.push(connection);
            if idle.len() > self.max_idle {
                idle.remove(0);
            }
        }
        self.returned.notify_one();
    }

    /// Closes connections that have waited too long, and all of them once `drain` is cancelled, until the future is
    /// dropped.
    pub(crate) async fn run(&self, drain: &CancellationToken) {
        let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
        while drain.run_until_cancelled(ticks.tick()).await.is_some() {
            let is_kept =
                |idle: &Http1Connection| idle.since.elapsed() < IDLE_TIMEOUT && !idle.sender.is_closed();
            if let Some(idle) = &mut *self.idle.lock() {
                idle.retain(is_kept);
            }
        }
        self.idle.lock().take();
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use hyper::client::conn::http1::handshake;
    use hyper_util::rt::TokioIo;

    use super::*;
    use crate::call::testing::account;

    fn url() -> Url {
        "http://127.0.0.1:2379".parse().unwrap()
    }

    /// A connection that waits for a request.
    async fn connection() -> Http1Connection {
        let (stream, peer) = tokio::io::duplex(64);
        let (mut sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(async move {
            let _peer = peer;
            connection.await
        });
        sender.ready().await.unwrap();
        let slots = Slots::uncounted(1, None);
        let slot = slots.try_acquire(&account(1 << 20)).unwrap();
        Http1Connection {
            url: url(),
            sender,
            since: Instant::now(),
            _slot: slot,
            _close: CancellationToken::new().drop_guard(),
        }
    }

    fn opens(next: NextConnection) -> Slot {
        match next {
            NextConnection::Open(place) => place,
            NextConnection::Kept(_) => panic!("there is no connection yet"),
        }
    }

    #[tokio::test]
    async fn request_beyond_those_that_open_a_connection_takes_one_that_is_returned() {
        let (pool, url, account) = (Http1Pool::new(1_000), url(), account(1 << 20));
        let mut opening = Vec::new();
        for _ in 0..MAX_OPENING {
            opening.push(opens(pool.next(&url, &account).await));
        }
        let mut next = Box::pin(pool.next(&url, &account));
        assert!(futures_util::poll!(&mut next).is_pending());
        pool.keep(connection().await);
        assert!(matches!(next.await, NextConnection::Kept(_)));
        let mut next = Box::pin(pool.next(&url, &account));
        assert!(futures_util::poll!(&mut next).is_pending());
        opening.pop();
        drop(opens(next.await));
    }

    #[tokio::test]
    async fn connections_of_a_burst_are_kept_up_to_a_part_of_all() {
        for (max_connections, kept) in [(100, 25), (10_000, 40)] {
            let pool = Http1Pool::new(max_connections);
            for _ in 0..40 {
                pool.keep(connection().await);
            }
            assert_eq!(pool.idle.lock().as_ref().map(Vec::len), Some(kept));
        }
    }
}
