//! Flags of `rangecache status`, `rangecache health` and `rangecache ctl`.

use std::net::IpAddr;

use clap::{Args, ValueEnum};

use rangecache_base::net::{Address, Url};
use rangecache_report::output::ReportFormat;

/// Address at which the running rangecache is asked.
#[derive(Args, Debug, Clone)]
pub(super) struct MetricsUrl {
    /// Listener for operators of the running rangecache: http://host:port or unix:///path. Of several, the first one
    ///
    /// When to change it: it listens elsewhere (--listen-metrics-urls); in its own container the environment names it
    #[arg(
        long,
        value_name = "URL",
        env = "RANGECACHE_LISTEN_METRICS_URLS",
        default_value = "http://127.0.0.1:23791",
        value_parser = parse_first
    )]
    pub(super) metrics_url: Url,
}

/// Flags of `rangecache status`.
#[derive(Args, Debug, Clone)]
pub struct StatusConfig {
    #[command(flatten)]
    pub(super) at: MetricsUrl,

    /// Form of the status: `text` for people, or `json`, which is that of /status
    ///
    /// When to change it: `json` for scripts
    #[arg(long, value_name = "FORM", value_enum, default_value = "text")]
    pub output: ReportFormat,
}

/// Flags of `rangecache health`.
#[derive(Args, Debug, Clone)]
pub struct HealthConfig {
    #[command(flatten)]
    pub(super) at: MetricsUrl,

    /// Whether memory answers (/readyz?memory), instead of whether the process responds (/livez)
    ///
    /// When to change it: clients should only be sent to an instance that answers from memory
    #[arg(long)]
    pub ready: bool,
}

/// Flags of `rangecache ctl`.
#[derive(Args, Debug, Clone)]
pub struct CtlConfig {
    #[command(flatten)]
    pub(super) at: MetricsUrl,

    /// Action that the running rangecache is to perform
    #[arg(value_name = "ACTION", value_enum)]
    pub action: CtlAction,
}

/// Action of `rangecache ctl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CtlAction {
    /// Read the flags of --flags-file again
    Reload,
    /// Switch memory off: etcd answers every read and serves every watch
    ForwardAll,
    /// Switch memory on again
    UseMemory,
}

/// The first URL of a list, with the loopback address in the place of one that means all addresses.
fn parse_first(text: &str) -> Result<Url, String> {
    let first = text.split(',').next().unwrap_or_default().trim();
    let mut url: Url = first.parse().map_err(|error| format!("{error}"))?;
    if url.tls {
        return Err(format!(
            "{url}: only http:// and unix:// can be asked; for TLS use curl --cacert"
        ));
    }
    if let Address::Tcp { host, .. } = &mut url.address
        && let Ok(address) = host.parse::<IpAddr>()
        && address.is_unspecified()
    {
        "127.0.0.1".clone_into(host);
        if address.is_ipv6() {
            "::1".clone_into(host);
        }
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_listener_is_asked_on_this_host_if_it_listens_on_all_addresses() {
        for (text, url) in [
            ("http://127.0.0.1:23791", "http://127.0.0.1:23791"),
            ("http://0.0.0.0:1,http://10.0.0.1:2", "http://127.0.0.1:1"),
            ("http://[::]:1", "http://[::1]:1"),
            ("unix:///run/rangecache.sock", "unix:///run/rangecache.sock"),
            ("http://cp1.example.com:1", "http://cp1.example.com:1"),
        ] {
            assert_eq!(parse_first(text).unwrap().to_string(), url);
        }
        assert!(parse_first("https://127.0.0.1:1").unwrap_err().contains("curl"));
        assert!(parse_first("").is_err());
    }
}
