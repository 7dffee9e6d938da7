//! Classes of connections.

use super::timeouts::Timeouts;
use super::transport::Client;
use super::window::ReceiveWindow;
use etcd_wire::grpc::Method;

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
