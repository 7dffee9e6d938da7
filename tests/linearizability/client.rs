//! A client that sends random calls one after the other, and records requests and responses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prost::Message;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use crate::history::{self, History};
use testkit::grpc::{Client, OUT_OF_RANGE, Status};
use testkit::kv::{PUT, RANGE, RANGE_STREAM, TXN};
use testkit::pb::{
    CompactionRequest, CompactionResponse, Compare, DeleteRangeRequest, DeleteRangeResponse, PutRequest,
    PutResponse, RangeRequest, RangeResponse, RangeStreamResponse, RequestOp, TxnRequest, TxnResponse,
};

/// Prefix of all keys in the store.
pub const PREFIX: &str = "/linear/";
/// Few, so that clients' operations conflict.
pub const KEYS: usize = 6;
/// Timeout of a call, sent as its deadline; the client itself gives up a little later.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Bound on the distance of reads of the past from the newest revision, in revisions.
const BACK: i64 = 300;
/// Distance of Compacts from the newest revision, in revisions: reads of the past meet them on both sides.
const COMPACT_BACK: std::ops::Range<i64> = 30..BACK;
/// Number of calls of which on average one is a Compact.
const COMPACT_EVERY: u32 = 250;
/// etcd's number of the comparison target.
const MOD_REVISION: i32 = 2;

/// Kind of write: a Compact.
const COMPACT: u32 = 100;

/// State shared by all clients.
pub struct Shared {
    pub history: Arc<History>,
    /// The newest revision in any response.
    pub newest: AtomicI64,
    /// Stops all clients.
    pub stop: AtomicBool,
    /// Suspends writes.
    pub writes_suspended: AtomicBool,
    /// Writes in flight.
    pub writing: AtomicUsize,
    /// Number of restores so far.
    pub segment: AtomicUsize,
    /// Calls that were sent, and failed or got no response.
    pub failures: Mutex<Vec<Failure>>,
}

/// A call that was sent, and failed or got no response.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The kind of server that was called.
    pub via: String,
    /// Path of the method.
    pub method: String,
    /// The status, or none without a response.
    pub status: Option<Status>,
}

/// A client; see the module.
pub struct Caller {
    shared: Arc<Shared>,
    number: u64,
    via: String,
    /// Servers: the first, and the next one after each failure.
    urls: Vec<String>,
    at: usize,
    connection: Option<Client>,
    random: StdRng,
    /// Number of writes so far: makes every value unique.
    writes: u64,
    /// Mod revisions of keys as last read, for comparisons.
    seen: BTreeMap<String, i64>,
}

impl Caller {
    /// Client `number`, which calls one of `urls`; `via` names the kind of server.
    pub fn new(shared: &Arc<Shared>, number: u64, via: &str, urls: Vec<String>, seed: u64) -> Self {
        Self {
            shared: shared.clone(),
            number,
            via: via.to_owned(),
            at: usize::try_from(number).unwrap() % urls.len(),
            urls,
            connection: None,
            random: StdRng::seed_from_u64(seed.wrapping_mul(1000).wrapping_add(number)),
            writes: 0,
            seen: BTreeMap::new(),
        }
    }

    /// Sends calls until the clients are stopped.
    pub async fn run(mut self) {
        while !self.shared.stop.load(Ordering::SeqCst) {
            self.turn().await;
            sleep(Duration::from_micros(self.random.random_range(0..16_000))).await;
        }
    }

    /// Puts every key in one transaction and deletes every key in another, when nothing fails any more. Returns the
    /// revisions of both.
    pub async fn write_last(mut self) -> [i64; 2] {
        let value = self.value();
        let mut revisions = Vec::new();
        for value in [Some(value), None] {
            let keys = (0..KEYS).map(name);
            let operation = |key: String| match &value {
                Some(value) => RequestOp::put(key, value),
                None => RequestOp::delete(key),
            };
            let change = |key: String| history::change(key.as_bytes(), value.as_ref().map(String::as_bytes));
            let changes: Vec<_> = keys.clone().map(change).collect();
            let call = self.begin("txn", "write", json!({"then": changes, "applied": true}));
            let request = TxnRequest {
                success: keys.map(operation).collect(),
                ..TxnRequest::default()
            };
            let answer: Option<Result<TxnResponse, Status>> = self.call(TXN, &request).await;
            let revision = answer.expect("a response").expect("etcd writes").revision();
            self.end(call, Some(json!({"rev": revision})));
            revisions.push(revision);
        }
        [revisions[0], revisions[1]]
    }

