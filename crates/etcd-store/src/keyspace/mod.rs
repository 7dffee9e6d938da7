//! Keys and ranges of keys: which keys a mirror holds, which keys a request names, and the key after a key.
//!
//! | file | subject |
//! |---|---|
//! | `key` | the key after a key, and the end of a prefix |
//! | `interval` | the keys that a Range or a Watch names |
//! | `scope` | the keys that a mirror holds |
//! | `prefix` | grouping of a key range by prefix |
//!
//! A leaf: this room imports no other. `cache`, `mirror`, `proxy` and `doctor` import it.

mod interval;
mod key;
mod prefix;
pub mod scope;

pub use interval::Interval;
pub use key::{prefix_end, successor};
pub use prefix::{PrefixGroup, PrefixGrouper, common_prefix, figure_prefix, first_part};
