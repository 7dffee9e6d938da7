//! Rules for one watch stream: what a transcript of requests and responses must satisfy, given the events of the store.
//!
//! | rule | meaning |
//! |---|---|
//! | exact | an event is in the store's history, in the watcher's range, passes its filters, and is unchanged |
//! | ordered, unique, reliable | each watcher gets the next matching event, never an older or a later one |
//! | atomic | the events of a revision are in one response, or in consecutive fragments |
//! | bookmarkable | progress R comes after every event at or below R, and never goes back |
//! | headers | an event's response names a revision not below its last event, or exactly that one |
//! | control | one `created` per create, in order; ids as etcd assigns them; nothing for an id that is not open |
//! | previous values | with `prev_kv`, on every put of an existing key and on every delete: the key at the revision before |

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt::Write as _;

use crate::pb::{Event, KeyValue, WatchCreateRequest, WatchRequest, WatchResponse};

/// `watch_id` of a response to no watcher in particular: progress of the whole stream, or a refused create.
pub const NO_ID: i64 = -1;
/// [`Event::type`] of a delete.
pub const DELETE: i32 = 1;

/// Step of a stream, as its client sees it.
#[derive(Clone, Debug)]
pub enum Step {
    /// The client sent a request.
    Sent(WatchRequest),
    /// The client received a response.
    Received(WatchResponse),
    /// The client learned elsewhere, before its next request, that the store is at this revision.
    Known(i64),
}

/// Differences that are allowed between sources of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// A response's header names the revision of its last event. etcd names its current revision while a watcher is
    /// catching up.
    pub header_is_last_event: bool,
    /// Previous values are missing at the start revision alone, which may be etcd's compaction. etcd leaves them out if they
    /// have been compacted.
    pub prev_kv_is_complete: bool,
    /// The store's history was not replaced by another one, which cancels every watch as a compaction does.
    pub history_is_one: bool,
    /// A progress notification of the whole stream covers exactly the watchers that are open for the client. etcd sends progress
    /// and responses to requests through two queues: one that it determined before a create may come after `created`,
    /// and one determined after a cancel may come before `canceled`.
    pub progress_is_in_order: bool,
}

impl Rules {
    /// Guarantees of etcd.
    pub const ETCD: Self = Self {
        header_is_last_event: false,
        prev_kv_is_complete: false,
        history_is_one: true,
        progress_is_in_order: false,
    };
    /// Guarantees of rangecache for streams that it serves from memory.
    pub const MEMORY: Self = Self {
        header_is_last_event: true,
        prev_kv_is_complete: true,
        history_is_one: true,
        progress_is_in_order: true,
    };
}

/// Every event of the store, in order, with `prev_kv`.
#[derive(Clone, Debug, Default)]
pub struct Truth(Vec<Event>);

impl Truth {
    /// Events of a store that was empty before them; `prev_kv` is determined from the earlier ones.
    pub fn replayed(mut events: Vec<Event>) -> Self {
        let mut newest: HashMap<Vec<u8>, KeyValue> = HashMap::new();
        for of_revision in events.chunk_by_mut(|a, b| revision(a) == revision(b)) {
            for event in of_revision.iter_mut() {
                event.prev_kv = previous(event, newest.get(&kv(event).key));
            }
            for event in &*of_revision {
                let kv = kv(event).clone();
                if event.r#type == DELETE {
                    newest.remove(&kv.key);
                } else {
                    newest.insert(kv.key.clone(), kv);
                }
            }
        }
        Self(events)
    }

    /// Appends the events of a watch of every key with `prev_kv`.
    pub fn extend(&mut self, response: &WatchResponse) {
        self.0.extend(response.events.iter().cloned());
    }

    /// Revision of the newest event; 0 without events.
    pub fn revision(&self) -> i64 {
        self.0.last().map_or(0, revision)
    }

    /// Events above `after` that a watcher with these options gets, in order.
    pub fn matching<'a>(
        &'a self,
        create: &'a WatchCreateRequest,
        after: i64,
    ) -> impl Iterator<Item = &'a Event> {
        self.0[self.index_above(after)..]
            .iter()
            .filter(|event| wants(create, event))
    }

    /// Whether the events of `at` are more than its keys.
    pub fn has_superseded(&self, at: i64) -> bool {
        let events = &self.0[self.index_above(at - 1)..self.index_above(at)];
        let keys: BTreeSet<_> = events.iter().map(|event| &kv(event).key).collect();
        keys.len() < events.len()
    }

    /// Index of the first event above `after`.
    fn index_above(&self, after: i64) -> usize {
        self.0.partition_point(|event| revision(event) <= after)
    }
}

