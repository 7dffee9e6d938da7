//! Bytes that single calls of clients make this process hold: request messages and header lists, responses of etcd
//! that were received and not sent, and frames that wait for their client (I7).
//!
//! All calls share one bound. So that a few clients cannot use it up, the bound of one connection follows what is
//! still free:
//!
//! - Three quarters are for all connections. The calls of one connection may hold half as much as is free of them.
//! - The last quarter is for connections that hold little: up to [`SMALL_BYTES`], and up to a sixteenth of what is
//!   free. Connections that hold more do not take from it.
//!
//! While several clients are connected, the calls of one client, on all of its connections, may hold as much as is free,
//! and an eighth of the bound in any case: the more others hold, the less it gets.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::byte_budget::{BudgetExceeded, retry_until};
use super::client_bytes::{BytesByClient, ClientBytes};
use super::intake::Intake;
use super::metrics::{BufferKindMetrics, BufferMetrics};
use super::room_queue::{ConnectionQueue, RoomQueue};

/// Free bytes that a connection needs to send another frame while frames of it wait to be sent: the length of a frame.
const FRAME_BYTES: u64 = 128 << 10;

/// Bytes up to which a connection may use the last quarter.
const SMALL_BYTES: u64 = 256 << 10;
/// A connection may use the last quarter up to its free bytes divided by this.
const SMALL_DIVISOR: u64 = 16;

/// Of the bound, a client gets its part by this divisor however much others hold.
const CLIENT_DIVISOR: u64 = 8;

/// Longest wait of a call for room.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(1);

/// Kind of the bytes that a call holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// Header list and message of a request.
    Request,
    /// Bytes of a response that etcd has sent, or may send before its flow control stops it.
    Forwarded,
    /// Bytes of a response that wait for the client to read.
    Sending,
}

/// Upper bound on the bytes of all calls.
#[derive(Debug)]
pub struct CallBuffers {
    max_bytes: u64,
    used: AtomicU64,
    /// Number of the next connection.
    next_connection: AtomicU64,
    metrics: [BufferKindMetrics; 3],
    by_client: BytesByClient,
    /// Calls that wait for room.
    queue: Arc<RoomQueue>,
}

/// Bytes of the calls of one client connection.
#[derive(Debug)]
pub struct ClientAccount {
    /// Number of the connection; no other has it.
    number: u64,
    /// Number of the client; no other client has it.
    client: AtomicU64,
    buffers: Arc<CallBuffers>,
    /// Bytes of all connections of the client that made this one, whatever users make its calls.
    of_client: Arc<ClientBytes>,
    /// Reads the connection's requests.
    intake: Arc<Intake>,
    used: AtomicU64,
    /// Calls of the connection that wait for room.
    queue: Arc<ConnectionQueue>,
    /// Part of `used` that has the kind `Sending`.
    sending: AtomicU64,
    /// Tasks of responses that wait until frames of the connection have been sent.
    senders: Mutex<Vec<Waker>>,
}

/// Bytes of one call that count until dropped.
#[derive(Debug)]
pub struct CallBytes {
    account: Arc<ClientAccount>,
    kind: CallKind,
    bytes: u64,
}

impl CallBuffers {
    /// Creates a bound of `max_bytes`.
    #[must_use]
    pub fn new(max_bytes: u64, metrics: &BufferMetrics) -> Arc<CallBuffers> {
        let kind = |name| metrics.kind(name, max_bytes);
        Arc::new(CallBuffers {
            max_bytes,
            used: AtomicU64::new(0),
            next_connection: AtomicU64::new(0),
            by_client: BytesByClient::default(),
            metrics: [kind("request"), kind("forwarded"), kind("sending")],
            queue: RoomQueue::new(max_bytes),
        })
    }

    /// Returns the account of a new connection of the client with the number `client`, whose requests are read by
    /// `intake`.
    #[must_use]
    pub fn account(self: &Arc<Self>, client: u64, intake: Arc<Intake>) -> Arc<ClientAccount> {
        Arc::new(ClientAccount {
            number: self.next_connection.fetch_add(1, Ordering::Relaxed),
            client: AtomicU64::new(client),
            buffers: Arc::clone(self),
            of_client: self.by_client.of(client),
            queue: self.queue.of_connection(Arc::clone(&intake)),
            intake,
            used: AtomicU64::new(0),
            sending: AtomicU64::new(0),
            senders: Mutex::default(),
        })
    }

