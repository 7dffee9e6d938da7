//! etcd's refusal of one create request, for a stream whose other watchers memory serves: etcd words it, and what it refuses
//! must not end the others, whose rights it has granted (W14).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;

use super::carried::wire;
use super::etcd_stream::encode;
use super::request::Create;
use super::tap::{Head, MAX_HEAD_BYTES, Parsed};
use crate::proxy::forward::RequestBody;
use crate::proxy::handles::Client;
use etcd_wire::etcdserverpb::watch_request::RequestUnion;
use etcd_wire::grpc::frame::{PREFIX_BYTES, RequestMessage, read_message};
use rangecache_upstream::{ConnectionClass, Outgoing};

/// Longest wait for etcd's response.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Sends `create` to etcd on a stream of its own, with the head `parts` of the client's request. Returns the whole response,
/// with its gRPC prefix, if etcd refuses; `None` if it creates the watcher, which ends with the stream, or does not respond
/// in time.
pub(super) async fn refusal(client: Arc<Client>, parts: Parts, create: Create) -> Option<Bytes> {
    tokio::time::timeout(TIMEOUT, send(&client, parts, &create))
        .await
        .ok()?
}

async fn send(client: &Client, parts: Parts, create: &Create) -> Option<Bytes> {
    let forward = &client.proxy.forward;
    let history = forward.cluster_state.current();
    let request = wire(create, create.watch_id, create.start_revision);
    let request = Outgoing::whole(encode(RequestUnion::CreateRequest(request)));
    let sending = forward.send(parts, RequestBody::Once(request), ConnectionClass::Endless);
    let opened = sending.await.ok()?;
    let message = read_message(opened.response.into_body(), MAX_HEAD_BYTES, |_| true).await;
    let RequestMessage::Whole { framed, .. } = message else {
        return None;
    };
    match Head::parse(framed.get(PREFIX_BYTES..)?, true) {
        Parsed::Head(head) if head.created && head.canceled => {
            // Before a byte leaves (I11).
            forward
                .cluster_state
                .record_forwarded(&history, head.cluster_id, head.revision);
            Some(framed)
        }
        _ => None,
    }
}
