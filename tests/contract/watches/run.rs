//! Runs programs on both sides of one etcd.

use std::fmt::Write as _;

use rand::rngs::StdRng;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Stream};
use testkit::pb::{
    RequestOp, WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use testkit::watch_rules::{Rules, Truth};

use super::compare::{Defect, Expected, Pair, Watcher, receive_arrived, receive_until};
use super::program::{STREAMS, Start, Step, Which, delete_everything, history, program};

/// Id and key of the watcher that marks a point in a stream.
const MARK_ID: i64 = 1 << 50;
const MARK_KEY: &[u8] = b"~mark";
/// Progress requests until rangecache, whose mirror may be behind etcd, has to respond as etcd does.
const PROGRESS_REQUESTS: usize = 40;

/// Source of the responses to watches that go through rangecache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Memory,
    /// Memory that leaves out all values before each write.
    MemoryWithoutValues,
    /// Memory of a rangecache whose etcd is another rangecache, which serves its feed from memory.
    MemoryOfSecond,
    /// Forwarded to another rangecache, whose memory serves them.
    MemoryOfFirst,
    /// Memory, as long as every watcher of a stream is under the mirrored prefix; then etcd, which continues it.
    Both,
    Etcd,
}

/// etcd with a rangecache in front of it, and every event of the store.
pub(super) struct World {
    etcd: Etcd,
    rangecache: Rangecache,
    direct: Client,
    through: Client,
    recorder: Stream,
    truth: Truth,
    revision: i64,
    compacted: i64,
    created: usize,
    source: Source,
}

impl World {
    pub(super) async fn start(version: Version, source: Source) -> Self {
        let etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        let everything = WatchCreateRequest {
            key: b"\0".to_vec(),
            range_end: b"\0".to_vec(),
            prev_kv: true,
            ..WatchCreateRequest::default()
        };
        let recorder = direct.watch(everything).await;
        let mut rangecache = match source {
            Source::MemoryOfSecond | Source::MemoryOfFirst => {
                Rangecache::before_another(Rangecache::before(&etcd).start().await)
            }
            Source::Memory | Source::MemoryWithoutValues | Source::Both | Source::Etcd => {
                Rangecache::before(&etcd)
            }
        };
        if matches!(source, Source::MemoryOfFirst | Source::Etcd) {
            rangecache = rangecache.with("--watch-cache", "off");
        }
        if source == Source::Both {
            rangecache = rangecache.with("--cache-prefix", "a");
        }
        let rangecache = rangecache.with_fault_injection().start().await;
        let mut world = Self {
            through: rangecache.client().await,
            direct,
            etcd,
            rangecache,
            recorder,
            truth: Truth::default(),
            revision: 1,
            compacted: 0,
            created: 0,
            source,
        };
        if source == Source::MemoryWithoutValues {
            world.leave_values_out().await;
        }
        world
    }

    /// Leaves values out until the mirror has a feed that brings what its events replace: at that change etcd serves streams for a
    /// moment.
    async fn leave_values_out(&mut self) {
        let is_changing = |log: &str| log.contains("values are left out from now on");
        while !is_changing(&self.rangecache.log()) {
            self.write(vec![RequestOp::put(MARK_KEY, "")]).await;
            until(SOON, "the mirror has the write", async || {
                let reached = self.rangecache.metrics().await.sum("rangecache_mirror_revision");
                (reached >= self.revision as f64).then_some(())
            })
            .await;
        }
    }

    /// Runs the program of a seed.
    pub(super) async fn run(&mut self, seed: u64) -> Result<(), Defect> {
        let (mut random, steps) = program(seed);
        self.begin(&mut random).await;
        let mut pairs: Vec<_> = (0..STREAMS)
            .map(|_| Pair::open([&self.direct, &self.through]))
            .collect();
        // Streams without requests stay closed.
        pairs.truncate(1 + steps.iter().filter_map(stream_of).max().unwrap_or(0));
        let mut done = 0;
        let mut outcome = Ok(());
        for step in &steps {
            outcome = self.step(&mut pairs, step).await;
            if outcome.is_err() {
                break;
            }
            done += 1;
        }
        if outcome.is_ok() {
            outcome = self.settle(&mut pairs).await;
        }
        let mut defects: Vec<String> = outcome.err().into_iter().collect();
        let through = match self.source {
            Source::Memory | Source::MemoryWithoutValues | Source::MemoryOfSecond | Source::MemoryOfFirst => {
                Rules::MEMORY
            }
            Source::Both | Source::Etcd => Rules::ETCD,
        };
        let rules = [Rules::ETCD, through];
        for (number, pair) in pairs.iter().enumerate() {
            let found = pair.violations(&self.truth, rules);
            defects.extend(found.into_iter().map(|what| format!("stream {number}: {what}")));
            self.created += pair.watchers.len();
        }
        if defects.is_empty() {
            return Ok(());
        }
        let mut text = format!("{}\n\nprogram, {done} steps done:\n", defects.join("\n"));
        for step in &steps {
            let shown: String = format!("{step:?}").chars().take(400).collect();
            let _ = writeln!(text, "  {shown}");
        }
        for (number, pair) in pairs.iter().enumerate() {
            let _ = write!(text, "stream {number}:\n{}", pair.transcripts());
        }
        Err(Defect(text))
    }

