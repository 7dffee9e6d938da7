//! Calls that other rangecaches whose endpoint this process is (its leaves) make themselves. Their quorum checks join the checks that
//! reads of this process wait for, and their health checks are answered by those that it makes of its own endpoints, so that many
//! leaves cost etcd no more checks than one: a quorum check is answered by one that was sent after it had arrived (I2 holds through
//! both). No mirror has to hold the key. A client that reads the same key through a leaf gets etcd's answer: no rangecache forwards the
//! metadata that makes a read a check.

use etcd_store::cache::Selection;
use etcd_wire::grpc::hub::{CLUSTER, ENDPOINTS};
use etcd_wire::grpc::{HEALTH_CHECK, Method, Status};
use etcd_wire::grpc::{frame::framed, metadata::grpc_content_type, status::ok_trailers};
use etcd_wire::grpc_health::{HealthCheckResponse, health_check_response::ServingStatus};
use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use rangecache_base::telemetry::{Outcome, Reason, outcome::Read};
use rangecache_mirror::lineage::Auth;
use rangecache_upstream::{Upstream, gates, is_check_key};
use tokio::time::Instant;

use super::answer::MemoryAnswer;
use super::attempt::{ReadRequest, answer_unproven, check};
use crate::call::{CallHead, CallRecord};
use crate::{handles::Proxy, response::ResponseBody};

/// The response to the health check of a leaf, while an endpoint serves; `None` for every other call, which etcd answers. A client's
/// check that a leaf forwards is answered by etcd.
pub(crate) fn answer_leaf_health(
    upstream: &Upstream,
    head: &CallHead,
    request: &Request<Incoming>,
) -> Option<Response<ResponseBody>> {
    let fields = &head.fields;
    let is_of_leaf = head.is_grpc_call
        && head.method == Method::Health
        && fields.marks.health
        && fields.is_of_rangecache
        && request.uri().path() == HEALTH_CHECK;
    if !is_of_leaf {
        return None;
    }
    let (urls, cluster_id) = (upstream.serving_endpoints()?, upstream.cluster_id()?);
    let message = HealthCheckResponse {
        status: ServingStatus::Serving.into(),
    };
    let body = ResponseBody::whole(framed(&message), ok_trailers());
    let mut response = body.into_response(grpc_content_type(request.headers()));
    for (name, text) in [(ENDPOINTS, urls), (CLUSTER, format!("{cluster_id:x}"))] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_str(&text).ok()?);
    }
    Some(response)
}

/// Whether the read is the quorum check of a leaf.
pub(super) fn is_leaf_check(request: &ReadRequest) -> bool {
    let (query, metadata) = (&request.query, &request.metadata);
    metadata.marks.check
        && metadata.is_of_rangecache
        && is_check_key(&query.key)
        && query.range_end.is_empty()
        && !query.serializable
}

/// Answers the quorum check of a leaf by one of this process. Credentials do not matter: the leaf sends a token that was never
/// issued, so that etcd refuses the check once auth is on.
///
/// # Errors
/// Reason for which etcd has to respond; the leaf then has no proof.
pub(super) async fn answer_leaf_check(
    proxy: &Proxy,
    request: &ReadRequest,
    latest: Instant,
    record: &mut CallRecord,
) -> Result<MemoryAnswer, Reason> {
    let (query, cluster_state) = (&request.query, &proxy.mirrors.cluster_state);
    let version = proxy.forward.upstream.lowest_version();
    // The leaf trusts progress notifications of what is proven to it.
    if !gates::PROGRESS_NOTIFICATIONS.is_open(version.ok_or(Reason::VersionUnknown)?) {
        return Err(Reason::VersionGate);
    }
    if cluster_state.auth() == Auth::On {
        return Err(Reason::Auth);
    }
    let checked = if request.metadata.marks.probe && query.revision <= 0 {
        let proof = proxy.mirrors.freshness.prove_with_others().await;
        // That the leaf lets it wait is no latency.
        record.measure_from_now();
        proof
            .inspect(|proof| record.record_proof(proof))
            .map_err(Into::into)
    } else {
        check(proxy, record, latest, query.revision.max(0)).await
    };
    let proof = match checked {
        Ok(proof) => proof,
        Err(unproven) => return answer_unproven(unproven),
    };
    // As for every read: auth may have been switched on while the check was awaited.
    if cluster_state.auth() != Auth::Off {
        return Err(Reason::Auth);
    }
    if query.revision > proof.header.revision {
        return Ok(MemoryAnswer::refusal(Status::FutureRevision));
    }
    if !cluster_state.record_served(proof.history, proof.header.revision) {
        return Err(Reason::HistoryReplaced);
    }
    let read = if query.revision > 0 {
        Read::Pinned
    } else {
        Read::Linearizable
    };
    let (nothing, outcome) = (Selection::of_page(Vec::new(), 0, false), Outcome::Hit(read));
    Ok(MemoryAnswer::Entries(proof.header, nothing, outcome, None))
}

#[cfg(test)]
mod tests {
    use etcd_store::cache::RangeQuery;
    use etcd_wire::grpc::CallMetadata;
    use http::{HeaderMap, HeaderValue};

    use super::*;

    fn request(key: &'static [u8], fields: &[(&'static str, &'static str)]) -> ReadRequest {
        let fields = fields.iter().chain(&[("content-type", "application/grpc")]);
        let headers: HeaderMap = fields
            .map(|(name, value)| {
                let name = http::HeaderName::from_static(name);
                (name, HeaderValue::from_static(value))
            })
            .collect();
        ReadRequest {
            query: RangeQuery {
                key: key.into(),
                ..RangeQuery::default()
            },
            metadata: CallMetadata::from_headers(&headers).unwrap(),
            headers,
        }
    }

    #[test]
    fn check_of_a_leaf_is_a_linearizable_read_of_the_check_key_by_a_rangecache() {
        const KEY: &[u8] = b"rangecache/quorum-check";
        const LEAF: &[(&str, &str)] = &[("rangecache-instance", "00"), ("rangecache-check", "true")];
        assert!(is_leaf_check(&request(KEY, LEAF)));
        for of_client in [&[], &LEAF[..1], &LEAF[1..]] {
            assert!(!is_leaf_check(&request(KEY, of_client)), "{of_client:?}");
        }
        assert!(!is_leaf_check(&request(b"rangecache/quorum-check2", LEAF)));
        for change in [
            |query: &mut RangeQuery| query.serializable = true,
            |query: &mut RangeQuery| query.range_end = "\0".into(),
        ] {
            let mut other = request(KEY, LEAF);
            change(&mut other.query);
            assert!(!is_leaf_check(&other), "{:?}", other.query);
        }
    }
}
