//! A client that sends random calls one after the other.

use std::sync::Arc;
use std::time::Duration;

use rangecache::simulated;
use testkit::grpc::{Client, Status};
use testkit::kv::{PUT, RANGE_STREAM, TXN};
use testkit::pb::{
    ASCEND, BY_MOD, CompactionRequest, CompactionResponse, Compare, DESCEND, DeleteRangeRequest,
    DeleteRangeResponse, PutRequest, PutResponse, RangeRequest, RangeResponse, RangeStreamResponse,
    RequestOp, TxnRequest, TxnResponse,
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::chance::Chance;
use crate::known::{Begin, Known, is_unavailable};
use crate::kv::{COMPACT, DELETE, MOD_REVISION};
use crate::members::From;
use crate::trace::Trace;

/// Prefix of all keys.
pub const PREFIX: &str = "/sim/";
/// Few, so that clients' calls conflict.
pub const KEYS: usize = 6;
/// After this time a client gives a call up.
const CALL_TIMEOUT: Duration = Duration::from_secs(4);

/// Name of a key.
pub fn key(number: usize) -> String {
    format!("{PREFIX}{number}")
}

/// Connects to `authority` on the simulated network.
pub async fn connect(authority: &str) -> Option<Client> {
    let stream = simulated::connect(authority).expect("a simulated network").ok()?;
    Client::over(stream, &format!("http://{authority}")).await.ok()
}

/// A client; see the module.
pub struct Caller {
    pub name: String,
    /// Servers: the next one after each failure.
    pub servers: Vec<String>,
    /// Whether it calls rangecache or members.
    pub from: From,
    pub known: Arc<Known>,
    pub trace: Trace,
    pub chance: Chance,
    /// Whether the members have RangeStream.
    pub streams: bool,
    /// Longest pause between two calls, in milliseconds.
    pub pause: u64,
}

impl Caller {
    /// Sends calls until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut at = 0;
        let mut calls = 0;
        while !stop.is_cancelled() {
            let server = &self.servers[at % self.servers.len()];
            let Some(client) = connect(server).await else {
                at += 1;
                sleep(Duration::from_millis(20)).await;
                continue;
            };
            while client.is_open() && !stop.is_cancelled() {
                calls += 1;
                if !self.call(&client, calls).await {
                    break;
                }
                sleep(self.chance.millis(0..self.pause)).await;
            }
            at += 1;
        }
    }

    /// Sends a call; returns whether it was answered in time.
    async fn call(&self, client: &Client, number: u64) -> bool {
        let label = format!("{} {number}", self.name);
        let call = async {
            match self.chance.below(100) {
                0..52 => self.read(client, &label).await,
                52..60 if self.streams => self.stream(client, &label).await,
                52..80 => self.put(client, &label).await,
                80..88 => self.delete(client, &label).await,
                88..98 => self.transact(client, &label).await,
                _ => self.compact(client, &label).await,
            }
        };
        let answered = timeout(CALL_TIMEOUT, call).await.is_ok();
        if !answered {
            self.trace.line(format!("{label} gives up"));
        }
        answered
    }

    fn request(&self) -> RangeRequest {
        let chance = &self.chance;
        let first = key(chance.below(KEYS));
        let mut request = match chance.below(4) {
            0 => RangeRequest::one(first),
            1 => RangeRequest::range(first, [0]),
            _ => RangeRequest::prefix(PREFIX),
        };
        match chance.below(12) {
            0 => request.limit = chance.within(1..KEYS as i64),
            1 => request.keys_only = true,
            2 => request.count_only = true,
            3 => (request.sort_order, request.sort_target) = (DESCEND, BY_MOD),
            4 => request.sort_order = ASCEND,
            _ => {}
        }
        request.serializable = chance.one_in(6);
        if chance.one_in(5) {
            let newest = self.known.begin(self.from).floor.revision;
            request.revision = (newest + chance.within(-40..4)).max(1);
        }
        request
    }

    async fn read(&self, client: &Client, label: &str) {
        let request = self.request();
        let begin = self.known.begin(self.from);
        self.trace.line(format!("{label}: {request:?}"));
        let result = client.range(&request).await;
        self.end_read(label, &begin, &request, result);
    }

    async fn stream(&self, client: &Client, label: &str) {
        let mut request = RangeRequest::prefix(PREFIX);
        request.serializable = self.chance.one_in(6);
        let begin = self.known.begin(self.from);
        self.trace.line(format!("{label}: stream of {request:?}"));
        let mut stream = client.server_stream(RANGE_STREAM, &request);
        let mut whole = RangeResponse::default();
        while let Some(chunk) = stream.next_as::<RangeStreamResponse>(CALL_TIMEOUT * 2).await {
            let chunk = chunk.range_response.expect("a chunk holds a response");
            whole.kvs.extend(chunk.kvs);
            if chunk.header.is_some() {
                (whole.header, whole.count, whole.more) = (chunk.header, chunk.count, chunk.more);
            }
        }
        match stream.end() {
            Some(status) if status.code != 0 => {
                self.trace.line(format!("{label}: {status:?}"));
                self.known.judge_refused_stream(&begin, &request, status);
            }
            _ => self.end_read(label, &begin, &request, Ok(whole)),
        }
    }

    fn end_read(
        &self,
        label: &str,
        begin: &Begin,
        request: &RangeRequest,
        result: Result<RangeResponse, Status>,
    ) {
        match result {
            Ok(response) => {
                self.trace.line(format!("{label}: {response:?}"));
                self.known.judge_read(begin, request, &response);
            }
            Err(status) => {
                self.trace.line(format!("{label}: {status:?}"));
                self.known.judge_refused_read(begin, request, &status);
            }
        }
    }

    async fn put(&self, client: &Client, label: &str) {
        let put = PutRequest {
            key: key(self.chance.below(KEYS)).into(),
            value: label.into(),
            lease: 0,
        };
        let begin = self.known.begin(self.from);
        self.trace
            .line(format!("{label}: put {}", put.key.escape_ascii()));
        let result = client.unary::<PutResponse>(PUT, &put).await;
        self.end_write(label, &begin, result.map(|response| response.revision()));
    }

    async fn delete(&self, client: &Client, label: &str) {
        let delete = DeleteRangeRequest {
            key: key(self.chance.below(KEYS)).into(),
            range_end: Vec::new(),
        };
        let begin = self.known.begin(self.from);
        self.trace
            .line(format!("{label}: delete {}", delete.key.escape_ascii()));
        let result = client.unary::<DeleteRangeResponse>(DELETE, &delete).await;
        self.end_write(label, &begin, result.map(|response| response.revision()));
    }

    async fn transact(&self, client: &Client, label: &str) {
        let mut txn = TxnRequest::default();
        for number in 0..KEYS {
            match self.chance.below(4) {
                0 => txn.success.push(RequestOp::put(key(number), label)),
                1 => txn.success.push(RequestOp::delete(key(number))),
                _ => {}
            }
        }
        if self.chance.one_in(4) {
            txn.compare.push(Compare {
                target: MOD_REVISION,
                key: key(self.chance.below(KEYS)).into(),
                mod_revision: 0,
                ..Compare::default()
            });
        }
        let begin = self.known.begin(self.from);
        self.trace
            .line(format!("{label}: transaction of {}", txn.success.len()));
        let result = client.unary::<TxnResponse>(TXN, &txn).await;
        self.end_write(label, &begin, result.map(|response| response.revision()));
    }

    fn end_write(&self, label: &str, begin: &Begin, result: Result<i64, Status>) {
        self.trace.line(format!("{label}: {result:?}"));
        match result {
            Ok(revision) if revision < begin.floor.revision && self.known.is_current(begin) => {
                let floor = begin.floor.revision;
                self.known
                    .violation(format!("{label}: written at {revision} below {floor}"));
            }
            Ok(revision) => self.known.show(begin, revision, 0),
            Err(status) if is_unavailable(&status) => {}
            Err(status) => self
                .known
                .violation(format!("{label}: {status:?} in response to a write")),
        }
    }

    async fn compact(&self, client: &Client, label: &str) {
        let begin = self.known.begin(self.from);
        let revision = begin.floor.revision - self.chance.within(0..30);
        let revision = revision.min(self.known.compactable());
        if revision < 2 {
            return;
        }
        self.trace.line(format!("{label}: compact {revision}"));
        let request = CompactionRequest {
            revision,
            physical: true,
        };
        let result = client.unary::<CompactionResponse>(COMPACT, &request).await;
        self.trace.line(format!("{label}: {:?}", result.as_ref().err()));
        if result.is_ok() {
            self.known.show(&begin, 0, revision);
        }
    }
}

/// Puts every key in one transaction and deletes every key in another, when nothing fails any more. Returns the revisions
/// of both.
pub async fn write_last(client: &Client) -> Result<[i64; 2], Status> {
    let mut revisions = [0; 2];
    for (revision, operation) in revisions.iter_mut().zip([
        (|key| RequestOp::put(key, "last")) as fn(String) -> RequestOp,
        |key| RequestOp::delete(key),
    ]) {
        *revision = client
            .transact((0..KEYS).map(key).map(operation).collect())
            .await?;
    }
    Ok(revisions)
}
