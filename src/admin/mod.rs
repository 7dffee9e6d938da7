//! What operators and probes ask over HTTP: `/livez`, `/readyz`, `/metrics`, and a status in words at `/`.
//!
//! It uses `mirror`, `upstream` and `telemetry`; only `main` uses it.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::mirror::Mirrors;
use crate::mirror::knowledge::Auth;
use crate::proxy::listener::{Listener, Tracked, secured};
use crate::telemetry::{Metrics, Why};
use crate::upstream::Upstream;

/// What can be asked about.
#[derive(Debug)]
pub struct Admin {
    /// The mirrors.
    pub mirrors: Arc<Mirrors>,
    /// etcd's endpoints.
    pub upstream: Arc<Upstream>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Counted for the metric.
    pub tasks: TaskTracker,
    /// Set once the process drains: readiness ends then.
    pub draining: CancellationToken,
}

impl Admin {
    /// Serves until `stop`.
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
                    let response = admin.answer(&request);
                    async move { Ok::<_, Infallible>(response) }
                });
                let connection = server.serve_connection(TokioIo::new(stream), service);
                // These answers are short: a stop need not wait for them.
                let _ = stop.run_until_cancelled_owned(connection).await;
            });
        }
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let (status, content_type, body) = match request.uri().path() {
            "/livez" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
            "/readyz" => {
                let ready = self.ready();
                let status = if ready {
                    StatusCode::OK
                } else {
                    StatusCode::SERVICE_UNAVAILABLE
                };
                (status, TEXT, self.describe_mirrors())
            }
            "/metrics" => {
                self.metrics
                    .tasks
                    .set(i64::try_from(self.tasks.len()).unwrap_or(i64::MAX));
                (StatusCode::OK, OPEN_METRICS, self.metrics.encode())
            }
            "/" => (StatusCode::OK, TEXT, self.describe()),
            _ => (
                StatusCode::NOT_FOUND,
                TEXT,
                "there are /, /livez, /readyz and /metrics\n".to_owned(),
            ),
        };
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    }

    /// Every mirror is warm or has stepped aside for good.
    fn ready(&self) -> bool {
        !self.draining.is_cancelled()
            && self
                .mirrors
                .all()
                .iter()
                .all(|mirror| !matches!(mirror.view(), Err(why) if why != Why::OverBudget))
    }

    fn describe_mirrors(&self) -> String {
        let mut text = String::new();
        if self.draining.is_cancelled() {
            text.push_str("draining\n");
        }
        let credentials = self.upstream.credentials();
        if let Some(problem) = credentials.problem() {
            let _ = writeln!(text, "{problem}");
        } else if self.mirrors.knowledge.auth() == Auth::On && !credentials.is_someone() {
            text.push_str("etcd's auth is on and there is no --user: every read is forwarded\n");
        }
        for mirror in self.mirrors.all() {
            // Writing into a String cannot fail.
            let _ = match mirror.view() {
                Ok(view) => writeln!(
                    text,
                    "{}: in service at revision {}, {} keys, {} bytes",
                    mirror.name,
                    view.revision,
                    view.tree.len(),
                    mirror.memory_bytes()
                ),
                Err(why) => writeln!(
                    text,
                    "{}: out of service ({}), {} keys loaded",
                    mirror.name,
                    why.as_str(),
                    mirror.metrics.load_keys.get()
                ),
            };
        }
        text
    }

    fn describe(&self) -> String {
        let mut text = format!("rangecache {}\n\nmirrors\n", env!("CARGO_PKG_VERSION"));
        text.push_str(&self.describe_mirrors());
        text.push_str("\nendpoints\n");
        for endpoint in self.upstream.describe() {
            let _ = writeln!(text, "{endpoint}");
        }
        let _ = writeln!(text, "\nauth: {:?}", self.mirrors.knowledge.auth());
        text
    }
}

const TEXT: &str = "text/plain; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
