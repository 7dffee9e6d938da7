//! What clients did and what etcd did, written down as the linearizer reads it: one JSON object a line, times in nanoseconds
//! of one clock.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use parking_lot::Mutex;
use serde_json::{Value, json};

use testkit::pb::{KeyValue, RangeRequest, RangeResponse};

/// A history file.
pub struct History {
    path: PathBuf,
    began: Instant,
    file: Mutex<BufWriter<File>>,
}

impl History {
    /// A new file in a folder, which is made.
    pub fn new(folder: &Path) -> Self {
        std::fs::create_dir_all(folder).unwrap();
        let path = folder.join("history.jsonl");
        let file = Mutex::new(BufWriter::new(File::create(&path).unwrap()));
        Self {
            path,
            began: Instant::now(),
            file,
        }
    }

    /// The time now.
    pub fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap()
    }

    fn write(&self, line: &Value) {
        writeln!(self.file.lock(), "{line}").unwrap();
    }

    /// Here it begins: nothing has been written to the store yet, which is at this revision.
    pub fn start(&self, revision: i64) {
        self.write(&json!({"t": "start", "at": self.now(), "rev": revision, "kvs": []}));
    }

    /// From that time on there is another history, which begins with the state at this revision of the last one.
    pub fn cut(&self, at: u64, revision: i64) {
        self.write(&json!({"t": "cut", "at": at, "rev": revision}));
    }

    /// A compaction begins.
    pub fn compact(&self, revision: i64) {
        self.write(&json!({"t": "compact", "at": self.now(), "rev": revision}));
    }

    /// The recorder has seen what etcd did at a revision: values put, and keys deleted.
    pub fn event(&self, segment: usize, revision: i64, changes: &[(Vec<u8>, Option<Vec<u8>>)]) {
        let changes: Vec<_> = changes
            .iter()
            .map(|(key, value)| change(key, value.as_deref()))
            .collect();
        self.write(&json!({
            "t": "event", "segment": segment, "rev": revision, "seen": self.now(), "changes": changes,
        }));
    }

    /// A client called, and has its answer, or has given up.
    pub fn operation(&self, operation: Value) {
        self.write(&json!({"t": "op", "op": operation}));
    }

    /// Everything is on the disk, here.
    pub fn finish(&self) -> &Path {
        self.file.lock().flush().unwrap();
        &self.path
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("keys and values are text")
}

/// A put, or a delete where there is no value.
pub fn change(key: &[u8], value: Option<&[u8]>) -> Value {
    json!({"k": text(key), "v": value.map(text).unwrap_or_default(), "d": value.is_none()})
}

/// A read.
pub fn read(request: &RangeRequest) -> Value {
    json!({
        "key": text(&request.key), "end": text(&request.range_end), "limit": request.limit, "rev": request.revision,
        "count_only": request.count_only, "keys_only": request.keys_only, "serializable": request.serializable,
    })
}

/// The answer to a read, without its header.
pub fn answer(response: &RangeResponse) -> Value {
    let kvs: Vec<_> = response.kvs.iter().map(key_value).collect();
    json!({"count": response.count, "more": response.more, "kvs": kvs})
}

fn key_value(kv: &KeyValue) -> Value {
    json!({
        "k": text(&kv.key), "v": text(&kv.value), "m": kv.mod_revision, "c": kv.create_revision, "n": kv.version,
    })
}
