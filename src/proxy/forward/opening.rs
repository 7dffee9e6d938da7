//! The turn of a new watch that is forwarded: from its first message until etcd's response begins.
//!
//! The first message of a watch stream creates a watch, to which etcd responds at once. A thousand clients that connect
//! again create a thousand watches, which must not delay each quorum check by as many.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use rangecache_edge::limits::{ClientAccount, NoTurn, Turn, Turns};
use rangecache_upstream::BoxError;

/// Longest time that a new watch has its turn. etcd does not respond to every first message.
const MAX_OPENING: Duration = Duration::from_secs(1);

/// A watch that is being created.
pub(super) struct Opening<'a> {
    turns: &'a Arc<Turns>,
    account: &'a Arc<ClientAccount>,
    state: Arc<OpeningState>,
}

/// Shared with the body of the request.
struct OpeningState {
    /// The turn while the call has one. `None` when the call no longer needs one.
    turn: Mutex<Option<Option<Turn>>>,
    /// Result of the wait for a turn.
    waited: watch::Sender<Option<Result<(), NoTurn>>>,
}

impl Opening<'_> {
    pub(super) fn new<'a>(turns: &'a Arc<Turns>, account: &'a Arc<ClientAccount>) -> Opening<'a> {
        Opening {
            turns,
            account,
            state: Arc::new(OpeningState {
                turn: Mutex::new(Some(None)),
                waited: watch::Sender::new(None),
            }),
        }
    }

    /// Waits for the turn; awaited by the body of the request before its first message.
    pub(super) fn turn(&self) -> impl Future<Output = Result<(), BoxError>> + Send + Sync + use<> {
        let (turns, account, state) = (
            Arc::clone(self.turns),
            Arc::clone(self.account),
            Arc::clone(&self.state),
        );
        async move {
            match turns.acquire(&account, None).await {
                Ok(turn) => {
                    if let Some(held) = &mut *state.turn.lock() {
                        *held = Some(turn);
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

    /// Runs `call`, which returns when etcd's response begins; the turn ends then.
    ///
    /// # Errors
    /// [`NoTurn`] if the call got no turn.
    pub(super) async fn run<T>(&self, call: impl Future<Output = T>) -> Result<T, NoTurn> {
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
            // A call without a turn fails, too: the reason is in `waited`.
            biased;
            cause = supervised => Err(cause),
            response = call => Ok(response),
        }
    }

    fn end(&self) {
        let ended = self.state.turn.lock().take();
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

    use super::*;
    use rangecache_edge::limits::{BufferMetrics, CallBuffers, Intake, TurnsMetrics};

    fn turns(max_waiting: u32) -> (Arc<Turns>, Arc<ClientAccount>) {
        let buffers = CallBuffers::new(1 << 20, &BufferMetrics::default());
        let small = TurnsMetrics::default().small();
        (
            Turns::new(1, max_waiting, None, small),
            buffers.account(0, Arc::<Intake>::default()),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn turn_of_a_watch_ends_with_its_response_or_after_a_second() {
        let (turns, account) = turns(10);
        let answered = Opening::new(&turns, &account);
        answered.turn().await.unwrap();
        let silent = Opening::new(&turns, &account);
        let mut next = Box::pin(silent.turn());
        tokio::select! {
            biased;
            _ = &mut next => panic!("the turn is taken"),
            () = tokio::task::yield_now() => {}
        }
        answered.run(async {}).await.unwrap();
        drop(answered);
        next.await.unwrap();
        let third = Opening::new(&turns, &account);
        let began = tokio::time::Instant::now();
        tokio::select! {
            _ = silent.run(pending::<()>()) => panic!("the call has no response"),
            turn = third.turn() => turn.unwrap(),
        }
        assert_eq!(began.elapsed(), MAX_OPENING);
    }

    #[tokio::test]
    async fn watch_without_a_turn_ends_with_the_reason() {
        let (turns, account) = turns(0);
        let first = Opening::new(&turns, &account);
        first.turn().await.unwrap();
        let second = Opening::new(&turns, &account);
        assert!(second.turn().await.is_err());
        assert_eq!(second.run(pending::<()>()).await, Err(NoTurn::TooManyWaiting));
    }
}
