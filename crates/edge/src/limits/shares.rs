//! Shares of single clients: bounds on the calls, forwarded lists, watches and bytes of one client, over all of its
//! connections. Each is off unless a flag sets it. Calls over a bound wait in their own client's queue, so that other
//! clients do not notice. Calls that are costly for etcd have a bound without a flag.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::metrics::ShareMetrics;

/// Calls of one client that may wait for each bound.
const MAX_WAITING: u32 = 256;
/// Longest wait for a bound.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Bytes that a client may use at once, as the time in which it is entitled to them.
const BURST: Duration = Duration::from_secs(1);
/// Costly calls of one client that etcd handles at once: a client that checks passwords or hashes the store without pause
/// would otherwise take all of etcd's CPUs.
const MAX_COSTLY: u32 = 2;
/// Clients whose shares are kept; beyond it, the shares of clients without a connection are dropped.
const KEPT_SHARES: usize = 2_048;

/// Bounds on one client; 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientLimits {
    /// Calls in flight, apart from endless ones.
    pub max_calls: u32,
    /// Bytes of responses per second.
    pub max_bytes_per_second: u64,
    /// Lists in flight to etcd.
    pub max_forwarded_lists: u32,
    /// Open Watch streams.
    pub max_watches: u32,
}

/// The bound that a call exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareLimit {
    /// `--client-max-calls`.
    Calls,
    /// `--client-max-bytes-per-second`.
    Bytes,
    /// `--client-max-forwarded-lists`.
    Lists,
    /// `--client-max-watches`.
    Watches,
    /// [`MAX_COSTLY`].
    Costly,
}

impl ShareLimit {
    /// The flag that sets it, without its dashes; `None` if none does.
    #[must_use]
    pub fn flag(self) -> Option<&'static str> {
        match self {
            ShareLimit::Calls => Some("client-max-calls"),
            ShareLimit::Bytes => Some("client-max-bytes-per-second"),
            ShareLimit::Lists => Some("client-max-forwarded-lists"),
            ShareLimit::Watches => Some("client-max-watches"),
            ShareLimit::Costly => None,
        }
    }

    /// Value of the label `limit`.
    fn as_str(self) -> &'static str {
        match self {
            ShareLimit::Calls => "calls",
            ShareLimit::Bytes => "bytes",
            ShareLimit::Lists => "lists",
            ShareLimit::Watches => "watches",
            ShareLimit::Costly => "costly",
        }
    }
}

/// Why a call got no part of its client's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoShare {
    /// Too many calls of the client wait, or this one has waited as long as it may.
    Exceeded(ShareLimit),
    /// The caller's deadline has expired.
    Deadline,
}

/// Kind under which a call counts in its client's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareKind {
    /// A call that ends by itself.
    Call,
    /// A call that ends by itself and is costly for etcd.
    Costly,
    /// A Watch stream.
    Watch,
    /// Another call that lasts until its client ends it.
    Endless,
}

/// Shares of all clients, by their numbers.
#[derive(Debug)]
pub(super) struct Shares {
    limits: ClientLimits,
    shares: Mutex<HashMap<u64, Arc<Share>>>,
    metrics: ShareMetrics,
}

/// Bounds of one client.
#[derive(Debug)]
pub struct Share {
    calls: Option<PermitQueue>,
    costly: PermitQueue,
    lists: Option<PermitQueue>,
    watches: Option<Arc<Semaphore>>,
    bytes: Option<ByteRate>,
    metrics: ShareMetrics,
}

/// Parts of a share that one call has until dropped.
#[derive(Debug)]
pub struct SharePermits {
    _permits: [Option<OwnedSemaphorePermit>; 2],
}

impl SharePermits {
    fn one(permit: Option<OwnedSemaphorePermit>) -> SharePermits {
        SharePermits {
            _permits: [permit, None],
        }
    }
}

impl Shares {
    pub(super) fn new(limits: ClientLimits, metrics: ShareMetrics) -> Shares {
        Shares {
            limits,
            shares: Mutex::default(),
            metrics,
        }
    }

