//! Classes of connections.

/// Which connections a call may use. Calls of different classes never share a connection, so that a long response or a
/// slow reader of one class does not delay another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectionClass {
    /// Short unary calls.
    Unary,
    /// Streams, and responses of any length.
    Stream,
    /// Quorum checks and probes, which carry no metadata of clients: many reads wait for each of them.
    Check,
    /// Authorizations, which carry the metadata of the client that is authorized.
    Authorization,
}

impl ConnectionClass {
    /// Every class.
    pub(super) const ALL: [ConnectionClass; 4] = [
        ConnectionClass::Unary,
        ConnectionClass::Stream,
        ConnectionClass::Check,
        ConnectionClass::Authorization,
    ];

    /// Connections that are kept open per endpoint.
    pub(super) const fn connections(self) -> usize {
        match self {
            ConnectionClass::Unary | ConnectionClass::Stream => 2,
            ConnectionClass::Check | ConnectionClass::Authorization => 1,
        }
    }
}
