//! Member list that names rangecache alone (`--advertise-client-urls`), so that clients which take their endpoints from
//! etcd's members stay with it. etcd's grpc-proxy answers alike.

use etcd_wire::etcdserverpb::{Member, MemberListResponse, ResponseHeader};
use etcd_wire::grpc::metadata::{grpc_content_type, is_grpc};
use etcd_wire::grpc::{MEMBER_LIST, is_json_member_list};
use etcd_wire::grpc::{frame::framed, status::ok_trailers};
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version, header};
use hyper::body::Incoming;
use rangecache_base::net::Url;
use rangecache_mirror::lineage::ClusterState;
use serde_json::json;

use super::response::ResponseBody;

/// The member that rangecache names in the place of etcd's.
#[derive(Debug)]
pub(super) struct AdvertisedMember(Member);

impl AdvertisedMember {
    /// A member with these URLs for clients, named like the host; `None` without URLs.
    pub(super) fn new(urls: &[Url]) -> Option<AdvertisedMember> {
        let host = rustix::system::uname();
        let member = Member {
            name: host.nodename().to_string_lossy().into_owned(),
            client_urls: urls.iter().map(Url::to_string).collect(),
            ..Member::default()
        };
        (!urls.is_empty()).then_some(AdvertisedMember(member))
    }

    /// The response if the request asks for the members, by gRPC or by the JSON gateway. The header is etcd's, once it is
    /// known.
    pub(super) fn response(
        &self,
        request: &Request<Incoming>,
        cluster_state: &ClusterState,
    ) -> Option<Response<ResponseBody>> {
        let (uri, headers) = (request.uri(), request.headers());
        if request.method() != Method::POST {
            return None;
        }
        // Neither has a revision in etcd's own response.
        let header = || {
            cluster_state.identity().map(|identity| ResponseHeader {
                cluster_id: identity.cluster_id,
                member_id: identity.member_id,
                revision: 0,
                raft_term: identity.raft_term,
                leader_id: identity.leader_id,
            })
        };
        if uri.path() == MEMBER_LIST
            && uri.query().is_none()
            && request.version() == Version::HTTP_2
            && is_grpc(headers)
        {
            let message = MemberListResponse {
                header: header(),
                members: vec![self.0.clone()],
            };
            let body = ResponseBody::whole(framed(&message), ok_trailers());
            return Some(body.into_response(grpc_content_type(headers)));
        }
        if is_json_member_list(uri.path()) && !is_grpc(headers) {
            let body = ResponseBody::whole(self.json(header()).into(), HeaderMap::new());
            let mut response = Response::new(body);
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, json);
            return Some(response);
        }
        None
    }

    /// The text of etcd's gateway, in which numbers of 64 bits are strings.
    fn json(&self, header: Option<ResponseHeader>) -> String {
        let header = header.unwrap_or_default();
        let mut text = json!({
            "header": {
                "cluster_id": header.cluster_id.to_string(),
                "member_id": header.member_id.to_string(),
                "raft_term": header.raft_term.to_string(),
            },
            "members": [{"name": self.0.name, "clientURLs": self.0.client_urls}],
        });
        if header.leader_id > 0 {
            text["header"]["leader_id"] = header.leader_id.to_string().into();
        }
        text.to_string()
    }
}
