//! The reads that the tour compares, and the table of their times and costs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse};
use prost::Message;

use crate::keyspace::{self, ONE_POD};
use crate::metrics::{Difference, Scrapes};
use crate::pb::KeyValue;
use crate::read_target::ReadTarget;
use crate::rpc::{EtcdClient, revision};

/// Times that each read is sent to each side; the table shows the median.
const ROUNDS: usize = 15;

/// Bound on the keys that a read of the user's etcd lists, to keep the load low.
const MAX_KEYS: i64 = 10_000;

/// Page size of kube-apiserver's clients.
const PAGE_KEYS: i64 = 500;

/// Line of the table: a read and its name.
struct Read {
    name: String,
    request: RangeRequest,
}

/// Time and cost of a read on one side.
struct Cost {
    median: Duration,
    difference: Difference,
}

/// Returns the whole keyspace of the user's etcd as the target; `None` if it is empty.
pub(crate) async fn survey(client: &mut EtcdClient) -> Result<Option<ReadTarget>> {
    let everything = Bytes::from_static(&[0]);
    let request = RangeRequest {
        key: everything.clone(),
        range_end: everything.clone(),
        limit: 1,
        keys_only: true,
        ..Default::default()
    };
    let response = client.range(request).await?;
    let Some(first) = response.kvs.first() else {
        return Ok(None);
    };
    Ok(Some(ReadTarget {
        key: KeyValue::decode(first.clone())?.key.into(),
        start: everything.clone(),
        end: everything,
        name: "everything".to_owned(),
        keys: response.count,
    }))
}

fn reads(target: &ReadTarget, pinned_revision: i64) -> Vec<Read> {
    let listed = target.keys.min(MAX_KEYS);
    let limit = if target.keys > MAX_KEYS { MAX_KEYS } else { 0 };
    let page = PAGE_KEYS.min(listed);
    let read = |name: String, request: RangeRequest| Read { name, request };
    vec![
        read(
            "GET one key".into(),
            RangeRequest {
                key: target.key.clone(),
                ..Default::default()
            },
        ),
        read(
            format!("LIST {listed} keys"),
            RangeRequest {
                limit,
                ..target.range()
            },
        ),
        read(
            format!("first page of {page}"),
            RangeRequest {
                limit: PAGE_KEYS,
                ..target.range()
            },
        ),
        read(
            "count".into(),
            RangeRequest {
                count_only: true,
                ..target.range()
            },
        ),
        read(
            format!("keys only, {listed}"),
            RangeRequest {
                keys_only: true,
                limit,
                ..target.range()
            },
        ),
        read(
            format!("page of {page}, pinned revision"),
            RangeRequest {
                limit: PAGE_KEYS,
                revision: pinned_revision,
                ..target.range()
            },
        ),
    ]
}

/// Sends every read to both sides, compares the responses and prints the table.
pub(crate) async fn compare(
    target: &ReadTarget,
    direct: &mut EtcdClient,
    through: &mut EtcdClient,
    scrapes: &Scrapes,
) -> Result<()> {
    let probe = RangeRequest {
        key: target.key.clone(),
        keys_only: true,
        ..Default::default()
    };
    let pinned_revision = revision(direct.range(probe).await?.header.as_ref())?;
    println!(
        "Each linearizable read is sent {ROUNDS} times to each side, on {} ({} keys):\n",
        target.name, target.keys
    );
    println!(
        "{:30}{:>9}  {:^20}  {:^43}",
        "", "", "median time", "cost to etcd per read"
    );
    println!(
        "{:30}{:>9}  {:>9} {:>10}  {:>21} {:>21}   outcomes",
        "read", "response", "etcd", "rangecache", "direct", "through rangecache"
    );
    let mut unequal = Vec::new();
    for read in reads(target, pinned_revision) {
        // Once each before the measurement, so that it excludes the cost of a first call. Other clients may write
        // between the two reads: up to three attempts before the responses count as different.
        let mut response = RangeResponse::default();
        let mut same = false;
        for _ in 0..3 {
            response = direct.range(read.request.clone()).await?;
            same = through.range(read.request.clone()).await? == response;
            if same {
                break;
            }
        }
        if !same {
            unequal.push(read.name.clone());
        }
        let on_etcd = measure(direct, &read.request, scrapes).await?;
        let on_rangecache = measure(through, &read.request, scrapes).await?;
        println!(
            "{:30}{:>9}  {:>9} {:>10}  {:>21} {:>21}   {}",
            read.name,
            bytes(response.encoded_len()),
            time(on_etcd.median),
            time(on_rangecache.median),
            effort(&on_etcd.difference),
            effort(&on_rangecache.difference),
            outcomes(&on_rangecache.difference.ranges),
        );
    }
    println!();
    if unequal.is_empty() {
        println!(
            "Every response was equal to etcd's, field by field. The one call per read that etcd still serves is the quorum"
        );
        println!(
            "check, which proves the response fresh: one key, without its value. Concurrent reads share it.\n"
        );
    } else {
        println!(
            "Responses differed for: {} (a fault, unless other clients are writing)\n",
            unequal.join(", ")
        );
    }
    Ok(())
}

