//! Spans as OTLP has them.

use std::borrow::Cow;

use bytes::Bytes;
use prost::Message as _;

use crate::opentelemetry::any_value::Value as AnyOf;
use crate::opentelemetry::span::{Link, SpanKind as Kind};
use crate::opentelemetry::status::StatusCode;
use crate::opentelemetry::{
    self as otlp, AnyValue, ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource,
    ResourceSpans, ScopeSpans,
};
use crate::telemetry::trace::{Span, SpanContext, SpanKind, Value};

/// Recorded (W3C).
const SAMPLED: u32 = 1;

/// One request with `spans`.
pub(super) fn request(resource: &[(String, String)], spans: Vec<Span>) -> Bytes {
    let attributes = resource
        .iter()
        .map(|(name, value)| attribute(name, Value::Text(Cow::Owned(value.clone()))));
    let request = ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource {
                attributes: attributes.collect(),
            }),
            scope_spans: vec![ScopeSpans {
                scope: Some(InstrumentationScope {
                    name: "rangecache".to_owned(),
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                }),
                spans: spans.into_iter().map(encoded).collect(),
                schema_url: String::new(),
            }],
            schema_url: String::new(),
        }],
    };
    request.encode_to_vec().into()
}

fn encoded(span: Span) -> otlp::Span {
    let (trace_id, span_id) = ids(span.context);
    let kind = match span.kind {
        SpanKind::Internal => Kind::Internal,
        SpanKind::Server => Kind::Server,
        SpanKind::Client => Kind::Client,
    };
    let link = |context: &SpanContext| {
        let (trace_id, span_id) = ids(*context);
        Link {
            trace_id,
            span_id,
            flags: SAMPLED,
        }
    };
    otlp::Span {
        trace_id,
        span_id,
        trace_state: span.trace_state.unwrap_or_default(),
        parent_span_id: span.parent.map_or_else(Bytes::new, |parent| {
            Bytes::copy_from_slice(&parent.0.to_be_bytes())
        }),
        name: span.name.into_owned(),
        kind: kind.into(),
        start_time_unix_nano: span.started_unix_nanos,
        end_time_unix_nano: span.ended_unix_nanos,
        links: span.links.iter().map(link).collect(),
        attributes: span
            .attributes
            .into_iter()
            .map(|(name, value)| attribute(name, value))
            .collect(),
        status: span.error.map(|message| otlp::Status {
            message: message.into_owned(),
            code: StatusCode::Error.into(),
        }),
        flags: SAMPLED,
    }
}

fn ids(context: SpanContext) -> (Bytes, Bytes) {
    (
        Bytes::copy_from_slice(&context.trace_id.0.to_be_bytes()),
        Bytes::copy_from_slice(&context.span_id.0.to_be_bytes()),
    )
}

fn attribute(name: &str, value: Value) -> KeyValue {
    let value = match value {
        Value::Text(text) => AnyOf::StringValue(text.into_owned()),
        Value::Number(number) => AnyOf::IntValue(number),
        Value::Bool(yes) => AnyOf::BoolValue(yes),
    };
    KeyValue {
        key: name.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
    }
}
