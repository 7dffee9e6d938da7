//! The file of the access log, the task that writes it, and counters of its lines.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::{fd::AsFd, unix::fs::OpenOptionsExt};
use std::{path::PathBuf, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::{entry::LogEntry, queue::AccessLog};
use crate::telemetry::Metrics;
use crate::telemetry::metrics::{Counter, metric_group};

/// Entries that are written at once.
const BATCH_ENTRIES: usize = 512;
/// Pause before the next batch, unless it is full already: a thread that is woken for each of some hundred entries a
/// second costs more than writing them.
const PAUSE: Duration = Duration::from_millis(20);
/// Least time between two log lines about calls that were left out.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// Interval at which the counters are compared.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Destination of the access log's lines.
#[derive(Clone, Debug)]
pub enum Destination {
    /// Standard output.
    Stdout,
    /// A file, to which lines are appended.
    File(PathBuf),
}

impl Destination {
    fn open(&self) -> io::Result<File> {
        match self {
            // A descriptor of its own: the standard library's handle would look for the ends of lines.
            Destination::Stdout => Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?)),
            Destination::File(path) => OpenOptions::new()
                .append(true)
                .create(true)
                .mode(0o600)
                .open(path),
        }
    }
}

/// Writes the lines of an [`AccessLog`].
#[derive(Debug)]
pub struct AccessLogWriter {
    destination: Destination,
    /// `None` while it is being written to, and if a write has panicked.
    file: Option<File>,
    queue: mpsc::Receiver<LogEntry>,
    metrics: Arc<LineMetrics>,
    /// Error of the last write that failed, until it is logged.
    error: Arc<Mutex<Option<String>>>,
}

/// Entries that are written at once, and their text.
#[derive(Debug, Default)]
struct LogBatch {
    entries: Vec<LogEntry>,
    text: Vec<u8>,
}

impl LogBatch {
    fn format(&mut self) {
        self.text.clear();
        for entry in self.entries.drain(..) {
            // Writing to a vector cannot fail, and every map has keys of text.
            if serde_json::to_writer(&mut self.text, &entry).is_ok() {
                self.text.push(b'\n');
            }
        }
    }
}

impl AccessLogWriter {
    /// Opens the file, and returns its writer and the log of a `share` of all calls, with their keys if `has_keys`.
    ///
    /// # Errors
    /// The file cannot be opened for appending.
    pub fn open(
        destination: Destination,
        share: f64,
        has_keys: bool,
        metrics: &Metrics,
    ) -> io::Result<(AccessLogWriter, AccessLog)> {
        let file = destination.open()?;
        let metrics = metrics.group::<LineMetrics>();
        let (log, queue) = AccessLog::new(share, has_keys, metrics.lines.handle("dropped"));
        let writer = AccessLogWriter {
            destination,
            file: Some(file),
            queue,
            metrics,
            error: Arc::default(),
        };
        Ok((writer, log))
    }

    /// Writes until `stop` is cancelled, and then the rest. Opens the file again whenever `look` changes.
    pub async fn run(self, look: watch::Receiver<()>, stop: CancellationToken) {
        let (metrics, error) = (Arc::clone(&self.metrics), Arc::clone(&self.error));
        tokio::select! {
            () = self.write(look, stop) => {}
            () = report(&metrics, &error) => {}
        }
    }

    async fn write(mut self, mut look: watch::Receiver<()>, stop: CancellationToken) {
        let mut batch = LogBatch::default();
        loop {
            tokio::select! {
                biased;
                Ok(()) = look.changed() => self.reopen().await,
                () = stop.cancelled() => break,
                received = self.queue.recv_many(&mut batch.entries, BATCH_ENTRIES) => {
                    if received == 0 {
                        return;
                    }
                    batch = self.append(batch).await;
                    if self.queue.len() < BATCH_ENTRIES {
                        stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await;
                    }
                }
            }
        }
        self.queue.close();
        while self.queue.recv_many(&mut batch.entries, BATCH_ENTRIES).await > 0 {
            batch = self.append(batch).await;
        }
    }

