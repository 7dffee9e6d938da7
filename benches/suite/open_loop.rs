//! Drives a target on a fixed schedule, independent of its responses: latency counts from the time at which a call
//! was due, so that a stall delays all calls that were due during it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::load::Outcome;

/// Time to wait for responses after the last call was due.
const LAST_ANSWERS: Duration = Duration::from_secs(30);

/// Starts `per_second` calls a second for `duration`. `call` gets the number of the call and returns the bytes of the
/// response.
pub(crate) async fn open_loop<F, C>(per_second: u32, duration: Duration, call: C) -> Result<Outcome>
where
    C: Fn(usize) -> F + Send + Sync + 'static,
    F: Future<Output = Result<u64, String>> + Send,
{
    let call = Arc::new(call);
    let start = Instant::now();
    let mut ticks = ticks(per_second, start, duration);
    let mut calls = tokio::task::JoinSet::new();
    let mut sum = Outcome::default();
    let mut number = 0;
    while let Some(due) = ticks.recv().await {
        let call = call.clone();
        calls.spawn(async move {
            let result = call(number).await;
            (due.elapsed(), result)
        });
        number += 1;
        while let Some(finished) = calls.try_join_next() {
            let (latency, result) = finished?;
            sum.count(latency, result);
        }
    }
    let rest = async {
        while let Some(finished) = calls.join_next().await {
            let (latency, result) = finished?;
            sum.count(latency, result);
        }
        Ok::<_, tokio::task::JoinError>(())
    };
    match tokio::time::timeout(LAST_ANSWERS, rest).await {
        Ok(joined) => joined?,
        Err(_) => {
            sum.errors += calls.len() as u64;
            sum.first_error.get_or_insert(format!(
                "no response {LAST_ANSWERS:?} after the last call was due"
            ));
        }
    }
    sum.elapsed = start.elapsed();
    sum.latencies_ns.sort_unstable();
    Ok(sum)
}

/// Sends the due times of calls, each when it is reached. On a thread of its own: the runtime's timer has steps of a
/// millisecond, as long as the latencies measured. Ends with the schedule or with the receiver.
fn ticks(per_second: u32, start: Instant, duration: Duration) -> UnboundedReceiver<Instant> {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for number in 0.. {
            let due = start + Duration::from_secs(1) * number / per_second;
            if due - start >= duration {
                return;
            }
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if sender.send(due).is_err() {
                return;
            }
        }
    });
    receiver
}
