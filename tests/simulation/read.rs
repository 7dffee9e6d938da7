//! Random reads of clients, and their responses.

use std::time::Duration;

use testkit::grpc::{Client, Reply, Status};
use testkit::kv::{RANGE, RANGE_STREAM};
use testkit::pb::{ASCEND, BY_MOD, DESCEND, RangeRequest, RangeResponse, RangeStreamResponse};

use crate::caller::{CALL_TIMEOUT, Caller, HALVES, KEYS, PREFIX, key};
use crate::known::Begin;
use crate::members::From;

/// A read.
#[derive(Clone, Debug)]
pub struct Read {
    pub request: RangeRequest,
    /// How old the state may be that a linearizable read gets from rangecache (`rangecache-max-staleness`).
    pub max_staleness: Option<Duration>,
}

impl Read {
    /// A read without bounds on its age.
    pub fn new(request: RangeRequest) -> Self {
        Self {
            request,
            max_staleness: None,
        }
    }

    /// A random read of `caller`.
    pub fn random(caller: &Caller) -> Self {
        let chance = &caller.chance;
        let first = key(chance.below(KEYS));
        let mut request = match chance.below(6) {
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
        let may_be_old = caller.from == From::Rangecache && !request.serializable && chance.one_in(8);
        Self {
            request,
            max_staleness: may_be_old.then(|| chance.millis(0..2_000)),
        }
    }

    /// Sends the read, and judges its response.
    pub async fn send(&self, caller: &Caller, client: &Client, label: &str) {
        let bounded;
        let client = match self.max_staleness {
            Some(bound) => {
                let bound = format!("{}ms", bound.as_millis());
                bounded = client.with_metadata("rangecache-max-staleness", &bound);
                &bounded
            }
            None => client,
        };
        let begin = caller.known.begin(caller.from);
        caller.trace.line(format!("{label}: {self:?}"));
        let reply = client.reply(RANGE, &self.request).await;
        let age = reply.as_ref().ok().and_then(age);
        let result = reply.and_then(|reply| reply.answer());
        self.end(caller, label, &begin, result, age);
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
                caller.known.judge_refused_read(begin, &self.request, &status);
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
    let begin = caller.known.begin(caller.from);
    caller.trace.line(format!("{label}: stream of {request:?}"));
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
            caller.trace.line(format!("{label}: {status:?}"));
            caller.known.judge_refused_stream(&begin, &request, status);
        }
        _ => Read::new(request).end(caller, label, &begin, Ok(whole), None),
    }
}