/// The `prev_kv` that etcd sends for `event`, whose key was `before` at the revision before: none if the event creates its key, also
/// where a delete of the same revision has made that possible.
pub fn previous(event: &Event, before: Option<&KeyValue>) -> Option<KeyValue> {
    let is_creation = event.r#type != DELETE && kv(event).create_revision == revision(event);
    before.filter(|_| !is_creation).cloned()
}

/// Revision of an event.
pub fn revision(event: &Event) -> i64 {
    kv(event).mod_revision
}

/// Key-value pair of an event, which every event has.
fn kv(event: &Event) -> &KeyValue {
    event.kv.as_ref().expect("an event has a kv")
}

/// Whether a create names `key`, in etcd's meaning of `key` and `range_end`.
pub fn names(create: &WatchCreateRequest, key: &[u8]) -> bool {
    let start = if create.key.is_empty() {
        b"\0"
    } else {
        &create.key[..]
    };
    match &create.range_end[..] {
        b"" => key == start,
        b"\0" => key >= start,
        end => start <= key && key < end,
    }
}

/// Whether etcd refuses the create for its range.
pub fn names_nothing(create: &WatchCreateRequest) -> bool {
    let start = if create.key.is_empty() {
        b"\0"
    } else {
        &create.key[..]
    };
    let end = &create.range_end[..];
    !end.is_empty() && end != b"\0" && end <= start
}

fn wants(create: &WatchCreateRequest, event: &Event) -> bool {
    let filter = i32::from(event.r#type == DELETE);
    names(create, &kv(event).key) && !create.filters.contains(&filter)
}

/// Whether a response is a progress notification.
pub fn is_progress(response: &WatchResponse) -> bool {
    !response.created && !response.canceled && !response.fragment && response.events.is_empty()
}

fn header_revision(response: &WatchResponse) -> i64 {
    response.header.as_ref().map_or(-1, |header| header.revision)
}

/// Violations of the rules in `steps`, each with the number of its step.
pub fn violations(steps: &[Step], truth: &Truth, rules: Rules) -> Vec<String> {
    let mut stream = Checked::new(truth, rules);
    for (number, step) in steps.iter().enumerate() {
        stream.number = number;
        match step {
            Step::Known(revision) => stream.known = stream.known.max(*revision),
            Step::Sent(request) => stream.sent(request),
            Step::Received(response) => stream.received(response),
        }
    }
    stream.violations
}

/// A watcher after its `created`.
struct Watcher {
    create: WatchCreateRequest,
    /// Index in the truth from which the next event is looked for.
    next: usize,
    /// For start 0, until the first event: index of the first event that may not be missing.
    owed_from: Option<usize>,
    /// Revision of the last event.
    last: i64,
    /// Progress may not be below this.
    at_least: i64,
    /// Cancelled by a compaction; the id stays in use until the client cancels it.
    is_compacted: bool,
    /// Progress requests of the stream that were sent before its create.
    requests_before: usize,
}

struct Checked<'a> {
    truth: &'a Truth,
    rules: Rules,
    number: usize,
    known: i64,
    /// Creates without a `created`, each with what the client knew when it sent the create, and the number of progress
    /// requests before it.
    creates: VecDeque<(WatchCreateRequest, i64, usize)>,
    /// Progress requests.
    requests: usize,
    /// Progress of the whole stream.
    answers: usize,
    /// Cancels without a response, by id.
    cancels: BTreeMap<i64, usize>,
    watchers: BTreeMap<i64, Watcher>,
    next_id: i64,
    /// The fragments of an incomplete response.
    fragments: Option<(i64, Vec<Event>)>,
    last_event: i64,
    last_progress: i64,
    violations: Vec<String>,
}

impl<'a> Checked<'a> {
    fn new(truth: &'a Truth, rules: Rules) -> Self {
        Self {
            truth,
            rules,
            number: 0,
            known: 0,
            creates: VecDeque::new(),
            requests: 0,
            answers: 0,
            cancels: BTreeMap::new(),
            watchers: BTreeMap::new(),
            next_id: 0,
            fragments: None,
            last_event: 0,
            last_progress: 0,
            violations: Vec::new(),
        }
    }