    /// Share of a client; `None` if no flag sets a bound.
    pub(super) fn of(&self, client: u64) -> Option<Arc<Share>> {
        (self.limits != ClientLimits::default()).then(|| self.get(client))
    }

    /// Share of a client, with the bound on costly calls if there is no other.
    pub(super) fn get(&self, client: u64) -> Arc<Share> {
        let mut shares = self.shares.lock();
        if shares.len() >= KEPT_SHARES && !shares.contains_key(&client) {
            shares.retain(|_, share| Arc::strong_count(share) > 1);
        }
        let share = shares
            .entry(client)
            .or_insert_with(|| Arc::new(Share::new(self.limits, self.metrics.clone())));
        Arc::clone(share)
    }
}

impl Share {
    fn new(limits: ClientLimits, metrics: ShareMetrics) -> Share {
        let semaphore = |max: u32| Arc::new(Semaphore::new(max as usize));
        let queue = |max, limit| (max > 0).then(|| PermitQueue::new(semaphore(max), limit));
        Share {
            calls: queue(limits.max_calls, ShareLimit::Calls),
            costly: PermitQueue::new(semaphore(MAX_COSTLY), ShareLimit::Costly),
            lists: queue(limits.max_forwarded_lists, ShareLimit::Lists),
            watches: (limits.max_watches > 0).then(|| semaphore(limits.max_watches)),
            bytes: (limits.max_bytes_per_second > 0).then(|| ByteRate::new(limits.max_bytes_per_second)),
            metrics,
        }
    }

    /// Waits until a call may begin, at most until `deadline`. The call keeps what is returned until its response has
    /// been sent.
    ///
    /// # Errors
    /// [`NoShare`] for a watch at once; for others when the wait is over, or if too many wait.
    pub async fn begin(&self, kind: ShareKind, deadline: Option<Instant>) -> Result<SharePermits, NoShare> {
        let begun = match kind {
            ShareKind::Watch => self.begin_watch().map(SharePermits::one),
            ShareKind::Endless => Ok(SharePermits::one(None)),
            ShareKind::Call => self.begin_call(deadline).await.map(SharePermits::one),
            ShareKind::Costly => self.begin_costly(deadline).await,
        };
        begun.inspect_err(|cause| self.record_refused(*cause))
    }

    async fn begin_costly(&self, deadline: Option<Instant>) -> Result<SharePermits, NoShare> {
        let call = self.begin_call(deadline).await?;
        let costly = self.costly.acquire(deadline).await?;
        Ok(SharePermits {
            _permits: [call, Some(costly)],
        })
    }

    fn begin_watch(&self) -> Result<Option<OwnedSemaphorePermit>, NoShare> {
        let Some(watches) = &self.watches else {
            return Ok(None);
        };
        let permit = Arc::clone(watches).try_acquire_owned();
        let permit = permit.map_err(|_| NoShare::Exceeded(ShareLimit::Watches))?;
        Ok(Some(permit))
    }

    async fn begin_call(&self, deadline: Option<Instant>) -> Result<Option<OwnedSemaphorePermit>, NoShare> {
        let permit = match &self.calls {
            None => None,
            Some(calls) => Some(calls.acquire(deadline).await?),
        };
        if let Some(bytes) = &self.bytes {
            bytes.wait(deadline).await?;
        }
        Ok(permit)
    }

    /// Waits until a list may be sent to etcd, at most until `deadline`; `None` without a bound.
    ///
    /// # Errors
    /// [`NoShare`] when the wait is over, or if too many wait.
    pub async fn begin_list(
        &self,
        deadline: Option<Instant>,
    ) -> Result<Option<OwnedSemaphorePermit>, NoShare> {
        let Some(lists) = &self.lists else {
            return Ok(None);
        };
        let permit = lists.acquire(deadline).await;
        permit.map(Some).inspect_err(|cause| self.record_refused(*cause))
    }

    /// Counts bytes of a response.
    pub fn record_sent(&self, sent_bytes: u64) {
        if let Some(bytes) = &self.bytes {
            bytes.spend(sent_bytes);
        }
    }

