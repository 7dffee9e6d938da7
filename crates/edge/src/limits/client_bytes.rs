//! Bytes that the calls of one client hold on all of its connections.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// Clients that are remembered after their last connection has ended, until others connect.
const KEPT_CLIENTS: usize = 1_024;

/// Bytes of each client that has a connection.
#[derive(Debug, Default)]
pub(super) struct BytesByClient {
    clients: Mutex<HashMap<u64, Weak<ClientBytes>>>,
    connected: Arc<AtomicUsize>,
}

/// Bytes of one client. It counts as connected until this is dropped.
#[derive(Debug)]
pub(super) struct ClientBytes {
    used: AtomicU64,
    connected: Arc<AtomicUsize>,
}

impl BytesByClient {
    /// Bytes of the client with this number, for one more of its connections.
    pub(super) fn of(&self, client: u64) -> Arc<ClientBytes> {
        let mut clients = self.clients.lock();
        if let Some(bytes) = clients.get(&client).and_then(Weak::upgrade) {
            return bytes;
        }
        if clients.len() >= KEPT_CLIENTS {
            clients.retain(|_, bytes| bytes.strong_count() > 0);
        }
        self.connected.fetch_add(1, Ordering::Relaxed);
        let bytes = Arc::new(ClientBytes {
            used: AtomicU64::new(0),
            connected: Arc::clone(&self.connected),
        });
        clients.insert(client, Arc::downgrade(&bytes));
        bytes
    }
}

impl ClientBytes {
    /// Bytes of the client; `None` while no other client is connected.
    pub(super) fn next_to_others(&self) -> Option<u64> {
        let is_alone = self.connected.load(Ordering::Relaxed) < 2;
        (!is_alone).then(|| self.used.load(Ordering::SeqCst))
    }

    pub(super) fn add(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::SeqCst);
    }

    pub(super) fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::SeqCst);
    }
}

impl Drop for ClientBytes {
    fn drop(&mut self) {
        self.connected.fetch_sub(1, Ordering::Relaxed);
    }
}
