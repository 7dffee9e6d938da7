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