    async fn turn(&mut self) {
        if self.random.random_range(0..COMPACT_EVERY) == 0 {
            return self.write(COMPACT).await;
        }
        match self.random.random_range(0..100) {
            0..20 => self.get().await,
            20..36 => self.list().await,
            36..40 => self.stream().await,
            40..46 => self.count().await,
            46..52 => self.pages().await,
            52..60 => self.pinned().await,
            60..64 => self.serializable().await,
            kind => self.write(kind).await,
        }
    }

    async fn get(&mut self) {
        let request = RangeRequest::one(self.key());
        self.read("get", request).await;
    }

    async fn list(&mut self) {
        self.read("list", RangeRequest::prefix(PREFIX)).await;
    }

    async fn count(&mut self) {
        let request = RangeRequest {
            count_only: true,
            ..RangeRequest::prefix(PREFIX)
        };
        self.read("count", request).await;
    }

    /// Lists the whole prefix page by page at the first page's revision.
    async fn pages(&mut self) {
        let first = RangeRequest {
            limit: self.random.random_range(1..4),
            keys_only: self.random.random(),
            ..RangeRequest::prefix(PREFIX)
        };
        let mut page = self.read("page", first.clone()).await;
        let revision = page.as_ref().map_or(0, RangeResponse::revision);
        while let Some(last) = page.filter(|page| page.more).and_then(|mut page| page.kvs.pop()) {
            let next = RangeRequest {
                key: [&last.key[..], b"\0"].concat(),
                revision,
                ..first.clone()
            };
            page = self.read("page", next).await;
        }
    }

    async fn pinned(&mut self) {
        let newest = self.shared.newest.load(Ordering::SeqCst);
        let request = RangeRequest {
            revision: newest - self.random.random_range(0..BACK.min(newest)),
            serializable: self.random.random_range(0..3) == 0,
            ..RangeRequest::prefix(PREFIX)
        };
        if self.random.random_range(0..4) == 0 {
            self.read_by(RANGE_STREAM, "pinned-stream", request).await;
        } else {
            self.read("pinned", request).await;
        }
    }

    async fn stream(&mut self) {
        self.read_by(RANGE_STREAM, "stream", RangeRequest::prefix(PREFIX))
            .await;
    }

    async fn serializable(&mut self) {
        let request = RangeRequest {
            serializable: true,
            ..RangeRequest::prefix(PREFIX)
        };
        self.read("serializable", request).await;
    }

    async fn write(&mut self, kind: u32) {
        self.shared.writing.fetch_add(1, Ordering::SeqCst);
        if !self.shared.writes_suspended.load(Ordering::SeqCst) {
            match kind {
                COMPACT => self.compact().await,
                0..80 => self.put().await,
                80..87 => self.delete().await,
                87..95 => self.compare().await,
                _ => self.transact().await,
            }
        }
        self.shared.writing.fetch_sub(1, Ordering::SeqCst);
    }

    async fn put(&mut self) {
        let (key, value) = (self.key(), self.value());
        let request = PutRequest {
            key: key.clone().into(),
            value: value.clone().into(),
            lease: 0,
        };
        let write =
            json!({"then": [history::change(key.as_bytes(), Some(value.as_bytes()))], "applied": true});
        let call = self.begin("put", "write", write);
        let answer: Option<PutResponse> = self.call(PUT, &request).await.and_then(Result::ok);
        self.end(
            call,
            answer.map(|done| json!({"rev": self.record_revision(done.revision())})),
        );
    }

    async fn delete(&mut self) {
        let key = self.key();
        let request = DeleteRangeRequest {
            key: key.clone().into(),
            range_end: Vec::new(),
        };
        let then = json!([history::change(key.as_bytes(), None)]);
        let call = self.begin("delete", "write", json!({"then": &then}));
        let answer: Option<DeleteRangeResponse> = self
            .call("/etcdserverpb.KV/DeleteRange", &request)
            .await
            .and_then(Result::ok);
        self.end(
            call,
            answer.map(|done| {
                let revision = done.revision();
                json!({"rev": self.record_revision(revision), "write": {"then": then, "applied": done.deleted > 0}})
            }),
        );
    }