    /// An empty store with a history of its own, so that the program does the same wherever it runs.
    async fn begin(&mut self, random: &mut StdRng) {
        self.write(vec![RequestOp::put(MARK_KEY, "")]).await;
        self.write(delete_everything()).await;
        self.compact(self.revision).await;
        for transaction in history(random) {
            self.write(transaction).await;
        }
    }

    async fn write(&mut self, operations: Vec<RequestOp>) {
        if self.source == Source::MemoryWithoutValues {
            self.through.inject_fault("leave-out").await;
        }
        self.revision = self.direct.transact(operations).await.expect("etcd writes");
        while self.truth.revision() < self.revision {
            let response: Option<WatchResponse> = self.recorder.next_as(SOON).await;
            self.truth
                .extend(&response.expect("the recorder's watch is open"));
        }
    }

    /// Compacts through rangecache, which so knows it at once. A revision with two events of a key is passed over: a watcher from there
    /// may get both from etcd, or the last one alone, depending on how far the compaction is.
    async fn compact(&mut self, revision: i64) {
        let mut revisions = (self.compacted + 1..=revision).rev();
        let Some(revision) = revisions.find(|revision| !self.truth.has_superseded(*revision)) else {
            return;
        };
        self.through.compact(revision).await.expect("etcd compacts");
        self.compacted = revision;
    }

    /// The revision this share of the way from the compacted to the current one.
    fn at_share(&self, percent: i64) -> i64 {
        self.compacted + (self.revision - self.compacted) * percent / 100
    }

    async fn step(&mut self, pairs: &mut [Pair], step: &Step) -> Result<(), String> {
        if stream_of(step).is_some_and(|stream| pairs[stream].is_half_closed) {
            return Ok(());
        }
        match step {
            Step::Create {
                stream,
                start,
                create,
                is_pipelined,
            } => {
                self.send_create(&mut pairs[*stream], *start, create);
                if !is_pipelined {
                    self.controls(pairs).await?;
                }
                Ok(())
            }
            Step::Cancel { stream, which } => self.cancel(pairs, *stream, *which).await,
            Step::Progress { stream } => self.progress(pairs, *stream).await,
            Step::Nothing { stream } => {
                pairs[*stream].send(&WatchRequest::default());
                Ok(())
            }
            Step::HalfClose { stream } => {
                self.controls(pairs).await?;
                pairs[*stream].half_close();
                Ok(())
            }
            Step::Write(transactions) => {
                for transaction in transactions {
                    self.write(transaction.clone()).await;
                }
                receive_arrived(pairs).await
            }
            Step::Compact(percent) => {
                self.settle(pairs).await?;
                self.compact(self.at_share(*percent)).await;
                Ok(())
            }
            Step::Settle => self.settle(pairs).await,
        }
    }

    fn send_create(&self, pair: &mut Pair, start: Start, create: &WatchCreateRequest) {
        let start_revision = match start {
            Start::Now => 0,
            Start::Past(percent) => self.at_share(percent).max(1),
            Start::AtCompaction => self.compacted,
            Start::BeforeCompaction => self.compacted - 1,
            Start::Future(above) => self.revision + above,
            Start::Negative => -3,
            Start::Never => i64::MAX,
        };
        let create = WatchCreateRequest {
            start_revision,
            ..create.clone()
        };
        pair.know(self.revision);
        pair.send(&WatchRequest {
            create_request: Some(create.clone()),
            ..WatchRequest::default()
        });
        pair.expected.push(Expected::Created(Watcher {
            id: 0,
            after: if start_revision == 0 {
                self.revision
            } else {
                start_revision - 1
            },
            is_compacted: 0 < start_revision && start_revision < self.compacted,
            is_cancelled: false,
            create,
        }));
    }

    /// Waits for the responses to every create and cancel, and compares them.
    async fn controls(&self, pairs: &mut [Pair]) -> Result<(), String> {
        let is_done = |pairs: &[Pair]| pairs.iter().all(Pair::has_controls);
        receive_until(pairs, is_done)
            .await
            .map_err(|e| format!("responses to creates and cancels: {e}"))?;
        for pair in pairs {
            pair.compare_controls(self.revision)?;
        }
        Ok(())
    }

    async fn cancel(&self, pairs: &mut [Pair], stream: usize, which: Which) -> Result<(), String> {
        // A cancel that races with one for a compaction may be answered by either.
        self.settle(pairs).await?;
        let pair = &mut pairs[stream];
        let index = match which {
            Which::Known(number) if !pair.watchers.is_empty() => Some(number % pair.watchers.len()),
            _ => None,
        };
        let watch_id = match (index, which) {
            (Some(index), _) => pair.watchers[index].id,
            (None, Which::Unknown(id)) => id,
            (None, Which::Known(_)) => 12_345,
        };
        pair.send(&WatchRequest {
            cancel_request: Some(WatchCancelRequest { watch_id }),
            ..WatchRequest::default()
        });
        // The id may have been given to another watcher since.
        let is_open = |watcher: &Watcher| watcher.id == watch_id && !watcher.is_cancelled;
        if let Some(index) = pair.watchers.iter().position(is_open) {
            pair.expected.push(Expected::Canceled(index));
        }
        self.controls(pairs).await
    }

