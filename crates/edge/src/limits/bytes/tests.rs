use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll, Wake};

use futures_util::{StreamExt, stream::FuturesUnordered};

use super::super::intake::{BYTES_PER_MILLISECOND, REFUSAL_DELAY, USUAL_CALL_BYTES};
use super::*;

const MIB: u64 = 1 << 20;

/// A ledger with so many bytes for calls.
fn buffers(max_bytes: u64) -> Arc<BytesLedger> {
    BytesLedger::of_bytes(2 * max_bytes)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// Bytes of calls.
fn used(buffers: &BytesLedger) -> u64 {
    buffers.used_bytes(ByteKind::Request)
}

/// Takes bytes in steps of `step` until they are refused.
fn take_all(account: &Arc<ClientAccount>, step: u64) -> HeldBytes {
    let mut held = account.hold(ByteKind::Request);
    while held.try_grow(step).is_ok() {}
    held
}

#[tokio::test(start_paused = true)]
async fn short_call_waits_for_room_and_a_long_one_is_refused() {
    let buffers = buffers(16 << 20);
    let account = buffers.account(0, Arc::default());
    let held = take_all(&account, 512);
    let long = account.hold(ByteKind::Request).admit(QUEUED_MAX_BYTES + 1).await;
    assert_eq!(long, Err(Exceeded::Bytes));
    let mut calls: Vec<HeldBytes> = (0..=buffers.max_new_calls)
        .map(|_| account.hold(ByteKind::Request))
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
    let late = account.hold(ByteKind::Request).admit(512).await;
    assert_eq!(
        (late, start.elapsed()),
        (Err(Exceeded::Bytes), QUEUE_TIMEOUT / 2 * 3)
    );
    drop(held);
    assert!(buffers.waiting.lock().is_empty());
    assert_eq!(buffers.new_calls.load(Ordering::Relaxed), 0);
    assert_eq!((account.used.load(Ordering::Relaxed), used(&buffers)), (0, 0));
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
    let mut calls: Vec<HeldBytes> = (0..64).map(|_| account.hold(ByteKind::Request)).collect();
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
    let mut call = account.hold(ByteKind::Request);
    call.admit(USUAL_CALL_BYTES).await.unwrap();
    assert_eq!(read_after(&account), Some(Duration::ZERO));
    call.admit(4 * BYTES_PER_MILLISECOND).await.unwrap();
    assert_eq!(read_after(&account), Some(Duration::from_millis(3)));
    assert_eq!(call.admit(1 << 20).await, Err(Exceeded::Bytes));
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
    let held: Vec<HeldBytes> = accounts.iter().map(|account| take_all(account, 512)).collect();
    let honest = take_all(&buffers.account(0, Arc::default()), 512);
    assert!(honest.bytes() > 32 << 10, "{}", honest.bytes());
    assert!(used(&buffers) <= 16 << 20);
    drop((held, honest));
    assert_eq!(used(&buffers), 0);
    assert_eq!(buffers.metrics(ByteKind::Request).used.get(), 0);
    let alone = take_all(&buffers.account(0, Arc::default()), 512);
    assert_eq!(alone.bytes() / 512, (4 << 20) / 512, "a third of three quarters");
}

#[test]
fn client_with_many_connections_takes_no_more_than_its_part_while_others_are_connected() {
    let buffers = buffers(16 * MIB);
    let crowd = |client| -> Vec<HeldBytes> {
        let accounts = (0..200).map(|_| buffers.account(client, Arc::default()));
        accounts.map(|account| take_all(&account, 512)).collect()
    };
    let sum = |held: &[HeldBytes]| held.iter().map(HeldBytes::bytes).sum::<u64>();
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
    assert_eq!(used(&buffers), 0);
    let alone = sum(&crowd(1));
    assert!(alone > 15 * MIB, "the others have left: {alone}");
}

#[test]
fn forced_bytes_count_against_the_next_ones() {
    let buffers = buffers(1600);
    let account = buffers.account(0, Arc::default());
    let mut forced = account.hold(ByteKind::Forwarded);
    forced.force_grow(2000);
    assert_eq!(account.hold(ByteKind::Request).try_grow(1), Err(Exceeded::Bytes));
    assert_eq!(buffers.metrics(ByteKind::Request).refused.get(), 1);
    forced.shrink_to(100);
    assert_eq!(account.hold(ByteKind::Request).try_grow(300), Ok(()));
    assert_eq!(forced.bytes(), 100);
}

#[tokio::test]
async fn bytes_that_are_not_needed_are_neither_delayed_nor_counted_as_refused() {
    let buffers = buffers(1600);
    let account = buffers.account(0, Arc::default());
    let mut held = account.hold(ByteKind::Sending);
    assert!(!held.grow_if_free(601));
    assert!(held.grow_if_free(600));
    assert!(!held.grow_if_free(1));
    assert_eq!((held.bytes(), used(&buffers)), (600, 600));
    assert_eq!(buffers.metrics(ByteKind::Sending).refused.get(), 0);
    assert_eq!(read_after(&account), Some(Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn waiting_call_continues_when_bytes_are_released() {
    let buffers = buffers(1600);
    let mut taken = buffers.account(0, Arc::default()).hold(ByteKind::Request);
    taken.force_grow(1200);
    let mut held = buffers.account(0, Arc::default()).hold(ByteKind::Forwarded);
    let soon = Instant::now() + Duration::from_secs(1);
    assert_eq!(held.grow(601, soon).await, Err(Exceeded::Bytes));
    assert!(Instant::now() < soon, "bytes that can never fit do not wait");
    assert_eq!(held.grow(600, soon).await, Err(Exceeded::Bytes));
    let soon = soon + Duration::from_secs(10);
    let grown = tokio::spawn(async move { held.grow(600, soon).await });
    tokio::task::yield_now().await;
    assert_eq!(buffers.metrics(ByteKind::Forwarded).waiting.get(), 1);
    drop(taken);
    assert_eq!(grown.await.unwrap(), Ok(()));
    assert_eq!(buffers.metrics(ByteKind::Forwarded).waiting.get(), 0);
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
    let mut others = buffers.account(0, Arc::default()).hold(ByteKind::Forwarded);
    others.force_grow(4 * FRAME_BYTES);
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let account = buffers.account(0, Arc::default());
    assert!(account.may_send(&waker));
    let mut frame = account.hold(ByteKind::Sending);
    frame.force_grow(FRAME_BYTES);
    assert!(!account.may_send(&waker));
    drop(frame);
    assert_eq!(woken.0.load(Ordering::Relaxed), 1);
    assert!(account.may_send(&waker));
}

#[tokio::test]
async fn connections_are_woken_in_turn_and_one_that_has_left_is_not() {
    let ledger = BytesLedger::of_bytes(0);
    let connections: Vec<_> = (0..WOKEN_CONNECTIONS + 2)
        .map(|_| ledger.account(0, Arc::default()))
        .collect();
    let gauge = &ledger.metrics(ByteKind::Request).waiting;
    let enter = |one| Waiting::enter(one, &ClientAccount::hold(one, ByteKind::Request));
    let mut waiters: Vec<_> = connections.iter().map(enter).collect();
    let again = enter(&connections[1]);
    drop(waiters.remove(0));
    drop(waiters.remove(0));
    assert_eq!(gauge.get(), 65, "of the second connection one still waits");
    ledger.wake(ledger.part(ByteKind::Request));
    let mut woken = Vec::new();
    for connection in &connections {
        woken.push(futures_util::poll!(Box::pin(connection.room.notified())).is_ready());
    }
    assert_eq!(woken.iter().filter(|woken| **woken).count(), WOKEN_CONNECTIONS);
    assert!(!woken[0], "it has left");
    assert!(!woken[WOKEN_CONNECTIONS + 1], "its turn comes next");
    ledger.wake(ledger.part(ByteKind::Request));
    let last = Box::pin(connections[WOKEN_CONNECTIONS + 1].room.notified());
    assert!(futures_util::poll!(last).is_ready());
    drop((waiters, again));
    assert!(ledger.waiting.lock().is_empty());
    assert_eq!(gauge.get(), 0);
}

#[test]
fn new_calls_beyond_the_bound_and_long_ones_do_not_wait_and_many_pause_their_connection() {
    let ledger = BytesLedger::of_bytes(0);
    let intakes: [Arc<Intake>; 2] = Default::default();
    let [many, few] = [0, 1].map(|one: usize| ledger.account(0, Arc::clone(&intakes[one])));
    let is_read = |one: usize| {
        let mut cx = Context::from_waker(Waker::noop());
        intakes[one].poll_read(&mut cx).is_ready()
    };
    assert!(many.enter_new(QUEUED_MAX_BYTES + 1).is_none());
    let mut calls: Vec<_> = (0..31)
        .map(|_| many.enter_new(QUEUED_MAX_BYTES).unwrap())
        .collect();
    assert!(is_read(0));
    calls.push(many.enter_new(1).unwrap());
    assert!(!is_read(0));
    let others: Vec<_> = (0..31).map(|_| few.enter_new(1).unwrap()).collect();
    assert!(is_read(1));
    calls.push(many.enter_new(1).unwrap());
    assert!(few.enter_new(1).is_none(), "64 calls wait");
    assert!(is_read(1), "the refused call has left");
    calls.truncate(31);
    assert!(is_read(0));
    drop((calls, others));
    assert!(ledger.waiting.lock().is_empty());
}

/// A ledger with so many MiB for conversions.
fn converted(mib: u64) -> Arc<BytesLedger> {
    BytesLedger::of_bytes(4 * mib * MIB)
}

/// A holder of the client with this number, on a connection of its own.
fn hold(ledger: &Arc<BytesLedger>, client: u64, kind: ByteKind) -> HeldBytes {
    ledger.account(client, Arc::default()).hold(kind)
}

fn grows(ledger: &Arc<BytesLedger>, client: u64) -> HeldBytes {
    hold(ledger, client, ByteKind::Converted)
}

#[test]
fn clients_take_turns_to_grow_and_the_first_holder_stays_it() {
    let budget = converted(512);
    let noisy: Vec<_> = (0..3).map(|_| grows(&budget, 1)).collect();
    let may_grow = |held: &HeldBytes| {
        budget.part(ByteKind::Converted).state.lock().growing.first() == Some((held.client, held.number))
    };
    assert!(may_grow(&noisy[0]));
    let honest = grows(&budget, 2);
    assert!(may_grow(&noisy[0]), "it may have grown already");
    let mut noisy = noisy.into_iter();
    drop(noisy.next());
    assert!(may_grow(&honest), "before the client's other holders");
    drop(honest);
    assert!(may_grow(&noisy.next().unwrap()));
    drop(noisy);
    let state = budget.part(ByteKind::Converted).state.lock();
    assert!(state.growing.is_empty());
}

#[tokio::test(start_paused = true)]
async fn holders_above_the_shared_quarter_grow_only_if_oldest() {
    let budget = converted(512);
    let (mut oldest, mut next) = (grows(&budget, 0), grows(&budget, 0));
    oldest.grow(64 * MIB, soon()).await.unwrap();
    next.grow(64 * MIB, soon()).await.unwrap();
    assert_eq!(next.try_grow(MIB), Err(Exceeded::Bytes));
    oldest.grow(320 * MIB, soon()).await.unwrap();
    assert_eq!(
        oldest.try_grow(MIB),
        Err(Exceeded::Bytes),
        "the last eighth is reserved for small holders"
    );
    let mut small = grows(&budget, 0);
    small.try_grow(MIB).unwrap();
    assert_eq!(small.try_grow(1), Err(Exceeded::Bytes));
    drop(small);

    let waits = tokio::spawn(async move { next.grow(100 * MIB, soon()).await.map(|()| next) });
    tokio::task::yield_now().await;
    oldest.leave_line();
    tokio::task::yield_now().await;
    assert!(
        !waits.is_finished(),
        "it is the oldest now, but the budget is used up"
    );
    oldest.shrink(100 * MIB);
    let next = waits.await.unwrap().unwrap();
    assert_eq!(next.bytes(), 164 * MIB);
    drop((oldest, next));
    assert_eq!(budget.used_bytes(ByteKind::Converted), 0);
    assert!(budget.part(ByteKind::Converted).state.lock().growing.is_empty());
    assert_eq!(budget.metrics(ByteKind::Converted).used.get(), 0);
}

#[tokio::test(start_paused = true)]
async fn grow_without_free_bytes_fails_at_the_deadline() {
    let budget = converted(8);
    let (mut oldest, mut next) = (grows(&budget, 0), grows(&budget, 0));
    oldest.grow(5 * MIB, soon()).await.unwrap();
    let deadline = soon();
    assert_eq!(next.grow(2 * MIB, deadline).await, Err(Exceeded::Bytes));
    assert_eq!(Instant::now(), deadline);
    assert_eq!(
        oldest.grow(3 * MIB, soon()).await,
        Err(Exceeded::Bytes),
        "the bytes can never fit"
    );
    assert_eq!(Instant::now(), deadline, "so the call does not wait");
}

#[tokio::test(start_paused = true)]
async fn first_holder_that_needs_the_bytes_of_waiting_ones_is_refused_at_once() {
    let budget = converted(8);
    let start = Instant::now();
    let (mut first, mut next) = (grows(&budget, 0), grows(&budget, 1));
    next.grow(2 * MIB, soon()).await.unwrap();
    first.grow(3 * MIB, soon()).await.unwrap();
    let mut sending = grows(&budget, 2);
    sending.leave_line();
    sending.set(2 * MIB);
    let waits = tokio::spawn(async move { (first.grow(3 * MIB, soon()).await, first) });
    tokio::task::yield_now().await;
    assert!(!waits.is_finished(), "the next one may complete");
    let next_waits = tokio::spawn(async move { next.grow(4 * MIB, soon()).await.map(|()| next) });
    let (refused, first) = waits.await.unwrap();
    assert_eq!(refused, Err(Exceeded::Bytes));
    assert_eq!(Instant::now(), start, "nothing waited for a deadline");
    assert!(!next_waits.is_finished(), "the first one still has its bytes");
    drop((first, sending));
    let next = next_waits.await.unwrap().unwrap();
    assert_eq!(next.bytes(), 6 * MIB);
    assert_eq!(Instant::now(), start, "nothing waited for a deadline");
    assert_eq!(budget.part(ByteKind::Converted).state.lock().waiting, 0);
}

#[test]
fn split_off_bytes_are_released_separately() {
    let budget = BytesLedger::of_bytes(8 * MIB);
    let mut held = hold(&budget, 0, ByteKind::Watch);
    held.try_grow(2 * MIB).unwrap();
    let part = held.split(MIB);
    drop(held);
    assert_eq!(budget.used_bytes(ByteKind::Watch), MIB);
    drop(part);
    assert_eq!(budget.used_bytes(ByteKind::Watch), 0);
}

#[tokio::test(start_paused = true)]
async fn bytes_in_memory_already_count_beyond_the_bound() {
    let budget = BytesLedger::of_bytes(8 * MIB);
    let (mut given, mut asking) = (
        hold(&budget, 0, ByteKind::Watch),
        hold(&budget, 0, ByteKind::Watch),
    );
    asking.try_grow(6 * MIB).unwrap();
    given.set(9 * MIB);
    assert_eq!(budget.used_bytes(ByteKind::Watch), 15 * MIB);
    assert_eq!(asking.try_grow(1), Err(Exceeded::Bytes));
    let waiting = tokio::spawn(async move { asking.grow(MIB, soon()).await.map(|()| asking) });
    tokio::task::yield_now().await;
    assert!(budget.is_waited_for(ByteKind::Watch));
    given.set(MIB);
    let asking = waiting.await.unwrap().unwrap();
    assert_eq!(asking.bytes(), 7 * MIB);
    assert!(!budget.is_waited_for(ByteKind::Watch));
    assert_eq!(
        budget.used_bytes(ByteKind::Watch),
        budget.max_bytes(ByteKind::Watch)
    );
}

#[test]
fn first_come_budget_grows_up_to_its_bound() {
    let budget = BytesLedger::of_bytes(8 * MIB);
    let (mut one, mut other) = (
        hold(&budget, 0, ByteKind::Watch),
        hold(&budget, 0, ByteKind::Watch),
    );
    one.try_grow(7 * MIB).unwrap();
    assert_eq!(other.try_grow(2 * MIB), Err(Exceeded::Bytes));
    other.try_grow(MIB).unwrap();
    assert_eq!(other.try_grow(1), Err(Exceeded::Bytes));
    assert_eq!(budget.metrics(ByteKind::Watch).used.get(), 8 << 20);
    drop(one);
    other.try_grow(7 * MIB).unwrap();
}

#[test]
fn client_leaves_room_to_others() {
    let budget = BytesLedger::of_bytes(8 * 64 * MIB);
    let (mut one, mut more) = (
        hold(&budget, 1, ByteKind::Shared),
        hold(&budget, 1, ByteKind::Shared),
    );
    one.try_grow(50 * MIB).unwrap();
    assert_eq!(more.try_grow(7 * MIB), Err(Exceeded::Bytes), "an eighth is left");
    let mut other = hold(&budget, 2, ByteKind::Shared);
    other.try_grow(8 * MIB).unwrap();
    assert_eq!(other.try_grow(1), Err(Exceeded::Bytes), "each next to others");
    assert_eq!(one.try_grow(1), Err(Exceeded::Bytes));
    drop(one);
    more.try_grow(24 * MIB).unwrap();
    assert_eq!(more.try_grow(1), Err(Exceeded::Bytes), "a half is used");
    let mut part = more.split(20 * MIB);
    drop(more);
    assert_eq!(part.try_grow(4 * MIB), Ok(()), "up to the half");
    drop((part, other));
    assert!(budget.part(ByteKind::Shared).state.lock().by_client.is_empty());
}
