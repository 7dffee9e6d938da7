use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::HeaderMap;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::*;
use crate::etcdserverpb::TxnRequest;
use crate::upstream::Credentials;
use crate::upstream::fake::{self, Answer, FakeEtcd};

/// A check that has reached etcd and waits for its answer.
struct Held {
    path: String,
    message: Bytes,
    answer: tokio::sync::oneshot::Sender<Answer>,
}

struct Bench {
    freshness: Arc<Freshness>,
    checks: mpsc::UnboundedReceiver<Held>,
    replaced: Arc<AtomicUsize>,
    _etcd: FakeEtcd,
    _stop: DropGuard,
}

/// A Freshness before an etcd that answers each check when the test says so.
async fn bench() -> Bench {
    let (arrived, checks) = mpsc::unbounded_channel();
    let etcd = FakeEtcd::start(move |path, message| {
        let arrived = arrived.clone();
        async move {
            if path.ends_with("/Status") {
                return fake::status_of("3.7.3");
            }
            let (answer, answered) = tokio::sync::oneshot::channel();
            arrived
                .send(Held {
                    path,
                    message,
                    answer,
                })
                .unwrap();
            answered.await.unwrap_or(Err((14, "given up")))
        }
    })
    .await;
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let upstream = Upstream::start(
        std::slice::from_ref(&etcd.url),
        &crate::tls::Connector::plaintext(),
        true,
        Credentials::new(None),
        &tasks,
        &stop,
    );
    let replaced = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&replaced);
    let freshness = Arc::new(Freshness::new(
        upstream,
        Arc::new(ClusterState::default()),
        Arc::default(),
        Duration::from_secs(20),
        tasks,
        stop.clone(),
        Box::new(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
        }),
    ));
    Bench {
        freshness,
        checks,
        replaced,
        _etcd: etcd,
        _stop: stop.drop_guard(),
    }
}

impl Bench {
    fn read(&self) -> tokio::task::JoinHandle<Result<i64, Reason>> {
        let round = self.freshness.join(None);
        let freshness = Arc::clone(&self.freshness);
        tokio::spawn(async move { freshness.wait(&round).await.map(|proof| proof.header.revision) })
    }

    async fn check(&mut self) -> Held {
        tokio::time::timeout(Duration::from_secs(20), self.checks.recv())
            .await
            .unwrap()
            .unwrap()
    }
}

impl Held {
    fn answer(self, answer: Answer) {
        self.answer.send(answer).unwrap();
    }
}

#[tokio::test]
async fn a_read_that_arrives_while_a_check_is_under_way_gets_the_next_one() {
    let mut bench = bench().await;
    let early = bench.read();
    let first = bench.check().await;
    let late = bench.read();
    first.answer(fake::range_at(1, 5, 2));
    assert_eq!(early.await.unwrap(), Ok(5));
    bench.check().await.answer(fake::range_at(1, 8, 2));
    assert_eq!(
        late.await.unwrap(),
        Ok(8),
        "the first check began before this read arrived"
    );
}

#[tokio::test]
async fn reads_that_wait_share_one_check() {
    let mut bench = bench().await;
    let early = bench.read();
    let first = bench.check().await;
    let late: Vec<_> = (0..64).map(|_| bench.read()).collect();
    first.answer(fake::range_at(1, 5, 2));
    early.await.unwrap().unwrap();
    bench.check().await.answer(fake::range_at(1, 6, 2));
    for read in late {
        assert_eq!(read.await.unwrap(), Ok(6));
    }
    assert!(bench.checks.try_recv().is_err(), "65 reads took two checks");
}