    /// Whether a connection may hold `of_connection` bytes while all connections hold `used`, and those of its client
    /// `of_client`, which is `None` if no other client is connected.
    fn may_hold(&self, of_connection: u64, of_client: Option<u64>, used: u64) -> bool {
        let for_all = self.max_bytes - self.max_bytes / 4;
        let is_fair = |bound: u64| {
            let fair = bound.saturating_sub(used);
            of_client.is_none_or(|of_client| of_client <= fair.max(self.max_bytes / CLIENT_DIVISOR))
        };
        (used.saturating_add(of_connection.saturating_mul(2)) <= for_all && is_fair(for_all))
            || (of_connection <= SMALL_BYTES
                && used.saturating_add(of_connection * SMALL_DIVISOR) <= self.max_bytes
                && is_fair(self.max_bytes))
    }

    fn metrics(&self, kind: CallKind) -> &BufferKindMetrics {
        let [request, forwarded, sending] = &self.metrics;
        match kind {
            CallKind::Request => request,
            CallKind::Forwarded => forwarded,
            CallKind::Sending => sending,
        }
    }
}

impl ClientAccount {
    /// Returns a holder of 0 bytes.
    #[must_use]
    pub fn hold(self: &Arc<Self>, kind: CallKind) -> CallBytes {
        CallBytes {
            account: Arc::clone(self),
            kind,
            bytes: 0,
        }
    }

    /// Bytes that were received on the connection and are not counted yet.
    #[must_use]
    pub fn take_received(&self) -> u64 {
        self.intake.take_received()
    }

    /// Whether a response may produce its next frame now. Otherwise wakes `waker` once frames of this connection have
    /// been sent: the connection always has a frame to send, so that no client waits for another one to read.
    #[must_use]
    pub fn may_send(&self, waker: &Waker) -> bool {
        if self.may_send_now() {
            return true;
        }
        self.senders.lock().push(waker.clone());
        // Frames may have been sent before the waker was stored.
        self.may_send_now()
    }

    fn may_send_now(&self) -> bool {
        if self.sending.load(Ordering::SeqCst) == 0 {
            return true;
        }
        let used = self.buffers.used.load(Ordering::Relaxed);
        let of_connection = self.used.load(Ordering::Relaxed) + FRAME_BYTES;
        let of_client = self.of_client.next_to_others().map(|held| held + FRAME_BYTES);
        self.buffers.may_hold(of_connection, of_client, used)
    }

    /// Whether other clients are connected.
    pub(super) fn has_others(&self) -> bool {
        self.of_client.next_to_others().is_some()
    }

    /// Number of the connection; no other has it.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Number of the client; no other client has it.
    #[must_use]
    pub fn client(&self) -> u64 {
        self.client.load(Ordering::Relaxed)
    }

    /// Records that the connection belongs to the client with this number from now on.
    pub fn set_client(&self, client: u64) {
        self.client.store(client, Ordering::Relaxed);
    }

    /// Delays the connection's next requests after a call that was refused at once.
    pub fn delay_after_refusal(&self) {
        self.intake.record_refusal();
    }

    /// Metrics of responses that wait to be sent.
    #[must_use]
    pub fn sending_metrics(&self) -> &BufferKindMetrics {
        self.buffers.metrics(CallKind::Sending)
    }

    fn wake_senders(&self) {
        let senders = std::mem::take(&mut *self.senders.lock());
        for sender in senders {
            sender.wake();
        }
    }
}

