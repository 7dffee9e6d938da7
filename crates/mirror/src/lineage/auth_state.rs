//! Whether etcd's auth is on (I8), as checks without credentials and clients' own calls show it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Whether etcd's auth is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auth {
    /// There was no check without credentials yet, or a call may have changed auth since.
    Unknown,
    /// The last check without credentials succeeded.
    Off,
    /// The last check without credentials was refused.
    On,
}

/// A call that may change auth, and what was known of auth before.
#[derive(Clone, Copy, Debug)]
pub struct AuthChange {
    known: Auth,
    number: u64,
}

/// State of auth, and the number of its possible changes, in one word: a check that ends late cannot hide a change that came
/// after it.
#[derive(Debug, Default)]
pub(super) struct AuthState(AtomicU64);

/// Bits of the word for the state; the number of changes is above them.
const STATE_BITS: u32 = 2;

fn state_of(word: u64) -> Auth {
    match word & ((1 << STATE_BITS) - 1) {
        0 => Auth::Unknown,
        1 => Auth::Off,
        _ => Auth::On,
    }
}

fn changes_of(word: u64) -> u64 {
    word >> STATE_BITS
}

fn word(changes: u64, state: Auth) -> u64 {
    (changes << STATE_BITS) | state as u64
}

impl AuthState {
    pub(super) fn get(&self) -> Auth {
        state_of(self.0.load(Ordering::Acquire))
    }

    /// Number of changes so far: calls that may have changed auth, and refusals.
    pub(super) fn changes(&self) -> u64 {
        changes_of(self.0.load(Ordering::Acquire))
    }

    /// Records that a check without credentials succeeded which began after `changes`. Returns the previous state.
    pub(super) fn seems_off(&self, changes: u64) -> Auth {
        let known = self.0.load(Ordering::Acquire);
        if changes_of(known) != changes {
            return state_of(known);
        }
        // If it fails, there was a change in between, or another check has recorded the same.
        let off = word(changes, Auth::Off);
        let exchanged = self
            .0
            .compare_exchange(known, off, Ordering::AcqRel, Ordering::Acquire);
        state_of(exchanged.unwrap_or_else(|known| known))
    }

    /// Records that a check without credentials was refused; returns the previous state. Checks that began before and end
    /// later show nothing any more.
    pub(super) fn is_on(&self) -> Auth {
        state_of(self.change(Auth::On))
    }

    /// Records that a call may have changed auth.
    pub(super) fn may_have_changed(&self) -> AuthChange {
        let known = self.change(Auth::Unknown);
        AuthChange {
            known: state_of(known),
            number: changes_of(known) + 1,
        }
    }

    /// Records that etcd has refused the call of `change`.
    pub(super) fn was_refused(&self, change: AuthChange) {
        let (unknown, known) = (
            word(change.number, Auth::Unknown),
            word(change.number, change.known),
        );
        let _ = self
            .0
            .compare_exchange(unknown, known, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Counts a change, after which the state is `state`; returns the previous word.
    fn change(&self, state: Auth) -> u64 {
        let mut known = self.0.load(Ordering::Acquire);
        loop {
            let next = word(changes_of(known) + 1, state);
            match self
                .0
                .compare_exchange_weak(known, next, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(previous) => return previous,
                Err(now) => known = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_that_began_before_a_refusal_or_a_change_does_not_show_that_auth_is_off() {
        let auth = AuthState::default();
        assert_eq!((auth.seems_off(0), auth.get()), (Auth::Unknown, Auth::Off));
        let early = auth.changes();
        assert_eq!(auth.is_on(), Auth::Off);
        assert_eq!((auth.seems_off(early), auth.get()), (Auth::On, Auth::On));
        let early = auth.changes();
        auth.may_have_changed();
        assert_eq!(
            (auth.seems_off(early), auth.get()),
            (Auth::Unknown, Auth::Unknown)
        );
        auth.seems_off(auth.changes());
        assert_eq!(auth.get(), Auth::Off);
    }

    #[test]
    fn refused_change_leaves_auth_as_it_was() {
        let auth = AuthState::default();
        auth.seems_off(0);
        let refused = auth.may_have_changed();
        assert_eq!(auth.get(), Auth::Unknown, "until etcd responds");
        auth.was_refused(refused);
        assert_eq!(auth.get(), Auth::Off);
        let refused = auth.may_have_changed();
        auth.may_have_changed();
        auth.was_refused(refused);
        assert_eq!(auth.get(), Auth::Unknown, "another call may have changed it");
    }
}
