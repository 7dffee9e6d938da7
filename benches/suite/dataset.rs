//! Data in etcd: keys like Kubernetes', values of pseudo-random bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, bail};
use bytes::Bytes;
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse};
use prost::Message;

use crate::client::{Connection, Method};
use crate::load::Op;
use crate::wire;
use testkit::pb::{RequestOp, TxnRequest};

/// Transactions in flight while filling.
const FILL_IN_FLIGHT: usize = 16;
/// Bytes per transaction, below etcd's limit of 1.5 MiB per request.
const MAX_TXN_BYTES: usize = 1 << 20;
/// Maximum operations per transaction (etcd is started with a limit above its default of 128).
const MAX_TXN_OPS: usize = 1000;
/// Number of different calls in cases of single keys or random pages.
pub(crate) const DISTINCT_CALLS: usize = 4096;

/// Keys with one prefix, and values of one size.
#[derive(Clone, Debug)]
pub(crate) struct Dataset {
    /// Prefix of the keys; ends in a slash.
    pub(crate) prefix: &'static str,
    /// Number of keys.
    pub(crate) keys: usize,
    /// Size of each value, in bytes.
    pub(crate) value_bytes: usize,
}

impl Dataset {
    /// Key with this number; keys are in the order of their numbers.
    pub(crate) fn key(&self, number: usize) -> String {
        format!(
            "{}namespace-{:02}/object-{number:07}",
            self.prefix,
            number * 50 / 10_000_000
        )
    }

    /// Key numbers spread over the whole set, in a fixed pseudo-random order.
    fn spread(&self, count: usize) -> impl Iterator<Item = usize> {
        let (keys, mut state) = (self.keys, 0x9e37_79b9_7f4a_7c15_u64);
        (0..count).map(move |_| {
            state = xorshift(state);
            #[allow(clippy::cast_possible_truncation, reason = "a number below the count of keys")]
            let number = (state % keys as u64) as usize;
            number
        })
    }

    /// Linearizable reads of single keys.
    pub(crate) fn gets(&self) -> Vec<Op> {
        self.spread(DISTINCT_CALLS.min(self.keys))
            .map(|number| Op::range(&wire::get_request(self.key(number))))
            .collect()
    }

    /// A linearizable LIST of the whole set.
    pub(crate) fn list(&self) -> Vec<Op> {
        vec![Op::range(&wire::prefix_request(self.prefix))]
    }

    /// A count of the whole set.
    pub(crate) fn count(&self) -> Vec<Op> {
        vec![Op::range(&RangeRequest {
            count_only: true,
            ..wire::prefix_request(self.prefix)
        })]
    }

    /// The first page.
    pub(crate) fn first_page(&self, limit: i64) -> Vec<Op> {
        vec![Op::range(&RangeRequest {
            limit,
            ..wire::prefix_request(self.prefix)
        })]
    }

    /// Pages from random keys on, of a list at this revision; 0 means the current one.
    pub(crate) fn random_pages(&self, limit: i64, revision: i64) -> Vec<Op> {
        self.spread(DISTINCT_CALLS.min(self.keys) / 8)
            .map(|number| {
                let key = self.key(number).into();
                Op::range(&RangeRequest {
                    key,
                    limit,
                    revision,
                    ..wire::prefix_request(self.prefix)
                })
            })
            .collect()
    }

    /// Writes the keys from number `from` to the end.
    pub(crate) async fn fill(&self, etcd: &Arc<Connection>, from: usize) -> Result<()> {
        self.write(etcd, self.keys - from.min(self.keys), move |n| from + n)
            .await?;
        let answer: RangeResponse = fetch_message(etcd, &self.count()[0]).await?;
        if answer.count != i64::try_from(self.keys)? {
            bail!(
                "{} holds {} keys instead of {}",
                self.prefix,
                answer.count,
                self.keys
            );
        }
        Ok(())
    }

    /// Writes `count` keys again that are spread over the whole set.
    pub(crate) async fn rewrite(&self, etcd: &Arc<Connection>, count: usize) -> Result<()> {
        let keys = self.keys;
        self.write(etcd, count, move |n| n * keys / count).await
    }

    /// Writes `count` keys, whose numbers `number_of` gives.
    async fn write(
        &self,
        etcd: &Arc<Connection>,
        count: usize,
        number_of: impl Fn(usize) -> usize + Copy + Send + 'static,
    ) -> Result<()> {
        let per_txn = (MAX_TXN_BYTES / (self.value_bytes + 100)).clamp(1, MAX_TXN_OPS);
        let next = Arc::new(AtomicUsize::new(0));
        let mut workers = tokio::task::JoinSet::new();
        for _ in 0..FILL_IN_FLIGHT {
            let (this, etcd, next) = (self.clone(), etcd.clone(), next.clone());
            workers.spawn(async move {
                let noise = noise(this.value_bytes + NOISE_OFFSETS);
                loop {
                    let first = next.fetch_add(per_txn, Ordering::Relaxed);
                    if first >= count {
                        return Ok::<_, anyhow::Error>(());
                    }
                    let numbers = (first..(first + per_txn).min(count)).map(number_of);
                    let success = numbers
                        .map(|number| {
                            let offset = number % NOISE_OFFSETS;
                            let value = noise.slice(offset..offset + this.value_bytes);
                            RequestOp::put(this.key(number), value)
                        })
                        .collect();
                    let request = TxnRequest {
                        success,
                        ..TxnRequest::default()
                    };
                    etcd.call(Method::Txn, wire::frame(&request)).await?;
                }
            });
        }
        while let Some(worker) = workers.join_next().await {
            worker??;
        }
        Ok(())
    }
}

/// Number of offsets in the same noise at which values start.
const NOISE_OFFSETS: usize = 8191;

fn noise(length: usize) -> Bytes {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state = xorshift(state);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes.into()
}

fn xorshift(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ (state << 17)
}

/// Makes a call and decodes the answer.
pub(crate) async fn fetch_message<M: Message + Default>(connection: &Connection, op: &Op) -> Result<M> {
    wire::unframe(&connection.fetch(op.method, op.body.clone()).await?)
}

/// Current revision of the store.
pub(crate) async fn current_revision(etcd: &Connection) -> Result<i64> {
    let answer: RangeResponse =
        fetch_message(etcd, &Op::range(&wire::get_request("no such key".into()))).await?;
    Ok(answer.header.map_or(0, |header| header.revision))
}
