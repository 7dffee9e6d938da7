//! The file of the access log, and the task that writes it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::entry::LogEntry;
use super::metrics::LineMetrics;
use super::queue::AccessLog;
use crate::telemetry::Metrics;

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