async fn measure(client: &mut EtcdClient, request: &RangeRequest, scrapes: &Scrapes) -> Result<Cost> {
    let before = scrapes.take().await?;
    let mut took = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        client.range(request.clone()).await?;
        took.push(start.elapsed());
    }
    let difference = scrapes.take().await?.since(&before);
    took.sort_unstable();
    Ok(Cost {
        median: took[ROUNDS / 2],
        difference,
    })
}

/// Writes through rangecache and reads the value back through it, which must show the write.
pub(crate) async fn write_then_read(
    direct: &mut EtcdClient,
    through: &mut EtcdClient,
    scrapes: &Scrapes,
) -> Result<()> {
    let (key, value) = keyspace::pod(ONE_POD, 4);
    let start = Instant::now();
    let written = through.put(&key, value.clone()).await?;
    let put_took = start.elapsed();

    let request = RangeRequest {
        key: key.clone().into(),
        ..Default::default()
    };
    let before = scrapes.take().await?;
    let start = Instant::now();
    let response = through.range(request.clone()).await?;
    let read_took = start.elapsed();
    let how = outcomes(&scrapes.take().await?.since(&before).ranges);

    let read_back = response
        .kvs
        .first()
        .map(|kv| KeyValue::decode(kv.clone()))
        .transpose()?;
    ensure!(
        read_back.is_some_and(|kv| kv.value == value),
        "the read did not show the write before it: please report this"
    );
    ensure!(
        direct.range(request).await? == response,
        "etcd and rangecache responded differently: please report this"
    );
    println!(
        "PUT {key} through rangecache: {}, revision {written}.",
        time(put_took)
    );
    println!(
        "GET of the same key, through rangecache: {}, revision {}, the new value ({how}).\n",
        time(read_took),
        revision(response.header.as_ref())?,
    );
    Ok(())
}

pub(crate) fn time(duration: Duration) -> String {
    let micros = duration.as_secs_f64() * 1e6;
    let (value, unit) = match micros {
        ..1e3 => return format!("{micros:.0} µs"),
        1e3..1e6 => (micros / 1e3, "ms"),
        _ => (micros / 1e6, "s"),
    };
    let decimals = if value < 10.0 {
        2
    } else {
        usize::from(value < 100.0)
    };
    format!("{value:.decimals$} {unit}")
}

#[allow(clippy::cast_precision_loss, reason = "shown with three digits")]
fn bytes(count: usize) -> String {
    scaled(count as f64)
}

/// A number of bytes with its unit.
pub(crate) fn scaled(count: f64) -> String {
    if count < 1_000.0 {
        format!("{count:.0} B")
    } else if count < 1e6 {
        format!("{:.1} kB", count / 1e3)
    } else {
        format!("{:.2} MB", count / 1e6)
    }
}

/// Cost of one read to etcd: Range calls, and bytes sent.
#[allow(clippy::cast_precision_loss, reason = "a handful of rounds")]
fn effort(difference: &Difference) -> String {
    let Some((calls, sent)) = difference.etcd else {
        return "-".to_owned();
    };
    let rounds = ROUNDS as f64;
    format!("{:.1} calls, {:>8}", calls / rounds, scaled(sent / rounds))
}

/// Outcomes of the reads through rangecache, such as `14 hit, 1 waited`.
fn outcomes(ranges: &BTreeMap<String, f64>) -> String {
    if ranges.is_empty() {
        return "-".to_owned();
    }
    ranges
        .iter()
        .map(|(outcome, count)| format!("{count:.0} {outcome}"))
        .collect::<Vec<_>>()
        .join(", ")
}
