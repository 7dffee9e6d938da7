//! Proofs of the rangecaches behind one connection. A balancer may send each call to another one: the history that a proof is of
//! has to be compared once for each of them, and again when that one has another.

use tokio::time::Instant;

use etcd_wire::grpc::hub::{HubHistory, HubProof};

/// Rangecaches that are remembered: those behind a balancer are few.
const MAX_HUBS: usize = 16;

/// History of etcd that a response is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lineage {
    /// History of the member that has responded: its raft log shows it.
    Member,
    /// History of a hub, which has compared raft logs itself.
    Hub(HubHistory),
}

/// History that a connection stands for, since a moment.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// The history.
    pub lineage: Lineage,
    /// Since when each quorum check on the connection has shown it: for a member since it was opened. A hub has proven no other one on
    /// the connection since, and the connections have been open on which it has checked.
    pub since: Instant,
}

/// Last proof of one rangecache.
#[derive(Debug)]
struct Hub {
    history: HubHistory,
    /// [`Standing::since`].
    since: Instant,
    /// Number of the known history to which its one was found to belong.
    known_as: Option<u64>,
}

/// Rangecaches that have proven something on a connection.
#[derive(Debug, Default)]
pub(super) struct Hubs {
    /// The one that has proven something last is the last.
    all: Vec<Hub>,
    /// When one of them has proven another history than any before.
    changed: Option<Instant>,
}

impl Hubs {
    /// Records a proof on the connection that was `opened` then. Histories of one hub do not come back.
    pub(super) fn note(&mut self, proof: HubProof, opened: Instant) {
        let (HubProof { history, age }, now) = (proof, Instant::now());
        // Later than it was by the time of the response's way.
        let checked_since = now.checked_sub(age).unwrap_or(opened);
        let is_of_hub = |hub: &Hub| hub.history.instance == history.instance;
        let before = self.all.iter().position(is_of_hub).map(|at| self.all.remove(at));
        let mut hub = match before {
            Some(hub) if hub.history == history => hub,
            None if self.all.is_empty() && self.changed.is_none() => Hub {
                history,
                since: checked_since,
                known_as: None,
            },
            _ => {
                self.changed = Some(now);
                Hub {
                    history,
                    since: now,
                    known_as: None,
                }
            }
        };
        hub.since = hub.since.max(checked_since);
        if self.all.len() == MAX_HUBS {
            self.all.remove(0);
        }
        self.all.push(hub);
    }

    /// The last proof.
    pub(super) fn last(&self) -> Option<Standing> {
        self.all.last().map(Hub::standing)
    }

    /// The last proof of `history`, unless its hub has proven another one since.
    pub(super) fn proven(&self, history: HubHistory) -> Option<Standing> {
        self.find(history).map(Hub::standing)
    }

    /// The history that each has proven last.
    pub(super) fn lineages(&self) -> Vec<Lineage> {
        self.all.iter().map(|hub| Lineage::Hub(hub.history)).collect()
    }

    /// When another history was proven than any before; `None` if there was only one.
    pub(super) fn changed(&self) -> Option<Instant> {
        self.changed
    }

    /// Whether `of_hub` was found to be the known `history`.
    pub(super) fn is_of_history(&self, of_hub: HubHistory, history: u64) -> bool {
        self.find(of_hub).is_some_and(|hub| hub.known_as == Some(history))
    }

    /// Sets [`Hubs::is_of_history`], unless the hub of `of_hub` has proven another one since.
    pub(super) fn set_history(&mut self, of_hub: HubHistory, history: u64) {
        let mut all = self.all.iter_mut();
        if let Some(hub) = all.find(|hub| hub.history == of_hub) {
            hub.known_as = Some(history);
        }
    }

    fn find(&self, history: HubHistory) -> Option<&Hub> {
        self.all.iter().find(|hub| hub.history == history)
    }
}

impl Hub {
    fn standing(&self) -> Standing {
        let (lineage, since) = (Lineage::Hub(self.history), self.since);
        Standing { lineage, since }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn of(instance: u128, number: u64) -> HubHistory {
        HubHistory { instance, number }
    }

    /// Notes proofs of these histories, by connections that are an hour old.
    fn note(hubs: &mut Hubs, histories: &[HubHistory]) {
        for history in histories {
            let age = Duration::from_secs(3_600);
            let history = *history;
            hubs.note(HubProof { history, age }, Instant::now());
        }
    }

    #[test]
    fn what_was_compared_with_one_hub_is_kept_while_others_answer() {
        let mut hubs = Hubs::default();
        note(&mut hubs, &[of(1, 4)]);
        hubs.set_history(of(1, 4), 0);
        note(&mut hubs, &[of(2, 9)]);
        assert!(!hubs.is_of_history(of(2, 9), 0), "it was not compared");
        hubs.set_history(of(2, 9), 0);
        note(&mut hubs, &[of(1, 4), of(2, 9)]);
        assert!(hubs.is_of_history(of(1, 4), 0) && hubs.is_of_history(of(2, 9), 0));
        assert!(!hubs.is_of_history(of(1, 4), 1));
        note(&mut hubs, &[of(1, 5)]);
        assert!(!hubs.is_of_history(of(1, 5), 0), "another history");
        hubs.set_history(of(1, 4), 1);
        assert!(!hubs.is_of_history(of(1, 4), 1), "it has ended");
        assert!(hubs.is_of_history(of(2, 9), 0));
    }

    #[test]
    fn first_history_is_the_only_one_that_was_proven() {
        let mut hubs = Hubs::default();
        let began = Instant::now();
        note(&mut hubs, &[of(1, 4), of(1, 4)]);
        let last = hubs.last().unwrap();
        assert!(last.since < began && hubs.changed().is_none());
        note(&mut hubs, &[of(2, 9)]);
        let last = hubs.last().unwrap();
        assert_eq!(last.lineage, Lineage::Hub(of(2, 9)));
        assert!(last.since >= began && hubs.changed() >= Some(began));
        note(&mut hubs, &[of(1, 4)]);
        let first = hubs.last().unwrap();
        assert!(first.since < began, "it has not changed");
        assert_eq!(hubs.lineages(), [of(2, 9), of(1, 4)].map(Lineage::Hub));
    }

    #[test]
    fn hub_that_has_proven_nothing_for_long_is_forgotten() {
        let mut hubs = Hubs::default();
        note(&mut hubs, &[of(0, 1), of(1, 1), of(0, 1)]);
        for instance in 2..=MAX_HUBS as u128 {
            note(&mut hubs, &[of(instance, 1)]);
        }
        assert!(hubs.proven(of(1, 1)).is_none() && hubs.proven(of(0, 1)).is_some());
        assert_eq!(hubs.lineages().len(), MAX_HUBS);
    }
}
