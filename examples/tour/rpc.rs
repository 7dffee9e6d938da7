//! A client for the few calls of the tour.

use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use http::uri::PathAndQuery;
use prost::Message;
use rangecache::etcdserverpb::kv_client::KvClient;
use rangecache::etcdserverpb::maintenance_client::MaintenanceClient;
use rangecache::etcdserverpb::{RangeRequest, RangeResponse, ResponseHeader, StatusRequest};
use tonic::transport::{Channel, Endpoint};

/// How long one call may take; a healthy server needs a thousandth of it.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Large enough that no read of the tour waits for a window update: the servers are compared, not flow control.
const WINDOW_BYTES: u32 = 32 << 20;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PutRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PutResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
}

/// A request within a transaction; the tour only puts.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RequestOp {
    #[prost(message, optional, tag = "2")]
    pub(crate) request_put: Option<PutRequest>,
}

/// A transaction without conditions: all of `success` happens at one revision.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TxnRequest {
    #[prost(message, repeated, tag = "2")]
    pub(crate) success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
}

/// The parts of a key-value that the tour looks at.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValue {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) key: Bytes,
    #[prost(bytes = "bytes", tag = "5")]
    pub(crate) value: Bytes,
}

/// One connection to etcd, or to rangecache: the calls are the same.
pub(crate) struct Etcdclient {
    channel: Channel,
    kv: KvClient<Channel>,
}

impl Etcdclient {
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
            key: Bytes::from(key.to_owned()),
            value,
        };
        let response: PutResponse = self.unary("/etcdserverpb.KV/Put", request).await?;
        revision(response.header.as_ref())
    }

    /// Puts all pairs in one transaction: at most 128, etcd's default limit.
    pub(crate) async fn put_all(&mut self, pairs: Vec<(String, Bytes)>) -> Result<()> {
        let success = pairs
            .into_iter()
            .map(|(key, value)| RequestOp {
                request_put: Some(PutRequest {
                    key: Bytes::from(key),
                    value,
                }),
            })
            .collect();
        let _: TxnResponse = self.unary("/etcdserverpb.KV/Txn", TxnRequest { success }).await?;
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

/// The store's revision that an answer carries.
pub(crate) fn revision(header: Option<&ResponseHeader>) -> Result<i64> {
    Ok(header.context("an answer without a header")?.revision)
}
