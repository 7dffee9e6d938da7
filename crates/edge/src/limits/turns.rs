//! Turns: a bound on the calls that etcd, or this process, handles at once, and on those that wait for one. Large reads have turns of
//! their own (`--forward-max-large`), small reads and new watches others (`--forward-max-small`).
//!
//! Waiting calls are served by client, in turn, and those of one client by connection. When too many wait, the client
//! with the most of them loses its newest.
//!
//! Scans of memory have turns as well, and pass them on after a number of entries ([`Turn::renew`]): a client's scans cost
//! others by their entries, not by their number.
//!
//! A large read may keep its turn as long as its client reads. While several clients are connected, one of them has as many
//! of these turns as are free, and an eighth in any case.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::call_bytes::ClientAccount;
use super::metrics::TurnMetrics;
use super::waiters::{Owner, Waiters};

/// Of the turns that its clients keep, each gets its part by this divisor however many others have.
const CLIENT_DIVISOR: usize = 8;

/// Bounds calls to etcd, and calls that wait.
#[derive(Debug)]
pub struct Turns {
    state: Mutex<TurnState>,
    /// Longest wait of a call without a deadline; `None` if it waits until its client cancels it.
    max_wait: Option<Duration>,
    metrics: TurnMetrics,
}

/// Tells a call that waits that it has a turn, or gets none.
type WaiterSender = oneshot::Sender<Result<Turn, NoTurn>>;

#[derive(Debug)]
struct TurnState {
    /// Calls that may be sent to etcd at once.
    max_turns: usize,
    /// Calls that have a turn: more than `max_turns` for a while after that was lowered. While there are fewer, no call
    /// waits whose client may have one more.
    taken: usize,
    /// Calls of each client that have a turn, and whether other clients are connected; `None` for turns that clients
    /// cannot keep.
    by_client: Option<ByClient>,
    max_waiting: u32,
    /// Calls that wait, for a turn or for another read's response.
    waiting: u32,
    waiters: Waiters<WaiterSender>,
}

#[derive(Debug, Default)]
struct ByClient {
    taken: HashMap<u64, usize>,
    /// Whether other clients were connected at the last call.
    has_others: bool,
}

/// Permission for one call; passed to the next call when dropped.
#[derive(Debug)]
pub struct Turn {
    /// `None` once it was passed on.
    turns: Option<Arc<Turns>>,
    /// Number of the client whose call has it.
    client: u64,
    /// Number of the call, if it has waited.
    number: Option<u64>,
}

/// Guard that counts one call as waiting until dropped.
#[derive(Debug)]
pub struct Waiting<'a>(&'a Turns);

/// Reason for which a call got no turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoTurn {
    /// The bound on waiting calls is reached.
    #[error("too many reads wait")]
    TooManyWaiting,
    /// A call without a deadline has waited as long as it may.
    #[error("etcd is too busy")]
    Late,
    /// The caller's deadline has expired.
    #[error("the deadline has expired")]
    Deadline,
}

impl NoTurn {
    /// Value of the label `reason`.
    fn as_str(self) -> &'static str {
        match self {
            NoTurn::TooManyWaiting => "too_many_waiting",
            NoTurn::Late => "late",
            NoTurn::Deadline => "deadline",
        }
    }
}

impl TurnState {
    /// Whether there is a turn for a call of `client`.
    fn may_take(&self, client: u64) -> bool {
        let free = self.max_turns.saturating_sub(self.taken);
        let Some(by_client) = self.by_client.as_ref().filter(|by_client| by_client.has_others) else {
            return free > 0;
        };
        let of_client = by_client.taken.get(&client).copied().unwrap_or(0);
        free > 0 && of_client < (self.max_turns / CLIENT_DIVISOR).max(1).max(free)
    }

    fn take(&mut self, client: u64) {
        self.taken += 1;
        if let Some(by_client) = &mut self.by_client {
            *by_client.taken.entry(client).or_default() += 1;
        }
    }

    /// Takes a turn for a call of `client`, if there is one.
    fn take_free(&mut self, client: u64) -> bool {
        let may_take = self.may_take(client);
        if may_take {
            self.take(client);
        }
        may_take
    }

    /// Gives back a turn of `client`.
    fn give_back(&mut self, client: u64) {
        self.taken -= 1;
        if let Some(by_client) = &mut self.by_client
            && let Entry::Occupied(mut taken) = by_client.taken.entry(client)
        {
            *taken.get_mut() -= 1;
            if *taken.get() == 0 {
                taken.remove();
            }
        }
    }

