//! Bound on repeated warnings and errors in the log. A client, or a peer that fails again and again, can cause the
//! same line at any rate; the log must stay readable, and writing it must not cost more than the requests.

use std::{collections::HashMap, fmt, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{Event, Level, Subscriber, callsite::Identifier};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::{fmt::format::Writer, registry::LookupSpan};

/// Lines of one place in the source that are logged per [`INTERVAL`]; the others are counted.
const LINES: u32 = 10;
const INTERVAL: Duration = Duration::from_secs(10);

/// Decides which lines are logged. The table has at most one entry per place in the source that logs.
#[derive(Debug, Default)]
struct Repeated {
    places: Mutex<HashMap<Identifier, LineSlot>>,
}

#[derive(Debug)]
struct LineSlot {
    since: Instant,
    logged: u32,
    left_out: u64,
}

impl Repeated {
    /// Whether a line of this place is logged; if so, how many were left out before it.
    fn pass(&self, place: Identifier) -> Option<u64> {
        let now = Instant::now();
        let mut places = self.places.lock();
        let place = places.entry(place).or_insert(LineSlot {
            since: now,
            logged: 0,
            left_out: 0,
        });
        if now - place.since >= INTERVAL {
            place.since = now;
            place.logged = 0;
        }
        if place.logged >= LINES {
            place.left_out += 1;
            return None;
        }
        place.logged += 1;
        Some(std::mem::take(&mut place.left_out))
    }
}

/// Formats events by `inner`, and leaves out repeated warnings and errors. No client and no peer can cause the lines
/// of other levels at will.
#[derive(Debug)]
pub(super) struct Bounded<F> {
    inner: F,
    is_json: bool,
    repeated: Repeated,
}

impl<F> Bounded<F> {
    pub(super) fn new(inner: F, is_json: bool) -> Bounded<F> {
        Bounded {
            inner,
            is_json,
            repeated: Repeated::default(),
        }
    }

    fn write_left_out(&self, mut writer: Writer<'_>, target: &str, left_out: u64) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        if self.is_json {
            let line = serde_json::json!({
                "timestamp": time,
                "level": "WARN",
                "message": LEFT_OUT,
                "lines": left_out,
                "target": target,
            });
            writeln!(writer, "{line}")
        } else {
            writeln!(writer, "{time}  WARN {target}: {LEFT_OUT} lines={left_out}")
        }
    }
}

/// Message of the line that counts the lines left out.
const LEFT_OUT: &str = "lines like the next one were left out of the log";

impl<S, N, F> FormatEvent<S, N> for Bounded<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        // The order of levels is that of verbosity.
        if *metadata.level() <= Level::WARN {
            match self.repeated.pass(metadata.callsite()) {
                None => return Ok(()),
                Some(0) => {}
                Some(left_out) => self.write_left_out(writer.by_ref(), metadata.target(), left_out)?,
            }
        }
        self.inner.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use tracing_subscriber::fmt::format;

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn bounded(is_json: bool, log: &Log) -> Box<dyn Subscriber + Send + Sync> {
        let log = log.clone();
        let builder = tracing_subscriber::fmt()
            .with_max_level(Level::DEBUG)
            .with_writer(move || log.clone());
        if is_json {
            let format = Bounded::new(format().json().flatten_event(true), true);
            let fields = format::JsonFields::new();
            Box::new(builder.fmt_fields(fields).event_format(format).finish())
        } else {
            let format = Bounded::new(format().with_ansi(false), false);
            Box::new(builder.event_format(format).finish())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn repeated_lines_are_counted_instead_of_logged() {
        for is_json in [true, false] {
            let log = Log::default();
            let _default = tracing::subscriber::set_default(bounded(is_json, &log));
            for round in 0..2 {
                for n in 0..25 {
                    tracing::event!(Level::WARN, n, "a client did it again");
                    tracing::info!("asked for");
                }
                tracing::info!(round, "something else");
                tokio::time::advance(INTERVAL).await;
            }
            let log = String::from_utf8(log.0.lock().clone()).unwrap();
            let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
            assert_eq!(lines("did it again"), 2 * 10, "{log}");
            assert_eq!(lines("asked for"), 50);
            assert_eq!(lines("something else"), 2);
            let left_out: Vec<_> = log.lines().filter(|line| line.contains(LEFT_OUT)).collect();
            assert_eq!(left_out.len(), 1);
            let says = if is_json { "\"lines\":15" } else { "lines=15" };
            assert!(left_out[0].contains(says), "{left_out:?}");
        }
    }
}
