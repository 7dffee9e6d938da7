//! OpenTelemetry's environment variables, `OTEL_…`, under their own names. Read once, before a port is bound.
//!
//! Tracing is off unless an endpoint or an exporter is set. As the specification asks, a value that cannot be used counts
//! as not set and is reported. Headers, resource attributes and compression are only checked here: the library reads them
//! itself, and leaves out what it cannot use.

use std::{cell::RefCell, path::PathBuf, time::Duration};

use http::{HeaderName, Uri};
use opentelemetry_sdk::trace::Sampler;
use rangecache_base::net::{Url, UrlError};
use rangecache_edge::tls;

/// Transport of OTLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC.
    Grpc,
    /// HTTP/1.1, protobuf in POST requests.
    Http,
}

/// Destination, selection and batching of traces.
#[derive(Clone, Debug)]
pub struct OtelConfig {
    /// URL of the collector.
    pub endpoint: Url,
    /// Path on the collector; unused with gRPC.
    pub path: String,
    /// Transport.
    pub protocol: Protocol,
    /// Time limit for one request.
    pub timeout: Duration,
    /// Certificates of connections with TLS.
    pub tls: tls::Collector,
    /// Selection of traces.
    pub sampler: Sampler,
    /// Whether traces continue those of callers, and those of etcd continue them (W3C Trace Context).
    pub propagates: bool,
    /// Service name; by default `rangecache`.
    pub service: Option<String>,
    /// Longest time that a span waits for a batch.
    pub schedule_delay: Duration,
    /// Time limit for an export with all its attempts.
    pub export_timeout: Duration,
    /// Spans in the queue; more are dropped.
    pub max_queue_size: usize,
    /// Spans in one request.
    pub max_batch_size: usize,
}

/// A value of a variable that counts as not set, with what to write instead.
#[derive(Debug, PartialEq, Eq)]
pub struct IgnoredOtel {
    /// The variable.
    pub name: &'static str,
    /// Its value; masked for headers and for URLs with a user, which may be secret.
    pub value: String,
    /// Remedy: the value to write instead.
    pub remedy: String,
}

/// The variable of a setting for traces, and the one for all signals.
macro_rules! otlp {
    ($setting:literal) => {
        [
            concat!("OTEL_EXPORTER_OTLP_TRACES_", $setting),
            concat!("OTEL_EXPORTER_OTLP_", $setting),
        ]
    };
}

