//! Metrics of clients' calls: by method, status and what answered them.
//!
//! Series are resolved before they are needed, or once: a call looks up no labels and allocates nothing.

use std::{array, sync::OnceLock, time::Duration};

use super::group::{Counter, Gauge, unsigned};
use super::methods::{CallMethod, Class, LatencyClass, METHOD_COUNT};
use super::{By, Latency, LatencyCounts, MetricGroup, Registrar, metric_group};

/// gRPC's codes, by number, under the names that etcd's own metrics use.
const CODES: [&str; 17] = [
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];

/// A gRPC code, by which a call is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(u8);

impl Code {
    /// Success.
    pub const OK: Code = Code(0);
    /// The client left before there was a status.
    pub const CANCELED: Code = Code(1);
    /// The client's timeout expired before there was a status.
    pub const DEADLINE_EXCEEDED: Code = Code(4);
    /// The response had no status, or etcd reset its stream.
    pub const UNKNOWN: Code = Code(2);

    /// The code with this number; [`Code::UNKNOWN`] for one that gRPC does not have.
    #[must_use]
    pub fn of(number: u16) -> Code {
        let known = u8::try_from(number)
            .ok()
            .filter(|number| usize::from(*number) < CODES.len());
        known.map_or(Code::UNKNOWN, Code)
    }
}

/// Calls that ended with one code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeCounts {
    /// The code under etcd's name.
    pub code: &'static str,
    by_source: [u64; Source::ALL.len()],
}

impl CodeCounts {
    /// Calls that `from` answered.
    #[must_use]
    pub fn of(&self, from: Source) -> u64 {
        self.by_source[from as usize]
    }

    /// All calls with the code.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_source.iter().sum()
    }

    /// Counts that were added since `before`.
    #[must_use]
    pub fn since(mut self, before: Option<&CodeCounts>) -> CodeCounts {
        if let Some(before) = before {
            for (count, before) in self.by_source.iter_mut().zip(before.by_source) {
                *count = count.saturating_sub(before);
            }
        }
        self
    }

    /// Adds `more` of the same code.
    pub fn add(&mut self, more: &CodeCounts) {
        for (count, more) in self.by_source.iter_mut().zip(more.by_source) {
            *count += more;
        }
    }
}

/// Source of a call's response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Memory.
    Memory,
    /// etcd.
    Etcd,
    /// Nothing: etcd could not be reached, the connection to it was lost, or the client's timeout expired before its response.
    Failed,
    /// rangecache itself, with an error.
    Refused,
    /// Nothing: the client left before.
    Nothing,
}

impl Source {
    const ALL: [Source; 5] = [
        Source::Memory,
        Source::Etcd,
        Source::Failed,
        Source::Refused,
        Source::Nothing,
    ];

    fn label(self) -> &'static str {
        match self {
            Source::Memory => "memory",
            Source::Etcd => "etcd",
            Source::Failed => "failed",
            Source::Refused => "refused",
            Source::Nothing => "none",
        }
    }
}

metric_group! {
    /// Series of clients' calls.
    struct CallFamilies {
        /// gRPC calls that have ended, by `grpc_service`, `grpc_method`, `grpc_code` and `from`, what
        /// answered them: `memory`, `etcd`, `failed`, `refused`, `none`
        ///
        /// Names are etcd's own; methods that rangecache does not know are `other`. `failed`: etcd could not
        /// be reached, the connection to it was lost or the client's timeout expired first; `refused`: an error of rangecache itself; `none`: the
        /// client left before. A stream counts when it ends, by what served it last; `Unknown` without a
        /// status
        ///
        /// Useful when: errors grow, whatever the method
        calls[grpc_service, grpc_method, grpc_code, from]: Counter = "rangecache_calls_total";
        /// Time from the arrival of a gRPC call to the end of its response, by `class` (`get`: Range of one key, `list`:
        /// Range of several, `stream`: RangeStream, `write`: the rest of KV, `other`) and `from`
        ///
        /// Without streams, locks and elections, which last as long as clients like
        ///
        /// Useful when: clients are slow, and rangecache or etcd may be the cause
        durations[class, from]: Latency = "rangecache_call_duration_seconds";
        /// Calls of clients in flight by `class`: `read`, `write`, `watch`, `lease_keep_alive`, `other`
        ///
        /// `watch` are open Watch streams, `lease_keep_alive` open streams of LeaseKeepAlive; JSON and HTTP/1
        /// are `other`
        ///
        /// Useful when: near `rangecache_limit{limit="max_calls"}`
        in_flight[class]: Gauge = "rangecache_calls_in_flight";
        /// Bytes of responses to clients by `from`: `memory`, `etcd`, `failed`, `refused`
        ///
        /// As in `rangecache_calls_total`
        ///
        /// Useful when: bandwidth is short
        sent_bytes[from]: Counter = "rangecache_sent_bytes_total";
        /// Bytes received on connections of clients, frames and headers included
        ///
        /// What answers them is not known yet
        ///
        /// Useful when: bandwidth is short
        received_bytes: Counter = "rangecache_received_bytes_total";
    }
}

