//! A watch client's stream that records what it sends and receives, and its watches, which continue over streams.

use std::collections::{BTreeMap, VecDeque};

use crate::grpc::{Client, Stream};
use crate::kv::WATCH;
use crate::pb::{WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse};
use crate::watch_rules::{NO_ID, Step, is_progress, revision};

/// A watch, continued over streams.
#[derive(Debug)]
pub struct Watch {
    /// `start_revision` is where the next stream continues.
    pub create: WatchCreateRequest,
    /// Revision of the last event.
    pub last: i64,
}

impl Watch {
    /// A watch that was not created.
    #[must_use]
    pub fn new(create: WatchCreateRequest) -> Self {
        Self { create, last: 0 }
    }

    /// Whether it has got one of the writes from the first revision to the last, or progress behind them.
    #[must_use]
    pub fn has(&self, [first, last]: [i64; 2]) -> bool {
        self.last >= first || self.create.start_revision > last
    }
}

/// An open stream.
pub struct WatchStream {
    /// Receives the responses, which are to be given to [`WatchStream::received`].
    pub stream: Stream,
    steps: Vec<Step>,
    /// Creates without a `created`.
    creating: VecDeque<Watch>,
    watches: BTreeMap<i64, Watch>,
    /// Watches that the server cancelled.
    cancelled: Vec<Watch>,
    /// Watches that it did not create, with its reasons.
    refused: Vec<(Watch, String)>,
    /// Explicit ids given so far.
    ids: i64,
}

impl WatchStream {
    /// A stream without watches.
    #[must_use]
    pub fn open(client: &Client) -> Self {
        Self {
            stream: client.open(WATCH),
            steps: Vec::new(),
            creating: VecDeque::new(),
            watches: BTreeMap::new(),
            cancelled: Vec::new(),
            refused: Vec::new(),
            ids: 0,
        }
    }

    /// Requests sent and responses received so far.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The watches that the server has not cancelled.
    pub fn watches(&self) -> impl Iterator<Item = &Watch> {
        self.watches.values().chain(&self.creating)
    }

    /// Whether a create was not answered.
    #[must_use]
    pub fn is_creating(&self) -> bool {
        !self.creating.is_empty()
    }

    /// Whether the server has cancelled a watch, or refused to create one.
    #[must_use]
    pub fn has_cancelled(&self) -> bool {
        !self.cancelled.is_empty() || !self.refused.is_empty()
    }

    /// Takes the watches that the server refused to create, with its reasons: [`WatchStream::close`] returns them no more.
    pub fn take_refused(&mut self) -> Vec<(Watch, String)> {
        std::mem::take(&mut self.refused)
    }

    /// Closes the stream. Returns its steps, and its watches with those that the server has cancelled or refused.
    #[must_use]
    pub fn close(self) -> (Vec<Step>, Vec<Watch>) {
        let mut watches = Vec::from(self.creating);
        watches.extend(self.watches.into_values());
        watches.extend(self.cancelled);
        watches.extend(self.refused.into_iter().map(|(watch, _)| watch));
        (self.steps, watches)
    }

    fn send(&mut self, request: WatchRequest) {
        self.stream.send(&request);
        self.steps.push(Step::Sent(request));
    }

    /// Creates a watch; those with an explicit id get one that no automatic id reaches.
    pub fn create(&mut self, mut watch: Watch) {
        if watch.create.watch_id != 0 {
            self.ids += 1;
            watch.create.watch_id = 1_000 + self.ids;
        }
        self.send(WatchRequest {
            create_request: Some(watch.create.clone()),
            ..WatchRequest::default()
        });
        self.creating.push_back(watch);
    }

    /// Asks for progress of the stream.
    pub fn ask_for_progress(&mut self) {
        self.send(WatchRequest {
            progress_request: Some(WatchProgressRequest {}),
            ..WatchRequest::default()
        });
    }

    /// Cancels one of several watches.
    pub fn cancel_one(&mut self) {
        if self.watches.len() > 1
            && let Some((watch_id, _)) = self.watches.pop_first()
        {
            self.send(WatchRequest {
                cancel_request: Some(WatchCancelRequest { watch_id }),
                ..WatchRequest::default()
            });
        }
    }

    /// Takes note of a response.
    ///
    /// # Panics
    /// A watch was created that the client has not asked for.
    pub fn received(&mut self, response: WatchResponse) {
        let id = response.watch_id;
        let header = response.header.as_ref().map_or(0, |header| header.revision);
        if response.created {
            let mut watch = self.creating.pop_front().expect("a create");
            if watch.create.start_revision == 0 {
                watch.create.start_revision = header + 1;
            }
            if response.canceled {
                self.refused.push((watch, response.cancel_reason.clone()));
            } else {
                self.watches.insert(id, watch);
            }
        } else if response.canceled {
            if let Some(mut watch) = self.watches.remove(&id) {
                // The client lists again.
                watch.create.start_revision = response.compact_revision;
                watch.last = 0;
                self.cancelled.push(watch);
            }
        } else if is_progress(&response) {
            let all = self.watches.iter_mut();
            for (_, watch) in all.filter(|(of, _)| id == NO_ID || **of == id) {
                watch.create.start_revision = watch.create.start_revision.max(header + 1);
            }
        } else if !response.fragment
            && let (Some(watch), Some(event)) = (self.watches.get_mut(&id), response.events.last())
        {
            watch.last = revision(event);
            watch.create.start_revision = watch.create.start_revision.max(watch.last + 1);
        }
        self.steps.push(Step::Received(response));
    }
}
