//! Bytes that this process holds for calls (I7): one ledger of all kinds, by client and by connection. A call tries to get bytes
//! ([`HeldBytes::try_grow`]), waits for them ([`HeldBytes::grow`]), or has them whatever the bound, because they are in memory
//! already ([`HeldBytes::force_grow`]).
//!
//! The kinds have parts of the flags' bytes, so that no kind can use up what the others need:
//!
//! | kinds | part | who may have more |
//! |---|---|---|
//! | request, forwarded, sending | a half of `--buffer-max-bytes` | by connection and client |
//! | converted | a quarter | holders grow in turn |
//! | shared; series | an eighth each | by client |
//! | watch | `--watch-max-bytes` | any, in the order of their calls |
//! | watch stream | three quarters of it | any, in the order of their calls |
//!
//! What these rules are is in [`policy`](super::policy).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::{ops::RangeInclusive, task::Waker, time::Duration};

use parking_lot::Mutex;
use rangecache_base::telemetry::metrics::Counted;
use tokio::{sync::Notify, time::Instant};

use super::intake::Intake;
use super::line::{Exceeded, Owner};
use super::metrics::{BufferKindMetrics, BufferMetrics};
use super::policy::{Ask, ByteKind, Part, PartState, Policy};

/// Free bytes that a connection needs to send another frame while frames of it wait to be sent: the length of a frame.
const FRAME_BYTES: u64 = 128 << 10;
/// Streams and watchers are admitted up to `--watch-max-bytes` less that divided by this: the rest is for their events and the
/// fan-outs' lists of events. The events that are on their way keep no stream out: they wait for each other, and leave soon.
const EVENTS_DIVISOR: u64 = 4;

/// Longest wait of a new call for room.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest new call that may wait for room, in bytes.
const QUEUED_MAX_BYTES: u64 = 12 << 10;
/// Bounds of the number of new calls of all connections that may wait for room. They are not counted: up to a quarter of
/// the calls' part, at most 48 MiB.
const QUEUED: RangeInclusive<u64> = 64..=4_096;
/// With as many waiting calls as there are free places divided by this, a connection's next requests are not read.
const QUEUED_DIVISOR: u64 = 8;
/// Bounds of that number: the lower one lets a connection wait in any case.
const QUEUED_PER_CONNECTION: RangeInclusive<u64> = 32..=64;
/// Connections whose oldest waiting call is woken when bytes of calls are released. More than a few are woken in turn: bytes are
/// released all the time, and waking thousands of calls each time would take longer than the calls.
const WOKEN_CONNECTIONS: usize = 64;
/// Clients that are remembered after their last connection has ended, until others connect.
const KEPT_CLIENTS: usize = 1_024;

/// Bytes that are held for all clients.
#[derive(Debug)]
pub struct BytesLedger {
    /// Of the calls, the conversions, the shared responses, the series, the watches, and their streams.
    parts: [Part; 6],
    metrics: [BufferKindMetrics; 8],
    /// Number of the next connection.
    next_connection: AtomicU64,
    /// Bytes of the calls of each client that has a connection.
    clients: Mutex<HashMap<u64, Weak<ClientBytes>>>,
    /// Clients that have one.
    connected: Arc<AtomicUsize>,
    /// New calls that may wait for room, and those that do.
    max_new_calls: u64,
    new_calls: AtomicU64,
    /// Connections with calls that wait for room, new ones or not.
    waiting: Mutex<VecDeque<Arc<ClientAccount>>>,
    /// Length of `waiting`, to be read without the lock.
    waiting_count: AtomicUsize,
}

/// Bytes of the calls of one client, on all of its connections. It counts as connected until this is dropped.
#[derive(Debug)]
struct ClientBytes {
    used: AtomicU64,
    connected: Arc<AtomicUsize>,
}

