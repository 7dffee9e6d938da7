//! Sampling, and the queue of ended spans.

use std::{sync::Arc, time::SystemTime};

use arc_swap::ArcSwap;
use http::HeaderMap;
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanKind, TraceContextExt as _, TraceId, TraceState};
use opentelemetry_sdk::trace::{Sampler, SamplingDecision, ShouldSample as _, SpanData};
use tokio::sync::mpsc;

use super::context::{TRACEPARENT, extract, is_unsampled, new_trace_id, sampled, trace_id};
use super::span::begun;
use crate::telemetry::metrics::Counter;

/// Begins spans, and queues them when they have ended. The default one traces nothing.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<Arc<Tracing>>);

#[derive(Debug)]
struct Tracing {
    /// Sampler that OpenTelemetry's variables configure.
    configured: Sampler,
    sampler: ArcSwap<Sampler>,
    propagates: bool,
    queue: mpsc::Sender<SpanData>,
    dropped: Counter,
}

impl Tracer {
    /// A tracer whose spans go to `queue`; spans that find it full are counted as `dropped`. With `propagates`, they
    /// continue the traces of callers.
    #[must_use]
    pub fn new(
        sampler: Sampler,
        propagates: bool,
        queue: mpsc::Sender<SpanData>,
        dropped: Counter,
    ) -> Tracer {
        Tracer(Some(Arc::new(Tracing {
            sampler: ArcSwap::from_pointee(sampler.clone()),
            configured: sampler,
            propagates,
            queue,
            dropped,
        })))
    }

    /// Samples this share of the traces that begin here from now on, and calls as their callers do; without a share, as
    /// the sampler of the start does.
    pub fn set_share(&self, share: Option<f64>) {
        if let Some(tracing) = &self.0 {
            let root = share.map(Sampler::TraceIdRatioBased);
            let sampler = root.map(|root| Sampler::ParentBased(Box::new(root)));
            let sampler = sampler.unwrap_or_else(|| tracing.configured.clone());
            tracing.sampler.store(Arc::new(sampler));
        }
    }

    /// The span of the call with these headers, if it is sampled.
    #[inline]
    #[must_use]
    pub fn server(&self, headers: &HeaderMap) -> Option<Box<SpanData>> {
        self.0.as_ref()?.server(headers)
    }

    /// Whether calls to etcd name the span that they belong to.
    #[must_use]
    pub fn propagates(&self) -> bool {
        self.0.as_ref().is_some_and(|tracing| tracing.propagates)
    }

    /// A span of a background task in a trace of its own, if that is sampled.
    #[must_use]
    pub fn background(&self, name: &'static str) -> Option<Box<SpanData>> {
        let trace_id = new_trace_id();
        let is_sampled = self.0.as_ref()?.is_sampled(None, trace_id);
        is_sampled.then(|| own(name, sampled(trace_id, TraceState::NONE)))
    }

    /// A span that sampled spans link to; recorded whatever the sampler decides.
    #[must_use]
    pub fn linked(&self, name: &'static str, context: SpanContext) -> Option<Box<SpanData>> {
        self.0.is_some().then(|| own(name, context))
    }

    /// Queues a span that ends now.
    pub fn end(&self, mut span: SpanData) {
        span.end_time = SystemTime::now().max(span.start_time);
        self.queue(span);
    }

    /// Queues a span whose end is set.
    pub fn queue(&self, span: SpanData) {
        if let Some(tracing) = &self.0
            && tracing.queue.try_send(span).is_err()
        {
            tracing.dropped.inc();
        }
    }
}

impl Tracing {
    fn server(&self, headers: &HeaderMap) -> Option<Box<SpanData>> {
        let Some(header) = headers.get(&TRACEPARENT).filter(|_| self.propagates) else {
            let trace_id = new_trace_id();
            let is_sampled = self.is_sampled(None, trace_id);
            return is_sampled.then(|| server(trace_id, None));
        };
        // Most calls are not sampled, which can be seen without parsing the whole header; whether the rest is valid
        // does not matter then.
        let is_sampled = match &**self.sampler.load() {
            Sampler::ParentBased(_) => !is_unsampled(header.as_bytes()),
            _ => trace_id(header.as_bytes()).is_none_or(|trace_id| self.is_sampled(None, trace_id)),
        };
        if is_sampled { self.continued(headers) } else { None }
    }

    /// The span of a call whose caller may have a sampled span.
    #[cold]
    fn continued(&self, headers: &HeaderMap) -> Option<Box<SpanData>> {
        let parent = extract(headers);
        let trace_id = parent
            .as_ref()
            .map_or_else(new_trace_id, |parent| parent.span().span_context().trace_id());
        let is_sampled = self.is_sampled(parent.as_ref(), trace_id);
        is_sampled.then(|| server(trace_id, parent.as_ref()))
    }

    fn is_sampled(&self, parent: Option<&Context>, trace_id: TraceId) -> bool {
        let sampler = self.sampler.load();
        let result = sampler.should_sample(parent, trace_id, "", &SpanKind::Server, &[], &[]);
        result.decision == SamplingDecision::RecordAndSample
    }
}

