//! The differential suite: the same requests go to etcd and to rangecache in front of the same etcd, and the
//! responses must be equal in bytes, status, message and trailers.
//!
//! A proxy that forwards everything would pass, so each response within a mirror's history must also come from
//! memory.

use rand::SeedableRng;
use rand::rngs::StdRng;
use testkit::effort::part_of;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Reply};
use testkit::kv::RANGE;
use testkit::pb::{RangeRequest, RangeResponse};
use testkit::proxy::Rangecache;
use testkit::shapes::{Revisions, at_random, by_hand, order_is_open, write_first_part, write_second_part};
use testkit::wait::{SOON, until};

/// Random requests, per version of etcd, with full effort.
const AT_RANDOM: u64 = 2_000;

/// VALUE, of etcd's sort targets.
const SORTED_BY_VALUE: i32 = 4;

/// Requests whose outcomes are read together: the admin port renders 50 pages of metrics per second.
const COUNTED_TOGETHER: usize = 8;

/// Both sides of the comparison.
struct Sides {
    etcd: Client,
    through: Client,
    rangecache: Rangecache,
    /// Of packed values etcd sorts by value, and of those that are left out it answers.
    memory: Memory,
    /// Requests that wait for [`Sides::send`], with etcd's responses: those that memory has to answer, and the others. A batch has
    /// requests of one kind, so that none can count for another.
    from_memory: Vec<(RangeRequest, Reply)>,
    from_either: Vec<(RangeRequest, Reply)>,
    defects: Vec<String>,
    asked: usize,
    memory_answers: u64,
}

impl Sides {
    /// With a rangecache that leads to `etcd`.
    async fn new(etcd: &Etcd, rangecache: Rangecache) -> Self {
        Self {
            etcd: etcd.client().await,
            through: rangecache.client().await,
            rangecache,
            memory: Memory::Plain,
            from_memory: Vec::new(),
            from_either: Vec::new(),
            defects: Vec::new(),
            asked: 0,
            memory_answers: 0,
        }
    }

    /// Sends a request to etcd, and to rangecache with the next ones of its kind; records every difference.
    async fn compare(&mut self, request: &RangeRequest, at: Revisions) {
        let direct = self.etcd.range_raw(request).await.expect("etcd answers");
        let must_be_from_memory =
            direct.status().code == 0 && at.in_window(request.revision) && !self.order_is_open(request).await;
        let batch = if must_be_from_memory {
            &mut self.from_memory
        } else {
            &mut self.from_either
        };
        batch.push((request.clone(), direct));
        if batch.len() == COUNTED_TOGETHER {
            self.send_all().await;
        }
    }

    /// Sends all requests that wait.
    async fn send_all(&mut self) {
        let batch = std::mem::take(&mut self.from_memory);
        self.send(batch, true).await;
        let batch = std::mem::take(&mut self.from_either);
        self.send(batch, false).await;
    }

    async fn send(&mut self, batch: Vec<(RangeRequest, Reply)>, must_be_from_memory: bool) {
        if batch.is_empty() {
            return;
        }
        if self.memory == Memory::WithoutValues {
            self.through.inject_fault("leave-out").await;
        }
        let before = self.rangecache.outcomes().await;
        for (request, direct) in &batch {
            let through = self.through.range_raw(request).await.expect("rangecache answers");
            if *direct != through {
                self.defects.push(format!(
                    "{request:?}\n etcd: {}\n rangecache: {}",
                    describe(direct),
                    describe(&through)
                ));
            }
        }
        let sent = batch.len() as u64;
        let outcomes = self.rangecache.outcomes_since(&before, sent).await;
        self.asked += batch.len();
        self.memory_answers += outcomes.memory_answers();
        if outcomes.total() != sent || (must_be_from_memory && outcomes.memory_answers() != sent) {
            let requests: Vec<_> = batch.iter().map(|(request, _)| request).collect();
            let expected = if must_be_from_memory {
                ", all from memory"
            } else {
                ""
            };
            self.defects.push(format!(
                "{requests:?}\n not {sent} Ranges{expected}, but {outcomes:?}"
            ));
        }
    }

