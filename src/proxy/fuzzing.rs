//! Fuzz targets of this room.

pub(crate) use super::read::fuzzing::{range_json, range_plan};
pub(crate) use super::watch::fuzzing::watch_session;
