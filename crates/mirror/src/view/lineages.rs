//! Lineages in which the contents of a mirror were found: where raft logs do not show a history, only contents show that it is the same
//! under another number. Watchers continue in a lineage of their load's contents alone.

use std::collections::VecDeque;

use rangecache_upstream::Lineage;

/// Lineages that are kept: hubs are few, and each has another one after its restart.
const MAX_LINEAGES: usize = 16;

/// Lineages of one load's contents, the oldest first; of too many the newest.
#[derive(Debug, Default)]
pub(crate) struct Lineages(VecDeque<Lineage>);

impl Lineages {
    /// Adds one.
    pub(crate) fn note(&mut self, lineage: Lineage) {
        if self.contains(lineage) {
            return;
        }
        if self.0.len() == MAX_LINEAGES {
            self.0.pop_front();
        }
        self.0.push_back(lineage);
    }

    /// Whether `lineage` is one of them.
    pub(crate) fn contains(&self, lineage: Lineage) -> bool {
        self.0.contains(&lineage)
    }
}

#[cfg(test)]
mod tests {
    use etcd_wire::grpc::hub::HubHistory;

    use super::*;

    #[test]
    fn oldest_numbers_are_forgotten_and_none_is_kept_twice() {
        let of_hub = |number| Lineage::Hub(HubHistory { instance: 1, number });
        let mut lineages = Lineages::default();
        for number in [0, 0].into_iter().chain(1..MAX_LINEAGES as u64) {
            lineages.note(of_hub(number));
        }
        assert!((0..MAX_LINEAGES as u64).all(|number| lineages.contains(of_hub(number))));
        lineages.note(of_hub(MAX_LINEAGES as u64));
        assert!(!lineages.contains(of_hub(0)) && lineages.contains(of_hub(1)));
    }
}