    async fn order_is_open(&self, request: &RangeRequest) -> bool {
        match self.memory {
            Memory::Packed if request.sort_target == SORTED_BY_VALUE => return true,
            Memory::WithoutValues if !request.count_only && !request.keys_only => return true,
            Memory::WithoutValues if request.sort_target == SORTED_BY_VALUE => return true,
            _ => {}
        }
        if !(0..=2).contains(&request.sort_order) {
            return true;
        }
        if request.sort_order == 0 && request.sort_target == 0 {
            return false;
        }
        let whole = RangeRequest {
            revision: request.revision,
            ..RangeRequest::range(&request.key, &request.range_end)
        };
        order_is_open(request, &self.etcd.range(&whole).await.expect("etcd answers").kvs)
    }

    /// Waits until rangecache refuses revisions that etcd has compacted.
    async fn compact(&mut self, revision: i64) {
        self.send_all().await;
        self.etcd.compact(revision).await.expect("etcd compacts");
        let gone = RangeRequest {
            revision: revision - 1,
            ..RangeRequest::everything()
        };
        until(SOON, "rangecache notices the compaction", async || {
            let reply = self.through.range_raw(&gone).await.expect("rangecache answers");
            (reply.status().code != 0).then_some(())
        })
        .await;
    }

    async fn judge(&mut self) {
        self.send_all().await;
        println!(
            "{} of {} answers came from memory",
            self.memory_answers, self.asked
        );
        let shown: Vec<_> = self.defects.iter().take(12).map(String::as_str).collect();
        assert!(
            shown.is_empty(),
            "{} defects, of which the first:\n{}",
            self.defects.len(),
            shown.join("\n\n")
        );
    }
}

/// A reply as text.
fn describe(reply: &Reply) -> String {
    match reply.answer::<RangeResponse>() {
        Ok(answer) => format!("{answer:?}\n   {reply:?}"),
        Err(status) => format!("{status:?} {reply:?}"),
    }
}

