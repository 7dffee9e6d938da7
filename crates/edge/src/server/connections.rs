//! Connections of one kind of listener: a bound on all of them, one on those of each client address, and their receive windows,
//! which are the bytes of requests that clients may send before a call has taken and counted them.
//!
//! Each connection has a window of [`MIN_BYTES`], with which `--max-connections` reckons. What its window has beyond them is from
//! one budget: a connection gets a part of what is free, so that the windows of the first ones are as large as uploads from
//! afar need them, and those of thousands small.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{net::IpAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rangecache_base::{net::ClientAddress, telemetry::metrics::Gauge};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::handshakes::{Handshake, Handshakes};

/// Bounds on the connections of one kind of listener.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Connections served at once.
    pub all: u32,
    /// Connections of one address.
    pub per_address: u32,
    /// Whether `per_address` also holds for loopback addresses, which all clients of a sidecar share.
    pub on_loopback: bool,
    /// Whether a connection over `all` replaces the oldest one. Otherwise it replaces the oldest one that has sent no
    /// request yet; if there is none, it waits to be accepted.
    pub replace_oldest: bool,
}

/// Bounds on what connections hold before a call counts it.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionBudgets {
    /// Bytes of receive windows beyond those that every connection has.
    pub window_bytes: u64,
    /// TLS handshakes in progress.
    pub handshakes: u32,
    /// Time limit of a handshake.
    pub handshake_timeout: Duration,
}

/// Open connections of one kind of listener.
#[derive(Debug)]
pub struct Connections {
    limits: ConnectionLimits,
    windows: Arc<Windows>,
    handshakes: Arc<Handshakes>,
    free: Arc<Semaphore>,
    open: Gauge,
    by_address: Mutex<HashMap<ClientAddress, u32>>,
    /// Connections that may be replaced, in the order of their begin.
    by_age: Mutex<BTreeMap<u64, CancellationToken>>,
    next: AtomicU64,
}

impl Connections {
    /// No open connections yet; `open` shows their number. Receive windows are small, and each connection may be in its
    /// handshake.
    #[must_use]
    pub fn new(limits: ConnectionLimits, open: Gauge) -> Arc<Connections> {
        let budgets = ConnectionBudgets {
            window_bytes: 0,
            handshakes: limits.all,
            handshake_timeout: Duration::MAX,
        };
        Connections::with_budgets(limits, budgets, open)
    }

    /// No open connections yet; `open` shows their number.
    #[must_use]
    pub fn with_budgets(
        limits: ConnectionLimits,
        budgets: ConnectionBudgets,
        open: Gauge,
    ) -> Arc<Connections> {
        Arc::new(Connections {
            limits,
            windows: Windows::new(budgets.window_bytes),
            handshakes: Handshakes::new(budgets.handshakes, budgets.handshake_timeout),
            free: Arc::new(Semaphore::new(limits.all as usize)),
            open,
            by_address: Mutex::default(),
            by_age: Mutex::default(),
            next: AtomicU64::new(0),
        })
    }

    /// Waits until there is a place for one more connection. `None` never happens: the semaphore is not closed.
    pub(super) async fn place(&self) -> Option<OwnedSemaphorePermit> {
        if self.free.available_permits() == 0 {
            self.replace_oldest();
        }
        Arc::clone(&self.free).acquire_owned().await.ok()
    }

    /// Closes the oldest connection, if it may be replaced.
    pub fn replace_oldest(&self) {
        let oldest = self.by_age.lock().pop_first();
        if let Some((_, replaced)) = oldest {
            replaced.cancel();
        }
    }

