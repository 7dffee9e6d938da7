//! The bytes of etcd's answers that are held: one bound for all of them (I7), in whose sharing nobody starves.
//!
//! An answer's size shows only as it comes. So all may take from the first quarter; beyond it only the eldest goes on,
//! while the others pause and, by HTTP/2's flow control, etcd with them. When the eldest is whole, the next is the eldest.
//! What is left at the end is for the first bytes of each, so that a small answer does not wait behind large ones.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::telemetry::Metrics;

/// The part that all may take from.
const COMMON: u64 = 4;
/// The part of an answer's first bytes: so little that 64 of them leave the eldest half of all.
const SMALL: u64 = 512;

/// See the module.
#[derive(Debug)]
pub(super) struct Budget {
    max_bytes: u64,
    state: Mutex<State>,
    /// Woken whenever bytes are given back or another becomes the eldest.
    changed: Notify,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    /// Numbers those that grow, in the order of their beginning.
    next: u64,
    growing: BTreeSet<u64>,
}

/// There is no room, or was none until the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom;

/// Bytes that count against the bound until dropped.
#[derive(Debug)]
pub(super) struct Held {
    budget: Arc<Budget>,
    bytes: u64,
    growing: Option<u64>,
}

impl Budget {
    pub(super) fn new(max_bytes: u64, metrics: &Arc<Metrics>) -> Arc<Budget> {
        Arc::new(Budget {
            max_bytes,
            state: Mutex::default(),
            changed: Notify::new(),
            metrics: Arc::clone(metrics),
        })
    }

    /// Nothing yet, with a place in line for [`Held::grow`].
    pub(super) fn begin(self: &Arc<Self>) -> Held {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.growing.insert(number);
        Held {
            budget: Arc::clone(self),
            bytes: 0,
            growing: Some(number),
        }
    }

    /// Nothing yet, for what only takes what is free at once ([`Held::try_grow`]).
    pub(super) fn nothing(self: &Arc<Self>) -> Held {
        Held {
            budget: Arc::clone(self),
            bytes: 0,
            growing: None,
        }
    }

    /// Up to where the eldest may fill it.
    fn eldest_bytes(&self) -> u64 {
        self.max_bytes / 8 * 7
    }

    fn note(&self, change: i64) {
        self.metrics.forwarding.stream_held_bytes.inc_by(change);
    }
}

impl Held {
    /// Takes `bytes` more, waiting for them until `deadline`.
    ///
    /// # Errors
    /// [`NoRoom`]; at once, if they would not fit even with nobody else there.
    pub(super) async fn grow(&mut self, bytes: u64, deadline: Instant) -> Result<(), NoRoom> {
        let budget = Arc::clone(&self.budget);
        loop {
            // Registered before the look, so that no change in between is missed.
            let changed = budget.changed.notified();
            if self.try_grow(bytes).is_ok() {
                return Ok(());
            }
            if self.bytes + bytes > budget.eldest_bytes()
                || tokio::time::timeout_at(deadline, changed).await.is_err()
            {
                return Err(NoRoom);
            }
        }
    }

    /// Takes `bytes` more if they are free.
    pub(super) fn try_grow(&mut self, bytes: u64) -> Result<(), NoRoom> {
        let budget = &self.budget;
        let mut state = budget.state.lock();
        let eldest = self.growing.is_some() && state.growing.first() == self.growing.as_ref();
        let bound = if self.bytes + bytes <= budget.max_bytes / SMALL {
            budget.max_bytes
        } else if eldest {
            budget.eldest_bytes()
        } else {
            budget.max_bytes / COMMON
        };
        if state.used + bytes > bound {
            return Err(NoRoom);
        }
        state.used += bytes;
        self.bytes += bytes;
        budget.note(i64::try_from(bytes).unwrap_or(i64::MAX));
        Ok(())
    }

    /// It grows no more: the next is the eldest.
    pub(super) fn stop_growing(&mut self) {
        if let Some(number) = self.growing.take() {
            self.budget.state.lock().growing.remove(&number);
            self.budget.changed.notify_waiters();
        }
    }

    /// Gives `bytes` of it back.
    pub(super) fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        if bytes > 0 {
            self.bytes -= bytes;
            self.budget.state.lock().used -= bytes;
            self.budget.note(-i64::try_from(bytes).unwrap_or(i64::MAX));
            self.budget.changed.notify_waiters();
        }
    }

    /// `bytes` of it as something of their own.
    pub(super) fn split(&mut self, bytes: u64) -> Held {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Held {
            budget: Arc::clone(&self.budget),
            bytes,
            growing: None,
        }
    }

    /// How many bytes it holds.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.stop_growing();
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn budget(mib: u64) -> Arc<Budget> {
        Budget::new(mib * MIB, &Arc::new(Metrics::new()))
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[tokio::test(start_paused = true)]
    async fn beyond_the_common_part_only_the_eldest_goes_on() {
        let budget = budget(512);
        let (mut eldest, mut next) = (budget.begin(), budget.begin());
        eldest.grow(64 * MIB, soon()).await.unwrap();
        next.grow(64 * MIB, soon()).await.unwrap();
        assert_eq!(next.try_grow(MIB), Err(NoRoom));
        eldest.grow(320 * MIB, soon()).await.unwrap();
        assert_eq!(
            eldest.try_grow(MIB),
            Err(NoRoom),
            "the last eighth is for small ones"
        );
        let mut small = budget.begin();
        small.try_grow(MIB).unwrap();
        assert_eq!(small.try_grow(1), Err(NoRoom));
        drop(small);

        let waits = tokio::spawn(async move { next.grow(100 * MIB, soon()).await.map(|()| next) });
        tokio::task::yield_now().await;
        eldest.stop_growing();
        tokio::task::yield_now().await;
        assert!(!waits.is_finished(), "it is the eldest now, but there is no room");
        eldest.shrink(100 * MIB);
        let next = waits.await.unwrap().unwrap();
        assert_eq!(next.bytes(), 164 * MIB);
        drop((eldest, next));
        assert_eq!(budget.state.lock().used, 0);
        assert!(budget.state.lock().growing.is_empty());
        assert_eq!(budget.metrics.forwarding.stream_held_bytes.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_room_waits_no_longer_than_its_deadline() {
        let budget = budget(8);
        let (mut eldest, mut next) = (budget.begin(), budget.begin());
        eldest.grow(5 * MIB, soon()).await.unwrap();
        let deadline = soon();
        assert_eq!(next.grow(2 * MIB, deadline).await, Err(NoRoom));
        assert_eq!(Instant::now(), deadline);
        assert_eq!(
            eldest.grow(3 * MIB, soon()).await,
            Err(NoRoom),
            "it can never fit"
        );
        assert_eq!(Instant::now(), deadline, "so nobody waits");
    }

    #[test]
    fn what_is_split_off_is_given_back_by_itself() {
        let budget = budget(8);
        let mut held = budget.nothing();
        held.try_grow(2 * MIB).unwrap();
        let part = held.split(MIB);
        drop(held);
        assert_eq!(budget.state.lock().used, MIB);
        drop(part);
        assert_eq!(budget.state.lock().used, 0);
    }
}
