//! etcd's calls in typed form.

use std::time::Duration;

use prost::Message;

use crate::grpc::{Client, Reply, Status, Stream};
use crate::pb::{
    AuthenticateResponse, CompactionRequest, DeleteRangeRequest, Done, Empty, LeaseGrantRequest,
    NameAndPassword, PutRequest, RangeRequest, RangeResponse, RangeStreamResponse, RequestOp, StatusResponse,
    TxnRequest, TxnResponse, UserAndRole, WatchCreate, WatchRequest, WatchResponse, prefix_end,
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
        Ok(self.unary::<Done>(PUT, &put).await?.revision())
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
            .unary::<Done>("/etcdserverpb.KV/DeleteRange", &request)
            .await?
            .revision())
    }

    /// Does all of `operations` in one revision, and returns it.
    pub async fn transact(&self, operations: Vec<RequestOp>) -> Result<i64, Status> {
        let txn = TxnRequest {
            success: operations,
            ..TxnRequest::default()
        };
        let done: TxnResponse = self.unary(TXN, &txn).await?;
        Ok(done.header.expect("an answer has a header").revision)
    }

    /// Asks for a range.
    pub async fn range(&self, request: &RangeRequest) -> Result<RangeResponse, Status> {
        self.unary(RANGE, request).await
    }

    /// Asks for a range, and returns the reply with every byte.
    pub async fn range_raw(&self, request: &RangeRequest) -> Result<Reply, String> {
        self.raw(RANGE, &request.encode_to_vec()).await
    }

    /// The value of a key, linearizable.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>, Status> {
        Ok(self
            .range(&RangeRequest::one(key))
            .await?
            .kvs
            .pop()
            .map(|kv| kv.value))
    }

    /// Asks for a range by RangeStream, and returns its chunks.
    pub async fn range_stream(&self, request: &RangeRequest) -> Result<Vec<RangeResponse>, Status> {
        let mut stream = self.server_stream(RANGE_STREAM, request);
        let mut chunks = Vec::new();
        while let Some(chunk) = stream.next_as::<RangeStreamResponse>(SOON).await {
            chunks.push(chunk.range_response.expect("a chunk holds an answer"));
        }
        match stream.end() {
            Some(Status { code: 0, .. }) | None => Ok(chunks),
            Some(end) => Err(end.clone()),
        }
    }

    /// Compacts up to `revision`, and returns when the keys are gone.
    pub async fn compact(&self, revision: i64) -> Result<(), Status> {
        let request = CompactionRequest {
            revision,
            physical: true,
        };
        self.unary::<Done>("/etcdserverpb.KV/Compact", &request)
            .await
            .map(|_| ())
    }

    /// Grants a lease of the given id.
    pub async fn grant_lease(&self, id: i64, ttl_seconds: i64) -> Result<(), Status> {
        let request = LeaseGrantRequest { ttl_seconds, id };
        self.unary::<Empty>("/etcdserverpb.Lease/LeaseGrant", &request)
            .await
            .map(|_| ())
    }

    /// The member's own view of itself.
    pub async fn status(&self) -> Result<StatusResponse, Status> {
        self.unary("/etcdserverpb.Maintenance/Status", &Empty {}).await
    }

    /// Plants a fault in a [`fragile`](crate::proxy::Builder::fragile) rangecache, with a call that it does not touch.
    pub async fn plant(&self, fault: &str) {
        let planting = self.with_metadata("rangecache-test-fault", fault);
        planting.status().await.expect("etcd tells its status");
    }

    /// Opens a watch stream with one watch on it, and waits until it is created.
    pub async fn watch(&self, create: WatchCreate) -> Stream {
        let mut watch = self.open(WATCH);
        watch.send(&WatchRequest {
            create: Some(create),
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

    /// Creates user and role `root`, and switches authentication on; returns a client that is root.
    pub async fn enable_auth(&self, password: &str) -> Result<Self, Status> {
        let root = NameAndPassword {
            name: "root".into(),
            password: password.into(),
        };
        self.unary::<Empty>("/etcdserverpb.Auth/UserAdd", &root).await?;
        // A role is added by its name alone, which is the first field here too.
        let role = NameAndPassword {
            name: "root".into(),
            password: String::new(),
        };
        self.unary::<Empty>("/etcdserverpb.Auth/RoleAdd", &role).await?;
        let grant = UserAndRole {
            user: "root".into(),
            role: "root".into(),
        };
        self.unary::<Empty>("/etcdserverpb.Auth/UserGrantRole", &grant)
            .await?;
        self.unary::<Empty>("/etcdserverpb.Auth/AuthEnable", &Empty {})
            .await?;
        self.authenticate("root", password).await
    }

    /// The same connection as that user.
    pub async fn authenticate(&self, name: &str, password: &str) -> Result<Self, Status> {
        let request = NameAndPassword {
            name: name.into(),
            password: password.into(),
        };
        let answer: AuthenticateResponse = self.unary("/etcdserverpb.Auth/Authenticate", &request).await?;
        Ok(self.with_metadata("token", &answer.token))
    }

    /// Switches authentication off.
    pub async fn disable_auth(&self) -> Result<(), Status> {
        self.unary::<Empty>("/etcdserverpb.Auth/AuthDisable", &Empty {})
            .await
            .map(|_| ())
    }
}

/// Reads watch responses until `enough` says so of all that has come; empty ones count too.
pub async fn watched(
    watch: &mut Stream,
    deadline: Duration,
    mut enough: impl FnMut(&[WatchResponse]) -> bool,
) -> Vec<WatchResponse> {
    let mut responses = Vec::new();
    while !enough(&responses) {
        match watch.next_as::<WatchResponse>(deadline).await {
            Some(response) => responses.push(response),
            None => panic!("the watch ended early: {:?}", watch.end()),
        }
    }
    responses
}
