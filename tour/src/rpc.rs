//! gRPC client for the calls of the tour.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use etcd_wire::etcdserverpb::kv_client::KvClient;
use etcd_wire::etcdserverpb::maintenance_client::MaintenanceClient;
use etcd_wire::etcdserverpb::watch_client::WatchClient;
use etcd_wire::etcdserverpb::watch_request::RequestUnion;
use etcd_wire::etcdserverpb::{
    RangeRequest, RangeResponse, ResponseHeader, StatusRequest, WatchCreateRequest, WatchRequest,
    WatchResponse,
};
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use prost::Message;
use rangecache_base::net::Url;
use rangecache_edge::tls::{Connector, Protocol};
use tonic::Streaming;
use tonic::codegen::tokio_stream::{self, StreamExt as _};
use tonic::transport::{Channel, Endpoint};

use crate::pb::{PutOp, PutRequest, TxnRequest, WriteResponse};

/// Timeout of one call and of the head of a stream; a healthy server needs a thousandth of it.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

const NO_HEADER: &str = "a response without a header";

/// Flow-control window, large enough that no read of the tour waits for an update.
const WINDOW_BYTES: u32 = 32 << 20;

/// A connection to etcd or to rangecache.
pub(crate) struct EtcdClient {
    channel: Channel,
    kv: KvClient<Channel>,
}

impl EtcdClient {
    /// Connects to a client URL.
    pub(crate) async fn connect(connector: &Arc<Connector>, url: &Url) -> Result<Self> {
        let dialing = (Arc::clone(connector), url.clone());
        let dial = tower::service_fn(move |_| {
            let (connector, url) = dialing.clone();
            async move { connector.connect(&url, Protocol::Http2).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_shared(format!("http://{}", url.authority()))?
            .connect_timeout(Duration::from_secs(5))
            .timeout(CALL_TIMEOUT)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .connect_with_connector(dial)
            .await?;
        let kv = KvClient::new(channel.clone()).max_decoding_message_size(usize::MAX);
        Ok(Self { channel, kv })
    }

    /// The server's version, such as `3.7.3`.
    pub(crate) async fn version(&mut self) -> Result<String> {
        let status = MaintenanceClient::new(self.channel.clone())
            .status(StatusRequest {})
            .await?;
        Ok(status.into_inner().version)
    }

    pub(crate) async fn range(&mut self, request: RangeRequest) -> Result<RangeResponse> {
        Ok(self.kv.range(request).await?.into_inner())
    }

    /// Watches the keys of `range` from a revision on, once the server has confirmed it.
    pub(crate) async fn watch(
        &mut self,
        range: RangeRequest,
        start_revision: i64,
    ) -> Result<Streaming<WatchResponse>> {
        let create = WatchCreateRequest {
            key: range.key,
            range_end: range.range_end,
            start_revision,
            ..Default::default()
        };
        let create = WatchRequest {
            request_union: Some(RequestUnion::CreateRequest(create)),
        };
        // The watch ends with its requests.
        let requests = tokio_stream::once(create).chain(tokio_stream::pending());
        let mut responses = WatchClient::new(self.channel.clone())
            .watch(requests)
            .await?
            .into_inner();
        let created = responses.message().await?.context("the watch has ended")?;
        ensure!(
            created.created,
            "the watch was not created: {}",
            created.cancel_reason
        );
        Ok(responses)
    }

    /// Puts one key and returns the revision of the write.
    pub(crate) async fn put(&mut self, key: &str, value: Bytes) -> Result<i64> {
        let request = PutRequest {
            key: key.into(),
            value: value.into(),
        };
        let response: WriteResponse = self.unary("/etcdserverpb.KV/Put", request).await?;
        Ok(response.header.context(NO_HEADER)?.revision)
    }

    /// Puts all pairs in one transaction: at most 128, etcd's default limit.
    pub(crate) async fn put_all(&mut self, pairs: Vec<(String, Bytes)>) -> Result<()> {
        let success = pairs
            .into_iter()
            .map(|(key, value)| PutOp {
                request_put: Some(PutRequest {
                    key: key.into(),
                    value: value.into(),
                }),
            })
            .collect();
        let request = TxnRequest { success };
        let _: WriteResponse = self.unary("/etcdserverpb.KV/Txn", request).await?;
        Ok(())
    }

    async fn unary<Q, A>(&mut self, path: &'static str, request: Q) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        grpc.ready().await?;
        let codec = tonic_prost::ProstCodec::<Q, A>::default();
        let response = grpc
            .unary(
                tonic::Request::new(request),
                PathAndQuery::from_static(path),
                codec,
            )
            .await?;
        Ok(response.into_inner())
    }
}

/// Revision of the store in a response's header.
pub(crate) fn revision(header: Option<&ResponseHeader>) -> Result<i64> {
    Ok(header.context(NO_HEADER)?.revision)
}
