//! A small etcd within the process, as a test scripts it, and what loads and feeds use in front of it.

use std::sync::{Arc, atomic::AtomicU64};
use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use clap::Parser;
use etcd_store::cache::{Change, HistoryLimits, Store, Tree, TreeBuilder};
use etcd_store::{cache::testing::KeyValue, keyspace::scope::Scope};
use etcd_wire::etcdserverpb::{
    Event, RangeRequest, RangeResponse, RangeStreamResponse, ResponseHeader, WatchCreateRequest,
    WatchRequest, WatchResponse, watch_request::RequestUnion,
};
use parking_lot::Mutex;
use prost::Message as _;
use rangecache_base::{flags::Live, telemetry::Telemetry};
use rangecache_edge::tls::Connector;
use rangecache_upstream::fake::{self, Answer, FakeEtcd, Stream, StreamEnd};
use rangecache_upstream::{Connection, Credentials, ReceiveWindow, Upstream};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::feed::{Feed, FeedEnd, Feeding};
use super::load::{Have, Load, LoadError, Loaded, LoadedBy};
use super::set::{MirrorSet, MirrorSlot};
use super::view::{LoadedStore, Mirror};
use super::{MirrorConfig, lineage::ClusterState, mirrors::Mirrors};

/// Flags of mirrors: these, and the defaults of the others.
pub(super) fn live(flags: &[&str]) -> Live<MirrorConfig> {
    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        mirror: MirrorConfig,
    }
    let flags = std::iter::once(&"rangecache").chain(flags);
    Live::new(Flags::try_parse_from(flags).unwrap().mirror)
}

/// Fills a mirror without keys at `revision`, and puts it in service.
pub(super) fn serve(mirror: &Mirror, revision: i64) {
    let store = Store::new(Tree::default(), revision, HistoryLimits::default(), mirror.now());
    mirror.fill(mirror.epoch(), store).unwrap();
    mirror.put_in_service(mirror.epoch()).unwrap();
}

/// Bound on what must happen.
pub(super) const SOON: Duration = Duration::from_secs(60);

/// `--probe-interval`: short, because a mirror over budget waits for many of them.
const PROBE_INTERVAL: Duration = Duration::from_millis(1);

/// Action on the etcd when a stream breaks.
pub(super) type Then = fn(&mut Etcd);

/// Contents of the etcd, and what it was asked.
pub(super) struct Etcd {
    pub(super) cluster_id: u64,
    /// Cluster in the responses of watches; 0 for `cluster_id`.
    pub(super) watch_cluster_id: u64,
    pub(super) revision: i64,
    pub(super) compacted: i64,
    pub(super) version: &'static str,
    /// Difference between raft index and revision.
    pub(super) raft_ahead: i64,
    /// Every event, by revision; a delete has no value.
    pub(super) events: Vec<KeyValue>,
    /// Keys after which the next RangeStreams break, and what happens then.
    pub(super) breaks: VecDeque<(usize, Then)>,
    pub(super) has_range_stream: bool,
    /// Counts what is taken of a long message, with which every stream begins.
    pub(super) long_message: Option<Arc<AtomicU64>>,
    /// Reads of loads and comparisons.
    pub(super) reads: Vec<RangeRequest>,
    pub(super) watches: Vec<WatchCreateRequest>,
    pub(super) progress_requests: usize,
}

impl Etcd {
    /// Writes a key at the next revision.
    pub(super) fn put(&mut self, key: &str, value: &str) -> Change {
        self.revision += 1;
        self.events.push(KeyValue::new(key, self.revision, value));
        Change::put(self.events.last().unwrap().entry())
    }

    /// Deletes a key at the next revision.
    pub(super) fn delete(&mut self, key: &str) -> Change {
        self.revision += 1;
        self.events.push(KeyValue::deleted(key, self.revision));
        Change::delete(self.events.last().unwrap().entry())
    }

    /// Replaces the value that was written at `revision`.
    pub(super) fn rewrite(&mut self, revision: i64) {
        let mut events = self.events.iter_mut();
        let event = events.find(|event| event.mod_revision == revision).unwrap();
        event.value = b"of another history".to_vec();
    }

