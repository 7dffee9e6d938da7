//! Periodic probe of revision, compaction and auth, independent of client traffic.
//!
//! Each tick makes one quorum check, which keeps mirrors of quiet scopes near etcd's revision and detects replaced
//! history and changes of auth; compares one member's raft index, by which a restore is detected; and makes one small
//! read at the oldest revision that is kept, the cheapest way to detect compactions by other clients, which reads at
//! past revisions do not depend on unless they are serializable. (A watch from
//! revision 1 would report them, too, but on a store that was never compacted it makes etcd read all of it.)

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use etcd_store::cache::ResponseHeader;
use etcd_wire::etcdserverpb::StatusResponse;
use rangecache_base::faults::{self, Fault};
use rangecache_base::telemetry::Reason;
use rangecache_upstream::{ConnectionClass, Upstream, compact_revision, is_compacted};
use tokio::time::{Instant, MissedTickBehavior};

use super::lineage::{Auth, Before};
use super::{feed::Lag, freshness::Proof, mirrors::Mirrors, view::Mirror};

/// Timeout for connecting, and for each request.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// While auth is on, every Nth tick checks without credentials whether it is off again. etcd logs each such check as
/// a failed authentication.
const ANONYMOUS_CHECK_TICKS: u32 = 10;
/// Members whose last checks are kept.
const MAX_MEMBERS: usize = 16;

/// Probes every `interval` until cancelled.
pub(super) async fn run(mirrors: &Mirrors, interval: Duration) {
    let Mirrors { set, upstream, .. } = mirrors;
    let mut timer = tokio::time::interval(interval);
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut ticks = 0_u32;
    // By the mirrors' positions.
    let mut lags: Vec<Lag> = Vec::new();
    let mut logs = MemberLogs::default();
    loop {
        let is_tick = tokio::select! {
            _ = timer.tick() => true,
            // A read has found a compaction: reads of revisions below it then no longer fail the checks of others.
            () = mirrors.compaction.found() => false,
        };
        faults::trip(Fault::Probe);
        set.all().for_each(Mirror::age);
        let before = set.cluster_state.before_check();
        let raft_index = raft_index(upstream, &mut logs).await;
        ticks = ticks.wrapping_add(1);
        // Mirrors wait for the first check.
        let may_wait = is_tick && ticks > 1;
        if let Ok(proof) = proof(mirrors, ticks, may_wait).await {
            if let Some(raft_index) = raft_index
                && proof.history == before.history_id()
            {
                set.cluster_state
                    .note_raft_index(&before, raft_index, proof.header.revision);
            }
            if proof.history == before.history_id() {
                logs.note(&before, proof.header);
            }
            for (position, slot) in set.present() {
                let mirror = &slot.mirror;
                if lags.len() <= position {
                    lags.resize_with(position + 1, Lag::default);
                }
                if let (Ok(view), Some(lag)) = (mirror.view(), lags.get_mut(position)) {
                    let behind = lag.record(proof.header.revision, view.revision);
                    mirror.metrics.lag_seconds.set(behind.as_secs_f64());
                    mirror
                        .metrics
                        .lag_revisions
                        .set((proof.header.revision - view.revision).max(0));
                    mirror.want(proof.history, proof.header.revision);
                }
            }
        }
        let oldest = set
            .all()
            .filter_map(|mirror| Some((mirror.oldest_revision()?, mirror.scope.key())))
            .chain(pinned(mirrors))
            .min();
        if let Some((oldest, key)) = oldest
            && let Ok(connection) = upstream
                .connection(ConnectionClass::Check, Instant::now() + RESPONSE_TIMEOUT)
                .await
            && is_compacted(&connection, &key, oldest).await
            && let Some(compacted) = compact_revision(&connection, &key, oldest).await
        {
            tracing::debug!(revision = compacted, "etcd has compacted");
            mirrors.compaction.record(before.history_id(), compacted);
            set.compacted(before.history_id(), compacted);
        }
    }
}

