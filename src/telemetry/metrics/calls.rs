//! Metrics of clients' calls: by method, status and what answered them.
//!
//! Series are resolved before they are needed, or once: a call looks up no labels and allocates nothing.

use std::array;
use std::sync::OnceLock;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::latency::Latency;
use super::register::{register, register_unit};

/// Methods with series of their own: etcd's, and gRPC's health service. The frequent ones are found first.
const METHODS: [(&str, &[&str]); 9] = [
    (
        "etcdserverpb.KV",
        &["Range", "RangeStream", "Txn", "Put", "DeleteRange", "Compact"],
    ),
    ("etcdserverpb.Watch", &["Watch"]),
    (
        "etcdserverpb.Lease",
        &[
            "LeaseKeepAlive",
            "LeaseGrant",
            "LeaseRevoke",
            "LeaseTimeToLive",
            "LeaseLeases",
        ],
    ),
    (
        "etcdserverpb.Maintenance",
        &[
            "Status",
            "Alarm",
            "Defragment",
            "Hash",
            "HashKV",
            "Snapshot",
            "MoveLeader",
            "Downgrade",
        ],
    ),
    (
        "etcdserverpb.Cluster",
        &[
            "MemberList",
            "MemberAdd",
            "MemberRemove",
            "MemberUpdate",
            "MemberPromote",
        ],
    ),
    (
        "etcdserverpb.Auth",
        &[
            "Authenticate",
            "AuthEnable",
            "AuthDisable",
            "AuthStatus",
            "UserAdd",
            "UserGet",
            "UserList",
            "UserDelete",
            "UserChangePassword",
            "UserGrantRole",
            "UserRevokeRole",
            "RoleAdd",
            "RoleGet",
            "RoleList",
            "RoleDelete",
            "RoleGrantPermission",
            "RoleRevokePermission",
        ],
    ),
    ("v3lockpb.Lock", &["Lock", "Unlock"]),
    (
        "v3electionpb.Election",
        &["Campaign", "Proclaim", "Leader", "Observe", "Resign"],
    ),
    ("grpc.health.v1.Health", &["Check", "Watch", "List"]),
];

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
/// Codes whose series begin at zero for the services that every client uses: those of failures that alerts look for.
const EXPECTED_CODES: [Code; 3] = [Code(4), Code::RESOURCE_EXHAUSTED, Code(14)];
const EXPECTED_SERVICES: [&str; 3] = ["etcdserverpb.KV", "etcdserverpb.Watch", "etcdserverpb.Lease"];

/// A gRPC code, by which a call is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(u8);

impl Code {
    /// Success.
    pub const OK: Code = Code(0);
    /// The client left before there was a status.
    pub const CANCELED: Code = Code(1);
    /// The response had no status, or etcd reset its stream.
    pub const UNKNOWN: Code = Code(2);
    /// A bound was reached.
    pub const RESOURCE_EXHAUSTED: Code = Code(8);

    /// The code with this number; [`Code::UNKNOWN`] for one that gRPC does not have.
    #[must_use]
    pub fn of(number: u16) -> Code {
        let known = u8::try_from(number)
            .ok()
            .filter(|number| usize::from(*number) < CODES.len());
        known.map_or(Code::UNKNOWN, Code)
    }
}

/// What answered a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Memory.
    Memory,
    /// etcd, or it would have if an endpoint could be reached.
    Etcd,
    /// rangecache itself, with an error.
    Refused,
    /// Nothing: the client left before.
    Nothing,
}

impl Source {
    const ALL: [Source; 4] = [Source::Memory, Source::Etcd, Source::Refused, Source::Nothing];

    fn label(self) -> &'static str {
        match self {
            Source::Memory => "memory",
            Source::Etcd => "etcd",
            Source::Refused => "refused",
            Source::Nothing => "none",
        }
    }
}

/// Kind of a call, by what it costs and how long it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Read,
    Write,
    Watch,
    KeepAlive,
    Other,
}

impl Class {
    const ALL: [Class; 5] = [
        Class::Read,
        Class::Write,
        Class::Watch,
        Class::KeepAlive,
        Class::Other,
    ];

    fn label(self) -> &'static str {
        match self {
            Class::Read => "read",
            Class::Write => "write",
            Class::Watch => "watch",
            Class::KeepAlive => "lease_keep_alive",
            Class::Other => "other",
        }
    }

    /// Whether a call lasts as long as its client likes, which is no latency.
    fn is_endless(self) -> bool {
        matches!(self, Class::Watch | Class::KeepAlive)
    }
}

/// A method as calls are counted by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallMethod {
    /// Position among all methods; unknown ones have the last.
    index: usize,
    class: Class,
    /// Whether a call ends by itself.
    has_latency: bool,
}

