//! Body of a Watch stream's response, whichever source serves it.

use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::Instant;

use super::downstream::Downstream;
use super::etcd::EtcdEnd;
use super::handover::{ServedBy, begin_at_etcd, cancel_handed_over, hand_over, leave, return_to_memory};
use super::memory::MemorySource;
use super::plan::NotServed;
use super::receive::Requests;
use super::request::Create;
use super::start::Answer;
use super::stream::StreamContext;
use super::stream_bytes::StreamBytes;
use crate::proxy::response::{BodySource, FrameBytes, Polled};
use rangecache_base::telemetry::metrics;

/// Watch stream with the source that serves it.
#[derive(Debug)]
pub(super) struct Session {
    down: Downstream,
    /// `None` only while one source is made from another.
    source: Option<ServedBy>,
    has_ended: bool,
}

impl Session {
    /// A stream whose first request, in `requests`, is `create`, with this `answer`. The request stays there if etcd serves the
    /// stream: memory may once the reason has passed.
    pub(super) fn begin(
        stream: StreamContext,
        mut requests: Requests,
        bytes: StreamBytes,
        arrived: Instant,
        create: Create,
        answer: Answer,
    ) -> Session {
        let at_etcd = match answer {
            Err(NotServed::Etcd(reason)) => Some(reason),
            _ => {
                requests.consume();
                None
            }
        };
        let mut down = Downstream::new(stream, requests, bytes, arrived);
        let source = match at_etcd {
            Some(reason) => begin_at_etcd(&mut down, reason),
            None => {
                let mut memory = MemorySource::new(&down);
                memory.answer(&mut down, create, answer);
                ServedBy::Memory(Box::new(memory))
            }
        };
        Session {
            down,
            source: Some(source),
            has_ended: false,
        }
    }
}

impl Session {
    /// Next frame of the stream, whichever source has it.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Polled {
        let down = &mut self.down;
        // A handover takes the source by value; there is none only meanwhile.
        while let Some(source) = self.source.take() {
            let next = match source {
                ServedBy::Memory(mut memory) => match memory.poll(down, None, cx) {
                    Ok(polled) => return self.polled(ServedBy::Memory(memory), polled),
                    Err(why) => leave(memory, why, down),
                },
                ServedBy::Leaving(mut memory, mut pending) => match memory.poll(down, Some(&mut pending), cx)
                {
                    Ok(polled) => return self.polled(ServedBy::Leaving(memory, pending), polled),
                    Err(why) => hand_over(memory, why.or(pending.leave), down),
                },
                ServedBy::Etcd(mut etcd) => match etcd.poll(down, cx) {
                    Ok(polled) => return self.polled(ServedBy::Etcd(etcd), polled),
                    Err(EtcdEnd::Joined(revision, joined)) => return_to_memory(etcd, revision, joined, down),
                    Err(EtcdEnd::Replaced) => cancel_handed_over(etcd, down),
                },
            };
            self.source = Some(next);
        }
        Poll::Ready(None)
    }

    /// Puts back the source, which has what was `polled`.
    fn polled(&mut self, source: ServedBy, polled: Polled) -> Polled {
        self.source = Some(source);
        self.has_ended = match &polled {
            Poll::Pending => false,
            Poll::Ready(Some(Ok(frame))) => frame.is_trailers(),
            Poll::Ready(Some(Err(_)) | None) => true,
        };
        polled
    }

    fn is_at_etcd(&self) -> bool {
        matches!(self.source, Some(ServedBy::Etcd(_)))
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
        !self.is_at_etcd()
    }

    fn frame_bytes(&mut self) -> FrameBytes {
        match self.is_at_etcd() {
            true => FrameBytes::Connection,
            false => self.down.bytes.frame_bytes(),
        }
    }

    fn unread_bytes(&self) -> u64 {
        self.down.bytes.unread()
    }

    fn request_bytes(&self) -> u64 {
        self.down.stream.head_bytes()
    }

    fn source(&self) -> Option<metrics::Source> {
        Some(match self.is_at_etcd() {
            true => metrics::Source::Etcd,
            false => metrics::Source::Memory,
        })
    }
}
