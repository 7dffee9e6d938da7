//! Flags of the listening sockets.

use clap::{Args, ValueEnum};
use rangecache_base::flags::{Switch as _, parse_mode};
use rangecache_base::net::{Transport, Url};

use crate::browser::BrowserRules;

/// From where requests that change the process are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Control {
    /// From loopback addresses and unix sockets
    Local,
    /// From unix sockets alone
    Unix,
    /// From nowhere
    Off,
}

impl Control {
    /// Whether such a request is accepted from a connection of this kind.
    #[must_use]
    pub fn permits(self, transport: Transport) -> bool {
        match self {
            Control::Local => transport.local,
            Control::Unix => transport.unix,
            Control::Off => false,
        }
    }

    /// Sentence for a request that is refused.
    #[must_use]
    pub fn refusal(self) -> &'static str {
        match self {
            Control::Local => {
                "this request is accepted from loopback addresses of rangecache's own host alone"
            }
            Control::Unix => "this request is accepted from unix sockets alone (--control=unix)",
            Control::Off => "this request is not accepted (--control=off); SIGHUP reloads the flags",
        }
    }
}

/// Listening sockets for clients and for operators.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Listeners")]
pub struct ListenConfig {
    /// URLs that clients connect to, comma-separated, with the same schemes; port 0 takes a free port, which is logged
    ///
    /// When to change it: clients are on other hosts (`https://`) or share a socket (`unix://`)
    #[arg(
        long = "listen-client-urls",
        value_name = "URL,…",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:23790"
    )]
    pub client_urls: Vec<Url>,

    /// URLs that clients connect to which may only read, comma-separated, with the same schemes and TLS settings: writes,
    /// transactions and administrative calls are refused with PermissionDenied [default: none]
    ///
    /// When to change it: some clients may only read: give them this URL, and let no network lead them to the other
    /// (docs/security.md#read-only-listeners)
    #[arg(
        long = "read-only-listen-client-urls",
        value_name = "URL,…",
        value_delimiter = ','
    )]
    pub read_only_client_urls: Vec<Url>,

    /// URLs, comma-separated, that MemberList names as the client URLs of the only member, as with etcd's grpc-proxy: for
    /// clients that take their endpoints from etcd's members and would leave rangecache [default: none, etcd answers]
    ///
    /// When to change it: clients take their endpoints from the members of the cluster (docs/clients.md)
    #[arg(long = "advertise-client-urls", value_name = "URL,…", value_delimiter = ',')]
    pub advertise_client_urls: Vec<Url>,

    /// URLs of /livez, /readyz, /metrics and the status page, comma-separated; https:// uses --cert-file, too
    ///
    /// When to change it: Prometheus or the kubelet are on other hosts
    #[arg(
        long = "listen-metrics-urls",
        value_name = "URL,…",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:23791"
    )]
    pub metrics_urls: Vec<Url>,

    /// From where POST /reload, POST /forward-all and DELETE /forward-all are accepted on --listen-metrics-urls: loopback
    /// addresses and unix sockets (local), unix sockets alone (unix), or nowhere (off). Behind a proxy on the same host,
    /// such as a service mesh's, every client has a loopback address
    ///
    /// When to change it: `unix` or `off` where others than operators have a loopback address: behind a service
    /// mesh's sidecar, a proxy on the same host, a tunnel (docs/security.md#web-pages)
    #[arg(long, value_name = "FROM", value_enum, default_value = "local")]
    pub control: Control,

    /// Mode of the listeners' unix sockets, octal
    ///
    /// When to change it: clients run as another user
    #[arg(long, value_name = "MODE", value_parser = parse_mode, default_value = "0600")]
    pub unix_socket_mode: u32,

    /// Share the ports with other processes (SO_REUSEPORT) and replace unix sockets, so that the next rangecache can
    /// take over before this one stops. A port that another process does not share is waited for, up to a minute
    ///
    /// When to change it: restarts without a failed call (docs/operations.md#restart-without-a-failed-call)
    #[arg(long = "socket-reuse-port", visible_alias = "reuse-port", switch())]
    pub reuse_port: bool,

    /// Allow clients on other machines to connect without TLS. Insecure: every client that reaches the port can read
    /// and write all of etcd
    ///
    /// When to change it: the network is trusted and clients cannot use TLS
    #[arg(long = "allow-plaintext-listener", switch())]
    pub allow_plaintext: bool,

    /// Host names, comma-separated, under which HTTP/1 clients may call a listener without TLS, in addition to IP
    /// addresses, localhost and the hosts of the listening URLs; * permits all. Protects etcd from web pages (DNS
    /// rebinding)
    ///
    /// When to change it: HTTP/1 clients (probes, scrapers, the JSON gateway) call a listener without TLS by a name
    /// other than `localhost` and those in the listening URLs; etcd's default permits every name
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = parse_host)]
    pub host_whitelist: Vec<String>,

    /// Origins of web pages that may call the client listeners, comma-separated, such as https://example.com; * permits
    /// all [default: none]
    ///
    /// When to change it: a web page may call the client listeners; etcd's default permits every page
    #[arg(long, value_name = "ORIGIN,…", value_delimiter = ',', value_parser = parse_origin)]
    pub cors: Vec<String>,
}

/// A host name as a client writes it, without the port; `*` is every name.
fn parse_host(text: &str) -> Result<String, String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    if text == "*" || (!text.is_empty() && text.chars().all(is_name)) {
        return Ok(text.to_owned());
    }
    Err("write a host name without scheme, port and spaces, such as etcd.example".to_owned())
}

/// An origin as browsers send it; `*` is every one.
fn parse_origin(text: &str) -> Result<String, String> {
    let host = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"));
    let is_origin = |host: &str| {
        let is_of_hosts = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-._:[]".contains(c);
        !host.is_empty() && host.chars().all(is_of_hosts)
    };
    if text == "*" || host.is_some_and(is_origin) {
        return Ok(text.to_owned());
    }
    Err("write an origin as browsers send it: scheme, host in small letters and port, without a path, such as https://example.com:8443".to_owned())
}

impl ListenConfig {
    /// URLs of all listeners.
    pub fn urls(&self) -> impl Iterator<Item = &Url> {
        self.all_client_urls().chain(&self.metrics_urls)
    }

    /// URLs of the listeners for clients, those that only read included.
    pub fn all_client_urls(&self) -> impl Iterator<Item = &Url> {
        self.client_urls.iter().chain(&self.read_only_client_urls)
    }

    /// Host names under which the listeners may be called, and web pages that may call them.
    #[must_use]
    pub fn browser_rules(&self) -> BrowserRules {
        BrowserRules::new(self.urls(), &self.host_whitelist, &self.cors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_origins_that_can_never_match_are_refused() {
        for name in ["*", "localhost", "etcd-1.example", "rangecache_1"] {
            assert_eq!(parse_host(name).as_deref(), Ok(name));
        }
        for name in ["", "a b", "https://a", "a:2379", "a/b"] {
            assert!(parse_host(name).is_err(), "{name}");
        }
        for origin in [
            "*",
            "https://example.com",
            "http://127.0.0.1:8080",
            "http://[::1]:8080",
        ] {
            assert_eq!(parse_origin(origin).as_deref(), Ok(origin));
        }
        for origin in [
            "",
            "example.com",
            "https://",
            "https://a/b",
            "https://a/",
            "https://A.example",
            "null",
        ] {
            assert!(parse_origin(origin).is_err(), "{origin}");
        }
    }
}