/// Account of one client connection.
#[derive(Debug)]
pub struct ClientAccount {
    /// Number of the connection; no other has it.
    number: u64,
    /// Number of the client; no other client has it.
    client: AtomicU64,
    ledger: Arc<BytesLedger>,
    /// Bytes of the client that made this connection, whatever users make its calls.
    of_client: Arc<ClientBytes>,
    /// Reads the connection's requests; stopped while too many new calls of it wait.
    intake: Arc<Intake>,
    /// Bytes of the connection's calls.
    used: AtomicU64,
    /// Part of `used` that has the kind `Sending`.
    sending: AtomicU64,
    /// Tasks of responses that wait until frames of the connection have been sent.
    senders: Mutex<Vec<Waker>>,
    /// New calls that wait for room.
    new_calls: AtomicU64,
    /// Calls that wait to be woken. Changed under the lock of [`BytesLedger::waiting`].
    waiters: AtomicU64,
    /// Wakes one of them.
    room: Notify,
}

/// Bytes of one holder that count until dropped.
#[derive(Debug)]
pub struct HeldBytes {
    account: Arc<ClientAccount>,
    kind: ByteKind,
    bytes: u64,
    /// Client of the call for which they are held.
    client: u64,
    /// The holder's number while it is in the line of those that grow in turn; otherwise 0.
    number: u64,
}

impl ClientBytes {
    fn new(connected: &Arc<AtomicUsize>) -> Arc<ClientBytes> {
        connected.fetch_add(1, Ordering::Relaxed);
        Arc::new(ClientBytes {
            used: AtomicU64::new(0),
            connected: Arc::clone(connected),
        })
    }

    fn is_alone(&self) -> bool {
        self.connected.load(Ordering::Relaxed) < 2
    }
}

impl Drop for ClientBytes {
    fn drop(&mut self) {
        self.connected.fetch_sub(1, Ordering::Relaxed);
    }
}

impl BytesLedger {
    /// Creates the ledger of `--buffer-max-bytes` and `--watch-max-bytes`. `watches` are the metrics of the kinds `Watch` and
    /// `WatchStream`.
    #[must_use]
    pub fn new(
        buffer_max_bytes: u64,
        watch_max_bytes: u64,
        metrics: &BufferMetrics,
        [watch, watch_stream]: [BufferKindMetrics; 2],
    ) -> Arc<BytesLedger> {
        let (calls, eighth) = (buffer_max_bytes / 2, buffer_max_bytes / 8);
        let (min, max) = QUEUED.into_inner();
        Arc::new(BytesLedger {
            parts: [
                Part::new(Policy::ByConnection, calls),
                Part::new(Policy::InTurn, buffer_max_bytes / 4),
                Part::new(Policy::ByClient, eighth),
                Part::new(Policy::ByClient, eighth),
                Part::new(Policy::FirstCome, watch_max_bytes),
                Part::new(
                    Policy::FirstCome,
                    watch_max_bytes - watch_max_bytes / EVENTS_DIVISOR,
                ),
            ],
            metrics: [
                metrics.kind("request", calls),
                metrics.kind("forwarded", calls),
                metrics.kind("sending", calls),
                metrics.kind("converted", buffer_max_bytes / 4),
                metrics.kind("shared", eighth),
                metrics.kind("series", eighth),
                watch,
                watch_stream,
            ],
            next_connection: AtomicU64::new(0),
            clients: Mutex::default(),
            connected: Arc::default(),
            max_new_calls: (calls / 4 / QUEUED_MAX_BYTES).clamp(min, max),
            new_calls: AtomicU64::new(0),
            waiting: Mutex::default(),
            waiting_count: AtomicUsize::new(0),
        })
    }

    /// Creates a ledger of `buffer_max_bytes`, and as much for watches.
    #[cfg(test)]
    pub(crate) fn of_bytes(buffer_max_bytes: u64) -> Arc<BytesLedger> {
        BytesLedger::new(
            buffer_max_bytes,
            buffer_max_bytes,
            &BufferMetrics::default(),
            Default::default(),
        )
    }

