//! The proxy: how a request is handled. Code, spans, metrics and docs use the same names for its phases, in this order:
//!
//! ```text
//! accept → route → plan → prove → answer            (from the cache)
//!                     ├──→ stream                   (a RangeStream of etcd's, returned as a unary response)
//!                     └──→ forward                  (opaque bytes)
//! ```
//!
//! | phase | where |
//! |---|---|
//! | accept | [`server`](crate::server), which passes each request to [`handle`] |
//! | route | `route`: by path alone |
//! | plan | `read/plan`: pure; whether a read may be answered from memory, and what must be proven |
//! | prove | `read/decide`, with `mirror::freshness`; `read/authorize` where a client's rights must be proven, too |
//! | answer | `read/answer` selects, `read/body` produces bytes as the client reads (I5) |
//! | stream | `fallback/unary_over_stream` (a large Range), `fallback/page_series` (pages of a list) |
//! | forward | `forward`; for reads `fallback` has the order of the ways to get them from etcd |
//!
//! Rooms import downward only: `route` → `read` → `fallback` → `forward` → `response`. `handles` is what every request needs,
//! `response` the body of every response, `idle` aborts responses that their clients do not read, `recorder` counts a read at
//! its end, `spans` traces a call.
//!
//! This room imports `mirror`, `upstream`, `cache`, `keyspace`, `grpc`, `limits`, `config` and `telemetry`; `main` uses it.

mod fallback;
mod forward;
mod handles;
mod idle;
mod read;
mod recorder;
mod response;
mod route;
mod spans;

pub use handles::Proxy;
pub use response::ResponseBody;
pub use route::handle;
