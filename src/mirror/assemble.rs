//! From watch responses to whole revisions. Pure, so that every order of responses can be tested.
//!
//! **I3, revisions are whole**: the mirror moves to R when every event of R is here — a response whose last event is R,
//! with no fragment open — or when a progress notification for R has come on this feed. The header's revision of an
//! event response proves nothing: it may be ahead of the events.

use crate::cache::{Change, Entry, MalformedKeyValue};
use crate::etcdserverpb::WatchResponse;

/// Event type DELETE.
const DELETE: i32 = 1;

/// What a response amounts to.
#[derive(Debug)]
pub(super) enum Step {
    /// Nothing yet.
    Wait,
    /// These changes make whole revisions up to `revision`.
    Apply {
        /// In revision order.
        changes: Vec<Change>,
        /// That of the last change.
        revision: i64,
    },
    /// There is no event up to this revision that has not been seen.
    Advance(i64),
    /// So many events were at or below what is here: this member may be behind (etcd 20221).
    Fenced(u64),
}

/// Collects events until they are whole.
#[derive(Debug)]
pub(super) struct Assembler {
    /// Events of a response that comes in fragments, until the last one has come.
    open: Vec<Change>,
    fragment_is_open: bool,
    revision: i64,
}

impl Assembler {
    /// Everything up to `revision` is here.
    pub(super) fn new(revision: i64) -> Assembler {
        Assembler {
            open: Vec::new(),
            fragment_is_open: false,
            revision,
        }
    }

    /// Up to which revision everything is here.
    pub(super) fn revision(&self) -> i64 {
        self.revision
    }

    /// Takes a response that neither creates nor cancels the watch.
    pub(super) fn take(&mut self, response: &WatchResponse) -> Result<Step, MalformedKeyValue> {
        if response.events.is_empty() && !response.fragment && !self.fragment_is_open {
            let revision = response.header.as_ref().map_or(0, |header| header.revision);
            if revision <= self.revision {
                return Ok(Step::Wait);
            }
            self.revision = revision;
            return Ok(Step::Advance(revision));
        }
        if response.events.is_empty() && !response.fragment {
            // Progress in the middle of a revision: it may not speak of the fragments that are still to come.
            return Ok(Step::Wait);
        }
        self.open.reserve(response.events.len());
        for event in &response.events {
            let entry = Entry::from_key_value(&event.kv)?;
            self.open.push(if event.r#type == DELETE {
                Change::Delete {
                    key: entry.key().into(),
                    mod_revision: entry.mod_revision(),
                }
            } else {
                Change::Put(entry)
            });
        }
        self.fragment_is_open = response.fragment;
        if self.fragment_is_open {
            return Ok(Step::Wait);
        }
        let changes = std::mem::take(&mut self.open);
        match changes.last().map(Change::revision) {
            Some(revision) if revision > self.revision => {
                self.revision = revision;
                Ok(Step::Apply { changes, revision })
            }
            _ => Ok(Step::Fenced(changes.len() as u64)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcdserverpb::{Event, ResponseHeader};

    /// A KeyValue of key `k` with this mod_revision.
    fn event(mod_revision: u8) -> Event {
        Event {
            kv: vec![0x0a, 1, b'k', 0x10, mod_revision, 0x18, mod_revision, 0x20, 1].into(),
            ..Event::default()
        }
    }

    fn response(header_revision: i64, events: Vec<Event>, fragment: bool) -> WatchResponse {
        let header = Some(ResponseHeader {
            revision: header_revision,
            ..ResponseHeader::default()
        });
        WatchResponse {
            header,
            events,
            fragment,
            ..WatchResponse::default()
        }
    }

    fn steps(responses: &[WatchResponse]) -> Vec<String> {
        let mut assembler = Assembler::new(10);
        responses
            .iter()
            .map(|response| match assembler.take(response).unwrap() {
                Step::Wait => "wait".to_owned(),
                Step::Apply { changes, revision } => format!("apply {} up to {revision}", changes.len()),
                Step::Advance(revision) => format!("advance to {revision}"),
                Step::Fenced(count) => format!("fenced {count}"),
            })
            .collect()
    }

    #[test]
    fn the_last_event_moves_the_revision_and_the_header_does_not() {
        let got = steps(&[
            response(99, vec![event(11), event(11), event(12)], false),
            response(13, vec![], false),
        ]);
        assert_eq!(got, ["apply 3 up to 12", "advance to 13"]);
    }

    #[test]
    fn fragments_are_one_response_and_progress_does_not_slip_in_between() {
        let got = steps(&[
            response(12, vec![event(11)], true),
            response(12, vec![], false),
            response(12, vec![event(11)], true),
            response(12, vec![event(11), event(12)], false),
            response(12, vec![], false),
        ]);
        assert_eq!(got, ["wait", "wait", "wait", "apply 4 up to 12", "wait"]);
    }

    #[test]
    fn what_is_here_already_is_fenced() {
        let got = steps(&[
            response(9, vec![], false),
            response(9, vec![event(9), event(10)], false),
        ]);
        assert_eq!(got, ["wait", "fenced 2"]);
    }

    #[test]
    fn a_key_value_that_is_none_is_an_error() {
        let broken = Event {
            kv: vec![0x0a, 9].into(),
            ..Event::default()
        };
        assert!(Assembler::new(0).take(&response(1, vec![broken], false)).is_err());
    }
}
