//! Traces: which calls are sampled, their spans, and the queue to the exporter in [`otlp`](crate::otlp).
//!
//! Contexts, spans and samplers are OpenTelemetry's own types. An unsampled call costs one lookup of one header, and
//! nothing if tracing is off. Recording a span never waits: if the queue is full, the span is dropped and counted.
//! Spans name neither keys nor values (I10).
//!
//! | file | contents |
//! |---|---|
//! | `context` | new span contexts, and the header `traceparent` |
//! | `span` | [`SpanExt`]: attributes, children and errors of a span |
//! | `tracer` | [`Tracer`]: sampling and the queue |

mod context;
mod span;
mod tracer;

pub use opentelemetry::trace::{SpanContext, SpanId, SpanKind, TraceId};
pub use opentelemetry_sdk::trace::{Sampler, SpanData as Span};

pub use crate::unix_time::Clock;
pub use context::{TRACEPARENT, child_context, root_context, trace_id_of, traceparent};
pub use span::{SpanExt, status_code};
pub use tracer::Tracer;
