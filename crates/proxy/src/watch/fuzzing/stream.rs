//! A stream that etcd continues for memory: the client gets every event of each watcher once and in order, the ids that it
//! expects, and no progress ahead of events; the stream returns with what the client has.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use arbitrary::{Arbitrary, Unstructured};

use super::etcd::{Etcd, Response};
use crate::watch::relay::{Relay, RelayAction};
use crate::watch::request::{Carried, Create, Ids, NO_WATCHER, Options, WatchRequest};

#[derive(Arbitrary, Debug)]
struct Begin {
    /// Watchers that memory has created: the id that the client asked for, how far behind it is, whether it was cancelled.
    created: Vec<(u8, u8, bool)>,
    fragment: bool,
}

#[derive(Arbitrary, Debug)]
enum Op {
    Write(u8),
    Create { id: u8, start: Option<i8> },
    Cancel(u8),
    Progress,
    Events { watcher: u8, revisions: u8, back: u8 },
    Deliver { control_first: bool },
    Return,
    Stay,
}

/// Model of the client: the events that it has, and the responses that it expects.
#[derive(Debug, Default)]
struct Client {
    /// Revision up to which the client has every event, by watcher.
    through: BTreeMap<i64, i64>,
    /// Start of a create without a response.
    creates: VecDeque<Create>,
    /// Ids as one etcd gives them that has served the stream from its beginning.
    next_id: i64,
    asked_progress: u32,
    progress: i64,
    /// Watchers that began in the past, and the revision that etcd had then. A progress notification that etcd has sent
    /// before may come behind the `created`.
    began_before: BTreeMap<i64, i64>,
    /// Watchers whose cancel etcd has not answered: they get no further events.
    cancelling: BTreeSet<i64>,
}

impl Client {
    /// The id of the next watcher; `None` if it is refused.
    fn next_id(&mut self, requested: i64) -> Option<i64> {
        if requested != 0 {
            return (!self.through.contains_key(&requested)).then_some(requested);
        }
        while self.through.contains_key(&self.next_id) {
            self.next_id += 1;
        }
        self.next_id += 1;
        Some(self.next_id - 1)
    }
}

struct Run {
    client: Client,
    etcd: Etcd,
    relay: Relay,
    fragment: bool,
    /// The member has sent an event again.
    was_behind: bool,
}

pub(super) fn run(mut data: Unstructured<'_>) {
    let Ok(begin) = Begin::arbitrary(&mut data) else {
        return;
    };
    let mut run = Run::start(&begin);
    for _ in 0..200 {
        let Ok(op) = Op::arbitrary(&mut data) else {
            return;
        };
        if !run.step(&op) {
            return;
        }
    }
}

impl Run {
    fn start(begin: &Begin) -> Run {
        let (mut client, mut ids) = (Client::default(), Ids::default());
        let mut etcd = Etcd::new(20);
        let mut carried = Vec::new();
        for (requested, behind, is_cancelled) in begin.created.iter().take(8) {
            let requested = i64::from(requested % 6);
            let is_taken = |id| client.through.contains_key(&id);
            let given = ids.allocate(requested, is_taken);
            assert_eq!(given, client.next_id(requested));
            let Some(id) = given.filter(|_| !is_cancelled) else {
                continue;
            };
            let through = etcd.revision - i64::from(behind % 16);
            client.through.insert(id, through);
            let create = Create {
                key: "k".into(),
                watch_id: requested,
                options: Options {
                    fragment: begin.fragment,
                    ..Options::default()
                },
                ..Create::default()
            };
            carried.push(Carried {
                id,
                create,
                through,
                quiet_since: None,
            });
        }
        let shown = client.through.values().copied().max().unwrap_or(0);
        client.progress = shown;
        let relay = Relay::new(ids, carried, BTreeSet::new(), shown);
        for create in relay.creates() {
            etcd.create(&create, true);
        }
        Run {
            relay,
            client,
            etcd,
            fragment: begin.fragment,
            was_behind: false,
        }
    }

