//! rangecache: a transparent caching gRPC proxy in front of etcd.
//!
//! | room | what it is for |
//! |---|---|
//! | [`cli`] | sub-commands and their arguments |
//! | [`serve`] | boot sequence: files, sockets, assembly, and the three stages of a stop |
//! | [`diagnosis`] | findings, severities and remedies for operators |
//! | [`doctor`] | report about an etcd before rangecache is deployed |
//! | [`static_pod`] | manifest of a static pod, written into the kubelet's folder |
//! | [`config`] | flags and environment, checked before a port is bound |
//! | [`flags`] | parsers that flags of all rooms share; flags that a reload replaces |
//! | [`report`] | output of commands |
//! | [`proxy`] | the path of a request: route, plan, prove, answer or forward |
//! | [`limits`] | bounds on calls in flight, large reads and buffered bytes |
//! | [`server`] | listening sockets and connections |
//! | [`grpc`] | gRPC on the wire: methods, framing, metadata, statuses |
//! | [`protobuf`] | fields of messages, as far as generated code does not serve |
//! | [`cache`] | the tree, the history and the query; no I/O, no clock, no async |
//! | [`keyspace`] | keys, intervals, scopes |
//! | [`mirror`] | keeps a cache in step with etcd and proves that it is fresh |
//! | [`upstream`] | etcd's endpoints: connections, credentials, versions, calls |
//! | [`tls`] | TLS on both sides: files, handshakes, errors with remedies |
//! | [`telemetry`] | metrics, logs, traces |
//! | [`otlp`] | export of spans to a collector |
//! | [`admin`] | health, readiness and metrics over HTTP |
//! | [`net`] | URLs, and the byte streams of both sides |
//! | [`browser`] | requests that web pages cause |
//! | [`instance`] | identity of the process towards other rangecaches |
//! | [`memory`] | the memory limit of the container |
//! | [`panics`], [`faults`] | isolation of panics; faults that tests inject |
//! | [`simulated`] | connections within the process, for tests |
//! | [`wake_gated`] | futures that are polled only once they were woken |
//! | [`write_batching`] | frames that are ready together leave in one write |

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod admin;
pub mod browser;
pub mod cache;
pub mod cli;
pub mod config;
pub mod diagnosis;
pub mod diff;
pub mod doctor;
pub mod faults;
pub mod flags;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod grpc;
pub mod instance;
pub mod keyspace;
pub mod limits;
pub mod memory;
pub mod mirror;
pub mod net;
pub mod otlp;
pub mod panics;
pub mod protobuf;
pub mod proxy;
pub mod reload;
pub mod replay;
pub mod report;
pub mod serve;
pub mod server;
pub mod simulated;
pub mod static_pod;
pub mod telemetry;
pub mod tls;
pub mod upstream;
pub mod wake_gated;
pub mod write_batching;

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
