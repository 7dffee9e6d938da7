//! Classes of connections, and what decides how a connection is opened: its client, receive window and timeouts with silent peers.

use std::time::Duration;

use etcd_wire::grpc::Method;
use lean_h2::STREAM_WINDOW_BYTES;
use rangecache_base::net::SILENCE_TIMEOUT;

/// The client of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Client {
    /// Calls of every kind, many at once.
    Hyper(ReceiveWindow),
    /// Small calls; hyper, where that has failed.
    Lean,
}

/// Connections that a call may use. Calls of different classes never share a connection, so that a long response or a
/// slow reader of one class does not delay another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectionClass {
    /// Unary calls.
    Unary,
    /// Unary calls whose request is short and known as a whole.
    Short,
    /// Streams with an end, and responses of any length.
    Stream,
    /// Watches and other streams without an end, of which many are open at once.
    Endless,
    /// Quorum checks and probes, which carry no metadata of clients: many reads wait for each of them.
    Check,
    /// Authorizations, which carry the metadata of the client that is authorized.
    Authorization,
}

impl ConnectionClass {
    /// Every class.
    pub(super) const ALL: [ConnectionClass; 6] = [
        ConnectionClass::Unary,
        ConnectionClass::Short,
        ConnectionClass::Stream,
        ConnectionClass::Endless,
        ConnectionClass::Check,
        ConnectionClass::Authorization,
    ];

    /// Class of a client's calls of `method`.
    #[must_use]
    pub fn of(method: Method) -> ConnectionClass {
        if method.is_endless() {
            ConnectionClass::Endless
        } else if method.is_streaming() {
            ConnectionClass::Stream
        } else {
            ConnectionClass::Unary
        }
    }

    /// Receive windows of its connections.
    #[must_use]
    pub const fn window(self) -> ReceiveWindow {
        match self {
            ConnectionClass::Stream => ReceiveWindow::SHARED,
            ConnectionClass::Unary
            | ConnectionClass::Short
            | ConnectionClass::Endless
            | ConnectionClass::Check
            | ConnectionClass::Authorization => ReceiveWindow::SMALL,
        }
    }

    /// The client of its connections.
    pub(super) const fn client(self) -> Client {
        match self {
            ConnectionClass::Short | ConnectionClass::Check => Client::Lean,
            other => Client::Hyper(other.window()),
        }
    }

    /// Timeouts with silent peers of its connections.
    pub(super) const fn timeouts(self) -> Timeouts {
        match self {
            ConnectionClass::Check | ConnectionClass::Authorization => Timeouts::OWN,
            ConnectionClass::Unary
            | ConnectionClass::Short
            | ConnectionClass::Stream
            | ConnectionClass::Endless => Timeouts::CLIENTS,
        }
    }

    /// Connections that are kept open per endpoint.
    pub(super) const fn connections(self) -> usize {
        match self {
            ConnectionClass::Stream | ConnectionClass::Endless => 2,
            ConnectionClass::Unary
            | ConnectionClass::Short
            | ConnectionClass::Check
            | ConnectionClass::Authorization => 1,
        }
    }
}

/// Receive windows of a connection, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveWindow {
    /// Window of one stream: the bytes that one slow reader can keep buffered.
    pub stream: u32,
}

impl ReceiveWindow {
    /// For streams, and for responses of any length, that are forwarded unchanged.
    pub const SHARED: ReceiveWindow = ReceiveWindow { stream: 256 << 10 };
    /// For calls of which many are in flight at once, and whose responses are short.
    pub const SMALL: ReceiveWindow = ReceiveWindow {
        stream: STREAM_WINDOW_BYTES,
    };
    /// For the connection of one feed, which is always read.
    pub const DEDICATED: ReceiveWindow = ReceiveWindow { stream: 8 << 20 };
    /// For the connection of one load: etcd sends no more than this ahead of it, in bursts of half of it for which its other
    /// clients wait. Over a network whose round trip takes a millisecond a load reads 256 MB/s at most.
    pub const LOAD: ReceiveWindow = ReceiveWindow { stream: 256 << 10 };
}

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
