//! **answer** without a proof, while no member of etcd answers (`--serve-stale`): serializable reads, and reads at a past
//! revision, from a mirror's last view. A linearizable read of the newest state is never answered here.

use std::{sync::Arc, time::Duration};

use etcd_store::cache::{RangeQuery, ResponseHeader};
use rangecache_edge::limits::{ClientAccount, Deadline};
use rangecache_mirror::StaleView;

use super::answer::{Basis, MemoryAnswer, ProvenRead, answer};
use super::attempt::ReadRequest;
use crate::{call::CallRecord, handles::Proxy};

/// Interval at which a read that was sent to etcd finds out whether a member still answers.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Read that may be answered from the last view.
#[derive(Debug)]
pub(super) struct StaleRead<'a> {
    proxy: &'a Proxy,
    query: RangeQuery,
    /// Account of the client's connection.
    account: &'a Arc<ClientAccount>,
}

/// Response from the last view.
pub(super) struct StaleAnswer {
    answer: MemoryAnswer,
    age: Duration,
}

impl<'a> StaleRead<'a> {
    /// The read, if its response may be stale: a serializable one, or one at a past revision, whose caller needs neither
    /// rights nor a leader.
    pub(super) fn of(
        proxy: &'a Proxy,
        request: &ReadRequest,
        account: &'a Arc<ClientAccount>,
    ) -> Option<StaleRead<'a>> {
        let (query, metadata) = (&request.query, &request.metadata);
        // First what rules most reads out.
        let may_be_stale = (query.serializable || query.revision > 0)
            && proxy.mirrors.serve_stale()
            && !metadata.has_credentials
            && !metadata.require_leader
            // Another rangecache proves its memory by what it reads.
            && !metadata.is_of_rangecache
            && !metadata.bypass;
        may_be_stale.then(|| StaleRead {
            proxy,
            query: query.clone(),
            account,
        })
    }

    /// Answers the read if no member of etcd answers.
    pub(super) async fn answer(&self) -> Option<StaleAnswer> {
        let (proxy, query) = (self.proxy, &self.query);
        let mirror = proxy.mirrors.holding(&query.interval())?;
        let StaleView { view, age } = proxy.mirrors.stale_view(mirror)?;
        if query.revision > view.revision {
            return None;
        }
        let cluster_state = &proxy.mirrors.cluster_state;
        let header = ResponseHeader {
            revision: view.revision,
            ..*cluster_state.identity()?
        };
        let proven = ProvenRead {
            mirror,
            newest: view.tree,
            history: view.history,
            header,
            waited: false,
            basis: Basis::Stale,
        };
        let version = proxy.forward.upstream.lowest_version()?;
        let gate = proxy.scan_gate(self.account, Deadline::NONE);
        match answer(query, proven, version, cluster_state, gate).await {
            Ok(answer @ MemoryAnswer::Entries(..)) => Some(StaleAnswer { answer, age }),
            // Only etcd refuses a read: another history may have the revision that the last view lacks.
            Ok(MemoryAnswer::Refusal(..)) | Err(_) => None,
        }
    }

    /// Answers the read once no member of etcd answers; for a read that was sent to etcd, whose end ends this wait.
    pub(super) async fn answer_once_silent(&self) -> StaleAnswer {
        loop {
            if let Some(answer) = self.answer().await {
                return answer;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

impl StaleAnswer {
    /// The response, whose age is recorded.
    pub(super) fn recorded(self, record: &mut CallRecord) -> MemoryAnswer {
        if let MemoryAnswer::Entries(header, ..) = &self.answer {
            record.stale_age = Some(self.age);
            record.revisions.served = header.revision;
        }
        self.answer
    }
}
