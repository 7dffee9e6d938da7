//! What the flags of all rooms have in common. A leaf.
//!
//! | file | contents |
//! |---|---|
//! | `units` | parsers of durations, sizes, shares and modes |

mod units;

pub(crate) use units::{parse_bytes, parse_duration, parse_mode, parse_share};