    fn violation(&mut self, what: &str) {
        let mut text = format!("step {}: ", self.number);
        let _ = write!(text, "{what}");
        self.violations.push(text);
    }

    fn sent(&mut self, request: &WatchRequest) {
        if let Some(create) = &request.create_request {
            self.creates
                .push_back((create.clone(), self.known, self.requests));
        }
        self.requests += usize::from(request.progress_request.is_some());
        if let Some(cancel) = &request.cancel_request {
            *self.cancels.entry(cancel.watch_id).or_default() += 1;
        }
    }

    fn received(&mut self, response: &WatchResponse) {
        let id = response.watch_id;
        if let Some((of, _)) = &self.fragments
            && (*of != id || response.created || response.canceled || response.events.is_empty())
        {
            let what = format!("atomic: a response of {id} between two fragments of {of}: {response:?}");
            self.violation(&what);
            self.fragments = None;
        }
        if response.created {
            self.created(response);
        } else if response.canceled {
            self.canceled(response);
        } else if response.fragment || !response.events.is_empty() {
            let (_, mut events) = self.fragments.take().unwrap_or((id, Vec::new()));
            events.extend(response.events.iter().cloned());
            if response.fragment {
                self.fragments = Some((id, events));
            } else {
                self.events(id, &events, header_revision(response));
            }
        } else {
            self.progress(id, header_revision(response));
        }
    }

    fn created(&mut self, response: &WatchResponse) {
        let Some((create, known, requests_before)) = self.creates.pop_front() else {
            return self.violation("control: a created without a create");
        };
        let id = if create.watch_id == 0 {
            let used: BTreeSet<_> = self.watchers.keys().collect();
            (self.next_id..).find(|id| !used.contains(id)).unwrap_or(i64::MAX)
        } else {
            create.watch_id
        };
        let is_refused = create.start_revision < 0
            || names_nothing(&create)
            || (create.watch_id != 0 && self.watchers.contains_key(&id));
        if response.canceled {
            if response.watch_id != NO_ID || response.cancel_reason.is_empty() {
                self.violation(&format!(
                    "control: a refusal without id -1 and reason: {response:?}"
                ));
            }
            return;
        }
        if is_refused {
            self.violation(&format!("control: not refused: {create:?}"));
        }
        if response.watch_id != id {
            self.violation(&format!(
                "control: created as {}, expected {id}",
                response.watch_id
            ));
        }
        if create.watch_id == 0 {
            self.next_id = id + 1;
        }
        let shown = header_revision(response);
        let from_now = create.start_revision == 0;
        let watcher = Watcher {
            next: self.truth.index_above(if from_now {
                known
            } else {
                create.start_revision - 1
            }),
            owed_from: from_now.then(|| self.truth.index_above(shown)),
            last: 0,
            at_least: if from_now { known } else { create.start_revision },
            is_compacted: false,
            requests_before,
            create,
        };
        self.watchers.insert(response.watch_id, watcher);
    }

    fn canceled(&mut self, response: &WatchResponse) {
        let id = response.watch_id;
        let Some(watcher) = self.watchers.get_mut(&id) else {
            return self.violation(&format!("control: canceled, but not open: {response:?}"));
        };
        if response.compact_revision != 0 {
            let was_compacted = std::mem::replace(&mut watcher.is_compacted, true);
            let needs = watcher.create.start_revision.max(watcher.last + 1);
            if self.rules.history_is_one && needs >= response.compact_revision {
                self.violation(&format!("control: nothing below {needs} is needed: {response:?}"));
            }
            if was_compacted || header_revision(response) != 0 {
                self.violation(&format!(
                    "control: a second cancel, or a header in it: {response:?}"
                ));
            }
            return;
        }
        self.watchers.remove(&id);
        match self.cancels.get_mut(&id) {
            Some(count) if *count > 0 => *count -= 1,
            _ if response.cancel_reason.is_empty() => {
                self.violation(&format!(
                    "control: canceled without request or reason: {response:?}"
                ));
            }
            _ => {}
        }
    }

