//! Fuzz targets of this room.

pub use super::read::fuzzing::{range_json, range_plan};
pub use super::watch::fuzzing::watch_session;
