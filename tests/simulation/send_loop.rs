//! Responses of a member's watch stream. As in etcd, responses to creates and cancels wait in one queue, everything else
//! in another, and either may be first; what a watcher gets is held until its `created` was sent.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use prost::Message as _;
use testkit::pb::WatchResponse;
use testkit::watch_rules::NO_ID;

use crate::chance::Chance;
use crate::server::Messages;

/// Response, in fragments if it is long.
type Fragments = Vec<WatchResponse>;

/// The responses of a stream that wait to be sent.
pub struct SendLoop {
    messages: Messages,
    /// Responses to creates and cancels.
    control: VecDeque<WatchResponse>,
    /// Events, progress, and cancels by compactions.
    watch: VecDeque<Fragments>,
    /// Watchers whose `created` was sent.
    created: BTreeSet<i64>,
    /// Responses for watchers whose `created` was not.
    held: BTreeMap<i64, Vec<Fragments>>,
}

impl SendLoop {
    /// A loop without responses.
    pub fn new(messages: Messages) -> Self {
        Self {
            messages,
            control: VecDeque::new(),
            watch: VecDeque::new(),
            created: BTreeSet::new(),
            held: BTreeMap::new(),
        }
    }

    /// Queues the response to a create or a cancel.
    pub fn control(&mut self, response: WatchResponse) {
        self.control.push_back(response);
    }

    /// Queues any other response.
    pub fn watch(&mut self, response: Fragments) {
        self.watch.push_back(response);
    }

    /// Whether no response waits for its turn.
    pub fn is_empty(&self) -> bool {
        self.control.is_empty() && self.watch.is_empty()
    }

    /// Takes the next response of one of the queues.
    pub fn send_next(&mut self, chance: &Chance) {
        let is_control = !self.control.is_empty() && (self.watch.is_empty() || chance.one_in(2));
        if is_control {
            self.control
                .pop_front()
                .into_iter()
                .for_each(|next| self.send_control(next));
        } else if let Some(fragments) = self.watch.pop_front() {
            let id = fragments[0].watch_id;
            if id == NO_ID || self.created.contains(&id) {
                self.send(&fragments);
            } else {
                self.held.entry(id).or_default().push(fragments);
            }
        }
    }

    fn send_control(&mut self, response: WatchResponse) {
        let id = response.watch_id;
        let (is_created, is_canceled) = (response.created, response.canceled);
        self.send(&[response]);
        let held = self.held.remove(&id).unwrap_or_default();
        if is_canceled {
            self.created.remove(&id);
        } else if is_created {
            self.created.insert(id);
            held.iter().for_each(|fragments| self.send(fragments));
        }
    }

    fn send(&self, fragments: &[WatchResponse]) {
        for response in fragments {
            // An error is a stream that was closed by its client.
            let _ = self.messages.send(Ok(response.encode_to_vec()));
        }
    }
}
