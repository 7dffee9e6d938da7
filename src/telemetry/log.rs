//! Logs on standard error: text for people, JSON for collectors.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Sends `tracing` events of `level` to standard error, as JSON or as text. A second call in one process has no effect.
pub fn init(level: &str, is_json: bool) {
    let filter = level
        .parse::<EnvFilter>()
        .unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let result = if is_json {
        builder
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .try_init()
    } else {
        builder.with_ansi(std::io::stderr().is_terminal()).try_init()
    };
    drop(result);
}
