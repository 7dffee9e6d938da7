//! Attributes, children and errors of spans.

use std::{borrow::Cow, time::SystemTime};

use opentelemetry::trace::{Link, SpanContext, SpanId, SpanKind, Status};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::context::child_context;
use crate::net::{Address, Url};

/// Operations on spans that rangecache needs and the library lacks.
pub trait SpanExt {
    /// Sets an attribute. One of that name is replaced: OpenTelemetry permits no second one.
    fn set(&mut self, name: &'static str, value: impl Into<Value>);
    /// Adds an attribute that counts keys or bytes.
    fn set_count(&mut self, name: &'static str, count: u64);
    /// Adds the address of the endpoint that the span's call went to.
    fn set_endpoint(&mut self, endpoint: &Url);
    /// Marks the span as failed.
    fn fail(&mut self, reason: impl Into<Cow<'static, str>>);
    /// Links the span to a span of another trace that it waited for.
    fn link(&mut self, context: SpanContext);
    /// A span below this one, which starts at `start_time`.
    #[must_use]
    fn child(&self, name: &'static str, start_time: SystemTime) -> SpanData;
}

impl SpanExt for SpanData {
    fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        let attribute = KeyValue::new(name, value);
        let mut present = self.attributes.iter_mut();
        match present.find(|present| present.key == attribute.key) {
            Some(present) => *present = attribute,
            None => self.attributes.push(attribute),
        }
    }

    fn set_count(&mut self, name: &'static str, count: u64) {
        self.set(name, i64::try_from(count).unwrap_or(i64::MAX));
    }

    fn set_endpoint(&mut self, endpoint: &Url) {
        match &endpoint.address {
            Address::Tcp { host, port } => {
                self.set("server.address", host.clone());
                self.set("server.port", i64::from(*port));
            }
            Address::Unix(path) => self.set("server.address", path.display().to_string()),
        }
    }

    fn fail(&mut self, reason: impl Into<Cow<'static, str>>) {
        self.status = Status::error(reason);
    }

    fn link(&mut self, context: SpanContext) {
        self.links.links.push(Link::with_context(context));
    }

    fn child(&self, name: &'static str, start_time: SystemTime) -> SpanData {
        SpanData {
            parent_span_id: self.span_context.span_id(),
            ..begun(name, child_context(&self.span_context), start_time)
        }
    }
}

/// Version of the semantic conventions that names of attributes follow.
const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/1.39.0";

/// A span without a parent that has begun at `start_time`.
pub(super) fn begun(name: &'static str, span_context: SpanContext, start_time: SystemTime) -> SpanData {
    SpanData {
        span_context,
        parent_span_id: SpanId::INVALID,
        parent_span_is_remote: false,
        span_kind: SpanKind::Internal,
        name: Cow::Borrowed(name),
        start_time,
        end_time: start_time,
        attributes: Vec::new(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: InstrumentationScope::builder("rangecache")
            .with_version(env!("CARGO_PKG_VERSION"))
            .with_schema_url(SCHEMA_URL)
            .build(),
    }
}

/// OpenTelemetry's name of a gRPC status code.
#[must_use]
pub fn status_code(code: u16) -> &'static str {
    const NAMES: [&str; 17] = [
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    ];
    NAMES.get(usize::from(code)).copied().unwrap_or("UNKNOWN")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attribute_that_is_set_again_has_the_later_value_alone() {
        let mut span = begun("call", SpanContext::NONE, SystemTime::UNIX_EPOCH);
        span.set("outcome", "hit");
        span.set("reason", "none");
        span.set("outcome", "shed");
        let expected = [KeyValue::new("outcome", "shed"), KeyValue::new("reason", "none")];
        assert_eq!(span.attributes, expected);
    }
}
