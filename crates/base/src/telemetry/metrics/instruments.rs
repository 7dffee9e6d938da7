//! Values that metrics have: the one place at which rooms get them, whatever crate implements them.

pub use prometheus_client::metrics::counter::Counter;
pub use prometheus_client::metrics::gauge::Gauge;
