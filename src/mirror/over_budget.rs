//! A mirror that took more memory than it may has stepped aside: its reads are forwarded. Here it waits until it may fit.

use std::time::Duration;

use tokio::time::Instant;

use super::mirrors::Mirrors;
use super::state::{Epoch, Mirror};
use crate::etcdserverpb::RangeRequest;
use crate::etcdserverpb::kv_client::KvClient;
use crate::upstream::{ConnectionClass, jittered};

/// Pause between two looks, in probe intervals: a count costs etcd some tens of milliseconds per million keys.
const PAUSE_PROBES: u32 = 30;
/// After so many looks it is tried without one: values may have shrunk while their number stayed.
const LOOKS: u32 = 20;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until the keys that etcd has, at `mean_bytes` each, would fit with a tenth to spare; or until a try is due anyway,
/// or `epoch` is void.
pub(super) async fn until_it_may_fit(mirrors: &Mirrors, mirror: &Mirror, epoch: Epoch, mean_bytes: u64) {
    let waiting = async {
        for _ in 0..LOOKS {
            tokio::time::sleep(jittered(mirrors.probe_interval * PAUSE_PROBES)).await;
            if let Some(count) = count(mirrors, mirror).await {
                let needed = count.saturating_mul(mean_bytes);
                if needed <= mirrors.budget_of(mirror) / 10 * 9 {
                    return;
                }
            }
        }
    };
    tokio::select! {
        () = waiting => {}
        () = mirror.epoch_ended(epoch) => {}
    }
}

/// How many keys etcd has in the mirror's scope.
async fn count(mirrors: &Mirrors, mirror: &Mirror) -> Option<u64> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let connection = mirrors
        .upstream
        .connection(ConnectionClass::Check, deadline)
        .await
        .ok()?;
    let (channel, origin) = connection.own_channel();
    let mut client = KvClient::with_origin(channel, origin);
    let request = RangeRequest {
        key: mirror.scope.key(),
        range_end: mirror.scope.range_end(),
        serializable: true,
        count_only: true,
        ..RangeRequest::default()
    };
    let answer = tokio::time::timeout_at(deadline, client.range(request)).await;
    u64::try_from(answer.ok()?.ok()?.get_ref().count).ok()
}
