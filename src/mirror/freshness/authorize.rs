//! **I8**: etcd authorises one caller for one range on one request, by a call that is a quorum check, too.
//!
//! The call is [`check_read_permission`], which reads no key.
//!
//! Nothing is shared: one call for each read. Memory then answers at exactly the revision of the call's header, for what
//! was written later may have been written because the caller's right was taken away.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;

use super::{Asker, Freshness, Proof, name_trace};
use crate::etcdserverpb::{RangeRequest, ResponseHeader};
use crate::telemetry::Reason;
use crate::telemetry::trace::SpanContext;
use crate::upstream::{Connection, check_read_permission};

/// Bound on one authorisation of rangecache's own user.
const OWN_TIMEOUT: Duration = Duration::from_secs(3);

/// What a caller's headers say of its message and of its patience, not of itself.
const OF_THE_MESSAGE: [&str; 4] = [
    "content-length",
    "grpc-encoding",
    "grpc-accept-encoding",
    "grpc-timeout",
];

/// A right to be asked for.
#[derive(Debug)]
pub struct Authorization<'a> {
    /// First key.
    pub key: Bytes,
    /// As in the request.
    pub range_end: Bytes,
    /// The caller's metadata, all of it: etcd alone knows what makes an identity. `None` for rangecache's own user.
    pub caller: Option<&'a HeaderMap>,
    /// The span that the call is made for, if the caller's is traced.
    pub trace: Option<SpanContext>,
    /// The member's own word is enough, and its revision may lag, as for the serializable read that asks.
    pub serializable: bool,
}

impl Freshness {
    /// Asks etcd for `authorization`, and for its revision. For a serializable one the revision may be older than what is
    /// known: the caller of this function compares.
    ///
    /// # Errors
    /// [`Reason::Auth`] if etcd refuses: how, it is best asked by the read itself. Else why there is no answer.
    pub async fn authorize(
        &self,
        authorization: &Authorization<'_>,
        deadline: Instant,
    ) -> Result<Proof, Reason> {
        let began = Instant::now();
        let deadline = deadline.min(began + self.timeout);
        let result = self.check(&Asker::Somebody(authorization), None, deadline).await;
        let result_name = result.map_or_else(Reason::as_str, |_| "granted");
        self.telemetry
            .metrics
            .freshness
            .record_authorization(result_name, began.elapsed());
        result
    }

    /// The same for rangecache's own user, who must have the right to read all of a mirror.
    ///
    /// # Errors
    /// As [`Freshness::authorize`].
    pub async fn authorize_own(&self, key: Bytes, range_end: Bytes) -> Result<Proof, Reason> {
        let authorization = Authorization {
            key,
            range_end,
            caller: None,
            trace: None,
            serializable: false,
        };
        self.authorize(&authorization, Instant::now() + OWN_TIMEOUT).await
    }
}

/// What a caller's metadata says of itself, for a call that is made in its name.
pub fn identity_of(caller: &HeaderMap) -> MetadataMap {
    let mut metadata = caller.clone();
    OF_THE_MESSAGE
        .iter()
        .for_each(|name| drop(metadata.remove(*name)));
    MetadataMap::from_headers(metadata)
}

impl Authorization<'_> {
    pub(super) async fn ask(
        &self,
        connection: &Arc<Connection>,
    ) -> Result<(Option<ResponseHeader>, bool), tonic::Status> {
        // A member whose history has not been looked at is looked at first, which takes a linearizable revision.
        let serializable = self.serializable && connection.history_is_checked();
        let range = RangeRequest {
            key: self.key.clone(),
            range_end: self.range_end.clone(),
            serializable,
            ..RangeRequest::default()
        };
        let caller = self.caller.map(|caller| {
            let mut metadata = identity_of(caller);
            name_trace(&mut metadata, self.trace);
            metadata
        });
        let header = check_read_permission(connection, range, caller).await?;
        Ok((header, !serializable))
    }
}