    /// A place for one more connection, if there is one now.
    pub(super) fn place_now(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.free).try_acquire_owned().ok()
    }

    /// Counts a connection from `peer` as open; `None` if that address has as many as it may have. A unix socket has no
    /// address and no such bound.
    pub(super) fn admit(self: &Arc<Self>, peer: Option<IpAddr>, place: OwnedSemaphorePermit) -> Option<Open> {
        let address = peer.and_then(|peer| self.counted(peer));
        if let Some(address) = address {
            let mut by_address = self.by_address.lock();
            let open = by_address.entry(address).or_default();
            if *open >= self.limits.per_address {
                return None;
            }
            *open += 1;
        }
        self.open.inc();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let replaced = CancellationToken::new();
        self.by_age.lock().insert(number, replaced.clone());
        Some(Open {
            connections: Arc::clone(self),
            address,
            number,
            replaced,
            _place: place,
        })
    }

    /// Waits for the place of a TLS handshake with a client at `peer`. `None` if its address has too many, or if there is
    /// no place in time.
    pub(super) async fn begin_handshake(&self, peer: Option<IpAddr>) -> Option<Handshake> {
        let address = peer.and_then(|peer| self.counted(peer));
        self.handshakes.begin(address).await
    }

    /// Takes the receive window of a connection.
    pub(super) fn window(&self) -> Window {
        self.windows.take()
    }

    /// The address under which a peer is counted; `None` if it has no bound.
    fn counted(&self, peer: IpAddr) -> Option<ClientAddress> {
        let address = ClientAddress::from(peer);
        (self.limits.on_loopback || !address.is_loopback()).then_some(address)
    }
}

/// Counts a connection as open until dropped.
#[derive(Debug)]
pub(super) struct Open {
    connections: Arc<Connections>,
    address: Option<ClientAddress>,
    number: u64,
    replaced: CancellationToken,
    _place: OwnedSemaphorePermit,
}

impl Open {
    /// Is cancelled when another connection needs the place.
    pub(super) fn replaced(&self) -> &CancellationToken {
        &self.replaced
    }

    /// Handle to record the connection's first request.
    pub(super) fn unused(&self) -> Unused {
        Unused {
            connections: Arc::clone(&self.connections),
            number: self.number,
            is_used: AtomicBool::new(self.connections.limits.replace_oldest),
        }
    }
}

/// A connection until its first request.
#[derive(Debug)]
pub(super) struct Unused {
    connections: Arc<Connections>,
    number: u64,
    is_used: AtomicBool,
}

impl Unused {
    /// Records a request: from the first one on, the connection keeps its place.
    pub(super) fn record_request(&self) {
        // A load first: hardly a request is the first one.
        if !self.is_used.load(Ordering::Relaxed) && !self.is_used.swap(true, Ordering::Relaxed) {
            self.connections.by_age.lock().remove(&self.number);
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.connections.open.dec();
        self.connections.by_age.lock().remove(&self.number);
        let Some(address) = self.address else {
            return;
        };
        let mut by_address = self.connections.by_address.lock();
        if let Some(open) = by_address.get_mut(&address) {
            *open -= 1;
            if *open == 0 {
                by_address.remove(&address);
            }
        }
    }
}

/// Smallest window, in bytes: HTTP/2 has no smaller one.
const MIN_BYTES: u32 = 65_535;
/// Largest window, in bytes. The HTTP/2 library closes connections with many small frames that no call has taken: with
/// this window, with more than two thousand.
const MAX_BYTES: u32 = 1 << 20;
/// Largest window of one stream, in bytes.
const MAX_STREAM_BYTES: u32 = 256 << 10;
/// A connection gets what is free divided by this.
const DIVISOR: u64 = 16;

/// Budget of the windows.
#[derive(Debug)]
pub(super) struct Windows {
    free: Mutex<u64>,
}

/// Window of one connection, until dropped.
#[derive(Debug)]
pub(super) struct Window {
    windows: Arc<Windows>,
    /// Bytes of the budget.
    more: u32,
}

impl Windows {
    /// A budget of `max_bytes`.
    pub(super) fn new(max_bytes: u64) -> Arc<Windows> {
        Arc::new(Windows {
            free: Mutex::new(max_bytes),
        })
    }

    /// Takes the window of a connection.
    pub(super) fn take(self: &Arc<Self>) -> Window {
        let mut free = self.free.lock();
        let more = u32::try_from(*free / DIVISOR).unwrap_or(u32::MAX);
        let more = more.min(MAX_BYTES - MIN_BYTES);
        *free -= u64::from(more);
        Window {
            windows: Arc::clone(self),
            more,
        }
    }
}

impl Window {
    /// Window of the connection, in bytes.
    pub(super) fn connection_bytes(&self) -> u32 {
        MIN_BYTES + self.more
    }

