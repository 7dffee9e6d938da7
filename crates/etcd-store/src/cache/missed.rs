//! Keys of events that the log has dropped before its follower took them.

/// Events that are remembered. Beyond, the follower has to assume that every key was among them.
const MAX_EVENTS: usize = 10_000;
/// Bytes of their keys.
const MAX_BYTES: usize = 1 << 20;

/// An event that a follower has missed.
#[derive(Debug)]
pub struct MissedEvent {
    /// Its key.
    pub key: Box<[u8]>,
    /// Its revision.
    pub revision: i64,
}

/// Events that a follower has missed.
#[derive(Debug, Default)]
pub struct Missed {
    events: Vec<MissedEvent>,
    bytes: usize,
    is_incomplete: bool,
}

impl Missed {
    /// The events, oldest first; `None` if there were too many.
    pub fn events(&self) -> Option<&[MissedEvent]> {
        (!self.is_incomplete).then_some(&*self.events)
    }

    /// Adds the event of `key` at `revision`.
    pub(super) fn add(&mut self, key: &[u8], revision: i64) {
        if self.is_incomplete {
            return;
        }
        self.bytes += key.len();
        if self.events.len() == MAX_EVENTS || self.bytes > MAX_BYTES {
            self.events = Vec::new();
            self.is_incomplete = true;
        } else {
            let key = key.into();
            self.events.push(MissedEvent { key, revision });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_known_until_there_are_too_many() {
        let mut missed = Missed::default();
        for revision in 1..=MAX_EVENTS as i64 {
            missed.add(b"k", revision);
        }
        let last = missed.events().unwrap().last().unwrap();
        assert_eq!((&*last.key, last.revision), (&b"k"[..], MAX_EVENTS as i64));
        missed.add(b"k", i64::MAX);
        assert!(missed.events().is_none() && missed.events.capacity() == 0);
        missed.add(b"k", i64::MAX);
        assert!(missed.events().is_none());
        let mut missed = Missed::default();
        missed.add(&vec![b'k'; MAX_BYTES], 1);
        assert!(missed.events().is_some());
        missed.add(b"k", 2);
        assert!(missed.events().is_none());
    }
}