impl CallMethod {
    /// The method at `path`; one for all that are not known.
    #[must_use]
    pub fn of_path(path: &str) -> CallMethod {
        let mut index = 0;
        let named = path.strip_prefix('/').and_then(|path| path.split_once('/'));
        if let Some((service, method)) = named {
            for (of, methods) in METHODS {
                if of == service
                    && let Some(at) = methods.iter().position(|name| *name == method)
                {
                    return CallMethod::new(index + at, service, method);
                }
                index += methods.len();
            }
        }
        CallMethod::OTHER
    }

    /// Every method that is not known.
    const OTHER: CallMethod = CallMethod {
        index: METHOD_COUNT - 1,
        class: Class::Other,
        has_latency: false,
    };

    fn new(index: usize, service: &str, method: &str) -> CallMethod {
        let class = match (service, method) {
            ("etcdserverpb.KV", "Range" | "RangeStream") => Class::Read,
            ("etcdserverpb.KV", _) => Class::Write,
            ("etcdserverpb.Watch", _) => Class::Watch,
            ("etcdserverpb.Lease", "LeaseKeepAlive") => Class::KeepAlive,
            _ => Class::Other,
        };
        // A lock or an election lasts until others let go.
        let waits_for_others = matches!(method, "Lock" | "Campaign" | "Observe" | "Watch" | "Snapshot");
        CallMethod {
            index,
            class,
            has_latency: !class.is_endless() && !waits_for_others,
        }
    }

    /// Every method, with the values of its labels.
    fn all() -> impl Iterator<Item = (CallMethod, &'static str, &'static str)> {
        let named = METHODS
            .iter()
            .flat_map(|(service, methods)| methods.iter().map(|method| (*service, *method)));
        let named = named.enumerate();
        let named = named
            .map(|(index, (service, method))| (CallMethod::new(index, service, method), service, method));
        named.chain([(CallMethod::OTHER, "other", "other")])
    }
}

