//! Slots: a bound on the calls that etcd, or this process, handles at once, and on those that wait for one. Every queue of calls
//! is one of these:
//!
//! - Waiting calls are served by client, in turn, and those of one client by connection. When too many wait, the client with the
//!   most of them loses its newest.
//! - A large read may keep its slot as long as its client reads. While several clients are connected, one of them has as many
//!   of these slots as are free, and an eighth in any case ([`SlotPolicy::Kept`]).
//! - Of the calls that are costly for etcd, each client has slots of its own ([`SlotPolicy::OfEachClient`]).
//! - Scans of memory pass their slots on after a number of entries ([`Slot::renew`]): a client's scans cost others by their
//!   entries, not by their number.

use std::collections::{HashMap, hash_map::Entry};
use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

use super::line::{Deadline, Exceeded, Line, Owner};
use super::{bytes::ClientAccount, metrics::SlotMetrics};

/// Of the slots that its clients keep, each gets its part by this divisor however many others have.
const CLIENT_DIVISOR: usize = 8;

/// Rule by which a client may have one more slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotPolicy {
    /// Any client, while there is a free one.
    Any,
    /// A client that leaves some to others.
    Kept,
    /// A client that has not all of its own.
    OfEachClient,
}

/// Bounds calls in flight, and calls that wait.
#[derive(Debug)]
pub struct Slots {
    policy: SlotPolicy,
    state: Mutex<SlotsState>,
    /// Longest wait of a call without a deadline; `None` if it waits until its client cancels it. Of
    /// [`SlotPolicy::OfEachClient`] that of every call.
    max_wait: Option<Duration>,
    metrics: SlotMetrics,
}

/// Tells a call that waits that it has a slot, or gets none.
type Waiter = oneshot::Sender<Result<Slot, Exceeded>>;

#[derive(Debug)]
struct SlotsState {
    /// Calls that may have a slot at once, with [`SlotPolicy::OfEachClient`] those of one client.
    max: usize,
    /// Calls that have one: more than `max` for a while after that was lowered. While there are fewer, no call waits whose
    /// client may have one more.
    taken: usize,
    /// Calls of each client that have one, unless any client may.
    by_client: HashMap<u64, usize>,
    /// Whether other clients were connected at the last call.
    has_others: bool,
    /// With [`SlotPolicy::OfEachClient`] those of one client.
    max_waiting: u32,
    /// Calls that wait, for a slot or for another read's response.
    waiting: u32,
    line: Line<Waiter>,
}

/// Permission for one call; passed to the next call when dropped.
#[derive(Debug)]
pub struct Slot {
    /// `None` once it was passed on.
    slots: Option<Arc<Slots>>,
    /// Number of the client whose call has it.
    client: u64,
    /// Number of the call, if it has waited.
    number: Option<u64>,
}

/// Guard that counts one call as waiting, and keeps its place in the line, until dropped.
#[derive(Debug)]
pub struct Waiting<'a> {
    slots: &'a Slots,
    place: Option<(Owner, u64)>,
}

impl Slots {
    /// Lets `max` calls be handled at once and `max_waiting` calls wait, those without a deadline for `max_wait`; with
    /// [`SlotPolicy::OfEachClient`] so many of each client, and each for `max_wait` at most.
    #[must_use]
    pub fn new(
        policy: SlotPolicy,
        max: usize,
        max_waiting: u32,
        max_wait: Option<Duration>,
        metrics: SlotMetrics,
    ) -> Arc<Slots> {
        Arc::new(Slots {
            policy,
            state: Mutex::new(SlotsState {
                max,
                taken: 0,
                by_client: HashMap::new(),
                has_others: false,
                max_waiting,
                waiting: 0,
                line: Line::default(),
            }),
            max_wait,
            metrics,
        })
    }

    /// Lets `max` calls of any client be handled at once, and any number wait, those without a deadline for `max_wait`. No metric
    /// counts them.
    #[must_use]
    pub fn uncounted(max: usize, max_wait: Option<Duration>) -> Arc<Slots> {
        Slots::new(SlotPolicy::Any, max, u32::MAX, max_wait, SlotMetrics::default())
    }

