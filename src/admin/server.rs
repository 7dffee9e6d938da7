//! HTTP server: paths and responses.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::HeaderName;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use prometheus_client::metrics::gauge::Gauge;
use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::control::{control, is_control};
use super::handles::Handles;
use super::pace::Pace;
use super::prefixes::Prefixes;
use super::status::samples::{Counts, INTERVAL, Recent};
use super::{page, process, readiness, status};
use crate::browser::BrowserRules;
use crate::config::LiveConfig;
use crate::mirror::Mirrors;
use crate::panics::restarting;
use crate::reload::ReloadHandle;
use crate::server::{ConnectionLimits, Connections, Listener, ServeConfig};
use crate::telemetry::Telemetry;
use crate::telemetry::exposition::Format;
use crate::upstream::Upstream;

/// Methods that are served.
const READS: &str = "GET, HEAD";
const TEXT: &str = "text/plain; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const JSON: &str = "application/json";

/// Connections of operators and probes. The kubelet, Prometheus and a person need a few.
const CONNECTIONS: ConnectionLimits = ConnectionLimits {
    all: 64,
    per_address: 16,
    on_loopback: false,
    replace_oldest: true,
};
/// Requests in flight on one connection.
const MAX_STREAMS: u32 = 16;
/// Age at which a connection is closed; a scraper then connects again.
const MAX_AGE: Duration = Duration::from_secs(60);

/// The HTTP server for operators and probes.
#[derive(Debug)]
pub struct Admin {
    handles: Handles,
    /// Of all listeners for operators together.
    connections: Arc<Connections>,
    /// Web pages may not read this port.
    browser: BrowserRules,
    pace: Pace,
}

impl Admin {
    /// Server that reports on these rooms. `tasks` are those of connections and calls; `draining` ends readiness;
    /// `reload` reloads the flags. The flags of `live` name the hosts under which the port may be called.
    #[must_use]
    pub fn new(
        mirrors: Arc<Mirrors>,
        upstream: Arc<Upstream>,
        telemetry: Arc<Telemetry>,
        tasks: TaskTracker,
        draining: CancellationToken,
        reload: ReloadHandle,
        live: &LiveConfig,
    ) -> Arc<Admin> {
        let config = live.load();
        let started = Instant::now();
        let recent = Recent::new(started, Counts::now(&telemetry.metrics, &mirrors));
        Arc::new(Admin {
            handles: Handles {
                mirrors,
                upstream,
                telemetry,
                tasks,
                draining,
                recent,
                started,
                client_metrics_top: config.clients.metrics_top as usize,
                prefixes: Prefixes::new(config.mirror.prefix_metrics_top),
                reload,
                live: live.clone(),
                host: process::host(),
            },
            connections: Connections::new(CONNECTIONS, Gauge::default()),
            browser: config.listen.browser_rules().without_origins(),
            pace: Pace::new(),
        })
    }

    /// Samples the counters for the page until `stop`.
    pub async fn remember(self: Arc<Self>, stop: CancellationToken) {
        let sampling = restarting("samples", async || {
            let mut interval = tokio::time::interval_at(Instant::now() + INTERVAL, INTERVAL);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let now = interval.tick().await;
                self.handles.recent.record(now, self.handles.counts());
                self.handles.telemetry.clients.sample(now);
            }
        });
        stop.run_until_cancelled(sampling).await;
    }

    /// Serves connections of `listener` until `stop`; their tasks belong to `tasks`. Its bounds are its own, so that
    /// the clients' port and this one cannot exhaust each other.
    pub async fn serve(self: Arc<Self>, listener: Listener, tasks: TaskTracker, stop: CancellationToken) {
        let config = ServeConfig {
            name: "metrics",
            connections: Arc::clone(&self.connections),
            max_concurrent_streams: MAX_STREAMS,
            max_age: Some(MAX_AGE),
            metrics: Arc::clone(&self.handles.telemetry.metrics),
            tasks,
            closing: stop.clone(),
            drain: stop,
        };
        let handler = move |_: &_, _: &_, _| {
            let admin = Arc::clone(&self);
            move |request: Request<Incoming>, transport| {
                let admin = Arc::clone(&admin);
                async move {
                    admin.pace.turn().await;
                    let path = request.uri().path();
                    let response = match admin.browser.check(&request, transport) {
                        Ok(()) if is_control(path) => {
                            let (status, body) =
                                control(&admin.handles, request.method(), path, transport).await;
                            text(status, JSON, format!("{body}\n"))
                        }
                        Ok(()) if !reads(request.method()) => not_allowed(),
                        Ok(()) => admin.respond(&request),
                        Err(refusal) => text(StatusCode::FORBIDDEN, TEXT, refusal.to_string()),
                    };
                    Ok::<_, Infallible>(response)
                }
            }
        };
        listener.serve(handler, config).await;
    }

    fn respond(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let handles = &self.handles;
        let (status, content_type, body) = match request.uri().path() {
            "/livez" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
            "/readyz" => {
                let status = if readiness::is_ready(handles) {
                    StatusCode::OK
                } else {
                    StatusCode::SERVICE_UNAVAILABLE
                };
                (status, TEXT, readiness::describe(handles))
            }
            "/metrics" => {
                let metrics = &handles.telemetry.metrics;
                let tasks = i64::try_from(handles.tasks.len()).unwrap_or(i64::MAX);
                metrics.process.tasks.set(tasks);
                handles.upstream.export(metrics);
                handles.prefixes.export(&handles.mirrors, &handles.telemetry);
                let mut clients = handles.telemetry.clients.figures();
                clients.truncate(handles.client_metrics_top);
                metrics.clients.export(&clients);
                let accept = request.headers().get(header::ACCEPT);
                let format = Format::accepted(accept.and_then(|accept| accept.to_str().ok()));
                (StatusCode::OK, format.content_type(), metrics.encode(format))
            }
            "/" => (StatusCode::OK, HTML, page::render(&status::collect(handles))),
            "/status" => json(&status::collect(handles)),
            "/clients" => json(&status::clients(handles)),
            "/page.css" => (StatusCode::OK, CSS, page::CSS.to_owned()),
            "/page.js" => (StatusCode::OK, JAVASCRIPT, page::JS.to_owned()),
            _ => (
                StatusCode::NOT_FOUND,
                TEXT,
                "not found; paths are /, /status, /clients, /livez, /readyz and /metrics\n".to_owned(),
            ),
        };
        text(status, content_type, body)
    }
}

/// Whether a method changes nothing; no other is served.
fn reads(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

fn not_allowed() -> Response<Full<Bytes>> {
    let body = format!("this listener serves {READS} alone\n");
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, TEXT, body);
    let allowed = HeaderValue::from_static(READS);
    response.headers_mut().insert(header::ALLOW, allowed);
    response
}

/// Status, content type and body of a response in JSON.
fn json(value: &impl Serialize) -> (StatusCode, &'static str, String) {
    match serde_json::to_string(value) {
        Ok(json) => (StatusCode::OK, JSON, json),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
    }
}

fn text(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = [
        (header::CONTENT_TYPE, content_type),
        // Figures change, and so do the files with the next version.
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, page::CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ];
    for (name, value) in headers {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}
