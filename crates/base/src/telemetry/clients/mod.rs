//! Clients: who they are, and what they cost.
//!
//! | file | contents |
//! |---|---|
//! | `name` | [`ClientName`]: who the client of a connection is |
//! | `stats` | [`ClientStats`]: counters of one client |
//! | `registry` | [`ClientRegistry`]: all clients, in a bounded number |
//! | `users` | names of etcd's users by their tokens |

mod name;
mod registry;
mod stats;
mod users;

pub use name::{ClientKind, ClientName};
pub use registry::{ClientHandle, ClientRegistry};
pub use stats::{ClientCall, ClientFigures, ClientRates, ClientStats};
