//! Answers that nobody reads. An answer under way holds the snapshot that it is made of, and with it all keys that have changed
//! since: a client that takes nothing, but keeps its connection up, could hold one keyspace after the other in memory. So
//! an answer whose reader takes nothing for a minute gives its snapshot back, and its stream is reset.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

/// How often it is looked who has taken something.
const TICK: Duration = Duration::from_secs(5);
/// In ticks: an answer of which nothing was taken for so long is given up.
const STALLED_TICKS: u32 = 12;

/// All long answers under way.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// Counts up by itself, so that an answer need not look at the clock.
    tick: Arc<AtomicU32>,
    under_way: Mutex<Vec<Weak<dyn Watched>>>,
}

/// An answer (of whatever kind), or nothing once it was given up.
#[derive(Debug)]
pub(super) struct Slot<T> {
    answer: Mutex<Option<T>>,
    tick: Arc<AtomicU32>,
    taken: AtomicU32,
}

/// The answer was given up.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("nobody has read this answer for a minute")]
pub(super) struct GivenUp;

/// A [`Slot`], whatever it holds.
trait Watched: std::fmt::Debug + Send + Sync {
    /// The tick at which something was taken last.
    fn taken(&self) -> u32;
    fn give_up(&self);
}

impl<T: std::fmt::Debug + Send> Watched for Slot<T> {
    fn taken(&self) -> u32 {
        self.taken.load(Ordering::Relaxed)
    }

    fn give_up(&self) {
        // Dropped here, where nobody waits for a lock: a snapshot may be large.
        let answer = self.answer.lock().take();
        drop(answer);
    }
}

impl Answers {
    /// Watches over `answer` until it is dropped.
    pub(super) fn watch<T: std::fmt::Debug + Send + 'static>(&self, answer: T) -> Arc<Slot<T>> {
        let slot = Arc::new(Slot {
            answer: Mutex::new(Some(answer)),
            taken: AtomicU32::new(self.tick.load(Ordering::Relaxed)),
            tick: Arc::clone(&self.tick),
        });
        let watched: Weak<Slot<T>> = Arc::downgrade(&slot);
        self.under_way.lock().push(watched);
        slot
    }

    /// Gives up what nobody reads, until cancelled.
    pub(super) async fn run(&self) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            ticks.tick().await;
            let given_up = self.beat();
            if given_up > 0 {
                tracing::warn!(
                    answers = given_up,
                    "nobody has read these answers for a minute: they are given up, and their streams are reset"
                );
            }
        }
    }

    fn beat(&self) -> usize {
        let now = self.tick.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let mut stalled = Vec::new();
        self.under_way.lock().retain(|slot| match slot.upgrade() {
            Some(slot) if now.wrapping_sub(slot.taken()) > STALLED_TICKS => {
                stalled.push(slot);
                false
            }
            Some(_) => true,
            None => false,
        });
        for slot in &stalled {
            slot.give_up();
        }
        stalled.len()
    }
}

impl<T> Slot<T> {
    /// Takes the next piece of the answer.
    pub(super) fn take<R>(&self, next: impl FnOnce(&mut T) -> R) -> Result<R, GivenUp> {
        self.taken
            .store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
        self.answer.lock().as_mut().map(next).ok_or(GivenUp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Answer, Dialect, Entry, RangeQuery, ResponseHeader, Selected, Tree, select};

    /// An answer of several pieces.
    fn answer() -> Answer {
        let entries = (0..100_u8).map(|n| {
            let mut key_value = vec![0x0a, 1, n, 0x2a, 100];
            key_value.extend([b'v'; 100]);
            Entry::from_key_value(&key_value).unwrap()
        });
        let tree = Tree::from_sorted(entries);
        let all = RangeQuery {
            key: b"\0".as_slice().into(),
            range_end: b"\0".as_slice().into(),
            ..RangeQuery::default()
        };
        match select(&tree, &all, &Dialect::of_version(3, 7)) {
            Selected::Answer(selection) => Answer::new(ResponseHeader::default(), selection),
            Selected::TiesAreEtcds => unreachable!("there is no order"),
        }
    }

    #[test]
    fn what_is_read_goes_on_and_what_is_not_is_given_up() {
        let answers = Answers::default();
        let (read, unread, gone) = (
            answers.watch(answer()),
            answers.watch(answer()),
            answers.watch(answer()),
        );
        assert!(unread.take(|answer| answer.next_piece(1024)).is_ok());
        drop(gone);
        for _ in 0..STALLED_TICKS {
            assert_eq!(answers.beat(), 0);
        }
        assert!(
            read.take(|answer| answer.next_piece(1024))
                .is_ok_and(|piece| piece.is_some())
        );
        assert_eq!(answers.beat(), 1);
        assert!(unread.answer.lock().is_none(), "its snapshot is free");
        assert!(unread.take(|answer| answer.next_piece(1024)).is_err());
        while read
            .take(|answer| answer.next_piece(1024))
            .expect("it is being read")
            .is_some()
        {}
        assert_eq!(answers.under_way.lock().len(), 1);
    }
}