    fn header(&self) -> ResponseHeader {
        ResponseHeader {
            cluster_id: self.cluster_id,
            member_id: 1,
            revision: self.revision,
            raft_term: 2,
            ..ResponseHeader::default()
        }
    }

    fn range(&self, request: &RangeRequest) -> Result<RangeResponse, (u16, &'static str)> {
        let revision = if request.revision > 0 {
            request.revision
        } else {
            self.revision
        };
        if revision > self.revision {
            return Err((11, "etcdserver: mvcc: required revision is a future revision"));
        }
        if revision < self.compacted {
            return Err((11, "etcdserver: mvcc: required revision has been compacted"));
        }
        let is_last = |event: &&KeyValue| {
            let mut same = self.events.iter().filter(|other| other.key == event.key);
            same.rfind(|other| other.mod_revision <= revision) == Some(event)
        };
        let end = &request.range_end[..];
        let is_within = |event: &&KeyValue| {
            event.key >= request.key && (end == b"\0" || event.key == request.key || &event.key[..] < end)
        };
        let mut found: Vec<_> = self
            .events
            .iter()
            .filter(is_within)
            .filter(is_last)
            .filter(|event| event.version > 0)
            .collect();
        found.sort_by(|a, b| a.key.cmp(&b.key));
        let count = i64::try_from(found.len()).unwrap();
        found.retain(|event| event.mod_revision >= request.min_mod_revision);
        let limit = match request.limit {
            0 => usize::MAX,
            limit => usize::try_from(limit).unwrap(),
        };
        Ok(RangeResponse {
            header: Some(self.header()),
            more: found.len() > limit,
            kvs: found
                .iter()
                .take(limit)
                .map(|event| answered(event, request.keys_only))
                .collect(),
            count,
        })
    }

    fn answer(&mut self, path: &str, message: &[u8]) -> Answer {
        if path.ends_with("/Status") {
            let raft_index = u64::try_from(self.revision + self.raft_ahead).unwrap();
            return fake::status_of(self.version, raft_index);
        }
        if !path.ends_with("/Range") {
            return Err((12, "unknown method"));
        }
        let request = RangeRequest::decode(message).unwrap();
        let response = self.range(&request);
        // Not those that ask for the header.
        if !request.keys_only {
            self.reads.push(request);
        }
        response.map(|response| response.encode_to_vec())
    }
}

/// The KeyValue of an event in an answer. As etcd 3.7, without the lease where there is no value.
fn answered(event: &KeyValue, keys_only: bool) -> Bytes {
    let mut event = event.clone();
    if keys_only {
        event.value.clear();
        event.lease = 0;
    }
    event.encode_to_vec().into()
}

/// Runs a RangeStream: a chunk for each key, the header in the last one.
fn run_range_stream(etcd: &Mutex<Etcd>, stream: &Stream, request: &[u8]) -> StreamEnd {
    let mut etcd = etcd.lock();
    let request = RangeRequest::decode(request).unwrap();
    etcd.reads.push(request.clone());
    if !etcd.has_range_stream {
        return Err((12, "unknown method RangeStream"));
    }
    let mut whole = etcd.range(&request)?;
    let header = whole.header.take();
    let broken = etcd.breaks.pop_front();
    let keys = broken.map_or(whole.kvs.len(), |(keys, _)| keys);
    let send = |response| {
        stream.send(&RangeStreamResponse {
            range_response: Some(response),
        });
    };
    for key_value in whole.kvs.drain(..keys) {
        send(RangeResponse {
            kvs: vec![key_value],
            ..RangeResponse::default()
        });
    }
    if let Some((_, then)) = broken {
        then(&mut etcd);
        return Err((14, "connection lost"));
    }
    send(RangeResponse {
        header,
        ..RangeResponse::default()
    });
    Ok(())
}

