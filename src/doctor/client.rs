//! Paced calls to etcd, with their cost.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::model::Cost;
use etcd_wire::etcdserverpb::kv_client::KvClient;
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse};
use rangecache_upstream::Connection;

/// Timeout of each call, and of each attempt to connect.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which no more ranges are divided or sampled.
const TIME_BUDGET: Duration = Duration::from_secs(20);
/// Pause after a call, as a multiple of the call's duration.
const PAUSE_FACTOR: u32 = 4;
/// Longest pause after a call.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Client that reads as rangecache's own user, pauses after each call, and counts what the calls cost etcd.
pub(super) struct PacedClient<'a> {
    connection: &'a Arc<Connection>,
    started: Instant,
    pub(super) cost: Cost,
}

impl PacedClient<'_> {
    /// Starts the time budget of 20 s.
    pub(super) fn new(connection: &Arc<Connection>) -> PacedClient<'_> {
        PacedClient {
            connection,
            started: Instant::now(),
            cost: Cost::default(),
        }
    }

    /// Reads one Range, then pauses.
    ///
    /// # Errors
    /// etcd's status or a timeout, in words.
    pub(super) async fn range(&mut self, request: RangeRequest) -> Result<RangeResponse, String> {
        let (channel, origin) = self.connection.own_channel();
        let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        let began = Instant::now();
        let response = timeout(CALL_TIMEOUT, client.range(request)).await;
        let took = began.elapsed();
        self.cost.calls += 1;
        self.cost.took += took;
        let response = match response {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return Err(describe_status(&status)),
            Err(_) => return Err(timed_out()),
        };
        self.cost.read_bytes += response.kvs.iter().map(|kv| kv.len() as u64).sum::<u64>();
        tokio::time::sleep((took * PAUSE_FACTOR).min(MAX_PAUSE)).await;
        Ok(response)
    }

    /// Whether the time budget is not used up.
    pub(super) fn has_time(&self) -> bool {
        self.started.elapsed() < TIME_BUDGET
    }
}

/// etcd's message with the code of a status.
pub(super) fn describe_status(status: &tonic::Status) -> String {
    format!("{} ({:?})", status.message(), status.code())
}

/// Text for a call without a response in time.
pub(super) fn timed_out() -> String {
    format!("no response within {CALL_TIMEOUT:?}")
}
