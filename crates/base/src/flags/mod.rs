//! Common parts of the flags of all rooms. A leaf.
//!
//! | file | contents |
//! |---|---|
//! | `live` | flags that a reload replaces |
//! | `units` | parsers of durations, sizes, shares and modes |

mod live;
mod units;

pub use live::Live;
pub use units::{parse_bytes, parse_duration, parse_mode, parse_share};
