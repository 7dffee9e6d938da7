//! The access log: a line of JSON for each call, in a file or on standard output.
//!
//! A call never waits for the log: its entry goes to a bounded queue, and is dropped and counted if that is full. One
//! task formats and writes. Values are never part of an entry, keys only if the operator asks for them (I10).
//!
//! | file | contents |
//! |---|---|
//! | `entry` | [`LogEntry`]: what is logged about a call, and its line |
//! | `metrics` | counters of lines |
//! | `queue` | [`AccessLog`]: the queue of entries |
//! | `sample` | which calls are logged |
//! | `writer` | [`AccessLogWriter`]: the file, and the task that writes |

mod entry;
mod metrics;
mod queue;
mod sample;
mod writer;

pub use entry::{LogEntry, MAX_KEY_BYTES, Phases, RangeFacts};
pub use queue::AccessLog;
pub use writer::{AccessLogWriter, Destination};