    /// Lets `max` calls be handled and `max_waiting` calls wait from now on. Calls over a lower bound keep their slots and
    /// places.
    pub fn set(self: &Arc<Self>, max: usize, max_waiting: u32) {
        {
            let mut state = self.state.lock();
            (state.max, state.max_waiting) = (max, max_waiting);
        }
        self.pass_on(None);
    }

    /// Returns a slot for a call of the connection with this `account`; waits for one until `deadline`.
    ///
    /// # Errors
    /// [`Exceeded`] when the wait is over, or immediately if too many calls wait.
    pub async fn acquire(
        self: &Arc<Self>,
        account: &ClientAccount,
        deadline: Deadline,
    ) -> Result<Slot, Exceeded> {
        if let Some(slot) = self.try_acquire(account) {
            return Ok(slot);
        }
        let owner = account.owner();
        let acquired = match self.count_waiting_of(Some(owner)) {
            Ok(waiting) => self.wait(owner, waiting, None, deadline).await,
            Err(cause) => Err(cause),
        };
        acquired.inspect_err(|cause| {
            self.metrics.record_refused(*cause);
            if *cause == Exceeded::Waiting || self.policy == SlotPolicy::OfEachClient {
                account.delay_after_refusal();
            }
        })
    }

    /// Returns a slot, if there is one now.
    pub fn try_acquire(self: &Arc<Self>, account: &ClientAccount) -> Option<Slot> {
        let client = account.client();
        let mut state = self.state.lock();
        if self.policy == SlotPolicy::Kept {
            state.has_others = account.has_others();
        }
        let taken = self.take(&mut state, client);
        drop(state);
        taken.then(|| self.slot(client))
    }

    /// Whether `client` may have one more. No other function decides that.
    fn permits(&self, state: &SlotsState, client: u64) -> bool {
        let of_client = || state.by_client.get(&client).copied().unwrap_or(0);
        let free = state.max.saturating_sub(state.taken);
        match self.policy {
            SlotPolicy::Kept if state.has_others => {
                free > 0 && of_client() < (state.max / CLIENT_DIVISOR).max(1).max(free)
            }
            SlotPolicy::Any | SlotPolicy::Kept => free > 0,
            SlotPolicy::OfEachClient => of_client() < state.max,
        }
    }

    /// Takes a slot for a call of `client`, if it may have one.
    fn take(&self, state: &mut SlotsState, client: u64) -> bool {
        let is_free = self.permits(state, client);
        if is_free {
            state.taken += 1;
            if self.policy != SlotPolicy::Any {
                *state.by_client.entry(client).or_default() += 1;
            }
        }
        is_free
    }

    /// The slot that `client` has taken.
    fn slot(self: &Arc<Self>, client: u64) -> Slot {
        self.metrics.in_flight.inc();
        Slot {
            slots: Some(Arc::clone(self)),
            client,
            number: None,
        }
    }

    /// Waits in the line, with the slot that a call has until it is there.
    async fn wait(
        self: &Arc<Self>,
        owner: Owner,
        mut waiting: Waiting<'_>,
        renewed: Option<Slot>,
        deadline: Deadline,
    ) -> Result<Slot, Exceeded> {
        let (sender, receiver) = oneshot::channel();
        let number = {
            let mut state = self.state.lock();
            // Given back since the first look: it would not be passed on to a call that enters its line now.
            if renewed.is_none() && self.take(&mut state, owner.client) {
                drop(state);
                return Ok(self.slot(owner.client));
            }
            let number = renewed.as_ref().and_then(|slot| slot.number);
            state.line.push(owner, number, sender)
        };
        // Removed from the line when the client cancels, too.
        waiting.place = Some((owner, number));
        drop(renewed);
        let late = self.max_wait.map(|max_wait| Instant::now() + max_wait);
        let until = match (deadline.at(), late) {
            (Some(at), Some(late)) if self.policy == SlotPolicy::OfEachClient && late < at => {
                Some((late, Exceeded::Late))
            }
            (Some(at), _) => Some((at, Exceeded::Deadline)),
            (None, late) => late.map(|late| (late, Exceeded::Late)),
        };
        let received = match until {
            None => receiver.await,
            Some((until, cause)) => tokio::time::timeout_at(until, receiver)
                .await
                .map_err(|_| cause)?,
        };
        // The sender is kept until it sends.
        let mut slot = received.unwrap_or(Err(Exceeded::Late))?;
        slot.number = Some(number);
        Ok(slot)
    }

