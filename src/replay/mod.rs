//! `rangecache replay`: plays the reads of an access log again, against any endpoint, and reports their latencies.
//!
//! | file | subject |
//! |---|---|
//! | `line` | one line of an access log: a read, or why it is passed over |
//! | `recording` | all reads of an access log, in the order of their arrival |
//! | `player` | the calls, at the recorded pace or faster |
//! | `report` | latencies and errors, for people and for scripts |
//!
//! Nothing is ever written: lines of other calls are passed over and counted. This room imports `config`, `upstream`,
//! `tls` and `telemetry`; only `main` imports it.

mod line;
mod player;
mod recording;
mod report;

pub use player::play;
pub use recording::{ReadError, Recording};
pub use report::Report;
