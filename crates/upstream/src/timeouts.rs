//! Timeouts with silent peers.

use std::time::Duration;

use rangecache_base::net::SILENCE_TIMEOUT;

/// Times for which a connection waits for a peer that is silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    /// Time that the peer has to answer a ping.
    pub(super) ping: Duration,
    /// Time that its kernel has to acknowledge bytes.
    pub(super) bytes: Duration,
}

impl Timeouts {
    /// With calls of clients, which would wait as long.
    pub(super) const CLIENTS: Timeouts = Timeouts {
        ping: SILENCE_TIMEOUT,
        bytes: SILENCE_TIMEOUT,
    };
    /// With calls of rangecache's own, which are made elsewhere then.
    pub(super) const OWN: Timeouts = Timeouts {
        ping: Duration::from_secs(5),
        bytes: Duration::from_secs(10),
    };
}