    /// Returns the account of a new connection of the client with the number `client`, whose requests are read by
    /// `intake`.
    #[must_use]
    pub fn account(self: &Arc<Self>, client: u64, intake: Arc<Intake>) -> Arc<ClientAccount> {
        let mut clients = self.clients.lock();
        let known = clients.get(&client).and_then(Weak::upgrade);
        let of_client = known.unwrap_or_else(|| {
            if clients.len() >= KEPT_CLIENTS {
                clients.retain(|_, bytes| bytes.strong_count() > 0);
            }
            let bytes = ClientBytes::new(&self.connected);
            clients.insert(client, Arc::downgrade(&bytes));
            bytes
        });
        drop(clients);
        self.account_of(client, of_client, intake)
    }

    /// Returns an account for bytes that are held for no client, and next to which no client is one of several.
    #[must_use]
    pub fn own_account(self: &Arc<Self>) -> Arc<ClientAccount> {
        self.account_of(u64::MAX, ClientBytes::new(&Arc::default()), Arc::default())
    }

    fn account_of(
        self: &Arc<Self>,
        client: u64,
        of_client: Arc<ClientBytes>,
        intake: Arc<Intake>,
    ) -> Arc<ClientAccount> {
        Arc::new(ClientAccount {
            number: self.next_connection.fetch_add(1, Ordering::Relaxed),
            client: AtomicU64::new(client),
            ledger: Arc::clone(self),
            of_client,
            intake,
            used: AtomicU64::new(0),
            sending: AtomicU64::new(0),
            senders: Mutex::default(),
            new_calls: AtomicU64::new(0),
            waiters: AtomicU64::new(0),
            room: Notify::new(),
        })
    }

    /// Bytes of all holders in the part of this kind.
    #[must_use]
    pub fn used_bytes(&self, kind: ByteKind) -> u64 {
        self.part(kind).used.load(Ordering::Relaxed)
    }

    /// Upper bound on the bytes of all holders in the part of this kind.
    #[must_use]
    pub fn max_bytes(&self, kind: ByteKind) -> u64 {
        self.part(kind).max_bytes
    }

    /// Whether a holder waits for bytes of this kind.
    #[must_use]
    pub fn is_waited_for(&self, kind: ByteKind) -> bool {
        self.metrics(kind).waiting.get() > 0
    }

    fn part(&self, kind: ByteKind) -> &Part {
        &self.parts[(kind as usize).saturating_sub(ByteKind::Sending as usize)]
    }

    fn metrics(&self, kind: ByteKind) -> &BufferKindMetrics {
        &self.metrics[kind as usize]
    }

    /// Wakes those that wait for bytes of `part`; of calls one of each connection, of [`WOKEN_CONNECTIONS`] at most.
    fn wake(&self, part: &Part) {
        if part.policy != Policy::ByConnection {
            return part.changed.notify_waiters();
        }
        // Ordered after the release, as the attempt of a waiting call is after its entry: one of the two sees the other.
        if self.waiting_count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut connections = self.waiting.lock();
        let woken = connections.len().min(WOKEN_CONNECTIONS);
        for connection in connections.iter().take(woken) {
            connection.room.notify_one();
        }
        connections.rotate_left(woken);
    }
}

impl ClientAccount {
    /// Returns a holder of 0 bytes. One that grows in turn is in the line.
    #[must_use]
    pub fn hold(self: &Arc<Self>, kind: ByteKind) -> HeldBytes {
        let (owner, part) = (self.owner(), self.ledger.part(kind));
        let number = match part.policy {
            Policy::InTurn => part.state.lock().growing.push(owner, None, ()),
            _ => 0,
        };
        HeldBytes {
            account: Arc::clone(self),
            kind,
            bytes: 0,
            client: owner.client,
            number,
        }
    }

    /// The client and the connection, by which calls take turns.
    pub(super) fn owner(&self) -> Owner {
        Owner {
            client: self.client(),
            connection: self.number,
        }
    }

    /// The ledger in which the account is.
    #[must_use]
    pub fn ledger(&self) -> &Arc<BytesLedger> {
        &self.ledger
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
        let part = self.ledger.part(ByteKind::Sending);
        part.permits(&Ask {
            used: part.used.load(Ordering::Relaxed),
            ..self.ask(FRAME_BYTES)
        })
    }

