//! Support shared by rangecache's tests and benchmarks; a development dependency only.
//!
//! | module | contents |
//! |---|---|
//! | [`process`] | child processes with logs and signals, killed on drop; paths of tools |
//! | [`collector`] | an OpenTelemetry collector that keeps what it receives |
//! | [`effort`] | how much random tests do |
//! | [`etcd`] | real etcd: one member or three, stopped, restarted, suspended, restored |
//! | [`proxy`] | rangecache as a process, and its log |
//! | [`metrics`] | metrics pages of etcd and rangecache, and counts by outcome |
//! | [`grpc`] | a gRPC client on bare HTTP/2, which returns every byte, header and trailer |
//! | [`kv`] | etcd's calls with typed requests and responses |
//! | [`fault_link`] | a TCP link that fails on command |
//! | [`relay`] | a member behind a relay that changes what it says |
//! | [`roles`] | users, roles, permissions and tokens |
//! | [`kine`] | Kine, a server with etcd's interface that is not etcd |
//! | [`recovery`] | the check that responses come from memory again after a fault |
//! | [`register`] | keys that change together, and checks of what readers see of them |
//! | [`shapes`] | Range requests of every shape, and a store to send them to |
//! | [`streams`] | RangeStream calls, and their chunks merged to the unary response |
//! | [`disk`] | folders on a disk with room |
//! | [`pb`] | etcd's messages, generated from `proto/etcd.proto` |
//! | [`http`] | an HTTP/1 client |
//! | [`tls`] | CAs and certificates of every kind, etcd with TLS, TLS connections |
//! | [`watch_client`] | a stream of watches that is recorded and continued |
//! | [`watch_rules`] | what every transcript of a watch stream must satisfy |
//! | [`websocket`] | a WebSocket client |
//! | [`wait`] | waiting for conditions with a deadline |

pub mod collector;
pub mod disk;
pub mod effort;
pub mod etcd;
pub mod fault_link;
pub mod grpc;
pub mod http;
pub mod kine;
pub mod kv;
pub mod metrics;
pub mod pb;
pub mod process;
pub mod proxy;
pub mod recovery;
pub mod register;
pub mod relay;
pub mod roles;
pub mod shapes;
pub mod streams;
pub mod tls;
pub mod wait;
pub mod watch_client;
pub mod watch_rules;
pub mod websocket;
