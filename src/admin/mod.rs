//! What operators and probes ask over HTTP: `/livez`, `/readyz`, `/metrics`; the page at `/`, and what it shows as JSON at
//! `/status`.
//!
//! | file | subject |
//! |---|---|
//! | `status` | all that the page shows, as data |
//! | `recent` | the last fifteen minutes |
//! | `slowest` | the slowest calls, and where their time went |
//! | `findings` | what an operator should know at once |
//! | `advice` | why memory did not answer, in words, and what to do |
//! | `gates`, `budgets` | what must be so, and what is used of the bounds |
//! | `page`, `page/` | the data as HTML; styles and script |
//! | `charts`, `words` | charts as SVG; numbers as people read them |
//!
//! It uses `mirror`, `upstream` and `telemetry`; only `main` uses it. Nothing here waits for a mirror, or makes one wait.

mod advice;
mod budgets;
mod charts;
mod findings;
mod gates;
mod page;
mod recent;
mod slowest;
mod status;
mod words;

use std::convert::Infallible;
use std::fmt::Write as _;
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

use crate::mirror::Mirrors;
use crate::mirror::cluster_state::Auth;
use crate::panics::restarting;
use crate::server::{Listener, Tracked, secured};
use crate::telemetry::exposition::Format;
use crate::telemetry::{Reason, Telemetry};
use crate::upstream::Upstream;
use recent::{Counts, INTERVAL, Recent};
use status::Status;

/// What can be asked about.
#[derive(Debug)]
pub struct Admin {
    mirrors: Arc<Mirrors>,
    upstream: Arc<Upstream>,
    telemetry: Arc<Telemetry>,
    /// Counted for the metric.
    tasks: TaskTracker,
    /// Set once the process drains: readiness ends then.
    draining: CancellationToken,
    recent: Recent,
    started: Instant,
}

impl Admin {
    /// Ready to answer. `tasks` are those of connections and calls; with `draining` readiness ends.
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
            mirrors,
            upstream,
            telemetry,
            tasks,
            draining,
            recent,
            started,
        })
    }

    /// Remembers what happens, for the page, until `stop`.
    pub async fn remember(self: Arc<Self>, stop: CancellationToken) {
        let remembering = restarting("samples", async || {
            let mut beat = tokio::time::interval_at(Instant::now() + INTERVAL, INTERVAL);
            beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let now = beat.tick().await;
                self.recent
                    .beat(now, Counts::now(&self.telemetry.metrics, &self.mirrors));
            }
        });
        stop.run_until_cancelled(remembering).await;
    }

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
                self.telemetry
                    .metrics
                    .process
                    .tasks
                    .set(i64::try_from(self.tasks.len()).unwrap_or(i64::MAX));
                self.upstream.export(&self.telemetry.metrics);
                let accept = request.headers().get(header::ACCEPT);
                let format = Format::accepted(accept.and_then(|accept| accept.to_str().ok()));
                (
                    StatusCode::OK,
                    format.content_type(),
                    self.telemetry.metrics.encode(format),
                )
            }
            "/" => (StatusCode::OK, HTML, page::render(&Status::of(self))),
            "/status" => match serde_json::to_string(&Status::of(self)) {
                Ok(json) => (StatusCode::OK, JSON, json),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
            },
            "/page.css" => (StatusCode::OK, CSS, page::CSS.to_owned()),
            "/page.js" => (StatusCode::OK, JAVASCRIPT, page::JS.to_owned()),
            _ => (
                StatusCode::NOT_FOUND,
                TEXT,
                "there are /, /status, /livez, /readyz and /metrics\n".to_owned(),
            ),
        };
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        let headers = [
            (header::CONTENT_TYPE, content_type),
            // Figures, and files that the next version changes.
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

    /// Every mirror is warm or has stepped aside for good.
    fn ready(&self) -> bool {
        !self.draining.is_cancelled()
            && self
                .mirrors
                .all()
                .iter()
                .all(|mirror| !matches!(mirror.view(), Err(reason) if reason != Reason::OverBudget))
    }

    fn describe_mirrors(&self) -> String {
        let mut text = String::new();
        if self.draining.is_cancelled() {
            text.push_str("draining\n");
        }
        let credentials = self.upstream.credentials();
        if let Some(problem) = credentials.problem() {
            let _ = writeln!(text, "{problem}");
        } else if self.mirrors.cluster_state.auth() == Auth::On && !credentials.is_configured() {
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
                Err(reason) => writeln!(
                    text,
                    "{}: out of service ({}), {} keys loaded",
                    mirror.name,
                    reason.as_str(),
                    mirror.metrics.load_keys.get()
                ),
            };
        }
        text
    }
}

const TEXT: &str = "text/plain; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const JSON: &str = "application/json";
