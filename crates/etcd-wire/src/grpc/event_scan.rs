//! An incremental counter of the events in the responses of a Watch stream.

use super::frame::{MessageReader, Part};
use crate::protobuf::{FieldReader, Malformed, Value, to_usize};

/// Field `events` of a WatchResponse.
const EVENTS: u64 = 11;

/// Counts events piece by piece; pieces may be cut anywhere.
#[derive(Debug, Default)]
pub struct EventScanner {
    messages: MessageReader,
    fields: FieldReader,
    /// Bytes of the current value, or of an unreadable message, that are skipped.
    skip: usize,
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
        while let Some(part) = self.messages.next(&mut data) {
            match part {
                Part::Prefix(prefix) => {
                    self.fields = FieldReader::default();
                    self.skip = if prefix.is_compressed { usize::MAX } else { 0 };
                }
                Part::Message(part) => self.scan_message(part),
            }
        }
    }

    fn scan_message(&mut self, mut part: &[u8]) {
        loop {
            let skipped = self.skip.min(part.len());
            part = &part[skipped..];
            self.skip -= skipped;
            if part.is_empty() {
                return;
            }
            match self.fields.read(&mut part) {
                Ok(None | Some((_, Value::Number(_)))) => {}
                Ok(Some((number, Value::Bytes(length)))) => {
                    self.events += u64::from(number == EVENTS);
                    self.skip = to_usize(length);
                }
                Ok(Some((_, Value::Fixed(length)))) => self.skip = to_usize(length),
                Err(Malformed) => self.skip = usize::MAX,
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
            assert_eq!(scanner.events(), 203, "{size}");
            assert!(scanner.messages.is_at_boundary(), "{size}");
        }
    }
}
