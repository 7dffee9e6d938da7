//! Random reads of clients, and their responses.

use std::time::Duration;

use testkit::grpc::{Client, Reply, Status};
use testkit::kv::{RANGE, RANGE_STREAM};
use testkit::pb::{ASCEND, BY_MOD, DESCEND, RangeRequest, RangeResponse, RangeStreamResponse};
use tokio::time::sleep;

use crate::caller::{Caller, HALVES, HUNG, KEYS, PREFIX, key};
use crate::known::Begin;
use crate::members::From;

/// A read.
#[derive(Clone, Debug)]
pub struct Read {
    pub request: RangeRequest,
    /// Largest age of the state that a linearizable read gets from rangecache (`rangecache-max-staleness`).
    pub max_staleness: Option<Duration>,
    /// Revision that its response has at least (`rangecache-min-revision`).
    pub min_revision: Option<i64>,
    /// Whether etcd has to answer it (`rangecache-bypass`).
    pub bypasses: bool,
}

/// The key that quorum checks read, which a client may write and read, too.
pub const CHECK_KEY: &str = "rangecache/quorum-check";
/// Metadata of the bounds.
pub const MAX_STALENESS: &str = "rangecache-max-staleness";
/// See [`MAX_STALENESS`].
pub const MIN_REVISION: &str = "rangecache-min-revision";

impl Read {
    /// A read without bounds on its age.
    pub fn new(request: RangeRequest) -> Self {
        Self {
            request,
            max_staleness: None,
            min_revision: None,
            bypasses: false,
        }
    }

    /// A random read of `caller`.
    pub fn random(caller: &Caller) -> Self {
        let chance = &caller.chance;
        let first = key(chance.below(KEYS));
        let mut request = match chance.below(6) {
            0 if chance.one_in(8) => RangeRequest::one(CHECK_KEY),
            0 => RangeRequest::one(first),
            1 => RangeRequest::range(first, [0]),
            2 | 3 => RangeRequest::prefix(HALVES[chance.below(2)]),
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
            let newest = caller.known.begin(caller.from).floor.revision;
            request.revision = (newest + chance.within(-40..4)).max(1);
        }
        let may_be_old = caller.from == From::Rangecache && !request.serializable;
        let (is_bounded, names_revision) = (chance.one_in(8), chance.one_in(10));
        let newest = caller.known.begin(caller.from).floor.revision;
        Self {
            request,
            max_staleness: (may_be_old && is_bounded).then(|| chance.millis(0..2_000)),
            min_revision: (may_be_old && names_revision).then(|| (newest + chance.within(-20..3)).max(1)),
            bypasses: caller.from == From::Rangecache && chance.one_in(20),
        }
    }

    /// Revision that its response has at least if memory or etcd answers it by its own bound.
    pub fn least(&self, begin: &Begin) -> i64 {
        self.min_revision
            .map_or(0, |least| least.min(begin.floor.revision))
    }

    /// Sends the read, judges its response, and returns it unless it is an error.
    pub async fn send(&self, caller: &Caller, client: &Client, label: &str) -> Option<RangeResponse> {
        let mut client = client.clone();
        if let Some(bound) = self.max_staleness {
            client = client.with_metadata(MAX_STALENESS, &format!("{}ms", bound.as_millis()));
        }
        if let Some(revision) = self.min_revision {
            client = client.with_metadata(MIN_REVISION, &revision.to_string());
        }
        if self.bypasses {
            client = client.with_metadata("rangecache-bypass", "true");
        }
        if caller.leaves_values_out && caller.from == From::Rangecache && caller.chance.one_in(12) {
            caller.trace.line(format!("{label}: leaves out all values"));
            client = client.with_metadata("rangecache-test-fault", "leave-out");
        }
        let begin = caller.begin();
        caller.trace.line(format!("{label}: {self:?}"));
        let reply = client.reply(RANGE, &self.request).await;
        let age = reply.as_ref().ok().and_then(age);
        let result = reply.and_then(|reply| reply.answer());
        self.end(caller, label, &begin, result.clone(), age);
        result.ok()
    }

    fn end(
        &self,
        caller: &Caller,
        label: &str,
        begin: &Begin,
        result: Result<RangeResponse, Status>,
        age: Option<Duration>,
    ) {
        let old = age.map(|age| format!(" of {age:?} ago")).unwrap_or_default();
        match result {
            Ok(response) => {
                caller.trace.line(format!("{label}{old}: {response:?}"));
                caller.known.judge_read(begin, self, &response, age);
            }
            Err(status) => {
                caller.trace.line(format!("{label}: {status:?}"));
                caller.note(&status);
                caller.known.judge_refused_read(begin, self, &status);
            }
        }
    }
}

/// Age of a response from the last view while no member answers.
fn age(reply: &Reply) -> Option<Duration> {
    let millis = reply
        .headers
        .get("rangecache-age-ms")?
        .to_str()
        .expect("a number");
    Some(Duration::from_millis(millis.parse().expect("a number")))
}

/// Reads all keys, or half of them, by a RangeStream, and judges its response.
pub async fn stream(caller: &Caller, client: &Client, label: &str) {
    let prefix = [PREFIX, HALVES[0], HALVES[1]][caller.chance.below(3)];
    let mut request = RangeRequest::prefix(prefix);
    request.serializable = caller.chance.one_in(6);
    let begin = caller.begin();
    caller.trace.line(format!("{label}: stream of {request:?}"));
    let mut stream = client.server_stream(RANGE_STREAM, &request);
    let mut whole = RangeResponse::default();
    // Later than every bound on the call.
    while let Some(chunk) = stream.next_as::<RangeStreamResponse>(HUNG * 2).await {
        let chunk = chunk.range_response.expect("a chunk holds a response");
        whole.kvs.extend(chunk.kvs);
        if chunk.header.is_some() {
            (whole.header, whole.count, whole.more) = (chunk.header, chunk.count, chunk.more);
        }
    }
    match stream.end() {
        Some(status) if status.code != 0 => {
            caller.trace.line(format!("{label}: {status:?}"));
            caller.note(status);
            caller
                .known
                .judge_refused_stream(&begin, &Read::new(request), status);
        }
        _ => Read::new(request).end(caller, label, &begin, Ok(whole), None),
    }
}

/// Reads all keys, or half of them, in pages at the revision of the first one, and judges each.
pub async fn pages(caller: &Caller, client: &Client, label: &str) {
    let prefix = [PREFIX, HALVES[0], HALVES[1]][caller.chance.below(3)];
    let mut read = Read::new(RangeRequest::prefix(prefix));
    read.request.limit = caller.chance.within(1..3);
    read.request.serializable = caller.chance.one_in(6);
    while let Some(response) = read.send(caller, client, label).await {
        let Some(last) = response.kvs.last().filter(|_| response.more) else {
            return;
        };
        read.request.key = [&last.key[..], b"\0"].concat();
        if read.request.revision == 0 {
            read.request.revision = response.revision();
        }
        // As a client that uses each page.
        sleep(caller.chance.millis(0..300)).await;
    }
}
