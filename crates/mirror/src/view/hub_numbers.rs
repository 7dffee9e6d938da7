//! Numbers by which hubs have named the history of a mirror's contents.

use std::collections::VecDeque;

use etcd_wire::grpc::hub::HubHistory;

/// Numbers that are kept: hubs are few, and a number is another one after the restart of a hub.
const MAX_NUMBERS: usize = 16;

/// Numbers of hubs for the history of one load, the oldest first; of too many the newest.
#[derive(Debug, Default)]
pub(crate) struct HubNumbers(VecDeque<HubHistory>);

impl HubNumbers {
    /// Adds a number.
    pub(crate) fn note(&mut self, of_hub: HubHistory) {
        if self.contains(of_hub) {
            return;
        }
        if self.0.len() == MAX_NUMBERS {
            self.0.pop_front();
        }
        self.0.push_back(of_hub);
    }

    /// Whether a number is one of them.
    pub(crate) fn contains(&self, of_hub: HubHistory) -> bool {
        self.0.contains(&of_hub)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_numbers_are_forgotten_and_none_is_kept_twice() {
        let of_hub = |number| HubHistory { instance: 1, number };
        let mut numbers = HubNumbers::default();
        for number in [0, 0].into_iter().chain(1..MAX_NUMBERS as u64) {
            numbers.note(of_hub(number));
        }
        assert!((0..MAX_NUMBERS as u64).all(|number| numbers.contains(of_hub(number))));
        numbers.note(of_hub(MAX_NUMBERS as u64));
        assert!(!numbers.contains(of_hub(0)) && numbers.contains(of_hub(1)));
    }
}
