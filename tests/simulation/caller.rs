//! A client that sends random calls one after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rangecache_base::simulated;
use testkit::grpc::{Client, Status};
use testkit::kv::{PUT, TXN};
use testkit::pb::{
    CompactionRequest, CompactionResponse, Compare, DeleteRangeRequest, DeleteRangeResponse, Empty,
    LeaseGrantRequest, LeaseGrantResponse, LeaseRevokeRequest, LeaseRevokeResponse, PutRequest, PutResponse,
    RequestOp, TxnRequest, TxnResponse,
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::auth::{DISABLE, ENABLE, Identity, Needs, PASSWORD, Refusal, User};
use crate::chance::Chance;
use crate::known::{Begin, Known, is_unavailable};
use crate::kv::{COMPACT, DELETE, LEASE_GRANT, LEASE_REVOKE, MOD_REVISION, NOT_FOUND};
use crate::members::From;
use crate::proxy;
use crate::read::{self, Read};
use crate::trace::Trace;

/// Prefix of all keys.
pub const PREFIX: &str = "/sim/";
/// Prefixes of one half of the keys each.
pub const HALVES: [&str; 2] = ["/sim/a/", "/sim/b/"];
/// Few, so that clients' calls conflict.
pub const KEYS: usize = 6;
/// Length of long values: two of them are more than a message of events may have without room of its own.
const LONG_VALUE_BYTES: usize = 1_500;
/// After this time a client gives a call up.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(4);
/// After this time rangecache has answered every call: longer than a fault, and than calls of clients wait for a silent member (40 s).
pub const HUNG: Duration = Duration::from_secs(60);
/// Leases that clients use.
const LEASES: usize = 3;

/// Name of a key: the first half of the numbers is one half of the keys.
pub fn key(number: usize) -> String {
    format!("{}{number}", HALVES[number * HALVES.len() / KEYS])
}

/// Connects to `authority` on the simulated network.
pub async fn connect(authority: &str) -> Option<Client> {
    let url = format!("http://{authority}");
    if authority == proxy::AUTHORITY {
        return Client::over(proxy::connect(authority).ok()?, &url).await.ok();
    }
    let stream = simulated::connect(authority).expect("a simulated network").ok()?;
    Client::over(stream, &url).await.ok()
}

/// Returns the client with a token of `user` and the token's identity, unless auth is off or no token can be had.
pub async fn authenticated(client: Client, user: Option<User>) -> (Client, Option<Identity>) {
    let Some(user) = user else {
        return (client, None);
    };
    let token = timeout(CALL_TIMEOUT, client.new_token(user.name(), PASSWORD)).await;
    let Ok(Ok(token)) = token else {
        return (client, None);
    };
    (client.with_metadata("token", &token), Identity::of(&token))
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
    pub has_long_values: bool,
    /// Whether some of its reads make rangecache leave out all values, as if memory were scarce.
    pub leaves_values_out: bool,
    /// Number of the first key that it writes; it writes all behind it, too.
    pub first_written: usize,
    /// User whose token its calls have.
    pub user: Option<User>,
    /// Identity whose token its calls have.
    pub identity: Mutex<Option<Identity>>,
    /// Whether it needs a new token.
    pub wants_token: AtomicBool,
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
            let (connection, mut client) = (client.clone(), client);
            self.wants_token.store(true, Ordering::Relaxed);
            while connection.is_open() && !stop.is_cancelled() {
                if self.wants_token.swap(false, Ordering::Relaxed) {
                    let identity;
                    (client, identity) = authenticated(connection.clone(), self.user).await;
                    *self.identity.lock() = identity;
                }
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
                0..44 => {
                    Read::random(self).send(self, client, &label).await;
                }
                44..52 => read::pages(self, client, &label).await,
                52..60 if self.streams => read::stream(self, client, &label).await,
                60 | 61 if self.user == Some(User::All) && self.chance.one_in(4) => {
                    self.switch_auth(client, &label).await;
                }
                60..64 => self.lease(client, &label).await,
                52..80 => self.put(client, &label, 0).await,
                80..88 => self.delete(client, &label).await,
                88..98 => self.transact(client, &label).await,
                _ => self.compact(client, &label).await,
            }
        };
        // Some calls have no deadline that would hide a hang.
        let waits = self.from == From::Rangecache && self.chance.one_in(8);
        let bound = if waits { HUNG } else { CALL_TIMEOUT };
        let answered = timeout(bound, call).await.is_ok();
        if !answered {
            self.trace.line(format!("{label} gives up"));
        }
        if !answered && waits {
            self.known
                .violation(format!("{label}: no response within {HUNG:?}"));
        }
        answered
    }

    /// Begins a call of its own.
    pub fn begin(&self) -> Begin {
        self.known.begin_as(self.from, *self.identity.lock())
    }

    /// Takes note of a status with which a call ended.
    pub fn note(&self, status: &Status) {
        if Refusal::of(status).is_some_and(Refusal::needs_token) {
            self.wants_token.store(true, Ordering::Relaxed);
        }
    }

    /// Switches auth off if it was on when the token was issued, and on otherwise.
    async fn switch_auth(&self, client: &Client, label: &str) {
        let begin = self.begin();
        let is_on = begin.identity.is_some();
        self.trace.line(format!("{label}: switches auth, on: {is_on}"));
        let path = if is_on { DISABLE } else { ENABLE };
        let result = client.unary::<Empty>(path, &Empty {}).await;
        self.trace.line(format!("{label}: {:?}", result.as_ref().err()));
        match result {
            Ok(_) => {
                self.wants_token.store(true, Ordering::Relaxed);
                if !is_on {
                    self.known.auth_enabled(&begin);
                }
            }
            Err(status) => self.note(&status),
        }
    }

    /// A key that it writes.
    fn key(&self) -> String {
        key(self.first_written + self.chance.below(KEYS - self.first_written))
    }

    fn value(&self, label: &str) -> String {
        if self.has_long_values && self.chance.one_in(2) {
            format!("{label} {}", "x".repeat(LONG_VALUE_BYTES))
        } else {
            label.to_owned()
        }
    }

    async fn put(&self, client: &Client, label: &str, lease: i64) {
        let put = PutRequest {
            key: self.key().into(),
            value: self.value(label).into(),
            lease,
        };
        let begin = self.begin();
        self.trace
            .line(format!("{label}: put {}, lease {lease}", put.key.escape_ascii()));
        let result = client.unary::<PutResponse>(PUT, &put).await;
        self.end_write(
            label,
            &begin,
            &[Needs::Write],
            result.map(|response| response.revision()),
        );
    }

    /// Grants a lease, revokes it, or puts a key under it.
    async fn lease(&self, client: &Client, label: &str) {
        let id = i64::try_from(1 + self.chance.below(LEASES)).expect("is small");
        match self.chance.below(5) {
            0 | 1 => {
                self.trace.line(format!("{label}: grant {id}"));
                let ttl = self.chance.within(2..9);
                let request = LeaseGrantRequest { id, ttl };
                let result = client.unary::<LeaseGrantResponse>(LEASE_GRANT, &request).await;
                self.trace.line(format!("{label}: {:?}", result.err()));
            }
            2 => {
                let begin = self.begin();
                self.trace.line(format!("{label}: revoke {id}"));
                let request = LeaseRevokeRequest { id };
                let result = client.unary::<LeaseRevokeResponse>(LEASE_REVOKE, &request).await;
                let revision =
                    |response: LeaseRevokeResponse| response.header.map_or(0, |header| header.revision);
                self.end_write(label, &begin, &[Needs::Write], result.map(revision));
            }
            _ => self.put(client, label, id).await,
        }
    }

    async fn delete(&self, client: &Client, label: &str) {
        let delete = DeleteRangeRequest {
            key: self.key().into(),
            range_end: Vec::new(),
        };
        let begin = self.begin();
        self.trace
            .line(format!("{label}: delete {}", delete.key.escape_ascii()));
        let result = client.unary::<DeleteRangeResponse>(DELETE, &delete).await;
        self.end_write(
            label,
            &begin,
            &[Needs::Write],
            result.map(|response| response.revision()),
        );
    }

    async fn transact(&self, client: &Client, label: &str) {
        let mut txn = TxnRequest::default();
        for number in self.first_written..KEYS {
            match self.chance.below(4) {
                0 => txn.success.push(RequestOp::put(key(number), self.value(label))),
                1 => txn.success.push(RequestOp::delete(key(number))),
                _ => {}
            }
        }
        if txn.success.is_empty() {
            // etcd answers an empty one as a serializable read.
            txn.success.push(RequestOp::delete(self.key()));
        }
        if self.chance.one_in(4) {
            // Several changes of one key, which only transactions side by side may have.
            let again = 1 + self.chance.below(3);
            for _ in 0..again {
                let at = self.chance.below(txn.success.len() + 1);
                let operation = if self.chance.one_in(2) {
                    RequestOp::delete(self.key())
                } else {
                    RequestOp::put(self.key(), self.value(label))
                };
                txn.success.insert(at, operation);
            }
            txn.success = txn.success.into_iter().map(RequestOp::nested).collect();
        }
        if self.chance.one_in(4) {
            txn.compare.push(Compare {
                target: MOD_REVISION,
                key: key(self.chance.below(KEYS)).into(),
                mod_revision: 0,
                ..Compare::default()
            });
        }
        let compared = txn.compare.iter();
        let mut needs: Vec<_> = compared
            .map(|compare| Needs::Read(compare.key.clone(), Vec::new()))
            .collect();
        needs.push(Needs::Write);
        let begin = self.begin();
        self.trace
            .line(format!("{label}: transaction of {}", txn.success.len()));
        let result = client.unary::<TxnResponse>(TXN, &txn).await;
        self.end_write(label, &begin, &needs, result.map(|response| response.revision()));
    }

    fn end_write(&self, label: &str, begin: &Begin, needs: &[Needs], result: Result<i64, Status>) {
        self.trace.line(format!("{label}: {result:?}"));
        if let Err(status) = &result {
            self.note(status);
        }
        match result {
            Ok(revision) if revision < begin.floor.revision && self.known.is_current(begin) => {
                let floor = begin.floor.revision;
                self.known
                    .violation(format!("{label}: written at {revision} below {floor}"));
            }
            Ok(revision) => self.known.written(begin, revision),
            Err(status) if let Some(refusal) = Refusal::of(&status) => {
                self.known.judge_refusal(begin, needs, true, refusal);
            }
            // Only what concerns leases ends with it.
            Err(status) if is_unavailable(&status) || status.code == NOT_FOUND => {}
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
