//! HTTP server: paths, and requests that change the process.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use rangecache_base::telemetry::metrics::{Gauge, gauge};
use rangecache_base::telemetry::{Telemetry, exposition::Format, state_changes::ChangeKind};
use rangecache_base::{memory, net::Transport, panics::restarting};
use rangecache_config::LiveConfig;
use rangecache_edge::browser::BrowserRules;
use rangecache_edge::server::{ConnectionLimits, Connections, Listener, ServeConfig};
use rangecache_mirror::Mirrors;
use rangecache_upstream::Upstream;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::{Instant, MissedTickBehavior, timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::metrics::{AdminMetrics, ShownMetrics};
use super::renderings::{Renderings, RequestPace};
use super::responses::{self, CSS, HTML, JAVASCRIPT, JSON, TEXT, busy, not_allowed, text};
use super::status::samples::{INTERVAL, ReadCounts, Recent};
use super::{handles::Handles, page, prefixes::Prefixes, process, readiness, status, symptoms::Symptoms};
use rangecache_config::ReloadHandle;

/// Connections of operators and probes. The kubelet, Prometheus and a person need a few.
const CONNECTIONS: ConnectionLimits = ConnectionLimits {
    all: 64,
    per_address: 16,
    on_loopback: false,
    replace_oldest: true,
};
/// Requests in flight on one connection.
const MAX_STREAMS: u32 = 4;
/// Age at which a connection is closed; a scraper then connects again.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Time between two requests, those of probes aside.
const REQUEST_INTERVAL: Duration = Duration::from_millis(1);
/// Requests that need not keep the interval, after a pause.
const REQUEST_BURST: u32 = 100;
/// Longest wait for a turn, and for a page. The requests of all connections together (256, and 64 pages) have their turns
/// in less; memory that closed connections do not give back may take longer.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The HTTP server for operators and probes.
#[derive(Debug)]
pub struct Admin {
    handles: Handles,
    /// Of all listeners for operators together.
    connections: Arc<Connections>,
    /// Web pages may not read this port.
    browser: BrowserRules,
    pace: RequestPace,
    renderings: Renderings,
}

impl Admin {
    /// Server that reports on these rooms. `tasks` are those of connections and calls; `draining` ends readiness;
    /// `reload` reloads the flags; `commit` is that of the binary. The flags of `live` name the hosts under which the port may be called.
    #[must_use]
    #[expect(
        clippy::too_many_arguments,
        reason = "each is a part of the process that it reports on"
    )]
    pub fn new(
        mirrors: Arc<Mirrors>,
        upstream: Arc<Upstream>,
        telemetry: Arc<Telemetry>,
        tasks: TaskTracker,
        draining: CancellationToken,
        reload: ReloadHandle,
        live: &LiveConfig,
        commit: &'static str,
    ) -> Arc<Admin> {
        let config = live.load();
        let started = Instant::now();
        let metrics = ShownMetrics::new(&telemetry.metrics);
        let recent = Recent::new(started, ReadCounts::now(&metrics, &mirrors));
        let unread_bytes = telemetry.metrics.group::<AdminMetrics>().unread_bytes.clone();
        Arc::new(Admin {
            handles: Handles {
                mirrors,
                upstream,
                telemetry,
                metrics,
                tasks,
                draining,
                recent,
                symptoms: Symptoms::default(),
                started,
                client_metrics_top: config.clients.metrics_top as usize,
                prefixes: Prefixes::new(config.mirror.prefix_metrics_top),
                reload,
                live: live.clone(),
                commit,
                host: process::host(),
                pod: process::pod(),
            },
            connections: Connections::new(CONNECTIONS, Gauge::default()),
            browser: config.listen.browser_rules().without_origins(),
            pace: RequestPace::new(REQUEST_INTERVAL, REQUEST_BURST),
            renderings: Renderings::new(unread_bytes),
        })
    }

    /// Samples the counters for the page until `stop`.
    pub async fn remember(self: Arc<Self>, stop: CancellationToken) {
        let sampling = restarting("samples", async || {
            let mut interval = tokio::time::interval_at(Instant::now() + INTERVAL, INTERVAL);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let now = interval.tick().await;
                let handles = &self.handles;
                handles.recent.record(now, handles.counts());
                handles.telemetry.clients.sample(now);
                handles
                    .symptoms
                    .note(now, &handles.telemetry.metrics.encode(Format::Text));
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
            metrics: self.handles.telemetry.metrics.group(),
            tasks,
            closing: stop.clone(),
            drain: stop,
        };
        let handler = move |_: &_, _: &_, _| {
            let admin = Arc::clone(&self);
            // A connection waits for one page at a time, so that its streams delay no other connection's.
            let one_page = Arc::new(Semaphore::new(1));
            let handle = move |request: Request<Incoming>, transport| {
                let (admin, one_page) = (Arc::clone(&admin), Arc::clone(&one_page));
                async move { Ok::<_, Infallible>(admin.respond(&request, transport, &one_page).await) }
            };
            (handle, None)
        };
        listener.serve(handler, config).await;
    }

    async fn respond(
        &self,
        request: &Request<Incoming>,
        transport: Transport,
        one_page: &Semaphore,
    ) -> Response<Full<Bytes>> {
        let path = request.uri().path();
        // A probe is cheap, and what waits for it restarts the process or takes it out of service.
        if !is_probe(path) && timeout(MAX_WAIT, self.pace.turn()).await.is_err() {
            return busy();
        }
        match self.browser.check(request, transport) {
            Err(refusal) => {
                let refusal = refusal.to_string();
                // A scraper shows the status alone. The pace of requests bounds these lines.
                tracing::warn!(
                    listener = "metrics",
                    reason = refusal.trim_end(),
                    "a request that a web page may have caused was refused"
                );
                text(StatusCode::FORBIDDEN, TEXT, refusal)
            }
            Ok(()) if is_control(path) => {
                let (status, body) = control(&self.handles, request.method(), path, transport).await;
                text(status, JSON, format!("{body}\n"))
            }
            Ok(()) if !reads(request.method()) => not_allowed(),
            Ok(()) => self.read(request, one_page).await,
        }
    }

    async fn read(&self, request: &Request<Incoming>, one_page: &Semaphore) -> Response<Full<Bytes>> {
        let handles = &self.handles;
        let accept = request.headers().get(header::ACCEPT);
        let is_gzip = responses::takes_gzip(request.headers());
        let page = match request.uri().path() {
            "/livez" => return text(StatusCode::OK, TEXT, "ok\n"),
            "/readyz" => {
                let lines = self.renderings.count(readiness::describe(handles));
                let needs_memory = request.uri().query() == Some("memory");
                let is_ready = readiness::is_ready(handles)
                    && (!needs_memory || readiness::answers_from_memory(handles));
                return text(status_of_probe(is_ready), TEXT, lines);
            }
            "/servez" => {
                let problem = readiness::cannot_serve(handles);
                return text(
                    status_of_probe(problem.is_none()),
                    TEXT,
                    problem.unwrap_or("ok\n"),
                );
            }
            "/page.css" => return text(StatusCode::OK, CSS, page::CSS),
            "/page.js" => return text(StatusCode::OK, JAVASCRIPT, page::JS),
            "/metrics" => {
                RenderedPage::Metrics(Format::accepted(accept.and_then(|accept| accept.to_str().ok())))
            }
            "/" => RenderedPage::Html,
            "/status" => RenderedPage::Status,
            "/clients" => RenderedPage::Clients,
            _ => {
                let paths =
                    "not found; paths are /, /status, /clients, /livez, /readyz, /servez and /metrics\n";
                return text(StatusCode::NOT_FOUND, TEXT, paths);
            }
        };
        let rendering = async {
            let _one_page = one_page.acquire().await;
            let close_oldest = || self.connections.replace_oldest();
            let render = || {
                let (status, content_type, body) = page.render(handles);
                match is_gzip.then(|| responses::compressed(&body)).flatten() {
                    Some(compressed) => {
                        let mut response = text(status, content_type, self.renderings.count(compressed));
                        responses::mark_gzip(response.headers_mut());
                        response
                    }
                    None => text(status, content_type, self.renderings.count(body)),
                }
            };
            self.renderings.render(close_oldest, render).await
        };
        timeout(MAX_WAIT, rendering).await.unwrap_or_else(|_| busy())
    }
}

