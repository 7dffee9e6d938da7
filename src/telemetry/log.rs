//! Logs on standard error: text for people, JSON for collectors.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::{Config, LogFormat};

/// Sends `tracing` events to standard error in the configured form. A second call in one process does nothing.
pub fn init(config: &Config) {
    let filter = config
        .log_level
        .parse::<EnvFilter>()
        .unwrap_or_else(|_| EnvFilter::new("info"));
    let text_by_default = if std::io::stderr().is_terminal() {
        LogFormat::Text
    } else {
        LogFormat::Json
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let set = match config.log_format.unwrap_or(text_by_default) {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .try_init(),
    };
    drop(set);
}
