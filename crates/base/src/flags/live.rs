//! Flags that a reload replaces while the process runs.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};

/// The current flags of a room, as the last reload has left them. Cloning it copies a reference.
#[derive(Debug)]
pub struct Live<T>(Arc<ArcSwap<T>>);

impl<T> Clone for Live<T> {
    fn clone(&self) -> Live<T> {
        Live(Arc::clone(&self.0))
    }
}

impl<T> Live<T> {
    /// The flags of the start.
    pub fn new(flags: T) -> Live<T> {
        Live(Arc::new(ArcSwap::from_pointee(flags)))
    }

    /// The flags of now.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<T>> {
        self.0.load()
    }

    /// The flags of now, for longer than a moment.
    #[must_use]
    pub fn load_full(&self) -> Arc<T> {
        self.0.load_full()
    }

    /// Replaces the flags.
    pub fn store(&self, flags: T) {
        self.0.store(Arc::new(flags));
    }
}
