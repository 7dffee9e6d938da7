//! OpenTelemetry's environment variables, `OTEL_…`, under their own names. Read once, before a port is bound.
//!
//! Tracing is off unless an endpoint or an exporter is set. As the specification asks, a value that cannot be used counts
//! as not set and is reported. Headers, resource attributes and compression are only checked here: the library reads them
//! itself, and leaves out what it cannot use.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, Uri};
use opentelemetry_sdk::trace::Sampler;

use rangecache_base::net::{Address, Url};

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
    /// File of the CA that issued its certificate; by default the system's CAs.
    pub certificate: Option<PathBuf>,
    /// Files of the client certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
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

/// The variables for traces, each followed by the one for all signals.
type Pair = [&'static str; 2];

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const PROTOCOL: Pair = [
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
];
const COMPRESSION: Pair = [
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION",
    "OTEL_EXPORTER_OTLP_COMPRESSION",
];
const HEADERS: Pair = ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"];
const TIMEOUT: Pair = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
const INSECURE: Pair = [
    "OTEL_EXPORTER_OTLP_TRACES_INSECURE",
    "OTEL_EXPORTER_OTLP_INSECURE",
];
const CERTIFICATE: Pair = [
    "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_CERTIFICATE",
];
const CLIENT_CERTIFICATE: Pair = [
    "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
];
const CLIENT_KEY: Pair = [
    "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY",
    "OTEL_EXPORTER_OTLP_CLIENT_KEY",
];
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";
const PROPAGATORS: &str = "OTEL_PROPAGATORS";
const QUEUE_SIZE: &str = "OTEL_BSP_MAX_QUEUE_SIZE";
const BATCH_SIZE: &str = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE";
/// Path of traces below an HTTP endpoint for all signals.
const TRACES_PATH: &str = "v1/traces";

/// Looks up variables; an empty one counts as not set, and so does one that cannot be used.
struct Variables<'a> {
    look_up: &'a dyn Fn(&str) -> Option<String>,
    ignored: RefCell<Vec<IgnoredOtel>>,
}

