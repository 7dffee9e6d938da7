//! An incremental counter of the events in the responses of a Watch stream.

use super::frame::PrefixReader;

/// Field `events` of a WatchResponse, length-delimited.
const EVENTS: u64 = (11 << 3) | LENGTH_DELIMITED;
const LENGTH_DELIMITED: u64 = 2;
const VARINT: u64 = 0;

/// Counts events piece by piece; pieces may be cut anywhere.
#[derive(Debug, Default)]
pub struct EventScanner {
    prefix: PrefixReader,
    /// Bytes of the current message that are still to come.
    message_left: usize,
    /// Bytes of the current field, or of an unreadable message, that are skipped.
    skip: usize,
    /// Tag of the current field, once it is complete.
    tag: Option<u64>,
    /// Number that is being read, and its next shift.
    number: u64,
    shift: u32,
    events: u64,
}

impl EventScanner {
    /// Events so far.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Scans the next bytes.
    pub fn scan(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            if self.message_left == 0 {
                let (taken, prefix) = self.prefix.read(data);
                data = &data[taken..];
                if let Some(prefix) = prefix {
                    self.message_left = prefix.length_bytes as usize;
                    self.skip = if prefix.is_compressed {
                        self.message_left
                    } else {
                        0
                    };
                    (self.tag, self.number, self.shift) = (None, 0, 0);
                }
                continue;
            }
            let taken = if self.skip > 0 {
                let skipped = self.skip.min(self.message_left).min(data.len());
                self.skip -= skipped;
                skipped
            } else {
                self.read_number(data[0]);
                1
            };
            self.message_left -= taken;
            data = &data[taken..];
        }
    }

    /// Reads one byte of a tag, of a length or of a number.
    fn read_number(&mut self, byte: u8) {
        self.number |= u64::from(byte & 0x7f).checked_shl(self.shift).unwrap_or(0);
        self.shift += 7;
        if byte & 0x80 != 0 && self.shift < 70 {
            return;
        }
        let number = self.number;
        (self.number, self.shift) = (0, 0);
        match self.tag.take() {
            None if matches!(number & 7, VARINT | LENGTH_DELIMITED) => self.tag = Some(number),
            // No WatchResponse has fields of another kind: the rest cannot be read.
            None => self.skip = self.message_left,
            Some(tag) if tag & 7 == VARINT => {}
            Some(tag) => {
                self.events += u64::from(tag == EVENTS);
                self.skip = usize::try_from(number).unwrap_or(usize::MAX);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::etcdserverpb::{ResponseHeader, WatchResponse};

    #[test]
    fn events_are_counted_wherever_pieces_are_cut() {
        let mut stream = Vec::new();
        for events in [0, 3, 0, 200] {
            let response = WatchResponse {
                header: Some(ResponseHeader {
                    cluster_id: u64::MAX,
                    revision: 300,
                    ..ResponseHeader::default()
                }),
                watch_id: 1 << 40,
                cancel_reason: "x".repeat(events),
                events: vec![Default::default(); events],
                ..WatchResponse::default()
            };
            let message = response.encode_to_vec();
            stream.push(0);
            stream.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
            stream.extend(message);
        }
        // A compressed message is passed over.
        stream.extend([1, 0, 0, 0, 3, 0x5a, 0x5a, 0x5a]);
        for size in [1, 2, 3, 7, 4096] {
            let mut scanner = EventScanner::default();
            stream.chunks(size).for_each(|piece| scanner.scan(piece));
            assert_eq!((scanner.events(), scanner.message_left), (203, 0), "{size}");
        }
    }
}
