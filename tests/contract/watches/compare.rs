//! Watch stream opened twice, to etcd and through rangecache, and the comparison of both sides.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, select_all};
use prost::Message;
use testkit::grpc::{Client, Status, Stream};
use testkit::kv::WATCH;
use testkit::pb::{WatchCreateRequest, WatchRequest, WatchResponse};
use testkit::wait::SOON;
use testkit::watch_rules::{NO_ID, Rules, Step, Truth, is_progress, violations};
use tokio::time::timeout;

/// Names of the sides, in their order.
const SIDES: [&str; 2] = ["etcd", "rangecache"];
/// Characters of one response in a printed transcript.
const SHOWN: usize = 600;

/// Description of a difference, with everything needed to understand it.
pub(super) struct Defect(pub(super) String);

/// Side of a stream: its transcript, and the same messages sorted for comparison.
pub(super) struct Side {
    stream: Stream,
    pub(super) transcript: Vec<Step>,
    /// Responses to creates and cancels, in order.
    pub(super) controls: Vec<WatchResponse>,
    /// Cancels for a compaction.
    pub(super) compactions: Vec<WatchResponse>,
    /// Events by watcher, since its `created`.
    events: BTreeMap<i64, usize>,
    /// Revisions of progress responses to the whole stream.
    pub(super) progress: Vec<i64>,
    end: Option<Status>,
}

impl Side {
    fn received(&mut self, message: Option<bytes::Bytes>) {
        let Some(message) = message else {
            self.end = self.stream.end().cloned();
            return;
        };
        let response = WatchResponse::decode(message).expect("decodes");
        self.transcript.push(Step::Received(response.clone()));
        if response.created || (response.canceled && response.compact_revision == 0) {
            if response.created {
                self.events.insert(response.watch_id, 0);
            }
            self.controls.push(response);
        } else if response.canceled {
            self.compactions.push(response);
        } else if is_progress(&response) {
            if response.watch_id == NO_ID {
                let header = response.header.as_ref();
                self.progress.push(header.map_or(0, |header| header.revision));
            }
        } else {
            *self.events.entry(response.watch_id).or_default() += response.events.len();
        }
    }
}

/// A watcher that both sides have created.
#[derive(Clone)]
pub(super) struct Watcher {
    pub(super) id: i64,
    pub(super) create: WatchCreateRequest,
    /// Revision above which the watcher gets the events.
    pub(super) after: i64,
    /// etcd has compacted what it asks for, and cancels it.
    pub(super) is_compacted: bool,
    pub(super) is_cancelled: bool,
}

/// A request whose response has not been compared.
#[derive(Clone)]
pub(super) enum Expected {
    Created(Watcher),
    /// Index of the watcher.
    Canceled(usize),
}

/// A stream on both sides.
pub(super) struct Pair {
    pub(super) sides: [Side; 2],
    pub(super) watchers: Vec<Watcher>,
    pub(super) expected: Vec<Expected>,
    /// Controls that were compared.
    pub(super) compared: usize,
    pub(super) is_half_closed: bool,
}

impl Pair {
    pub(super) fn open(clients: [&Client; 2]) -> Self {
        let side = |client: &Client| Side {
            stream: client.open(WATCH),
            transcript: Vec::new(),
            controls: Vec::new(),
            compactions: Vec::new(),
            events: BTreeMap::new(),
            progress: Vec::new(),
            end: None,
        };
        Self {
            sides: clients.map(side),
            watchers: Vec::new(),
            expected: Vec::new(),
            compared: 0,
            is_half_closed: false,
        }
    }

    /// Sends a request on both sides.
    pub(super) fn send(&mut self, request: &WatchRequest) {
        for side in &mut self.sides {
            side.stream.send(request);
            side.transcript.push(Step::Sent(request.clone()));
        }
    }

    /// Notes on both sides that the client knows this revision of the store.
    pub(super) fn know(&mut self, revision: i64) {
        for side in &mut self.sides {
            side.transcript.push(Step::Known(revision));
        }
    }

    pub(super) fn half_close(&mut self) {
        self.is_half_closed = true;
        for side in &mut self.sides {
            side.stream.close_send();
        }
    }

    /// Whether both sides have responded to every create and cancel.
    pub(super) fn has_controls(&self) -> bool {
        let wanted = self.compared + self.expected.len();
        self.sides.iter().all(|side| side.controls.len() >= wanted)
    }

    /// Watchers that get events.
    pub(super) fn live(&self) -> impl Iterator<Item = &Watcher> {
        self.watchers
            .iter()
            .filter(|watcher| !watcher.is_cancelled && !watcher.is_compacted)
    }

    /// Description of the events, or cancels for a compaction, that a side lacks; `None` if neither side lacks any.
    pub(super) fn lacks(&self, truth: &Truth) -> Option<String> {
        let compacted = self
            .watchers
            .iter()
            .filter(|watcher| watcher.is_compacted)
            .count();
        for (side, name) in self.sides.iter().zip(SIDES) {
            if side.compactions.len() < compacted {
                return Some(format!("{name} owes {compacted} cancels for a compaction"));
            }
            for watcher in self.live() {
                let wanted = truth.matching(&watcher.create, watcher.after).count();
                let has = side.events.get(&watcher.id).copied().unwrap_or_default();
                if has < wanted {
                    return Some(format!(
                        "{name}: watcher {} has {has} of {wanted} events",
                        watcher.id
                    ));
                }
            }
        }
        None
    }

