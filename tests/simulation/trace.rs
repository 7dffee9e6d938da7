//! The trace of a simulation: one line per operation, response and fault, with the virtual time. Two runs of a seed are
//! equal if their traces are.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::time::Instant;

struct Lines {
    lines: Vec<String>,
    hasher: DefaultHasher,
}

/// The trace of this process's simulation, for its watchdog.
pub static CURRENT: OnceLock<Trace> = OnceLock::new();

/// A trace that all parts of a simulation write to.
#[derive(Clone)]
pub struct Trace {
    began: Instant,
    prints: bool,
    lines: Arc<Mutex<Lines>>,
}

impl Trace {
    /// An empty trace that begins now. `prints` shows each line at once.
    pub fn new(prints: bool) -> Self {
        let lines = Lines {
            lines: Vec::new(),
            // Not `RandomState`: its keys are the same in every process.
            hasher: DefaultHasher::new(),
        };
        Self {
            began: Instant::now(),
            prints,
            lines: Arc::new(Mutex::new(lines)),
        }
    }

    /// Milliseconds of virtual time.
    pub fn millis(&self) -> u128 {
        self.began.elapsed().as_millis()
    }

    /// Appends a line.
    pub fn line(&self, text: impl AsRef<str>) {
        let line = format!("{:6} {}", self.millis(), text.as_ref());
        if self.prints {
            println!("{line}");
        }
        let mut lines = self.lines.lock();
        line.hash(&mut lines.hasher);
        lines.lines.push(line);
    }

    /// Hash of all lines so far.
    pub fn hash(&self) -> u64 {
        self.lines.lock().hasher.finish()
    }

    /// The lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().lines.clone()
    }
}
