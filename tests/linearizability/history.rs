//! The record of clients' calls and of etcd's changes in the linearizer's format: one JSON object per line, times in
//! nanoseconds of one clock.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use serde_json::{Value, json};

use testkit::pb::{KeyValue, RangeRequest, RangeResponse};

/// A history file.
pub struct History {
    path: PathBuf,
    began: Instant,
    file: Mutex<BufWriter<File>>,
    /// Revision up to which the recorder has seen all events of the current history.
    recorded: AtomicI64,
}

impl History {
    /// Creates a folder with a new file.
    pub fn new(folder: &Path) -> Self {
        std::fs::create_dir_all(folder).unwrap();
        let path = folder.join("history.jsonl");
        let file = Mutex::new(BufWriter::new(File::create(&path).unwrap()));
        Self {
            path,
            began: Instant::now(),
            file,
            recorded: AtomicI64::new(0),
        }
    }

    /// Current time, in nanoseconds since the start.
    pub fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap()
    }

    fn write(&self, line: &Value) {
        writeln!(self.file.lock(), "{line}").unwrap();
    }

    /// Records the start: the store is empty at this revision.
    pub fn start(&self, revision: i64) {
        self.write(&json!({"t": "start", "at": self.now(), "rev": revision, "kvs": []}));
    }

    /// Records the start of another history, whose initial state is the last one's at this revision.
    pub fn cut(&self, at: u64, revision: i64) {
        self.write(&json!({"t": "cut", "at": at, "rev": revision}));
    }

    /// Records the start of a compaction.
    pub fn compact(&self, revision: i64) {
        self.write(&json!({"t": "compact", "at": self.now(), "rev": revision}));
    }

    /// Revision up to which the recorder has seen all events.
    pub fn recorded(&self) -> i64 {
        self.recorded.load(Ordering::SeqCst)
    }

    /// Sets the revision up to which the recorder has seen all events.
    pub fn set_recorded(&self, revision: i64) {
        self.recorded.store(revision, Ordering::SeqCst);
    }

    /// Records etcd's changes at a revision: values put, and keys deleted.
    pub fn event(&self, segment: usize, revision: i64, changes: &[(Vec<u8>, Option<Vec<u8>>)]) {
        let changes: Vec<_> = changes
            .iter()
            .map(|(key, value)| change(key, value.as_deref()))
            .collect();
        self.write(&json!({
            "t": "event", "segment": segment, "rev": revision, "seen": self.now(), "changes": changes,
        }));
    }

    /// Records a client's call with its response, or without one.
    pub fn operation(&self, operation: Value) {
        self.write(&json!({"t": "op", "op": operation}));
    }

    /// Writes all records to disk, and returns the path.
    pub fn finish(&self) -> &Path {
        self.file.lock().flush().unwrap();
        &self.path
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("keys and values are UTF-8")
}

/// A put; a delete if there is no value.
pub fn change(key: &[u8], value: Option<&[u8]>) -> Value {
    json!({"k": text(key), "v": value.map(text).unwrap_or_default(), "d": value.is_none()})
}

/// A read request.
pub fn read(request: &RangeRequest) -> Value {
    json!({
        "key": text(&request.key), "end": text(&request.range_end), "limit": request.limit, "rev": request.revision,
        "count_only": request.count_only, "keys_only": request.keys_only, "serializable": request.serializable,
    })
}

/// The response to a read, without its header.
pub fn answer(response: &RangeResponse) -> Value {
    let kvs: Vec<_> = response.kvs.iter().map(key_value).collect();
    json!({"count": response.count, "more": response.more, "kvs": kvs})
}

fn key_value(kv: &KeyValue) -> Value {
    json!({
        "k": text(&kv.key), "v": text(&kv.value), "m": kv.mod_revision, "c": kv.create_revision, "n": kv.version,
    })
}