    /// Puts and deletes in one transaction if a key is unchanged since this client read it; otherwise reads the key.
    async fn compare(&mut self) {
        let key = self.key();
        let expected = self.seen.get(&key).copied().unwrap_or(0);
        let compare = Compare {
            result: 0,
            target: MOD_REVISION,
            key: key.clone().into(),
            mod_revision: expected,
        };
        self.txn("txn-compare", Some(compare), key).await;
    }

    async fn transact(&mut self) {
        let key = self.key();
        self.txn("txn", None, key).await;
    }

    async fn txn(&mut self, kind: &str, compare: Option<Compare>, key: String) {
        let (first, value) = (self.random.random_range(0..KEYS), self.value());
        let mut then = vec![(key.clone(), Some(value.clone()))];
        for n in 0..self.random.random_range(1..4) {
            let other = name((first + n) % KEYS);
            if other != key {
                let value = (self.random.random_range(0..3) > 0).then(|| value.clone());
                then.push((other, value));
            }
        }
        // Puts of keys that the same revision deletes again, which nested transactions may make.
        let is_nested = self.random.random_ratio(1, 4);
        if is_nested {
            let again = then.iter().filter(|(_, value)| value.is_some());
            let again: Vec<_> = again.map(|(key, _)| (key.clone(), None)).collect();
            then.extend(again.into_iter().filter(|_| self.random.random_bool(0.5)));
        }
        let operation = |(key, value): &(String, Option<String>)| {
            let operation = value
                .as_ref()
                .map_or_else(|| RequestOp::delete(key), |value| RequestOp::put(key, value));
            if is_nested { operation.nested() } else { operation }
        };
        let request = TxnRequest {
            compare: compare.clone().into_iter().collect(),
            success: then.iter().map(operation).collect(),
            failure: vec![RequestOp::read(&key)],
        };
        let changes: Vec<_> = then
            .iter()
            .map(|(key, value)| history::change(key.as_bytes(), value.as_ref().map(|v| v.as_bytes())))
            .collect();
        let compare = compare.map(|compare| json!({"key": key, "mod": compare.mod_revision}));
        let write = |applied: bool| {
            json!({
                "compare": compare, "then": changes, "else": history::read(&RangeRequest::one(&key)),
                "applied": applied,
            })
        };
        let call = self.begin(kind, "write", write(false));
        let answer: Option<TxnResponse> = self.call(TXN, &request).await.and_then(Result::ok);
        let result = answer.map(|done| {
            let revision = self.record_revision(done.revision());
            let read = done.responses.into_iter().next().and_then(|first| first.response_range);
            if let Some(read) = &read {
                self.record_mod_revisions(&RangeRequest::one(&key), read);
            }
            json!({"rev": revision, "write": write(done.succeeded), "answer": read.as_ref().map(history::answer)})
        });
        self.end(call, result);
    }

    /// Compacts revisions that the recorder has seen.
    async fn compact(&mut self) {
        let revision = self.shared.history.recorded() - self.random.random_range(COMPACT_BACK);
        if revision <= 0 {
            return;
        }
        let request = CompactionRequest {
            revision,
            ..CompactionRequest::default()
        };
        let call = self.begin("compact", "compact", json!(revision));
        let answer = self
            .call::<CompactionResponse>("/etcdserverpb.KV/Compact", &request)
            .await;
        let result = match answer {
            Some(Ok(done)) => {
                let header = done.header.expect("a header").revision;
                Some(json!({"rev": self.record_revision(header)}))
            }
            // It may be compacted by another client, or by this call's first attempt.
            _ => None,
        };
        self.end(call, result);
    }

    /// Sends and records one read; returns a successful response.
    async fn read(&mut self, kind: &str, request: RangeRequest) -> Option<RangeResponse> {
        self.read_by(RANGE, kind, request).await
    }

