//! The access log: a line of JSON for each call, in a file or on standard output.
//!
//! A call never waits for the log: its entry goes to a bounded queue, and is dropped and counted if that is full. One
//! task formats and writes. Values are never part of an entry, keys only if the operator asks for them (I10).
//!
//! | file | contents |
//! |---|---|
//! | `entry` | [`LogEntry`]: what is logged about a call, and its line |
//! | `queue` | [`AccessLog`]: which calls are logged, and the queue of entries |
//! | `writer` | [`AccessLogWriter`]: the file, and the task that writes |

mod entry;
mod queue;
mod writer;

pub use entry::{LogEntry, MAX_KEY_BYTES, Phases, RangeFacts};
pub use queue::AccessLog;
pub use writer::{AccessLogWriter, Destination};
