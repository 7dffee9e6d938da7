//! Lines of waiting calls, one per client. Clients take turns, and in its turn the connections of a client do, so that a
//! client with hundreds of waiting calls on many connections delays a call of another client by one call.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::call_bytes::ClientAccount;
use super::connection_lines::ConnectionLines;

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

/// Waiting calls, each with a `T`, by their client.
#[derive(Debug)]
pub(super) struct Lines<T> {
    lines: HashMap<u64, Line<T>>,
    /// Clients with a line by their place: the lowest is next.
    places: BTreeMap<u64, u64>,
    /// Length of each line, and its client.
    lengths: BTreeSet<(usize, u64)>,
    /// Next place. Increases, so that the lowest is the oldest.
    next_place: u64,
}

#[derive(Debug)]
struct Line<T> {
    place: u64,
    calls: ConnectionLines<T>,
}

impl<T> Default for Lines<T> {
    fn default() -> Lines<T> {
        Lines {
            lines: HashMap::new(),
            places: BTreeMap::new(),
            lengths: BTreeSet::new(),
            next_place: 0,
        }
    }
}

impl<T> Lines<T> {
    /// Adds a call at the end of its owner's line; returns its number, which no other call of the client has.
    pub(super) fn push(&mut self, owner: Owner, call: T) -> u64 {
        if !self.lines.contains_key(&owner.client) {
            let place = self.new_place(owner.client);
            let calls = ConnectionLines::default();
            self.lines.insert(owner.client, Line { place, calls });
        }
        let number = self.change(owner.client, |calls| calls.push(owner.connection, call));
        number.unwrap_or_default()
    }

    /// Removes the oldest call of the client that is next among those that `may` have a turn, whose place is then behind
    /// all others. Returns the client, too.
    pub(super) fn pop(&mut self, may: impl Fn(u64) -> bool) -> Option<(u64, T)> {
        let mut places = self.places.iter();
        let (&place, &client) = places.find(|(_, client)| may(**client))?;
        self.places.remove(&place);
        let place = self.new_place(client);
        self.lines.get_mut(&client)?.place = place;
        Some((client, self.change(client, ConnectionLines::pop)??))
    }

    /// Removes the newest call of the client with the longest line, if that line is longer than the one of `owner`'s
    /// client by more than one call; otherwise one of that client, if a connection of it has a longer line than
    /// `owner`'s by more than one call.
    pub(super) fn pop_longest(&mut self, owner: Owner) -> Option<T> {
        let own = self.lines.get(&owner.client).map_or(0, |line| line.calls.len());
        let (length, longest) = *self.lengths.last()?;
        if length > own + 1 && longest != owner.client {
            return self.change(longest, ConnectionLines::pop_newest)?;
        }
        self.change(owner.client, |calls| calls.pop_longest(owner.connection))?
    }

    /// Removes a call; `None` if it was removed before.
    pub(super) fn remove(&mut self, owner: Owner, number: u64) -> Option<T> {
        self.change(owner.client, |calls| calls.remove(owner.connection, number))?
    }

    /// Changes the line of a client, which is dropped if it is empty then.
    fn change<R>(&mut self, client: u64, change: impl FnOnce(&mut ConnectionLines<T>) -> R) -> Option<R> {
        let line = self.lines.get_mut(&client)?;
        self.lengths.remove(&(line.calls.len(), client));
        let changed = change(&mut line.calls);
        let length = line.calls.len();
        if length > 0 {
            self.lengths.insert((length, client));
        } else {
            self.places.remove(&line.place);
            self.lines.remove(&client);
        }
        Some(changed)
    }

    /// Place behind all others.
    fn new_place(&mut self, client: u64) -> u64 {
        self.next_place += 1;
        self.places.insert(self.next_place, client);
        self.next_place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(client: u64, connection: u64) -> Owner {
        Owner { client, connection }
    }

    #[test]
    fn clients_take_turns_however_many_connections_they_have() {
        let mut lines = Lines::default();
        for connection in 0..3 {
            for call in 0..2 {
                lines.push(owner(1, connection), (1, connection, call));
            }
        }
        lines.push(owner(2, 9), (2, 9, 0));
        lines.push(owner(2, 9), (2, 9, 1));
        let order: Vec<_> = std::iter::from_fn(|| Some(lines.pop(|_| true)?.1)).collect();
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
        assert!(lines.lines.is_empty() && lines.places.is_empty() && lines.lengths.is_empty());
    }

    #[test]
    fn client_with_the_longest_line_loses_its_newest_call() {
        let mut lines = Lines::default();
        for connection in 0..4 {
            lines.push(owner(1, connection), connection);
        }
        let number = lines.push(owner(2, 9), 9);
        assert!(lines.pop_longest(owner(2, 9)).is_some_and(|call| call < 4));
        assert_eq!(
            lines.pop_longest(owner(1, 9)),
            None,
            "its own connections are short"
        );
        assert_eq!(lines.remove(owner(2, 9), number), Some(9));
        assert_eq!(lines.remove(owner(2, 9), number), None);
    }
}
