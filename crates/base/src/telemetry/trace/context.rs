//! New span contexts, and the header `traceparent` (W3C Trace Context).

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use opentelemetry::{Context, propagation::TextMapPropagator as _};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{IdGenerator as _, RandomIdGenerator};

/// Header with the trace and the span that a call belongs to.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
/// Longest `tracestate` that spans keep, in bytes: as much as the specification asks for. A longer one is forwarded
/// with its call and otherwise ignored.
const MAX_TRACESTATE_BYTES: usize = 512;

/// Length of `traceparent` in version 0: `00-`, 32 digits, `-`, 16 digits, `-`, 2 digits.
const LENGTH: usize = 55;

/// A random trace id.
pub(super) fn new_trace_id() -> TraceId {
    RandomIdGenerator::default().new_trace_id()
}

/// Context of a sampled span of the trace `trace_id`.
pub(super) fn sampled(trace_id: TraceId, state: TraceState) -> SpanContext {
    let span_id = RandomIdGenerator::default().new_span_id();
    SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, state)
}

/// Context of the first span of a new trace, sampled.
#[must_use]
pub fn root_context() -> SpanContext {
    sampled(new_trace_id(), TraceState::NONE)
}

/// Context of a new span in the trace of `parent`, sampled.
#[must_use]
pub fn child_context(parent: &SpanContext) -> SpanContext {
    sampled(parent.trace_id(), parent.trace_state().clone())
}

/// Value of the header `traceparent` for a call that is a part of the sampled span `context`.
#[must_use]
pub fn traceparent(context: &SpanContext) -> HeaderValue {
    let text = format!("00-{}-{}-01", context.trace_id(), context.span_id());
    // Hexadecimal digits and dashes are always valid.
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""))
}

/// The caller's span; `None` if the headers name none, or an invalid one.
pub(super) fn extract(headers: &HeaderMap) -> Option<Context> {
    let extractor = HeaderExtractor(headers);
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &extractor);
    if !context.has_active_span() {
        return None;
    }
    let states = headers.get_all(TRACESTATE).iter();
    if states.map(HeaderValue::len).sum::<usize>() <= MAX_TRACESTATE_BYTES {
        return Some(context);
    }
    let caller = context.span().span_context().clone();
    let (trace_id, span_id, flags) = (caller.trace_id(), caller.span_id(), caller.trace_flags());
    let caller = SpanContext::new(trace_id, span_id, flags, true, TraceState::NONE);
    Some(Context::new().with_remote_span_context(caller))
}

/// The trace id in a `traceparent`, whose other parts may be invalid.
pub(super) fn trace_id(value: &[u8]) -> Option<TraceId> {
    let digits = std::str::from_utf8(value.get(3..35)?).ok()?;
    TraceId::from_hex(digits).ok()
}

/// The trace that a call with these headers belongs to.
#[must_use]
pub fn trace_id_of(headers: &HeaderMap) -> Option<TraceId> {
    let trace_id = trace_id(headers.get(TRACEPARENT)?.as_bytes())?;
    (trace_id != TraceId::INVALID).then_some(trace_id)
}

/// Whether a `traceparent` of the usual length says that the caller's trace is not sampled: checks its last digit
/// alone.
pub(super) fn is_unsampled(value: &[u8]) -> bool {
    value.len() == LENGTH
        && matches!(
            value[LENGTH - 1],
            b'0' | b'2' | b'4' | b'6' | b'8' | b'a' | b'c' | b'e'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn parent(text: &str) -> Option<SpanContext> {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_str(text).unwrap());
        headers.insert("tracestate", HeaderValue::from_static("vendor=kept"));
        Some(extract(&headers)?.span().span_context().clone())
    }

    #[test]
    fn header_of_a_caller_is_understood_and_written_alike() {
        let text = format!("00-{TRACE}-00f067aa0ba902b7-01");
        let sampled = parent(&text).unwrap();
        assert!(sampled.is_sampled() && sampled.is_remote());
        assert_eq!(traceparent(&sampled), text);
        assert_eq!(sampled.trace_state().header(), "vendor=kept");
        let later = parent(&format!("01-{TRACE}-00f067aa0ba902b7-02-more")).unwrap();
        assert!(!later.is_sampled());
        assert_eq!(later.trace_id(), sampled.trace_id());
    }

    #[test]
    fn oversized_tracestate_is_ignored() {
        for (bytes, is_kept) in [(500, true), (501, false), (60_000, false)] {
            let mut headers = HeaderMap::new();
            let traceparent = HeaderValue::from_str(&format!("00-{TRACE}-00f067aa0ba902b7-01")).unwrap();
            headers.insert(TRACEPARENT, traceparent);
            // In several headers, which count together.
            headers.append(TRACESTATE, HeaderValue::from_static("vendor=kept,"));
            let rest = format!("v={}", "x".repeat(bytes - 2));
            headers.append(TRACESTATE, HeaderValue::from_str(&rest).unwrap());
            let caller = extract(&headers).unwrap().span().span_context().clone();
            assert!(caller.is_sampled() && caller.is_remote());
            assert_eq!(traceparent_of(&caller), TRACE);
            assert_eq!(!caller.trace_state().header().is_empty(), is_kept, "{bytes}");
        }
    }

    fn traceparent_of(caller: &SpanContext) -> String {
        caller.trace_id().to_string()
    }

    #[test]
    fn invalid_header_names_no_caller() {
        for text in [
            "",
            "00",
            &format!("ff-{TRACE}-00f067aa0ba902b7-01"),
            &format!("00-{TRACE}-00f067aa0ba902b7-01-more"),
            &format!("01-{TRACE}-00f067aa0ba902b7-01more"),
            &format!("00-{}-00f067aa0ba902b7-01", TRACE.to_uppercase()),
            &format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            &format!("00-{TRACE}-0000000000000000-01"),
            &format!("00-{TRACE}-00f067aa0ba902b7-0x"),
            &format!("00-{TRACE}_00f067aa0ba902b7-01"),
        ] {
            assert!(parent(text).is_none(), "{text}");
        }
    }

    #[test]
    fn unsampled_callers_are_recognized_by_the_last_digit() {
        for (flags, expected) in [("00", true), ("02", true), ("01", false), ("0x", false)] {
            let text = format!("00-{TRACE}-00f067aa0ba902b7-{flags}");
            assert_eq!(is_unsampled(text.as_bytes()), expected, "{flags}");
        }
        assert!(!is_unsampled(b"0"));
    }

    #[test]
    fn contexts_are_new_and_children_stay_in_the_trace() {
        let root = root_context();
        let (a, b) = (child_context(&root), child_context(&root));
        assert_eq!(a.trace_id(), root.trace_id());
        assert!(a.span_id() != b.span_id() && a.span_id() != root.span_id());
        assert!(root_context().trace_id() != root.trace_id() && a.is_sampled());
    }
}
