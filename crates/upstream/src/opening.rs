//! Opening of a connection: TCP, TLS and HTTP/2, and with TLS a first response.

use std::{sync::Arc, time::Duration};

use etcd_wire::etcdserverpb::{StatusRequest, maintenance_client::MaintenanceClient};
use rangecache_base::net::Url;
use rangecache_edge::tls::{Connector, Protocol};
use tokio::{task::JoinHandle, time::Instant};
use tokio_util::task::TaskTracker;

use super::class::{Client, ReceiveWindow, Timeouts};
use super::transport::{ConnectError, Driver, Transport};
use super::{capabilities::ServerCapabilities, connection::Connection, credentials::Credentials};

/// Timeout of TCP and TLS handshakes and, with TLS, of a first response.
const OPEN_TIMEOUT: Duration = Duration::from_secs(3);

impl Connection {
    /// Opens a connection. The returned future drives the connection, must be polled, and returns why the connection
    /// ended.
    pub(super) async fn open(
        connector: &Connector,
        url: &Url,
        server: &Arc<ServerCapabilities>,
        client: Client,
        timeouts: Timeouts,
        credentials: &Arc<Credentials>,
        deadline: Instant,
    ) -> Result<(Arc<Connection>, Driver), ConnectError> {
        let deadline = deadline.min(Instant::now() + OPEN_TIMEOUT);
        let opening = async {
            let (stream, named) = connector
                .connect_named(url, Protocol::Http2, timeouts.bytes)
                .await
                .map_err(|source| ConnectError::Connect {
                    url: url.clone(),
                    source,
                })?;
            let (transport, mut driver) = Transport::begin(client, timeouts, url, stream, server).await?;
            let connection = Arc::new(Connection::new(url, server, credentials, transport, named));
            if url.tls {
                // In TLS 1.3 etcd checks the client certificate after the client's handshake has completed: a
                // client's call must not be the first to fail for it. Any response shows that the certificate was
                // accepted.
                tokio::select! {
                    biased;
                    ended = &mut driver => {
                        let (url, reason) = (url.clone(), connector.explain(url, &ended));
                        return Err(ConnectError::Refused { url, reason });
                    }
                    // Without a token: authenticating needs an open connection.
                    () = connection.wait_for_any_response() => {}
                }
            }
            Ok((connection, driver))
        };
        // Boxed because the future is large; connections are opened rarely.
        Box::pin(tokio::time::timeout_at(deadline, opening))
            .await
            .map_err(|_| ConnectError::TimedOut)?
    }

    async fn wait_for_any_response(self: &Arc<Self>) {
        let (channel, origin) = self.channel();
        let mut client = MaintenanceClient::with_origin(channel, origin);
        let _ = client.status(StatusRequest {}).await;
    }
}

/// Opens a connection without an [`Upstream`](super::Upstream). The task belongs to `tasks`; it ends with the
/// connection and returns why.
///
/// # Errors
/// [`ConnectError`], at `deadline` at the latest.
pub async fn open_once(
    connector: &Connector,
    url: &Url,
    credentials: &Arc<Credentials>,
    tasks: &TaskTracker,
    deadline: Instant,
) -> Result<(Arc<Connection>, JoinHandle<String>), ConnectError> {
    let server = Arc::default();
    let opening = Connection::open(
        connector,
        url,
        &server,
        Client::Hyper(ReceiveWindow::SHARED),
        Timeouts::OWN,
        credentials,
        deadline,
    );
    let (connection, driver) = opening.await?;
    Ok((connection, tasks.spawn(driver)))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::testing::open;

    #[tokio::test]
    async fn connection_that_is_refused_names_its_endpoint() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url: Url = format!("http://{}", listener.local_addr().unwrap())
            .parse()
            .unwrap();
        drop(listener);
        let error = open(&url).await.unwrap_err();
        assert!(matches!(error, ConnectError::Connect { .. }), "{error:?}");
        assert!(error.to_string().starts_with(&format!("{url}: ")), "{error}");
    }
}