impl CallBytes {
    /// Counts `bytes` in the buffers' `used`, if the connection may hold them.
    fn fit(&self, bytes: u64) -> Result<(), BudgetExceeded> {
        let account = &self.account;
        let buffers = &account.buffers;
        let of_connection = account.used.load(Ordering::SeqCst) + bytes;
        let of_client = account.of_client.next_to_others().map(|held| held + bytes);
        let fitted = buffers
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
                let may_hold = buffers.may_hold(of_connection, of_client, used);
                may_hold.then_some(used + bytes)
            });
        fitted.map(|_| ()).map_err(|_| BudgetExceeded)
    }

    /// Grows by `bytes` without waiting.
    ///
    /// # Errors
    /// [`BudgetExceeded`] if the connection may not hold them.
    pub fn try_grow(&mut self, bytes: u64) -> Result<(), BudgetExceeded> {
        if self.grow_if_free(bytes) {
            return Ok(());
        }
        self.account.delay_after_refusal();
        self.record_refusal();
        Err(BudgetExceeded)
    }

    /// Grows by `bytes` if the connection may hold them now. It can do without them: nothing is delayed or counted as refused
    /// otherwise.
    pub fn grow_if_free(&mut self, bytes: u64) -> bool {
        let is_free = self.fit(bytes).is_ok();
        if is_free {
            self.add(bytes);
        }
        is_free
    }

    /// Whether the holder could ever have `bytes`: if no other call had any.
    #[must_use]
    pub fn could_hold(&self, bytes: u64) -> bool {
        self.account.buffers.may_hold(bytes, None, 0)
    }

    /// Grows by the `bytes` of a new call. A short call waits a moment for room, so that a burst of one client costs
    /// others some time and no call; while several wait, no more requests of their connection are read.
    ///
    /// # Errors
    /// [`BudgetExceeded`] if there is no room.
    pub async fn admit(&mut self, bytes: u64) -> Result<(), BudgetExceeded> {
        let account = Arc::clone(&self.account);
        account.intake.record_call(bytes);
        if self.grow_if_free(bytes) {
            return Ok(());
        }
        let Some(_queued) = account.queue.enter_new(bytes) else {
            self.account.delay_after_refusal();
            self.record_refusal();
            return Err(BudgetExceeded);
        };
        self.grow(bytes, Instant::now() + QUEUE_TIMEOUT).await
    }

    /// Grows by `bytes`; waits until `deadline` for other calls to release bytes.
    ///
    /// # Errors
    /// [`BudgetExceeded`] at the deadline; immediately if the bytes can never fit.
    pub async fn grow(&mut self, bytes: u64, deadline: Instant) -> Result<(), BudgetExceeded> {
        let account = Arc::clone(&self.account);
        let mut waiter = None;
        let fitted = retry_until(account.queue.room(), deadline, || {
            loop {
                if self.fit(bytes).is_ok() {
                    return Poll::Ready(Ok(()));
                }
                if !self.could_hold(bytes) {
                    return Poll::Ready(Err(BudgetExceeded));
                }
                if waiter.is_some() {
                    return Poll::Pending;
                }
                // Entered before another attempt: a release between the attempt and the wait is not missed.
                let gauge = &account.buffers.metrics(self.kind).waiting;
                waiter = Some(account.queue.enter(gauge));
            }
        });
        let fitted = fitted.await;
        if fitted.is_err() {
            self.record_refusal();
            return fitted;
        }
        self.add(bytes);
        if waiter.is_some() {
            // There may be room for the connection's next call, too.
            account.queue.room().notify_one();
        }
        Ok(())
    }

    /// Grows by bytes that are in memory already and must be kept, even beyond the bound. The connection gets nothing
    /// more until it holds less than its bound again.
    pub fn force_grow(&mut self, bytes: u64) {
        self.account.buffers.used.fetch_add(bytes, Ordering::Relaxed);
        self.add(bytes);
    }

    /// Releases all but `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        let released = self.bytes.saturating_sub(bytes);
        if released == 0 {
            return;
        }
        self.bytes -= released;
        let account = &self.account;
        account.used.fetch_sub(released, Ordering::SeqCst);
        account.of_client.release(released);
        account.buffers.used.fetch_sub(released, Ordering::SeqCst);
        let change = i64::try_from(released).unwrap_or(i64::MAX);
        account.buffers.metrics(self.kind).used.dec_by(change);
        if self.kind == CallKind::Sending {
            account.sending.fetch_sub(released, Ordering::SeqCst);
            account.wake_senders();
        }
        account.buffers.queue.wake();
    }

    /// Bytes that this holder has.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Account of the connection.
    #[must_use]
    pub fn account(&self) -> &Arc<ClientAccount> {
        &self.account
    }

    fn record_refusal(&self) {
        self.account.buffers.metrics(self.kind).refused.inc();
    }

    /// Adds bytes that are counted in the buffers' `used` already.
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        let account = &self.account;
        account.used.fetch_add(bytes, Ordering::Relaxed);
        account.of_client.add(bytes);
        if self.kind == CallKind::Sending {
            account.sending.fetch_add(bytes, Ordering::SeqCst);
        }
        let change = i64::try_from(bytes).unwrap_or(i64::MAX);
        account.buffers.metrics(self.kind).used.inc_by(change);
    }
}

