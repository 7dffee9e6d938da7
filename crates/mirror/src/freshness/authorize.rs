//! **I8**: etcd authorizes one caller for one range and one request, by a call that is a quorum check as well.
//!
//! The call is [`check_read_permission`], which reads no key. It is never shared: each read has its own. Memory then
//! answers at exactly the revision of the call's header: later writes may have been made because the caller's
//! permission was revoked.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use etcd_store::cache::ResponseHeader;
use etcd_wire::etcdserverpb::RangeRequest;
use http::HeaderMap;
use rangecache_base::telemetry::trace::{SpanContext, traceparent};
use rangecache_upstream::{
    Connection, ConnectionClass, Lineage, anonymous_check, caller_identity, check_read_permission,
};
use tonic::Code;
use tonic::metadata::{MetadataMap, MetadataValue};

use crate::lineage::HistoryId;

/// Timeout of one attempt of a check.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);

/// A request for permission to read a range.
#[derive(Debug)]
pub struct Authorization<'a> {
    /// First key, as in the Range request.
    pub key: Bytes,
    /// End of the range, as in the Range request.
    pub range_end: Bytes,
    /// All metadata of the caller: only etcd knows which part is an identity. `None` for rangecache's own user.
    pub caller: Option<&'a HeaderMap>,
    /// Span of the call, if the caller's request is traced.
    pub trace: Option<SpanContext>,
    /// Past revision that the caller wants to read: etcd also reports whether it is compacted. 0 for the newest state,
    /// and for serializable reads.
    pub revision: i64,
    /// Whether one member's local state suffices, whose revision may lag, because the read itself is serializable.
    pub serializable: bool,
}

/// Response to a check.
pub(super) struct Checked {
    pub(super) header: ResponseHeader,
    /// Whether the member asked the quorum, so that no other member is ahead of its revision.
    pub(super) is_quorum: bool,
    /// Lineage of the response, if it is proven.
    pub(super) lineage: Option<Lineage>,
}

/// Credentials that a check carries, and the permission that it requests.
pub(super) enum CheckCaller<'a> {
    /// No credentials and no permission: the check that all reads without credentials share while auth is off.
    Anonymous,
    /// No credentials and no permission: the check of the periodic probe, for which no read waits: a hub may let it wait for one of its own
    /// checks, for this long.
    Probe(Duration),
    /// The caller of one read, for permission to read its range.
    Authenticated(&'a Authorization<'a>),
}

impl CheckCaller<'_> {
    /// Whether the check carries no credentials, and so shows whether auth is on.
    pub(super) fn is_anonymous(&self) -> bool {
        matches!(self, CheckCaller::Anonymous | CheckCaller::Probe(_))
    }

    /// Timeout of one attempt. A member that takes longer may be cut off from the others, so another one is tried.
    pub(super) fn attempt_timeout(&self) -> Duration {
        match self {
            CheckCaller::Anonymous | CheckCaller::Authenticated(_) => ATTEMPT_TIMEOUT,
            CheckCaller::Probe(wait) => *wait + ATTEMPT_TIMEOUT,
        }
    }

    /// The connections for this check. Metadata of a client never travels with a check that others wait for: it could
    /// fill the connection's header table, or make etcd close it.
    pub(super) fn connection_class(&self) -> ConnectionClass {
        match self {
            CheckCaller::Authenticated(Authorization { caller: Some(_), .. }) => {
                ConnectionClass::Authorization
            }
            _ => ConnectionClass::Check,
        }
    }

    /// Sends the check to the member behind `connection`, to read at `revision` unless that is 0. `history` is the number
    /// of the one that the member has to be of.
    pub(super) async fn check(
        &self,
        connection: &Arc<Connection>,
        history: HistoryId,
        revision: i64,
        trace: Option<&SpanContext>,
    ) -> Result<Checked, tonic::Status> {
        let (header, is_quorum, lineage) = match self {
            CheckCaller::Anonymous | CheckCaller::Probe(_) => {
                let mut metadata = MetadataMap::new();
                insert_traceparent(&mut metadata, trace);
                let may_wait = matches!(self, CheckCaller::Probe(_));
                let (header, lineage) = anonymous_check(connection, revision, may_wait, metadata).await?;
                (header, true, lineage)
            }
            CheckCaller::Authenticated(authorization) => {
                // The first check on a connection compares histories, which takes a linearizable revision.
                let serializable =
                    authorization.serializable && connection.is_of_history(history.number(), Lineage::Member);
                let range = RangeRequest {
                    key: authorization.key.clone(),
                    range_end: authorization.range_end.clone(),
                    serializable,
                    ..RangeRequest::default()
                };
                let caller = authorization.caller.map(|caller| {
                    let mut metadata = caller_identity(caller);
                    insert_traceparent(&mut metadata, authorization.trace.as_ref());
                    metadata
                });
                let (header, lineage) = check_read_permission(connection, range, revision, caller).await?;
                (header, !serializable, lineage)
            }
        };
        let header = header.ok_or_else(|| tonic::Status::internal("no header"))?;
        Ok(Checked {
            header: header.into(),
            is_quorum,
            lineage,
        })
    }

    /// Whether another member may succeed where one failed with `status`. Any other failure of an authenticated check
    /// may be caused by the caller's own metadata, and must not make the member look unhealthy to other callers.
    pub(super) fn may_try_another_member(&self, status: &tonic::Status) -> bool {
        self.is_anonymous()
            || matches!(
                status.code(),
                Code::Unavailable | Code::DeadlineExceeded | Code::Unknown
            )
    }
}

fn insert_traceparent(metadata: &mut MetadataMap, trace: Option<&SpanContext>) {
    if let Some(trace) = trace
        && let Ok(traceparent) = MetadataValue::try_from(traceparent(trace).as_bytes())
    {
        metadata.insert("traceparent", traceparent);
    }
}
