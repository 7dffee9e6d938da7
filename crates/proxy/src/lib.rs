//! Handles requests. Code, spans, metrics and docs name the phases of a request as follows, in this order:
//!
//! ```text
//! accept → route → plan → prove → answer            (from memory)
//!                     ├──→ stream                   (etcd's RangeStream, returned as a unary response)
//!                     └──→ forward                  (etcd's response, as opaque bytes)
//! ```
//!
//! | phase | where |
//! |---|---|
//! | accept | [`server`](rangecache_edge::server) calls [`handle`] for each request |
//! | route | `refuse` ends requests of web pages and own ones; `route` chooses the handler by the request's path |
//! | plan | `read/plan`, a pure function: whether a read may be answered from memory, and what must be proven |
//! | prove | `read/decide`, with `mirror::freshness`; `read/authorize` if etcd must check a permission, too |
//! | answer | `read/answer` selects, `read/body` produces bytes as the client reads (I5) |
//! | stream | `fallback/unary_over_stream` (a large Range), `fallback/page_series` (pages of a list) |
//! | forward | `forward`; for reads, `fallback` first tries the ways that cost etcd less |
//!
//! Imports point in one direction: `route` → `read` → `fallback` → `forward` → `response`. `handles` defines [`Proxy`],
//! the state that all requests share; `response` defines the body of every response, `source` what produces its
//! frames; `metrics` declares what calls are counted by; `gateway` is what all JSON of etcd's gateway has in common; `members` is the member list of
//! `--advertise-client-urls`; `causes` picks the reason for which memory does not answer; `caller` is who makes a connection's calls; `idle` aborts responses whose clients have
//! stopped reading; `leaf_health` answers health checks of rangecaches behind this one; `watch_memory` counts what watches hold; `call` records each call, and reports it at its end;
//! `flags` are the flags of forwarded reads and of watches.
//!
//! This room imports `mirror`, `upstream`, `server` (its flags), `cache`, `keyspace`, `grpc`, `limits` and `telemetry`; `serve` uses
//! it.

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod call;
mod caller;
mod causes;
mod fallback;
mod flags;
mod forward;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzzing;
mod gateway;
mod handles;
mod idle;
mod members;
pub mod metrics;
mod read;
mod refuse;
mod response;
mod route;
mod source;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod watch;
mod watch_memory;

pub use flags::{ForwardConfig, ProxyFlags, WatchCache, WatchConfig, WhenBehind, default_watch_bytes};
pub use handles::{Access, Client, Proxy};
pub use response::{Outbound, ResponseBody};
pub use route::handle;
