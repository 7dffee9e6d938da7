//! `rangecache status`, `rangecache health` and `rangecache ctl`: they ask a rangecache that runs, over its listener for
//! operators, so that nothing else is needed where it runs.
//!
//! | file | subject |
//! |---|---|
//! | `flags` | flags of the commands |
//! | `text` | the status for people |
//!
//! This room imports `report` and `base`; `main`, `cli` and `static_pod` import it.

mod flags;
mod text;

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use http::{Method, StatusCode};
use serde_json::Value;

pub use flags::{CtlAction, CtlConfig, HealthConfig, StatusConfig};
use rangecache_base::http_request::http_request;
use rangecache_base::net::{Url, connect};
use rangecache_report::output::print;
use rangecache_report::{Finding, FindingId};

/// Bound on a response: a status has a few hundred kilobytes.
const MAX_RESPONSE_BYTES: usize = 16 << 20;
/// Time for a response: a reload reads files.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Exit code if no rangecache responds.
const NO_RESPONSE: u8 = 2;

/// Prints the status of the running rangecache. The exit code says whether it is ready and has no bad finding.
#[must_use]
pub fn status(options: &StatusConfig) -> ExitCode {
    let url = &options.at.metrics_url;
    let asked = exchange(url, &Method::GET, "/status").and_then(|(_, body)| {
        serde_json::from_str::<Value>(&body).map_err(|_| io::Error::other("what responds is no rangecache"))
    });
    match asked {
        Ok(status) => {
            let code = u8::from(!text::is_good(&status));
            options
                .output
                .print(code, |style| text::of(&status, style), &status)
        }
        Err(error) => unanswered(url, &error),
    }
}

/// Asks whether the running rangecache responds, or is ready. Prints its text.
#[must_use]
pub fn health(options: &HealthConfig) -> ExitCode {
    let path = if options.ready { "/readyz?memory" } else { "/livez" };
    answered(&options.at.metrics_url, &Method::GET, path)
}

/// Has the running rangecache do something, and prints its response.
#[must_use]
pub fn ctl(options: &CtlConfig) -> ExitCode {
    let (method, path) = match options.action {
        CtlAction::Reload => (Method::POST, "/reload"),
        CtlAction::ForwardAll => (Method::POST, "/forward-all"),
        CtlAction::UseMemory => (Method::DELETE, "/forward-all"),
    };
    answered(&options.at.metrics_url, &method, path)
}

/// Sends a request, and prints the response. The exit code says whether it is 200.
fn answered(url: &Url, method: &Method, path: &str) -> ExitCode {
    match exchange(url, method, path) {
        Ok((status, body)) => {
            let printed = print(|out| writeln!(out, "{}", body.trim_end()));
            if status == StatusCode::OK {
                printed
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => unanswered(url, &error),
    }
}

fn exchange(url: &Url, method: &Method, path: &str) -> io::Result<(StatusCode, String)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(send(url, method, path))
}

fn unanswered(url: &Url, error: &io::Error) -> ExitCode {
    let title = format!("no rangecache responds at {url}: {error}");
    let finding = Finding::new(FindingId::NoResponse, title);
    // There is no other place to report it.
    let _ = writeln!(io::stderr(), "{}. {}", finding.text(), finding.remedy);
    ExitCode::from(NO_RESPONSE)
}

/// Status and body of the response. The host is named such that the listener accepts it, whatever its name is.
async fn send(url: &Url, method: &Method, path: &str) -> io::Result<(StatusCode, String)> {
    let exchange = async {
        let stream = connect(url, TIMEOUT).await?;
        http_request(stream, method.clone(), "localhost", path, MAX_RESPONSE_BYTES).await
    };
    tokio::time::timeout(TIMEOUT, exchange)
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "it did not respond in time"))?
}

/// The body of the response to `GET`, whatever the status.
pub(crate) async fn get(url: &Url, path: &str) -> io::Result<String> {
    Ok(send(url, &Method::GET, path).await?.1)
}