    /// An ask of the connection for the bytes of a call, as far as the connection and its client decide about it.
    fn ask(&self, more: u64) -> Ask {
        Ask {
            more,
            of_connection: self.used.load(Ordering::SeqCst) + more,
            of_client: self.of_client.used.load(Ordering::SeqCst) + more,
            is_alone: self.of_client.is_alone(),
            ..Ask::default()
        }
    }

    /// Whether other clients are connected.
    pub(super) fn has_others(&self) -> bool {
        !self.of_client.is_alone()
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
        self.ledger.metrics(ByteKind::Sending)
    }

    fn wake_senders(&self) {
        let senders = std::mem::take(&mut *self.senders.lock());
        for sender in senders {
            sender.wake();
        }
    }

    /// Counts a new call of `bytes` as waiting; `None` if it is too long, or if too many wait.
    fn enter_new(&self, bytes: u64) -> Option<NewCall<'_>> {
        if bytes > QUEUED_MAX_BYTES {
            return None;
        }
        self.new_calls.fetch_add(1, Ordering::Relaxed);
        let of_all = self.ledger.new_calls.fetch_add(1, Ordering::Relaxed);
        let call = NewCall(self);
        if self.has_too_many() {
            self.intake.stop();
        }
        (of_all < self.ledger.max_new_calls).then_some(call)
    }

    /// Whether no more requests of the connection should be read.
    fn has_too_many(&self) -> bool {
        let of_all = self.ledger.new_calls.load(Ordering::Relaxed);
        let free = self.ledger.max_new_calls.saturating_sub(of_all);
        let (min, max) = QUEUED_PER_CONNECTION.into_inner();
        self.new_calls.load(Ordering::Relaxed) >= (free / QUEUED_DIVISOR).clamp(min, max)
    }
}

impl HeldBytes {
    fn part(&self) -> &Part {
        self.account.ledger.part(self.kind)
    }

    fn metrics(&self) -> &BufferKindMetrics {
        self.account.ledger.metrics(self.kind)
    }

    /// Grows by `bytes` if the holder may have them now. It can do without them: nothing is delayed or counted as refused
    /// otherwise.
    pub fn grow_if_free(&mut self, bytes: u64) -> bool {
        let part = self.part();
        let is_free = if part.is_locked() {
            // One lock for the comparison and the addition: two holders must not both use the last bytes of a client.
            let mut state = part.state.lock();
            let of_client = state.by_client.get(&self.client);
            let ask = Ask {
                more: bytes,
                of_holder: self.bytes + bytes,
                of_client: of_client.copied().unwrap_or(0) + bytes,
                is_alone: state.by_client.len() == usize::from(of_client.is_some()),
                is_first: self.is_first(&state),
                ..Ask::default()
            };
            let is_free = part.take(&ask);
            if is_free {
                state.add(self.client, bytes);
            }
            is_free
        } else {
            part.take(&self.account.ask(bytes))
        };
        if is_free {
            self.count(bytes);
        }
        is_free
    }

    /// Counts bytes that were added to the part.
    fn count(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.metrics()
            .used
            .inc_by(i64::try_from(bytes).unwrap_or(i64::MAX));
        let account = &self.account;
        if self.part().policy == Policy::ByConnection {
            account.used.fetch_add(bytes, Ordering::Relaxed);
            account.of_client.used.fetch_add(bytes, Ordering::SeqCst);
            if self.kind == ByteKind::Sending {
                account.sending.fetch_add(bytes, Ordering::SeqCst);
            }
        }
    }

    /// Grows by `bytes` without waiting.
    ///
    /// # Errors
    /// [`Exceeded::Bytes`] if the holder may not have them.
    pub fn try_grow(&mut self, bytes: u64) -> Result<(), Exceeded> {
        if self.grow_if_free(bytes) {
            return Ok(());
        }
        if self.part().policy == Policy::ByConnection {
            self.account.delay_after_refusal();
        }
        Err(self.refused())
    }

