//! etcd's calls with typed requests and responses.

use std::time::Duration;

use prost::Message;

use crate::grpc::{Client, Reply, Status, Stream};
use crate::pb::{
    CompactionRequest, CompactionResponse, DeleteRangeRequest, DeleteRangeResponse, Empty, LeaseGrantRequest,
    PutRequest, PutResponse, RangeRequest, RangeResponse, RangeStreamResponse, RequestOp, StatusResponse,
    TxnRequest, TxnResponse, WatchCreateRequest, WatchRequest, WatchResponse, prefix_end,
};
use crate::wait::SOON;

pub const RANGE: &str = "/etcdserverpb.KV/Range";
pub const RANGE_STREAM: &str = "/etcdserverpb.KV/RangeStream";
pub const PUT: &str = "/etcdserverpb.KV/Put";
pub const TXN: &str = "/etcdserverpb.KV/Txn";
pub const WATCH: &str = "/etcdserverpb.Watch/Watch";

impl Client {
    /// Puts, and returns the revision.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<i64, Status> {
        self.put_with_lease(key, value, 0).await
    }

    /// Puts under a lease, and returns the revision.
    pub async fn put_with_lease(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        lease: i64,
    ) -> Result<i64, Status> {
        let put = PutRequest {
            key: key.as_ref().to_vec(),
            value: value.as_ref().to_vec(),
            lease,
        };
        Ok(self.unary::<PutResponse>(PUT, &put).await?.revision())
    }

    /// Deletes one key, and returns the revision.
    pub async fn delete(&self, key: impl AsRef<[u8]>) -> Result<i64, Status> {
        self.delete_range(DeleteRangeRequest {
            key: key.as_ref().to_vec(),
            range_end: Vec::new(),
        })
        .await
    }

    /// Deletes the keys that start with `prefix`, and returns the revision.
    pub async fn delete_prefix(&self, prefix: impl AsRef<[u8]>) -> Result<i64, Status> {
        let key = prefix.as_ref().to_vec();
        self.delete_range(DeleteRangeRequest {
            range_end: prefix_end(&key),
            key,
        })
        .await
    }

    async fn delete_range(&self, request: DeleteRangeRequest) -> Result<i64, Status> {
        Ok(self
            .unary::<DeleteRangeResponse>("/etcdserverpb.KV/DeleteRange", &request)
            .await?
            .revision())
    }

    /// Applies all of `operations` in one transaction, and returns its revision.
    pub async fn transact(&self, operations: Vec<RequestOp>) -> Result<i64, Status> {
        let txn = TxnRequest {
            success: operations,
            ..TxnRequest::default()
        };
        Ok(self.unary::<TxnResponse>(TXN, &txn).await?.revision())
    }

    /// Sends a Range.
    pub async fn range(&self, request: &RangeRequest) -> Result<RangeResponse, Status> {
        self.unary(RANGE, request).await
    }

    /// Sends a Range, and returns the reply with every byte.
    pub async fn range_raw(&self, request: &RangeRequest) -> Result<Reply, String> {
        self.raw(RANGE, &request.encode_to_vec()).await
    }

    /// Value of a key by a linearizable read; `None` if there is no such key.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>, Status> {
        Ok(self
            .range(&RangeRequest::one(key))
            .await?
            .kvs
            .pop()
            .map(|kv| kv.value))
    }

    /// Sends a RangeStream, and returns its chunks.
    pub async fn range_stream(&self, request: &RangeRequest) -> Result<Vec<RangeResponse>, Status> {
        let mut stream = self.server_stream(RANGE_STREAM, request);
        let mut chunks = Vec::new();
        while let Some(chunk) = stream.next_as::<RangeStreamResponse>(SOON).await {
            chunks.push(chunk.range_response.expect("a chunk holds a response"));
        }
        match stream.end() {
            Some(Status { code: 0, .. }) | None => Ok(chunks),
            Some(end) => Err(end.clone()),
        }
    }

    /// Compacts up to `revision`, and returns once the keys are removed from disk.
    pub async fn compact(&self, revision: i64) -> Result<(), Status> {
        let request = CompactionRequest {
            revision,
            physical: true,
        };
        self.unary::<CompactionResponse>("/etcdserverpb.KV/Compact", &request)
            .await
            .map(|_| ())
    }

    /// Grants a lease of the given id.
    pub async fn grant_lease(&self, id: i64, ttl_seconds: i64) -> Result<(), Status> {
        let request = LeaseGrantRequest { ttl: ttl_seconds, id };
        self.unary::<Empty>("/etcdserverpb.Lease/LeaseGrant", &request)
            .await
            .map(|_| ())
    }

    /// Status of the member that the connection leads to.
    pub async fn status(&self) -> Result<StatusResponse, Status> {
        self.unary("/etcdserverpb.Maintenance/Status", &Empty {}).await
    }

    /// Injects a fault into a rangecache started [`with_fault_injection`](crate::proxy::Builder::with_fault_injection),
    /// by a call that the fault does not affect.
    pub async fn inject_fault(&self, fault: &str) {
        let client = self.with_metadata("rangecache-test-fault", fault);
        client.status().await.expect("etcd returns its status");
    }

    /// Opens a watch stream, creates one watch on it, and waits for the confirmation.
    pub async fn watch(&self, create: WatchCreateRequest) -> Stream {
        let mut watch = self.open(WATCH);
        watch.send(&WatchRequest {
            create_request: Some(create),
            ..WatchRequest::default()
        });
        let created = watch.next_as::<WatchResponse>(SOON).await;
        assert!(
            created.is_some_and(|response| response.created),
            "the watch was not created: {:?}",
            watch.end()
        );
        watch
    }
}

/// Reads watch responses, progress notifications included, until `is_enough` returns true for those received so far.
pub async fn collect_watch(
    watch: &mut Stream,
    deadline: Duration,
    mut is_enough: impl FnMut(&[WatchResponse]) -> bool,
) -> Vec<WatchResponse> {
    let mut responses = Vec::new();
    while !is_enough(&responses) {
        match watch.next_as::<WatchResponse>(deadline).await {
            Some(response) => responses.push(response),
            None => panic!("the watch ended early: {:?}", watch.end()),
        }
    }
    responses
}
