//! A Watch stream as the text of etcd's JSON gateway: one object for each message, one line each.

use std::task::{Context, Poll};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use etcd_store::cache::{Entry, JsonFields, Rope};
use etcd_wire::etcdserverpb::{Event, WatchResponse};
use etcd_wire::grpc::frame::{PREFIX_BYTES, Prefix};
use etcd_wire::grpc::status;
use http::HeaderMap;
use http_body::Frame;
use prost::Message as _;
use rangecache_base::telemetry::metrics::Source;

use crate::response::{BodySource, FrameBytes, Polled};
use crate::{gateway::stream_error, watch::memory::Session};

/// etcd's number of deletes.
const DELETE: i32 = 1;

/// Produces the text of a session.
#[derive(Debug)]
pub(super) struct JsonStream {
    session: Session,
    /// Whether errors have the form of etcd 3.6 and later.
    is_protojson: bool,
    /// Begin of a message whose rest the session has not produced.
    partial: BytesMut,
    /// Budgets against which the bytes of `partial` count.
    held: Vec<FrameBytes>,
    has_ended: bool,
}

impl JsonStream {
    pub(super) fn new(session: Session, is_protojson: bool) -> JsonStream {
        JsonStream {
            session,
            is_protojson,
            partial: BytesMut::new(),
            held: Vec::new(),
            has_ended: false,
        }
    }

    /// Takes the next frame of the session; returns the text of the messages that are complete with it, if any is.
    fn take(&mut self, frame: Frame<Rope>) -> Option<String> {
        match frame.into_data() {
            Ok(data) => {
                self.partial.put(data);
                self.held.push(self.session.frame_bytes());
                let text = self.complete();
                if self.partial.is_empty() {
                    (self.partial, self.held) = (BytesMut::new(), Vec::new());
                }
                Some(text).filter(|text| !text.is_empty())
            }
            Err(frame) => {
                self.has_ended = true;
                let trailers = frame.into_trailers().unwrap_or_default();
                self.last_line(&trailers)
            }
        }
    }

    /// Text of all messages that are complete; the others stay in `partial`.
    fn complete(&mut self) -> String {
        let mut out = String::new();
        while let Some(prefix) = Prefix::parse(&self.partial) {
            let length = PREFIX_BYTES + prefix.length_bytes as usize;
            if self.partial.len() < length {
                break;
            }
            let mut message = self.partial.split_to(length).freeze();
            message.advance(PREFIX_BYTES);
            // The session and etcd send no other message; an unreadable one ends the stream, so that none is missed.
            if write_message(message, &mut out).is_none() {
                self.has_ended = true;
            }
        }
        out
    }

    /// Last line of etcd's gateway for a call with these trailers; `None` if they are OK.
    fn last_line(&self, trailers: &HeaderMap) -> Option<String> {
        if status::is_ok(trailers) {
            return None;
        }
        Some(stream_error(trailers, self.is_protojson))
    }
}

impl BodySource for JsonStream {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        while !self.has_ended {
            match std::task::ready!(self.session.poll_frame(cx)) {
                None => self.has_ended = true,
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => {
                    if let Some(text) = self.take(frame) {
                        return Poll::Ready(Some(Ok(Frame::data(Bytes::from(text).into()))));
                    }
                }
            }
        }
        Poll::Ready(None)
    }

    fn may_be_idle(&self) -> bool {
        self.session.may_be_idle()
    }

    fn may_stay_unread(&self) -> bool {
        self.session.may_stay_unread()
    }

    fn unread_bytes(&self) -> u64 {
        self.session.unread_bytes()
    }

    fn request_bytes(&self) -> u64 {
        self.session.request_bytes()
    }

    fn source(&self) -> Option<Source> {
        self.session.source()
    }
}

/// Appends the line of a WatchResponse; `None` if it cannot be read.
fn write_message(message: Bytes, out: &mut String) -> Option<()> {
    let response = WatchResponse::decode(message).ok()?;
    let mut line = String::from("{\"result\":{");
    let mut fields = JsonFields::new(&mut line);
    if let Some(header) = response.header {
        fields.header(&header.into());
    }
    fields.number("watch_id", response.watch_id);
    fields.flag("created", response.created);
    fields.flag("canceled", response.canceled);
    fields.number("compact_revision", response.compact_revision);
    if !response.cancel_reason.is_empty() {
        let reason = serde_json::Value::from(response.cancel_reason.as_str());
        fields.name("cancel_reason").push_str(&reason.to_string());
    }
    fields.flag("fragment", response.fragment);
    if !response.events.is_empty() {
        let out = fields.name("events");
        for (index, event) in response.events.iter().enumerate() {
            out.push_str(if index == 0 { "[" } else { "," });
            write_event(event, out)?;
        }
        out.push(']');
    }
    line.push_str("}}\n");
    out.push_str(&line);
    Some(())
}

fn write_event(event: &Event, out: &mut String) -> Option<()> {
    out.push('{');
    let mut fields = JsonFields::new(out);
    if event.r#type == DELETE {
        fields.name("type").push_str("\"DELETE\"");
    }
    for (name, key_value) in [("kv", &event.kv), ("prev_kv", &event.prev_kv)] {
        if !key_value.is_empty() {
            fields.entry(name, &Entry::from_key_value(key_value).ok()?);
        }
    }
    out.push('}');
    Some(())
}