/// Looks up variables; an empty one counts as not set, and so does one that cannot be used.
struct Variables<'a> {
    look_up: &'a dyn Fn(&str) -> Option<String>,
    ignored: RefCell<Vec<IgnoredOtel>>,
}

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        let value = (self.look_up)(name)?.trim().to_owned();
        Some(value).filter(|value| !value.is_empty())
    }

    fn ignore(&self, name: &'static str, value: &str, remedy: impl Into<String>) {
        let is_secret = otlp!("HEADERS").contains(&name) || value.contains('@');
        self.ignored.borrow_mut().push(IgnoredOtel {
            name,
            value: if is_secret { "(secret)" } else { value }.to_owned(),
            remedy: remedy.into(),
        });
    }

    /// Result of `parse` for the first of `names` that has a value it accepts; its error is the remedy.
    fn first<T>(
        &self,
        names: &[&'static str],
        parse: impl Fn(&'static str, &str) -> Result<T, String>,
    ) -> Option<T> {
        names.iter().find_map(|&name| {
            let value = self.get(name)?;
            parse(name, &value)
                .map_err(|remedy| self.ignore(name, &value, remedy))
                .ok()
        })
    }

    /// Result of `parse` as [`Variables::first`] finds it, with one `remedy` for all other values.
    fn parsed<T>(
        &self,
        names: &[&'static str],
        remedy: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        self.first(names, |_, value| parse(value).ok_or_else(|| remedy.to_owned()))
    }

    fn millis(&self, names: &[&'static str], default: u64) -> Duration {
        let remedy = "write a whole number of milliseconds above 0";
        let millis = self.parsed(names, remedy, |value| {
            value.parse().ok().filter(|millis| *millis > 0)
        });
        Duration::from_millis(millis.unwrap_or(default))
    }

    fn is_true(&self, names: &[&'static str]) -> bool {
        let value = self.parsed(names, "write true or false", |value| {
            value.to_ascii_lowercase().parse().ok()
        });
        value.unwrap_or(false)
    }
}

impl OtelConfig {
    /// Reads the environment of this process; `None` if tracing is off. Values that cannot be used are returned.
    #[must_use]
    pub fn from_env() -> (Option<OtelConfig>, Vec<IgnoredOtel>) {
        OtelConfig::from_variables(&|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Reads the variables that `look_up` returns; `None` if tracing is off. Values that cannot be used are returned.
    pub fn from_variables(
        look_up: &dyn Fn(&str) -> Option<String>,
    ) -> (Option<OtelConfig>, Vec<IgnoredOtel>) {
        let variables = Variables {
            look_up,
            ignored: RefCell::default(),
        };
        let config = OtelConfig::read(&variables);
        (config, variables.ignored.into_inner())
    }

    fn read(variables: &Variables<'_>) -> Option<OtelConfig> {
        if variables.is_true(&["OTEL_SDK_DISABLED"]) {
            return None;
        }
        let exporter = ["OTEL_TRACES_EXPORTER"];
        let exports = variables.parsed(&exporter, "write otlp or none", |exporter| match exporter {
            "otlp" => Some(true),
            "none" => Some(false),
            _ => None,
        });
        if exports == Some(false) {
            return None;
        }
        let remedy = "write grpc or http/protobuf";
        let protocol = variables.parsed(&otlp!("PROTOCOL"), remedy, |value| match value {
            "grpc" => Some(Protocol::Grpc),
            "http/protobuf" => Some(Protocol::Http),
            _ => None,
        });
        let protocol = protocol.unwrap_or(Protocol::Http);
        let endpoint = variables.first(&otlp!("ENDPOINT"), |name, value| {
            at(variables, protocol, name, value)
        });
        let (endpoint, path) = match endpoint {
            None if exports.is_some() => {
                let [_, of_all_signals] = otlp!("ENDPOINT");
                at(variables, protocol, of_all_signals, default_endpoint(protocol)).ok()?
            }
            endpoint => endpoint?,
        };
        let (max_queue_size, max_batch_size) = queue(variables);
        check_what_the_library_reads(variables);
        Some(OtelConfig {
            endpoint,
            path,
            protocol,
            timeout: variables.millis(&otlp!("TIMEOUT"), 10_000),
            tls: tls(variables),
            sampler: sampler(variables),
            propagates: propagates(variables),
            service: variables.get("OTEL_SERVICE_NAME"),
            schedule_delay: variables.millis(&["OTEL_BSP_SCHEDULE_DELAY"], 5000),
            export_timeout: variables.millis(&["OTEL_BSP_EXPORT_TIMEOUT"], 30_000),
            max_queue_size,
            max_batch_size,
        })
    }
}

/// The CA, and the client certificate with its key if both are named.
fn tls(variables: &Variables<'_>) -> tls::Collector {
    let file =
        |names: [&'static str; 2]| variables.first(&names, |name, path| Ok((name, PathBuf::from(path))));
    let (certificates, keys) = (otlp!("CLIENT_CERTIFICATE"), otlp!("CLIENT_KEY"));
    let client = match (file(certificates), file(keys)) {
        (Some((_, certificate)), Some((_, key))) => Some((certificate, key)),
        (certificate, key) => {
            for (alone, missing) in [(certificate, keys[1]), (key, certificates[1])] {
                if let Some((name, path)) = alone {
                    let remedy = format!("set {missing} as well");
                    variables.ignore(name, &path.to_string_lossy(), remedy);
                }
            }
            None
        }
    };
    tls::Collector::new(file(otlp!("CERTIFICATE")).map(|(_, path)| path), client)
}

/// The size of the queue and of a batch, in spans.
fn queue(variables: &Variables<'_>) -> (usize, usize) {
    const QUEUE_SIZE: &str = "OTEL_BSP_MAX_QUEUE_SIZE";
    let within = |name, max: usize, remedy: &str| {
        let is_within = |size: &usize| (1..=max).contains(size);
        variables.parsed(&[name], remedy, |value| value.parse().ok().filter(is_within))
    };
    let size = within(QUEUE_SIZE, 1 << 20, "write a number from 1 to 1048576").unwrap_or(2048);
    let remedy = format!("write a number from 1 to {QUEUE_SIZE}, which is {size}");
    let batch = within("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", size, &remedy);
    (size, batch.unwrap_or(size.min(512)))
}

fn default_endpoint(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Grpc => "http://localhost:4317",
        Protocol::Http => "http://localhost:4318",
    }
}

/// An endpoint and a path, of a URL with or without a port and, for gRPC, a scheme. The error is the remedy.
fn at(
    variables: &Variables<'_>,
    protocol: Protocol,
    name: &'static str,
    value: &str,
) -> Result<(Url, String), String> {
    let wrong = || format!("write a URL, for example {}", default_endpoint(protocol));
    let with_scheme = match (protocol, value.contains("://")) {
        (Protocol::Grpc, false) => {
            let insecure = variables.is_true(&otlp!("INSECURE"));
            format!("http{}://{value}", if insecure { "" } else { "s" })
        }
        _ => value.to_owned(),
    };
    let uri: Uri = with_scheme.parse().map_err(|_| wrong())?;
    let (Some(scheme @ ("http" | "https")), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(wrong());
    };
    let port = match (protocol, scheme) {
        (Protocol::Grpc, _) => 4317,
        (Protocol::Http, "http") => 80,
        (Protocol::Http, _) => 443,
    };
    let url = format!("{scheme}://{authority}");
    let url = match url.parse() {
        Err(UrlError::NoPort(..)) => format!("{url}:{port}").parse(),
        parsed => parsed,
    };
    let url = url.ok().filter(|_| uri.port_u16() != Some(0)).ok_or_else(wrong)?;
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    match protocol {
        Protocol::Grpc if uri.path() != "/" => Err(
            "gRPC takes no path: write only scheme://host:port, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
                .to_owned(),
        ),
        Protocol::Http if name == otlp!("ENDPOINT")[1] => {
            Ok((url, format!("{}/v1/traces", path.trim_end_matches('/'))))
        }
        _ => Ok((url, path.to_owned())),
    }
}

/// Reports values that the library will leave out. It reads them itself.
fn check_what_the_library_reads(variables: &Variables<'_>) {
    let is_list = |list: &str, is_name: fn(&str) -> bool| {
        let mut parts = list.split(',').filter(|part| !part.trim().is_empty());
        let is_part = |part: &str| part.split_once('=').is_some_and(|(name, _)| is_name(name.trim()));
        parts.all(is_part).then_some(())
    };
    variables.parsed(&otlp!("COMPRESSION"), "write none or gzip", |value| {
        ["none", "gzip"].contains(&value).then_some(())
    });
    let remedy = "write name=value,name=value, with values percent-encoded";
    variables.parsed(&otlp!("HEADERS"), remedy, |list| {
        is_list(list, |name| name.parse::<HeaderName>().is_ok())
    });
    let attributes = ["OTEL_RESOURCE_ATTRIBUTES"];
    variables.parsed(&attributes, "write name=value,name=value", |list| {
        is_list(list, |name| !name.is_empty())
    });
}

fn sampler(variables: &Variables<'_>) -> Sampler {
    let parent_based = |root| Sampler::ParentBased(Box::new(root));
    let remedy = "write always_on, always_off, traceidratio, parentbased_always_on, parentbased_always_off or \
                  parentbased_traceidratio";
    let sampler = variables.parsed(&["OTEL_TRACES_SAMPLER"], remedy, |name| {
        let below_parent = name.strip_prefix("parentbased_");
        let root = match below_parent.unwrap_or(name) {
            "always_on" => Sampler::AlwaysOn,
            "always_off" => Sampler::AlwaysOff,
            "traceidratio" => Sampler::TraceIdRatioBased(ratio(variables)),
            _ => return None,
        };
        Some(match below_parent {
            Some(_) => parent_based(root),
            None => root,
        })
    });
    sampler.unwrap_or_else(|| parent_based(Sampler::AlwaysOn))
}

fn ratio(variables: &Variables<'_>) -> f64 {
    let remedy = "write a ratio from 0 to 1, for example 0.01";
    let ratio = variables.parsed(&["OTEL_TRACES_SAMPLER_ARG"], remedy, |ratio| {
        ratio.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio))
    });
    ratio.unwrap_or(1.0)
}

/// Whether `tracecontext` is one of the propagators, as it is by default. `baggage` passes through rangecache whatever
/// they are: the headers of calls are forwarded.
fn propagates(variables: &Variables<'_>) -> bool {
    const PROPAGATORS: &str = "OTEL_PROPAGATORS";
    let value = variables.get(PROPAGATORS).unwrap_or_default();
    let names = value.split(',').map(str::trim).filter(|name| !name.is_empty());
    let (known, unknown): (Vec<_>, Vec<_>) =
        names.partition(|name| ["tracecontext", "baggage", "none"].contains(name));
    if !unknown.is_empty() {
        variables.ignore(
            PROPAGATORS,
            &unknown.join(","),
            "write tracecontext, baggage or none",
        );
    }
    known.is_empty() || known.contains(&"tracecontext")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
    const PROPAGATORS: &str = "OTEL_PROPAGATORS";

    fn settings(variables: &[(&str, &str)]) -> (Option<OtelConfig>, Vec<IgnoredOtel>) {
        let look_up = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        OtelConfig::from_variables(&look_up)
    }

    fn on(variables: &[(&str, &str)]) -> OtelConfig {
        let (config, ignored) = settings(variables);
        assert_eq!(ignored, [], "{variables:?}");
        config.expect("tracing is on")
    }

    #[test]
    fn tracing_is_off_by_default() {
        for variables in [
            &[][..],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")],
            &[("OTEL_SERVICE_NAME", "x"), ("OTEL_TRACES_SAMPLER", "always_on")],
            &[
                ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1"),
                ("OTEL_TRACES_EXPORTER", "none"),
            ],
            &[
                ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1"),
                ("OTEL_SDK_DISABLED", "TRUE"),
            ],
        ] {
            assert!(settings(variables).0.is_none(), "{variables:?}");
        }
        let defaults = on(&[("OTEL_TRACES_EXPORTER", "otlp")]);
        assert_eq!(defaults.endpoint.to_string(), "http://localhost:4318");
        assert_eq!(
            (defaults.path.as_str(), defaults.protocol),
            ("/v1/traces", Protocol::Http)
        );
        assert_eq!((defaults.max_queue_size, defaults.max_batch_size), (2048, 512));
        assert_eq!(format!("{:?}", defaults.sampler), "ParentBased(AlwaysOn)");
    }

    #[test]
    fn unknown_propagators_are_ignored_one_by_one() {
        for (value, propagates, unknown) in [
            ("", true, None),
            ("tracecontext,baggage", true, None),
            ("baggage", false, None),
            ("none", false, None),
            ("b3", true, Some("b3")),
            ("b3, tracecontext,jaeger", true, Some("b3,jaeger")),
            ("b3,baggage", false, Some("b3")),
        ] {
            let (config, ignored) = settings(&[("OTEL_TRACES_EXPORTER", "otlp"), (PROPAGATORS, value)]);
            assert_eq!(config.unwrap().propagates, propagates, "{value}");
            let ignored = ignored
                .first()
                .map(|ignored| (ignored.name, ignored.value.as_str()));
            assert_eq!(ignored, unknown.map(|unknown| (PROPAGATORS, unknown)), "{value}");
        }
    }

    #[test]
    fn endpoints_follow_the_protocol() {
        const GRPC: (&str, &str) = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
        const HTTP: (&str, &str) = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
        for (variables, url, path) in [
            (&[(ENDPOINT, "http://a:1"), HTTP][..], "http://a:1", "/v1/traces"),
            (
                &[(ENDPOINT, "https://a/otlp/"), HTTP],
                "https://a:443",
                "/otlp/v1/traces",
            ),
            (
                &[(TRACES_ENDPOINT, "http://a/x?y=1"), HTTP],
                "http://a:80",
                "/x?y=1",
            ),
            (
                &[(TRACES_ENDPOINT, "http://b:2"), (ENDPOINT, "http://a:1")],
                "http://b:2",
                "/",
            ),
            (&[(ENDPOINT, "http://[::1]:4317"), GRPC], "http://[::1]:4317", "/"),
            (&[(ENDPOINT, "http://[::1]"), GRPC], "http://[::1]:4317", "/"),
            (&[(ENDPOINT, "a:4317"), GRPC], "https://a:4317", "/"),
            (
                &[
                    (ENDPOINT, "a:4317"),
                    GRPC,
                    ("OTEL_EXPORTER_OTLP_INSECURE", "true"),
                ],
                "http://a:4317",
                "/",
            ),
        ] {
            let settings = on(variables);
            assert_eq!(settings.endpoint.to_string(), url, "{variables:?}");
            assert_eq!(settings.path, path, "{variables:?}");
        }
    }

    /// Each value that cannot be used is reported with a remedy, and the configuration is that without it.
    #[test]
    fn unusable_values_count_as_not_set() {
        const AT: (&str, &str) = (ENDPOINT, "http://a:1");
        for (kept, (name, value), says) in [
            (&[][..], (ENDPOINT, "a:4318"), "write a URL"),
            (&[], (ENDPOINT, "ftp://a:1"), "write a URL"),
            (&[], (ENDPOINT, "http://a:none"), "write a URL"),
            (&[AT], (TRACES_ENDPOINT, "nowhere"), "write a URL"),
            (
                &[("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")],
                (ENDPOINT, "http://a:1/v1/traces"),
                "takes no path",
            ),
            (
                &[AT],
                ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
                "write grpc or http/protobuf",
            ),
            (&[AT], ("OTEL_TRACES_EXPORTER", "zipkin"), "write otlp or none"),
            (&[AT], ("OTEL_SDK_DISABLED", "1"), "write true or false"),
            (&[AT], ("OTEL_TRACES_SAMPLER", "jaeger_remote"), "write always_on"),
            (
                &[AT, ("OTEL_TRACES_SAMPLER", "traceidratio")],
                ("OTEL_TRACES_SAMPLER_ARG", "1.5"),
                "from 0 to 1",
            ),
            (&[AT], ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"), "whole number"),
            (&[AT], ("OTEL_BSP_SCHEDULE_DELAY", "0"), "above 0"),
            (&[AT], ("OTEL_BSP_MAX_QUEUE_SIZE", "0"), "from 1"),
            (&[AT], ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096"), "which is 2048"),
            (&[AT], ("OTEL_RESOURCE_ATTRIBUTES", "a"), "name=value"),
            (
                &[AT],
                ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
                "write none or gzip",
            ),
            (
                &[AT],
                ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "k"),
                "CLIENT_CERTIFICATE",
            ),
        ] {
            let (config, ignored) = settings(&[kept, &[(name, value)]].concat());
            let [only] = ignored.as_slice() else {
                panic!("{name}={value}: {ignored:?}");
            };
            assert_eq!((only.name, only.value.as_str()), (name, value));
            assert!(only.remedy.contains(says), "{only:?}");
            let without = settings(kept).0;
            assert_eq!(format!("{config:?}"), format!("{without:?}"), "{name}={value}");
        }
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_HEADERS", "api key=hidden"),
            (TRACES_ENDPOINT, "http://user:hidden@a:1"),
        ] {
            let (config, ignored) = settings(&[AT, (name, value)]);
            assert!(config.is_some() && ignored.len() == 1, "{ignored:?}");
            assert!(!format!("{ignored:?}").contains("hidden"), "{ignored:?}");
        }
    }
}
