//! An OpenTelemetry collector: it receives OTLP over gRPC and HTTP on one port, and keeps the spans and requests.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::io::Read as _;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span as Encoded;
use prost::Message;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::either::Either;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::tls::{Ca, Pair};
use crate::wait::{SOON, until};

/// A received span.
#[derive(Clone, Debug)]
pub struct Span {
    /// `service.name` of the process that made the span.
    pub service: String,
    /// Attributes of the process that made the span.
    pub resource: BTreeMap<String, String>,
    pub trace_id: String,
    pub span_id: String,
    /// Empty for a root span.
    pub parent: String,
    pub name: String,
    /// 1 internal, 2 server, 3 client.
    pub kind: i32,
    pub started: u64,
    pub ended: u64,
    pub attributes: BTreeMap<String, String>,
    /// Trace and span ids of linked spans.
    pub links: Vec<(String, String)>,
    pub trace_state: String,
    /// Description, if the span's status is an error.
    pub error: Option<String>,
}

/// A running collector; dropping it stops it.
pub struct Collector {
    url: String,
    got: Arc<Mutex<Got>>,
    _alive: DropGuard,
}

#[derive(Default)]
struct Got {
    spans: Vec<Span>,
    requests: Vec<(String, HeaderMap, Bytes)>,
    uncompressed: usize,
    /// Number of requests still to be answered with "unavailable, retry later".
    busy: usize,
}

impl Collector {
    /// Starts a collector that accepts everything.
    pub async fn start() -> Collector {
        Self::start_as(false, None).await
    }

    /// Starts a collector that reads requests and never responds.
    pub async fn hanging() -> Collector {
        Self::start_as(true, None).await
    }

    /// Starts a collector that refuses the first request as temporarily unavailable.
    pub async fn busy_at_first() -> Collector {
        let collector = Self::start_as(false, None).await;
        collector.got.lock().unwrap().busy = 1;
        collector
    }

    /// Number of requests that are still to be refused as temporarily unavailable.
    pub fn busy(&self) -> usize {
        self.got.lock().unwrap().busy
    }

    /// Starts a collector with TLS, which requires client certificates of the same CA.
    pub async fn with_tls(ca: &Ca, own: &Pair) -> Collector {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_file(ca.cert()).unwrap())
            .unwrap();
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.unwrap())
            .with_single_cert(
                vec![CertificateDer::from_pem_file(&own.cert).unwrap()],
                PrivateKeyDer::from_pem_file(&own.key).unwrap(),
            )
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Self::start_as(false, Some(TlsAcceptor::from(Arc::new(config)))).await
    }

    async fn start_as(hangs: bool, tls: Option<TlsAcceptor>) -> Collector {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://{}", listener.local_addr().unwrap());
        let got = Arc::new(Mutex::new(Got::default()));
        let alive = CancellationToken::new();
        let (collecting, stop) = (Arc::clone(&got), alive.clone());
        tokio::spawn(async move {
            while let Some(Ok((stream, _))) = stop.run_until_cancelled(listener.accept()).await {
                let got = Arc::clone(&collecting);
                let service = service_fn(move |request| answer(Arc::clone(&got), request, hangs));
                let (stop, tls) = (stop.clone(), tls.clone());
                tokio::spawn(async move {
                    let server = auto::Builder::new(TokioExecutor::new());
                    let stream = match tls {
                        None => Either::Left(stream),
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => Either::Right(stream),
                            Err(_) => return,
                        },
                    };
                    let serving = server.serve_connection(TokioIo::new(stream), service);
                    let _ = stop.run_until_cancelled(serving).await;
                });
            }
        });
        Collector {
            url,
            got,
            _alive: alive.drop_guard(),
        }
    }

    /// `http://host:port`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// `host:port`.
    pub fn address(&self) -> &str {
        self.url.trim_start_matches("http://")
    }

    /// All spans received so far.
    pub fn spans(&self) -> Vec<Span> {
        self.got.lock().unwrap().spans.clone()
    }

    /// Number of uncompressed requests so far.
    pub fn uncompressed(&self) -> usize {
        self.got.lock().unwrap().uncompressed
    }

    /// Path, headers and body of every request so far.
    pub fn requests(&self) -> Vec<(String, HeaderMap, Bytes)> {
        self.got.lock().unwrap().requests.clone()
    }

    /// The spans of one trace.
    pub fn trace(&self, trace_id: &str) -> Vec<Span> {
        let mut spans = self.spans();
        spans.retain(|span| span.trace_id == trace_id);
        spans
    }

    /// Waits for a span for which `is_it` is true, and returns the first.
    pub async fn span(&self, what: &str, is_it: impl Fn(&Span) -> bool) -> Span {
        let found = async || self.spans().into_iter().find(&is_it);
        until(SOON, what, found).await.0
    }

    /// A trace as an indented text, with times in microseconds since the start of its first span.
    pub fn tree(&self, trace_id: &str) -> String {
        let spans = self.trace(trace_id);
        let first = spans.iter().map(|span| span.started).min().unwrap_or(0);
        let mut roots: Vec<&Span> = spans
            .iter()
            .filter(|span| !spans.iter().any(|other| other.span_id == span.parent))
            .collect();
        roots.sort_by_key(|span| span.started);
        let mut tree = format!("trace {trace_id}\n");
        for root in roots {
            self.branch(&spans, root, first, 0, &mut tree);
        }
        tree
    }

    fn branch(&self, spans: &[Span], span: &Span, first: u64, depth: usize, tree: &mut String) {
        let indent = "   ".repeat(depth);
        let title = format!("{indent}└─ {} [{}]", span.name, span.service);
        let (from, took) = ((span.started - first) / 1000, (span.ended - span.started) / 1000);
        writeln!(tree, "{title:<58} {from:>7} µs  +{took:>6} µs").unwrap();
        let ours = |name: &str| name.starts_with("rangecache.") || name == "rpc.response.status_code";
        let shown: Vec<_> = span
            .attributes
            .iter()
            .filter(|(name, _)| ours(name))
            .map(|(name, value)| format!("{}={value}", name.trim_start_matches("rangecache.")))
            .collect();
        if !shown.is_empty() {
            writeln!(tree, "{indent}      {}", shown.join(" ")).unwrap();
        }
        for (_, linked) in &span.links {
            let name = self.spans().into_iter().find(|other| other.span_id == *linked);
            let name = name.map_or("(not here)".to_owned(), |other| other.name);
            writeln!(tree, "{indent}      ~ link: {name}").unwrap();
        }
        let mut children: Vec<&Span> = spans
            .iter()
            .filter(|other| other.parent == span.span_id)
            .collect();
        children.sort_by_key(|span| span.started);
        for child in children {
            self.branch(spans, child, first, depth + 1, tree);
        }
    }
}

