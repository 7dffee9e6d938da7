//! The pulse: what has to be asked of etcd even while no client reads.
//!
//! Each beat makes one quorum check (is history the same, is auth off, or else are our rights still enough, how far is
//! etcd), which keeps quiet mirrors near
//! etcd's revision; asks one member for its raft index, by which a restore is known; and makes one small read at the oldest revision that is kept: the cheapest way to learn that others have
//! compacted. (A watch from revision 1 would tell too, but on a store that was never compacted etcd reads all of it.)

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, MissedTickBehavior};

use super::cluster_state::Auth;
use super::freshness::Proof;
use super::lag::Lag;
use super::mirrors::Mirrors;
use crate::faults::{self, Fault};
use crate::telemetry::Reason;
use crate::upstream::{ConnectionClass, UserProblem, compact_revision, is_compacted};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// How many beats auth is believed to be on before it is looked again as nobody, which etcd writes down as an attempt.
const BEATS_OF_AUTH: u32 = 10;

/// Beats every `interval` until cancelled.
pub(super) async fn run(mirrors: &Arc<Mirrors>, interval: Duration) {
    let mut beat = tokio::time::interval(interval);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut beats = 0_u32;
    let mut lags: Vec<Lag> = mirrors.all.iter().map(|_| Lag::default()).collect();
    loop {
        beat.tick().await;
        faults::trip(Fault::Probe);
        mirrors.all.iter().for_each(super::state::Mirror::age);
        let raft_index = raft_index(mirrors).await;
        beats = beats.wrapping_add(1);
        if let Ok(proof) = proof(mirrors, beats).await {
            if let Some(raft_index) = raft_index {
                mirrors
                    .cluster_state
                    .note_raft_index(raft_index, proof.header.revision);
            }
            for (mirror, lag) in mirrors.all.iter().zip(&mut lags) {
                if let Ok(view) = mirror.view() {
                    let behind = lag.note(proof.header.revision, view.revision);
                    mirror.metrics.lag_seconds.set(behind.as_secs_f64());
                    mirror
                        .metrics
                        .lag_revisions
                        .set((proof.header.revision - view.revision).max(0));
                    mirror.want(proof.header.revision);
                }
            }
        }
        let oldest = mirrors
            .all
            .iter()
            .filter_map(|mirror| Some((mirror.oldest_revision()?, mirror.scope.key())))
            .chain(pinned(mirrors))
            .min();
        if let Some((oldest, key)) = oldest
            && let Ok(connection) = mirrors
                .upstream
                .connection(ConnectionClass::Check, Instant::now() + ANSWER_TIMEOUT)
                .await
            && is_compacted(&connection, &key, oldest).await
            && let Some(compacted) = compact_revision(&connection, &key, oldest).await
        {
            tracing::debug!(revision = compacted, "etcd has compacted");
            mirrors.compacted(compacted);
        }
    }
}

/// A quorum check as nobody, which also tells whether auth is on; if it is, one as rangecache's own user, which also tells
/// whether that may still read what is mirrored. That auth is off again is not urgent: etcd authorises everybody then.
async fn proof(mirrors: &Mirrors, beats: u32) -> Result<Proof, Reason> {
    let credentials = mirrors.upstream.credentials();
    if !credentials.is_configured() {
        return mirrors.freshness.prove().await;
    }
    let is_on = mirrors.cluster_state.auth() == Auth::On && !beats.is_multiple_of(BEATS_OF_AUTH);
    let mut proof = if is_on {
        Err(Reason::Auth)
    } else {
        mirrors.freshness.prove().await
    };
    if proof.is_err_and(|reason| reason == Reason::Auth) {
        for mirror in mirrors.all.iter() {
            let (key, range_end) = (mirror.scope.key(), mirror.scope.range_end());
            proof = mirrors.freshness.authorize_own(key, range_end).await;
            if let Err(reason) = proof {
                // A token that was refused is replaced by the next beat.
                if reason == Reason::Auth && credentials.have_token() {
                    credentials.set_problem(Some(UserProblem::NoPermission {
                        user: credentials.name().to_owned(),
                        scope: format!("the mirror {}", mirror.name),
                    }));
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

/// The oldest revision that is read apart from the mirrors, and a key to ask for: with auth on there is none.
fn pinned(mirrors: &Mirrors) -> Option<(i64, Bytes)> {
    let cluster_state = &mirrors.cluster_state;
    let revision = mirrors.pinned.oldest(cluster_state.compacted())?;
    (cluster_state.auth() == Auth::Off).then(|| (revision, Bytes::from_static(b"\0")))
}

async fn raft_index(mirrors: &Mirrors) -> Option<u64> {
    let connection = mirrors
        .upstream
        .connection(ConnectionClass::Check, Instant::now() + ANSWER_TIMEOUT)
        .await
        .ok()?;
    let asking = tokio::time::timeout(ANSWER_TIMEOUT, connection.member_status());
    Some(asking.await.ok()?.ok()?.raft_index)
}
