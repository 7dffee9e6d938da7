//! Memory of a leaf for the packing of a tree in use. Unlike all else in a node, it changes while the node is shared.

use std::sync::atomic::{AtomicBool, Ordering};

/// Marks of a leaf. They decide nothing but when it is packed, so that no order between them and the entries is needed.
#[derive(Debug, Default)]
pub(super) struct Heat {
    /// Read or written since the packing looked last.
    is_hot: AtomicBool,
    /// Packed as far as that saves enough, and not written since.
    is_settled: AtomicBool,
}

impl Heat {
    pub(super) fn record_read(&self) {
        // Read first: most reads find the mark, and must not take the cache line from other processors.
        if !self.is_hot.load(Ordering::Relaxed) {
            self.is_hot.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn record_write(&mut self) {
        *self = Heat {
            is_hot: AtomicBool::new(true),
            is_settled: AtomicBool::new(false),
        };
    }

    /// Whether the leaf was read or written since the last call.
    pub(super) fn take_hot(&self) -> bool {
        self.is_hot.load(Ordering::Relaxed) && self.is_hot.swap(false, Ordering::Relaxed)
    }

    pub(super) fn set_settled(&self) {
        self.is_settled.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_settled(&self) -> bool {
        self.is_settled.load(Ordering::Relaxed)
    }
}

impl Clone for Heat {
    fn clone(&self) -> Heat {
        Heat {
            is_hot: AtomicBool::new(self.is_hot.load(Ordering::Relaxed)),
            is_settled: AtomicBool::new(self.is_settled()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaf_is_hot_until_it_was_looked_at_and_settled_until_it_is_written() {
        let mut heat = Heat::default();
        assert!(!heat.take_hot());
        heat.record_read();
        assert!(heat.clone().take_hot(), "a copy of a leaf is as hot");
        assert!(heat.take_hot() && !heat.take_hot());
        heat.set_settled();
        heat.record_read();
        assert!(heat.is_settled(), "reads change no entry");
        heat.take_hot();
        heat.record_write();
        assert!(heat.take_hot() && !heat.is_settled());
    }
}
