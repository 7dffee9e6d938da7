//! Receive windows.

use lean_h2::STREAM_WINDOW_BYTES;

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
