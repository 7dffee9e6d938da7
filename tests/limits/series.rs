//! Lists read in pages that memory cannot answer: one RangeStream of etcd's serves them all, and every page equals
//! etcd's own, whatever readers, writers and compactions do in the meantime.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Status};
use testkit::pb::{KeyValue, RangeRequest, RangeResponse, RequestOp, prefix_end};
use testkit::proxy::Rangecache;
use testkit::roles::{MIRROR, create_users, password, token};
use testkit::wait::{SOON, until};

const PREFIX: &str = "/series/";
const PAGE: i64 = 500;

fn key(number: usize) -> String {
    format!("{PREFIX}{number:06}")
}

async fn write_all(etcd: &Client, keys: usize) {
    for start in (0..keys).step_by(100) {
        let batch = (start..start + 100).map(|n| RequestOp::put(key(n), format!("first value of {n}")));
        etcd.transact(batch.collect()).await.expect("etcd writes");
    }
}

/// Settings for a rangecache that mirrors none of the keys read here.
fn not_mirroring(etcd: &Etcd) -> testkit::proxy::Builder {
    Rangecache::before(etcd).with("--cache-prefix", "/elsewhere/")
}

/// The request for the page after `page`.
fn behind(request: &RangeRequest, page: &RangeResponse) -> RangeRequest {
    let last = &page.kvs.last().expect("no page is empty").key;
    RangeRequest {
        key: [&last[..], b"\0"].concat(),
        revision: if request.revision > 0 {
            request.revision
        } else {
            page.revision()
        },
        ..request.clone()
    }
}

/// Call by which a reader requests its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Range,
    /// Like kube-apiserver without its watch cache.
    RangeStream,
}