/// Answers one request of a watch, which was `sent` the events up to a revision. Later ones are sent before the next
/// progress notification.
fn answer_watch(etcd: &Mutex<Etcd>, stream: &Stream, request: &[u8], sent: &mut i64) {
    let mut etcd = etcd.lock();
    let mut header = etcd.header();
    if etcd.watch_cluster_id > 0 {
        header.cluster_id = etcd.watch_cluster_id;
    }
    let response = WatchResponse {
        header: Some(header),
        ..WatchResponse::default()
    };
    match WatchRequest::decode(request).unwrap().request_union {
        Some(RequestUnion::CreateRequest(create)) => {
            stream.send(&WatchResponse {
                created: true,
                ..response.clone()
            });
            if create.start_revision < etcd.compacted {
                stream.send(&WatchResponse {
                    canceled: true,
                    compact_revision: etcd.compacted,
                    ..response
                });
            } else {
                *sent = create.start_revision - 1;
                etcd.watches.push(create);
                send_events(&etcd, stream, &response, sent);
                return;
            }
            etcd.watches.push(create);
        }
        _ => {
            etcd.progress_requests += 1;
            send_events(&etcd, stream, &response, sent);
            stream.send(&response);
        }
    }
}

/// Sends the events that were not sent yet, each in a response of its own, with what they replace if the last watch asks for it.
fn send_events(etcd: &Etcd, stream: &Stream, response: &WatchResponse, sent: &mut i64) {
    let brings = etcd.watches.last().is_some_and(|watch| watch.prev_kv);
    let replaced = |event: &KeyValue| {
        let is_before =
            |before: &&KeyValue| before.key == event.key && before.mod_revision < event.mod_revision;
        let last = etcd.events.iter().rfind(is_before);
        last.filter(|last| brings && last.version > 0)
            .map(|last| last.encode_to_vec().into())
    };
    for event in etcd.events.iter().filter(|event| event.mod_revision > *sent) {
        stream.send(&WatchResponse {
            events: vec![Event {
                r#type: i32::from(event.version == 0),
                kv: event.encode_to_vec().into(),
                prev_kv: replaced(event).unwrap_or_default(),
            }],
            ..response.clone()
        });
    }
    *sent = (*sent).max(etcd.revision);
}

/// Mirror of everything in front of the etcd. No task runs: a test loads and feeds the mirror.
pub(super) struct Bench {
    pub(super) etcd: Arc<Mutex<Etcd>>,
    pub(super) set: MirrorSet,
    upstream: Arc<Upstream>,
    telemetry: Arc<Telemetry>,
    tasks: TaskTracker,
    _server: FakeEtcd,
    stop: CancellationToken,
    _stop: DropGuard,
}

impl Bench {
    /// A bench whose etcd holds `a`, `b` and `c`, written at revisions 2 to 4, and is at revision 4.
    pub(super) async fn new() -> Bench {
        Bench::with_memory("64MiB").await
    }

    /// A bench with this `--cache-max-bytes`.
    pub(super) async fn with_memory(max_bytes: &str) -> Bench {
        let mut etcd = Etcd {
            cluster_id: 7,
            watch_cluster_id: 0,
            revision: 1,
            compacted: 0,
            version: "3.7.3",
            raft_ahead: 100,
            events: Vec::new(),
            breaks: VecDeque::new(),
            has_range_stream: true,
            long_message: None,
            reads: Vec::new(),
            watches: Vec::new(),
            progress_requests: 0,
        };
        for key in ["a", "b", "c"] {
            etcd.put(key, "loaded");
        }
        let etcd = Arc::new(Mutex::new(etcd));
        let (of_calls, of_streams) = (Arc::clone(&etcd), Arc::clone(&etcd));
        let server = FakeEtcd::start_with_streams(
            move |path, message| std::future::ready(of_calls.lock().answer(&path, &message)),
            move |mut stream| {
                let etcd = Arc::clone(&of_streams);
                async move {
                    let mut sent = 0;
                    let long_message = etcd.lock().long_message.clone();
                    if let Some(taken) = long_message {
                        stream.send_long(&taken).await;
                    }
                    while let Some(request) = stream.requests.recv().await {
                        if stream.path.ends_with("/RangeStream") {
                            return run_range_stream(&etcd, &stream, &request);
                        }
                        answer_watch(&etcd, &stream, &request, &mut sent);
                    }
                    Ok(())
                }
            },
        )
        .await;
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let urls = std::slice::from_ref(&server.url);
        let credentials = Credentials::new(None);
        let upstream = Upstream::start(urls, &Connector::plaintext(), true, credentials, &tasks, &stop);
        let telemetry = Arc::<Telemetry>::default();
        let cluster_state = Arc::<ClusterState>::default();
        let mirror = Mirror::new(Scope::prefix(b""), Arc::clone(&cluster_state), &telemetry);
        let slot = MirrorSlot::new(mirror, Arc::default(), false, stop.child_token());
        let live = live(&["--cache-max-bytes", max_bytes]);
        Bench {
            etcd,
            set: MirrorSet::new(vec![slot], cluster_state, live),
            upstream,
            telemetry,
            tasks,
            _server: server,
            stop: stop.clone(),
            _stop: stop.drop_guard(),
        }
    }

