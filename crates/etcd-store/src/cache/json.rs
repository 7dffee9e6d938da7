//! The RangeResponse as JSON, as etcd's gateway writes it but without white space, encoded piece by piece while it is sent.

use std::ops::ControlFlow;

use base64::{Engine, engine::general_purpose::STANDARD};

use super::answer::{AnswerStep, ResponseHeader};
use super::entry::Entry;
use super::selection::{Selection, Values};
use super::stored::{EntryReader, MemoryError};

/// A RangeResponse that is not encoded yet: it holds a snapshot, not text (I5).
#[derive(Debug)]
pub struct JsonAnswer {
    header: ResponseHeader,
    selection: Selection,
    /// Number of entries produced so far.
    produced: u64,
    reader: EntryReader,
    state: AnswerStep,
}

impl JsonAnswer {
    /// An answer with the entries of `selection`.
    pub fn new(header: ResponseHeader, selection: Selection) -> JsonAnswer {
        JsonAnswer {
            header,
            selection,
            produced: 0,
            reader: EntryReader::default(),
            state: AnswerStep::Header,
        }
    }

    /// Whether the last piece was produced.
    pub fn is_done(&self) -> bool {
        self.state == AnswerStep::Done
    }

    /// Next piece of the text: at least `target_bytes`, exceeded by one entry at most; the last one may be shorter. `None`
    /// after the last.
    ///
    /// # Errors
    /// Memory is damaged: the text cannot be completed.
    pub fn next_piece(&mut self, target_bytes: usize) -> Result<Option<String>, MemoryError> {
        let mut out = String::new();
        match self.state {
            AnswerStep::Done => return Ok(None),
            AnswerStep::Kvs => {}
            AnswerStep::Header => {
                self.state = AnswerStep::Kvs;
                out.push('{');
                JsonFields::new(&mut out).header(&self.header);
                if !self.selection.is_empty() {
                    out.push_str(",\"kvs\":[");
                }
            }
        }
        let (values, produced_before) = (self.selection.values, self.produced);
        let mut produced = 0;
        // Values that are left out are read, too: few ask for text.
        let write = |entry: &Entry| {
            if produced_before + produced > 0 {
                out.push(',');
            }
            write_entry(entry, values, &mut out);
            produced += 1;
            if out.len() < target_bytes {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        };
        self.selection
            .read_from(produced_before, usize::MAX, &mut self.reader, write)?;
        self.produced += produced;
        if self.produced == self.selection.len() {
            self.state = AnswerStep::Done;
            self.write_end(&mut out);
        }
        Ok(Some(out))
    }

    fn write_end(&self, out: &mut String) {
        if !self.selection.is_empty() {
            out.push(']');
        }
        if self.selection.more {
            out.push_str(",\"more\":true");
        }
        if self.selection.count > 0 {
            out.push_str(&format!(",\"count\":\"{}\"", self.selection.count));
        }
        out.push('}');
    }
}

fn write_entry(entry: &Entry, values: Values, out: &mut String) {
    let fields = entry.fields();
    out.push('{');
    let mut written = JsonFields::new(out);
    written.bytes("key", fields.key);
    written.number("create_revision", fields.create_revision);
    written.number("mod_revision", fields.mod_revision);
    written.number("version", fields.version);
    let has_lease = match values {
        Values::Kept => {
            written.bytes("value", &fields.value.contiguous());
            true
        }
        Values::Left { keep_lease } => keep_lease,
    };
    if has_lease {
        written.number("lease", fields.lease);
    }
    out.push('}');
}

/// Writes the fields of one object, without those that have their default.
#[derive(Debug)]
pub struct JsonFields<'a> {
    out: &'a mut String,
    is_first: bool,
}

impl JsonFields<'_> {
    /// Fields at the end of `out`, which ends with the object's brace.
    pub fn new(out: &mut String) -> JsonFields<'_> {
        JsonFields { out, is_first: true }
    }

    /// Begins a field whose value the caller appends to the returned text.
    pub fn name(&mut self, name: &str) -> &mut String {
        if !self.is_first {
            self.out.push(',');
        }
        self.is_first = false;
        self.out.push('"');
        self.out.push_str(name);
        self.out.push_str("\":");
        self.out
    }

    /// A number of 64 bits, which JSON has as a string.
    pub fn number<N: Into<i128>>(&mut self, name: &str, value: N) {
        let value = value.into();
        if value != 0 {
            let out = self.name(name);
            out.push('"');
            out.push_str(&value.to_string());
            out.push('"');
        }
    }

    /// Bytes, which JSON has as base64.
    pub fn bytes(&mut self, name: &str, value: &[u8]) {
        if !value.is_empty() {
            let out = self.name(name);
            out.push('"');
            STANDARD.encode_string(value, out);
            out.push('"');
        }
    }

    /// The header of a response.
    pub fn header(&mut self, header: &ResponseHeader) {
        let out = self.name("header");
        out.push('{');
        let mut fields = JsonFields::new(out);
        fields.number("cluster_id", header.cluster_id);
        fields.number("member_id", header.member_id);
        fields.number("revision", header.revision);
        fields.number("raft_term", header.raft_term);
        fields.number("leader_id", header.leader_id);
        out.push('}');
    }

    /// A key-value pair, with its value.
    pub fn entry(&mut self, name: &str, entry: &Entry) {
        write_entry(entry, Values::Kept, self.name(name));
    }

    /// A truth value.
    pub fn flag(&mut self, name: &str, value: bool) {
        if value {
            self.name(name).push_str("true");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::KeyValue;

    #[test]
    fn defaults_are_left_out_and_pieces_join_to_one_text() {
        let header = ResponseHeader {
            cluster_id: u64::MAX,
            revision: 7,
            ..ResponseHeader::default()
        };
        let selection = |entries, count, more| Selection::of_page(entries, count, more);
        let whole = |selection: Selection, target| {
            let mut answer = JsonAnswer::new(header, selection);
            let (mut pieces, mut was_done) = (Vec::new(), false);
            while let Some(piece) = answer.next_piece(target).unwrap() {
                assert!(!was_done, "after {pieces:?}");
                was_done = answer.is_done();
                pieces.push(piece);
            }
            assert!(was_done, "with the last piece");
            (pieces.len(), pieces.concat())
        };
        let empty = r#"{"header":{"cluster_id":"18446744073709551615","revision":"7"}}"#;
        assert_eq!(whole(selection(Vec::new(), 0, false), 1), (1, empty.to_owned()));
        let entries = vec![
            KeyValue::new("a", 3, "\u{ff}").entry(),
            KeyValue::new("b", 4, "").entry(),
        ];
        let (pieces, text) = whole(selection(entries.clone(), 9, true), 1);
        assert_eq!(pieces, 2);
        assert!(text.ends_with(r#"}],"more":true,"count":"9"}"#), "{text}");
        assert!(text.contains(r#","kvs":[{"key":"YQ==","#), "{text}");
        assert_eq!(text, whole(selection(entries, 9, true), 1 << 20).1);
    }
}
