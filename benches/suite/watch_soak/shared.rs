//! State that all tasks of the soak share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64};
use std::time::Instant;

use super::truth::Truth;

/// State shared by all tasks.
pub(super) struct Shared {
    pub(super) truth: Arc<Truth>,
    /// Revision up to which history is compacted.
    pub(super) compacted: AtomicI64,
    /// Something fails, or did a moment ago.
    pub(super) in_fault: AtomicBool,
    /// Nothing is written any more, and every client reads promptly.
    pub(super) is_over: AtomicBool,
    /// Time zero of the values.
    pub(super) epoch: Instant,
}