/// Counters of one method by code and source, each resolved when it is first needed.
type OfMethod = [[OnceLock<Counter>; Source::ALL.len()]; CODES.len()];

/// Clients' calls by method, status and what answered them.
#[derive(Debug)]
pub struct CallMetrics {
    calls: By<4, Counter>,
    /// The counters of `calls` by method.
    resolved: Box<[OfMethod]>,
    durations: [[Latency; Source::ALL.len()]; LatencyClass::ALL.len()],
    in_flight: [Gauge; Class::ALL.len()],
    sent_bytes: [Counter; Source::ALL.len()],
    received_bytes: Counter,
}

impl Default for CallMetrics {
    /// Metrics that nothing exports.
    fn default() -> CallMetrics {
        CallMetrics::register(&mut Registrar::default())
    }
}

impl MetricGroup for CallMetrics {
    fn register(registrar: &mut Registrar) -> CallMetrics {
        let families = CallFamilies::register(registrar);
        let duration = |class: LatencyClass, from: Source| match from {
            // Without a series: nothing is recorded in it.
            Source::Nothing => Latency::default(),
            _ => families.durations.handle((class.label(), from.label())),
        };
        CallMetrics {
            resolved: (0..METHOD_COUNT).map(|_| OfMethod::default()).collect(),
            durations: array::from_fn(|class| {
                array::from_fn(|from| duration(LatencyClass::ALL[class], Source::ALL[from]))
            }),
            in_flight: Class::ALL.map(|class| families.in_flight.handle(class.label())),
            sent_bytes: Source::ALL.map(|from| match from {
                Source::Nothing => Counter::default(),
                _ => families.sent_bytes.handle(from.label()),
            }),
            received_bytes: families.received_bytes,
            calls: families.calls,
        }
    }
}

impl CallMetrics {
    fn counter(&self, method: CallMethod, code: Code, from: Source) -> Option<&Counter> {
        let resolve = || {
            let (_, grpc_service, grpc_method) =
                CallMethod::all().find(|(of, ..)| of.index == method.index)?;
            let code = CODES.get(usize::from(code.0))?;
            Some(self.calls.handle([grpc_service, grpc_method, code, from.label()]))
        };
        let of_method = self.resolved.get(method.index)?;
        let place = of_method.get(usize::from(code.0))?.get(from as usize)?;
        if place.get().is_none() {
            let _ = place.set(resolve()?);
        }
        place.get()
    }

    /// Counts a gRPC call that has ended; `is_range` if it is a Range of several keys.
    pub fn record(&self, method: CallMethod, code: Code, from: Source, took: Duration, is_range: bool) {
        if let Some(counter) = self.counter(method, code, from) {
            counter.inc();
        }
        let class = match method.latency {
            Some(LatencyClass::Get) if is_range => Some(LatencyClass::List),
            class => class,
        };
        if let Some(class) = class
            && from != Source::Nothing
        {
            self.durations[class as usize][from as usize].observe(took);
        }
    }

    /// Counts bytes of a response to a client.
    pub fn record_sent(&self, from: Source, bytes: u64) {
        self.sent_bytes[from as usize].inc_by(bytes);
    }

    /// Counts bytes received from a client.
    pub fn record_received(&self, bytes: u64) {
        self.received_bytes.inc_by(bytes);
    }

    /// Counts a call of this method as begun; `None` if it is not a gRPC call.
    pub fn begin(&self, method: Option<CallMethod>) {
        self.in_flight_of(method).inc();
    }

    /// Counts a call of this method as ended.
    pub fn end(&self, method: Option<CallMethod>) {
        self.in_flight_of(method).dec();
    }

    /// Calls that have ended, by code and what answered them; codes without calls are left out.
    #[must_use]
    pub fn by_code(&self) -> Vec<CodeCounts> {
        let mut counts = CODES.map(|code| CodeCounts {
            code,
            by_source: [0; Source::ALL.len()],
        });
        for of_method in &self.resolved {
            for (counts, of_code) in counts.iter_mut().zip(of_method) {
                for (count, counter) in counts.by_source.iter_mut().zip(of_code) {
                    *count += counter.get().map_or(0, Counter::get);
                }
            }
        }
        counts.into_iter().filter(|counts| counts.total() > 0).collect()
    }

    /// Time that Ranges and `RangeStream`s took, the JSON gateway's excepted, that `from` answered.
    #[must_use]
    pub fn read_latency(&self, from: Source) -> LatencyCounts {
        let mut counts = LatencyCounts::default();
        for class in [LatencyClass::Get, LatencyClass::List, LatencyClass::Stream] {
            counts.add(&self.durations[class as usize][from as usize].counts());
        }
        counts
    }