    /// Formats and appends a batch, on a thread of its own, since a disk or a pipe may block. Returns the batch, empty.
    async fn append(&mut self, mut batch: LogBatch) -> LogBatch {
        let lines = batch.entries.len() as u64;
        let (destination, file) = (self.destination.clone(), self.file.take());
        let writing = tokio::task::spawn_blocking(move || {
            batch.format();
            let mut file = match file {
                Some(file) => file,
                None => match destination.open() {
                    Ok(file) => file,
                    Err(error) => return (None, batch, Err(error)),
                },
            };
            let result = file.write_all(&batch.text);
            (Some(file), batch, result)
        });
        let (batch, result) = match writing.await {
            Ok((file, batch, result)) => {
                self.file = file;
                (batch, result)
            }
            Err(error) => (LogBatch::default(), Err(io::Error::other(error))),
        };
        match result {
            Ok(()) => drop(self.metrics.lines.of("written").inc_by(lines)),
            Err(error) => {
                self.metrics.lines.of("failed").inc_by(lines);
                *self.error.lock() = Some(error.to_string());
            }
        }
        batch
    }

    /// Opens the file again: it may have been renamed. If that fails, the old one stays in use.
    async fn reopen(&mut self) {
        let destination = self.destination.clone();
        if matches!(destination, Destination::Stdout) {
            return;
        }
        let opening = tokio::task::spawn_blocking(move || destination.open());
        match opening.await.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(file) => {
                self.file = Some(file);
                tracing::info!("the access log was opened again");
            }
            Err(error) => tracing::warn!(
                %error,
                "the access log cannot be opened again; lines go to the file that was open"
            ),
        }
    }
}

