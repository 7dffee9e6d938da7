//! Byte budgets for buffered responses of etcd: an upper bound on the sum of bytes that all holders of one budget
//! have (I7).
//!
//! The size of a response is unknown until it is complete. If every holder could take bytes at any time, several large
//! responses could fill the budget together, and none of them could be completed. With fair growth each one completes
//! eventually:
//!
//! - All holders share the first quarter of the budget.
//! - Above the quarter, only the first holder in the queue grows, up to seven eighths. The others wait, and HTTP/2
//!   flow control stops etcd from sending. A holder leaves the queue when its response is complete; clients take turns
//!   to have the next one, so that a client with many holders delays one of another by one response. If the first one
//!   needs the bytes of those that wait for it, it is refused at once.
//! - The last eighth is reserved for the first bytes of each holder, so that small responses do not wait for
//!   large ones.
//!
//! Holders that belong to a client but do not wait ([`ByteBudget::hold_for`]) leave room to other clients: alone a client has at
//! most seven eighths, and next to others an eighth of a budget of which a half is used.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::task::Poll;

use parking_lot::Mutex;
use rangecache_base::telemetry::metrics::Counted;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::metrics::BufferKindMetrics;
use super::round_robin::RoundRobin;

/// With fair growth, all holders share the budget divided by this.
const SHARED_DIVISOR: u64 = 4;
/// A holder is small up to the budget divided by this, and may then use the reserved eighth, which has room for 64
/// small holders.
const SMALL_HOLDER_DIVISOR: u64 = 512;

/// Upper bound on the bytes that several [`HeldBytes`] have together.
#[derive(Debug)]
pub struct ByteBudget {
    max_bytes: u64,
    /// Used bytes up to which every holder may grow.
    shared_max_bytes: u64,
    state: Mutex<BudgetState>,
    /// Notified when bytes are released and when a holder leaves the queue.
    changed: Notify,
    metrics: BufferKindMetrics,
}

#[derive(Debug, Default)]
struct BudgetState {
    /// Sum of the bytes of all holders.
    used: u64,
    /// Number of the newest holder in the queue.
    last_number: u64,
    /// Holders that are still growing, by client. The next one grows, and stays the next until it leaves the queue: others
    /// enter behind it.
    queue: RoundRobin<u64, BTreeMap<u64, ()>>,
    /// Bytes of the holders in the queue that wait.
    waiting: u64,
    /// Bytes of the holders of [`ByteBudget::hold_for`] by client, for those that have some.
    by_client: HashMap<u64, u64>,
}

/// Position of a holder in the queue: its client and its number.
type QueuePosition = (u64, u64);

impl BudgetState {
    fn add(&mut self, client: Option<u64>, bytes: u64) {
        self.used += bytes;
        if let Some(client) = client {
            *self.by_client.entry(client).or_default() += bytes;
        }
    }

    fn release(&mut self, client: Option<u64>, bytes: u64) {
        self.used -= bytes;
        if let Some(client) = client
            && let Entry::Occupied(mut of_client) = self.by_client.entry(client)
        {
            *of_client.get_mut() -= bytes;
            if *of_client.get() == 0 {
                of_client.remove();
            }
        }
    }

    /// Adds a holder of `client` behind its others.
    fn enter(&mut self, client: u64) -> QueuePosition {
        self.last_number += 1;
        let number = self.last_number;
        self.queue.change(client, |holders| holders.insert(number, ()));
        (client, number)
    }

    /// Removes a holder from the queue. Its client is behind all others if it was the first.
    fn leave(&mut self, position: QueuePosition) {
        let (client, number) = position;
        if self.first() == Some(position) {
            self.queue.take_turn(client, |holders| holders.remove(&number));
        } else {
            self.queue.change(client, |holders| holders.remove(&number));
        }
    }

    /// The holder that grows above the shared part.
    fn first(&self) -> Option<QueuePosition> {
        let client = self.queue.next(|_| true)?;
        let (number, ()) = self.queue.get(client)?.first_key_value()?;
        Some((client, *number))
    }
}

/// The bytes do not fit the budget now, or did not until the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the byte budget is used up")]
pub struct BudgetExceeded;

