//! Bursts: what a feed has received by the time it looks is applied at once.
//!
//! Each application copies the nodes of the tree that readers may hold, shows a view, sets gauges and wakes the readers that
//! wait. Under many writes etcd's responses arrive faster than that, so those that are there already share it.

use etcd_store::cache::{Change, Entry};

use super::assemble::Step;

/// Events from which on no further response is added to a burst: what readers wait for must not wait for much more. Below
/// the interval between two checkpoints of the history.
const MAX_EVENTS: usize = 64;
/// Memory of the events from which on no further response is added to a burst.
const MAX_BYTES: u64 = 1 << 20;

/// Whole revisions that the mirror has not taken yet.
#[derive(Debug, Default)]
pub(super) struct Burst {
    /// In order of revision.
    pub(super) changes: Vec<Change>,
    bytes: u64,
    /// Revision up to which every event has arrived; 0 if none of the responses has shown one.
    pub(super) revision: i64,
    /// Events that were dropped because they were at or below the mirror's revision.
    pub(super) fenced: u64,
    /// Whether a response had events, also such that the mirror has.
    pub(super) has_events: bool,
}

impl Burst {
    /// Adds the step of the next response.
    pub(super) fn add(&mut self, step: Step) {
        match step {
            Step::Wait => {}
            Step::Apply { changes, revision } => {
                self.bytes += changes
                    .iter()
                    .map(|change| {
                        let replaced = change.replaced.as_ref();
                        change.entry.memory_bytes() + replaced.map_or(0, Entry::memory_bytes)
                    })
                    .sum::<u64>();
                self.revision = revision;
                if self.changes.is_empty() {
                    self.changes = changes;
                } else {
                    self.changes.extend(changes);
                }
            }
            Step::Advance(revision) => self.revision = revision,
            Step::Fenced(events) => self.fenced += events,
        }
    }

    /// Whether it has to be applied before a further response is added.
    pub(super) fn is_full(&self) -> bool {
        self.changes.len() >= MAX_EVENTS || self.bytes >= MAX_BYTES
    }
}

impl From<Step> for Burst {
    fn from(step: Step) -> Burst {
        let mut burst = Burst::default();
        burst.add(step);
        burst
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etcd_store::cache::testing::KeyValue;

    fn apply(revisions: &[i64], value_bytes: usize) -> Step {
        let put =
            |revision: &i64| Change::put(KeyValue::new("k", *revision, vec![b'v'; value_bytes]).entry());
        Step::Apply {
            changes: revisions.iter().map(put).collect(),
            revision: *revisions.last().unwrap(),
        }
    }

    fn revisions(burst: &Burst) -> Vec<i64> {
        burst.changes.iter().map(Change::revision).collect()
    }

    #[test]
    fn steps_are_joined_in_order() {
        let mut burst = Burst::from(Step::Advance(10));
        assert_eq!((revisions(&burst), burst.revision), (vec![], 10));
        for step in [
            apply(&[11, 11, 12], 1),
            Step::Fenced(2),
            Step::Wait,
            apply(&[14], 1),
            Step::Advance(20),
            Step::Fenced(1),
        ] {
            burst.add(step);
        }
        assert_eq!((revisions(&burst), burst.revision), (vec![11, 11, 12, 14], 20));
        assert_eq!(burst.fenced, 3);
    }

    #[test]
    fn nothing_is_added_to_many_events_or_bytes() {
        let all: Vec<i64> = (1..=MAX_EVENTS as i64).collect();
        assert!(!Burst::from(apply(&all[1..], 1)).is_full());
        assert!(Burst::from(apply(&all, 1)).is_full());
        let half = usize::try_from(MAX_BYTES / 2).unwrap();
        let mut burst = Burst::from(apply(&[1], half));
        assert!(!burst.is_full());
        burst.add(apply(&[2], half));
        assert!(burst.is_full());
    }
}
