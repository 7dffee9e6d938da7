//! Bound sockets.

use std::sync::Arc;

use anyhow::Context as _;

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
                listeners.push(
                    bound
                        .with_context(|| {
                            format!(
                                "cannot listen on {url}; is another process there? Port 0 takes a free one"
                            )
                        })
                        .context(flag)?,
                );
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
