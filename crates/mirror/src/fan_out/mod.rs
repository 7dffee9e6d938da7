//! Fan-out: the events of one mirror for all watchers that are served from memory.
//!
//! ```text
//! feed ─ apply → log of batches ─ changed → fan-out (a task) ─ signal → streams, which take events from their readers
//! ```
//!
//! The fan-out looks up the key of each event once, in the intervals of all watchers, and adds the event to the topics
//! found. A topic is the part of the log that belongs to one interval, shared by every watcher of that interval. A
//! [`Reader`] is the position of one watcher in its topic. Streams take events when their client has room: there is no
//! queue per watcher, and a slow watcher delays no other (W13).
//!
//! | file | subject |
//! |---|---|
//! | `handle` | the handle: what streams call |
//! | `task` | the task that follows the mirror |
//! | `backlog` | events from the log for watchers that join in the past |
//! | `collector` | which events of a batch belong to which intervals |
//! | `registry` | topics by interval, and the watchers of each |
//! | `topic` | the events of one interval |
//! | `reader` | the position of one watcher, and what it takes; what all readers of one load share: how far events have arrived, and the end |
//! | `join` | what a watcher asks for, and what wakes its stream |

mod backlog;
mod collector;
mod handle;
mod join;
mod reader;
mod registry;
mod task;
mod topic;

pub use handle::{FanOut, FanOutBounds, Held, JoinRefused};
pub use join::{Join, Signal};
pub use reader::{Picked, Reader, Taken};

pub(super) use task::follow;

#[cfg(test)]
mod model;
#[cfg(test)]
mod stress;
#[cfg(test)]
mod tests;