/// Number of methods, the unknown ones included.
const METHOD_COUNT: usize = {
    let (mut count, mut at) = (1, 0);
    while at < METHODS.len() {
        count += METHODS[at].1.len();
        at += 1;
    }
    count
};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallLabels {
    grpc_service: &'static str,
    grpc_method: &'static str,
    grpc_code: &'static str,
    from: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DurationLabels {
    class: &'static str,
    from: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ClassLabels {
    class: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FromLabels {
    from: &'static str,
}

/// Clients' calls by method, status and what answered them.
#[derive(Debug)]
pub struct CallMetrics {
    calls: Family<CallLabels, Counter>,
    /// The counters of `calls` by method, code and source, each resolved when it is first needed.
    resolved: Box<[OnceLock<Counter>]>,
    durations: [[Latency; Source::ALL.len()]; Class::ALL.len()],
    in_flight: [Gauge; Class::ALL.len()],
    sent_bytes: [Counter; Source::ALL.len()],
    received_bytes: Counter,
}

impl Default for CallMetrics {
    /// Metrics that nothing exports.
    fn default() -> CallMetrics {
        CallMetrics::new(&mut Registry::default())
    }
}

impl CallMetrics {
    pub(super) fn new(registry: &mut Registry) -> CallMetrics {
        let durations: Family<DurationLabels, Latency> = register_unit(
            registry,
            "call_duration",
            Unit::Seconds,
            "Time from the arrival of a gRPC call to the end of its response, by class and what answered it",
        );
        let in_flight: Family<ClassLabels, Gauge> = register(
            registry,
            "calls_in_flight",
            "Calls of clients in flight by class: read, write, watch, lease_keep_alive, other",
        );
        let sent_bytes: Family<FromLabels, Counter> = register_unit(
            registry,
            "sent",
            Unit::Bytes,
            "Bytes of responses to clients by what answered: memory, etcd, refused",
        );
        let duration = |class: Class, from: Source| {
            let labels = DurationLabels {
                class: class.label(),
                from: from.label(),
            };
            // Without a series: nothing is recorded in it.
            let has_series = !class.is_endless() && from != Source::Nothing;
            if has_series {
                durations.get_or_create_owned(&labels)
            } else {
                Latency::default()
            }
        };
        let metrics = CallMetrics {
            calls: register(
                registry,
                "calls",
                "gRPC calls that have ended, by method, status and what answered them: memory, etcd, refused, none",
            ),
            resolved: (0..METHOD_COUNT * CODES.len() * Source::ALL.len())
                .map(|_| OnceLock::new())
                .collect(),
            durations: array::from_fn(|class| {
                array::from_fn(|from| duration(Class::ALL[class], Source::ALL[from]))
            }),
            in_flight: Class::ALL
                .map(|class| in_flight.get_or_create_owned(&ClassLabels { class: class.label() })),
            sent_bytes: Source::ALL.map(|from| match from {
                Source::Nothing => Counter::default(),
                _ => sent_bytes.get_or_create_owned(&FromLabels { from: from.label() }),
            }),
            received_bytes: register_unit(
                registry,
                "received",
                Unit::Bytes,
                "Bytes received on connections of clients, frames and headers included",
            ),
        };
        metrics.start_at_zero();
        metrics
    }

    /// Creates the series of calls that succeed, and of failures that alerts look for: `increase()` does not see the first
    /// event of a series that begins with it.
    fn start_at_zero(&self) {
        for (method, service, name) in CallMethod::all() {
            let is_of_memory =
                matches!(name, "Range" | "RangeStream" | "MemberList") || method.class == Class::Watch;
            for from in [Source::Memory, Source::Etcd] {
                if from == Source::Etcd || is_of_memory {
                    self.counter(method, Code::OK, from);
                }
            }
            if EXPECTED_SERVICES.contains(&service) {
                for code in EXPECTED_CODES {
                    self.counter(method, code, Source::Etcd);
                    self.counter(method, code, Source::Refused);
                }
            }
        }
    }

    fn counter(&self, method: CallMethod, code: Code, from: Source) -> Option<&Counter> {
        let at = (method.index * CODES.len() + usize::from(code.0)) * Source::ALL.len() + from as usize;
        let resolve = || {
            let (_, grpc_service, grpc_method) =
                CallMethod::all().find(|(of, ..)| of.index == method.index)?;
            let labels = CallLabels {
                grpc_service,
                grpc_method,
                grpc_code: CODES.get(usize::from(code.0))?,
                from: from.label(),
            };
            Some(self.calls.get_or_create_owned(&labels))
        };
        let place = self.resolved.get(at)?;
        if place.get().is_none() {
            let _ = place.set(resolve()?);
        }
        place.get()
    }

    /// Counts a gRPC call that has ended.
    pub fn record(&self, method: CallMethod, code: Code, from: Source, took: Duration) {
        if let Some(counter) = self.counter(method, code, from) {
            counter.inc();
        }
        if method.has_latency && from != Source::Nothing {
            self.durations[method.class as usize][from as usize].observe(took);
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

    fn in_flight_of(&self, method: Option<CallMethod>) -> &Gauge {
        let class = method.map_or(Class::Other, |method| method.class);
        &self.in_flight[class as usize]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::telemetry::Metrics;
    use crate::telemetry::exposition::Format;

    #[test]
    fn method_is_found_by_its_path() {
        let mut indices = BTreeSet::new();
        for (method, service, name) in CallMethod::all() {
            assert!(indices.insert(method.index), "{name}");
            if name != "other" {
                assert_eq!(
                    CallMethod::of_path(&format!("/{service}/{name}")),
                    method,
                    "{name}"
                );
            }
        }
        assert_eq!(indices.len(), METHOD_COUNT);
        for path in [
            "",
            "/",
            "/health",
            "/etcdserverpb.KV/Unheard",
            "/v3/kv/range",
            "/etcdserverpb.Watch/Range",
        ] {
            assert_eq!(CallMethod::of_path(path), CallMethod::OTHER, "{path}");
        }
    }

    #[test]
    fn every_counter_has_a_place_of_its_own() {
        let metrics = CallMetrics::default();
        for (method, ..) in CallMethod::all() {
            for code in 0..=u16::try_from(CODES.len()).unwrap() {
                for from in Source::ALL {
                    metrics.record(method, Code::of(code), from, Duration::ZERO);
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
    }

    #[test]
    fn known_series_begin_at_zero_and_endless_calls_have_no_latency() {
        let metrics = Metrics::new();
        let calls = &metrics.calls;
        for (path, took) in [
            ("/etcdserverpb.KV/Range", 3),
            ("/etcdserverpb.Watch/Watch", 5),
            ("/v3lockpb.Lock/Lock", 5),
        ] {
            calls.record(
                CallMethod::of_path(path),
                Code::OK,
                Source::Etcd,
                Duration::from_millis(took),
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
            call("etcdserverpb.KV", "Range", "OK", "memory") + " 0",
            call("etcdserverpb.KV", "Range", "OK", "etcd") + " 1",
            call("etcdserverpb.KV", "Txn", "Unavailable", "refused") + " 0",
            call("etcdserverpb.Auth", "RoleList", "OK", "etcd") + " 0",
            call("other", "other", "OK", "etcd") + " 0",
            "rangecache_call_duration_seconds_count{class=\"read\",from=\"etcd\"} 1".to_owned(),
            "rangecache_call_duration_seconds_count{class=\"other\",from=\"etcd\"} 0".to_owned(),
            "rangecache_sent_bytes_total{from=\"memory\"} 0".to_owned(),
            "rangecache_calls_in_flight{class=\"lease_keep_alive\"} 0".to_owned(),
        ] {
            assert!(text.contains(&line), "{line} not in\n{text}");
        }
        assert!(!text.contains("_count{class=\"watch\""), "{text}");
    }
}