    /// Waits until both sides have every event, and etcd has no watcher that is catching up.
    async fn settle(&self, pairs: &mut [Pair]) -> Result<(), String> {
        self.controls(pairs).await?;
        let mut lacks = None;
        let is_done = |pairs: &[Pair]| {
            lacks = pairs.iter().find_map(|pair| pair.lacks(&self.truth));
            lacks.is_none()
        };
        let received = receive_until(pairs, is_done).await;
        received.map_err(|e| format!("events: {e}: {}", lacks.unwrap_or_default()))?;
        until(SOON, "etcd's watchers have caught up", async || {
            let metrics = self.etcd.metrics().await;
            (metrics.sum("etcd_debugging_mvcc_slow_watcher_total") == 0.0).then_some(())
        })
        .await;
        pairs.iter().try_for_each(Pair::compare_compactions)
    }

    /// Requests progress on both sides at rest, and compares the responses.
    async fn progress(&mut self, pairs: &mut [Pair], stream: usize) -> Result<(), String> {
        self.settle(pairs).await?;
        for _ in 0..PROGRESS_REQUESTS {
            let before = [0, 1].map(|side| pairs[stream].sides[side].progress.len());
            let at_rest = self.revision;
            pairs[stream].send(&WatchRequest {
                progress_request: Some(WatchProgressRequest {}),
                ..WatchRequest::default()
            });
            self.mark(pairs, stream).await?;
            let since = |side: usize| {
                pairs[stream].sides[side].progress[before[side]..]
                    .iter()
                    .max()
                    .copied()
            };
            match (since(0), since(1)) {
                (None, None) => return Ok(()),
                (Some(direct), Some(through)) if direct == at_rest && through == at_rest => return Ok(()),
                // The mirror of a part of the keys learns of other revisions now and then.
                (Some(_), Some(through)) if self.source == Source::Both && through <= at_rest => {
                    return Ok(());
                }
                (None, Some(through)) => {
                    return Err(format!("progress {through} where etcd is silent"));
                }
                // The mirror may be behind, and memory may be silent until it is not.
                (Some(_), _) => {}
            }
        }
        Err(format!(
            "stream {stream}: no progress up to revision {}, which etcd names",
            self.revision
        ))
    }

    /// Creates a watcher, waits for an event, and cancels it: whatever came before it in both streams has been received.
    async fn mark(&mut self, pairs: &mut [Pair], stream: usize) -> Result<(), String> {
        let create = WatchCreateRequest {
            key: MARK_KEY.to_vec(),
            watch_id: MARK_ID,
            ..WatchCreateRequest::default()
        };
        self.send_create(&mut pairs[stream], Start::Now, &create);
        self.controls(pairs).await?;
        self.write(vec![RequestOp::put(MARK_KEY, "")]).await;
        let mut lacks = None;
        let is_done = |pairs: &[Pair]| {
            lacks = pairs.iter().find_map(|pair| pair.lacks(&self.truth));
            lacks.is_none()
        };
        let received = receive_until(pairs, is_done).await;
        received.map_err(|e| format!("the mark: {e}: {}", lacks.unwrap_or_default()))?;
        let pair = &mut pairs[stream];
        pair.expected.push(Expected::Canceled(pair.watchers.len() - 1));
        pair.send(&WatchRequest {
            cancel_request: Some(WatchCancelRequest { watch_id: MARK_ID }),
            ..WatchRequest::default()
        });
        self.controls(pairs).await
    }

    /// Asserts what holds for all programs together.
    pub(super) async fn judge(&self) {
        let metrics = self.rangecache.metrics().await;
        let (memory, etcd) = (metrics.watches_created("memory"), metrics.watches_created("etcd"));
        println!(
            "{} watchers compared; with refused ones and marks {memory} from memory",
            self.created
        );
        assert!(self.created > 0, "the programs created watchers");
        let is_right = match self.source {
            Source::Memory | Source::MemoryWithoutValues | Source::MemoryOfSecond => {
                memory >= self.created as f64 && etcd == 0.0
            }
            // A replayed program may use one of them alone.
            Source::Both => self.created < 100 || (memory > 10.0 && etcd > 10.0),
            Source::MemoryOfFirst | Source::Etcd => memory == 0.0,
        };
        assert!(
            is_right,
            "{memory} creates answered by memory, and {etcd} by etcd"
        );
    }
}

/// The stream that a step is about.
fn stream_of(step: &Step) -> Option<usize> {
    match step {
        Step::Create { stream, .. }
        | Step::Cancel { stream, .. }
        | Step::Progress { stream }
        | Step::Nothing { stream }
        | Step::HalfClose { stream } => Some(*stream),
        Step::Write(_) | Step::Compact(_) | Step::Settle => None,
    }
}
