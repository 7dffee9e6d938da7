//! Bound sockets.

use std::io;
use std::sync::Arc;

use rangecache_base::net::Url;
use rangecache_edge::server::{ListenConfig, Listener};
use rangecache_edge::tls::Acceptor;

/// The sockets of every `--listen-…` flag.
pub(super) struct Sockets {
    pub(super) clients: Vec<Listener>,
    /// Listeners that permit reads only.
    pub(super) readers: Vec<Listener>,
    pub(super) operators: Vec<Listener>,
}

impl Sockets {
    /// Binds all of them.
    ///
    /// # Errors
    /// The first URL that cannot be bound, with its flag.
    pub(super) async fn bind(
        listen: &ListenConfig,
        acceptor: Option<&Arc<Acceptor>>,
    ) -> anyhow::Result<Sockets> {
        let bind = async |flag, urls: &[Url]| {
            let mut listeners = Vec::new();
            for url in urls {
                let bound = Listener::bind(url, acceptor, listen.unix_socket_mode, listen.reuse_port).await;
                let explained = |error: io::Error| {
                    let what = format!("cannot listen on {url}; {}", remedy(&error));
                    anyhow::Error::new(error).context(what).context(flag)
                };
                listeners.push(bound.map_err(explained)?);
            }
            anyhow::Ok(listeners)
        };
        Ok(Sockets {
            clients: bind("--listen-client-urls", &listen.client_urls).await?,
            readers: bind("--read-only-listen-client-urls", &listen.read_only_client_urls).await?,
            operators: bind("--listen-metrics-urls", &listen.metrics_urls).await?,
        })
    }
}

/// Likely cause of a socket that cannot be bound, and what to do.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "another process is there; port 0 takes a free one",
        io::ErrorKind::AddrNotAvailable => "no interface of this host has that address",
        io::ErrorKind::NotFound => "create the folder of the socket",
        io::ErrorKind::PermissionDenied => {
            "this user may not; choose a port from 1024 on, or a folder that it may write"
        }
        _ => "choose another address",
    }
}