    /// Time until a response may be continued; zero if it may be now.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.bytes.as_ref().map_or(Duration::ZERO, ByteRate::delay)
    }

    fn record_refused(&self, cause: NoShare) {
        if let NoShare::Exceeded(limit) = cause {
            self.metrics.record_refused(limit.as_str());
        }
    }
}

/// A bound on calls at once, with those that wait for it.
#[derive(Debug)]
struct PermitQueue {
    free: Arc<Semaphore>,
    waiting: AtomicU32,
    limit: ShareLimit,
}

impl PermitQueue {
    fn new(free: Arc<Semaphore>, limit: ShareLimit) -> PermitQueue {
        PermitQueue {
            free,
            waiting: AtomicU32::new(0),
            limit,
        }
    }

    /// Waits for one of the permits, in order of arrival.
    async fn acquire(&self, deadline: Option<Instant>) -> Result<OwnedSemaphorePermit, NoShare> {
        let free = Arc::clone(&self.free);
        if let Ok(permit) = Arc::clone(&free).try_acquire_owned() {
            return Ok(permit);
        }
        let exceeded = NoShare::Exceeded(self.limit);
        let _waiting = WaiterCount::enter(&self.waiting).ok_or(exceeded)?;
        match tokio::time::timeout_at(until(deadline), free.acquire_owned()).await {
            // The semaphore is not closed.
            Ok(permit) => permit.map_err(|_| exceeded),
            Err(_) => Err(late(deadline, self.limit)),
        }
    }
}

/// Bytes per second.
#[derive(Debug)]
struct ByteRate {
    per_second: u64,
    /// Time at which all bytes that were sent are paid for.
    paid_at: Mutex<Instant>,
    waiting: AtomicU32,
    /// Calls wait one after another.
    first: tokio::sync::Mutex<()>,
}

impl ByteRate {
    fn new(per_second: u64) -> ByteRate {
        ByteRate {
            per_second,
            paid_at: Mutex::new(Instant::now()),
            waiting: AtomicU32::new(0),
            first: tokio::sync::Mutex::default(),
        }
    }

    fn spend(&self, bytes: u64) {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.per_second);
        let time = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let now = Instant::now();
        let mut paid_at = self.paid_at.lock();
        *paid_at = (*paid_at).max(now) + time;
    }

    fn delay(&self) -> Duration {
        let paid_at = *self.paid_at.lock();
        paid_at
            .saturating_duration_since(Instant::now())
            .saturating_sub(BURST)
    }

    async fn wait(&self, deadline: Option<Instant>) -> Result<(), NoShare> {
        if self.delay().is_zero() {
            return Ok(());
        }
        let exceeded = NoShare::Exceeded(ShareLimit::Bytes);
        let _waiting = WaiterCount::enter(&self.waiting).ok_or(exceeded)?;
        let waiting = async {
            let _first = self.first.lock().await;
            loop {
                let delay = self.delay();
                if delay.is_zero() {
                    return;
                }
                tokio::time::sleep(delay).await;
            }
        };
        let waited = tokio::time::timeout_at(until(deadline), waiting).await;
        waited.map_err(|_| late(deadline, ShareLimit::Bytes))
    }
}

/// Counts a call as waiting until dropped.
struct WaiterCount<'a>(&'a AtomicU32);

impl WaiterCount<'_> {
    fn enter(waiting: &AtomicU32) -> Option<WaiterCount<'_>> {
        let guard = WaiterCount(waiting);
        (waiting.fetch_add(1, Ordering::Relaxed) < MAX_WAITING).then_some(guard)
    }
}

impl Drop for WaiterCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn until(deadline: Option<Instant>) -> Instant {
    let bound = Instant::now() + MAX_WAIT;
    deadline.map_or(bound, |deadline| deadline.min(bound))
}

