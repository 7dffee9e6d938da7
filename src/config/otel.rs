//! OpenTelemetry's environment variables, `OTEL_…`, under their own names. Read once, before a port is bound.
//!
//! Tracing is off unless an endpoint or an exporter is set. Invalid values are refused, with what to write instead; the
//! library would use a default or ignore them. Headers, resource attributes and compression are only checked here: the
//! library reads them itself.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, Uri};
use opentelemetry_sdk::trace::Sampler;

use crate::net::{Address, Url};

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

/// An invalid value of a variable, with what to write instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{name} is {value:?}: {remedy}")]
pub struct OtelError {
    name: &'static str,
    /// Masked for headers, which may be secret.
    value: String,
    remedy: String,
}

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";
const QUEUE_SIZE: &str = "OTEL_BSP_MAX_QUEUE_SIZE";
const BATCH_SIZE: &str = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE";
/// Path of traces below an HTTP endpoint for all signals.
const TRACES_PATH: &str = "v1/traces";

/// Looks up variables; an empty one counts as not set.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn get(&self, name: &'static str) -> Option<(&'static str, String)> {
        let value = (self.0)(name)?.trim().to_owned();
        Some((name, value)).filter(|(_, value)| !value.is_empty())
    }

    /// The variable for traces, otherwise the one for all signals.
    fn either(&self, traces: &'static str, all: &'static str) -> Option<(&'static str, String)> {
        self.get(traces).or_else(|| self.get(all))
    }

    fn number<T: std::str::FromStr>(&self, name: &'static str, default: T) -> Result<T, OtelError> {
        match self.get(name) {
            None => Ok(default),
            Some((name, value)) => value
                .parse()
                .map_err(|_| refused(name, value, "write a whole number")),
        }
    }

    fn millis(&self, name: &'static str, default: u64) -> Result<Duration, OtelError> {
        let millis = self.number(name, default)?;
        if millis == 0 {
            return Err(refused(name, "0", "write a number of milliseconds above 0"));
        }
        Ok(Duration::from_millis(millis))
    }

    fn is_true(&self, name: &'static str) -> bool {
        self.get(name)
            .is_some_and(|(_, value)| value.eq_ignore_ascii_case("true"))
    }
}

fn refused(name: &'static str, value: impl Into<String>, remedy: impl Into<String>) -> OtelError {
    OtelError {
        name,
        value: value.into(),
        remedy: remedy.into(),
    }
}

