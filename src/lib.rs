//! rangecache: a transparent caching gRPC proxy in front of etcd.
//!
//! | room | what it is for |
//! |---|---|
//! | [`cli`] | what the command line asks for: serve, doctor, completions, manual page |
//! | [`diagnosis`] | findings for operators, and the words for them |
//! | [`doctor`] | what an etcd holds, and what would become of it |
//! | [`config`] | flags and environment, checked before a port is bound |
//! | [`proxy`] | the way of a request: accept, route, plan, prove, answer or forward |
//! | [`limits`] | bounds on calls in flight, large reads and buffered bytes |
//! | [`server`] | listening sockets and connections |
//! | [`cache`] | the tree, the history and the query; no I/O, no clock, no async |
//! | [`mirror`] | keeps a cache in step with etcd and proves that it is fresh |
//! | [`upstream`] | etcd's endpoints: connections, versions, calls |
//! | [`tls`] | TLS on both sides: files, handshakes, what went wrong |
//! | [`telemetry`] | metrics, logs, traces |
//! | [`admin`] | health, readiness and metrics over HTTP |
//! | [`memory`] | how much memory there is |
//! | [`grpc`] | gRPC on the wire: methods, framing, metadata, statuses |
//! | [`panics`], [`faults`] | what a panic costs; faults that tests plant |

pub mod admin;
pub mod cache;
pub mod cli;
pub mod config;
pub mod diagnosis;
pub mod doctor;
pub mod faults;
pub mod grpc;
pub mod keyspace;
pub mod limits;
pub mod memory;
pub mod mirror;
pub mod net;
pub mod panics;
pub mod proxy;
pub mod server;
pub mod telemetry;
pub mod tls;
pub mod upstream;

/// The etcd messages that rangecache writes or reads itself, generated from `proto/etcd.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod etcdserverpb {
    tonic::include_proto!("etcdserverpb");
}

/// gRPC's health service, generated from `proto/health.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod grpc_health {
    tonic::include_proto!("grpc.health.v1");
}
