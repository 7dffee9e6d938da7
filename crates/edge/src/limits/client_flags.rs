//! Flags about the clients of the proxy.

use clap::Args;

/// Figures about clients.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Clients")]
pub struct ClientsConfig {
    /// Clients with metrics of their own (rangecache_client_…), those that cost most; 0 for none. /clients has all
    ///
    /// When to change it: more clients should have metrics of their own (`rangecache_client_…`); `0` for none, if
    /// their names must not reach Prometheus
    #[arg(
        long = "client-metrics-top",
        value_name = "N",
        default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(..=1_000)
    )]
    pub metrics_top: u32,
}
