//! Lines in which calls and holders of bytes wait, the deadline of a call, and the reasons for which it gets nothing.
//!
//! Clients take turns, and in its turn the connections of a client do, so that a client with hundreds of waiting calls on many
//! connections delays a call of another client by one call, and one connection another likewise.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::{hash::Hash, time::Duration};

use tokio::time::Instant;

/// Client and connection of a waiting call, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) client: u64,
    pub(super) connection: u64,
}

/// Waiting calls, each with a `T`.
#[derive(Debug)]
pub(super) struct Line<T> {
    clients: RoundRobin<u64, RoundRobin<u64, BTreeMap<u64, T>>>,
    /// Number of the newest call.
    last_number: u64,
}

impl<T> Default for Line<T> {
    fn default() -> Line<T> {
        Line {
            clients: RoundRobin::default(),
            last_number: 0,
        }
    }
}

impl<T> Line<T> {
    /// Adds a call behind its connection's others, or, with the `number` that it had before, in front of those that came
    /// later; returns its number, which no other call has.
    pub(super) fn push(&mut self, owner: Owner, number: Option<u64>, call: T) -> u64 {
        let number = number.unwrap_or_else(|| {
            self.last_number += 1;
            self.last_number
        });
        self.change(owner, |calls| calls.insert(number, call));
        number
    }

    /// Whether no call waits.
    pub(super) fn is_empty(&self) -> bool {
        self.clients.len() == 0
    }

    /// Number of calls of a client.
    pub(super) fn len_of(&self, client: u64) -> usize {
        self.clients.len_of(client)
    }

    /// Client and number of the call that is next.
    pub(super) fn first(&self) -> Option<(u64, u64)> {
        let client = self.clients.next(|_| true)?;
        let connections = self.clients.get(client)?;
        let calls = connections.get(connections.next(|_| true)?)?;
        Some((client, *calls.first_key_value()?.0))
    }

    /// Removes the oldest call of the connection that is next, of the client that is next among those that `may` be;
    /// both are then behind all others. Returns the client, too.
    pub(super) fn pop(&mut self, may: impl Fn(u64) -> bool) -> Option<(u64, T)> {
        let client = self.clients.next(may)?;
        let popped = self.clients.take_turn(client, |connections| {
            let connection = connections.next(|_| true)?;
            connections.take_turn(connection, BTreeMap::pop_first)
        });
        popped.map(|(_, call)| (client, call))
    }

    /// Removes the newest call of the client with the most, if it has more than `owner`'s client by more than one call;
    /// otherwise one of that client, if a connection of it has more than `owner`'s by more than one call. In either
    /// case it is of the client's connection with the most calls.
    pub(super) fn pop_longest(&mut self, owner: Owner) -> Option<T> {
        let (length, longest) = self.clients.longest()?;
        let is_other = length > self.clients.len_of(owner.client) + 1;
        let client = if is_other { longest } else { owner.client };
        let popped = self.clients.change(client, |connections| {
            let (length, longest) = connections.longest()?;
            if !is_other && length <= connections.len_of(owner.connection) + 1 {
                return None;
            }
            connections.change(longest, BTreeMap::pop_last)
        });
        popped.map(|(_, call)| call)
    }

    /// Removes a call; `None` if it was removed before.
    pub(super) fn remove(&mut self, owner: Owner, number: u64) -> Option<T> {
        self.change(owner, |calls| calls.remove(&number))
    }

    fn change<R>(&mut self, owner: Owner, change: impl FnOnce(&mut BTreeMap<u64, T>) -> R) -> R {
        self.clients.change(owner.client, |connections| {
            connections.change(owner.connection, change)
        })
    }
}

/// Queue of one owner, which is forgotten while it is empty.
trait Queue: Default {
    /// Number of waiting calls.
    fn len(&self) -> usize;
}

/// Calls of one owner by their numbers: the lowest is the oldest.
impl<T> Queue for BTreeMap<u64, T> {
    fn len(&self) -> usize {
        BTreeMap::len(self)
    }
}

/// Queues by their owner `K`.
#[derive(Debug)]
struct RoundRobin<K, Q> {
    /// Queues that are not empty, each with its owner's position.
    queues: HashMap<K, (u64, Q)>,
    /// Owners by their position: the lowest is next.
    positions: BTreeMap<u64, K>,
    /// Length of each queue, and its owner.
    lengths: BTreeSet<(usize, K)>,
    last_position: u64,
    /// Sum of the lengths.
    len: usize,
}

impl<K, Q> Default for RoundRobin<K, Q> {
    fn default() -> RoundRobin<K, Q> {
        RoundRobin {
            queues: HashMap::new(),
            positions: BTreeMap::new(),
            lengths: BTreeSet::new(),
            last_position: 0,
            len: 0,
        }
    }
}