#[tokio::test]
async fn a_revision_that_went_back_proves_nothing_but_a_replaced_history() {
    let mut bench = bench().await;
    for (header, expected) in [
        ((1, 10, 2), Ok(10)),
        ((1, 9, 2), Err(Reason::HistoryReplaced)),
        ((1, 9, 2), Ok(9)),
        ((2, 12, 2), Err(Reason::HistoryReplaced)),
        ((2, 12, 1), Err(Reason::HistoryReplaced)),
    ] {
        let read = bench.read();
        let (cluster_id, revision, raft_term) = header;
        bench
            .check()
            .await
            .answer(fake::range_at(cluster_id, revision, raft_term));
        assert_eq!(read.await.unwrap(), expected, "{header:?}");
    }
    assert_eq!(bench.replaced.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn a_failed_attempt_is_made_again_and_a_refused_one_means_auth() {
    let mut bench = bench().await;
    let read = bench.read();
    bench.check().await.answer(Err((14, "etcdserver: no leader")));
    bench.check().await.answer(fake::range_at(1, 5, 2));
    assert_eq!(read.await.unwrap(), Ok(5));
    assert_eq!(bench.freshness.cluster_state.auth(), Auth::Off);
    let read = bench.read();
    bench
        .check()
        .await
        .answer(Err((3, "etcdserver: user name is empty")));
    assert_eq!(read.await.unwrap(), Err(Reason::Auth));
    assert_eq!(bench.freshness.cluster_state.auth(), Auth::On);
}

#[tokio::test]
async fn a_slow_check_does_not_hold_up_those_who_came_later() {
    let mut bench = bench().await;
    let early = bench.read();
    let stuck = bench.check().await;
    let late = bench.read();
    bench.check().await.answer(fake::range_at(1, 8, 2));
    assert_eq!(late.await.unwrap(), Ok(8));
    stuck.answer(fake::range_at(1, 8, 2));
    assert_eq!(early.await.unwrap(), Ok(8));
}

#[tokio::test]
async fn a_crowd_that_does_not_come_again_is_not_waited_for_long() {
    let mut bench = bench().await;
    let early = bench.read();
    let first = bench.check().await;
    let crowd: Vec<_> = (0..64).map(|_| bench.read()).collect();
    first.answer(fake::range_at(1, 5, 2));
    early.await.unwrap().unwrap();
    bench.check().await.answer(fake::range_at(1, 6, 2));
    for read in crowd {
        read.await.unwrap().unwrap();
    }
    let alone = bench.read();
    bench.check().await.answer(fake::range_at(1, 7, 2));
    assert_eq!(alone.await.unwrap(), Ok(7));
}

impl Bench {
    /// Asks for the right to read `[k, l)`.
    fn authorize(&self, serializable: bool) -> tokio::task::JoinHandle<Result<i64, Reason>> {
        let freshness = Arc::clone(&self.freshness);
        tokio::spawn(async move {
            let authorization = Authorization {
                key: "k".into(),
                range_end: "l".into(),
                caller: Some(&HeaderMap::new()),
                trace: None,
                serializable,
            };
            let deadline = Instant::now() + Duration::from_secs(20);
            let granted = freshness.authorize(&authorization, deadline).await;
            granted.map(|proof| proof.header.revision)
        })
    }
}

impl Held {
    /// The only range of a transaction, which is in the branch that is not taken; whether it is serializable.
    fn asks_for_the_right(&self) -> bool {
        assert!(self.path.ends_with("/Txn"), "{}", self.path);
        let request = TxnRequest::decode(self.message.clone()).unwrap();
        // What is not in our own definition (compares, a success branch) would be lost by encoding again.
        assert_eq!(request.encode_to_vec(), self.message);
        let [operation] = &request.failure[..] else {
            panic!("one range: {request:?}");
        };
        let range = operation.request_range.as_ref().unwrap();
        assert_eq!((&range.key[..], &range.range_end[..]), (&b"k"[..], &b"l"[..]));
        range.serializable
    }
}

#[tokio::test]
async fn every_authorisation_is_a_call_of_its_own_and_a_refusal_says_nothing_of_others() {
    let mut bench = bench().await;
    let (one, other) = (bench.authorize(false), bench.authorize(false));
    let (first, second) = (bench.check().await, bench.check().await);
    assert!(!first.asks_for_the_right() && !second.asks_for_the_right());
    first.answer(fake::range_at(1, 5, 2));
    second.answer(Err((7, "etcdserver: permission denied")));
    let results = [one.await.unwrap(), other.await.unwrap()];
    assert!(
        results.contains(&Ok(5)) && results.contains(&Err(Reason::Auth)),
        "{results:?}"
    );
    assert_eq!(
        bench.freshness.cluster_state.auth(),
        Auth::Unknown,
        "what somebody may do tells nothing of nobody"
    );
    let read = bench.read();
    bench.check().await.answer(fake::range_at(1, 5, 2));
    read.await.unwrap().unwrap();
    assert_eq!(bench.freshness.cluster_state.auth(), Auth::Off);
}

#[tokio::test]
async fn an_authorisation_is_a_quorum_check_too() {
    let mut bench = bench().await;
    let asked = bench.authorize(false);
    bench.check().await.answer(fake::range_at(1, 10, 2));
    assert_eq!(asked.await.unwrap(), Ok(10));
    let asked = bench.authorize(false);
    bench.check().await.answer(Err((14, "etcdserver: no leader")));
    bench.check().await.answer(fake::range_at(1, 9, 2));
    assert_eq!(
        asked.await.unwrap(),
        Err(Reason::HistoryReplaced),
        "after another attempt"
    );
    assert_eq!(bench.replaced.load(Ordering::SeqCst), 1);
    let asked = bench.authorize(false);
    bench
        .check()
        .await
        .answer(Err((8, "etcdserver: too many requests")));
    assert_eq!(
        asked.await.unwrap(),
        Err(Reason::CheckFailed),
        "no second attempt"
    );
}

#[tokio::test]
async fn a_serializable_authorisation_may_lag_once_the_members_history_is_known() {
    let mut bench = bench().await;
    let asked = bench.authorize(true);
    let held = bench.check().await;
    assert!(
        !held.asks_for_the_right(),
        "the connection's history is not known yet"
    );
    held.answer(fake::range_at(1, 10, 2));
    assert_eq!(asked.await.unwrap(), Ok(10));
    let asked = bench.authorize(true);
    let held = bench.check().await;
    assert!(held.asks_for_the_right());
    held.answer(fake::range_at(1, 8, 2));
    assert_eq!(asked.await.unwrap(), Ok(8));
    assert_eq!(bench.replaced.load(Ordering::SeqCst), 0, "a member that lags");
}
