//! The reads that the tour compares, and the table of what they took.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use prost::Message;
use rangecache::etcdserverpb::{RangeRequest, RangeResponse};

use crate::keyspace;
use crate::metrics::{Difference, Scrapes};
use crate::rpc::{Etcdclient, KeyValue, revision};

/// How often each read is made on each side; the table shows the median.
const ROUNDS: usize = 15;

/// A read of another's etcd lists no more keys than this: the tour must be no burden to it.
const MOST_KEYS: i64 = 10_000;

/// One page, as kube-apiserver's clients ask for it.
const PAGE_KEYS: i64 = 500;

/// The part of a keyspace that the reads are about.
pub(crate) struct Ground {
    /// A key that exists.
    pub(crate) key: Bytes,
    /// The range that is listed: its start, its end, and how it is called.
    pub(crate) start: Bytes,
    pub(crate) end: Bytes,
    pub(crate) name: String,
    /// Keys in that range.
    pub(crate) keys: i64,
}

/// One line of the table.
struct Read {
    name: String,
    request: RangeRequest,
}

/// What one side took.
struct Cost {
    median: Duration,
    difference: Difference,
}

/// Finds out what another's etcd holds: the whole keyspace is the ground, or none if it is empty.
pub(crate) async fn survey(client: &mut Etcdclient) -> Result<Option<Ground>> {
    let everything = Bytes::from_static(&[0]);
    let request = RangeRequest {
        key: everything.clone(),
        range_end: everything.clone(),
        limit: 1,
        keys_only: true,
        ..Default::default()
    };
    let answer = client.range(request).await?;
    let Some(first) = answer.kvs.first() else {
        return Ok(None);
    };
    Ok(Some(Ground {
        key: KeyValue::decode(first.clone())?.key,
        start: everything.clone(),
        end: everything,
        name: "everything".to_owned(),
        keys: answer.count,
    }))
}

fn reads(ground: &Ground, pinned_revision: i64) -> Vec<Read> {
    let listed = ground.keys.min(MOST_KEYS);
    let limit = if ground.keys > MOST_KEYS { MOST_KEYS } else { 0 };
    let range = || RangeRequest {
        key: ground.start.clone(),
        range_end: ground.end.clone(),
        ..Default::default()
    };
    let page = PAGE_KEYS.min(listed);
    let read = |name: String, request: RangeRequest| Read { name, request };
    vec![
        read(
            "GET one key".into(),
            RangeRequest {
                key: ground.key.clone(),
                ..Default::default()
            },
        ),
        read(format!("LIST {listed} keys"), RangeRequest { limit, ..range() }),
        read(
            format!("first page of {page}"),
            RangeRequest {
                limit: PAGE_KEYS,
                ..range()
            },
        ),
        read(
            "count".into(),
            RangeRequest {
                count_only: true,
                ..range()
            },
        ),
        read(
            format!("keys only, {listed}"),
            RangeRequest {
                keys_only: true,
                limit,
                ..range()
            },
        ),
        read(
            format!("page of {page}, pinned revision"),
            RangeRequest {
                limit: PAGE_KEYS,
                revision: pinned_revision,
                ..range()
            },
        ),
    ]
}

/// Makes every read on both sides, compares the answers and prints the table.
pub(crate) async fn compare(
    ground: &Ground,
    direct: &mut Etcdclient,
    through: &mut Etcdclient,
    scrapes: &Scrapes,
) -> Result<()> {
    let probe = RangeRequest {
        key: ground.key.clone(),
        keys_only: true,
        ..Default::default()
    };
    let pinned_revision = revision(direct.range(probe).await?.header.as_ref())?;
    println!(
        "Each read {ROUNDS} times on each side, linearizable, of {} ({} keys):\n",
        ground.name, ground.keys
    );
    println!(
        "{:30}{:>9}  {:^20}  {:^43}",
        "", "", "median time", "of etcd, per read"
    );
    println!(
        "{:30}{:>9}  {:>9} {:>10}  {:>21} {:>21}   rangecache answered",
        "read", "answer", "etcd", "rangecache", "direct", "through rangecache"
    );
    let mut unequal = Vec::new();
    for read in reads(ground, pinned_revision) {
        // Once each before the clock runs, so that neither side pays for a first time. A busy etcd may move on between
        // the two, so the same revision is asked for three times before the answers are called different.
        let mut answer = RangeResponse::default();
        let mut same = false;
        for _ in 0..3 {
            answer = direct.range(read.request.clone()).await?;
            same = through.range(read.request.clone()).await? == answer;
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
            bytes(answer.encoded_len()),
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
            "Every answer was equal, field by field, to etcd's own. The one call that etcd is left with is the quorum check"
        );
        println!(
            "that proves the answer fresh: one key, without its value. Reads at the same time share it.\n"
        );
    } else {
        println!(
            "Answers differed for: {} (unless somebody is writing, that is a fault)\n",
            unequal.join(", ")
        );
    }
    Ok(())
}

async fn measure(client: &mut Etcdclient, request: &RangeRequest, scrapes: &Scrapes) -> Result<Cost> {
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

/// Writes through rangecache and reads the write back through it: no stale answer.
pub(crate) async fn write_then_read(
    direct: &mut Etcdclient,
    through: &mut Etcdclient,
    scrapes: &Scrapes,
) -> Result<()> {
    let key = keyspace::ONE_POD;
    let value = keyspace::new_pod();
    let start = Instant::now();
    let written = through.put(key, value.clone()).await?;
    let put_took = start.elapsed();

    let request = RangeRequest {
        key: Bytes::from_static(key.as_bytes()),
        ..Default::default()
    };
    let before = scrapes.take().await?;
    let start = Instant::now();
    let answer = through.range(request.clone()).await?;
    let read_took = start.elapsed();
    let how = outcomes(&scrapes.take().await?.since(&before).ranges);

    let read_back = answer
        .kvs
        .first()
        .map(|kv| KeyValue::decode(kv.clone()))
        .transpose()?;
    ensure!(
        read_back.is_some_and(|kv| kv.value == value),
        "the read after the write did not show it: please report this"
    );
    ensure!(
        direct.range(request).await? == answer,
        "etcd shows another answer than rangecache: please report this"
    );
    println!(
        "PUT {key} through rangecache: {}, revision {written}.",
        time(put_took)
    );
    println!(
        "GET of it right after, through rangecache: {}, revision {}, the new value ({how}).\n",
        time(read_took),
        revision(answer.header.as_ref())?,
    );
    Ok(())
}

fn time(duration: Duration) -> String {
    let micros = duration.as_secs_f64() * 1e6;
    if micros < 1_000.0 {
        format!("{micros:.0} µs")
    } else {
        format!("{:.2} ms", micros / 1e3)
    }
}

#[allow(clippy::cast_precision_loss, reason = "shown with three digits")]
fn bytes(count: usize) -> String {
    scaled(count as f64)
}

fn scaled(count: f64) -> String {
    if count < 1_000.0 {
        format!("{count:.0} B")
    } else if count < 1e6 {
        format!("{:.1} kB", count / 1e3)
    } else {
        format!("{:.2} MB", count / 1e6)
    }
}

/// What etcd did for one read: Range calls, and bytes sent.
#[allow(clippy::cast_precision_loss, reason = "a handful of rounds")]
fn effort(difference: &Difference) -> String {
    let Some((calls, sent)) = difference.etcd else {
        return "-".to_owned();
    };
    let rounds = ROUNDS as f64;
    format!("{:.1} calls, {:>8}", calls / rounds, scaled(sent / rounds))
}

/// How rangecache answered, such as `14 hit, 1 waited`.
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
