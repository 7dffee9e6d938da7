//! gRPC client for the calls of the tour.

use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use etcd_wire::etcdserverpb::kv_client::KvClient;
use etcd_wire::etcdserverpb::maintenance_client::MaintenanceClient;
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse, ResponseHeader, StatusRequest};
use http::uri::PathAndQuery;
use prost::Message;
use tonic::transport::{Channel, Endpoint};

use crate::pb::{PutOp, PutRequest, TxnRequest, WriteResponse};

/// Timeout of one call; a healthy server needs a thousandth of it.
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
    /// Connects to an `http://` client URL.
    pub(crate) async fn connect(url: &str) -> Result<Self> {
        let channel = Endpoint::from_shared(url.to_owned())?
            .connect_timeout(Duration::from_secs(5))
            .timeout(CALL_TIMEOUT)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .tcp_nodelay(true)
            .connect()
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
