//! Waiting calls. Clients take turns, and in its turn the connections of a client do, so that a client with hundreds of
//! waiting calls on many connections delays a call of another client by one call, and one connection another likewise.

use std::collections::BTreeMap;

use super::call_bytes::ClientAccount;
use super::round_robin::{Queue as _, RoundRobin};

/// Client and connection of a waiting call, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) client: u64,
    pub(super) connection: u64,
}

impl Owner {
    /// Current client of the connection with this account.
    pub(super) fn new(account: &ClientAccount) -> Owner {
        Owner {
            client: account.client(),
            connection: account.number(),
        }
    }
}

/// Waiting calls, each with a `T`.
#[derive(Debug)]
pub(super) struct Waiters<T> {
    clients: RoundRobin<u64, RoundRobin<u64, BTreeMap<u64, T>>>,
    /// Number of the newest call.
    last_number: u64,
}

impl<T> Default for Waiters<T> {
    fn default() -> Waiters<T> {
        Waiters {
            clients: RoundRobin::default(),
            last_number: 0,
        }
    }
}

impl<T> Waiters<T> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(client: u64, connection: u64) -> Owner {
        Owner { client, connection }
    }

    fn all<T>(waiters: &mut Waiters<T>) -> Vec<T> {
        std::iter::from_fn(|| Some(waiters.pop(|_| true)?.1)).collect()
    }

    #[test]
    fn connections_take_turns_in_the_order_of_their_first_calls() {
        let mut waiters = Waiters::default();
        for call in ["a1", "a2", "a3", "a4"] {
            waiters.push(owner(7, 1), None, call);
        }
        waiters.push(owner(7, 2), None, "b1");
        assert_eq!(waiters.pop(|_| true), Some((7, "a1")));
        waiters.push(owner(7, 3), None, "c1");
        waiters.push(owner(7, 3), None, "c2");
        assert_eq!(all(&mut waiters), ["b1", "a2", "c1", "a3", "c2", "a4"]);
        assert!(waiters.clients.is_empty());
    }

    #[test]
    fn call_that_waits_again_is_in_front_of_the_later_ones_of_its_connection_alone() {
        let mut waiters = Waiters::default();
        assert!(waiters.is_empty());
        let first = waiters.push(owner(7, 1), None, "a1");
        waiters.push(owner(7, 1), None, "a2");
        waiters.push(owner(7, 2), None, "b1");
        assert_eq!(waiters.pop(|_| true), Some((7, "a1")));
        assert_eq!(waiters.push(owner(7, 1), Some(first), "a1 again"), first);
        assert!(!waiters.is_empty());
        assert_eq!(all(&mut waiters), ["b1", "a1 again", "a2"]);
        assert!(waiters.is_empty());
    }

    #[test]
    fn removed_calls_leave_nothing_behind() {
        let mut waiters = Waiters::default();
        let first = waiters.push(owner(7, 1), None, "a1");
        let second = waiters.push(owner(7, 1), None, "a2");
        assert_eq!(waiters.remove(owner(7, 1), first), Some("a1"));
        assert_eq!(waiters.remove(owner(7, 1), first), None);
        assert_eq!(waiters.remove(owner(7, 1), second), Some("a2"));
        assert!(waiters.clients.is_empty());
        assert_eq!(waiters.pop(|_| true), None);
    }

    #[test]
    fn connection_with_the_most_calls_loses_its_newest_until_all_have_as_many() {
        let mut waiters = Waiters::default();
        for call in ["a1", "a2", "a3"] {
            waiters.push(owner(7, 1), None, call);
        }
        waiters.push(owner(7, 2), None, "b1");
        assert_eq!(waiters.pop_longest(owner(7, 1)), None, "its own");
        assert_eq!(waiters.pop_longest(owner(7, 2)), Some("a3"));
        assert_eq!(waiters.pop_longest(owner(7, 2)), None);
        assert_eq!(waiters.pop_longest(owner(7, 3)), Some("a2"));
        assert_eq!(waiters.pop_longest(owner(7, 3)), None);
        assert_eq!(all(&mut waiters), ["a1", "b1"]);
    }

    #[test]
    fn clients_take_turns_however_many_connections_they_have() {
        let mut waiters = Waiters::default();
        for connection in 0..3 {
            for call in 0..2 {
                waiters.push(owner(1, connection), None, (1, connection, call));
            }
        }
        waiters.push(owner(2, 9), None, (2, 9, 0));
        waiters.push(owner(2, 9), None, (2, 9, 1));
        let order = all(&mut waiters);
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
        assert!(waiters.clients.is_empty());
    }

    #[test]
    fn client_with_the_most_calls_loses_its_newest() {
        let mut waiters = Waiters::default();
        for connection in 0..4 {
            waiters.push(owner(1, connection), None, connection);
        }
        let number = waiters.push(owner(2, 9), None, 9);
        assert!(waiters.pop_longest(owner(2, 9)).is_some_and(|call| call < 4));
        assert_eq!(
            waiters.pop_longest(owner(1, 9)),
            None,
            "its own connections are short"
        );
        assert_eq!(waiters.remove(owner(2, 9), number), Some(9));
        assert_eq!(waiters.remove(owner(2, 9), number), None);
    }
}