    /// Compares the responses to creates and cancels, and adds the watchers that were created. `current` is the store's
    /// revision.
    pub(super) fn compare_controls(&mut self, current: i64) -> Result<(), String> {
        for expected in std::mem::take(&mut self.expected) {
            let [direct, through] = [0, 1].map(|side| self.sides[side].controls[self.compared].clone());
            self.compared += 1;
            equal_controls(&direct, &through, current)?;
            match expected {
                Expected::Created(watcher) => {
                    let shown = |response: &WatchResponse| {
                        response.header.as_ref().map_or(0, |header| header.revision)
                    };
                    let from_now = watcher.create.start_revision == 0 && !direct.canceled;
                    if !direct.created || (from_now && shown(&through) < watcher.after) {
                        return Err(format!(
                            "no created, or one from before: {direct:?} and {through:?}"
                        ));
                    }
                    if !direct.canceled {
                        self.watchers.push(Watcher {
                            id: direct.watch_id,
                            ..watcher
                        });
                    }
                }
                Expected::Canceled(index) => {
                    let watcher = &mut self.watchers[index];
                    if direct.created || direct.watch_id != watcher.id {
                        return Err(format!("not the cancel of {}: {direct:?}", watcher.id));
                    }
                    watcher.is_cancelled = true;
                }
            }
        }
        Ok(())
    }

    /// Compares the cancels for compactions, which may come in any order.
    pub(super) fn compare_compactions(&self) -> Result<(), String> {
        let [mut direct, mut through] = [0, 1].map(|side| self.sides[side].compactions.clone());
        direct.sort_by_key(|response| response.watch_id);
        through.sort_by_key(|response| response.watch_id);
        if direct.len() != through.len() {
            return Err(format!("cancels for a compaction: {direct:#?}\nand {through:#?}"));
        }
        for (direct, through) in direct.iter().zip(&through) {
            equal_controls(direct, through, 0)?;
        }
        Ok(())
    }

    /// Violations of the rules on both sides.
    pub(super) fn violations(&self, truth: &Truth, rules: [Rules; 2]) -> Vec<String> {
        let mut found = Vec::new();
        for ((side, name), rules) in self.sides.iter().zip(SIDES).zip(rules) {
            for what in violations(&side.transcript, truth, rules) {
                found.push(format!("{name}: {what}"));
            }
            if let Some(end) = &side.end {
                found.push(format!("{name} ended the stream: {end:?}"));
            }
        }
        found
    }

    /// Both transcripts as text.
    pub(super) fn transcripts(&self) -> String {
        let mut text = String::new();
        for (side, name) in self.sides.iter().zip(SIDES) {
            let _ = writeln!(text, "  {name}:");
            for (number, step) in side.transcript.iter().enumerate() {
                let shown: String = format!("{step:?}").chars().take(SHOWN).collect();
                let _ = writeln!(text, "    {number:3} {shown}");
            }
        }
        text
    }
}

/// Compares two responses to the same request: everything but the revision in the header, which may be any up to
/// `current`, is equal.
fn equal_controls(direct: &WatchResponse, through: &WatchResponse, current: i64) -> Result<(), String> {
    let mut alike = through.clone();
    if let (Some(theirs), Some(ours)) = (&direct.header, &mut alike.header) {
        let is_possible = match theirs.revision {
            0 => ours.revision == 0,
            _ => 0 < ours.revision && ours.revision <= current,
        };
        if is_possible {
            ours.revision = theirs.revision;
        }
    }
    if *direct == alike {
        return Ok(());
    }
    Err(format!(
        "responses differ:\n  etcd: {direct:?}\n  rangecache: {through:?}"
    ))
}

/// Receives on all streams until `is_done`.
pub(super) async fn receive_until(
    pairs: &mut [Pair],
    mut is_done: impl FnMut(&[Pair]) -> bool,
) -> Result<(), String> {
    let all = async {
        while !is_done(pairs) {
            receive(pairs).await?;
        }
        Ok(())
    };
    match timeout(SOON, all).await {
        Ok(done) => done,
        Err(_) => Err(format!("not within {SOON:?}")),
    }
}

/// Receives what has arrived, without waiting for more.
pub(super) async fn receive_arrived(pairs: &mut [Pair]) -> Result<(), String> {
    while let Ok(received) = timeout(Duration::ZERO, receive(pairs)).await {
        received?;
    }
    Ok(())
}

/// Receives one message on any stream.
async fn receive(pairs: &mut [Pair]) -> Result<(), String> {
    let sides = pairs.iter_mut().flat_map(|pair| &mut pair.sides);
    let mut sides: Vec<&mut Side> = sides.filter(|side| side.end.is_none()).collect();
    if sides.is_empty() {
        return Err("every stream has ended".to_owned());
    }
    let next: Vec<BoxFuture<'_, _>> = sides.iter_mut().map(|side| side.stream.next().boxed()).collect();
    let (message, index, rest) = select_all(next).await;
    drop(rest);
    let side = &mut sides[index];
    side.received(message);
    match &side.end {
        Some(end) => Err(format!("a stream ended: {end:?}")),
        None => Ok(()),
    }
}