/// Bytes that count against a budget until dropped.
#[derive(Debug)]
pub struct HeldBytes {
    budget: Arc<ByteBudget>,
    bytes: u64,
    /// The holder's position while it is in the queue.
    position: Option<QueuePosition>,
    /// The client that leaves room to others.
    client: Option<u64>,
}

impl ByteBudget {
    /// Creates a budget of `max_bytes` with fair growth: every queued holder completes eventually.
    #[must_use]
    pub fn with_fair_growth(max_bytes: u64, metrics: BufferKindMetrics) -> Arc<ByteBudget> {
        ByteBudget::new(max_bytes, max_bytes / SHARED_DIVISOR, metrics)
    }

    /// Creates a budget of `max_bytes` in which every holder may grow up to the bound, in order of its calls.
    #[must_use]
    pub fn first_come(max_bytes: u64, metrics: BufferKindMetrics) -> Arc<ByteBudget> {
        ByteBudget::new(max_bytes, max_bytes, metrics)
    }

    fn new(max_bytes: u64, shared_max_bytes: u64, metrics: BufferKindMetrics) -> Arc<ByteBudget> {
        Arc::new(ByteBudget {
            max_bytes,
            shared_max_bytes,
            state: Mutex::default(),
            changed: Notify::new(),
            metrics,
        })
    }

    /// Returns a holder of 0 bytes of the client with this number that is in the queue, for [`HeldBytes::grow`].
    #[must_use]
    pub fn hold_in_queue(self: &Arc<Self>, client: u64) -> HeldBytes {
        let position = self.state.lock().enter(client);
        self.holder(Some(position), None)
    }

    /// Returns a holder of 0 bytes that is not in the queue, for [`HeldBytes::try_grow`].
    #[must_use]
    pub fn hold(self: &Arc<Self>) -> HeldBytes {
        self.holder(None, None)
    }

    /// Returns a holder of 0 bytes of the client with this number for [`HeldBytes::try_grow`], which leaves room to other
    /// clients.
    #[must_use]
    pub fn hold_for(self: &Arc<Self>, client: u64) -> HeldBytes {
        self.holder(None, Some(client))
    }

    fn holder(self: &Arc<Self>, position: Option<QueuePosition>, client: Option<u64>) -> HeldBytes {
        HeldBytes {
            budget: Arc::clone(self),
            bytes: 0,
            position,
            client,
        }
    }

    /// Bytes of all holders.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.state.lock().used
    }

    /// Upper bound on the bytes of all holders.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Whether a holder waits until others release bytes.
    #[must_use]
    pub fn is_waited_for(&self) -> bool {
        self.metrics.waiting.get() > 0
    }

    /// Used bytes up to which the first holder in the queue may grow, and a client that is alone.
    fn first_max_bytes(&self) -> u64 {
        self.max_bytes / 8 * 7
    }

    /// Whether `client` leaves room to others with `bytes` more.
    fn leaves_room(&self, state: &BudgetState, client: u64, bytes: u64) -> bool {
        let of_client = state.by_client.get(&client);
        let is_alone = state.by_client.len() == usize::from(of_client.is_some());
        let bytes_of_client = of_client.copied().unwrap_or(0) + bytes;
        if is_alone {
            bytes_of_client <= self.first_max_bytes()
        } else {
            state.used + bytes <= self.max_bytes / 2 || bytes_of_client <= self.max_bytes / 8
        }
    }

    fn add_to_gauge(&self, change: i64) {
        self.metrics.used.inc_by(change);
    }
}

impl HeldBytes {
    /// Grows by `bytes`; waits until `deadline` for other holders to release bytes.
    ///
    /// # Errors
    /// [`BudgetExceeded`] at the deadline; immediately if the bytes can never fit, also not once all holders have
    /// released theirs that do not wait for this one.
    pub async fn grow(&mut self, bytes: u64, deadline: Instant) -> Result<(), BudgetExceeded> {
        let budget = Arc::clone(&self.budget);
        let mut waiting = None;
        let grown = retry_until(&budget.changed, deadline, || {
            if self.try_grow(bytes).is_ok() {
                return Poll::Ready(Ok(()));
            }
            if !self.may_fit_later(bytes, waiting.is_some()) {
                return Poll::Ready(Err(BudgetExceeded));
            }
            waiting.get_or_insert_with(|| self.begin_to_wait());
            Poll::Pending
        });
        let grown = grown.await;
        if grown.is_err() {
            self.record_refusal();
        }
        grown
    }

