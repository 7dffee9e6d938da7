//! The JSON of a WatchRequest, as far as every version of etcd understands it in the same way.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;

use crate::gateway::{Enum, Int64, NotUnderstood, decode};
use etcd_wire::etcdserverpb::watch_request::RequestUnion;
use etcd_wire::etcdserverpb::{WatchCreateRequest, WatchRequest};
use etcd_wire::grpc::frame::framed;

/// Names of the request that creates a watcher.
const NAMES: [&str; 2] = ["create_request", "createRequest"];
/// Names of the filters, in the order of their numbers.
const FILTERS: [&str; 2] = ["NOPUT", "NODELETE"];

/// A request that creates a watcher.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateMessage {
    #[serde(alias = "createRequest")]
    create_request: CreateFields,
}

/// The fields under both of their names.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CreateFields {
    key: String,
    #[serde(alias = "rangeEnd")]
    range_end: String,
    #[serde(alias = "startRevision")]
    start_revision: Int64,
    #[serde(alias = "progressNotify")]
    progress_notify: bool,
    filters: Vec<Enum>,
    #[serde(alias = "prevKv")]
    prev_kv: bool,
    #[serde(alias = "watchId")]
    watch_id: Int64,
    fragment: bool,
}

/// Reads a body with one request, which creates a watcher, and returns the same request as a gRPC message. `any_base64` is
/// that of [`decode`].
///
/// # Errors
/// [`NotUnderstood`] if only etcd can read it.
pub(super) fn parse(body: &[u8], any_base64: bool) -> Result<Bytes, NotUnderstood> {
    // serde reads a list as the fields in their order, too.
    let value: Value = serde_json::from_slice(body).map_err(|_| NotUnderstood)?;
    if !NAMES.iter().any(|name| value[name].is_object()) {
        return Err(NotUnderstood);
    }
    let CreateMessage { create_request } = serde_json::from_slice(body).map_err(|_| NotUnderstood)?;
    let filters: Result<Vec<i32>, NotUnderstood> = create_request
        .filters
        .iter()
        .map(|filter| filter.value(&FILTERS))
        .collect();
    let create = WatchCreateRequest {
        key: decode(&create_request.key, any_base64)?,
        range_end: decode(&create_request.range_end, any_base64)?,
        start_revision: create_request.start_revision.value()?,
        progress_notify: create_request.progress_notify,
        filters: filters?,
        prev_kv: create_request.prev_kv,
        watch_id: create_request.watch_id.value()?,
        fragment: create_request.fragment,
    };
    Ok(framed(&WatchRequest {
        request_union: Some(RequestUnion::CreateRequest(create)),
    }))
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use etcd_wire::grpc::frame::PREFIX_BYTES;

    fn parsed(body: &str) -> Result<WatchCreateRequest, NotUnderstood> {
        let message = parse(body.as_bytes(), true)?;
        let request = WatchRequest::decode(&message[PREFIX_BYTES..]).unwrap();
        match request.request_union {
            Some(RequestUnion::CreateRequest(create)) => Ok(create),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn fields_are_read_under_both_names_and_in_all_forms() {
        let create = WatchCreateRequest {
            key: "a".into(),
            range_end: "\0".into(),
            start_revision: 7,
            progress_notify: true,
            filters: vec![0, 1],
            prev_kv: true,
            watch_id: 3,
            fragment: true,
        };
        for body in [
            r#"{"create_request":{"key":"YQ==","range_end":"AA==","start_revision":"7","progress_notify":true,
                "filters":["NOPUT","NODELETE"],"prev_kv":true,"watch_id":"3","fragment":true}}"#,
            r#" {"createRequest":{"rangeEnd":"AA==","key":"YQ","startRevision":7,"progressNotify":true,"filters":[0,1],
                "prevKv":true,"watchId":3,"fragment":true}} "#,
        ] {
            assert_eq!(parsed(body), Ok(create.clone()), "{body}");
        }
        assert_eq!(
            parsed(r#"{"create_request":{}}"#),
            Ok(WatchCreateRequest::default())
        );
    }

    #[test]
    fn what_is_not_one_create_request_is_left_to_etcd() {
        for body in [
            "",
            "{",
            "{}",
            r#"[{"key":"YQ=="}]"#,
            r#"{"create_request":[]}"#,
            r#"{"create_request":null}"#,
            r#"{"create_request":{"key":"YQ=="}}{"create_request":{"key":"YQ=="}}"#,
            r#"{"create_request":{},"createRequest":{}}"#,
            r#"{"create_request":{"other":1}}"#,
            r#"{"create_request":{"filters":null}}"#,
            r#"{"create_request":{"filters":["NONE"]}}"#,
            r#"{"create_request":{"filters":[2]}}"#,
            r#"{"create_request":{"key":"!"}}"#,
            r#"{"cancel_request":{"watch_id":"1"}}"#,
            r#"{"progress_request":{}}"#,
        ] {
            assert_eq!(parsed(body), Err(NotUnderstood), "{body}");
        }
    }
}