    /// Checks one whole response with events, its fragments put together.
    fn events(&mut self, id: i64, events: &[Event], header: i64) {
        let mut found = Vec::new();
        let truth = self.truth;
        let Some(watcher) = self.watchers.get_mut(&id).filter(|watcher| !watcher.is_compacted) else {
            return self.violation(&format!("control: events for {id}, which is not open"));
        };
        let last = events.last().map_or(0, revision);
        if events
            .first()
            .is_some_and(|event| revision(event) <= watcher.last)
        {
            found.push(format!(
                "atomic: {id} gets revision {} again",
                revision(&events[0])
            ));
        }
        for event in events {
            found.extend(watcher.event(id, event, truth, self.rules));
        }
        let next = truth.0[watcher.next..]
            .iter()
            .find(|event| wants(&watcher.create, event));
        if next.is_some_and(|event| revision(event) <= last) {
            found.push(format!("atomic: {id} gets only a part of revision {last}"));
        }
        watcher.last = watcher.last.max(last);
        if header < last || (self.rules.header_is_last_event && header != last) {
            found.push(format!("headers: {id} gets events up to {last} under {header}"));
        }
        self.last_event = self.last_event.max(last);
        for what in found {
            self.violation(&what);
        }
    }

    fn progress(&mut self, id: i64, at: i64) {
        self.answers += usize::from(id == NO_ID);
        let mut found = Vec::new();
        if id != NO_ID && !self.watchers.contains_key(&id) {
            found.push(format!("control: progress of {id}, which is not open"));
        }
        if at < self.last_progress && id == NO_ID {
            found.push(format!(
                "bookmarkable: progress {at} after progress {}",
                self.last_progress
            ));
        }
        if at < self.last_event && id == NO_ID {
            found.push(format!(
                "bookmarkable: progress {at} after an event at {}",
                self.last_event
            ));
        }
        for (of, watcher) in &self.watchers {
            if id != NO_ID && id != *of {
                continue;
            }
            let is_being_cancelled = self.cancels.get(of).is_some_and(|count| *count > 0);
            let may_be_older = id == NO_ID && self.answers <= watcher.requests_before;
            if !self.rules.progress_is_in_order && (is_being_cancelled || may_be_older) {
                continue;
            }
            if watcher.is_compacted {
                found.push(format!("bookmarkable: progress though {of} was compacted"));
                continue;
            }
            if at < watcher.at_least || at < watcher.last {
                found.push(format!(
                    "bookmarkable: progress {at} before {of}'s start or event"
                ));
            }
            let from = watcher.owed_from.unwrap_or(watcher.next);
            let missing = self.truth.0[from..]
                .iter()
                .find(|event| wants(&watcher.create, event));
            if let Some(event) = missing.filter(|event| revision(event) <= at) {
                found.push(format!(
                    "bookmarkable: progress {at} before {of}'s event {event:?}"
                ));
            }
        }
        if id == NO_ID {
            self.last_progress = self.last_progress.max(at);
        }
        for what in found {
            self.violation(&what);
        }
    }
}

impl Watcher {
    /// Whether a compaction at the watcher's first revision may have removed the event: a later one of this revision has superseded it.
    fn may_lack(&self, index: usize, truth: &Truth) -> bool {
        let event = &truth.0[index];
        let later = truth.0[index + 1..].iter();
        let mut of_revision = later.take_while(|later| revision(later) == revision(event));
        revision(event) == self.create.start_revision
            && of_revision.any(|later| kv(later).key == kv(event).key)
    }

