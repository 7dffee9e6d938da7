//! Who a span is, within this process and in the header `traceparent` (W3C Trace Context).

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};

use http::{HeaderName, HeaderValue};

/// The header that says which trace a call belongs to.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// The header with what vendors add to it, passed on untouched.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// `00-`, 32 digits, `-`, 16 digits, `-`, 2 digits.
const LENGTH: usize = 55;

/// A trace. Never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceId(pub u128);

/// A span of it. Never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanId(pub u64);

/// A span, anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanContext {
    /// Its trace.
    pub trace_id: TraceId,
    /// Itself.
    pub span_id: SpanId,
}

/// What a caller says of its own span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The span.
    pub context: SpanContext,
    /// Whether it is recorded.
    pub is_sampled: bool,
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl SpanId {
    /// One that nobody has.
    #[must_use]
    pub fn new() -> SpanId {
        SpanId(random().max(1))
    }
}

impl Default for SpanId {
    fn default() -> Self {
        Self::new()
    }
}

impl TraceId {
    /// One that nobody has, whose low half, by which it was sampled, is `low`.
    #[must_use]
    pub fn with_low(low: u64) -> TraceId {
        TraceId((u128::from(random().max(1)) << 64) | u128::from(low))
    }

    /// The half by which a trace is sampled.
    #[must_use]
    pub fn low(self) -> u64 {
        #[allow(clippy::cast_possible_truncation, reason = "the low half")]
        let low = self.0 as u64;
        low
    }
}

impl SpanContext {
    /// The first span of a trace of its own.
    #[must_use]
    pub fn root() -> SpanContext {
        SpanContext {
            trace_id: TraceId::with_low(random()),
            span_id: SpanId::new(),
        }
    }

    /// A further span of the same trace.
    #[must_use]
    pub fn child(self) -> SpanContext {
        SpanContext {
            span_id: SpanId::new(),
            ..self
        }
    }

    /// The header that says so, sampled.
    #[must_use]
    pub fn traceparent(self) -> HeaderValue {
        let text = format!("00-{}-{:016x}-01", self.trace_id, self.span_id.0);
        // Digits alone: it cannot be refused.
        HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""))
    }
}

/// A number that nobody can guess the next of, from std's hasher: its keys come from the system.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

impl Parent {
    /// What a `traceparent` says; `None` if it is not understood: then the trace begins here.
    #[must_use]
    pub fn of(value: &[u8]) -> Option<Parent> {
        // A later version may be longer, and begins like this one.
        let is_known = value.len() == LENGTH || (value.len() > LENGTH && value[LENGTH] == b'-');
        if !is_known || value[2] != b'-' || value[35] != b'-' || value[52] != b'-' {
            return None;
        }
        let version = digits(&value[..2])?;
        if version == 0xff || (version == 0 && value.len() != LENGTH) {
            return None;
        }
        let context = SpanContext {
            trace_id: TraceId(digits(&value[3..35])?),
            span_id: SpanId(u64::try_from(digits(&value[36..52])?).ok()?),
        };
        if context.trace_id.0 == 0 || context.span_id.0 == 0 {
            return None;
        }
        Some(Parent {
            context,
            is_sampled: digits(&value[53..LENGTH])? & 1 == 1,
        })
    }
}

/// Whether a `traceparent` of the usual length says that nothing is recorded, by a look at its last digit.
pub(super) fn says_unsampled(value: &[u8]) -> bool {
    value.len() == LENGTH
        && matches!(
            value[LENGTH - 1],
            b'0' | b'2' | b'4' | b'6' | b'8' | b'a' | b'c' | b'e'
        )
}

/// Lower-case hexadecimal.
fn digits(text: &[u8]) -> Option<u128> {
    text.iter().try_fold(0_u128, |value, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some((value << 4) | u128::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn parent_of(text: &str) -> Option<Parent> {
        Parent::of(text.as_bytes())
    }

    #[test]
    fn a_caller_says_which_trace_it_is() {
        let sampled = parent_of(&format!("00-{TRACE}-00f067aa0ba902b7-01")).unwrap();
        assert!(sampled.is_sampled);
        assert_eq!(sampled.context.trace_id.to_string(), TRACE);
        assert_eq!(sampled.context.span_id, SpanId(0x00f0_67aa_0ba9_02b7));
        assert_eq!(
            sampled.context.traceparent(),
            format!("00-{TRACE}-00f067aa0ba902b7-01")
        );
        let later = parent_of(&format!("01-{TRACE}-00f067aa0ba902b7-02-more")).unwrap();
        assert!(!later.is_sampled);
        assert_eq!(later.context, sampled.context);
    }

    #[test]
    fn what_is_not_understood_begins_a_trace_here() {
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
            assert_eq!(parent_of(text), None, "{text}");
        }
    }

    #[test]
    fn spans_are_new() {
        let root = SpanContext::root();
        let (a, b) = (root.child(), root.child());
        assert_eq!(a.trace_id, root.trace_id);
        assert!(a != b && a != root && SpanContext::root().trace_id != root.trace_id);
    }
}