impl Drop for CallBytes {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context, Wake};

    use futures_util::StreamExt;
    use futures_util::stream::FuturesUnordered;

    use super::super::intake::{BYTES_PER_MILLISECOND, REFUSAL_DELAY, USUAL_CALL_BYTES};
    use super::super::room_queue::QUEUED_MAX_BYTES;
    use super::*;

    fn buffers(max_bytes: u64) -> Arc<CallBuffers> {
        CallBuffers::new(max_bytes, &BufferMetrics::default())
    }

    /// Takes bytes in steps of `step` until they are refused.
    fn take_all(account: &Arc<ClientAccount>, step: u64) -> CallBytes {
        let mut held = account.hold(CallKind::Request);
        while held.try_grow(step).is_ok() {}
        held
    }

    #[tokio::test(start_paused = true)]
    async fn short_call_waits_for_room_and_a_long_one_is_refused() {
        let buffers = buffers(16 << 20);
        let account = buffers.account(0, Arc::default());
        let held = take_all(&account, 512);
        let long = account.hold(CallKind::Request).admit(QUEUED_MAX_BYTES + 1).await;
        assert_eq!(long, Err(BudgetExceeded));
        let mut calls: Vec<CallBytes> = (0..=buffers.queue.max_new_calls())
            .map(|_| account.hold(CallKind::Request))
            .collect();
        let start = Instant::now();
        let admissions = futures_util::future::join_all(calls.iter_mut().map(|call| call.admit(512)));
        let release = async {
            tokio::time::sleep(QUEUE_TIMEOUT / 2).await;
            drop(held);
        };
        let (admitted, ()) = tokio::join!(admissions, release);
        assert_eq!(start.elapsed(), QUEUE_TIMEOUT / 2);
        let refused = admitted.iter().filter(|call| call.is_err()).count();
        assert_eq!(refused, 1, "the call that found the queue full");
        drop(calls);
        let held = take_all(&account, 512);
        let late = account.hold(CallKind::Request).admit(512).await;
        assert_eq!(
            (late, start.elapsed()),
            (Err(BudgetExceeded), QUEUE_TIMEOUT / 2 * 3)
        );
        drop(held);
        assert!(buffers.queue.is_empty());
        let counts = [&account.used, &buffers.used];
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 0));
    }

    /// Whether the connection's next requests are read, after this delay.
    fn read_after(account: &ClientAccount) -> Option<Duration> {
        match account.intake.poll_read(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(delay) => Some(delay),
            Poll::Pending => None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_are_not_read_while_many_calls_wait_for_room() {
        let buffers = buffers(1 << 20);
        let account = buffers.account(0, Arc::default());
        let held = take_all(&account, 512);
        assert_eq!(
            read_after(&account),
            Some(REFUSAL_DELAY),
            "after the last attempt"
        );
        let mut calls: Vec<CallBytes> = (0..64).map(|_| account.hold(CallKind::Request)).collect();
        let mut admissions: FuturesUnordered<_> = calls.iter_mut().map(|call| call.admit(512)).collect();
        for _ in 0..2 {
            assert!(futures_util::poll!(admissions.next()).is_pending());
        }
        assert_eq!(read_after(&account), None, "64 calls wait");
        drop(held);
        while let Some(admitted) = admissions.next().await {
            admitted.unwrap();
        }
        assert_eq!(read_after(&account), Some(Duration::ZERO));
    }

    #[tokio::test]
    async fn long_and_refused_calls_delay_the_next_requests() {
        let buffers = buffers(1 << 20);
        let account = buffers.account(0, Arc::default());
        let mut call = account.hold(CallKind::Request);
        call.admit(USUAL_CALL_BYTES).await.unwrap();
        assert_eq!(read_after(&account), Some(Duration::ZERO));
        call.admit(4 * BYTES_PER_MILLISECOND).await.unwrap();
        assert_eq!(read_after(&account), Some(Duration::from_millis(3)));
        assert_eq!(call.admit(1 << 20).await, Err(BudgetExceeded));
        assert_eq!(
            read_after(&account),
            Some(Duration::from_millis(63) + REFUSAL_DELAY)
        );
        assert_eq!(read_after(&account), Some(Duration::ZERO));
    }

    #[test]
    fn connections_that_take_all_they_get_leave_a_share_to_the_next() {
        let buffers = buffers(16 << 20);
        let accounts: Vec<_> = (0..30).map(|_| buffers.account(0, Arc::default())).collect();
        let held: Vec<CallBytes> = accounts.iter().map(|account| take_all(account, 512)).collect();
        let honest = take_all(&buffers.account(0, Arc::default()), 512);
        assert!(honest.bytes() > 32 << 10, "{}", honest.bytes());
        assert!(buffers.used.load(Ordering::Relaxed) <= 16 << 20);
        drop((held, honest));
        assert_eq!(buffers.used.load(Ordering::Relaxed), 0);
        assert_eq!(buffers.metrics(CallKind::Request).used.get(), 0);
        let alone = take_all(&buffers.account(0, Arc::default()), 512);
        assert_eq!(alone.bytes() / 512, (4 << 20) / 512, "a third of three quarters");
    }

    #[test]
    fn client_with_many_connections_takes_no_more_than_its_part_while_others_are_connected() {
        const MIB: u64 = 1 << 20;
        let buffers = buffers(16 * MIB);
        let crowd = |client| -> Vec<CallBytes> {
            let accounts = (0..200).map(|_| buffers.account(client, Arc::default()));
            accounts.map(|account| take_all(&account, 512)).collect()
        };
        let sum = |held: &[CallBytes]| held.iter().map(CallBytes::bytes).sum::<u64>();
        let alone = sum(&crowd(1));
        assert!(alone > 15 * MIB, "no other client is connected: {alone}");

        let connected = buffers.account(2, Arc::default());
        let noisy = crowd(1);
        assert!(sum(&noisy) <= 8 * MIB + 512, "{}", sum(&noisy));
        let mut honest = take_all(&connected, 512);
        assert!(honest.bytes() >= MIB, "{}", honest.bytes());
        drop(noisy);
        // A quarter is free, and an eighth is the noisy client's in any case.
        honest.force_grow(12 * MIB - honest.bytes());
        let noisy = crowd(1);
        assert!(sum(&noisy) <= 2 * MIB + 512, "{}", sum(&noisy));
        assert!(sum(&noisy) > 2 * MIB - 4096, "{}", sum(&noisy));
        drop((honest, noisy, connected));
        assert_eq!(buffers.used.load(Ordering::Relaxed), 0);
        let alone = sum(&crowd(1));
        assert!(alone > 15 * MIB, "the others have left: {alone}");
    }

    #[test]
    fn forced_bytes_count_against_the_next_ones() {
        let buffers = buffers(1600);
        let account = buffers.account(0, Arc::default());
        let mut forced = account.hold(CallKind::Forwarded);
        forced.force_grow(2000);
        assert_eq!(account.hold(CallKind::Request).try_grow(1), Err(BudgetExceeded));
        assert_eq!(buffers.metrics(CallKind::Request).refused.get(), 1);
        forced.shrink_to(100);
        assert_eq!(account.hold(CallKind::Request).try_grow(300), Ok(()));
        assert_eq!(forced.bytes(), 100);
    }

    #[tokio::test]
    async fn bytes_that_are_not_needed_are_neither_delayed_nor_counted_as_refused() {
        let buffers = buffers(1600);
        let account = buffers.account(0, Arc::default());
        let mut held = account.hold(CallKind::Sending);
        assert!(!held.grow_if_free(601));
        assert!(held.grow_if_free(600));
        assert!(!held.grow_if_free(1));
        assert_eq!((held.bytes(), buffers.used.load(Ordering::Relaxed)), (600, 600));
        assert_eq!(buffers.metrics(CallKind::Sending).refused.get(), 0);
        assert_eq!(read_after(&account), Some(Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_call_continues_when_bytes_are_released() {
        let buffers = buffers(1600);
        let mut taken = buffers.account(0, Arc::default()).hold(CallKind::Request);
        taken.force_grow(1200);
        let mut held = buffers.account(0, Arc::default()).hold(CallKind::Forwarded);
        let soon = Instant::now() + Duration::from_secs(1);
        assert_eq!(held.grow(601, soon).await, Err(BudgetExceeded));
        assert!(Instant::now() < soon, "bytes that can never fit do not wait");
        assert_eq!(held.grow(600, soon).await, Err(BudgetExceeded));
        let soon = soon + Duration::from_secs(10);
        let grown = tokio::spawn(async move { held.grow(600, soon).await });
        tokio::task::yield_now().await;
        assert_eq!(buffers.metrics(CallKind::Forwarded).waiting.get(), 1);
        drop(taken);
        assert_eq!(grown.await.unwrap(), Ok(()));
        assert_eq!(buffers.metrics(CallKind::Forwarded).waiting.get(), 0);
    }

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn connection_always_has_a_frame_to_send_and_waits_for_its_own_frames_only() {
        let buffers = buffers(4 * FRAME_BYTES);
        let mut others = buffers.account(0, Arc::default()).hold(CallKind::Forwarded);
        others.force_grow(4 * FRAME_BYTES);
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let account = buffers.account(0, Arc::default());
        assert!(account.may_send(&waker));
        let mut frame = account.hold(CallKind::Sending);
        frame.force_grow(FRAME_BYTES);
        assert!(!account.may_send(&waker));
        drop(frame);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert!(account.may_send(&waker));
    }
}