    /// Grows by the `bytes` of a new call. A short call waits a moment for room, so that a burst of one client costs
    /// others some time and no call; while several wait, no more requests of their connection are read.
    ///
    /// # Errors
    /// [`Exceeded::Bytes`] if there is no room.
    pub async fn admit(&mut self, bytes: u64) -> Result<(), Exceeded> {
        self.account.intake.record_call(bytes);
        if self.grow_if_free(bytes) {
            return Ok(());
        }
        let account = Arc::clone(&self.account);
        let Some(_queued) = account.enter_new(bytes) else {
            account.delay_after_refusal();
            return Err(self.refused());
        };
        self.grow(bytes, Instant::now() + QUEUE_TIMEOUT).await
    }

    /// Grows by `bytes`; waits until `deadline` for other holders to release bytes.
    ///
    /// # Errors
    /// [`Exceeded::Bytes`] at the deadline; immediately if the bytes can never fit, of a holder in the line also not once all
    /// have released theirs that do not wait for this one.
    pub async fn grow(&mut self, bytes: u64, deadline: Instant) -> Result<(), Exceeded> {
        let account = Arc::clone(&self.account);
        let part = account.ledger.part(self.kind);
        let is_of_calls = part.policy == Policy::ByConnection;
        let room = if is_of_calls { &account.room } else { &part.changed };
        let mut waiting = None;
        loop {
            // Created before the attempt: a release between the attempt and the wait is not missed.
            let notified = room.notified();
            if self.grow_if_free(bytes) {
                break;
            }
            if !self.may_fit_later(bytes, waiting.is_some()) {
                return Err(self.refused());
            }
            if waiting.is_none() {
                // Entered before another attempt: a release between the attempt and the wait is not missed.
                waiting = Some(Waiting::enter(&account, self));
            } else if tokio::time::timeout_at(deadline, notified).await.is_err() {
                return Err(self.refused());
            }
        }
        if is_of_calls && waiting.is_some() {
            // There may be room for the connection's next call, too.
            room.notify_one();
        }
        Ok(())
    }

    /// Whether the holder could ever have `bytes` of a call: if no other call had any.
    #[must_use]
    pub fn could_hold(&self, bytes: u64) -> bool {
        self.part().permits(&Ask {
            more: bytes,
            of_connection: bytes,
            is_alone: true,
            ..Ask::default()
        })
    }

    /// Whether others may release enough for `bytes` more. `waits`: this holder is counted as waiting.
    fn may_fit_later(&self, bytes: u64, waits: bool) -> bool {
        let part = self.part();
        if part.policy == Policy::ByConnection {
            return self.could_hold(bytes);
        }
        let state = part.state.lock();
        let kept = match (self.is_first(&state), waits) {
            (false, _) => 0,
            (true, false) => state.waiting,
            (true, true) => state.waiting - self.bytes,
        };
        self.bytes + bytes + kept <= part.max_bytes / 8 * 7
    }

    /// Whether the holder grows above what all share.
    fn is_first(&self, state: &PartState) -> bool {
        self.number != 0 && state.growing.first() == Some((self.client, self.number))
    }

    /// Whether `bytes` are more than a half of what all holders may have: fewer fit when others need less.
    #[must_use]
    pub fn is_most(&self, bytes: u64) -> bool {
        bytes > self.part().max_bytes / 2
    }

    /// Grows by bytes that are in memory already and must be kept, even beyond the bound. Others get nothing more until all
    /// have less than it again.
    pub fn force_grow(&mut self, bytes: u64) {
        let part = self.part();
        part.used.fetch_add(bytes, Ordering::Relaxed);
        if part.is_locked() {
            part.state.lock().add(self.client, bytes);
        }
        self.count(bytes);
    }

    /// Holds exactly `bytes`, which are in memory already, even beyond the bound.
    pub fn set(&mut self, bytes: u64) {
        self.force_grow(bytes.saturating_sub(self.bytes));
        self.shrink_to(bytes);
    }

    /// Leaves the line, so that the next holder becomes the first. Called when the response is complete.
    pub fn leave_line(&mut self) {
        let number = std::mem::take(&mut self.number);
        if number != 0 {
            let (client, connection) = (self.client, self.account.number);
            let part = self.part();
            let mut state = part.state.lock();
            // Its client and connection are behind all others if it was the first.
            if state.growing.first() == Some((client, number)) {
                state.growing.pop(|_| true);
            } else {
                state.growing.remove(Owner { client, connection }, number);
            }
            drop(state);
            part.changed.notify_waiters();
        }
    }

