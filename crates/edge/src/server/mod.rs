//! **accept**: listening sockets and the connections on them, up to the HTTP requests.
//!
//! | file | subject |
//! |---|---|
//! | `flags` | flags of the listening sockets |
//! | `listener` | binds and accepts; socket files |
//! | `connections` | bounds on all connections and on those of one address; their receive windows, from one budget |
//! | `handshakes` | bound on TLS handshakes in progress |
//! | `serve` | serves HTTP/2 and HTTP/1; counters of closed connections |
//! | `preface` | a connection's first bytes, within a deadline |
//! | `control_frames` | bound on a connection's control frames |
//! | `pace` | a connection's turns among all others, and the delays that its calls cause |
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
mod pace;
mod preface;
mod serve;

pub use connections::{ConnectionBudgets, ConnectionLimits, Connections};
pub use descriptors::connections_within_descriptors;
pub use flags::{Control, ListenConfig};
pub use listener::Listener;
pub use serve::{ConnectionMetrics, ServeConfig};
