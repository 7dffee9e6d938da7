//! Keys that change together, written with a record of acknowledged states, and checks of what readers see of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::grpc::Client;
use crate::pb::{KeyValue, RangeResponse, RequestOp};

/// A group of keys that every write puts or deletes in one transaction: in the n-th state each of them holds n, or
/// none exists.
pub struct Register {
    prefix: String,
    keys: usize,
    issued: AtomicU64,
    acknowledged: Mutex<Acknowledged>,
    /// The newest state returned to any reader.
    shown: AtomicU64,
}

/// The newest state acknowledged by etcd, and its revision.
#[derive(Clone, Copy, Debug, Default)]
pub struct Acknowledged {
    state: u64,
    revision: i64,
}

impl Acknowledged {
    /// Revision that a later linearizable response must have reached.
    pub fn revision(self) -> i64 {
        self.revision
    }
}

impl Register {
    /// `keys` keys that start with `prefix`.
    pub fn new(prefix: String, keys: usize) -> Self {
        Self {
            prefix,
            keys,
            issued: AtomicU64::new(0),
            acknowledged: Mutex::default(),
            shown: AtomicU64::new(0),
        }
    }

    /// Prefix of the keys; no other key has it.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The number of keys.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// Key with this number.
    pub fn key(&self, number: usize) -> String {
        format!("{}{number:03}", self.prefix)
    }

    /// In every seventh state the keys do not exist.
    fn is_deleted(state: u64) -> bool {
        state.is_multiple_of(7)
    }

    /// Writes one state after another, each after the acknowledgement of the one before, until `stop`.
    pub async fn write(
        &self,
        etcd: &Client,
        pause: Option<Duration>,
        stop: &AtomicBool,
    ) -> Result<(), String> {
        for state in 1.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
            self.issued.store(state, Ordering::SeqCst);
            let key = self.key(0);
            let value = format!("{state} {}", "x".repeat(usize::try_from(state % 300).unwrap()));
            let done = match (self.keys, Self::is_deleted(state)) {
                (1, true) => etcd.delete(key).await,
                (1, false) => etcd.put(key, value).await,
                (keys, true) => {
                    etcd.transact((0..keys).map(|n| RequestOp::delete(self.key(n))).collect())
                        .await
                }
                (keys, false) => {
                    etcd.transact((0..keys).map(|n| RequestOp::put(self.key(n), &value)).collect())
                        .await
                }
            };
            let revision = done.map_err(|status| format!("etcd refused a write: {status:?}"))?;
            *self.acknowledged.lock() = Acknowledged { state, revision };
        }
        Ok(())
    }

    /// The oldest state that a linearizable read which starts now may return.
    pub fn acknowledged(&self) -> Acknowledged {
        *self.acknowledged.lock()
    }

    /// The oldest state that a serializable read which starts now may return: the newest that this rangecache has
    /// served.
    pub fn shown(&self) -> Acknowledged {
        Acknowledged {
            state: self.shown.load(Ordering::SeqCst),
            revision: 0,
        }
    }

    /// Checks the response to a read of `among` keys of the register, given the state acknowledged before the read.
    pub fn check(
        &self,
        kvs: &[KeyValue],
        among: usize,
        oldest: Acknowledged,
        keys_only: bool,
    ) -> Result<(), String> {
        let shown = || {
            format!(
                "{kvs:?}\n oldest {oldest:?}, issued {}",
                self.issued.load(Ordering::SeqCst)
            )
        };
        self.check_count(kvs.len(), among, oldest)
            .map_err(|wrong| format!("{wrong}: {}", shown()))?;
        let Some(first) = kvs.first() else { return Ok(()) };
        if kvs
            .iter()
            .any(|kv| (kv.mod_revision, &kv.value) != (first.mod_revision, &first.value))
        {
            return Err(format!("half a transaction: {}", shown()));
        }
        if first.mod_revision < oldest.revision {
            return Err(format!("stale by its mod_revision: {}", shown()));
        }
        if keys_only {
            return if first.value.is_empty() {
                Ok(())
            } else {
                Err(format!("values in keys_only: {}", shown()))
            };
        }
        let text = String::from_utf8_lossy(&first.value);
        let state: u64 = text
            .split(' ')
            .next()
            .and_then(|n| n.parse().ok())
            .ok_or("not a state")?;
        if state < oldest.state || state > self.issued.load(Ordering::SeqCst) {
            return Err(format!("stale by its value: {}", shown()));
        }
        self.shown.fetch_max(state, Ordering::SeqCst);
        Ok(())
    }

    /// Like [`Register::check`], for a response that has only the number of keys.
    pub fn check_count(&self, count: usize, among: usize, oldest: Acknowledged) -> Result<(), String> {
        let issued = self.issued.load(Ordering::SeqCst);
        let mut possible = oldest.state..=issued;
        if count == 0 && possible.any(Self::is_deleted) {
            return Ok(());
        }
        // Of two consecutive states at least one has keys.
        if count == among
            && (oldest.state..=issued)
                .take(2)
                .any(|state| !Self::is_deleted(state))
        {
            return Ok(());
        }
        Err(format!(
            "{count} of {among} keys with states {} to {issued}",
            oldest.state
        ))
    }
}