    /// Window of each of its streams, in bytes.
    pub(super) fn stream_bytes(&self) -> u32 {
        self.connection_bytes().min(MAX_STREAM_BYTES)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        *self.windows.free.lock() += u64::from(self.more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(on_loopback: bool) -> Arc<Connections> {
        let limits = ConnectionLimits {
            all: 10,
            per_address: 2,
            on_loopback,
            replace_oldest: false,
        };
        Connections::new(limits, Gauge::default())
    }

    fn admit(connections: &Arc<Connections>, peer: Option<&str>) -> Option<Open> {
        let peer = peer.map(|peer| peer.parse().unwrap());
        connections.admit(peer, connections.place_now()?)
    }

    #[test]
    fn address_over_its_bound_is_refused_until_one_of_its_connections_ends() {
        let connections = connections(false);
        for (one, same, other) in [
            ("10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2"),
            ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"),
        ] {
            let held = [admit(&connections, Some(one)), admit(&connections, Some(same))];
            assert!(held.iter().all(Option::is_some));
            assert!(admit(&connections, Some(one)).is_none());
            assert!(admit(&connections, Some(other)).is_some());
            drop(held);
            assert!(admit(&connections, Some(one)).is_some());
        }
        assert_eq!(connections.open.get(), 0);
        assert!(connections.by_address.lock().is_empty());
    }

    #[tokio::test]
    async fn connection_over_the_bound_replaces_the_oldest() {
        let limits = ConnectionLimits {
            all: 2,
            per_address: 2,
            on_loopback: false,
            replace_oldest: true,
        };
        let connections = Connections::new(limits, Gauge::default());
        let first = admit(&connections, None).unwrap();
        let second = admit(&connections, None).unwrap();
        let waiting = connections.place();
        tokio::pin!(waiting);
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        assert!(first.replaced().is_cancelled() && !second.replaced().is_cancelled());
        drop(first);
        let third = connections.admit(None, waiting.await.unwrap()).unwrap();
        drop(second);
        assert!(!third.replaced().is_cancelled());
        drop(third);
        assert!(connections.by_age.lock().is_empty());
    }

    #[tokio::test]
    async fn connection_without_a_request_gives_its_place_to_a_new_one() {
        let connections = connections(false);
        let mut open: Vec<_> = std::iter::from_fn(|| admit(&connections, None)).collect();
        open[0].unused().record_request();
        let waiting = connections.place();
        tokio::pin!(waiting);
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        let replaced = |open: &Open| open.replaced().is_cancelled();
        assert_eq!(open.iter().position(replaced), Some(1), "the oldest without one");
        drop(open.remove(1));
        drop(waiting.await.unwrap());
        open.iter().for_each(|open| open.unused().record_request());
        assert!(
            futures_util::poll!(Box::pin(connections.place())).is_ready(),
            "a free place"
        );
        assert!(connections.by_age.lock().is_empty());
    }

    #[test]
    fn clients_of_a_sidecar_share_the_bound_on_all_connections_alone() {
        for (on_loopback, peer, places) in [
            (false, Some("127.0.0.1"), 10),
            (false, Some("::1"), 10),
            (false, None, 10),
            (true, Some("127.0.0.1"), 2),
            (true, None, 10),
        ] {
            let connections = connections(on_loopback);
            let held: Vec<_> = std::iter::from_fn(|| admit(&connections, peer)).collect();
            assert_eq!(held.len(), places, "{on_loopback} {peer:?}");
        }
    }

    #[test]
    fn first_connections_have_large_windows_and_all_together_stay_within_the_budget() {
        const BUDGET: u64 = 48 << 20;
        let windows = Windows::new(BUDGET);
        let taken: Vec<Window> = (0..2_000).map(|_| windows.take()).collect();
        let large = taken
            .iter()
            .take_while(|window| window.connection_bytes() == MAX_BYTES);
        assert!((30..40).contains(&large.count()));
        assert!(taken.iter().all(|window| window.connection_bytes() >= MIN_BYTES));
        assert_eq!(taken[0].stream_bytes(), MAX_STREAM_BYTES);
        let last = &taken[1_999];
        assert_eq!(
            (last.connection_bytes(), last.stream_bytes()),
            (MIN_BYTES, MIN_BYTES)
        );
        let more: u64 = taken.iter().map(|window| u64::from(window.more)).sum();
        assert!(more <= BUDGET);
        drop(taken);
        assert_eq!(*windows.free.lock(), BUDGET);
        assert_eq!(Windows::new(0).take().connection_bytes(), MIN_BYTES);
    }
}
