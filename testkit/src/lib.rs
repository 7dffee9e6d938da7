//! What the suites share: real etcd, rangecache itself, and a client that shows every byte and every trailer.
//!
//! | module | what it is for |
//! |---|---|
//! | [`process`] | a child process with its log, signals, and an end on drop |
//! | [`collector`] | a collector of traces, and what it has got |
//! | [`etcd`] | real etcd: one member or three, stopped, restarted, paused, restored |
//! | [`proxy`] | rangecache, its metrics and its log |
//! | [`grpc`] | a gRPC client on bare HTTP/2 |
//! | [`kv`] | etcd's calls in typed form, on top of it |
//! | [`fault_link`] | a TCP link that fails on command |
//! | [`roles`] | users, roles and rights |
//! | [`recovery`] | the way back to responses from memory after a fault |
//! | [`register`] | keys that change together, and a judge of what a reader saw of them |
//! | [`shapes`] | Range requests of every shape, and a store to ask them of |
//! | [`streams`] | RangeStreams: whole, and merged to the unary answer |
//! | [`pb`] | etcd's messages |
//! | [`http`] | HTTP/1 as a scraper or curl speaks it |
//! | [`tls`] | CAs and certificates of every kind, etcd with TLS, and connections over it |
//! | [`wait`] | waiting for a condition, never for a time |

pub mod collector;
pub mod etcd;
pub mod fault_link;
pub mod grpc;
pub mod http;
pub mod kv;
pub mod pb;
pub mod process;
pub mod proxy;
pub mod recovery;
pub mod register;
pub mod roles;
pub mod shapes;
pub mod streams;
pub mod tls;
pub mod wait;