    /// Like [`Caller::read`], by a Range or a RangeStream.
    async fn read_by(&mut self, path: &str, kind: &str, request: RangeRequest) -> Option<RangeResponse> {
        let call = self.begin(kind, "read", history::read(&request));
        let answer = if path == RANGE_STREAM {
            // The store has fewer keys than a stream's first chunk.
            let chunk = self.call::<RangeStreamResponse>(path, &request).await;
            chunk.map(|chunk| chunk.map(|chunk| chunk.range_response.expect("a chunk holds an answer")))
        } else {
            self.call::<RangeResponse>(path, &request).await
        };
        match answer {
            Some(Ok(response)) => {
                self.record_mod_revisions(&request, &response);
                let result = json!({"rev": self.record_revision(response.revision()), "answer": history::answer(&response)});
                self.end(call, Some(result));
                Some(response)
            }
            Some(Err(status)) if status.code == OUT_OF_RANGE && request.revision > 0 => {
                let error = if status.message.contains("compacted") {
                    "compacted"
                } else {
                    "future"
                };
                self.end(call, Some(json!({"error": error})));
                None
            }
            _ => {
                self.end(call, None);
                None
            }
        }
    }

    /// Records the mod revisions for comparisons.
    fn record_mod_revisions(&mut self, request: &RangeRequest, response: &RangeResponse) {
        if request.revision > 0 || request.count_only {
            return;
        }
        if request.limit == 0 {
            let range = String::from_utf8_lossy(&request.key).into_owned();
            self.seen.retain(|key, _| !key.starts_with(&range));
        }
        for kv in &response.kvs {
            self.seen
                .insert(String::from_utf8_lossy(&kv.key).into_owned(), kv.mod_revision);
        }
    }

    fn record_revision(&self, revision: i64) -> i64 {
        self.shared.newest.fetch_max(revision, Ordering::SeqCst);
        revision
    }

    fn begin(&self, kind: &str, what: &str, asked: Value) -> Value {
        json!({
            "client": self.number, "via": self.via, "kind": kind, what: asked, "call": self.shared.history.now(),
            "return": -1,
        })
    }

    fn end(&self, mut call: Value, result: Option<Value>) {
        if let Some(Value::Object(result)) = result {
            call["return"] = self.shared.history.now().into();
            for (name, value) in result {
                call[name] = value;
            }
        }
        self.shared.history.operation(call);
    }

    /// Sends a call. `None` means no response: whether the call had an effect is unknown.
    async fn call<A: Message + Default>(
        &mut self,
        path: &str,
        request: &impl Message,
    ) -> Option<Result<A, Status>> {
        let client = self.connected().await?;
        let answer = timeout(CALL_TIMEOUT * 3 / 2, client.unary(path, request))
            .await
            .ok();
        let status = answer.as_ref().map(|answer| answer.as_ref().err());
        // Reads of the past and Compacts meet compacted revisions by intent.
        if status != Some(None) && status.flatten().is_none_or(|status| status.code != OUT_OF_RANGE) {
            self.shared.failures.lock().push(Failure {
                via: self.via.clone(),
                method: path.to_owned(),
                status: status.flatten().cloned(),
            });
        }
        if !matches!(&answer, Some(Ok(_))) && self.urls.len() > 1 || answer.is_none() {
            // Another member may respond; and a silent connection may be half open.
            self.connection = None;
            self.at += 1;
        }
        answer
    }

    async fn connected(&mut self) -> Option<Client> {
        if let Some(client) = self.connection.as_ref().filter(|client| client.is_open()) {
            return Some(client.clone());
        }
        let url = &self.urls[self.at % self.urls.len()];
        match timeout(Duration::from_secs(1), Client::try_connect(url)).await {
            Ok(Ok(client)) => {
                let deadline = format!("{}m", CALL_TIMEOUT.as_millis());
                self.connection = Some(client.with_metadata("grpc-timeout", &deadline));
            }
            _ => {
                self.connection = None;
                self.at += 1;
                // No server listens: do not retry in a tight loop.
                sleep(Duration::from_millis(20)).await;
            }
        }
        self.connection.clone()
    }

    fn key(&mut self) -> String {
        name(self.random.random_range(0..KEYS))
    }

    fn value(&mut self) -> String {
        self.writes += 1;
        format!("{}-{}", self.number, self.writes)
    }
}

/// Name of a key.
pub fn name(key: usize) -> String {
    format!("{PREFIX}{key}")
}
