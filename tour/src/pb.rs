//! etcd's messages that the tour sends and rangecache does not, with etcd's published field numbers.

use etcd_wire::etcdserverpb::ResponseHeader;

/// A key with its value.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) value: Vec<u8>,
}

/// A write of one key.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
}

/// The response to a write of one key, and to a transaction: only the header is read.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct WriteResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
}

/// A transaction without conditions, of writes only.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct TxnRequest {
    #[prost(message, repeated, tag = "2")]
    pub(crate) success: Vec<PutOp>,
}

/// Put in a transaction.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct PutOp {
    #[prost(message, optional, tag = "2")]
    pub(crate) request_put: Option<PutRequest>,
}
