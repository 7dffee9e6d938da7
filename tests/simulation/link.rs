//! One connection to a member.

use tokio::sync::watch;
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
}

impl Link {
    /// A connection of `from` to `member`.
    pub fn new(member: usize, from: From) -> Self {
        Self {
            member,
            from,
            cut: CancellationToken::new(),
            lost: watch::Sender::new(false),
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

    /// Polls `serving` to its end while nothing is lost.
    pub async fn serve(&self, serving: impl Future<Output = ()>) {
        tokio::pin!(serving);
        let mut lost = self.lost.subscribe();
        loop {
            // The sender lives as long as self.
            tokio::select! {
                biased;
                _ = lost.wait_for(|is_lost| *is_lost) => {}
                () = &mut serving => return,
            }
            let _ = lost.wait_for(|is_lost| !*is_lost).await;
        }
    }
}
