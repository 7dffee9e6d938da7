//! Spans as the library has them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::{self as otel, Link, Status, TraceFlags, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, StringValue};
use opentelemetry_sdk::trace::{SpanData, SpanLinks};

use crate::telemetry::trace::{Span, SpanContext, SpanKind, Value};

/// Who recorded the spans.
pub(super) fn scope() -> InstrumentationScope {
    InstrumentationScope::builder("rangecache")
        .with_version(env!("CARGO_PKG_VERSION"))
        .build()
}

/// `span`, recorded by `scope`.
pub(super) fn span_data(span: Span, scope: InstrumentationScope) -> SpanData {
    let mut links = SpanLinks::default();
    links.links = span
        .links
        .iter()
        .map(|linked| Link::new(context(*linked, TraceState::NONE), Vec::new(), 0))
        .collect();
    // One that the library does not take is none.
    let state = span.trace_state.and_then(|state| state.parse().ok());
    SpanData {
        span_context: context(span.context, state.unwrap_or(TraceState::NONE)),
        parent_span_is_remote: span.kind == SpanKind::Server && span.parent.is_some(),
        parent_span_id: span
            .parent
            .map_or(otel::SpanId::INVALID, |parent| otel::SpanId::from(parent.0)),
        span_kind: match span.kind {
            SpanKind::Internal => otel::SpanKind::Internal,
            SpanKind::Server => otel::SpanKind::Server,
            SpanKind::Client => otel::SpanKind::Client,
        },
        name: span.name,
        start_time: time(span.started_unix_nanos),
        end_time: time(span.ended_unix_nanos),
        attributes: span
            .attributes
            .into_iter()
            .map(|(name, value)| attribute(name, value))
            .collect(),
        dropped_attributes_count: 0,
        events: Default::default(),
        links,
        status: span.error.map_or(Status::Unset, Status::error),
        instrumentation_scope: scope,
    }
}

fn context(of: SpanContext, state: TraceState) -> otel::SpanContext {
    let (trace_id, span_id) = (of.trace_id.0.into(), of.span_id.0.into());
    otel::SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, state)
}

fn time(unix_nanos: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(unix_nanos)
}

fn attribute(name: &'static str, value: Value) -> KeyValue {
    match value {
        Value::Text(text) => KeyValue::new(name, StringValue::from(text)),
        Value::Number(number) => KeyValue::new(name, number),
        Value::Bool(yes) => KeyValue::new(name, yes),
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;
    use crate::telemetry::trace::{SpanId, TraceId};

    #[test]
    fn a_span_keeps_what_it_has() {
        let context = SpanContext {
            trace_id: TraceId(0x1234_0000_0000_0000_5678),
            span_id: SpanId(9),
        };
        let other = SpanContext {
            trace_id: TraceId(7),
            span_id: SpanId(8),
        };
        let span = Span {
            context,
            parent: Some(SpanId(5)),
            trace_state: Some("vendor=kept".to_owned()),
            name: Cow::Borrowed("call"),
            kind: SpanKind::Server,
            started_unix_nanos: 1_700_000_000_000_000_001,
            ended_unix_nanos: 1_700_000_000_000_000_042,
            attributes: vec![("yes", true.into()), ("many", 3_u64.into()), ("text", "t".into())],
            links: vec![other],
            error: Some("gone".into()),
        };
        let data = span_data(span.clone(), scope());
        assert_eq!(
            data.span_context.trace_id().to_string(),
            context.trace_id.to_string()
        );
        assert_eq!(data.span_context.span_id().to_string(), "0000000000000009");
        assert!(data.span_context.is_sampled() && data.parent_span_is_remote);
        assert_eq!(data.span_context.trace_state().header(), "vendor=kept");
        assert_eq!(data.parent_span_id.to_string(), "0000000000000005");
        let took = data.end_time.duration_since(data.start_time).unwrap();
        assert_eq!(took, Duration::from_nanos(41));
        assert_eq!(
            data.attributes,
            [
                KeyValue::new("yes", true),
                KeyValue::new("many", 3),
                KeyValue::new("text", "t")
            ]
        );
        let linked: Vec<_> = data
            .links
            .iter()
            .map(|link| link.span_context.span_id().to_string())
            .collect();
        assert_eq!(linked, ["0000000000000008"]);
        assert_eq!(data.status, Status::error("gone"));

        let root = Span {
            parent: None,
            trace_state: Some("no state".to_owned()),
            error: None,
            ..span
        };
        let data = span_data(root, scope());
        assert_eq!(data.parent_span_id, otel::SpanId::INVALID);
        assert!(!data.parent_span_is_remote && data.span_context.trace_state().header().is_empty());
        assert_eq!(data.status, Status::Unset);
    }
}
