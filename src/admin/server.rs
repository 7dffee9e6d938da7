//! HTTP server: paths and responses.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::header::HeaderName;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::handles::Handles;
use super::status::samples::{Counts, INTERVAL, Recent};
use super::{page, readiness, status};
use crate::mirror::Mirrors;
use crate::panics::restarting;
use crate::server::{Listener, Tracked, secured};
use crate::telemetry::Telemetry;
use crate::telemetry::exposition::Format;
use crate::upstream::Upstream;

const TEXT: &str = "text/plain; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const JSON: &str = "application/json";

/// The HTTP server for operators and probes.
#[derive(Debug)]
pub struct Admin {
    handles: Handles,
}

impl Admin {
    /// Server that reports on these rooms. `tasks` are those of connections and calls; `draining` ends readiness.
    #[must_use]
    pub fn new(
        mirrors: Arc<Mirrors>,
        upstream: Arc<Upstream>,
        telemetry: Arc<Telemetry>,
        tasks: TaskTracker,
        draining: CancellationToken,
    ) -> Arc<Admin> {
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
            },
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
            }
        });
        stop.run_until_cancelled(sampling).await;
    }

    /// Serves connections of `listener` until `stop`; their tasks belong to `tasks`.
    pub async fn serve(self: Arc<Self>, listener: Listener, tasks: TaskTracker, stop: CancellationToken) {
        let mut server = auto::Builder::new(Tracked(tasks.clone()));
        server.http1().timer(TokioTimer::new());
        while let Some(stream) = stop.run_until_cancelled(listener.accept()).await {
            let (admin, server, stop, tls) =
                (Arc::clone(&self), server.clone(), stop.clone(), listener.tls());
            tasks.spawn(async move {
                let Some(stream) = secured(stream, tls, &stop).await else {
                    return;
                };
                let service = service_fn(move |request| {
                    let response = admin.respond(&request);
                    async move { Ok::<_, Infallible>(response) }
                });
                let connection = server.serve_connection(TokioIo::new(stream), service);
                // Responses are short: a stop need not wait for them.
                let _ = stop.run_until_cancelled_owned(connection).await;
            });
        }
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
                let accept = request.headers().get(header::ACCEPT);
                let format = Format::accepted(accept.and_then(|accept| accept.to_str().ok()));
                (StatusCode::OK, format.content_type(), metrics.encode(format))
            }
            "/" => (StatusCode::OK, HTML, page::render(&status::collect(handles))),
            "/status" => match serde_json::to_string(&status::collect(handles)) {
                Ok(json) => (StatusCode::OK, JSON, json),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
            },
            "/page.css" => (StatusCode::OK, CSS, page::CSS.to_owned()),
            "/page.js" => (StatusCode::OK, JAVASCRIPT, page::JS.to_owned()),
            _ => (
                StatusCode::NOT_FOUND,
                TEXT,
                "not found; paths are /, /status, /livez, /readyz and /metrics\n".to_owned(),
            ),
        };
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
}
