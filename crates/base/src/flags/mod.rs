//! Common parts of the flags of all rooms. A leaf.
//!
//! | file | contents |
//! |---|---|
//! | `live` | flags that a reload replaces |
//! | `switch` | flags that are on or off |
//! | `units` | parsers of durations, sizes, shares and modes |

mod live;
mod switch;
mod units;

pub use live::Live;
pub use switch::Switch;
pub use units::{parse_bytes, parse_duration, parse_mode, parse_share};