/// A response that takes long to build and may be large.
enum RenderedPage {
    Metrics(Format),
    Html,
    Status,
    Clients,
}

impl RenderedPage {
    /// Status, content type and body.
    fn render(&self, handles: &Handles) -> (StatusCode, &'static str, String) {
        match self {
            RenderedPage::Metrics(format) => {
                let metrics = &handles.telemetry.metrics;
                metrics.process.tasks.set(gauge(handles.tasks.len()));
                metrics.process.memory_limit.set(gauge(memory::limit_bytes()));
                handles.upstream.export(metrics);
                handles.prefixes.export(&handles.mirrors, &handles.metrics);
                let mut clients = handles.telemetry.clients.figures();
                clients.truncate(handles.client_metrics_top);
                metrics.clients.export(&clients);
                (StatusCode::OK, format.content_type(), metrics.encode(*format))
            }
            RenderedPage::Html => (StatusCode::OK, HTML, page::render(&status::collect(handles))),
            RenderedPage::Status => responses::json(&status::collect(handles)),
            RenderedPage::Clients => responses::json(&handles.telemetry.clients.figures()),
        }
    }
}

fn status_of_probe(is_good: bool) -> StatusCode {
    if is_good {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}

/// Whether a probe of the kubelet asks for this path.
fn is_probe(path: &str) -> bool {
    ["/livez", "/readyz", "/servez"].contains(&path)
}

/// Whether a method changes nothing; no other is served.
fn reads(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

/// Status and JSON of a response.
type Controlled = (StatusCode, serde_json::Value);

/// Whether the path names something that changes the process.
fn is_control(path: &str) -> bool {
    ["/reload", "/forward-all"].contains(&path)
}

/// Performs a request that changes the process. Accepted from where `--control` says, at most from this host, and not if a web page
/// caused it.
async fn control(handles: &Handles, method: &Method, path: &str, transport: Transport) -> Controlled {
    let from = handles.live.load().listen.control;
    if !from.permits(transport) {
        return (StatusCode::FORBIDDEN, json!({ "error": from.refusal() }));
    }
    match (path, method) {
        ("/reload", &Method::POST) => match handles.reload.reload().await {
            Ok(reloaded) => (StatusCode::OK, json!(reloaded)),
            Err(error) => (StatusCode::BAD_REQUEST, json!({ "error": error })),
        },
        ("/forward-all", &Method::POST) => forward_all(handles, true),
        ("/forward-all", &Method::DELETE) => forward_all(handles, false),
        _ => {
            let error = "use POST /reload, POST /forward-all or DELETE /forward-all";
            (StatusCode::METHOD_NOT_ALLOWED, json!({ "error": error }))
        }
    }
}

/// Switches memory off or on.
fn forward_all(handles: &Handles, is_on: bool) -> Controlled {
    if handles.mirrors.forward_all(is_on) {
        let kind = if is_on {
            ChangeKind::MemoryOff
        } else {
            ChangeKind::MemoryOn
        };
        handles.telemetry.state_changes.record(kind, "", "");
        if is_on {
            tracing::warn!(
                "an operator has switched memory off: etcd answers every read and continues every watch"
            );
        } else {
            tracing::info!("an operator has switched memory on again");
        }
    }
    (StatusCode::OK, json!({ "forward_all": is_on }))
}
