//! The slot of a new watch that is forwarded: from its first message until etcd's response begins.
//!
//! The first message of a watch stream creates a watch, to which etcd responds at once. A thousand clients that connect
//! again create a thousand watches, which must not delay each quorum check by as many.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use rangecache_edge::limits::{Exceeded, Gate, Slot};
use rangecache_upstream::BoxError;
use tokio::sync::watch;

/// Longest time that a new watch has its slot. etcd does not respond to every first message.
const MAX_OPENING: Duration = Duration::from_secs(1);

/// A watch that is being created.
pub(super) struct Opening<'a> {
    gate: Gate<'a>,
    state: Arc<OpeningState>,
}

/// Shared with the body of the request.
struct OpeningState {
    /// The slot while the call has one. `None` when the call no longer needs one.
    slot: Mutex<Option<Option<Slot>>>,
    /// Result of the wait for a slot.
    waited: watch::Sender<Option<Result<(), Exceeded>>>,
}

impl Opening<'_> {
    pub(super) fn new(gate: Gate<'_>) -> Opening<'_> {
        Opening {
            gate,
            state: Arc::new(OpeningState {
                slot: Mutex::new(Some(None)),
                waited: watch::Sender::new(None),
            }),
        }
    }

    /// Waits for the slot; awaited by the body of the request before its first message.
    pub(super) fn slot(&self) -> impl Future<Output = Result<(), BoxError>> + Send + Sync + use<> {
        let Gate {
            slots,
            account,
            deadline,
        } = self.gate;
        let (slots, account) = (Arc::clone(slots), Arc::clone(account));
        let state = Arc::clone(&self.state);
        async move {
            match slots.acquire(&account, deadline).await {
                Ok(slot) => {
                    if let Some(held) = &mut *state.slot.lock() {
                        *held = Some(slot);
                    }
                    state.waited.send_replace(Some(Ok(())));
                    Ok(())
                }
                Err(cause) => {
                    state.waited.send_replace(Some(Err(cause)));
                    Err(cause.into())
                }
            }
        }
    }

    /// Runs `call`, which returns when etcd's response begins; the slot ends then.
    ///
    /// # Errors
    /// [`Exceeded`] if the call got no slot.
    pub(super) async fn run<T>(&self, call: impl Future<Output = T>) -> Result<T, Exceeded> {
        let mut waited = self.state.waited.subscribe();
        let supervised = async {
            // The sender is in `self`.
            if let Ok(result) = waited.wait_for(Option::is_some).await.map(|result| *result)
                && let Some(Err(cause)) = result
            {
                return cause;
            }
            tokio::time::sleep(MAX_OPENING).await;
            self.end();
            std::future::pending().await
        };
        tokio::select! {
            // A call without a slot fails, too: the reason is in `waited`.
            biased;
            cause = supervised => Err(cause),
            response = call => Ok(response),
        }
    }

    fn end(&self) {
        let ended = self.state.slot.lock().take();
        drop(ended);
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use rangecache_edge::limits::{ClientAccount, Deadline, SlotPolicy, Slots, SlotsMetrics};

    use super::*;
    use crate::call::testing::account;

    fn slots(max_waiting: u32) -> (Arc<Slots>, Arc<ClientAccount>) {
        let small = SlotsMetrics::default().small();
        (
            Slots::new(SlotPolicy::Any, 1, max_waiting, None, small),
            account(1 << 20),
        )
    }

    fn gate<'a>(slots: &'a Arc<Slots>, account: &'a Arc<ClientAccount>) -> Gate<'a> {
        let deadline = Deadline::NONE;
        Gate {
            slots,
            account,
            deadline,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn slot_of_a_watch_ends_with_its_response_or_after_a_second() {
        let (slots, account) = slots(10);
        let answered = Opening::new(gate(&slots, &account));
        answered.slot().await.unwrap();
        let silent = Opening::new(gate(&slots, &account));
        let mut next = Box::pin(silent.slot());
        tokio::select! {
            biased;
            _ = &mut next => panic!("the slot is taken"),
            () = tokio::task::yield_now() => {}
        }
        answered.run(async {}).await.unwrap();
        drop(answered);
        next.await.unwrap();
        let third = Opening::new(gate(&slots, &account));
        let began = tokio::time::Instant::now();
        tokio::select! {
            _ = silent.run(pending::<()>()) => panic!("the call has no response"),
            slot = third.slot() => slot.unwrap(),
        }
        assert_eq!(began.elapsed(), MAX_OPENING);
    }

    #[tokio::test]
    async fn watch_without_a_slot_ends_with_the_reason() {
        let (slots, account) = slots(0);
        let first = Opening::new(gate(&slots, &account));
        first.slot().await.unwrap();
        let second = Opening::new(gate(&slots, &account));
        assert!(second.slot().await.is_err());
        assert_eq!(second.run(pending::<()>()).await, Err(Exceeded::Waiting));
    }
}