    /// Takes turns for the calls that wait, as far as there are any; returns the calls with their clients.
    fn grant(&mut self) -> Vec<(u64, WaiterSender)> {
        let mut granted = Vec::new();
        loop {
            let mut waiters = std::mem::take(&mut self.waiters);
            let next = waiters.pop(|client| self.may_take(client));
            self.waiters = waiters;
            let Some((client, waiter)) = next else {
                return granted;
            };
            self.take(client);
            granted.push((client, waiter));
        }
    }
}

impl Turns {
    /// Lets `max_turns` calls be sent to etcd at once and `max_waiting` calls wait, those without a deadline for
    /// `max_wait`.
    #[must_use]
    pub fn new(
        max_turns: usize,
        max_waiting: u32,
        max_wait: Option<Duration>,
        metrics: TurnMetrics,
    ) -> Arc<Turns> {
        Turns::with(max_turns, max_waiting, max_wait, None, metrics)
    }

    /// Lets `max_turns` calls keep turns until their clients have read the response; `max_waiting` calls wait without limit.
    #[must_use]
    pub fn kept_by_clients(max_turns: usize, max_waiting: u32, metrics: TurnMetrics) -> Arc<Turns> {
        Turns::with(max_turns, max_waiting, None, Some(ByClient::default()), metrics)
    }

    fn with(
        max_turns: usize,
        max_waiting: u32,
        max_wait: Option<Duration>,
        by_client: Option<ByClient>,
        metrics: TurnMetrics,
    ) -> Arc<Turns> {
        Arc::new(Turns {
            state: Mutex::new(TurnState {
                max_turns,
                taken: 0,
                by_client,
                max_waiting,
                waiting: 0,
                waiters: Waiters::default(),
            }),
            max_wait,
            metrics,
        })
    }

    /// Returns a turn for a call of the connection with this `account`; waits for one until `deadline`.
    ///
    /// # Errors
    /// [`NoTurn`] when the wait is over, or immediately if too many calls wait.
    pub async fn acquire(
        self: &Arc<Self>,
        account: &ClientAccount,
        deadline: Option<Instant>,
    ) -> Result<Turn, NoTurn> {
        if let Some(turn) = self.take_free(account) {
            return Ok(turn);
        }
        let acquired = self.wait(account, deadline).await;
        if let Err(cause) = acquired {
            self.metrics.record_refused(cause.as_str());
            if cause == NoTurn::TooManyWaiting {
                account.delay_after_refusal();
            }
        }
        acquired
    }

    fn take_free(self: &Arc<Self>, account: &ClientAccount) -> Option<Turn> {
        let client = account.client();
        {
            let mut state = self.state.lock();
            if let Some(by_client) = &mut state.by_client {
                by_client.has_others = account.has_others();
            }
            if !state.take_free(client) {
                return None;
            }
        }
        self.metrics.in_flight.inc();
        Some(self.turn(client))
    }

    /// The turn that `client` has taken.
    fn turn(self: &Arc<Self>, client: u64) -> Turn {
        Turn {
            turns: Some(Arc::clone(self)),
            client,
            number: None,
        }
    }

    /// Lets `max_turns` calls be sent and `max_waiting` calls wait from now on. Calls over a lower bound keep their turns
    /// and places.
    pub fn set(self: &Arc<Self>, max_turns: usize, max_waiting: u32) {
        let granted = {
            let mut state = self.state.lock();
            (state.max_turns, state.max_waiting) = (max_turns, max_waiting);
            state.grant()
        };
        let unsent = self.send(granted);
        self.pass_on(unsent);
    }

    async fn wait(
        self: &Arc<Self>,
        account: &ClientAccount,
        deadline: Option<Instant>,
    ) -> Result<Turn, NoTurn> {
        let owner = Owner::new(account);
        let _waiting = self.count_waiting_of(Some(owner))?;
        let (sender, receiver) = oneshot::channel();
        let number = {
            let mut state = self.state.lock();
            // Given back since the first look: it would not be passed on to a call that enters its line now.
            if state.take_free(owner.client) {
                self.metrics.in_flight.inc();
                return Ok(self.turn(owner.client));
            }
            state.waiters.push(owner, None, sender)
        };
        self.wait_in_line(owner, number, receiver, deadline).await
    }

