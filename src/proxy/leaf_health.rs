//! Health checks of other rangecaches whose endpoint this process is (its leaves). They are answered by the checks that this
//! process makes of its own endpoints, so that many leaves cost etcd no more of them than one.

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;

use super::call::CallHead;
use super::response::ResponseBody;
use etcd_wire::grpc::frame::framed;
use etcd_wire::grpc::hub::{CLUSTER, ENDPOINTS};
use etcd_wire::grpc::metadata::grpc_content_type;
use etcd_wire::grpc::status::ok_trailers;
use etcd_wire::grpc::{HEALTH_CHECK, Method};
use etcd_wire::grpc_health::HealthCheckResponse;
use etcd_wire::grpc_health::health_check_response::ServingStatus;
use rangecache_upstream::Upstream;

/// The response to the health check of a leaf, while an endpoint serves; `None` for every other call, which etcd answers. A client's
/// check that a leaf forwards is answered by etcd.
pub(super) fn answer_leaf_health(
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