    /// Mirrors with these flags, in front of the same etcd. No task of theirs runs.
    pub(super) fn mirrors(&self, flags: &[&str]) -> Arc<Mirrors> {
        self.mirrors_of(&live(flags))
    }

    /// Makes mirrors as [`Bench::mirrors`] does, with flags that the caller can change.
    pub(super) fn mirrors_of(&self, live: &Live<MirrorConfig>) -> Arc<Mirrors> {
        Arc::new(Mirrors::new(
            live,
            PROBE_INTERVAL,
            &self.upstream,
            &self.telemetry,
            &self.tasks,
            &self.stop.child_token(),
        ))
    }

    pub(super) fn mirror(&self) -> &Mirror {
        &self.set.get(0).unwrap().mirror
    }

    pub(super) async fn load(&self) -> Result<Loaded, LoadError> {
        self.load_after(&mut None).await
    }

    /// Loads the mirror from what it has.
    pub(super) async fn load_after(&self, have: &mut Option<Have>) -> Result<Loaded, LoadError> {
        self.load_of(&self.set, have).await
    }

    /// Loads the first mirror of `set` from what it has.
    pub(super) async fn load_of(
        &self,
        set: &MirrorSet,
        have: &mut Option<Have>,
    ) -> Result<Loaded, LoadError> {
        let load = Load {
            set,
            upstream: &self.upstream,
            telemetry: &self.telemetry,
            builder: TreeBuilder::default(),
            mirror: &set.get(0).unwrap().mirror,
        };
        tokio::time::timeout(SOON, super::load::bring(&load, have))
            .await
            .unwrap()
    }

    /// Loads the mirror and fills it; returns the connection of the load.
    pub(super) async fn fill(&self) -> LoadedBy {
        let (loaded, mirror) = (self.load().await.unwrap(), self.mirror());
        let limits = HistoryLimits::default();
        let store = LoadedStore::of(loaded.anchor, limits, mirror.now());
        mirror.fill(mirror.epoch(), store).unwrap();
        loaded.connection
    }

    /// Applies an event as a feed does that ends after it.
    pub(super) fn apply(&self, change: Change) {
        let (mirror, revision) = (self.mirror(), change.revision());
        mirror.apply(mirror.epoch(), vec![change], revision).unwrap();
    }

    pub(super) async fn connect(&self) -> Arc<Connection> {
        let deadline = Instant::now() + SOON;
        let connecting = self.upstream.dedicated(ReceiveWindow::DEDICATED, None, deadline);
        connecting.await.unwrap()
    }

    /// Opens a feed of the mirror.
    pub(super) async fn open<'a>(
        &'a self,
        connection: &'a Arc<Connection>,
        loaded_by: &mut LoadedBy,
    ) -> Result<Feed<'a>, FeedEnd> {
        tokio::time::timeout(SOON, self.feeding(connection).open(loaded_by))
            .await
            .unwrap()
    }

    /// Member that feeds the mirror.
    pub(super) fn feeding<'a>(&'a self, connection: &'a Arc<Connection>) -> Feeding<'a> {
        Feeding {
            set: &self.set,
            upstream: &self.upstream,
            mirror: self.mirror(),
            epoch: self.mirror().epoch(),
            connection,
        }
    }
}
