//! Classes of connections.

/// Which connections a call may use. Calls of different classes never share a connection, so that a long response or a
/// slow reader of one class does not delay another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectionClass {
    /// Short unary calls.
    Unary,
    /// Streams, and responses of any length.
    Stream,
    /// Quorum checks and probes.
    Check,
}

impl ConnectionClass {
    /// Every class.
    pub(super) const ALL: [ConnectionClass; 3] = [
        ConnectionClass::Unary,
        ConnectionClass::Stream,
        ConnectionClass::Check,
    ];

    /// Connections that are kept open per endpoint.
    pub(super) const fn connections(self) -> usize {
        match self {
            ConnectionClass::Unary | ConnectionClass::Stream => 2,
            ConnectionClass::Check => 1,
        }
    }
}