/// Accounts between which a writer transfers money: every consistent read sees the same sum.
pub struct Bank {
    prefix: String,
}

impl Bank {
    const ACCOUNTS: usize = 10;
    const EACH: i64 = 100;

    /// Accounts with keys below `prefix`.
    pub fn new(prefix: String) -> Self {
        Self { prefix }
    }

    /// Prefix of the accounts' keys.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Opens all accounts in one transaction.
    pub async fn open(&self, etcd: &Client) {
        let opened = (0..Self::ACCOUNTS).map(|n| RequestOp::put(self.account(n), Self::EACH.to_string()));
        etcd.transact(opened.collect()).await.expect("etcd writes");
    }

    fn account(&self, number: usize) -> String {
        format!("{}{number}", self.prefix)
    }

    /// Transfers money between random accounts until `stop`.
    pub async fn write(&self, etcd: &Client, stop: &AtomicBool) -> Result<(), String> {
        let mut accounts = [Self::EACH; Self::ACCOUNTS];
        for turn in 0_usize.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let (from, to) = (turn % Self::ACCOUNTS, (turn * 7 + 3) % Self::ACCOUNTS);
            if from == to {
                continue;
            }
            let amount = i64::try_from(turn % 90).unwrap();
            accounts[from] -= amount;
            accounts[to] += amount;
            let moved = [from, to].map(|n| RequestOp::put(self.account(n), accounts[n].to_string()));
            etcd.transact(moved.into())
                .await
                .map_err(|status| format!("etcd refused a write: {status:?}"))?;
        }
        Ok(())
    }

    /// Checks a list of all accounts.
    pub fn check(&self, kvs: &[KeyValue]) -> Result<(), String> {
        let sum: i64 = kvs
            .iter()
            .map(|kv| {
                String::from_utf8_lossy(&kv.value)
                    .parse()
                    .unwrap_or(i64::MIN / 100)
            })
            .sum();
        if kvs.len() == Self::ACCOUNTS && sum == Self::EACH * i64::try_from(Self::ACCOUNTS).unwrap() {
            return Ok(());
        }
        Err(format!(
            "half a transaction: the sum of {} accounts is {sum}: {kvs:?}",
            kvs.len()
        ))
    }
}

/// The keys of a response that start with `prefix`.
pub fn part<'a>(answer: &'a RangeResponse, prefix: &str) -> &'a [KeyValue] {
    let start = answer
        .kvs
        .partition_point(|kv| kv.key.as_slice() < prefix.as_bytes());
    let length = answer.kvs[start..].partition_point(|kv| kv.key.starts_with(prefix.as_bytes()));
    &answer.kvs[start..start + length]
}
