//! Traces: spans, who they are, which calls have them. They leave by [`otlp`](crate::otlp).
//!
//! A call that is not sampled costs a look at one header, and where tracing is off nothing. Whoever records a span never
//! waits: a queue that is full drops it, and the drop is counted.

pub mod context;
pub mod sampler;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::net::{Address, Url};
pub use context::{SpanContext, SpanId, TRACEPARENT, TRACESTATE, TraceId};
pub use sampler::{Ratio, Sampled, Sampler};

/// Whose work a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// A phase.
    Internal,
    /// A call of a client's.
    Server,
    /// A call to etcd.
    Client,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Text.
    Text(Cow<'static, str>),
    /// A number.
    Number(i64),
    /// Yes or no.
    Bool(bool),
}

impl From<&'static str> for Value {
    fn from(text: &'static str) -> Value {
        Value::Text(Cow::Borrowed(text))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(Cow::Owned(text))
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Value {
        Value::Number(number)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Value {
        Value::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<bool> for Value {
    fn from(yes: bool) -> Value {
        Value::Bool(yes)
    }
}

/// One span, whole or on its way there. No key and no value of etcd's ever comes here (I10).
#[derive(Clone, Debug)]
pub struct Span {
    /// Itself.
    pub context: SpanContext,
    /// The span that it is a part of.
    pub parent: Option<SpanId>,
    /// The caller's `tracestate`, as it came.
    pub trace_state: Option<String>,
    /// What is done.
    pub name: Cow<'static, str>,
    /// Whose work it is.
    pub kind: SpanKind,
    /// In nanoseconds since 1970.
    pub started_unix_nanos: u64,
    /// The same.
    pub ended_unix_nanos: u64,
    /// Facts.
    pub attributes: Vec<(&'static str, Value)>,
    /// Spans of other traces that it waited for.
    pub links: Vec<SpanContext>,
    /// What went wrong.
    pub error: Option<Cow<'static, str>>,
}

impl Span {
    /// Adds a fact.
    pub fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        self.attributes.push((name, value.into()));
    }

    /// Says where the call that it is about went.
    pub fn set_endpoint(&mut self, endpoint: &Url) {
        match &endpoint.address {
            Address::Tcp { host, port } => {
                self.set("server.address", host.clone());
                self.set("server.port", i64::from(*port));
            }
            Address::Unix(path) => self.set("server.address", path.display().to_string()),
        }
    }

    /// A part of it.
    #[must_use]
    pub fn child(&self, name: &'static str, started_unix_nanos: u64) -> Span {
        Span {
            parent: Some(self.context.span_id),
            trace_state: self.trace_state.clone(),
            ..begun(name, self.context.child(), started_unix_nanos)
        }
    }
}

/// Wall-clock time of moments that were read off the other clock, so that a span's ends are as far apart as they were.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    moment: Instant,
    unix_nanos: u64,
}

impl Clock {
    /// As of now.
    #[must_use]
    pub fn new() -> Clock {
        Clock {
            moment: Instant::now(),
            unix_nanos: unix_nanos(),
        }
    }

    /// In nanoseconds since 1970.
    #[must_use]
    pub fn at(&self, moment: Instant) -> u64 {
        let nanos = |duration: std::time::Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let before = nanos(self.moment.saturating_duration_since(moment));
        let after = nanos(moment.saturating_duration_since(self.moment));
        self.unix_nanos.saturating_sub(before).saturating_add(after)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

/// gRPC's code as OpenTelemetry has it.
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

/// Now, in nanoseconds since 1970.
#[must_use]
pub fn unix_nanos() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// Begins spans and takes them when they have ended. The default one traces nothing.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<Arc<Tracing>>);

#[derive(Debug)]
struct Tracing {
    sampler: Sampler,
    queue: mpsc::Sender<Span>,
    dropped: Counter,
}

impl Tracer {
    /// Spans of sampled traces go to `queue`; those for which it has no room count as `dropped`.
    #[must_use]
    pub fn new(sampler: Sampler, queue: mpsc::Sender<Span>, dropped: Counter) -> Tracer {
        Tracer(Some(Arc::new(Tracing {
            sampler,
            queue,
            dropped,
        })))
    }

    /// The span of the call with these headers, if it is traced.
    #[inline]
    #[must_use]
    pub fn server(&self, headers: &HeaderMap) -> Option<Box<Span>> {
        let sampled = self.0.as_ref()?.sampler.sample(headers)?;
        Some(Box::new(server(sampled, headers)))
    }

    /// A span of rangecache's own, in a trace of its own, if that is taken.
    #[must_use]
    pub fn background(&self, name: &'static str) -> Option<Box<Span>> {
        let trace_id = self.0.as_ref()?.sampler.sample_root()?;
        let span_id = SpanId::new();
        Some(Box::new(own(name, SpanContext { trace_id, span_id })))
    }

    /// A span of rangecache's own that others link to, and that therefore is recorded.
    #[must_use]
    pub fn linked(&self, name: &'static str, context: SpanContext) -> Option<Box<Span>> {
        self.0.is_some().then(|| Box::new(own(name, context)))
    }

    /// Takes a span that has ended now.
    pub fn end(&self, mut span: Span) {
        span.ended_unix_nanos = unix_nanos().max(span.started_unix_nanos);
        self.take(span);
    }

    /// Takes a span whose end is set.
    pub fn take(&self, span: Span) {
        if let Some(tracing) = &self.0
            && tracing.queue.try_send(span).is_err()
        {
            tracing.dropped.inc();
        }
    }
}

#[cold]
fn server(sampled: Sampled, headers: &HeaderMap) -> Span {
    let trace_state = headers.get(&TRACESTATE).and_then(|value| value.to_str().ok());
    Span {
        parent: sampled.parent.map(|parent| parent.context.span_id),
        trace_state: trace_state.map(str::to_owned),
        kind: SpanKind::Server,
        ..own(
            "",
            SpanContext {
                trace_id: sampled.trace_id,
                span_id: SpanId::new(),
            },
        )
    }
}

/// One that begins now.
fn own(name: &'static str, context: SpanContext) -> Span {
    begun(name, context, unix_nanos())
}

/// One of nobody's, of which no more is known than that it has begun.
fn begun(name: &'static str, context: SpanContext, started_unix_nanos: u64) -> Span {
    Span {
        context,
        parent: None,
        trace_state: None,
        name: Cow::Borrowed(name),
        kind: SpanKind::Internal,
        started_unix_nanos,
        ended_unix_nanos: started_unix_nanos,
        attributes: Vec::new(),
        links: Vec::new(),
        error: None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_full_queue_drops_and_counts() {
        let (queue, mut spans) = mpsc::channel(2);
        let dropped = Counter::default();
        let sampler = Sampler {
            is_parent_based: true,
            root: Ratio::All,
        };
        let tracer = Tracer::new(sampler, queue, dropped.clone());
        for _ in 0..5 {
            let span = tracer.server(&HeaderMap::new()).unwrap();
            tracer.end(*span);
        }
        assert_eq!(dropped.get(), 3);
        assert!(spans.try_recv().is_ok());
        assert!(Tracer::default().server(&HeaderMap::new()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn moments_are_as_far_apart_as_they_were() {
        let before = Instant::now();
        tokio::time::advance(Duration::from_millis(5)).await;
        let clock = Clock::new();
        tokio::time::advance(Duration::from_millis(7)).await;
        assert_eq!(clock.at(Instant::now()) - clock.at(before), 12_000_000);
    }
}
