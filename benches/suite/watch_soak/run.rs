//! Events that a watcher has received, in a form that is compared cheaply.

use super::truth::Mark;

/// A run of events without a gap, as received: its order and number are compared by a hash.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Revision after which it begins.
    pub(super) after: i64,
    events: usize,
    hash: u64,
    pub(super) last: i64,
}

impl Run {
    pub(super) fn new(after: i64) -> Run {
        Run {
            after,
            events: 0,
            hash: 0,
            last: after,
        }
    }

    pub(super) fn add(&mut self, (revision, number): Mark) {
        self.events += 1;
        self.hash = self
            .hash
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(number ^ revision.cast_unsigned() << 32);
        self.last = revision;
    }

    /// Compares it with the events of the range after its start; `None` if they are equal.
    pub(super) fn differs(&self, marks: &[Mark]) -> Option<String> {
        let mut expected = Run::new(self.after);
        marks
            .iter()
            .take(self.events)
            .for_each(|mark| expected.add(*mark));
        let is_equal = (expected.events, expected.hash) == (self.events, self.hash);
        (!is_equal).then(|| {
            let due = marks.iter().filter(|mark| mark.0 <= self.last).count();
            format!(
                "{} events in ({}, {}], where etcd has {due}",
                self.events, self.after, self.last
            )
        })
    }
}
