//! **accept**: listening sockets and the connections on them, up to the HTTP requests.
//!
//! `listener` binds, accepts and serves; `unix` handles socket files; `preface` reads a connection's first bytes within a
//! deadline; `write_batching` sends responses that are ready together in one write. This room knows neither the proxy nor the
//! admin pages: both pass in a handler. It imports `net`, `tls`, `telemetry` and `grpc`; `admin` and `main` use it.

mod listener;
mod preface;
mod unix;
mod write_batching;

pub use listener::{Listener, ServeConfig, Tracked, secured};
