//! Lines of waiting calls of one client, one per connection. The connections take turns, so that one with hundreds of
//! waiting calls delays a call of another by one call.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Waiting calls, each with a `T`, by the number of their connection.
#[derive(Debug)]
pub(super) struct ConnectionLines<T> {
    lines: HashMap<u64, Line<T>>,
    /// Connections with a line by their place: the lowest is next.
    places: BTreeMap<u64, u64>,
    /// Length of each line, and its connection.
    lengths: BTreeSet<(usize, u64)>,
    /// Next number of a call or a place. Increases, so that the lowest is the oldest.
    next_number: u64,
    /// Sum of the lengths.
    calls: usize,
}

#[derive(Debug)]
struct Line<T> {
    place: u64,
    /// Calls by their numbers.
    calls: BTreeMap<u64, T>,
}

impl<T> Default for ConnectionLines<T> {
    fn default() -> ConnectionLines<T> {
        ConnectionLines {
            lines: HashMap::new(),
            places: BTreeMap::new(),
            lengths: BTreeSet::new(),
            next_number: 0,
            calls: 0,
        }
    }
}

impl<T> ConnectionLines<T> {
    /// Adds a call at the end of its connection's line; returns its number.
    pub(super) fn push(&mut self, connection: u64, call: T) -> u64 {
        let number = self.next_number();
        let place = number;
        let line = self.lines.entry(connection).or_insert_with(|| Line {
            place,
            calls: BTreeMap::new(),
        });
        if line.calls.is_empty() {
            self.places.insert(place, connection);
        }
        self.lengths.remove(&(line.calls.len(), connection));
        line.calls.insert(number, call);
        self.calls += 1;
        self.lengths.insert((line.calls.len(), connection));
        number
    }

    /// Removes the oldest call of the connection that is next, whose place is then behind all others.
    pub(super) fn pop(&mut self) -> Option<T> {
        let (_, connection) = self.places.first_key_value()?;
        let connection = *connection;
        let number = *self.lines.get(&connection)?.calls.first_key_value()?.0;
        let call = self.remove(connection, number);
        let place = self.next_number();
        if let Some(line) = self.lines.get_mut(&connection) {
            self.places.remove(&line.place);
            line.place = place;
            self.places.insert(place, connection);
        }
        call
    }

    /// Removes the newest call of the longest line, if that line is longer than the one of `connection` by more than
    /// one call.
    pub(super) fn pop_longest(&mut self, connection: u64) -> Option<T> {
        let own = self.lines.get(&connection).map_or(0, |line| line.calls.len());
        let (length, _) = *self.lengths.last()?;
        if length <= own + 1 {
            return None;
        }
        self.pop_newest()
    }

    /// Removes the newest call of the longest line.
    pub(super) fn pop_newest(&mut self) -> Option<T> {
        let (_, longest) = *self.lengths.last()?;
        let number = *self.lines.get(&longest)?.calls.last_key_value()?.0;
        self.remove(longest, number)
    }

    /// Number of waiting calls.
    pub(super) fn len(&self) -> usize {
        self.calls
    }

    /// Removes a call; `None` if it was removed before.
    pub(super) fn remove(&mut self, connection: u64, number: u64) -> Option<T> {
        let line = self.lines.get_mut(&connection)?;
        let call = line.calls.remove(&number)?;
        self.calls -= 1;
        let length = line.calls.len();
        self.lengths.remove(&(length + 1, connection));
        if length > 0 {
            self.lengths.insert((length, connection));
        } else {
            self.places.remove(&line.place);
            self.lines.remove(&connection);
        }
        Some(call)
    }

    fn next_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(lines: &mut ConnectionLines<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| lines.pop()).collect()
    }

    #[test]
    fn connections_take_turns_in_the_order_of_their_first_calls() {
        let mut lines = ConnectionLines::default();
        for call in ["a1", "a2", "a3", "a4"] {
            lines.push(1, call);
        }
        lines.push(2, "b1");
        assert_eq!(lines.pop(), Some("a1"));
        lines.push(3, "c1");
        lines.push(3, "c2");
        assert_eq!(all(&mut lines), ["b1", "a2", "c1", "a3", "c2", "a4"]);
        assert!(lines.lines.is_empty() && lines.places.is_empty() && lines.lengths.is_empty());
    }

    #[test]
    fn removed_calls_leave_nothing_behind() {
        let mut lines = ConnectionLines::default();
        let first = lines.push(1, "a1");
        let second = lines.push(1, "a2");
        assert_eq!(lines.remove(1, first), Some("a1"));
        assert_eq!(lines.remove(1, first), None);
        assert_eq!(lines.remove(1, second), Some("a2"));
        assert!(lines.lines.is_empty() && lines.places.is_empty() && lines.lengths.is_empty());
        assert_eq!(lines.pop(), None);
    }

    #[test]
    fn longest_line_loses_its_newest_call_until_lines_are_equal() {
        let mut lines = ConnectionLines::default();
        for call in ["a1", "a2", "a3"] {
            lines.push(1, call);
        }
        lines.push(2, "b1");
        assert_eq!(lines.pop_longest(1), None, "its own");
        assert_eq!(lines.pop_longest(2), Some("a3"));
        assert_eq!(lines.pop_longest(2), None);
        assert_eq!(lines.pop_longest(3), Some("a2"));
        assert_eq!(lines.pop_longest(3), None);
        assert_eq!(all(&mut lines), ["a1", "b1"]);
    }
}
