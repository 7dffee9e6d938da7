//! Disabled mirrors: a mirror over budget is out of service, its reads are forwarded, and it waits here until it may
//! fit.

use std::time::Duration;

use tokio::time::Instant;

use crate::set::MirrorSet;
use crate::view::{Epoch, Mirror};
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_upstream::{ConnectionClass, Upstream, jittered, range};

/// Pause between two counts, in probe intervals: a count costs etcd some tens of milliseconds per million keys.
const PAUSE_PROBES: u32 = 30;
/// Number of counts after which the mirror is loaded anyway: values may have become smaller.
const MAX_COUNTS: u32 = 20;
/// Timeout for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until etcd's keys, at `mean_bytes` each, would take at most nine tenths of the budget, or until
/// [`MAX_COUNTS`] counts have been made, or `epoch` has ended.
pub(crate) async fn until_it_may_fit(
    set: &MirrorSet,
    upstream: &Upstream,
    probe_interval: Duration,
    mirror: &Mirror,
    epoch: Epoch,
    mean_bytes: u64,
) {
    let waiting = async {
        for _ in 0..MAX_COUNTS {
            tokio::time::sleep(jittered(probe_interval * PAUSE_PROBES)).await;
            if let Some(count) = count(upstream, mirror).await {
                let needed = count.saturating_mul(mean_bytes);
                if needed <= set.budget_of(mirror) / 10 * 9 {
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

/// Number of etcd's keys in the mirror's scope; `None` without a response in time.
async fn count(upstream: &Upstream, mirror: &Mirror) -> Option<u64> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    let connection = upstream.connection(ConnectionClass::Check, deadline).await.ok()?;
    let request = RangeRequest {
        key: mirror.scope.key(),
        range_end: mirror.scope.range_end(),
        serializable: true,
        count_only: true,
        ..RangeRequest::default()
    };
    u64::try_from(range(&connection, request).await.ok()?.count).ok()
}