    /// Returns false at the end of the stream.
    fn step(&mut self, op: &Op) -> bool {
        match op {
            Op::Write(revisions) => self.etcd.revision += i64::from(revisions % 4),
            // A client waits for the response to a cancel before it uses the id again.
            Op::Create { id, start } if self.relay.accepts_request() && !self.etcd.owes_cancel() => {
                let create = Create {
                    key: "k".into(),
                    watch_id: i64::from(id % 6),
                    start_revision: start.map_or(0, |from| (self.etcd.revision + i64::from(from / 8)).max(1)),
                    options: Options {
                        fragment: self.fragment,
                        ..Options::default()
                    },
                    ..Create::default()
                };
                let id = self.relay.request(&WatchRequest::Create(create.clone()));
                let create_request = create.to_wire(id.unwrap_or_default(), create.start_revision);
                self.etcd.create(&create_request, false);
                self.client.creates.push_back(create);
            }
            Op::Cancel(id) if self.relay.accepts_request() => {
                let id = i64::from(id % 8);
                if self.client.through.contains_key(&id) && !self.etcd.owes_cancel() {
                    self.relay.request(&WatchRequest::Cancel(id));
                    self.etcd.cancel(id);
                    self.client.cancelling.insert(id);
                }
            }
            Op::Progress if self.relay.accepts_request() => {
                self.relay.request(&WatchRequest::Progress);
                self.client.asked_progress += 1;
                self.etcd.progress();
            }
            Op::Create { .. } | Op::Cancel(_) | Op::Progress => {}
            Op::Events {
                watcher,
                revisions,
                back,
            } => {
                let back = if *back > 240 { i64::from(*back - 240) } else { 0 };
                self.was_behind |= back > 0;
                self.etcd
                    .send_events(usize::from(*watcher), i64::from(revisions % 8) + 1, back);
            }
            Op::Deliver { control_first } => {
                for response in self.etcd.deliver(*control_first) {
                    if !self.receive(&response) {
                        return false;
                    }
                }
            }
            Op::Return => {
                if self.relay.may_return(|_| true) {
                    self.relay.await_barrier();
                    self.etcd.progress();
                }
            }
            Op::Stay => self.relay.stay(),
        }
        true
    }

    fn receive(&mut self, response: &Response) -> bool {
        let head = &response.head;
        match self.relay.response(head) {
            RelayAction::Pass if head.created => self.created(response),
            RelayAction::Pass if head.canceled => {
                self.client.through.remove(&head.watch_id);
                self.client.cancelling.remove(&head.watch_id);
            }
            RelayAction::Pass if head.watch_id == NO_WATCHER => self.progressed(head.revision),
            RelayAction::Pass => {
                let through = self.client.through.get_mut(&head.watch_id);
                let through =
                    through.unwrap_or_else(|| panic!("events of no watcher of the client: {head:?}"));
                assert_eq!(head.first_event, Some(*through + 1), "repeated or missed");
                *through = response.last;
            }
            RelayAction::Drop if head.created || head.first_event.is_none() => {}
            RelayAction::Drop => panic!("events are dropped unseen: {head:?}"),
            RelayAction::DropThrough(revision) => {
                assert!(self.was_behind, "{head:?} is dropped up to {revision}");
                let through = self.client.through.get(&head.watch_id);
                assert!(through.is_some_and(|through| *through >= revision));
                // Otherwise the stream ends, and the client resumes.
                return response.last <= revision;
            }
            RelayAction::Barrier { revision, is_owed } => {
                assert_eq!(revision, head.revision);
                if is_owed {
                    self.progressed(revision);
                }
                let carried = self.relay.carried(revision);
                let through: BTreeMap<i64, i64> = carried
                    .iter()
                    .map(|watcher| (watcher.id, watcher.through))
                    .collect();
                assert_eq!(
                    through, self.client.through,
                    "a watcher returns with what the client has"
                );
                return false;
            }
            RelayAction::Cancel { .. } => panic!("etcd has refused nothing"),
            RelayAction::End => {
                assert!(self.was_behind, "the stream of a healthy etcd ends at {head:?}");
                return false;
            }
        }
        true
    }

    fn created(&mut self, response: &Response) {
        let head = &response.head;
        let create = self.client.creates.pop_front();
        let create = create.unwrap_or_else(|| panic!("created, but not by the client: {head:?}"));
        let expected = self.client.next_id(create.watch_id);
        assert_eq!(expected, (!head.canceled).then_some(head.watch_id));
        if let Some(id) = expected {
            let before = match create.start_revision {
                0 => head.revision,
                start => start - 1,
            };
            self.client.through.insert(id, before);
            self.client.began_before.insert(id, head.revision);
        }
    }

    fn progressed(&mut self, revision: i64) {
        assert!(
            self.client.asked_progress > 0,
            "progress for which the client has not asked"
        );
        self.client.asked_progress -= 1;
        assert!(self.client.progress <= revision, "progress goes back");
        self.client.progress = revision;
        for (id, through) in &self.client.through {
            let catches_up = self.client.began_before.get(id).is_some_and(|at| through < at);
            if catches_up || self.client.cancelling.contains(id) {
                continue;
            }
            assert!(
                *through >= revision,
                "progress {revision} ahead of the events of watcher {id}"
            );
        }
    }
}
