//! Body of a Watch stream's response, whichever source serves it.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use etcd_store::cache::Rope;
use http_body::Frame;
use rangecache_base::telemetry::metrics;
use rangecache_edge::limits::Deadline;
use rangecache_upstream::BoxError;

use super::{
    downstream::Downstream, memory::Session, receive::Requests, request::Create, start::Answer,
    stream::StreamContext, stream_bytes::StreamBytes,
};
use crate::response::{BodySource, FrameBytes, Polled};

impl Session {
    /// A stream whose first request, in `requests`, is `create`, with this `answer`.
    pub(super) fn begin(
        stream: StreamContext,
        mut requests: Requests,
        bytes: StreamBytes,
        deadline: Deadline,
        create: Create,
        answer: Answer,
    ) -> Session {
        requests.consume();
        let mut session = Session::new(Downstream::new(stream, requests, bytes, deadline));
        // Memory may serve the stream once the reason has passed.
        session.answered(create, answer, true);
        if let Some(leave) = session.leave.take() {
            let history = session.down.mirrors().cluster_state.current();
            session.down.handle_first(leave.create);
            session.open_etcd(leave.reason, history);
        }
        session
    }

    /// Next frame of the stream, whichever source has it.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Polled {
        loop {
            if let Some(frame) = self.next_frame(cx) {
                return Poll::Ready(Some(frame));
            }
            let polled = match self.etcd {
                Some(_) => self.poll_etcd(cx),
                None => self.poll_memory(cx),
            };
            ready!(polled);
            if let Some(leave) = self.leave.take() {
                self.leave_memory(leave);
            }
        }
    }

    /// Next frame of what the sources have produced, or the end.
    fn next_frame(&mut self, cx: &mut Context<'_>) -> Option<Result<Frame<Rope>, BoxError>> {
        let data = self.next_piece().or_else(|| self.down.control.pop_front());
        if let Some(data) = data {
            return Some(Ok(Frame::data(data)));
        }
        let is_in_message = self.etcd.as_ref().is_some_and(|etcd| etcd.is_in_message());
        if self.down.end.is_none() && !is_in_message {
            let status = self.down.poll_end(cx).or_else(|| self.ended_by_etcd());
            self.down.end = status.map(|status| Ok(status.trailers()));
        }
        let end = self.down.end.take()?;
        self.has_ended = true;
        Some(end.map(Frame::trailers))
    }
}

impl BodySource for Session {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        if self.has_ended {
            return Poll::Ready(None);
        }
        // What arrives during the poll wakes the stream again (W17).
        let signal = Arc::clone(&self.down.stream.signal);
        signal.look(cx, |cx| self.poll_next(cx))
    }

    fn may_be_idle(&self) -> bool {
        true
    }

    fn may_stay_unread(&self) -> bool {
        self.etcd.is_none()
    }

    fn frame_bytes(&mut self) -> FrameBytes {
        match self.etcd {
            Some(_) => FrameBytes::Connection,
            None => self.down.bytes.frame_bytes(),
        }
    }

    fn unread_bytes(&self) -> u64 {
        self.down.bytes.unread()
    }

    fn request_bytes(&self) -> u64 {
        self.down.stream.head_bytes()
    }

    fn source(&self) -> Option<metrics::Source> {
        Some(match self.etcd {
            Some(_) => metrics::Source::Etcd,
            None => metrics::Source::Memory,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use bytes::Bytes;
    use etcd_wire::etcdserverpb::{WatchCreateRequest, watch_request::RequestUnion};
    use etcd_wire::grpc::Status;

    use super::super::testing::{downstream, message};
    use super::*;
    use crate::testing::Scene;

    #[tokio::test]
    async fn end_of_the_process_comes_before_the_requests_of_the_client() {
        let scene = Scene::new(&[]);
        let create = message(RequestUnion::CreateRequest(WatchCreateRequest {
            key: Bytes::from_static(b"/registry/a"),
            ..WatchCreateRequest::default()
        }));
        let mut session = Session::new(downstream(&scene, &[], create));
        scene.drain.cancel();
        let mut cx = Context::from_waker(Waker::noop());
        let Poll::Ready(Some(Ok(frame))) = session.poll_frame(&mut cx) else {
            panic!("no end");
        };
        let trailers = frame.into_trailers().unwrap();
        assert_eq!(
            trailers["grpc-message"],
            Status::StoppingReconnect.to_string().as_str()
        );
        assert!(matches!(session.poll_frame(&mut cx), Poll::Ready(None)));
    }
}
