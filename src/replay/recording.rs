//! All reads of an access log, in the order of their arrival.

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::time::Duration;

use super::line::{Passed, RecordedRead, parse};

/// Reads of an access log.
#[derive(Debug, Default)]
pub(super) struct Recording {
    /// In the order of their arrival: lines are written when calls end.
    pub(super) reads: Vec<RecordedRead>,
    /// Number of lines that are passed over.
    pub(super) passed: BTreeMap<Passed, u64>,
}

/// An access log that cannot be played.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// A line is broken.
    #[error("line {number} is no line of an access log: {cause}")]
    Line {
        /// Number of the line, from 1.
        number: u64,
        /// Error in the line.
        cause: String,
    },
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The reads have no keys.
    #[error(
        "no read has its key: {0} reads are named by their prefix alone; record the access log with --access-log-keys"
    )]
    NoKeys(u64),
    /// There are no reads.
    #[error("there is no read to play in {0} lines")]
    NoReads(u64),
}

impl Recording {
    /// Reads an access log. A last line without an end, which is still being written, is left out.
    ///
    /// # Errors
    /// The first line that is broken; or there is nothing to play.
    pub(super) fn read(mut log: impl BufRead) -> Result<Recording, ReadError> {
        let mut recording = Recording::default();
        let (mut line, mut number) = (String::new(), 0);
        while log.read_line(&mut line)? > 0 {
            number += 1;
            let Some(text) = line.strip_suffix('\n') else {
                break;
            };
            match parse(text).map_err(|cause| ReadError::Line { number, cause })? {
                Ok(read) => recording.reads.push(read),
                Err(passed) => *recording.passed.entry(passed).or_default() += 1,
            }
            line.clear();
        }
        if recording.reads.is_empty() {
            return Err(match recording.passed.get(&Passed::WithoutKey) {
                Some(reads) => ReadError::NoKeys(*reads),
                None => ReadError::NoReads(number),
            });
        }
        recording.reads.sort_by_key(|read| read.arrived_at);
        Ok(recording)
    }

    /// Time from the first to the last read.
    pub(super) fn duration(&self) -> Duration {
        let (first, last) = (self.reads.first(), self.reads.last());
        let times = first
            .zip(last)
            .map(|(first, last)| (first.arrived_at, last.arrived_at));
        times
            .and_then(|(first, last)| last.duration_since(first).ok())
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(second: u32, method: &str, key: &str) -> String {
        format!(
            "{{\"time\":\"2026-01-01T00:00:{second:02}Z\",\"method\":\"{method}\",\"prefix\":\"\"{key}}}\n"
        )
    }

    #[test]
    fn reads_are_sorted_by_their_arrival() {
        let (read, key) = ("etcdserverpb.KV/Range", ",\"key\":\"k\"");
        let log = [
            line(9, read, key),
            line(3, read, key),
            line(4, "etcdserverpb.KV/Put", ""),
            line(5, read, ""),
        ];
        let recording = Recording::read(format!("{}{{\"time\":\"20", log.concat()).as_bytes()).unwrap();
        assert_eq!(
            (recording.reads.len(), recording.duration()),
            (2, Duration::from_secs(6))
        );
        assert_eq!(
            recording.passed,
            BTreeMap::from([(Passed::NoRead, 1), (Passed::WithoutKey, 1)])
        );
    }

    #[test]
    fn log_that_cannot_be_played_is_refused_with_a_reason() {
        let read = "etcdserverpb.KV/Range";
        for (log, says) in [
            (
                line(1, read, ",\"key\":\"k\"") + "no JSON\n",
                "line 2 is no line of an access log",
            ),
            (line(1, read, ""), "record the access log with --access-log-keys"),
            (line(1, "etcdserverpb.KV/Put", ""), "no read to play in 1 lines"),
            (String::new(), "no read to play in 0 lines"),
        ] {
            let error = Recording::read(log.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
