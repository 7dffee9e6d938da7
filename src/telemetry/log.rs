//! Logs on standard error: text for people, JSON for collectors.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format;

use super::repeated_lines::Bounded;

/// Sends `tracing` events of `level` to standard error, as JSON or as text; repeated lines are bounded. A second call
/// in one process has no effect.
pub fn init(level: &str, is_json: bool) {
    let filter = level
        .parse::<EnvFilter>()
        .unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let result = if is_json {
        let json = format()
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false);
        let fields = format::JsonFields::new();
        builder
            .fmt_fields(fields)
            .event_format(Bounded::new(json, true))
            .try_init()
    } else {
        let is_terminal = std::io::stderr().is_terminal();
        let text = format().with_ansi(is_terminal);
        builder
            .with_ansi(is_terminal)
            .event_format(Bounded::new(text, false))
            .try_init()
    };
    drop(result);
}