impl<K, Q> Queue for RoundRobin<K, Q> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<K: Copy + Eq + Hash + Ord, Q: Queue> RoundRobin<K, Q> {
    /// Owner that is next among those that `may` be.
    fn next(&self, may: impl Fn(K) -> bool) -> Option<K> {
        self.positions.values().copied().find(|owner| may(*owner))
    }

    /// Queue of an owner; `None` if it is empty.
    fn get(&self, owner: K) -> Option<&Q> {
        self.queues.get(&owner).map(|(_, queue)| queue)
    }

    /// Length of an owner's queue.
    fn len_of(&self, owner: K) -> usize {
        self.get(owner).map_or(0, Q::len)
    }

    /// Length and owner of the longest queue.
    fn longest(&self) -> Option<(usize, K)> {
        self.lengths.last().copied()
    }

    /// Changes the queue of an owner, which is behind all others if it was empty.
    fn change<R>(&mut self, owner: K, change: impl FnOnce(&mut Q) -> R) -> R {
        let (mut position, mut queue) = self.queues.remove(&owner).unwrap_or_default();
        let before = queue.len();
        let changed = change(&mut queue);
        let after = queue.len();
        self.len = self.len + after - before;
        self.lengths.remove(&(before, owner));
        if after == 0 {
            self.positions.remove(&position);
            return changed;
        }
        if before == 0 {
            position = self.new_position(owner);
        }
        self.lengths.insert((after, owner));
        self.queues.insert(owner, (position, queue));
        changed
    }

    /// Changes the queue of an owner that has its turn and is then behind all others.
    fn take_turn<R>(&mut self, owner: K, change: impl FnOnce(&mut Q) -> R) -> R {
        let position = self.new_position(owner);
        match self.queues.get_mut(&owner) {
            Some((former, _)) => self.positions.remove(&std::mem::replace(former, position)),
            None => self.positions.remove(&position),
        };
        self.change(owner, change)
    }

    /// Position behind all others.
    fn new_position(&mut self, owner: K) -> u64 {
        self.last_position += 1;
        self.positions.insert(self.last_position, owner);
        self.last_position
    }

    /// Whether nothing is kept of any owner.
    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.positions.is_empty() && self.lengths.is_empty() && self.len == 0
    }
}

/// Time until which the client of a call waits, set once, when the call arrives. Every wait for the call looks at it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<(Instant, Duration)>);

impl Deadline {
    /// Of a call whose client has set none.
    pub const NONE: Deadline = Deadline(None);

    /// Of a call that has `arrived`, with the timeout that its client has set, if any.
    #[must_use]
    pub fn after(arrived: Instant, timeout: Option<Duration>) -> Deadline {
        Deadline(timeout.map(|timeout| (arrived, timeout)))
    }

    /// The time; `None` if the client has set none.
    #[must_use]
    pub fn at(self) -> Option<Instant> {
        self.0.map(|(arrived, timeout)| arrived + timeout)
    }

    /// The end of a wait that ends at `latest` in any case.
    #[must_use]
    pub fn at_most(self, latest: Instant) -> Instant {
        self.at().map_or(latest, |at| at.min(latest))
    }

    /// Whether it has expired.
    #[must_use]
    pub fn has_expired(self) -> bool {
        self.at().is_some_and(|at| at <= Instant::now())
    }

    /// Whether it has expired for the client, whose clock began before this one, and whose reset may be faster than the timer.
    #[must_use]
    pub fn has_expired_for_client(self) -> bool {
        self.0
            .is_some_and(|(arrived, timeout)| arrived.elapsed() >= timeout - timeout / 10)
    }
}

