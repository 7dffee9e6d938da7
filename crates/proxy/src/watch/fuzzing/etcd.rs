//! A model of one Watch stream of an etcd, in which every revision has an event for every watcher.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use etcd_wire::etcdserverpb::WatchCreateRequest;

use crate::watch::{request::NO_WATCHER, tap::Head};

/// A response, and the revision of its last event.
#[derive(Clone, Debug)]
pub(super) struct Response {
    pub(super) head: Head,
    pub(super) last: i64,
}

#[derive(Debug)]
struct Watcher {
    /// Revision of the next event.
    next: i64,
    /// Responses are cut into fragments.
    fragment: bool,
    /// The member may send events again that are older than those that the watcher lacks: those that it had not when the
    /// watcher was created. Only with the first ones.
    may_repeat: bool,
}

/// Model of etcd's watch stream: responses to creates and cancels overtake events and progress, but no event comes before
/// the `created` of its watcher, nor after the response to its cancel.
#[derive(Debug, Default)]
pub(super) struct Etcd {
    pub(super) revision: i64,
    next_id: i64,
    watchers: BTreeMap<i64, Watcher>,
    control: VecDeque<Response>,
    events: VecDeque<Response>,
    /// Watchers whose `created` has been sent.
    announced: BTreeSet<i64>,
    /// Events of the others.
    early: Vec<Response>,
}

impl Etcd {
    pub(super) fn new(revision: i64) -> Etcd {
        Etcd {
            revision,
            ..Etcd::default()
        }
    }

    fn head(&self, watch_id: i64) -> Head {
        Head {
            cluster_id: 1,
            revision: self.revision,
            watch_id,
            ..Head::default()
        }
    }

    /// Whether the response to a cancel has not been delivered.
    pub(super) fn owes_cancel(&self) -> bool {
        self.control
            .iter()
            .any(|response| response.head.canceled && !response.head.created)
    }

    /// `continues` if the watcher comes from memory.
    pub(super) fn create(&mut self, create: &WatchCreateRequest, continues: bool) {
        let mut head = Head {
            created: true,
            ..self.head(create.watch_id)
        };
        if create.watch_id == 0 {
            while self.watchers.contains_key(&self.next_id) {
                self.next_id += 1;
            }
            head.watch_id = self.next_id;
            self.next_id += 1;
        } else if self.watchers.contains_key(&create.watch_id) {
            head.watch_id = NO_WATCHER;
            head.canceled = true;
            "mvcc: duplicate watch ID provided on the WatchStream".clone_into(&mut head.cancel_reason);
        }
        if !head.canceled {
            let next = match create.start_revision {
                0 => self.revision + 1,
                start => start,
            };
            let fragment = create.fragment;
            let watcher = Watcher {
                next,
                fragment,
                may_repeat: continues,
            };
            self.watchers.insert(head.watch_id, watcher);
        }
        self.control.push_back(Response { head, last: 0 });
    }

    pub(super) fn cancel(&mut self, id: i64) {
        if self.watchers.remove(&id).is_some() {
            let head = Head {
                canceled: true,
                ..self.head(id)
            };
            self.control.push_back(Response { head, last: 0 });
        }
    }

    /// Sends up to `revisions` revisions to the watcher at `index`, from `back` revisions before those that it lacks: as a
    /// member does that was behind when the watcher was created.
    pub(super) fn send_events(&mut self, index: usize, revisions: i64, back: i64) {
        let (revision, count) = (self.revision, self.watchers.len());
        let Some((id, watcher)) = self.watchers.iter_mut().nth(index % count.max(1)) else {
            return;
        };
        let back = if watcher.may_repeat { back } else { 0 };
        let first = (watcher.next - back).max(1);
        let last = revision.min(watcher.next + revisions - 1);
        if last < watcher.next {
            return;
        }
        (watcher.next, watcher.may_repeat) = (last + 1, false);
        let (id, is_cut) = (*id, watcher.fragment && last > first);
        let middle = if is_cut { first } else { last };
        let mut send = |first, last, fragment| {
            let head = Head {
                first_event: Some(first),
                fragment,
                ..self.head(id)
            };
            self.events.push_back(Response { head, last });
        };
        send(first, middle, is_cut);
        if is_cut {
            send(middle + 1, last, false);
        }
    }

    /// A request of progress for the whole stream is answered if every watcher has every event.
    pub(super) fn progress(&mut self) {
        if self.watchers.values().all(|watcher| watcher.next > self.revision) {
            let head = self.head(NO_WATCHER);
            self.events.push_back(Response { head, last: 0 });
        }
    }

    /// The next responses on the wire.
    pub(super) fn deliver(&mut self, control_first: bool) -> Vec<Response> {
        // Fragments of one response follow each other on the wire.
        let control = if control_first {
            self.control.pop_front()
        } else {
            None
        };
        if let Some(response) = control {
            let id = response.head.watch_id;
            if response.head.canceled {
                self.announced.remove(&id);
                // Of a later watcher with this id there are none: its create follows this response.
                self.early.retain(|early| early.head.watch_id != id);
                self.events
                    .retain(|event| id == NO_WATCHER || event.head.watch_id != id);
                return vec![response];
            }
            self.announced.insert(id);
            let (mut sent, early) = (vec![response], std::mem::take(&mut self.early));
            for response in early {
                if response.head.watch_id == id {
                    sent.push(response);
                } else {
                    self.early.push(response);
                }
            }
            return sent;
        }
        let mut sent = Vec::new();
        while let Some(response) = self.events.pop_front() {
            let (id, is_cut) = (response.head.watch_id, response.head.fragment);
            if id == NO_WATCHER || self.announced.contains(&id) {
                sent.push(response);
            } else if self.watchers.contains_key(&id) {
                self.early.push(response);
            }
            if !is_cut {
                break;
            }
        }
        sent
    }
}