/// Why a wait that ended without success did: by the caller's deadline, or by the bound.
fn late(deadline: Option<Instant>, limit: ShareLimit) -> NoShare {
    match deadline {
        Some(deadline) if deadline <= Instant::now() => NoShare::Deadline,
        _ => NoShare::Exceeded(limit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(limits: ClientLimits) -> Shares {
        Shares::new(limits, ShareMetrics::default())
    }

    #[tokio::test(start_paused = true)]
    async fn call_over_the_bound_waits_for_one_of_its_own_client_alone() {
        let shares = shares(ClientLimits {
            max_calls: 1,
            ..ClientLimits::default()
        });
        let [noisy, honest] = [1, 2].map(|client| shares.of(client).unwrap());
        let first = noisy.begin(ShareKind::Call, None).await.unwrap();
        let mut second = Box::pin(noisy.begin(ShareKind::Call, None));
        assert!(futures_util::poll!(&mut second).is_pending());
        assert!(honest.begin(ShareKind::Call, None).await.is_ok());
        assert!(noisy.begin(ShareKind::Endless, None).await.is_ok());
        drop(first);
        assert!(second.await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn wait_ends_at_the_deadline_or_at_the_bound() {
        let shares = shares(ClientLimits {
            max_calls: 1,
            max_forwarded_lists: 1,
            ..ClientLimits::default()
        });
        let share = shares.of(1).unwrap();
        let _call = share.begin(ShareKind::Call, None).await.unwrap();
        let _list = share.begin_list(None).await.unwrap();
        let soon = Instant::now() + Duration::from_secs(1);
        assert_eq!(
            share.begin(ShareKind::Call, Some(soon)).await.unwrap_err(),
            NoShare::Deadline
        );
        assert_eq!(Instant::now(), soon);
        assert_eq!(
            share.begin_list(None).await.unwrap_err(),
            NoShare::Exceeded(ShareLimit::Lists)
        );
        assert_eq!(Instant::now(), soon + MAX_WAIT);
    }

    #[tokio::test]
    async fn watch_over_the_bound_is_refused_at_once_until_another_ends() {
        let shares = shares(ClientLimits {
            max_watches: 1,
            ..ClientLimits::default()
        });
        let share = shares.of(1).unwrap();
        let first = share.begin(ShareKind::Watch, None).await.unwrap();
        assert_eq!(
            share.begin(ShareKind::Watch, None).await.unwrap_err(),
            NoShare::Exceeded(ShareLimit::Watches)
        );
        drop(first);
        assert!(share.begin(ShareKind::Watch, None).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_has_used_its_bytes_waits_until_they_are_paid_for() {
        let shares = shares(ClientLimits {
            max_bytes_per_second: 1_000,
            ..ClientLimits::default()
        });
        let [noisy, honest] = [1, 2].map(|client| shares.of(client).unwrap());
        noisy.record_sent(1_000);
        assert!(noisy.delay().is_zero(), "a second's bytes may be used at once");
        noisy.record_sent(3_000);
        assert_eq!(noisy.delay(), Duration::from_secs(3));
        assert!(honest.delay().is_zero());
        let begun = Instant::now();
        noisy.begin(ShareKind::Call, None).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::from_secs(3));
    }

    #[tokio::test(start_paused = true)]
    async fn costly_calls_of_one_client_wait_for_each_other_without_a_flag() {
        let shares = shares(ClientLimits::default());
        let [noisy, honest] = [1, 2].map(|client| shares.get(client));
        let first = noisy.begin(ShareKind::Costly, None).await.unwrap();
        let _second = noisy.begin(ShareKind::Costly, None).await.unwrap();
        let mut third = Box::pin(noisy.begin(ShareKind::Costly, None));
        assert!(futures_util::poll!(&mut third).is_pending());
        assert!(noisy.begin(ShareKind::Call, None).await.is_ok());
        assert!(honest.begin(ShareKind::Costly, None).await.is_ok());
        drop(first);
        let _third = third.await.unwrap();
        assert_eq!(
            noisy.begin(ShareKind::Costly, None).await.unwrap_err(),
            NoShare::Exceeded(ShareLimit::Costly)
        );
    }

    #[test]
    fn share_outlives_the_connections_of_its_client() {
        let shares = shares(ClientLimits {
            max_watches: 1,
            ..ClientLimits::default()
        });
        let share = shares.of(1).unwrap();
        let again = shares.of(1).unwrap();
        assert!(Arc::ptr_eq(&share, &again));
        assert!(
            Shares::new(ClientLimits::default(), ShareMetrics::default())
                .of(1)
                .is_none()
        );
    }
}