    async fn wait_in_line(
        self: &Arc<Self>,
        owner: Owner,
        number: u64,
        receiver: oneshot::Receiver<Result<Turn, NoTurn>>,
        deadline: Option<Instant>,
    ) -> Result<Turn, NoTurn> {
        // Dropped when the client cancels, too.
        let _in_line = InLine {
            turns: self,
            owner,
            number,
        };
        let until = deadline.or_else(|| self.max_wait.map(|wait| Instant::now() + wait));
        let received = match until {
            None => receiver.await,
            Some(until) => match tokio::time::timeout_at(until, receiver).await {
                Ok(received) => received,
                Err(_) => return Err(deadline.map_or(NoTurn::Late, |_| NoTurn::Deadline)),
            },
        };
        // The sender is kept until it sends.
        let mut turn = received.unwrap_or(Err(NoTurn::Late))?;
        turn.number = Some(number);
        Ok(turn)
    }

    /// Counts the calling read as waiting for another read's response, until the guard is dropped.
    ///
    /// # Errors
    /// [`NoTurn::TooManyWaiting`] if the bound is reached.
    pub fn count_waiting(&self) -> Result<Waiting<'_>, NoTurn> {
        self.count_waiting_of(None)
    }

    /// Counts a call as waiting. Over the bound, the client with the longest line loses its newest call, or the
    /// connection with the longest line of the same client, unless that is `owner` itself.
    fn count_waiting_of(&self, owner: Option<Owner>) -> Result<Waiting<'_>, NoTurn> {
        let evicted = {
            let mut state = self.state.lock();
            let mut evicted = None;
            if state.waiting >= state.max_waiting {
                evicted = owner.and_then(|owner| state.waiters.pop_longest(owner));
                if evicted.is_none() {
                    return Err(NoTurn::TooManyWaiting);
                }
            }
            state.waiting += 1;
            evicted
        };
        self.metrics.waiting.inc();
        if let Some(evicted) = evicted {
            // An error means that the call has just been cancelled.
            let _ = evicted.send(Err(NoTurn::TooManyWaiting));
        }
        Ok(Waiting(self))
    }

    /// Passes turns of these clients to calls that wait.
    fn pass_on(self: &Arc<Self>, mut ended: Vec<u64>) {
        while let Some(client) = ended.pop() {
            self.metrics.in_flight.dec();
            let granted = {
                let mut state = self.state.lock();
                state.give_back(client);
                state.grant()
            };
            ended.extend(self.send(granted));
        }
    }

    /// Sends turns to the calls that have been granted them; returns the clients of those that were cancelled in this
    /// moment.
    fn send(self: &Arc<Self>, granted: Vec<(u64, WaiterSender)>) -> Vec<u64> {
        let mut unsent = Vec::new();
        for (client, waiter) in granted {
            self.metrics.in_flight.inc();
            // Disarmed, so that dropping it does not pass it on a second time.
            if let Err(Ok(mut turn)) = waiter.send(Ok(self.turn(client))) {
                turn.turns = None;
                unsent.push(client);
            }
        }
        unsent
    }
}

impl Turn {
    /// Passes the turn on to calls that wait, other clients' first, and waits for another one until `deadline`, in front of later
    /// calls of the connection with this `account`. Keeps the turn if no call waits.
    ///
    /// # Errors
    /// [`NoTurn`] when the wait is over.
    pub async fn renew(self, account: &ClientAccount, deadline: Option<Instant>) -> Result<Turn, NoTurn> {
        let Some(turns) = self.turns.clone() else {
            return Ok(self);
        };
        let owner = Owner::new(account);
        let (sender, receiver) = oneshot::channel();
        let number = {
            let mut state = turns.state.lock();
            if state.waiters.is_empty() {
                drop(state);
                return Ok(self);
            }
            // Whatever the bound: it was let in before.
            state.waiting += 1;
            state.waiters.push(owner, self.number, sender)
        };
        turns.metrics.waiting.inc();
        let _waiting = Waiting(&turns);
        drop(self);
        let renewed = turns.wait_in_line(owner, number, receiver, deadline).await;
        if let Err(cause) = renewed {
            turns.metrics.record_refused(cause.as_str());
        }
        renewed
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(turns) = self.turns.take() {
            turns.pass_on(vec![self.client]);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waiting -= 1;
        self.0.metrics.waiting.dec();
    }
}

/// A call in its client's line, which it leaves when dropped.
struct InLine<'a> {
    turns: &'a Turns,
    owner: Owner,
    number: u64,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let removed = self.turns.state.lock().waiters.remove(self.owner, self.number);
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;
    use crate::limits::{BufferMetrics, CallBuffers, Intake, TurnsMetrics};

    struct Scene {
        turns: Arc<Turns>,
        metrics: TurnMetrics,
        clients: Vec<Arc<ClientAccount>>,
    }

