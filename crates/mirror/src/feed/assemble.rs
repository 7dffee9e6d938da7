//! Whole revisions from watch responses. Pure, so that every order of responses can be tested.
//!
//! **I3, revisions are whole**: the mirror advances to revision R when every event of R has arrived: with a response
//! whose last event is of R and that leaves no fragment open, or with a progress notification for R on this feed. The
//! header's revision of an event response is not used: it may be ahead of the events.
//!
//! What a feed has received by the time it looks is applied at once, in a [`Burst`]: each application copies the nodes of the tree that
//! readers may hold, shows a view, sets gauges and wakes the readers that wait. Under many writes etcd's responses arrive faster than
//! that, so those that are there already share it.

use etcd_store::cache::{Change, Entry, MalformedKeyValue};
use etcd_wire::etcdserverpb::WatchResponse;

/// Number of the event type DELETE.
const DELETE: i32 = 1;

/// Effect of one response on the mirror.
#[derive(Debug)]
pub(crate) enum Step {
    /// None: more fragments follow, or the revision is known.
    Wait,
    /// Changes of whole revisions up to `revision`.
    Apply {
        /// In order of revision.
        changes: Vec<Change>,
        /// Revision of the last change.
        revision: i64,
    },
    /// Every event up to this revision has been applied.
    Advance(i64),
    /// Number of dropped events, which were at or below the mirror's revision: the member may lag (etcd 20221).
    Fenced(u64),
}

impl Step {
    /// Returns the step without the events up to `known`, which the mirror has.
    pub(crate) fn behind(self, known: i64) -> Step {
        let Step::Apply {
            mut changes,
            revision,
        } = self
        else {
            return self;
        };
        changes.retain(|change| change.revision() > known);
        if changes.is_empty() {
            return Step::Wait;
        }
        Step::Apply { changes, revision }
    }
}

/// Error in a feed's responses.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    /// An invalid KeyValue.
    #[error("an event is not understood: {0}")]
    Malformed(#[from] MalformedKeyValue),
    /// More fragments of one response than the mirror may take memory.
    #[error("the fragments of one response take more than {max_bytes} bytes")]
    TooLong {
        /// Bound on their bytes.
        max_bytes: u64,
    },
}

/// Memory of an event in addition to its bytes (estimate).
const EVENT_OVERHEAD_BYTES: u64 = 64;

/// Collects events until their revisions are whole.
#[derive(Debug)]
pub(crate) struct Assembler {
    /// Events of a fragmented response, until its last fragment arrives.
    open: Vec<Change>,
    /// Bytes of `open`.
    open_bytes: u64,
    /// Bound on `open_bytes`: a run of fragments without end must not take all memory.
    max_bytes: u64,
    fragment_is_open: bool,
    revision: i64,
}

impl Assembler {
    /// An assembler for a mirror at `revision`, which keeps fragments of up to `max_bytes`.
    pub(crate) fn new(revision: i64, max_bytes: u64) -> Assembler {
        Assembler {
            open: Vec::new(),
            open_bytes: 0,
            max_bytes,
            fragment_is_open: false,
            revision,
        }
    }

    /// Revision up to which every event has arrived.
    pub(crate) fn revision(&self) -> i64 {
        self.revision
    }

    /// Records that every event up to `revision` is known to have arrived.
    pub(crate) fn raise(&mut self, revision: i64) {
        self.revision = self.revision.max(revision);
    }

    /// Adds a response that neither creates nor cancels the watch.
    pub(crate) fn add(&mut self, response: &WatchResponse) -> Result<Step, Unusable> {
        if response.events.is_empty() && !response.fragment && !self.fragment_is_open {
            let revision = response.header.as_ref().map_or(0, |header| header.revision);
            if revision <= self.revision {
                return Ok(Step::Wait);
            }
            self.revision = revision;
            return Ok(Step::Advance(revision));
        }
        if response.events.is_empty() && !response.fragment {
            // Progress between fragments of a revision: it may not cover the fragments that follow.
            return Ok(Step::Wait);
        }
        self.open.reserve(response.events.len());
        for event in &response.events {
            self.open_bytes += (event.kv.len() + event.prev_kv.len()) as u64 + EVENT_OVERHEAD_BYTES;
            let entry = Entry::from_key_value(&event.kv)?;
            let mut change = if event.r#type == DELETE {
                Change::delete(entry)
            } else {
                Change::put(entry)
            };
            if !event.prev_kv.is_empty() {
                change.replaced = Some(Entry::from_key_value(&event.prev_kv)?);
            }
            self.open.push(change);
        }
        self.fragment_is_open = response.fragment;
        if self.fragment_is_open {
            if self.open_bytes > self.max_bytes {
                return Err(Unusable::TooLong {
                    max_bytes: self.max_bytes,
                });
            }
            return Ok(Step::Wait);
        }
        self.open_bytes = 0;
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

/// Events from which on no further response is added to a burst: what readers wait for must not wait for much more. Below
/// the interval between two checkpoints of the history.
const MAX_EVENTS: usize = 64;
/// Memory of the events from which on no further response is added to a burst.
const MAX_BYTES: u64 = 1 << 20;

/// Whole revisions that the mirror has not taken yet.
#[derive(Debug, Default)]
pub(super) struct Burst {
    /// In order of revision.
    pub(super) changes: Vec<Change>,
    bytes: u64,
    /// Revision up to which every event has arrived; 0 if none of the responses has shown one.
    pub(super) revision: i64,
    /// Events that were dropped because they were at or below the mirror's revision.
    pub(super) fenced: u64,
    /// Whether a response had events, also such that the mirror has.
    pub(super) has_events: bool,
}

impl Burst {
    /// Adds the step of the next response.
    pub(super) fn add(&mut self, step: Step) {
        match step {
            Step::Wait => {}
            Step::Apply { changes, revision } => {
                self.bytes += changes
                    .iter()
                    .map(|change| {
                        let replaced = change.replaced.as_ref();
                        change.entry.memory_bytes() + replaced.map_or(0, Entry::memory_bytes)
                    })
                    .sum::<u64>();
                self.revision = revision;
                if self.changes.is_empty() {
                    self.changes = changes;
                } else {
                    self.changes.extend(changes);
                }
            }
            Step::Advance(revision) => self.revision = revision,
            Step::Fenced(events) => self.fenced += events,
        }
    }

