//! Connections of the watchers.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use testkit::pb::WatchCreateRequest;

use crate::client::{Connection, Method, Windows};
use crate::watchers::{Stream, create_frame};

/// A connection that is opened again when it is lost.
pub(super) struct Carrier {
    address: SocketAddr,
    windows: Windows,
    current: tokio::sync::Mutex<Arc<Connection>>,
}

impl Carrier {
    pub(super) async fn open(address: SocketAddr, windows: Windows) -> Result<Carrier> {
        let current = tokio::sync::Mutex::new(Arc::new(Connection::open(address, windows).await?));
        Ok(Carrier {
            address,
            windows,
            current,
        })
    }

    /// Opens a stream with the watchers.
    pub(super) async fn stream(&self, creates: Vec<WatchCreateRequest>) -> Result<(Stream, Arc<Connection>)> {
        let mut current = self.current.lock().await;
        let started = match current.start(Method::Watch).await {
            Ok(started) => started,
            Err(_) => {
                *current = Arc::new(Connection::open(self.address, self.windows).await?);
                current.start(Method::Watch).await?
            }
        };
        let connection = current.clone();
        drop(current);
        let (mut send, response) = started;
        for create in creates {
            send.send_data(create_frame(create), false)?;
        }
        Ok((Stream::new(send, response.await?.into_body()), connection))
    }
}