    impl Scene {
        fn new(max_turns: usize, max_waiting: u32) -> Scene {
            let buffers = CallBuffers::new(1 << 20, &BufferMetrics::default());
            let turns = TurnsMetrics::default().small();
            Scene {
                turns: Turns::new(
                    max_turns,
                    max_waiting,
                    Some(Duration::from_secs(30)),
                    turns.clone(),
                ),
                metrics: turns,
                clients: (0..3)
                    .map(|client| buffers.account(client, Arc::<Intake>::default()))
                    .collect(),
            }
        }

        /// Starts a call of a client that waits for a turn.
        async fn waits(&self, client: usize) -> JoinHandle<Result<Turn, NoTurn>> {
            let (turns, account) = (Arc::clone(&self.turns), Arc::clone(&self.clients[client]));
            let call = tokio::spawn(async move { turns.acquire(&account, None).await });
            settle().await;
            call
        }

        async fn acquire(&self, deadline: Option<Instant>) -> Result<Turn, NoTurn> {
            self.turns.acquire(&self.clients[0], deadline).await
        }

        fn counted(&self) -> (i64, i64) {
            (self.metrics.in_flight.get(), self.metrics.waiting.get())
        }
    }

    async fn settle() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn call_waits_until_a_turn_is_dropped() {
        let scene = Scene::new(1, 1);
        let first = scene.acquire(None).await.unwrap();
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
        let turn = scene.acquire(None).await.unwrap();
        let guard = scene.turns.count_waiting().unwrap();
        assert_eq!(scene.acquire(None).await.unwrap_err(), NoTurn::TooManyWaiting);
        assert_eq!(scene.counted(), (1, 1), "the refused call is not counted");
        drop(guard);
        assert_eq!(scene.counted(), (1, 0));
        assert!(scene.turns.count_waiting().is_ok());
        drop(turn);
        assert!(scene.acquire(None).await.is_ok());
    }