    /// Releases `bytes`, or all bytes if the holder has fewer.
    pub fn shrink(&mut self, bytes: u64) {
        self.shrink_to(self.bytes.saturating_sub(bytes));
    }

    /// Releases all but `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        let released = self.bytes.saturating_sub(bytes);
        if released == 0 {
            return;
        }
        self.bytes -= released;
        let (account, part) = (&self.account, self.part());
        if part.is_locked() {
            part.state.lock().release(self.client, released);
        } else if part.policy == Policy::ByConnection {
            account.used.fetch_sub(released, Ordering::SeqCst);
            account.of_client.used.fetch_sub(released, Ordering::SeqCst);
        }
        part.used.fetch_sub(released, Ordering::SeqCst);
        let change = i64::try_from(released).unwrap_or(i64::MAX);
        self.metrics().used.dec_by(change);
        if self.kind == ByteKind::Sending {
            account.sending.fetch_sub(released, Ordering::SeqCst);
            account.wake_senders();
        }
        account.ledger.wake(part);
    }

    /// Moves `bytes`, or all bytes if the holder has fewer, to a new holder that is in no line.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> HeldBytes {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        HeldBytes {
            account: Arc::clone(&self.account),
            bytes,
            number: 0,
            ..*self
        }
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

    /// Counts a call whose bytes did not fit.
    pub fn record_refusal(&self) {
        self.metrics().refused.inc();
    }

    fn refused(&self) -> Exceeded {
        self.record_refusal();
        Exceeded::Bytes
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.leave_line();
        self.shrink_to(0);
    }
}

/// A holder that waits until others release bytes; counts as waiting until dropped.
struct Waiting<'a> {
    account: &'a Arc<ClientAccount>,
    kind: ByteKind,
    /// Its bytes, if it is in the line.
    bytes: u64,
    _waiting: Counted,
}

impl Waiting<'_> {
    fn enter<'a>(account: &'a Arc<ClientAccount>, held: &HeldBytes) -> Waiting<'a> {
        let (ledger, bytes) = (&account.ledger, if held.number == 0 { 0 } else { held.bytes });
        let part = ledger.part(held.kind);
        if part.policy == Policy::ByConnection {
            let mut connections = ledger.waiting.lock();
            if account.waiters.fetch_add(1, Ordering::Relaxed) == 0 {
                connections.push_back(Arc::clone(account));
                let count = &ledger.waiting_count;
                count.store(connections.len(), Ordering::SeqCst);
            }
        } else {
            part.state.lock().waiting += bytes;
            // The first one may now have nothing left to wait for.
            part.changed.notify_waiters();
        }
        Waiting {
            account,
            kind: held.kind,
            bytes,
            _waiting: Counted::on(&ledger.metrics(held.kind).waiting),
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let ledger = &self.account.ledger;
        let part = ledger.part(self.kind);
        if part.policy != Policy::ByConnection {
            part.state.lock().waiting -= self.bytes;
            return;
        }
        let mut connections = ledger.waiting.lock();
        if self.account.waiters.fetch_sub(1, Ordering::Relaxed) == 1 {
            connections.retain(|connection| !Arc::ptr_eq(connection, self.account));
            let count = &ledger.waiting_count;
            count.store(connections.len(), Ordering::SeqCst);
        }
    }
}

/// A new call that counts as waiting until dropped.
struct NewCall<'a>(&'a ClientAccount);

impl Drop for NewCall<'_> {
    fn drop(&mut self) {
        let NewCall(account) = self;
        account.new_calls.fetch_sub(1, Ordering::Relaxed);
        account.ledger.new_calls.fetch_sub(1, Ordering::Relaxed);
        // Stopped only by a call that enters: the last one to leave resumes in any case.
        if !account.has_too_many() {
            account.intake.resume();
        }
    }
}

#[cfg(test)]
mod tests;