    /// Compares one event with the next that is owed.
    fn event(&mut self, id: i64, event: &Event, truth: &Truth, rules: Rules) -> Option<String> {
        let of_watcher = truth.0.iter().enumerate();
        let of_revision = of_watcher.clone().skip(truth.index_above(revision(event) - 1));
        let of_revision = of_revision.take_while(|(_, known)| revision(known) == revision(event));
        // A revision may have several events of a key, of which some are equal.
        let of_key = of_revision.filter(|(_, known)| kv(known).key == kv(event).key);
        let mut same = of_key
            .clone()
            .filter(|(_, known)| known.kv == event.kv && known.r#type == event.r#type);
        let owed = same.clone().find(|(index, _)| *index >= self.next);
        let known = owed.or_else(|| same.next()).or_else(|| of_key.clone().next());
        let Some((index, known)) = known else {
            return Some(format!("exact: {id} gets what etcd has not: {event:?}"));
        };
        if !wants(&self.create, known) {
            return Some(format!(
                "exact: {id} gets an event of another range or kind: {event:?}"
            ));
        }
        if index < self.next {
            return Some(format!(
                "unique: {id} gets {event:?} again, or from before its start"
            ));
        }
        let owed_from = self.owed_from.take().unwrap_or(self.next);
        let skipped = of_watcher
            .take(index)
            .skip(owed_from)
            .find(|(index, event)| wants(&self.create, event) && !self.may_lack(*index, truth));
        self.next = index + 1;
        if let Some((_, skipped)) = skipped {
            return Some(format!("reliable: {id} gets {event:?} and never {skipped:?}"));
        }
        let expected_prev = known.prev_kv.as_ref().filter(|_| self.create.prev_kv);
        let prev_is_right = match &event.prev_kv {
            None => {
                let may_be_compacted = revision(event) == self.create.start_revision;
                expected_prev.is_none() || may_be_compacted || !rules.prev_kv_is_complete
            }
            prev => prev.as_ref() == expected_prev,
        };
        if event.kv != known.kv || event.r#type != known.r#type || !prev_is_right {
            return Some(format!("exact: {id} gets {event:?} instead of {known:?}"));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pb::{ResponseHeader, WatchCancelRequest, WatchProgressRequest};

    fn event(at: i64, key: &str) -> Event {
        let kv = KeyValue {
            key: key.into(),
            create_revision: at,
            mod_revision: at,
            version: 1,
            ..KeyValue::default()
        };
        Event {
            kv: Some(kv),
            ..Event::default()
        }
    }

    /// Revision 2 has a and b, 3 has a, 4 has b, 5 has a.
    fn truth() -> Truth {
        Truth(vec![
            event(2, "a"),
            event(2, "b"),
            event(3, "a"),
            event(4, "b"),
            event(5, "a"),
        ])
    }

    fn create(key: &str, start_revision: i64, watch_id: i64) -> Step {
        Step::Sent(WatchRequest {
            create_request: Some(WatchCreateRequest {
                key: key.into(),
                range_end: b"z".to_vec(),
                start_revision,
                watch_id,
                ..WatchCreateRequest::default()
            }),
            ..WatchRequest::default()
        })
    }

    fn response(watch_id: i64, at: i64) -> WatchResponse {
        WatchResponse {
            header: Some(ResponseHeader {
                revision: at,
                ..ResponseHeader::default()
            }),
            watch_id,
            ..WatchResponse::default()
        }
    }

    fn created(watch_id: i64, at: i64) -> Step {
        Step::Received(WatchResponse {
            created: true,
            ..response(watch_id, at)
        })
    }

    fn events(watch_id: i64, at: i64, events: &[Event]) -> Step {
        Step::Received(WatchResponse {
            events: events.to_vec(),
            ..response(watch_id, at)
        })
    }

    fn progress(at: i64) -> Step {
        Step::Received(response(NO_ID, at))
    }

    /// The one violation of `steps`; empty without any.
    fn only(steps: &[Step]) -> String {
        let mut found = violations(steps, &truth(), Rules::MEMORY);
        assert!(found.len() < 2, "{found:#?}");
        found.pop().unwrap_or_default()
    }

    /// A compaction at a watcher's first revision may have removed what that revision superseded, and nothing else.
    #[test]
    fn superseded_event_may_be_missing_at_the_first_revision_alone() {
        let delete = Event {
            r#type: DELETE,
            ..event(3, "a")
        };
        let truth = Truth(vec![event(2, "a"), event(3, "a"), delete.clone()]);
        assert!(truth.has_superseded(3) && !truth.has_superseded(2));
        for (start_revision, sent, is_right) in [
            (2, vec![event(2, "a"), event(3, "a"), delete.clone()], true),
            (3, vec![event(3, "a"), delete.clone()], true),
            (3, vec![delete.clone()], true),
            (2, vec![event(2, "a"), delete.clone()], false),
            (3, vec![delete.clone(), event(3, "a")], false),
        ] {
            let steps = [create("a", start_revision, 1), created(1, 3), events(1, 3, &sent)];
            let found = violations(&steps, &truth, Rules::ETCD);
            assert_eq!(found.is_empty(), is_right, "{start_revision} {sent:?}: {found:?}");
        }
    }

    #[test]
    fn correct_transcript_has_no_violations() {
        let transcript = [
            create("a", 2, 0),
            created(0, 2),
            events(0, 3, &[event(2, "a"), event(2, "b"), event(3, "a")]),
            Step::Known(3),
            create("b", 0, 7),
            created(7, 3),
            events(0, 4, &[event(4, "b")]),
            events(7, 4, &[event(4, "b")]),
            progress(4),
            events(0, 5, &[event(5, "a")]),
            Step::Sent(WatchRequest {
                cancel_request: Some(WatchCancelRequest { watch_id: 7 }),
                ..WatchRequest::default()
            }),
            Step::Received(WatchResponse {
                canceled: true,
                ..response(7, 5)
            }),
        ];
        assert_eq!(only(&transcript), "");
    }

    #[test]
    fn every_kind_of_violation_is_found() {
        let open = [create("a", 2, 0), created(0, 5)];
        let after = |steps: &[Step]| violations(&[&open, steps].concat(), &truth(), Rules::MEMORY).join("\n");
        let whole = || events(0, 2, &[event(2, "a"), event(2, "b")]);
        assert!(after(&[events(0, 2, &[event(2, "a")])]).contains("atomic"));
        assert!(after(&[whole(), events(0, 4, &[event(4, "b")])]).contains("reliable"));
        assert!(after(&[events(0, 5, &[event(2, "a"), event(2, "b")])]).contains("headers"));
        let foreign = [event(2, "a"), event(2, "b"), event(2, "c")];
        assert!(after(&[events(0, 2, &foreign)]).contains("exact"));
        assert!(after(&[progress(2)]).contains("bookmarkable"));
        assert!(after(&[whole(), events(0, 3, &[event(3, "a")]), progress(2)]).contains("bookmarkable"));
        assert!(after(&[events(1, 2, &[event(2, "a")])]).contains("control"));
        assert!(after(&[created(1, 2)]).contains("control"));
        let again = violations(
            &[&open[..], &[whole(), whole()]].concat(),
            &truth(),
            Rules::MEMORY,
        );
        assert!(again.iter().any(|what| what.contains("unique")), "{again:?}");
    }

    #[test]
    fn start_at_zero_is_owed_every_event_after_created() {
        let open = [Step::Known(2), create("a", 0, 0), created(0, 3)];
        let first = |event: Event| only(&[&open[..], &[events(0, revision(&event), &[event])]].concat());
        assert_eq!(first(event(3, "a")), "", "between what was known and created");
        assert_eq!(first(event(4, "b")), "");
        assert!(first(event(5, "a")).contains("reliable"));
        assert_eq!(only(&[&open[..], &[progress(3)]].concat()), "");
        assert!(only(&[&open[..], &[progress(4)]].concat()).contains("bookmarkable"));
    }

    #[test]
    fn progress_requested_before_a_create_may_come_after_it_at_etcd() {
        let request = Step::Sent(WatchRequest {
            progress_request: Some(WatchProgressRequest {}),
            ..WatchRequest::default()
        });
        let late = [request, create("a", 2, 0), created(0, 5), progress(5)];
        assert!(only(&late).contains("bookmarkable"));
        assert_eq!(violations(&late, &truth(), Rules::ETCD), [""; 0]);
        let again = [&late[..], &[progress(5)]].concat();
        assert!(violations(&again, &truth(), Rules::ETCD)[0].contains("bookmarkable"));
    }

    #[test]
    fn cancel_at_a_compaction_that_takes_nothing_is_found() {
        let cancel = |compact_revision| {
            Step::Received(WatchResponse {
                canceled: true,
                compact_revision,
                ..response(0, 0)
            })
        };
        let open = [create("a", 3, 0), created(0, 5)];
        assert_eq!(only(&[&open[..], &[cancel(4)]].concat()), "");
        assert!(only(&[&open[..], &[cancel(3)]].concat()).contains("nothing below 3"));
    }

    #[test]
    fn nothing_comes_between_fragments() {
        let fragment = Step::Received(WatchResponse {
            events: vec![event(2, "a")],
            fragment: true,
            ..response(0, 2)
        });
        let open = [create("a", 2, 0), created(0, 5), fragment];
        assert_eq!(only(&[&open[..], &[events(0, 2, &[event(2, "b")])]].concat()), "");
        assert!(
            violations(&[&open[..], &[progress(1)]].concat(), &truth(), Rules::ETCD)[0].contains("atomic")
        );
    }
}
