//! What clients know, and the judge of reads: revisions are in every response, so that each response is compared with the
//! model's own state at its revision, and its revision with those in the responses that came before its request.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use testkit::grpc::Status;
use testkit::pb::{RangeRequest, RangeResponse};

use crate::cluster::Cluster;
use crate::kv::OUT_OF_RANGE;
use crate::members::From;
use crate::store::History;

/// What responses have shown of one history.
#[derive(Clone, Copy, Debug, Default)]
pub struct Floor {
    /// Highest revision in any response.
    pub revision: i64,
    /// Highest revision up to which a compaction was acknowledged or seen.
    pub compacted: i64,
    /// Highest revision in any response through rangecache.
    pub shown: i64,
}

/// State at the begin of a call.
#[derive(Clone, Copy, Debug)]
pub struct Begin {
    /// Number of the history.
    number: usize,
    pub floor: Floor,
    from: From,
    /// Reads that rangecache had sent to members.
    reads: usize,
}

impl Begin {
    /// Whether no history has been replaced.
    pub fn is_of_first_history(&self) -> bool {
        self.number == 1
    }
}

/// What clients know; see the module.
pub struct Known {
    cluster: Arc<Cluster>,
    /// By history.
    floors: Mutex<Vec<Floor>>,
    violations: Mutex<Vec<String>>,
}

impl Known {
    pub fn new(cluster: &Arc<Cluster>) -> Arc<Self> {
        Arc::new(Self {
            cluster: Arc::clone(cluster),
            floors: Mutex::default(),
            violations: Mutex::default(),
        })
    }

    /// Begins a call; `from` is [`From::Rangecache`] if it goes through that.
    pub fn begin(&self, from: From) -> Begin {
        let number = self.cluster.look(|state| state.histories.len());
        let mut floors = self.floors.lock();
        floors.resize(number, Floor::default());
        Begin {
            number,
            floor: floors[number - 1],
            from,
            reads: self.cluster.reads.load(Ordering::Relaxed),
        }
    }

    /// Number of the current history.
    pub fn history(&self) -> usize {
        self.cluster.look(|state| state.histories.len())
    }

    /// Whether the history has not changed since.
    pub fn is_current(&self, begin: &Begin) -> bool {
        self.history() == begin.number
    }

    /// Records what a response shows to a call, unless the history has changed meanwhile.
    pub fn show(&self, begin: &Begin, revision: i64, compacted: i64) {
        if self.is_current(begin) {
            let floor = &mut self.floors.lock()[begin.number - 1];
            floor.revision = floor.revision.max(revision);
            floor.compacted = floor.compacted.max(compacted);
            if begin.from == From::Rangecache {
                floor.shown = floor.shown.max(revision);
            }
        }
    }

    /// Records a violation.
    pub fn violation(&self, what: impl AsRef<str>) {
        self.cluster.trace.line(format!("VIOLATION {}", what.as_ref()));
        self.violations.lock().push(what.as_ref().to_owned());
    }

    /// The violations so far.
    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    /// Judges a response to a read. Near the end of a history it may be of either.
    pub fn judge_read(&self, begin: &Begin, request: &RangeRequest, response: &RangeResponse) {
        // Without a read at a member, the response is memory's, unless it is another call's.
        let is_from_memory =
            begin.from == From::Rangecache && self.cluster.reads.load(Ordering::Relaxed) == begin.reads;
        let judged = |history: &History, floor: Floor| {
            let least = match (request.serializable, is_from_memory) {
                (false, _) => floor.revision,
                (true, true) => floor.shown,
                (true, false) => 0,
            };
            judge(
                history,
                Floor {
                    revision: least,
                    ..floor
                },
                request,
                response,
            )
        };
        let number = begin.number;
        let verdict = self
            .cluster
            .look(|state| judged(&state.histories[number - 1], begin.floor));
        let Some(what) = verdict else {
            return self.show(begin, response.revision(), 0);
        };
        // A local read of one member, or of memory, may show the history before.
        let first = number - usize::from(request.serializable && number > 1);
        let is_of_another = self.cluster.look(|state| {
            let others = state.histories.iter().enumerate().skip(first - 1);
            let mut others = others.filter(|(at, _)| at + 1 != number);
            others.any(|(_, history)| judged(history, Floor::default()).is_none())
        });
        if !is_of_another {
            self.violation(format!("{what}: {request:?}\n    {response:?}\n    {begin:?}"));
        }
    }

    /// Highest revision that a client may compact.
    pub fn compactable(&self) -> i64 {
        self.cluster.look(|state| state.history().compactable)
    }

    /// Judges an error in response to a RangeStream, which etcd ends if the revision of its first chunk is compacted.
    pub fn judge_refused_stream(&self, begin: &Begin, request: &RangeRequest, status: &Status) {
        let is_compacted = status.code == OUT_OF_RANGE && status.message.ends_with("has been compacted");
        if !is_compacted {
            self.judge_refused_read(begin, request, status);
        }
    }

    /// Judges an error in response to a read.
    pub fn judge_refused_read(&self, begin: &Begin, request: &RangeRequest, status: &Status) {
        if status.code == OUT_OF_RANGE && request.revision > 0 {
            let is_future = status.message.ends_with("is a future revision");
            let compacted = self.cluster.look(|state| state.history().newest().compacted);
            let is_wrong = if is_future {
                !request.serializable && request.revision <= begin.floor.revision
            } else {
                !status.message.ends_with("has been compacted") || request.revision >= compacted
            };
            if is_wrong && self.is_current(begin) {
                self.violation(format!("{status:?} in response to {request:?}, {begin:?}"));
            }
            if !is_future && !request.serializable {
                self.show(begin, 0, request.revision + 1);
            }
        } else if !is_unavailable(status) {
            self.violation(format!("{status:?} in response to {request:?}"));
        }
    }
}

/// Whether a status is one that clients of etcd get while members fail.
pub fn is_unavailable(status: &Status) -> bool {
    const DEADLINE_EXCEEDED: i32 = 4;
    status.code == testkit::grpc::UNAVAILABLE || status.code == DEADLINE_EXCEEDED
}

/// What is wrong with a response to a read of this history, whose header may not be below `floor`.
fn judge(
    history: &History,
    floor: Floor,
    request: &RangeRequest,
    response: &RangeResponse,
) -> Option<&'static str> {
    let revision = response.revision();
    let newest = history.newest().revision;
    if revision > newest {
        return Some("a header ahead of the store");
    }
    if revision < floor.revision {
        return Some("stale");
    }
    if !request.serializable && request.revision > 0 && request.revision < floor.compacted {
        return Some("a compacted revision was read");
    }
    if request.revision > revision {
        return Some("a revision above the header was read");
    }
    let at = if request.revision > 0 {
        request.revision
    } else {
        revision
    };
    let expected = history.range(request, at);
    let found = (&response.kvs, response.count, response.more);
    (found != (&expected.kvs, expected.count, expected.more)).then_some("wrong contents")
}
