//! A Watch stream as the text of etcd's JSON gateway: one object for each message, one line each.

use std::task::{Context, Poll};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::HeaderMap;
use http_body::Frame;
use prost::Message as _;

use crate::cache::{JsonFields, JsonLayout, Rope};
use crate::etcdserverpb::{Event, WatchResponse};
use crate::grpc::frame::{PREFIX_BYTES, Prefix};
use crate::grpc::status;
use crate::proxy::gateway::stream_error;
use crate::proxy::response::{BodySource, FrameBytes, Polled};
use crate::proxy::watch::session::Session;

/// The gateway removes white space from the lines of a stream, whatever the build of etcd.
const LAYOUT: JsonLayout = JsonLayout::Compact;
/// etcd's number of deletes.
const DELETE: i32 = 1;

/// A KeyValue, as far as the text shows it: all of it.
#[derive(Clone, PartialEq, prost::Message)]
struct KeyValue {
    #[prost(bytes = "bytes", tag = "1")]
    key: Bytes,
    #[prost(int64, tag = "2")]
    create_revision: i64,
    #[prost(int64, tag = "3")]
    mod_revision: i64,
    #[prost(int64, tag = "4")]
    version: i64,
    #[prost(bytes = "bytes", tag = "5")]
    value: Bytes,
    #[prost(int64, tag = "6")]
    lease: i64,
}

/// Produces the text of a session.
#[derive(Debug)]
pub(super) struct JsonStream {
    session: Session,
    /// Whether errors have the form of etcd 3.6 and later.
    is_protojson: bool,
    /// Begin of a message whose rest the session has not produced.
    partial: BytesMut,
    /// What the bytes of `partial` count against.
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
            match WatchResponse::decode(message) {
                Ok(response) => write_response(&response, &mut out),
                Err(_) => self.has_ended = true,
            }
        }
        out
    }

    /// What etcd's gateway writes at the end of a call with these trailers.
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
}

fn write_response(response: &WatchResponse, out: &mut String) {
    out.push_str("{\"result\":{");
    let mut fields = JsonFields::new(out, LAYOUT);
    if let Some(header) = &response.header {
        let out = fields.name("header");
        out.push('{');
        let mut fields = JsonFields::new(out, LAYOUT);
        fields.number("cluster_id", header.cluster_id);
        fields.number("member_id", header.member_id);
        fields.number("revision", header.revision);
        fields.number("raft_term", header.raft_term);
        out.push('}');
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
            out.push_str(if index == 0 { "[" } else { LAYOUT.comma() });
            write_event(event, out);
        }
        out.push(']');
    }
    out.push_str("}}\n");
}

fn write_event(event: &Event, out: &mut String) {
    out.push('{');
    let mut fields = JsonFields::new(out, LAYOUT);
    if event.r#type == DELETE {
        fields.name("type").push_str("\"DELETE\"");
    }
    for (name, key_value) in [("kv", &event.kv), ("prev_kv", &event.prev_kv)] {
        if !key_value.is_empty()
            && let Ok(key_value) = KeyValue::decode(key_value.clone())
        {
            write_key_value(&key_value, fields.name(name));
        }
    }
    out.push('}');
}

fn write_key_value(key_value: &KeyValue, out: &mut String) {
    out.push('{');
    let mut fields = JsonFields::new(out, LAYOUT);
    fields.bytes("key", &key_value.key);
    fields.number("create_revision", key_value.create_revision);
    fields.number("mod_revision", key_value.mod_revision);
    fields.number("version", key_value.version);
    fields.bytes("value", &key_value.value);
    fields.number("lease", key_value.lease);
    out.push('}');
}