/// Logs, once a minute at most, how many calls were left out; never returns.
async fn report(metrics: &LineMetrics, error: &Mutex<Option<String>>) {
    let mut ticks = tokio::time::interval(LOOK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let count = |result| metrics.lines.of(result).get();
    let (mut dropped, mut failed, mut reported) = (0, 0, None::<Instant>);
    loop {
        ticks.tick().await;
        let (now_dropped, now_failed) = (count("dropped"), count("failed"));
        let is_news = (now_dropped, now_failed) != (dropped, failed);
        if !is_news || reported.is_some_and(|at| at.elapsed() < REPORT_INTERVAL) {
            continue;
        }
        let error = error.lock().take();
        tracing::warn!(
            error,
            queue_full = now_dropped - dropped,
            write_failed = now_failed - failed,
            "calls are missing in the access log; its disk or its reader is too slow or fails"
        );
        (dropped, failed, reported) = (now_dropped, now_failed, Some(Instant::now()));
    }
}

metric_group! {
    /// Lines of the access log. Without one they are not exported.
    pub(super) struct LineMetrics {
        /// Lines of the access log by `result`: `written`, `dropped` (no room in the queue) or `failed` (not
        /// written)
        ///
        /// See [access log](../operations.md#access-log)
        ///
        /// Useful when: the log has gaps
        pub(super) lines[result]: Counter = "rangecache_access_log_lines_total",
            from_zero = ["written", "dropped", "failed"];
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt as _, path::Path, time::SystemTime};

    use tokio::task::JoinHandle;

    use super::*;
    use crate::telemetry::clients::ClientName;

    /// A log whose lines go to one file, and the task that writes them.
    struct Running {
        log: AccessLog,
        look: watch::Sender<()>,
        stop: CancellationToken,
        metrics: Arc<LineMetrics>,
        writing: JoinHandle<()>,
    }

    impl Running {
        fn start(path: &Path) -> Running {
            let metrics = Metrics::new();
            let destination = Destination::File(path.to_owned());
            let (writer, log) = AccessLogWriter::open(destination, 1.0, false, &metrics).unwrap();
            let (look, looking) = watch::channel(());
            let stop = CancellationToken::new();
            let writing = tokio::spawn(writer.run(looking, stop.clone()));
            Running {
                log,
                look,
                stop,
                metrics: metrics.group(),
                writing,
            }
        }

        fn lines(&self, result: &'static str) -> u64 {
            self.metrics.lines.of(result).get()
        }

        /// Queues an entry and waits until it is written, or until that has failed.
        async fn end_of(&self, method: &str) {
            let ended = self.lines("written") + self.lines("failed");
            self.log.queue(entry(method));
            let counted = async {
                while self.lines("written") + self.lines("failed") == ended {
                    tokio::task::yield_now().await;
                }
            };
            let counted = tokio::time::timeout(Duration::from_secs(20), counted).await;
            counted.expect("the line is counted");
        }

        async fn stop(self) {
            self.stop.cancel();
            self.writing.await.unwrap();
        }
    }

    fn entry(method: &str) -> LogEntry {
        LogEntry::new(
            SystemTime::UNIX_EPOCH,
            ClientName::of_user("alice"),
            method.to_owned(),
        )
    }

    /// Methods of the calls whose lines are in the file at `path`.
    fn methods(path: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(path).unwrap();
        let method = |line: &str| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            line["method"].as_str().unwrap().to_owned()
        };
        text.lines().map(method).collect()
    }

    #[tokio::test]
    async fn entries_that_are_queued_at_the_stop_are_appended_in_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.log");
        for part in ["a", "b"] {
            let running = Running::start(&path);
            for number in 0..BATCH_ENTRIES {
                running.log.queue(entry(&format!("{part}{number}")));
            }
            running.stop.cancel();
            running.log.queue(entry(&format!("{part} last")));
            running.stop().await;
        }
        let of_part = |part: &str| {
            let numbers = (0..BATCH_ENTRIES).map(|number| format!("{part}{number}"));
            numbers.chain([format!("{part} last")]).collect::<Vec<_>>()
        };
        assert_eq!(methods(&path), [of_part("a"), of_part("b")].concat());
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "lines show keys of users");
    }

    #[tokio::test]
    async fn lines_go_to_a_new_file_once_the_renamed_one_is_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let (path, renamed) = (folder.path().join("access.log"), folder.path().join("old.log"));
        let running = Running::start(&path);
        running.end_of("first").await;
        std::fs::rename(&path, &renamed).unwrap();
        running.end_of("second").await;
        running.look.send_replace(());
        running.end_of("third").await;
        running.stop().await;
        assert_eq!(methods(&renamed), ["first", "second"]);
        assert_eq!(methods(&path), ["third"]);
    }

    #[tokio::test]
    async fn lines_go_to_the_open_file_if_it_cannot_be_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let (path, renamed) = (folder.path().join("access.log"), folder.path().join("old.log"));
        let running = Running::start(&path);
        std::fs::rename(&path, &renamed).unwrap();
        std::fs::create_dir(&path).unwrap();
        running.look.send_replace(());
        running.end_of("first").await;
        assert_eq!((running.lines("written"), running.lines("failed")), (1, 0));
        running.stop().await;
        assert_eq!(methods(&renamed), ["first"]);
    }

    #[tokio::test]
    async fn lines_that_the_disk_refuses_are_counted_and_the_next_ones_are_tried() {
        let running = Running::start(Path::new("/dev/full"));
        running.end_of("first").await;
        running.end_of("second").await;
        assert_eq!((running.lines("written"), running.lines("failed")), (0, 2));
        running.stop().await;
    }

    #[tokio::test]
    async fn writer_ends_with_the_last_handle_of_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.log");
        let Running { log, writing, .. } = Running::start(&path);
        log.queue(entry("only"));
        drop(log);
        writing.await.unwrap();
        assert_eq!(methods(&path), ["only"]);
    }

    #[test]
    fn file_that_cannot_be_appended_to_is_refused_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let destination = Destination::File(folder.path().join("missing").join("access.log"));
        let opened = AccessLogWriter::open(destination, 1.0, false, &Metrics::new());
        assert_eq!(opened.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