/// The span of a call, below its caller's span.
#[cold]
fn server(trace_id: TraceId, parent: Option<&Context>) -> Box<SpanData> {
    let mut span = own("", SpanContext::NONE);
    span.span_kind = SpanKind::Server;
    let mut state = TraceState::NONE;
    if let Some(parent) = parent {
        let active = parent.span();
        let caller = active.span_context();
        span.parent_span_id = caller.span_id();
        span.parent_span_is_remote = true;
        state = caller.trace_state().clone();
    }
    span.span_context = sampled(trace_id, state);
    span
}

/// A span that begins now.
fn own(name: &'static str, context: SpanContext) -> Box<SpanData> {
    Box::new(begun(name, context, SystemTime::now()))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use opentelemetry::trace::SpanId;

    use super::*;

    fn tracer(sampler: Sampler) -> Tracer {
        Tracer::new(sampler, true, mpsc::channel(1).0, Counter::default())
    }

    fn parent_based(root: Sampler) -> Sampler {
        Sampler::ParentBased(Box::new(root))
    }

    fn begin(tracer: &Tracer, flags: Option<&str>) -> Option<Box<SpanData>> {
        let mut headers = HeaderMap::new();
        if let Some(flags) = flags {
            let text = format!("00-4bf92f3577b34da67fffffffffffffff-00f067aa0ba902b7-{flags}");
            headers.insert(TRACEPARENT, HeaderValue::from_str(&text).unwrap());
            headers.insert("tracestate", HeaderValue::from_static("vendor=kept"));
        }
        tracer.server(&headers)
    }

    #[test]
    fn parent_based_sampler_follows_the_caller() {
        for root in [
            Sampler::AlwaysOff,
            Sampler::TraceIdRatioBased(0.1),
            Sampler::AlwaysOn,
        ] {
            let tracer = tracer(parent_based(root));
            assert!(begin(&tracer, Some("01")).is_some());
            assert!(begin(&tracer, Some("00")).is_none());
        }
    }

    #[test]
    fn other_samplers_decide_by_the_trace_id() {
        for (root, expected) in [
            (Sampler::AlwaysOff, false),
            (Sampler::AlwaysOn, true),
            // The low half of the id is just below a half of all.
            (Sampler::TraceIdRatioBased(0.49), false),
            (Sampler::TraceIdRatioBased(0.51), true),
        ] {
            let tracer = tracer(root.clone());
            assert_eq!(begin(&tracer, Some("00")).is_some(), expected, "{root:?}");
            assert_eq!(begin(&tracer, Some("01")).is_some(), expected, "{root:?}");
        }
    }

    #[test]
    fn share_takes_the_place_of_the_sampler_until_it_is_removed() {
        let tracer = tracer(Sampler::AlwaysOff);
        let taken = || [None, Some("01"), Some("00")].map(|flags| begin(&tracer, flags).is_some());
        assert_eq!(taken(), [false; 3]);
        tracer.set_share(Some(1.0));
        assert_eq!(taken(), [true, true, false]);
        tracer.set_share(Some(0.0));
        assert_eq!(taken(), [false, true, false]);
        tracer.set_share(None);
        assert_eq!(taken(), [false; 3]);
        Tracer::default().set_share(Some(1.0));
    }

    #[test]
    fn new_traces_are_sampled_at_the_ratio() {
        let count = |ratio| {
            let tracer = tracer(parent_based(Sampler::TraceIdRatioBased(ratio)));
            (0..10_000).filter(|_| begin(&tracer, None).is_some()).count()
        };
        assert_eq!((count(0.0), count(1.0)), (0, 10_000));
        let tenth = count(0.1);
        assert!((700..1300).contains(&tenth), "{tenth}");
    }

    #[test]
    fn span_of_a_call_is_below_the_span_of_its_caller() {
        let tracer = tracer(parent_based(Sampler::AlwaysOn));
        let span = begin(&tracer, Some("01")).unwrap();
        assert_eq!(
            span.span_context.trace_id().to_string(),
            "4bf92f3577b34da67fffffffffffffff"
        );
        assert_eq!(span.parent_span_id.to_string(), "00f067aa0ba902b7");
        assert_eq!(span.span_context.trace_state().header(), "vendor=kept");
        assert!(span.parent_span_is_remote && span.span_context.is_sampled());
        assert!(span.span_context.span_id() != span.parent_span_id);
        let root = begin(&tracer, None).unwrap();
        assert_eq!(root.parent_span_id, SpanId::INVALID);
        assert!(!root.parent_span_is_remote && root.span_context.is_valid());
        // A sampled flag in an invalid header begins a new trace.
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_static("nonsense"));
        let own = tracer.server(&headers).unwrap();
        assert_eq!(own.parent_span_id, SpanId::INVALID);
    }

    #[tokio::test]
    async fn spans_that_find_the_queue_full_are_dropped_and_counted() {
        let (queue, mut spans) = mpsc::channel(2);
        let dropped = Counter::default();
        let tracer = Tracer::new(Sampler::AlwaysOn, true, queue, dropped.clone());
        for _ in 0..5 {
            let span = tracer.server(&HeaderMap::new()).unwrap();
            tracer.end(*span);
        }
        assert_eq!(dropped.get(), 3);
        assert!(spans.try_recv().is_ok());
        assert!(Tracer::default().server(&HeaderMap::new()).is_none());
    }
}