    /// Whether others may release enough for `bytes` more. `waits`: this holder is counted as waiting.
    fn may_fit_later(&self, bytes: u64, waits: bool) -> bool {
        let state = self.budget.state.lock();
        let is_first = self.position.is_some() && state.first() == self.position;
        let kept = match (is_first, waits) {
            (false, _) => 0,
            (true, false) => state.waiting,
            (true, true) => state.waiting - self.bytes,
        };
        self.bytes + bytes + kept <= self.budget.first_max_bytes()
    }

    fn begin_to_wait(&self) -> HolderWaiting {
        let bytes = self.position.map_or(0, |_| self.bytes);
        self.budget.state.lock().waiting += bytes;
        // The first one may now have nothing left to wait for.
        self.budget.changed.notify_waiters();
        HolderWaiting {
            budget: Arc::clone(&self.budget),
            bytes,
            _waiting: Counted::on(&self.budget.metrics.waiting),
        }
    }

    /// Grows by `bytes` without waiting.
    ///
    /// # Errors
    /// [`BudgetExceeded`] if they do not fit now.
    pub fn try_grow(&mut self, bytes: u64) -> Result<(), BudgetExceeded> {
        let budget = &self.budget;
        // One lock for the comparison and the addition: two holders must not both use the last bytes.
        let mut state = budget.state.lock();
        let is_first = self.position.is_some() && state.first() == self.position;
        let bound = if self.bytes + bytes <= budget.max_bytes / SMALL_HOLDER_DIVISOR {
            budget.max_bytes
        } else if is_first {
            budget.first_max_bytes()
        } else {
            budget.shared_max_bytes
        };
        let leaves_room = |client| budget.leaves_room(&state, client, bytes);
        if state.used + bytes > bound || !self.client.is_none_or(leaves_room) {
            return Err(BudgetExceeded);
        }
        state.add(self.client, bytes);
        self.bytes += bytes;
        budget.add_to_gauge(i64::try_from(bytes).unwrap_or(i64::MAX));
        Ok(())
    }

    /// Holds exactly `bytes`, which are in memory already, even beyond the bound. Others get nothing more until all
    /// holders have less than it again.
    pub fn set(&mut self, bytes: u64) {
        let Some(more) = bytes.checked_sub(self.bytes) else {
            return self.shrink(self.bytes - bytes);
        };
        self.budget.state.lock().add(self.client, more);
        self.bytes = bytes;
        self.budget.add_to_gauge(i64::try_from(more).unwrap_or(i64::MAX));
    }

    /// Counts a call whose bytes did not fit. [`HeldBytes::grow`] counts its own.
    pub fn record_refusal(&self) {
        self.budget.metrics.refused.inc();
    }

    /// Leaves the queue, so that the next holder becomes the first. Called when the response is complete.
    pub fn leave_queue(&mut self) {
        if let Some(position) = self.position.take() {
            self.budget.state.lock().leave(position);
            self.budget.changed.notify_waiters();
        }
    }

    /// Releases `bytes`, or all bytes if the holder has fewer.
    pub fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        if bytes > 0 {
            self.bytes -= bytes;
            self.budget.state.lock().release(self.client, bytes);
            self.budget
                .add_to_gauge(-i64::try_from(bytes).unwrap_or(i64::MAX));
            self.budget.changed.notify_waiters();
        }
    }

    /// Moves `bytes`, or all bytes if the holder has fewer, to a new holder that is not in the queue.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> HeldBytes {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        HeldBytes {
            budget: Arc::clone(&self.budget),
            bytes,
            position: None,
            client: self.client,
        }
    }

    /// Bytes that this holder has.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Makes an `attempt` to get bytes each time that `changed` is notified, until one is decided.
