//! [`BodySource`]: produces the frames of one response.

use std::fmt;
use std::task::{Context, Poll};

use etcd_store::cache::Rope;
use http_body::{Frame, SizeHint};
use rangecache_base::{net::Url, telemetry::metrics::Source};
use rangecache_edge::limits::HeldBytes;
use rangecache_mirror::HeldView;
use rangecache_upstream::BoxError;

/// Result of polling a body for its next frame.
pub(super) type Polled = Poll<Option<Result<Frame<Rope>, BoxError>>>;

/// Budget against which the bytes of a frame count until they are written to the client's connection.
#[derive(Debug)]
pub(super) enum FrameBytes {
    /// The buffers of the connection.
    Connection,
    /// A budget of the source's own; `None` if the frame is so short that the call itself covers it.
    Own(Option<Box<HeldBytes>>),
}

/// Produces the frames of one response.
pub(super) trait BodySource: fmt::Debug + Send {
    /// Returns the next frame, like [`Body::poll_frame`](http_body::Body::poll_frame).
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled;

    /// Whether all frames have been returned. `false` is always allowed.
    fn is_end_stream(&self) -> bool {
        false
    }

    /// Length of the remaining data, if known: HTTP/1 then sends it as content-length.
    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }

    /// URL of the endpoint, for a response that is forwarded.
    fn endpoint(&self) -> Option<&Url> {
        None
    }

    /// View of a mirror that the response keeps.
    fn held_view(&self) -> Option<&HeldView> {
        None
    }

    /// Whether there may be nothing to send for a long time. Such a source is polled before it is given up as unread:
    /// a watch without events is not unread.
    fn may_be_idle(&self) -> bool {
        false
    }

    /// Whether the client may leave the response unread without a time limit: its source keeps a position, not what is
    /// unread.
    fn may_stay_unread(&self) -> bool {
        false
    }

    /// Takes what the bytes of the last frame count against.
    fn frame_bytes(&mut self) -> FrameBytes {
        FrameBytes::Connection
    }

    /// Bytes in a budget of the source's own that are released only when the client reads.
    fn unread_bytes(&self) -> u64 {
        0
    }

    /// Memory of the client's request that the source keeps, in bytes.
    fn request_bytes(&self) -> u64 {
        0
    }

    /// Current source of the frames of a stream whose source may change; `None` for every other response.
    fn source(&self) -> Option<Source> {
        None
    }
}
