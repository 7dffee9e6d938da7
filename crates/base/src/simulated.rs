//! Connections within the process in place of a network, and small pages, for tests that run the whole proxy on one thread
//! with paused time: only in builds with debug assertions, and only on a thread that has called [`begin`]. Release builds contain
//! none of it. A leaf.

#[cfg(debug_assertions)]
mod hosts {
    use std::{cell::RefCell, collections::BTreeMap, io};

    use tokio::io::{DuplexStream, duplex};
    use tokio::sync::mpsc;

    /// Connections that a listener has not accepted yet.
    const BACKLOG: usize = 1024;

    /// The simulated network of one thread.
    struct Network {
        /// Bytes that one direction of a connection buffers.
        buffer_bytes: usize,
        max_page_keys: i64,
        /// Number of identities that rangecaches of the network have taken.
        instances: u32,
        listeners: BTreeMap<String, mpsc::Sender<DuplexStream>>,
    }

    thread_local! {
        static NETWORK: RefCell<Option<Network>> = const { RefCell::new(None) };
    }

    /// Replaces the network of this thread's TCP connections and listeners by a simulated one without hosts, whose
    /// connections buffer `buffer_bytes` in each direction, and over which pages have up to `max_page_keys`.
    pub fn begin(buffer_bytes: usize, max_page_keys: i64) {
        NETWORK.with_borrow_mut(|network| {
            *network = Some(Network {
                buffer_bytes,
                max_page_keys,
                instances: 0,
                listeners: BTreeMap::new(),
            });
        });
    }

    /// Largest number of keys in a page. `None` if this thread has no simulated network.
    #[must_use]
    pub fn max_page_keys() -> Option<i64> {
        NETWORK.with_borrow(|network| network.as_ref().map(|network| network.max_page_keys))
    }

    /// Identity of one more rangecache. `None` if this thread has no simulated network.
    #[must_use]
    pub fn next_instance() -> Option<u32> {
        NETWORK.with_borrow_mut(|network| {
            let instances = &mut network.as_mut()?.instances;
            *instances += 1;
            Some(*instances)
        })
    }

    /// Listens at `authority`, a host with a port, until the receiver is dropped. `None` if this thread has no simulated
    /// network.
    #[must_use]
    pub fn listen(authority: &str) -> Option<mpsc::Receiver<DuplexStream>> {
        NETWORK.with_borrow_mut(|network| {
            let (sender, receiver) = mpsc::channel(BACKLOG);
            let listeners = &mut network.as_mut()?.listeners;
            listeners.insert(authority.to_owned(), sender);
            Some(receiver)
        })
    }

    /// Connects to the listener at `authority`. `None` if this thread has no simulated network.
    ///
    /// # Errors
    /// `ConnectionRefused` without a listener, or if its backlog is full.
    #[must_use]
    pub fn connect(authority: &str) -> Option<io::Result<DuplexStream>> {
        NETWORK.with_borrow(|network| {
            let network = network.as_ref()?;
            let (near, far) = duplex(network.buffer_bytes);
            let listener = network.listeners.get(authority);
            let accepted = listener.is_some_and(|listener| listener.try_send(far).is_ok());
            Some(if accepted {
                Ok(near)
            } else {
                Err(io::ErrorKind::ConnectionRefused.into())
            })
        })
    }
}

#[cfg(debug_assertions)]
pub use hosts::{begin, connect, listen, max_page_keys, next_instance};
