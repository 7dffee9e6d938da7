//! **accept**: listening sockets and the connections on them, up to the HTTP requests.
//!
//! | file | subject |
//! |---|---|
//! | `flags` | flags of the listening sockets |
//! | `listener` | binds and accepts |
//! | `unix` | socket files |
//! | `connections` | bounds on all connections and on those of one address |
//! | `handshakes` | bound on TLS handshakes in progress |
//! | `windows` | receive windows of connections, from one budget |
//! | `serve` | serves HTTP/2 and HTTP/1 |
//! | `preface` | a connection's first bytes, within a deadline |
//! | `control_frames` | bound on a connection's control frames |
//! | `pace` | a connection's turns among all others, and the delays that its calls cause |
//! | `metrics` | counters of closed connections |
//! | `descriptors` | raises the limit on open files, and shares the descriptors out |
//!
//! This room knows neither the proxy nor the admin pages: both pass in a handler. It imports `net`, `tls`, `limits`, `telemetry`
//! and `write_batching`; `admin` and `main` use it.

mod connections;
mod control_frames;
mod descriptors;
mod flags;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzzing;
mod handshakes;
mod listener;
mod metrics;
mod pace;
mod preface;
mod serve;
mod unix;
mod windows;

pub use connections::{ConnectionBudgets, ConnectionLimits, Connections};
pub use descriptors::connections_within_descriptors;
pub use flags::{Control, ListenConfig};
pub use listener::Listener;
pub use metrics::ConnectionMetrics;
pub use serve::ServeConfig;