fn seed() -> u64 {
    let seed =
        std::env::var("ORACLE_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().expect("a number"));
    println!("to replay: ORACLE_SEED={seed}");
    seed
}

async fn current(etcd: &Client) -> i64 {
    etcd.range(&RangeRequest::one("any"))
        .await
        .expect("etcd answers")
        .revision()
}

async fn range_responses_equal_etcds(version: Version) {
    range_responses_are_equal(version, Chain::One, Memory::Plain).await;
}

/// Form in which memory has the values.
#[derive(Clone, Copy, PartialEq)]
enum Memory {
    Plain,
    Packed,
    /// All are left out, again and again.
    WithoutValues,
}

/// Number of rangecaches between the client and etcd.
enum Chain {
    One,
    /// Two rangecaches, one before the other.
    Two,
}

/// `memory` is that of the rangecache that the client is connected to.
async fn range_responses_are_equal(version: Version, chain: Chain, memory: Memory) {
    let mut random = StdRng::seed_from_u64(seed());
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    write_first_part(&direct).await;
    let compacted = current(&direct).await - 20;
    direct.compact(compacted).await.expect("etcd compacts");

    // The mirror is loaded here: revisions between the compaction and this one may be forwarded, later ones may not.
    let rangecache = match chain {
        Chain::One => Rangecache::before(&etcd),
        Chain::Two => Rangecache::before_another(Rangecache::before(&etcd).start().await),
    };
    let cache_pack = if memory == Memory::Packed {
        "always"
    } else {
        "never"
    };
    let rangecache = rangecache
        .with("--cache-pack", cache_pack)
        .with_fault_injection()
        .start()
        .await;
    let mut sides = Sides::new(&etcd, rangecache).await;
    sides.memory = memory;
    let loaded = current(&direct).await;
    write_second_part(&direct).await;
    let mut at = Revisions {
        compacted,
        loaded,
        current: current(&direct).await,
    };
    // Serializable reads are answered at the mirror's revision; a linearizable read first brings it up to date.
    sides.compare(&RangeRequest::everything(), at).await;
    sides.send_all().await;
    for _ in 0..part_of(AT_RANDOM / 2) {
        sides.compare(&at_random(&mut random, at), at).await;
    }

    at.compacted = loaded + 10;
    sides.compact(at.compacted).await;
    for shape in by_hand(at) {
        sides.compare(&shape, at).await;
    }
    for _ in 0..part_of(AT_RANDOM / 2) {
        sides.compare(&at_random(&mut random, at), at).await;
    }
    sides.judge().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn range_responses_equal_etcds_3_7() {
    range_responses_equal_etcds(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn range_responses_equal_etcds_3_6() {
    range_responses_equal_etcds(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn range_responses_equal_etcds_3_5() {
    range_responses_equal_etcds(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "make test-other-etcds"]
async fn range_responses_equal_etcds_3_8() {
    range_responses_equal_etcds(Version::V3_8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn range_responses_through_two_rangecaches_equal_etcds() {
    range_responses_are_equal(Version::V3_7, Chain::Two, Memory::Plain).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn range_responses_with_packed_values_equal_etcds() {
    range_responses_are_equal(Version::V3_7, Chain::One, Memory::Packed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn range_responses_with_packed_values_equal_etcds_3_5() {
    range_responses_are_equal(Version::V3_5, Chain::One, Memory::Packed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn range_responses_without_values_in_memory_equal_etcds() {
    range_responses_are_equal(Version::V3_7, Chain::One, Memory::WithoutValues).await;
}

/// etcd 3.5 panics on an unknown sort target, so that no such request may reach it: the expected response is 3.6's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_sort_target_does_not_reach_etcd_3_5() {
    let (crashes, refuses) = (Etcd::start(Version::V3_5).await, Etcd::start(Version::V3_6).await);
    let rangecache = Rangecache::before(&crashes).start().await;
    let (through, judge) = (rangecache.client().await, refuses.client().await);
    for client in [&crashes.client().await, &judge] {
        client.put("a", "1").await.expect("etcd puts");
        client.put("b", "2").await.expect("etcd puts");
    }
    for sort_order in [0, 1, 2, 9] {
        for sort_target in [5, -1, i32::MAX] {
            let request = RangeRequest {
                sort_order,
                sort_target,
                ..RangeRequest::everything()
            };
            let expected = judge.range_raw(&request).await.expect("etcd 3.6 answers");
            let got = through.range_raw(&request).await.expect("rangecache answers");
            assert_eq!(got, expected, "{request:?}");
        }
    }
    assert_eq!(
        through.get("a").await,
        Ok(Some(b"1".to_vec())),
        "etcd 3.5 has survived"
    );
}

/// Unknown sort targets in encodings that a strict decoder may refuse: etcd's own decoder accepts each of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oddly_encoded_sort_target_does_not_reach_etcd_3_5() {
    let (crashes, refuses) = (Etcd::start(Version::V3_5).await, Etcd::start(Version::V3_6).await);
    let rangecache = Rangecache::before(&crashes).start().await;
    let (through, judge) = (rangecache.client().await, refuses.client().await);
    crashes.client().await.put("a", "1").await.expect("etcd puts");
    // An overlong encoding, a repeated field, one followed by an unknown field, and one before a group, which etcd skips
    // with what is in it.
    let everything = b"\x0a\x01\0\x12\x01\0";
    for odd in [
        &b"\x30\x85\x80\x80\x00"[..],
        b"\x30\x01\x30\x09",
        b"\x30\x09\xf8\x3f\x05",
        b"\xb0\x00\x09",
        b"\x30\x09\x7b\x30\x01\x7c",
        b"\x30\x09\x7b\x7b\x0a\x00\x7c\x7c",
    ] {
        let message = [&everything[..], odd].concat();
        let expected = judge.raw(RANGE, &message).await.expect("etcd 3.6 answers");
        let got = through.raw(RANGE, &message).await.expect("rangecache answers");
        assert_eq!(got, expected, "{}", odd.escape_ascii());
    }
    assert_eq!(
        through.get("a").await,
        Ok(Some(b"1".to_vec())),
        "etcd 3.5 has survived"
    );
}