    /// Counts the calling read as waiting for another read's response, until the guard is dropped.
    ///
    /// # Errors
    /// [`Exceeded::Waiting`] if the bound is reached.
    pub fn count_waiting(&self) -> Result<Waiting<'_>, Exceeded> {
        self.count_waiting_of(None)
    }

    /// Counts a call as waiting. Over the bound, the client with the longest line loses its newest call, or the
    /// connection with the longest line of the same client, unless that is `owner` itself.
    fn count_waiting_of(&self, owner: Option<Owner>) -> Result<Waiting<'_>, Exceeded> {
        let mut state = self.state.lock();
        let waiting = match (self.policy, owner) {
            (SlotPolicy::OfEachClient, Some(owner)) => state.line.len_of(owner.client),
            _ => state.waiting as usize,
        };
        let evicted = match waiting >= state.max_waiting as usize {
            true => Some(
                owner
                    .and_then(|owner| state.line.pop_longest(owner))
                    .ok_or(Exceeded::Waiting)?,
            ),
            false => None,
        };
        state.waiting += 1;
        drop(state);
        self.metrics.waiting.inc();
        if let Some(evicted) = evicted {
            // An error means that the call has just been cancelled.
            let _ = evicted.send(Err(Exceeded::Waiting));
        }
        Ok(Waiting {
            slots: self,
            place: None,
        })
    }

    /// Gives back the slot of the client in `ended`, and passes free ones on to calls that wait.
    fn pass_on(self: &Arc<Self>, mut ended: Option<u64>) {
        loop {
            let granted = {
                let mut state = self.state.lock();
                if let Some(client) = ended.take() {
                    self.metrics.in_flight.dec();
                    state.give_back(client);
                }
                if state.line.is_empty() {
                    return;
                }
                let mut line = std::mem::take(&mut state.line);
                let granted = line.pop(|client| self.permits(&state, client));
                state.line = line;
                granted.inspect(|(client, _)| {
                    self.take(&mut state, *client);
                })
            };
            let Some((client, waiter)) = granted else {
                return;
            };
            if let Err(Ok(mut unsent)) = waiter.send(Ok(self.slot(client))) {
                // The call was cancelled in this moment. Given back in the next turn of the loop, not when it is dropped.
                unsent.slots = None;
                ended = Some(client);
            }
        }
    }
}

impl SlotsState {
    /// Gives back a slot of `client`.
    fn give_back(&mut self, client: u64) {
        self.taken -= 1;
        if let Entry::Occupied(mut taken) = self.by_client.entry(client) {
            *taken.get_mut() -= 1;
            if *taken.get() == 0 {
                taken.remove();
            }
        }
    }
}

impl Slot {
    /// Passes the slot on to calls that wait, other clients' first, and waits for another one until `deadline`, in front of later
    /// calls of the connection with this `account`. Keeps the slot if no call waits.
    ///
    /// # Errors
    /// [`Exceeded`] when the wait is over.
    pub async fn renew(self, account: &ClientAccount, deadline: Deadline) -> Result<Slot, Exceeded> {
        let Some(slots) = self.slots.clone() else {
            return Ok(self);
        };
        {
            let mut state = slots.state.lock();
            if state.line.is_empty() {
                drop(state);
                return Ok(self);
            }
            // Whatever the bound: it was let in before.
            state.waiting += 1;
        }
        slots.metrics.waiting.inc();
        let waiting = Waiting {
            slots: &slots,
            place: None,
        };
        let renewed = slots.wait(account.owner(), waiting, Some(self), deadline).await;
        renewed.inspect_err(|cause| slots.metrics.record_refused(*cause))
    }
}

/// Access of one call to slots.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    /// Of which the call needs one.
    pub slots: &'a Arc<Slots>,
    /// Account of the client's connection.
    pub account: &'a Arc<ClientAccount>,
    /// Until when its client waits.
    pub deadline: Deadline,
}