impl By {
    async fn ask(self, client: &Client, request: &RangeRequest) -> Result<RangeResponse, Status> {
        match self {
            By::Range => client.range(request).await,
            By::RangeStream => client.streamed(request).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paged_list_costs_etcd_one_stream() {
    costs_etcd_one_stream(By::Range, 60_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_in_streamed_pages_costs_etcd_two_streams() {
    costs_etcd_one_stream(By::RangeStream, 20_000).await;
}

async fn costs_etcd_one_stream(by: By, keys: usize) {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    write_all(&direct, keys).await;
    // No probe during the test.
    let rangecache = not_mirroring(&etcd).with("--probe-interval", "1h").start().await;
    let through = rangecache.client().await;
    let streamed_before = rangecache.stream_outcomes().await;
    let before = rangecache.outcomes().await;
    let (ranges, streams) = (
        etcd.started_calls("Range").await,
        etcd.started_calls("RangeStream").await,
    );

    let mut request = RangeRequest {
        limit: PAGE,
        ..RangeRequest::prefix(PREFIX)
    };
    let (mut read, mut pages): (Vec<KeyValue>, usize) = (Vec::new(), 0);
    loop {
        let mut page = by.ask(&through, &request).await.expect("a page");
        pages += 1;
        assert_eq!(page.count as usize, keys - read.len());
        assert_eq!(page.more, read.len() + page.kvs.len() < keys);
        let next = page.more.then(|| behind(&request, &page));
        read.append(&mut page.kvs);
        match next {
            Some(next) => request = next,
            None => break,
        }
    }
    assert_eq!(pages, keys / PAGE as usize);
    let (ranges, streams) = (
        etcd.started_calls("Range").await - ranges,
        etcd.started_calls("RangeStream").await - streams,
    );
    println!("{pages} pages cost etcd {streams} RangeStreams and {ranges} Ranges");
    let outcomes = match by {
        By::Range => {
            assert_eq!(streams, 1.0);
            // Each page has a quorum check.
            assert!(ranges <= pages as f64 + 3.0, "{ranges} Ranges");
            rangecache.outcomes_since(&before, pages as u64).await
        }
        By::RangeStream => {
            assert_eq!(streams, 2.0);
            assert!(ranges <= pages as f64 + 2.0, "{ranges} Ranges");
            rangecache
                .stream_outcomes_since(&streamed_before, pages as u64)
                .await
        }
    };
    assert_eq!(outcomes.of("streamed"), pages as u64 - 1, "{outcomes:?}");
    let whole = direct
        .range(&RangeRequest::prefix(PREFIX))
        .await
        .expect("etcd answers");
    assert_eq!(read, whole.kvs);
    until(SOON, "nothing is held", async || {
        let metrics = rangecache.metrics().await;
        let held = metrics.buffered("series") + metrics.sum("rangecache_series");
        (held == 0.0).then_some(())
    })
    .await;
}

/// A reader of a list in pages.
struct Reader {
    first: RangeRequest,
    next: Option<RangeRequest>,
    last: Option<RangeRequest>,
}

impl Reader {
    fn new(random: &mut StdRng) -> Self {
        let first = match random.random_range(0..4) {
            0 => RangeRequest::range(PREFIX, b"\0"),
            1 => RangeRequest::range(key(random.random_range(0..100)), prefix_end(PREFIX.as_bytes())),
            _ => RangeRequest::prefix(PREFIX),
        };
        Self {
            first: RangeRequest {
                keys_only: random.random_bool(0.2),
                serializable: random.random_bool(0.2),
                ..first
            },
            next: None,
            last: None,
        }
    }

    fn request(&mut self, random: &mut StdRng) -> RangeRequest {
        let mut request = match random.random_range(0..20) {
            0 => self.last.clone(),
            1 => None,
            2 => self.next.clone().map(|next| RangeRequest {
                key: key(random.random_range(0..600)).into(),
                ..next
            }),
            _ => self.next.clone(),
        }
        .unwrap_or_else(|| self.first.clone());
        if request.limit == 0 || random.random_bool(0.3) {
            request.limit = *[1, 2, 7, 7, 30, 30, 30, 100, 1500].choose(random).unwrap();
        }
        request
    }
}

struct Fuzz {
    etcd: Client,
    through: Client,
    random: StdRng,
    /// Whether all writes since the start went through rangecache.
    knows_all: bool,
    shown: i64,
}

impl Fuzz {
    async fn change(&mut self) {
        let by_rangecache = self.random.random_bool(0.7);
        self.knows_all &= by_rangecache;
        let client = if by_rangecache { &self.through } else { &self.etcd };
        let key = key(self.random.random_range(0..650));
        let done = match self.random.random_range(0..3) {
            0 => client.delete(key).await,
            _ => {
                client
                    .put(key, vec![b'w'; self.random.random_range(0..3000)])
                    .await
            }
        };
        done.expect("etcd writes");
        if by_rangecache {
            // Its header shows writes of others, too.
            self.knows_all = true;
        }
    }

    async fn compact(&mut self) {
        let now = self.through.get("any").await.map(|_| ()).and(Ok::<_, Status>(()));
        now.expect("etcd answers");
        let current = self
            .through
            .range(&RangeRequest::one("any"))
            .await
            .expect("etcd answers")
            .revision();
        // The revision may have been compacted before.
        let _ = self
            .through
            .compact(current - self.random.random_range(0..6))
            .await;
    }

    /// Sends the request to both sides; returns the page.
    async fn ask(&mut self, request: &RangeRequest) -> Option<RangeResponse> {
        let by = *[By::Range, By::RangeStream].choose(&mut self.random).unwrap();
        let through = by.ask(&self.through, request).await;
        let direct = self.etcd.range(request).await;
        let (mut through, direct) = match (through, direct) {
            (Ok(through), Ok(direct)) => (through, direct),
            (through, direct) => {
                assert_eq!(through, direct, "{by:?} {request:?}");
                return None;
            }
        };
        let (revision, current) = (through.revision(), direct.revision());
        assert!(
            revision <= current,
            "{by:?} {request:?} has a future revision: {revision} of {current}"
        );
        assert!(
            revision >= self.shown,
            "{by:?} {request:?} goes back: {revision} after {}",
            self.shown
        );
        assert!(
            revision == current || !self.knows_all,
            "{by:?} {request:?}: {revision} of {current}"
        );
        self.shown = revision;
        through.header.as_mut().unwrap().revision = current;
        assert_eq!(through, direct, "{by:?} {request:?}");
        Some(direct)
    }
}

async fn random_page_series_equal_etcds(version: Version, seed: u64, turns: usize) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    write_all(&direct, 600).await;
    let rangecache = not_mirroring(&etcd).start().await;
    let mut fuzz = Fuzz {
        etcd: direct,
        through: rangecache.client().await,
        random: StdRng::seed_from_u64(seed),
        knows_all: false,
        shown: 0,
    };
    let mut readers: Vec<_> = (0..4).map(|_| Reader::new(&mut fuzz.random)).collect();
    for _ in 0..turns {
        match fuzz.random.random_range(0..100) {
            0..15 => fuzz.change().await,
            15 => fuzz.compact().await,
            16 => {
                // Two readers of the same list, page by page in turns.
                let first = RangeRequest {
                    limit: 30,
                    ..RangeRequest::prefix(PREFIX)
                };
                let page = fuzz.ask(&first).await.expect("the current revision");
                for reader in &mut readers[..2] {
                    (reader.last, reader.next) = (Some(first.clone()), Some(behind(&first, &page)));
                }
            }
            _ => {
                let index = fuzz.random.random_range(0..readers.len());
                let request = readers[index].request(&mut fuzz.random);
                let page = fuzz.ask(&request).await;
                readers[index].next = page.filter(|page| page.more).map(|page| behind(&request, &page));
                readers[index].last = Some(request);
            }
        }
    }
    let pages = rangecache.metrics().await.sum("rangecache_series_pages_total");
    println!("{version:?}: {pages} pages of {turns} turns from series");
    if version == Version::V3_7 {
        assert!(pages > turns as f64 / 5.0, "only {pages} pages came from series");
    } else {
        assert_eq!(pages, 0.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_page_series_equal_etcds_3_7() {
    for seed in 0..3 {
        random_page_series_equal_etcds(Version::V3_7, seed, 1500).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn random_page_series_equal_etcds_3_6() {
    random_page_series_equal_etcds(Version::V3_6, 7, 800).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn random_page_series_equal_etcds_3_5() {
    random_page_series_equal_etcds(Version::V3_5, 8, 800).await;
}

/// etcd with 5,000 keys, of which two pages have been read: a stream is open for the third.
async fn in_mid_series(flags: &[(&str, &str)]) -> (Etcd, Rangecache, Client, RangeRequest) {
    let etcd = Etcd::start(Version::V3_7).await;
    write_all(&etcd.client().await, 5_000).await;
    let mut builder = not_mirroring(&etcd);
    for (flag, value) in flags {
        builder = builder.with(flag, value);
    }
    let rangecache = builder.start().await;
    let through = rangecache.client().await;
    let mut request = RangeRequest {
        limit: PAGE,
        ..RangeRequest::prefix(PREFIX)
    };
    for _ in 0..2 {
        let page = through.range(&request).await.expect("a page");
        request = behind(&request, &page);
    }
    assert_eq!(
        rangecache.metrics().await.sum("rangecache_series_pages_total"),
        1.0
    );
    (etcd, rangecache, through, request)
}

/// Started by Range and continued by RangeStream: equal to etcd's own byte by byte, chunks included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streamed_pages_of_a_series_equal_etcds() {
    let (etcd, rangecache, through, mut request) = in_mid_series(&[]).await;
    let direct = etcd.client().await;
    for pages in 2..5 {
        let reply = through.stream_raw(&request).await.expect("a page");
        assert_eq!(reply, direct.stream_raw(&request).await.expect("etcd answers"));
        assert_eq!(
            rangecache.metrics().await.sum("rangecache_series_pages_total"),
            f64::from(pages)
        );
        let page = direct.range(&request).await.expect("etcd answers");
        request = behind(&request, &page);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_requested_after_the_series_expired_is_answered() {
    let (etcd, rangecache, through, request) = in_mid_series(&[("--series-ttl", "1s")]).await;
    until(SOON, "the series ends, and its stream at etcd", async || {
        let held = rangecache.metrics().await.buffered("series");
        let in_flight = etcd.started_calls("RangeStream").await - etcd.handled_calls("RangeStream").await;
        (held == 0.0 && in_flight == 0.0).then_some(())
    })
    .await;
    let direct = etcd.client().await;
    assert_eq!(through.range(&request).await, direct.range(&request).await);
    assert_eq!(
        rangecache.metrics().await.sum("rangecache_series_pages_total"),
        1.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_by_others_ends_a_series() {
    let (etcd, _rangecache, through, request) = in_mid_series(&[]).await;
    let direct = etcd.client().await;
    let revision = direct.put("/other", "").await.expect("etcd writes");
    direct.compact(revision).await.expect("etcd compacts");
    let expected = direct.range(&request).await.expect_err("compacted");
    let page = RangeRequest {
        limit: 1,
        ..request.clone()
    };
    assert_eq!(through.range(&page).await, Err(expected.clone()));
    assert_eq!(through.range(&request).await, Err(expected));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_restart_ends_a_series() {
    let (mut etcd, _rangecache, through, mut request) = in_mid_series(&[]).await;
    etcd.restart().await;
    let direct = etcd.client().await;
    loop {
        let (page, expected) = (through.range(&request).await, direct.range(&request).await);
        let (page, expected) = (page.expect("a page"), expected.expect("etcd's page"));
        assert_eq!(
            (&page.kvs, page.count, page.more),
            (&expected.kvs, expected.count, expected.more)
        );
        if !page.more {
            break;
        }
        request = behind(&request, &page);
    }
}

/// Pages of the lost history have been received already, and no probe notices the restore.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restored_etcd_ends_a_series() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    write_all(&direct, 3_000).await;
    let snapshot = etcd.save_snapshot().await;
    direct.put(key(2_900), "lost").await.expect("etcd writes");
    let rangecache = not_mirroring(&etcd).with("--probe-interval", "1h").start().await;
    let through = rangecache.client().await;
    let mut request = RangeRequest {
        limit: PAGE,
        ..RangeRequest::prefix(PREFIX)
    };
    for _ in 0..2 {
        let page = through.range(&request).await.expect("a page");
        request = behind(&request, &page);
    }
    assert_eq!(from_series(&rangecache).await, 1.0);
    etcd.stop();
    etcd.restore(&snapshot, "rangecache", &[]);
    etcd.run();
    etcd.ready().await;
    let expected = etcd.client().await.range(&request).await;
    assert!(expected.is_err(), "the list's revision is lost: {expected:?}");
    let page = until(SOON, "etcd is reached again", async || {
        let page = through.range(&request).await;
        let is_unavailable = matches!(&page, Err(status) if status.code == 14);
        (!is_unavailable).then_some(page)
    })
    .await
    .0;
    assert_eq!(page, expected);
    assert_eq!(from_series(&rangecache).await, 1.0, "no page of the lost history");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auth_on_without_own_user_keeps_no_series() {
    let (etcd, rangecache, through, request) = in_mid_series(&[]).await;
    let root = through.enable_auth("secret").await.expect("auth is on");
    let refused = through.range(&request).await;
    let direct = etcd.client().await;
    assert_eq!(refused, direct.range(&request).await);
    assert!(refused.is_err(), "reads without a token are refused");
    let pages = from_series(&rangecache).await;
    let mut request = request;
    for _ in 0..3 {
        let page = root.range(&request).await.expect("root reads");
        request = behind(&request, &page);
    }
    assert_eq!(from_series(&rangecache).await, pages);
}

async fn from_series(rangecache: &Rangecache) -> f64 {
    rangecache.metrics().await.sum("rangecache_series_pages_total")
}

/// I8: a series belongs to its caller, and etcd authorises each of its pages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auth_on_keeps_a_series_to_its_caller() {
    let etcd = Etcd::start(Version::V3_7).await;
    let root = create_users(&etcd).await;
    for start in (0..3_000).step_by(100) {
        let batch = (start..start + 100).map(|n| RequestOp::put(format!("/a/{n:06}"), "value"));
        root.transact(batch.collect()).await.expect("etcd writes");
    }
    let rangecache = not_mirroring(&etcd)
        .with("--user", MIRROR)
        .with("--password", &password(MIRROR))
        .start()
        .await;
    let through = rangecache.client().await;
    let direct = etcd.client().await;
    let login = async |name: &str| {
        let token = token(&direct, name).await;
        (
            through.with_metadata("token", &token),
            direct.with_metadata("token", &token),
        )
    };
    let (alice, alice_direct) = login("alice").await;
    let (bob, bob_direct) = login("bob").await;
    let first = RangeRequest {
        limit: PAGE,
        ..RangeRequest::prefix("/a/")
    };
    let mut request = first.clone();
    let next_of_alice = async |request: &mut RangeRequest| {
        let page = alice.range(request).await.expect("alice may read");
        assert_eq!(page, alice_direct.range(request).await.expect("alice may read"));
        *request = behind(request, &page);
    };
    // Once rangecache has noticed that auth is on.
    until(SOON, "alice's second page comes from a series", async || {
        request = first.clone();
        next_of_alice(&mut request).await;
        next_of_alice(&mut request).await;
        (from_series(&rangecache).await > 0.0).then_some(())
    })
    .await;
    let pages = from_series(&rangecache).await;
    next_of_alice(&mut request).await;
    assert_eq!(from_series(&rangecache).await, pages + 1.0);

    // Other callers do not get it, with or without permission.
    for (through, direct) in [(&bob, &bob_direct), (&through, &direct)] {
        let refused = through.range(&request).await;
        assert_eq!(refused, direct.range(&request).await);
        assert!(refused.is_err());
        let streamed = through.streamed(&request).await;
        assert_eq!(streamed, direct.streamed(&request).await);
        assert!(streamed.is_err());
    }
    // Root may read, but not from alice's series, which is still there afterwards.
    let (root, root_direct) = login("root").await;
    let page = root.range(&request).await;
    assert_eq!(page, root_direct.range(&request).await);
    assert!(page.is_ok());
    assert_eq!(from_series(&rangecache).await, pages + 1.0);
    next_of_alice(&mut request).await;
    assert_eq!(from_series(&rangecache).await, pages + 2.0);

    // A revoked permission takes effect within a list.
    root_direct
        .revoke_read("a", "/a/", testkit::pb::prefix_end(b"/a/"))
        .await
        .expect("root forbids");
    let refused = alice.range(&request).await;
    assert_eq!(refused, alice_direct.range(&request).await);
    assert!(refused.is_err());
    assert_eq!(from_series(&rangecache).await, pages + 2.0);
}