    /// Open Watch streams, the JSON gateway's excepted.
    #[must_use]
    pub fn open_watches(&self) -> u64 {
        unsigned(self.in_flight[Class::Watch as usize].get())
    }

    fn in_flight_of(&self, method: Option<CallMethod>) -> &Gauge {
        let class = method.map_or(Class::Other, |method| method.class);
        &self.in_flight[class as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{Metrics, exposition::Format};

    #[test]
    fn every_counter_has_a_place_of_its_own() {
        let metrics = CallMetrics::default();
        for (method, ..) in CallMethod::all() {
            for code in 0..=u16::try_from(CODES.len()).unwrap() {
                for from in Source::ALL {
                    metrics.record(method, Code::of(code), from, Duration::ZERO, false);
                }
            }
        }
        for (method, ..) in CallMethod::all() {
            for code in 0..u16::try_from(CODES.len()).unwrap() {
                for from in Source::ALL {
                    // A code that gRPC does not have counts as unknown.
                    let times = if code == 2 { 2 } else { 1 };
                    assert_eq!(
                        metrics.counter(method, Code::of(code), from).unwrap().get(),
                        times
                    );
                }
            }
        }
        let by_code = metrics.by_code();
        assert_eq!(by_code.len(), CODES.len());
        for (number, counts) in by_code.iter().enumerate() {
            let times = if number == 2 { 2 } else { 1 };
            for from in Source::ALL {
                assert_eq!(counts.of(from), times * METHOD_COUNT as u64, "{counts:?}");
            }
        }
    }

    #[test]
    fn calls_are_read_back_by_code_and_source() {
        let metrics = CallMetrics::default();
        assert_eq!(metrics.by_code(), [], "series at zero are no calls");
        let range = CallMethod::of_path("/etcdserverpb.KV/Range");
        metrics.record(range, Code::OK, Source::Memory, Duration::from_millis(1), false);
        metrics.record(range, Code::OK, Source::Etcd, Duration::from_millis(9), true);
        metrics.record(
            CallMethod::of_path("/x/y"),
            Code::of(14),
            Source::Refused,
            Duration::ZERO,
            false,
        );
        let counts = metrics.by_code();
        let shown = |counts: &CodeCounts| (counts.code, Source::ALL.map(|from| counts.of(from)));
        assert_eq!(
            counts.iter().map(shown).collect::<Vec<_>>(),
            [("OK", [1, 1, 0, 0, 0]), ("Unavailable", [0, 0, 0, 1, 0])]
        );
        let added = counts[0].since(Some(&counts[0]));
        assert_eq!(added.total(), 0);
        let median = |from| metrics.read_latency(from).quantile(0.5).unwrap();
        assert!(median(Source::Memory) < median(Source::Etcd));
    }

    #[test]
    fn calls_have_series_once_they_are_made_and_endless_ones_have_no_latency() {
        let metrics = Metrics::new();
        let calls = &metrics.calls;
        for (path, took, is_range) in [
            ("/etcdserverpb.KV/Range", 3, false),
            ("/etcdserverpb.KV/Range", 4, true),
            ("/etcdserverpb.KV/RangeStream", 4, true),
            ("/etcdserverpb.Watch/Watch", 5, false),
            ("/v3lockpb.Lock/Lock", 5, false),
        ] {
            calls.record(
                CallMethod::of_path(path),
                Code::OK,
                Source::Etcd,
                Duration::from_millis(took),
                is_range,
            );
        }
        let text = metrics.encode(Format::Text);
        let call = |service: &str, method: &str, code: &str, from: &str| {
            format!(
                "rangecache_calls_total{{grpc_service=\"{service}\",grpc_method=\"{method}\",\
                 grpc_code=\"{code}\",from=\"{from}\"}}"
            )
        };
        for line in [
            call("etcdserverpb.KV", "Range", "OK", "etcd") + " 2",
            "rangecache_call_duration_seconds_count{class=\"get\",from=\"etcd\"} 1".to_owned(),
            "rangecache_call_duration_seconds_count{class=\"list\",from=\"etcd\"} 1".to_owned(),
            "rangecache_call_duration_seconds_count{class=\"stream\",from=\"etcd\"} 1".to_owned(),
            "rangecache_sent_bytes_total{from=\"memory\"} 0".to_owned(),
            "rangecache_calls_in_flight{class=\"lease_keep_alive\"} 0".to_owned(),
        ] {
            assert!(text.contains(&line), "{line} not in\n{text}");
        }
        for nothing in [
            "_count{class=\"watch\"",
            "_count{class=\"write\"",
            "grpc_method=\"Txn\"",
            "grpc_code=\"Unavailable\"",
        ] {
            assert!(!text.contains(nothing), "{nothing} in\n{text}");
        }
    }
}
