//! Logs on standard error: text for people, JSON for collectors.

use std::io::IsTerminal;

use tracing_subscriber::{EnvFilter, fmt::format};

use super::repeated_lines::Bounded;

/// Changes the level of the log.
pub struct LogLevel(Box<dyn Fn(EnvFilter) -> bool + Send + Sync>);

impl std::fmt::Debug for LogLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogLevel").finish_non_exhaustive()
    }
}

impl LogLevel {
    /// Logs events of `level` from now on.
    pub fn set(&self, level: &str) {
        let _ = (self.0)(filter(level));
    }
}

/// Sends `tracing` events of `level` to standard error, as JSON or as text; repeated lines are bounded. A second call
/// in one process has no effect.
pub fn init(level: &str, is_json: bool) -> LogLevel {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .with_writer(std::io::stderr);
    if is_json {
        let json = format()
            .json()
            .flatten_event(true)
            // Joins the lines of one read.
            .with_current_span(true)
            .with_span_list(false);
        let fields = format::JsonFields::new();
        let builder = builder
            .fmt_fields(fields)
            .event_format(Bounded::new(json, true))
            .with_filter_reloading();
        let handle = builder.reload_handle();
        let _ = builder.try_init();
        LogLevel(Box::new(move |filter| handle.reload(filter).is_ok()))
    } else {
        let is_terminal = std::io::stderr().is_terminal();
        let text = format().with_ansi(is_terminal);
        let builder = builder
            .with_ansi(is_terminal)
            .event_format(Bounded::new(text, false))
            .with_filter_reloading();
        let handle = builder.reload_handle();
        let _ = builder.try_init();
        LogLevel(Box::new(move |filter| handle.reload(filter).is_ok()))
    }
}

/// The filter of `level`.
fn filter(level: &str) -> EnvFilter {
    directives(level)
        .parse()
        .unwrap_or_else(|_| EnvFilter::new("info"))
}

/// Beginnings of the targets of a room's lines: of the package at the top, of a crate with the room's name, and of the
/// crates of several rooms.
const ROOM_OF: [&str; 4] = [
    "rangecache::",
    "rangecache_",
    "rangecache_base::",
    "rangecache_edge::",
];

/// The directives of `level`. `rangecache::` and a room name the room, whatever crate it is in. A level without a module
/// means rangecache's own lines: of other crates it lets warnings and errors through, since their lines of lower levels
/// describe frames and states of libraries.
fn directives(level: &str) -> String {
    let mut directives = Vec::new();
    for part in level.split(',').map(str::trim) {
        if let Some(room) = part.strip_prefix("rangecache::") {
            directives.extend(ROOM_OF.map(|crate_name| format!("{crate_name}{room}")));
            continue;
        }
        if part.contains('=') {
            directives.push(part.to_owned());
            continue;
        }
        let others = if ["off", "error"].contains(&part.to_ascii_lowercase().as_str()) {
            part
        } else {
            "warn"
        };
        // First, so that a part that names a module decides about that module.
        directives.splice(0..0, [others.to_owned(), format!("rangecache={part}")]);
    }
    directives.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_without_a_module_means_rangecaches_own_lines() {
        for (level, directives_of_it) in [
            ("info", "warn,rangecache=info"),
            ("DEBUG", "warn,rangecache=DEBUG"),
            ("error", "error,rangecache=error"),
            ("off", "off,rangecache=off"),
            ("h2=trace, debug", "warn,rangecache=debug,h2=trace"),
            ("warn,rangecache=trace", "warn,rangecache=warn,rangecache=trace"),
        ] {
            assert_eq!(directives(level), directives_of_it);
            assert!(directives(level).parse::<EnvFilter>().is_ok(), "{level}");
        }
    }

    #[test]
    fn room_is_named_without_its_crate() {
        let shown = directives("info,rangecache::mirror=debug");
        assert!(shown.starts_with("warn,rangecache=info,"), "{shown}");
        for target in [
            "rangecache::mirror=debug",
            "rangecache_mirror=debug",
            "rangecache_edge::mirror=debug",
            "rangecache_base::mirror=debug",
        ] {
            assert!(shown.split(',').any(|part| part == target), "{shown}");
        }
        assert!(shown.parse::<EnvFilter>().is_ok(), "{shown}");
    }
}
