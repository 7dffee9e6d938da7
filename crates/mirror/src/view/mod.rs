//! A mirror as readers see it, and what they keep of it.
//!
//! | file | subject |
//! |---|---|
//! | `state` | the view that readers see, and the epoch that guards it |
//! | `lineages` | in which lineages the contents of a load were found |
//! | `held_views` | bytes that only readers keep in memory |
//! | `past_revisions` | rebuilt states at past revisions |
//! | `pinned` | past revisions that are read from etcd, not from mirrors |
//! | `prefixes` | sizes of a view by prefix |
//! | `ended` | why watches of a mirror get no more events |

mod ended;
mod held_views;
mod lineages;
mod past_revisions;
mod pinned;
mod prefixes;
mod state;

pub use ended::ReaderEnd;
pub use held_views::{HeldView, HeldViews};
pub use pinned::{Pinned, Reading};
pub use prefixes::prefix_sizes;
pub(crate) use prefixes::sizes;
pub(super) use state::LoadedStore;
pub(super) use state::log_read::{LogRead, Observed};
pub use state::{Epoch, Mirror, StaleEpoch, State, View, ViewAtError};
