//! Connection to a member.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::members::From;

/// A connection; see the module.
pub struct Link {
    member: usize,
    pub from: From,
    /// Cancelled when the connection is cut.
    pub cut: CancellationToken,
    /// Whether the network loses what either side sends: neither side is told.
    lost: watch::Sender<bool>,
    /// When the member last answered a unary call on it.
    answered: Mutex<Option<Instant>>,
    carries_watch: AtomicBool,
}

impl Link {
    /// A connection of `from` to `member`.
    pub fn new(member: usize, from: From) -> Self {
        Self {
            member,
            from,
            cut: CancellationToken::new(),
            lost: watch::Sender::new(false),
            answered: Mutex::default(),
            carries_watch: AtomicBool::default(),
        }
    }

    /// Whether it is one of `from` to `member`.
    pub fn is_of(&self, member: usize, from: From) -> bool {
        (self.member, self.from) == (member, from)
    }

    /// Begins or ends to lose what either side sends. What was lost arrives afterwards, as TCP sends it again.
    pub fn lose(&self, is_lost: bool) {
        self.lost.send_replace(is_lost);
    }

    /// Records that the member answers a call.
    pub fn record_answered(&self) {
        *self.answered.lock() = Some(Instant::now());
    }

    /// Whether the connection is usable, and the member has answered on it within `age`, but not within `margin`.
    pub fn has_answered(&self, age: Duration, margin: Duration) -> bool {
        let is_usable = !*self.lost.borrow() && !self.cut.is_cancelled();
        let answered = self.answered.lock().map(|at| at.elapsed());
        is_usable && answered.is_some_and(|ago| margin < ago && ago < age)
    }

    /// Records that it carries a watch.
    pub fn record_watch(&self) {
        self.carries_watch.store(true, Ordering::Relaxed);
    }

    /// Whether a watch was created on it.
    pub fn carries_watch(&self) -> bool {
        self.carries_watch.load(Ordering::Relaxed)
    }

    /// Polls `serving` to its end, or until the connection is cut, while nothing is lost. A connection that is cut meanwhile is
    /// half open: the other side is not told as long as everything is lost.
    pub async fn serve(&self, serving: impl Future<Output = ()>) {
        tokio::pin!(serving);
        let mut lost = self.lost.subscribe();
        loop {
            // The sender lives as long as self.
            tokio::select! {
                biased;
                _ = lost.wait_for(|is_lost| *is_lost) => {}
                () = self.cut.cancelled() => return,
                () = &mut serving => return,
            }
            let _ = lost.wait_for(|is_lost| !*is_lost).await;
        }
    }
}