/// Reason for which a call got no bytes or no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exceeded {
    /// The bytes do not fit now, or did not until the deadline.
    #[error("the byte budget is used up")]
    Bytes,
    /// The bound on waiting calls is reached.
    #[error("too many reads wait")]
    Waiting,
    /// A call without a deadline has waited as long as it may.
    #[error("etcd is too busy")]
    Late,
    /// The caller's deadline has expired.
    #[error("the deadline has expired")]
    Deadline,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(client: u64, connection: u64) -> Owner {
        Owner { client, connection }
    }

    fn all<T>(line: &mut Line<T>) -> Vec<T> {
        std::iter::from_fn(|| Some(line.pop(|_| true)?.1)).collect()
    }

    #[test]
    fn connections_take_turns_in_the_order_of_their_first_calls() {
        let mut line = Line::default();
        for call in ["a1", "a2", "a3", "a4"] {
            line.push(owner(7, 1), None, call);
        }
        line.push(owner(7, 2), None, "b1");
        assert_eq!(line.pop(|_| true), Some((7, "a1")));
        line.push(owner(7, 3), None, "c1");
        line.push(owner(7, 3), None, "c2");
        assert_eq!(all(&mut line), ["b1", "a2", "c1", "a3", "c2", "a4"]);
        assert!(line.clients.is_empty());
    }

    #[test]
    fn call_that_waits_again_is_in_front_of_the_later_ones_of_its_connection_alone() {
        let mut line = Line::default();
        assert!(line.is_empty());
        let first = line.push(owner(7, 1), None, "a1");
        line.push(owner(7, 1), None, "a2");
        line.push(owner(7, 2), None, "b1");
        assert_eq!(line.pop(|_| true), Some((7, "a1")));
        assert_eq!(line.push(owner(7, 1), Some(first), "a1 again"), first);
        assert!(!line.is_empty());
        assert_eq!(all(&mut line), ["b1", "a1 again", "a2"]);
        assert!(line.is_empty());
    }

    #[test]
    fn removed_calls_leave_nothing_behind() {
        let mut line = Line::default();
        let first = line.push(owner(7, 1), None, "a1");
        let second = line.push(owner(7, 1), None, "a2");
        assert_eq!(line.remove(owner(7, 1), first), Some("a1"));
        assert_eq!(line.remove(owner(7, 1), first), None);
        assert_eq!(line.remove(owner(7, 1), second), Some("a2"));
        assert!(line.clients.is_empty());
        assert_eq!(line.pop(|_| true), None);
    }

    #[test]
    fn connection_with_the_most_calls_loses_its_newest_until_all_have_as_many() {
        let mut line = Line::default();
        for call in ["a1", "a2", "a3"] {
            line.push(owner(7, 1), None, call);
        }
        line.push(owner(7, 2), None, "b1");
        assert_eq!(line.pop_longest(owner(7, 1)), None, "its own");
        assert_eq!(line.pop_longest(owner(7, 2)), Some("a3"));
        assert_eq!(line.pop_longest(owner(7, 2)), None);
        assert_eq!(line.pop_longest(owner(7, 3)), Some("a2"));
        assert_eq!(line.pop_longest(owner(7, 3)), None);
        assert_eq!(all(&mut line), ["a1", "b1"]);
    }

    #[test]
    fn clients_take_turns_however_many_connections_they_have() {
        let mut line = Line::default();
        for connection in 0..3 {
            for call in 0..2 {
                line.push(owner(1, connection), None, (1, connection, call));
            }
        }
        line.push(owner(2, 9), None, (2, 9, 0));
        line.push(owner(2, 9), None, (2, 9, 1));
        let order = all(&mut line);
        let (noisy, honest): (Vec<_>, Vec<_>) = order.iter().copied().partition(|(client, ..)| *client == 1);
        assert_eq!(
            order[..4].iter().map(|call| call.0).collect::<Vec<_>>(),
            [1, 2, 1, 2]
        );
        assert_eq!(honest, [(2, 9, 0), (2, 9, 1)]);
        assert_eq!(
            noisy,
            [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 0, 1), (1, 1, 1), (1, 2, 1)],
            "its connections take turns"
        );
        assert!(line.clients.is_empty());
    }

    #[test]
    fn client_with_the_most_calls_loses_its_newest() {
        let mut line = Line::default();
        for connection in 0..4 {
            line.push(owner(1, connection), None, connection);
        }
        let number = line.push(owner(2, 9), None, 9);
        assert!(line.pop_longest(owner(2, 9)).is_some_and(|call| call < 4));
        assert_eq!(
            line.pop_longest(owner(1, 9)),
            None,
            "its own connections are short"
        );
        assert_eq!(line.remove(owner(2, 9), number), Some(9));
        assert_eq!(line.remove(owner(2, 9), number), None);
    }

    #[tokio::test(start_paused = true)]
    async fn wait_ends_at_its_bound_or_at_an_earlier_deadline_that_counts_from_the_arrival() {
        let (arrived, second) = (Instant::now(), Duration::from_secs(1));
        tokio::time::advance(second).await;
        let (deadline, none) = (Deadline::after(arrived, Some(2 * second)), Deadline::NONE);
        let latest = Instant::now() + 2 * second;
        assert_eq!((none.at(), none.at_most(latest)), (None, latest));
        assert_eq!(deadline.at_most(latest), arrived + 2 * second);
        assert_eq!(deadline.at_most(arrived), arrived);
        assert!(!deadline.has_expired() && !deadline.has_expired_for_client());
        tokio::time::advance(second * 9 / 10).await;
        assert!(!deadline.has_expired());
        assert!(deadline.has_expired_for_client(), "its clock began earlier");
        tokio::time::advance(second / 10).await;
        assert!(deadline.has_expired(), "at the deadline");
        assert!(!none.has_expired() && !none.has_expired_for_client());
    }
}