impl Gate<'_> {
    /// Waits for a slot.
    ///
    /// # Errors
    /// [`Exceeded`] at the deadline, or if too many calls wait.
    pub async fn acquire(self) -> Result<Slot, Exceeded> {
        self.slots.acquire(self.account, self.deadline).await
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(slots) = self.slots.take() {
            slots.pass_on(Some(self.client));
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.slots.state.lock();
        state.waiting -= 1;
        let removed = self
            .place
            .and_then(|(owner, number)| state.line.remove(owner, number));
        drop(state);
        drop(removed);
        self.slots.metrics.waiting.dec();
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;
    use crate::limits::{BytesLedger, Intake, SlotsMetrics};

    struct Scene {
        slots: Arc<Slots>,
        metrics: SlotMetrics,
        clients: Vec<Arc<ClientAccount>>,
    }

    impl Scene {
        fn new(max_slots: usize, max_waiting: u32) -> Scene {
            let buffers = BytesLedger::of_bytes(1 << 20);
            let slots = SlotsMetrics::default().small();
            Scene {
                slots: Slots::new(
                    SlotPolicy::Any,
                    max_slots,
                    max_waiting,
                    Some(Duration::from_secs(30)),
                    slots.clone(),
                ),
                metrics: slots,
                clients: (0..3)
                    .map(|client| buffers.account(client, Arc::<Intake>::default()))
                    .collect(),
            }
        }

        /// Starts a call of a client that waits for a slot.
        async fn waits(&self, client: usize) -> JoinHandle<Result<Slot, Exceeded>> {
            let (slots, account) = (Arc::clone(&self.slots), Arc::clone(&self.clients[client]));
            let call = tokio::spawn(async move { slots.acquire(&account, Deadline::NONE).await });
            settle().await;
            call
        }

        async fn acquire(&self, deadline: Deadline) -> Result<Slot, Exceeded> {
            self.slots.acquire(&self.clients[0], deadline).await
        }

        fn counted(&self) -> (i64, i64) {
            (self.metrics.in_flight.get(), self.metrics.waiting.get())
        }
    }

    fn within(seconds: u64) -> Deadline {
        Deadline::after(Instant::now(), Some(Duration::from_secs(seconds)))
    }

    async fn settle() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn call_waits_until_a_slot_is_dropped() {
        let scene = Scene::new(1, 1);
        let first = scene.acquire(Deadline::NONE).await.unwrap();
        let second = scene.waits(0).await;
        assert!(!second.is_finished());
        assert_eq!(scene.counted(), (1, 1));
        drop(first);
        let second = second.await.unwrap().unwrap();
        assert_eq!(scene.counted(), (1, 0));
        drop(second);
        assert_eq!(scene.counted(), (0, 0));
    }

    #[tokio::test]
    async fn call_beyond_the_waiting_bound_is_refused_at_once() {
        let scene = Scene::new(1, 1);
        let slot = scene.acquire(Deadline::NONE).await.unwrap();
        let guard = scene.slots.count_waiting().unwrap();
        assert_eq!(
            scene.acquire(Deadline::NONE).await.unwrap_err(),
            Exceeded::Waiting
        );
        assert_eq!(scene.counted(), (1, 1), "the refused call is not counted");
        drop(guard);
        assert_eq!(scene.counted(), (1, 0));
        assert!(scene.slots.count_waiting().is_ok());
        drop(slot);
        assert!(scene.acquire(Deadline::NONE).await.is_ok());
    }

    #[tokio::test]
    async fn client_with_many_waiting_calls_delays_another_by_one_call() {
        let scene = Scene::new(1, 100);
        let slot = scene.acquire(Deadline::NONE).await.unwrap();
        let mut many = Vec::new();
        for _ in 0..20 {
            many.push(scene.waits(0).await);
        }
        let other = scene.waits(1).await;
        drop(slot);
        settle().await;
        let done = many.remove(0).await.unwrap();
        assert!(!other.is_finished());
        drop(done);
        drop(other.await.unwrap().unwrap());
        for call in many {
            drop(call.await.unwrap().unwrap());
        }
        assert_eq!(scene.counted(), (0, 0));
    }

    #[tokio::test]
    async fn client_with_most_waiting_calls_loses_its_newest_to_another() {
        let scene = Scene::new(1, 2);
        let slot = scene.acquire(Deadline::NONE).await.unwrap();
        let (oldest, newest) = (scene.waits(0).await, scene.waits(0).await);
        let other = scene.waits(1).await;
        assert_eq!(newest.await.unwrap().unwrap_err(), Exceeded::Waiting);
        settle().await;
        assert_eq!(scene.counted(), (1, 2));
        assert_eq!(
            scene.waits(2).await.await.unwrap().unwrap_err(),
            Exceeded::Waiting,
            "all lines are short"
        );
        drop(slot);
        drop(oldest.await.unwrap().unwrap());
        drop(other.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn wait_ends_at_the_deadline_or_at_the_bound_and_leaves_the_line() {
        let scene = Scene::new(1, 10);
        let slot = scene.acquire(Deadline::NONE).await.unwrap();
        let soon = Instant::now() + Duration::from_secs(1);
        assert_eq!(scene.acquire(within(1)).await.unwrap_err(), Exceeded::Deadline);
        assert_eq!(Instant::now(), soon);
        assert_eq!(scene.acquire(Deadline::NONE).await.unwrap_err(), Exceeded::Late);
        assert_eq!(Instant::now(), soon + Duration::from_secs(30));
        assert_eq!(scene.counted(), (1, 0));
        drop(slot);
        assert_eq!(scene.slots.state.lock().taken, 0, "no call that has left gets it");
    }

    #[tokio::test]
    async fn slot_of_a_cancelled_call_is_passed_on() {
        let scene = Scene::new(1, 10);
        let slot = scene.acquire(Deadline::NONE).await.unwrap();
        let (cancelled, next) = (scene.waits(0).await, scene.waits(1).await);
        // The slot is sent to a call that is cancelled before it takes it.
        drop(slot);
        cancelled.abort();
        drop(cancelled.await);
        drop(next.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
        assert_eq!(scene.slots.state.lock().taken, 0);
    }

    /// A call that renews its slot so many times.
    fn long_call(slot: Slot, account: &Arc<ClientAccount>, renewals: usize) -> JoinHandle<()> {
        let account = Arc::clone(account);
        tokio::spawn(async move {
            let mut slot = slot;
            for _ in 0..renewals {
                slot = slot.renew(&account, Deadline::NONE).await.unwrap();
            }
        })
    }

    #[tokio::test]
    async fn turn_that_is_renewed_goes_to_another_client_first_and_then_to_the_call_that_had_it() {
        let scene = Scene::new(1, 100);
        let slot = scene.acquire(Deadline::NONE).await.unwrap();
        let slot = slot.renew(&scene.clients[0], Deadline::NONE).await.unwrap();
        assert_eq!(scene.counted(), (1, 0), "no call waits");
        let later = [scene.waits(0).await, scene.waits(0).await];
        drop(slot);
        let [first, second] = later;
        let first = first.await.unwrap().unwrap();
        let other = scene.waits(1).await;
        let first = long_call(first, &scene.clients[0], 3);
        let other = other.await.unwrap().unwrap();
        settle().await;
        assert!(
            !first.is_finished() && !second.is_finished(),
            "after one slot of each"
        );
        assert_eq!(scene.counted(), (1, 2));
        drop(other);
        first.await.unwrap();
        drop(second.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
        assert_eq!(scene.slots.state.lock().taken, 0);
    }

    #[tokio::test]
    async fn calls_are_delayed_by_as_many_renewals_as_they_need_themselves() {
        let scene = Scene::new(1, 1);
        let slot = scene.acquire(Deadline::NONE).await.unwrap();
        let short = scene.waits(1).await;
        let long = long_call(slot, &scene.clients[0], 100);
        let short = short.await.unwrap().unwrap();
        assert_eq!(scene.counted(), (1, 1), "beyond the bound on calls that wait");
        let mut renewed = short;
        for _ in 0..10 {
            renewed = renewed.renew(&scene.clients[1], Deadline::NONE).await.unwrap();
            assert!(!long.is_finished());
        }
        drop(renewed);
        long.await.unwrap();
        assert_eq!(scene.counted(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn call_that_renews_its_slot_waits_until_its_deadline_and_leaves_the_line() {
        let scene = Scene::new(1, 100);
        let slot = scene.acquire(Deadline::NONE).await.unwrap();
        let other = scene.waits(1).await;
        let renewed = slot.renew(&scene.clients[0], within(1)).await;
        assert_eq!(renewed.unwrap_err(), Exceeded::Deadline);
        drop(other.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
        assert!(scene.slots.state.lock().line.is_empty());
    }

    #[tokio::test]
    async fn client_that_keeps_its_turns_leaves_half_to_others_while_they_are_connected() {
        let buffers = BytesLedger::of_bytes(1 << 20);
        let account = |client| buffers.account(client, Arc::<Intake>::default());
        let slots = Slots::new(SlotPolicy::Kept, 16, 100, None, SlotMetrics::default());
        let noisy = account(1);
        let take_all = |account: &Arc<ClientAccount>| -> Vec<Slot> {
            std::iter::from_fn(|| slots.try_acquire(account)).collect()
        };
        assert_eq!(take_all(&noisy).len(), 16, "no other client is connected");
        let honest = account(2);
        let mut kept = take_all(&noisy);
        assert_eq!(kept.len(), 8);
        let (of_slots, of_noisy) = (Arc::clone(&slots), Arc::clone(&noisy));
        let waits = tokio::spawn(async move { of_slots.acquire(&of_noisy, Deadline::NONE).await });
        settle().await;
        let others = take_all(&honest);
        assert_eq!(others.len(), 4);
        // Six are free, fewer than the noisy client has.
        drop(others);
        settle().await;
        assert!(!waits.is_finished());
        drop(kept.pop());
        let slot = waits.await.unwrap().unwrap();
        drop((kept, slot));
        assert_eq!(slots.state.lock().taken, 0);
        assert!(slots.state.lock().by_client.is_empty());
    }

    #[tokio::test]
    async fn bound_that_is_raised_lets_waiting_calls_go_and_a_lower_one_is_kept_once_slots_end() {
        let scene = Scene::new(1, 4);
        let first = scene.acquire(Deadline::NONE).await.unwrap();
        let (second, third) = (scene.waits(0).await, scene.waits(1).await);
        assert_eq!(scene.counted(), (1, 2));
        scene.slots.set(3, 4);
        let slots = [second.await.unwrap().unwrap(), third.await.unwrap().unwrap()];
        assert_eq!(scene.counted(), (3, 0));
        scene.slots.set(1, 4);
        let fourth = scene.waits(2).await;
        drop(slots);
        settle().await;
        assert_eq!(scene.counted(), (1, 1), "two slots have ended");
        drop(first);
        drop(fourth.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
        scene.slots.set(2, 4);
        assert_eq!(scene.counted(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn costly_calls_of_one_client_wait_for_each_other() {
        let buffers = BytesLedger::of_bytes(1 << 20);
        let [noisy, honest] = [1, 2].map(|client| buffers.account(client, Arc::default()));
        let (policy, max_waiting, max_wait) = (SlotPolicy::OfEachClient, 4, Duration::from_secs(10));
        let slots = Slots::new(policy, 2, max_waiting, Some(max_wait), SlotMetrics::default());
        let first = slots.acquire(&noisy, Deadline::NONE).await.unwrap();
        let _second = slots.acquire(&noisy, Deadline::NONE).await.unwrap();
        let mut third = Box::pin(slots.acquire(&noisy, Deadline::NONE));
        assert!(futures_util::poll!(&mut third).is_pending());
        assert!(slots.acquire(&honest, Deadline::NONE).await.is_ok());
        drop(first);
        let _third = third.await.unwrap();
        let begun = Instant::now();
        for far in [Deadline::NONE, within(60)] {
            let late = slots.acquire(&noisy, far).await;
            assert_eq!(late.unwrap_err(), Exceeded::Late);
        }
        assert_eq!(begun.elapsed(), 2 * max_wait);
        let late = slots.acquire(&noisy, within(1)).await;
        assert_eq!(
            (late.unwrap_err(), begun.elapsed()),
            (Exceeded::Deadline, 2 * max_wait + Duration::from_secs(1))
        );
        let mut waiting: Vec<_> = (0..max_waiting)
            .map(|_| Box::pin(slots.acquire(&noisy, Deadline::NONE)))
            .collect();
        for call in &mut waiting {
            assert!(futures_util::poll!(call).is_pending());
        }
        let refused = slots.acquire(&noisy, Deadline::NONE).await;
        assert_eq!(refused.unwrap_err(), Exceeded::Waiting);
        assert!(slots.acquire(&honest, Deadline::NONE).await.is_ok());
        drop((waiting, _second, _third));
        assert!(
            slots.state.lock().by_client.is_empty(),
            "nothing is kept of a client without a call"
        );
    }
}