    /// Whether it has to be applied before a further response is added.
    pub(super) fn is_full(&self) -> bool {
        self.changes.len() >= MAX_EVENTS || self.bytes >= MAX_BYTES
    }
}

impl From<Step> for Burst {
    fn from(step: Step) -> Burst {
        let mut burst = Burst::default();
        burst.add(step);
        burst
    }
}

#[cfg(test)]
mod tests {
    use etcd_store::cache::testing::KeyValue;
    use etcd_wire::etcdserverpb::{Event, ResponseHeader};

    use super::*;

    /// An event with a KeyValue of key `k` and this mod_revision.
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
        let mut assembler = Assembler::new(10, 1 << 20);
        responses
            .iter()
            .map(|response| described(assembler.add(response).unwrap()))
            .collect()
    }

    fn described(step: Step) -> String {
        match step {
            Step::Wait => "wait".to_owned(),
            Step::Apply { changes, revision } => format!("apply {} up to {revision}", changes.len()),
            Step::Advance(revision) => format!("advance to {revision}"),
            Step::Fenced(count) => format!("fenced {count}"),
        }
    }

    #[test]
    fn step_behind_a_revision_has_the_events_after_it() {
        for (known, expected) in [(10, "apply 3 up to 13"), (12, "apply 1 up to 13"), (13, "wait")] {
            let mut assembler = Assembler::new(10, 1 << 20);
            let events = vec![event(11), event(12), event(13)];
            let step = assembler.add(&response(13, events, false)).unwrap();
            assert_eq!(described(step.behind(known)), expected, "{known}");
        }
        assert_eq!(described(Step::Advance(7).behind(9)), "advance to 7");
    }

    #[test]
    fn last_event_advances_the_revision_and_the_header_does_not() {
        let got = steps(&[
            response(99, vec![event(11), event(11), event(12)], false),
            response(13, vec![], false),
        ]);
        assert_eq!(got, ["apply 3 up to 12", "advance to 13"]);
    }

    #[test]
    fn progress_between_fragments_does_not_advance_the_revision() {
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
    fn events_at_or_below_the_revision_are_fenced() {
        let got = steps(&[
            response(9, vec![], false),
            response(9, vec![event(9), event(10)], false),
        ]);
        assert_eq!(got, ["wait", "fenced 2"]);
    }

    #[test]
    fn malformed_key_value_is_an_error() {
        let broken = Event {
            kv: vec![0x0a, 9].into(),
            ..Event::default()
        };
        let added = Assembler::new(0, 1 << 20).add(&response(1, vec![broken], false));
        assert!(matches!(added, Err(Unusable::Malformed(_))), "{added:?}");
    }

    #[test]
    fn endless_run_of_fragments_is_an_error() {
        let mut assembler = Assembler::new(10, 10_000);
        let mut fragments = 0;
        let error = loop {
            match assembler.add(&response(12, vec![event(11)], true)) {
                Ok(_) => fragments += 1,
                Err(error) => break error,
            }
            assert!(fragments < 1_000);
        };
        assert!(matches!(error, Unusable::TooLong { .. }), "{error:?}");
        assert!(fragments > 100, "{fragments}");
        let mut assembler = Assembler::new(10, 10_000);
        for revision in 11..127 {
            let whole = response(200, vec![event(revision), event(revision)], false);
            assert!(assembler.add(&whole).is_ok(), "whole responses are not bounded");
        }
    }

    fn apply(revisions: &[i64], value_bytes: usize) -> Step {
        let put =
            |revision: &i64| Change::put(KeyValue::new("k", *revision, vec![b'v'; value_bytes]).entry());
        Step::Apply {
            changes: revisions.iter().map(put).collect(),
            revision: *revisions.last().unwrap(),
        }
    }

    fn revisions(burst: &Burst) -> Vec<i64> {
        burst.changes.iter().map(Change::revision).collect()
    }

    #[test]
    fn steps_are_joined_in_order() {
        let mut burst = Burst::from(Step::Advance(10));
        assert_eq!((revisions(&burst), burst.revision), (vec![], 10));
        for step in [
            apply(&[11, 11, 12], 1),
            Step::Fenced(2),
            Step::Wait,
            apply(&[14], 1),
            Step::Advance(20),
            Step::Fenced(1),
        ] {
            burst.add(step);
        }
        assert_eq!((revisions(&burst), burst.revision), (vec![11, 11, 12, 14], 20));
        assert_eq!(burst.fenced, 3);
    }

    #[test]
    fn nothing_is_added_to_many_events_or_bytes() {
        let all: Vec<i64> = (1..=MAX_EVENTS as i64).collect();
        assert!(!Burst::from(apply(&all[1..], 1)).is_full());
        assert!(Burst::from(apply(&all, 1)).is_full());
        let half = usize::try_from(MAX_BYTES / 2).unwrap();
        let mut burst = Burst::from(apply(&[1], half));
        assert!(!burst.is_full());
        burst.add(apply(&[2], half));
        assert!(burst.is_full());
    }
}