type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>;

async fn answer(
    got: Arc<Mutex<Got>>,
    request: Request<Incoming>,
    hangs: bool,
) -> Result<Response<Body>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let is_grpc = head.headers["content-type"] == "application/grpc";
    let message = if is_grpc { body.slice(5..) } else { body.clone() };
    let is_compressed = if is_grpc {
        body[0] == 1 && head.headers["grpc-encoding"] == "gzip"
    } else {
        head.headers
            .get("content-encoding")
            .is_some_and(|encoding| encoding == "gzip")
    };
    let message = if is_compressed {
        let mut plain = Vec::new();
        let mut decoder = flate2::read::GzDecoder::new(&message[..]);
        decoder.read_to_end(&mut plain).expect("gzip decodes");
        Bytes::from(plain)
    } else {
        message
    };
    let is_busy = {
        let mut got = got.lock().unwrap();
        let left = got.busy.checked_sub(1);
        got.busy = left.unwrap_or(0);
        left.is_some()
    };
    if !is_busy {
        let mut got = got.lock().unwrap();
        got.uncompressed += usize::from(!is_compressed);
        got.requests
            .push((head.uri.path().to_owned(), head.headers, message.clone()));
        let request = ExportTraceServiceRequest::decode(message).expect("OTLP decodes");
        for resource in request.resource_spans {
            let resource_attributes = attributes(resource.resource.unwrap_or_default().attributes);
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            got.spans
                .extend(spans.map(|span| decoded(&resource_attributes, span)));
        }
    }
    if hangs {
        std::future::pending::<()>().await;
    }
    let mut response = Response::new(if is_grpc {
        let mut trailers = HeaderMap::new();
        // 14: unavailable.
        let status = if is_busy { "14" } else { "0" };
        trailers.insert("grpc-status", HeaderValue::from_static(status));
        let frames = [
            Frame::data(Bytes::from_static(&[0, 0, 0, 0, 0])),
            Frame::trailers(trailers),
        ];
        StreamBody::new(futures_util::stream::iter(frames.map(Ok))).boxed_unsync()
    } else {
        Full::new(Bytes::new()).boxed_unsync()
    });
    if is_busy && !is_grpc {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    let content_type = if is_grpc {
        "application/grpc"
    } else {
        "application/x-protobuf"
    };
    response
        .headers_mut()
        .insert("content-type", HeaderValue::from_static(content_type));
    Ok(response)
}

fn decoded(resource: &BTreeMap<String, String>, span: Encoded) -> Span {
    let status = span.status.unwrap_or_default();
    Span {
        service: resource["service.name"].clone(),
        resource: resource.clone(),
        trace_id: hex(&span.trace_id),
        span_id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        name: span.name,
        kind: span.kind,
        started: span.start_time_unix_nano,
        ended: span.end_time_unix_nano,
        attributes: attributes(span.attributes),
        links: span
            .links
            .iter()
            .map(|link| (hex(&link.trace_id), hex(&link.span_id)))
            .collect(),
        trace_state: span.trace_state,
        error: (status.code == 2).then_some(status.message),
    }
}

fn attributes(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |attribute: KeyValue| {
        let value = match attribute.value.and_then(|value| value.value) {
            Some(Value::StringValue(text)) => text,
            Some(Value::IntValue(number)) => number.to_string(),
            Some(Value::BoolValue(yes)) => yes.to_string(),
            other => format!("{other:?}"),
        };
        (attribute.key, value)
    };
    attributes.into_iter().map(text).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