impl Variables<'_> {
    fn get(&self, name: &'static str) -> Option<String> {
        let value = (self.look_up)(name)?.trim().to_owned();
        Some(value).filter(|value| !value.is_empty())
    }

    fn ignore(&self, name: &'static str, value: &str, remedy: impl Into<String>) {
        let is_secret = HEADERS.contains(&name) || value.contains('@');
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

    /// The value of the first of `names` that has one.
    fn either(&self, names: Pair) -> Option<(&'static str, String)> {
        names.iter().find_map(|&name| Some((name, self.get(name)?)))
    }

    fn millis(&self, names: &[&'static str], default: u64) -> Duration {
        let millis = self.first(names, |_, value| match value.parse() {
            Ok(millis) if millis > 0 => Ok(millis),
            _ => Err("write a whole number of milliseconds above 0".to_owned()),
        });
        Duration::from_millis(millis.unwrap_or(default))
    }

    fn is_true(&self, names: &[&'static str]) -> bool {
        let value = self.first(names, |_, value| match value.to_ascii_lowercase().parse() {
            Ok(is_true) => Ok(is_true),
            Err(_) => Err("write true or false".to_owned()),
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
        let exports = variables.first(&["OTEL_TRACES_EXPORTER"], |_, exporter| match exporter {
            "otlp" => Ok(true),
            "none" => Ok(false),
            _ => Err("write otlp or none".to_owned()),
        });
        if exports == Some(false) {
            return None;
        }
        let protocol = variables.first(&PROTOCOL, |_, value| match value {
            "grpc" => Ok(Protocol::Grpc),
            "http/protobuf" => Ok(Protocol::Http),
            _ => Err("write grpc or http/protobuf".to_owned()),
        });
        let protocol = protocol.unwrap_or(Protocol::Http);
        let endpoint = variables.first(&[TRACES_ENDPOINT, ENDPOINT], |name, value| {
            at(variables, protocol, name, value)
        });
        let (endpoint, path) = match endpoint {
            Some(endpoint) => endpoint,
            None if exports.is_none() => return None,
            None => {
                let (port, path) = match protocol {
                    Protocol::Grpc => (4317, "/"),
                    Protocol::Http => (4318, "/v1/traces"),
                };
                (tcp(false, "localhost", port), path.to_owned())
            }
        };
        let (max_queue_size, max_batch_size) = queue(variables);
        check_what_the_library_reads(variables);
        Some(OtelConfig {
            endpoint,
            path,
            protocol,
            timeout: variables.millis(&TIMEOUT, 10_000),
            certificate: variables.either(CERTIFICATE).map(|(_, path)| path.into()),
            client: client(variables),
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

/// The client certificate and its key, if both are named.
fn client(variables: &Variables<'_>) -> Option<(PathBuf, PathBuf)> {
    let alone = |(name, path): (&'static str, String), missing: Pair| {
        variables.ignore(name, &path, format!("set {} as well", missing[1]));
        None
    };
    match (variables.either(CLIENT_CERTIFICATE), variables.either(CLIENT_KEY)) {
        (None, None) => None,
        (Some((_, certificate)), Some((_, key))) => Some((certificate.into(), key.into())),
        (Some(certificate), None) => alone(certificate, CLIENT_KEY),
        (None, Some(key)) => alone(key, CLIENT_CERTIFICATE),
    }
}

/// The size of the queue and of a batch, in spans.
fn queue(variables: &Variables<'_>) -> (usize, usize) {
    let within = |name, max: usize, remedy: String| {
        variables.first(&[name], |_, value| match value.parse() {
            Ok(size) if (1..=max).contains(&size) => Ok(size),
            _ => Err(remedy.clone()),
        })
    };
    let size = within(QUEUE_SIZE, 1 << 20, "write a number from 1 to 1048576".to_owned());
    let size = size.unwrap_or(2048);
    let remedy = format!("write a number from 1 to {QUEUE_SIZE}, which is {size}");
    let batch = within(BATCH_SIZE, size, remedy);
    (size, batch.unwrap_or(size.min(512)))
}

/// An endpoint and a path, of a URL with or without a port and, for gRPC, a scheme. The error is the remedy.
fn at(
    variables: &Variables<'_>,
    protocol: Protocol,
    name: &'static str,
    value: &str,
) -> Result<(Url, String), String> {
    let example = match protocol {
        Protocol::Grpc => "http://localhost:4317",
        Protocol::Http => "http://localhost:4318",
    };
    let wrong = || format!("write a URL, for example {example}");
    let with_scheme = match (protocol, value.contains("://")) {
        (Protocol::Grpc, false) => {
            let insecure = variables.is_true(&INSECURE);
            format!("http{}://{value}", if insecure { "" } else { "s" })
        }
        _ => value.to_owned(),
    };
    let uri: Uri = with_scheme.parse().map_err(|_| wrong())?;
    let is_tls = match uri.scheme_str() {
        Some("http") => false,
        Some("https") => true,
        _ => return Err(wrong()),
    };
    let authority = uri.authority().ok_or_else(wrong)?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let names_a_port = authority
        .as_str()
        .rsplit(']')
        .next()
        .is_some_and(|tail| tail.contains(':'));
    if host.is_empty()
        || authority.as_str().contains('@')
        || (names_a_port && uri.port_u16().is_none())
        || uri.port_u16() == Some(0)
    {
        return Err(wrong());
    }
    let port = match (protocol, is_tls) {
        _ if names_a_port => uri.port_u16().unwrap_or_default(),
        (Protocol::Grpc, _) => 4317,
        (Protocol::Http, false) => 80,
        (Protocol::Http, true) => 443,
    };
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let path = match (protocol, name) {
        (Protocol::Grpc, _) if uri.path() != "/" => {
            return Err("gRPC takes no path: write only scheme://host:port, or set \
                        OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
                .to_owned());
        }
        (Protocol::Http, ENDPOINT) => format!("{}/{TRACES_PATH}", path.trim_end_matches('/')),
        _ => path.to_owned(),
    };
    Ok((tcp(is_tls, host, port), path))
}

fn tcp(tls: bool, host: &str, port: u16) -> Url {
    let address = Address::Tcp {
        host: host.to_owned(),
        port,
    };
    Url { tls, address }
}

/// Reports values that the library will leave out. It reads them itself.
fn check_what_the_library_reads(variables: &Variables<'_>) {
    let is_header = |name: &str| name.parse::<HeaderName>().is_ok();
    let _ = variables.first(&COMPRESSION, |_, value| match value {
        "none" | "gzip" => Ok(()),
        _ => Err("write none or gzip".to_owned()),
    });
    let _ = variables.first(&HEADERS, |_, list| {
        if names(list).all(|name| name.is_some_and(is_header)) {
            return Ok(());
        }
        Err("write name=value,name=value, with values percent-encoded".to_owned())
    });
    let _ = variables.first(&["OTEL_RESOURCE_ATTRIBUTES"], |_, list| {
        if names(list).all(|name| name.is_some()) {
            return Ok(());
        }
        Err("write name=value,name=value".to_owned())
    });
}

/// The names in `name=value,name=value`; `None` for a part of another form.
fn names(list: &str) -> impl Iterator<Item = Option<&str>> {
    let parts = list.split(',').filter(|part| !part.trim().is_empty());
    parts.map(|part| {
        let (name, _) = part.split_once('=')?;
        Some(name.trim()).filter(|name| !name.is_empty())
    })
}

fn sampler(variables: &Variables<'_>) -> Sampler {
    let sampler = variables.first(&[SAMPLER], |_, name| {
        let (is_parent_based, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name),
        };
        let root = match root {
            "always_on" => Sampler::AlwaysOn,
            "always_off" => Sampler::AlwaysOff,
            "traceidratio" => Sampler::TraceIdRatioBased(ratio(variables)),
            _ => {
                return Err(
                    "write always_on, always_off, traceidratio, parentbased_always_on, \
                            parentbased_always_off or parentbased_traceidratio"
                        .to_owned(),
                );
            }
        };
        Ok(if is_parent_based { parent_based(root) } else { root })
    });
    sampler.unwrap_or_else(|| parent_based(Sampler::AlwaysOn))
}

/// Whether `tracecontext` is one of the propagators, as it is by default. `baggage` passes through rangecache whatever
/// they are: the headers of calls are forwarded.
fn propagates(variables: &Variables<'_>) -> bool {
    let Some(value) = variables.get(PROPAGATORS) else {
        return true;
    };
    let names = || value.split(',').map(str::trim).filter(|name| !name.is_empty());
    let unknown: Vec<_> = names()
        .filter(|name| !["tracecontext", "baggage", "none"].contains(name))
        .collect();
    if !unknown.is_empty() {
        let unknown = unknown.join(",");
        variables.ignore(PROPAGATORS, &unknown, "write tracecontext, baggage or none");
    }
    let mut known = names()
        .filter(|name| ["baggage", "none"].contains(name))
        .peekable();
    names().any(|name| name == "tracecontext") || known.peek().is_none()
}

fn parent_based(root: Sampler) -> Sampler {
    Sampler::ParentBased(Box::new(root))
}

fn ratio(variables: &Variables<'_>) -> f64 {
    let ratio = variables.first(&[SAMPLER_ARG], |_, ratio| match ratio.parse::<f64>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("write a ratio from 0 to 1, for example 0.01".to_owned()),
    });
    ratio.unwrap_or(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
            (&[AT], (SAMPLER, "jaeger_remote"), "write always_on"),
            (
                &[AT, (SAMPLER, "traceidratio")],
                (SAMPLER_ARG, "1.5"),
                "from 0 to 1",
            ),
            (&[AT], ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"), "whole number"),
            (&[AT], ("OTEL_BSP_SCHEDULE_DELAY", "0"), "above 0"),
            (&[AT], (QUEUE_SIZE, "0"), "from 1"),
            (&[AT], (BATCH_SIZE, "4096"), "which is 2048"),
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