impl OtelConfig {
    /// Reads the environment of this process; `None` if tracing is off.
    ///
    /// # Errors
    /// The first invalid variable.
    pub fn from_env() -> Result<Option<OtelConfig>, OtelError> {
        OtelConfig::from_variables(&|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Reads the variables that `look_up` returns; `None` if tracing is off.
    ///
    /// # Errors
    /// The first invalid variable.
    pub fn from_variables(look_up: &dyn Fn(&str) -> Option<String>) -> Result<Option<OtelConfig>, OtelError> {
        let variables = Variables(look_up);
        if variables.is_true("OTEL_SDK_DISABLED") {
            return Ok(None);
        }
        let endpoint = variables.either(TRACES_ENDPOINT, ENDPOINT);
        match variables.get("OTEL_TRACES_EXPORTER") {
            Some((_, exporter)) if exporter == "none" => return Ok(None),
            Some((_, exporter)) if exporter == "otlp" => {}
            Some((name, other)) => return Err(refused(name, other, "write otlp or none")),
            None if endpoint.is_none() => return Ok(None),
            None => {}
        }
        let protocol = protocol(&variables)?;
        let (endpoint, path) = match endpoint {
            Some((name, value)) => at(&variables, protocol, name, &value)?,
            None => {
                let (port, path) = match protocol {
                    Protocol::Grpc => (4317, "/"),
                    Protocol::Http => (4318, "/v1/traces"),
                };
                (tcp(false, "localhost", port), path.to_owned())
            }
        };
        let client = match (
            variables.either(
                "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE",
                "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
            ),
            variables.either(
                "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY",
                "OTEL_EXPORTER_OTLP_CLIENT_KEY",
            ),
        ) {
            (None, None) => None,
            (Some((_, certificate)), Some((_, key))) => Some((certificate.into(), key.into())),
            (Some((name, value)), None) => {
                return Err(refused(name, value, "set OTEL_EXPORTER_OTLP_CLIENT_KEY, too"));
            }
            (None, Some((name, value))) => {
                let remedy = "set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE, too";
                return Err(refused(name, value, remedy));
            }
        };
        let timeout = match variables.get("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT") {
            Some((name, _)) => variables.millis(name, 10_000)?,
            None => variables.millis("OTEL_EXPORTER_OTLP_TIMEOUT", 10_000)?,
        };
        let (max_queue_size, max_batch_size) = queue(&variables)?;
        check_compression(&variables)?;
        check_headers(&variables)?;
        check_resource(&variables)?;
        Ok(Some(OtelConfig {
            endpoint,
            path,
            protocol,
            timeout,
            certificate: variables
                .either(
                    "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE",
                    "OTEL_EXPORTER_OTLP_CERTIFICATE",
                )
                .map(|(_, path)| path.into()),
            client,
            sampler: sampler(&variables)?,
            service: variables.get("OTEL_SERVICE_NAME").map(|(_, name)| name),
            schedule_delay: variables.millis("OTEL_BSP_SCHEDULE_DELAY", 5000)?,
            export_timeout: variables.millis("OTEL_BSP_EXPORT_TIMEOUT", 30_000)?,
            max_queue_size,
            max_batch_size,
        }))
    }
}

fn protocol(variables: &Variables<'_>) -> Result<Protocol, OtelError> {
    let named = variables.either(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
    );
    match named {
        None => Ok(Protocol::Http),
        Some((_, value)) if value == "grpc" => Ok(Protocol::Grpc),
        Some((_, value)) if value == "http/protobuf" => Ok(Protocol::Http),
        Some((name, value)) => Err(refused(name, value, "write grpc or http/protobuf")),
    }
}

fn check_compression(variables: &Variables<'_>) -> Result<(), OtelError> {
    let named = variables.either(
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION",
        "OTEL_EXPORTER_OTLP_COMPRESSION",
    );
    match named {
        Some((name, value)) if value != "none" && value != "gzip" => {
            Err(refused(name, value, "write none or gzip"))
        }
        _ => Ok(()),
    }
}

fn queue(variables: &Variables<'_>) -> Result<(usize, usize), OtelError> {
    let queue_size: usize = variables.number(QUEUE_SIZE, 2048)?;
    if !(1..=1 << 20).contains(&queue_size) {
        let given = queue_size.to_string();
        return Err(refused(QUEUE_SIZE, given, "write a number from 1 to 1048576"));
    }
    let batch_size: usize = variables.number(BATCH_SIZE, queue_size.min(512))?;
    if !(1..=queue_size).contains(&batch_size) {
        let remedy = format!("write a number from 1 to {QUEUE_SIZE}, which is {queue_size}");
        return Err(refused(BATCH_SIZE, batch_size.to_string(), remedy));
    }
    Ok((queue_size, batch_size))
}

/// An endpoint and a path, of a URL with or without a port and, for gRPC, a scheme.
fn at(
    variables: &Variables<'_>,
    protocol: Protocol,
    name: &'static str,
    value: &str,
) -> Result<(Url, String), OtelError> {
    let example = match protocol {
        Protocol::Grpc => "http://localhost:4317",
        Protocol::Http => "http://localhost:4318",
    };
    let wrong = || refused(name, value, format!("write a URL, for example {example}"));
    let with_scheme = match (protocol, value.contains("://")) {
        (Protocol::Grpc, false) => {
            let insecure = variables.is_true("OTEL_EXPORTER_OTLP_TRACES_INSECURE")
                || variables.is_true("OTEL_EXPORTER_OTLP_INSECURE");
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
            let remedy = "gRPC takes no path: write only scheme://host:port, or set \
                          OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf";
            return Err(refused(name, value, remedy));
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

fn check_headers(variables: &Variables<'_>) -> Result<(), OtelError> {
    let named = variables.either("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS");
    match named {
        Some((name, list)) if !names(&list).all(|name| name.is_some_and(is_header)) => {
            let remedy = "write name=value,name=value, with values percent-encoded";
            Err(refused(name, "(secret)", remedy))
        }
        _ => Ok(()),
    }
}

fn is_header(name: &str) -> bool {
    name.parse::<HeaderName>().is_ok()
}

fn check_resource(variables: &Variables<'_>) -> Result<(), OtelError> {
    match variables.get("OTEL_RESOURCE_ATTRIBUTES") {
        Some((name, list)) if !names(&list).all(|name| name.is_some()) => {
            Err(refused(name, list, "write name=value,name=value"))
        }
        _ => Ok(()),
    }
}

/// The names in `name=value,name=value`; `None` for a part of another form.
fn names(list: &str) -> impl Iterator<Item = Option<&str>> {
    let parts = list.split(',').filter(|part| !part.trim().is_empty());
    parts.map(|part| {
        let (name, _) = part.split_once('=')?;
        Some(name.trim()).filter(|name| !name.is_empty())
    })
}

fn sampler(variables: &Variables<'_>) -> Result<Sampler, OtelError> {
    let name = variables.get(SAMPLER).map(|(_, name)| name);
    let name = name.as_deref().unwrap_or("parentbased_always_on");
    let root = match name.trim_start_matches("parentbased_") {
        "always_on" => Sampler::AlwaysOn,
        "always_off" => Sampler::AlwaysOff,
        "traceidratio" => {
            let (_, ratio) = variables
                .get(SAMPLER_ARG)
                .unwrap_or((SAMPLER_ARG, "1".to_owned()));
            match ratio.parse::<f64>() {
                Ok(number) if (0.0..=1.0).contains(&number) => Sampler::TraceIdRatioBased(number),
                _ => {
                    let remedy = "write a ratio from 0 to 1, for example 0.01";
                    return Err(refused(SAMPLER_ARG, ratio, remedy));
                }
            }
        }
        _ => {
            let remedy = "write always_on, always_off, traceidratio, parentbased_always_on, \
                          parentbased_always_off or parentbased_traceidratio";
            return Err(refused(SAMPLER, name, remedy));
        }
    };
    Ok(if name.starts_with("parentbased_") {
        Sampler::ParentBased(Box::new(root))
    } else {
        root
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Option<OtelConfig>, String> {
        let look_up = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        OtelConfig::from_variables(&look_up).map_err(|error| error.to_string())
    }

    fn on(variables: &[(&str, &str)]) -> OtelConfig {
        settings(variables).unwrap().expect("tracing is on")
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
            assert!(settings(variables).unwrap().is_none(), "{variables:?}");
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

    #[test]
    fn invalid_values_are_refused_with_a_remedy() {
        const AT: (&str, &str) = (ENDPOINT, "http://a:1");
        for (variables, says) in [
            (&[(ENDPOINT, "a:4318")][..], "write a URL"),
            (&[(ENDPOINT, "ftp://a:1")], "write a URL"),
            (&[(ENDPOINT, "http://a:none")], "write a URL"),
            (&[(ENDPOINT, "http://user@a:1")], "write a URL"),
            (
                &[
                    (ENDPOINT, "http://a:1/v1/traces"),
                    ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
                ],
                "takes no path",
            ),
            (
                &[AT, ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")],
                "write grpc or http/protobuf",
            ),
            (&[AT, ("OTEL_TRACES_EXPORTER", "zipkin")], "write otlp or none"),
            (&[AT, ("OTEL_TRACES_SAMPLER", "jaeger_remote")], "write always_on"),
            (
                &[
                    AT,
                    ("OTEL_TRACES_SAMPLER", "traceidratio"),
                    ("OTEL_TRACES_SAMPLER_ARG", "1.5"),
                ],
                "from 0 to 1",
            ),
            (&[AT, ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s")], "whole number"),
            (&[AT, ("OTEL_BSP_SCHEDULE_DELAY", "0")], "above 0"),
            (&[AT, ("OTEL_BSP_MAX_QUEUE_SIZE", "0")], "from 1"),
            (&[AT, ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096")], "which is 2048"),
            (&[AT, ("OTEL_RESOURCE_ATTRIBUTES", "a")], "name=value"),
            (
                &[AT, ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd")],
                "write none or gzip",
            ),
            (
                &[AT, ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "k")],
                "CLIENT_CERTIFICATE",
            ),
        ] {
            let error = settings(variables).unwrap_err();
            assert!(error.contains(says), "{variables:?}: {error}");
        }
        let secret = settings(&[AT, ("OTEL_EXPORTER_OTLP_HEADERS", "api key=hidden")]).unwrap_err();
        assert!(
            secret.contains("name=value") && !secret.contains("hidden"),
            "{secret}"
        );
    }
}