///
/// # Errors
/// [`BudgetExceeded`] by the attempt, or at the deadline.
pub(super) async fn retry_until(
    changed: &Notify,
    deadline: Instant,
    mut attempt: impl FnMut() -> Poll<Result<(), BudgetExceeded>>,
) -> Result<(), BudgetExceeded> {
    loop {
        // Created before the attempt: a release between the attempt and the wait is not missed.
        let notified = changed.notified();
        if let Poll::Ready(decided) = attempt() {
            return decided;
        }
        let waited = tokio::time::timeout_at(deadline, notified).await;
        waited.map_err(|_| BudgetExceeded)?;
    }
}

/// Counts a holder and its bytes as waiting until dropped.
#[derive(Debug)]
struct HolderWaiting {
    budget: Arc<ByteBudget>,
    bytes: u64,
    _waiting: Counted,
}

impl Drop for HolderWaiting {
    fn drop(&mut self) {
        self.budget.state.lock().waiting -= self.bytes;
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.leave_queue();
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn budget(mib: u64) -> Arc<ByteBudget> {
        ByteBudget::with_fair_growth(mib * MIB, BufferKindMetrics::default())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn clients_take_turns_to_grow_and_the_first_holder_stays_it() {
        let budget = budget(512);
        let noisy: Vec<_> = (0..3).map(|_| budget.hold_in_queue(1)).collect();
        let may_grow = |held: &HeldBytes| budget.state.lock().first() == held.position;
        assert!(may_grow(&noisy[0]));
        let honest = budget.hold_in_queue(2);
        assert!(may_grow(&noisy[0]), "it may have grown already");
        let mut noisy = noisy.into_iter();
        drop(noisy.next());
        assert!(may_grow(&honest), "before the client's other holders");
        drop(honest);
        assert!(may_grow(&noisy.next().unwrap()));
        drop(noisy);
        let state = budget.state.lock();
        assert!(state.queue.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn holders_above_the_shared_quarter_grow_only_if_oldest() {
        let budget = budget(512);
        let (mut oldest, mut next) = (budget.hold_in_queue(0), budget.hold_in_queue(0));
        oldest.grow(64 * MIB, soon()).await.unwrap();
        next.grow(64 * MIB, soon()).await.unwrap();
        assert_eq!(next.try_grow(MIB), Err(BudgetExceeded));
        oldest.grow(320 * MIB, soon()).await.unwrap();
        assert_eq!(
            oldest.try_grow(MIB),
            Err(BudgetExceeded),
            "the last eighth is reserved for small holders"
        );
        let mut small = budget.hold_in_queue(0);
        small.try_grow(MIB).unwrap();
        assert_eq!(small.try_grow(1), Err(BudgetExceeded));
        drop(small);

        let waits = tokio::spawn(async move { next.grow(100 * MIB, soon()).await.map(|()| next) });
        tokio::task::yield_now().await;
        oldest.leave_queue();
        tokio::task::yield_now().await;
        assert!(
            !waits.is_finished(),
            "it is the oldest now, but the budget is used up"
        );
        oldest.shrink(100 * MIB);
        let next = waits.await.unwrap().unwrap();
        assert_eq!(next.bytes(), 164 * MIB);
        drop((oldest, next));
        assert_eq!(budget.state.lock().used, 0);
        assert!(budget.state.lock().queue.is_empty());
        assert_eq!(budget.metrics.used.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn grow_without_free_bytes_fails_at_the_deadline() {
        let budget = budget(8);
        let (mut oldest, mut next) = (budget.hold_in_queue(0), budget.hold_in_queue(0));
        oldest.grow(5 * MIB, soon()).await.unwrap();
        let deadline = soon();
        assert_eq!(next.grow(2 * MIB, deadline).await, Err(BudgetExceeded));
        assert_eq!(Instant::now(), deadline);
        assert_eq!(
            oldest.grow(3 * MIB, soon()).await,
            Err(BudgetExceeded),
            "the bytes can never fit"
        );
        assert_eq!(Instant::now(), deadline, "so the call does not wait");
    }

    #[tokio::test(start_paused = true)]
    async fn first_holder_that_needs_the_bytes_of_waiting_ones_is_refused_at_once() {
        let budget = budget(8);
        let start = Instant::now();
        let (mut first, mut next) = (budget.hold_in_queue(0), budget.hold_in_queue(1));
        next.grow(2 * MIB, soon()).await.unwrap();
        first.grow(3 * MIB, soon()).await.unwrap();
        let mut sending = budget.hold();
        sending.set(2 * MIB);
        let waits = tokio::spawn(async move { (first.grow(3 * MIB, soon()).await, first) });
        tokio::task::yield_now().await;
        assert!(!waits.is_finished(), "the next one may complete");
        let next_waits = tokio::spawn(async move { next.grow(4 * MIB, soon()).await.map(|()| next) });
        let (refused, first) = waits.await.unwrap();
        assert_eq!(refused, Err(BudgetExceeded));
        assert_eq!(Instant::now(), start, "nothing waited for a deadline");
        assert!(!next_waits.is_finished(), "the first one still has its bytes");
        drop((first, sending));
        let next = next_waits.await.unwrap().unwrap();
        assert_eq!(next.bytes(), 6 * MIB);
        assert_eq!(Instant::now(), start, "nothing waited for a deadline");
        assert_eq!(budget.state.lock().waiting, 0);
    }

    #[test]
    fn split_off_bytes_are_released_separately() {
        let budget = budget(8);
        let mut held = budget.hold();
        held.try_grow(2 * MIB).unwrap();
        let part = held.split(MIB);
        drop(held);
        assert_eq!(budget.state.lock().used, MIB);
        drop(part);
        assert_eq!(budget.state.lock().used, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_in_memory_already_count_beyond_the_bound() {
        let budget = ByteBudget::first_come(8 * MIB, BufferKindMetrics::default());
        let (mut given, mut asking) = (budget.hold(), budget.hold());
        asking.try_grow(6 * MIB).unwrap();
        given.set(9 * MIB);
        assert_eq!(budget.used_bytes(), 15 * MIB);
        assert_eq!(asking.try_grow(1), Err(BudgetExceeded));
        let waiting = tokio::spawn(async move { asking.grow(MIB, soon()).await.map(|()| asking) });
        tokio::task::yield_now().await;
        assert!(budget.is_waited_for());
        given.set(MIB);
        let asking = waiting.await.unwrap().unwrap();
        assert_eq!(asking.bytes(), 7 * MIB);
        assert!(!budget.is_waited_for());
        assert_eq!(budget.used_bytes(), budget.max_bytes());
    }

    #[test]
    fn first_come_budget_grows_up_to_its_bound() {
        let budget = ByteBudget::first_come(8 * MIB, BufferKindMetrics::default());
        let (mut one, mut other) = (budget.hold(), budget.hold());
        one.try_grow(7 * MIB).unwrap();
        assert_eq!(other.try_grow(2 * MIB), Err(BudgetExceeded));
        other.try_grow(MIB).unwrap();
        assert_eq!(other.try_grow(1), Err(BudgetExceeded));
        assert_eq!(budget.metrics.used.get(), 8 << 20);
        drop(one);
        other.try_grow(7 * MIB).unwrap();
    }

    #[test]
    fn client_leaves_room_to_others() {
        let budget = ByteBudget::first_come(64 * MIB, BufferKindMetrics::default());
        let (mut one, mut more) = (budget.hold_for(1), budget.hold_for(1));
        one.try_grow(50 * MIB).unwrap();
        assert_eq!(more.try_grow(7 * MIB), Err(BudgetExceeded), "an eighth is left");
        let mut other = budget.hold_for(2);
        other.try_grow(8 * MIB).unwrap();
        assert_eq!(other.try_grow(1), Err(BudgetExceeded), "each next to others");
        assert_eq!(one.try_grow(1), Err(BudgetExceeded));
        drop(one);
        more.try_grow(24 * MIB).unwrap();
        assert_eq!(more.try_grow(1), Err(BudgetExceeded), "a half is used");
        let mut part = more.split(20 * MIB);
        drop(more);
        assert_eq!(part.try_grow(4 * MIB), Ok(()), "up to the half");
        drop((part, other));
        assert!(budget.state.lock().by_client.is_empty());
    }
}