    #[tokio::test]
    async fn client_with_many_waiting_calls_delays_another_by_one_call() {
        let scene = Scene::new(1, 100);
        let turn = scene.acquire(None).await.unwrap();
        let mut many = Vec::new();
        for _ in 0..20 {
            many.push(scene.waits(0).await);
        }
        let other = scene.waits(1).await;
        drop(turn);
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
        let turn = scene.acquire(None).await.unwrap();
        let (oldest, newest) = (scene.waits(0).await, scene.waits(0).await);
        let other = scene.waits(1).await;
        assert_eq!(newest.await.unwrap().unwrap_err(), NoTurn::TooManyWaiting);
        settle().await;
        assert_eq!(scene.counted(), (1, 2));
        assert_eq!(
            scene.waits(2).await.await.unwrap().unwrap_err(),
            NoTurn::TooManyWaiting,
            "all lines are short"
        );
        drop(turn);
        drop(oldest.await.unwrap().unwrap());
        drop(other.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn wait_ends_at_the_deadline_or_at_the_bound_and_leaves_the_line() {
        let scene = Scene::new(1, 10);
        let turn = scene.acquire(None).await.unwrap();
        let soon = Instant::now() + Duration::from_secs(1);
        assert_eq!(scene.acquire(Some(soon)).await.unwrap_err(), NoTurn::Deadline);
        assert_eq!(Instant::now(), soon);
        assert_eq!(scene.acquire(None).await.unwrap_err(), NoTurn::Late);
        assert_eq!(Instant::now(), soon + Duration::from_secs(30));
        assert_eq!(scene.counted(), (1, 0));
        drop(turn);
        assert_eq!(scene.turns.state.lock().taken, 0, "no call that has left gets it");
    }

    #[tokio::test]
    async fn turn_of_a_cancelled_call_is_passed_on() {
        let scene = Scene::new(1, 10);
        let turn = scene.acquire(None).await.unwrap();
        let (cancelled, next) = (scene.waits(0).await, scene.waits(1).await);
        // The turn is sent to a call that is cancelled before it takes it.
        drop(turn);
        cancelled.abort();
        drop(cancelled.await);
        drop(next.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
        assert_eq!(scene.turns.state.lock().taken, 0);
    }

    /// A call that renews its turn so many times.
    fn long_call(turn: Turn, account: &Arc<ClientAccount>, renewals: usize) -> JoinHandle<()> {
        let account = Arc::clone(account);
        tokio::spawn(async move {
            let mut turn = turn;
            for _ in 0..renewals {
                turn = turn.renew(&account, None).await.unwrap();
            }
        })
    }

    #[tokio::test]
    async fn turn_that_is_renewed_goes_to_another_client_first_and_then_to_the_call_that_had_it() {
        let scene = Scene::new(1, 100);
        let turn = scene.acquire(None).await.unwrap();
        let turn = turn.renew(&scene.clients[0], None).await.unwrap();
        assert_eq!(scene.counted(), (1, 0), "no call waits");
        let later = [scene.waits(0).await, scene.waits(0).await];
        drop(turn);
        let [first, second] = later;
        let first = first.await.unwrap().unwrap();
        let other = scene.waits(1).await;
        let first = long_call(first, &scene.clients[0], 3);
        let other = other.await.unwrap().unwrap();
        settle().await;
        assert!(
            !first.is_finished() && !second.is_finished(),
            "after one turn of each"
        );
        assert_eq!(scene.counted(), (1, 2));
        drop(other);
        first.await.unwrap();
        drop(second.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
        assert_eq!(scene.turns.state.lock().taken, 0);
    }

    #[tokio::test]
    async fn calls_are_delayed_by_as_many_renewals_as_they_need_themselves() {
        let scene = Scene::new(1, 1);
        let turn = scene.acquire(None).await.unwrap();
        let short = scene.waits(1).await;
        let long = long_call(turn, &scene.clients[0], 100);
        let short = short.await.unwrap().unwrap();
        assert_eq!(scene.counted(), (1, 1), "beyond the bound on calls that wait");
        let mut renewed = short;
        for _ in 0..10 {
            renewed = renewed.renew(&scene.clients[1], None).await.unwrap();
            assert!(!long.is_finished());
        }
        drop(renewed);
        long.await.unwrap();
        assert_eq!(scene.counted(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn call_that_renews_its_turn_waits_until_its_deadline_and_leaves_the_line() {
        let scene = Scene::new(1, 100);
        let turn = scene.acquire(None).await.unwrap();
        let other = scene.waits(1).await;
        let soon = Instant::now() + Duration::from_secs(1);
        let renewed = turn.renew(&scene.clients[0], Some(soon)).await;
        assert_eq!(renewed.unwrap_err(), NoTurn::Deadline);
        drop(other.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
        assert!(scene.turns.state.lock().waiters.is_empty());
    }

    #[tokio::test]
    async fn client_that_keeps_its_turns_leaves_half_to_others_while_they_are_connected() {
        let buffers = CallBuffers::new(1 << 20, &BufferMetrics::default());
        let account = |client| buffers.account(client, Arc::<Intake>::default());
        let turns = Turns::kept_by_clients(16, 100, TurnsMetrics::default().large());
        let noisy = account(1);
        let take_all = |account: &Arc<ClientAccount>| -> Vec<Turn> {
            std::iter::from_fn(|| turns.take_free(account)).collect()
        };
        assert_eq!(take_all(&noisy).len(), 16, "no other client is connected");
        let honest = account(2);
        let mut kept = take_all(&noisy);
        assert_eq!(kept.len(), 8);
        let (of_turns, of_noisy) = (Arc::clone(&turns), Arc::clone(&noisy));
        let waits = tokio::spawn(async move { of_turns.acquire(&of_noisy, None).await });
        settle().await;
        let others = take_all(&honest);
        assert_eq!(others.len(), 4);
        // Six are free, fewer than the noisy client has.
        drop(others);
        settle().await;
        assert!(!waits.is_finished());
        drop(kept.pop());
        let turn = waits.await.unwrap().unwrap();
        drop((kept, turn));
        assert_eq!(turns.state.lock().taken, 0);
        assert!(turns.state.lock().by_client.as_ref().unwrap().taken.is_empty());
    }

    #[tokio::test]
    async fn bound_that_is_raised_lets_waiting_calls_go_and_a_lower_one_is_kept_once_turns_end() {
        let scene = Scene::new(1, 4);
        let first = scene.acquire(None).await.unwrap();
        let (second, third) = (scene.waits(0).await, scene.waits(1).await);
        assert_eq!(scene.counted(), (1, 2));
        scene.turns.set(3, 4);
        let turns = [second.await.unwrap().unwrap(), third.await.unwrap().unwrap()];
        assert_eq!(scene.counted(), (3, 0));
        scene.turns.set(1, 4);
        let fourth = scene.waits(2).await;
        drop(turns);
        settle().await;
        assert_eq!(scene.counted(), (1, 1), "two turns have ended");
        drop(first);
        drop(fourth.await.unwrap().unwrap());
        assert_eq!(scene.counted(), (0, 0));
        scene.turns.set(2, 4);
        assert_eq!(scene.counted(), (0, 0));
    }
}