/// Makes a quorum check without credentials, which also shows whether auth is on. If it is, makes one as rangecache's
/// own user for each mirror, which also shows whether the user may still read the mirrored keys. Detecting that auth
/// is off again is not urgent, because etcd then authorizes every caller. Behind a hub, a check that `may_wait` is one of the hub's.
async fn proof(mirrors: &Mirrors, ticks: u32, may_wait: bool) -> Result<Proof, Reason> {
    let Mirrors { set, freshness, .. } = mirrors;
    let credentials = mirrors.upstream.credentials();
    if !credentials.name_a_user() {
        return if may_wait && mirrors.upstream.has_memory() {
            freshness.probe().await
        } else {
            freshness.prove().await
        };
    }
    let is_on = set.cluster_state.auth() == Auth::On && !ticks.is_multiple_of(ANONYMOUS_CHECK_TICKS);
    let mut proof = if is_on {
        Err(Reason::Auth)
    } else {
        freshness.prove().await
    };
    if proof.is_err_and(|reason| reason == Reason::Auth) {
        for mirror in set.all() {
            let (key, range_end) = (mirror.scope.key(), mirror.scope.range_end());
            proof = freshness.authorize_own(key, range_end).await;
            if let Err(reason) = proof {
                // Without a token, the user may simply not be authenticated yet.
                if reason == Reason::Auth && credentials.identify() {
                    let problem = credentials.no_permission(format!("the mirror {}", mirror.name));
                    credentials.set_problem(Some(problem));
                }
                return proof;
            }
        }
    }
    if proof.is_ok() {
        credentials.set_problem(None);
    }
    proof
}

/// Oldest revision that is being read from etcd, and the key to probe it with. `None` while auth is on: rangecache's
/// own user may not be allowed to read that key.
fn pinned(mirrors: &Mirrors) -> Option<(i64, Bytes)> {
    let cluster_state = &mirrors.cluster_state;
    let revision = mirrors.pinned.oldest(cluster_state.compacted())?;
    (cluster_state.auth() == Auth::Off).then(|| (revision, Bytes::from_static(b"\0")))
}

/// Quorum checks that members have answered, by which their later statuses are judged. A connection to a balancer stays when the members
/// behind it are restored, and a restored one may be at a revision that is not lower.
#[derive(Debug, Default)]
struct MemberLogs(VecDeque<MemberLog>);

/// The last check that one member has answered.
#[derive(Debug)]
struct MemberLog {
    member_id: u64,
    revision: i64,
    before: Before,
}

impl MemberLogs {
    /// Records a check that began `before`, and was answered with `header`.
    fn note(&mut self, before: &Before, header: ResponseHeader) {
        let history = before.history_id();
        self.0
            .retain(|log| log.member_id != header.member_id && log.before.history_id() == history);
        if self.0.len() == MAX_MEMBERS {
            self.0.pop_front();
        }
        self.0.push_back(MemberLog {
            member_id: header.member_id,
            revision: header.revision,
            before: before.clone(),
        });
    }

    /// Whether a later `status` is not known to be of another raft log than the check that the same member has answered.
    fn may_continue(&self, status: &StatusResponse) -> bool {
        let member_id = status.header.as_ref().map_or(0, |header| header.member_id);
        let log = self.0.iter().find(|log| log.member_id == member_id);
        log.is_none_or(|log| log.before.log_continues(log.revision, status.raft_index))
    }
}

/// Raft index of one member, where raft logs can be compared. If it is of another log, the next quorum check
/// on the connection compares the history again.
async fn raft_index(upstream: &Upstream, logs: &mut MemberLogs) -> Option<u64> {
    let connection = upstream
        .connection(ConnectionClass::Check, Instant::now() + RESPONSE_TIMEOUT)
        .await
        .ok()?;
    let status = tokio::time::timeout(RESPONSE_TIMEOUT, connection.raft_status(0));
    let status = status.await.ok()?.ok()??;
    if !logs.may_continue(&status) {
        tracing::debug!(endpoint = %connection.url(), "a raft log may be another one; the history is compared again");
        connection.compare_again();
        return None;
    }
    Some(status.raft_index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lineage::HistoryId;
    use crate::testing::{Bench, SOON};

    #[tokio::test]
    async fn other_raft_log_behind_an_open_connection_is_found_at_no_lower_revision() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&[]);
        let probing = run(&mirrors, Duration::from_millis(1));
        let state = &mirrors.cluster_state;
        let watching = async {
            let known = || state.before_check().log_continues(4, 103);
            while known() {
                tokio::task::yield_now().await;
            }
            // A balancer leads to a member that was restored, and written to up to the revision that is known.
            bench.etcd.lock().raft_ahead = 90;
            while state.history() == HistoryId::FIRST {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = probing => unreachable!("it never ends"),
            found = tokio::time::timeout(SOON, watching) => found.unwrap(),
        }
    }
}
