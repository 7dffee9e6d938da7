use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use etcd_wire::etcdserverpb::{RangeRequest, TxnRequest};
use http::HeaderMap;
use prost::Message as _;
use rangecache_upstream::Credentials;
use rangecache_upstream::fake::{self, Answer, FakeEtcd};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::*;

/// A check that has arrived at the fake etcd and waits for its response.
struct Held {
    path: String,
    message: Bytes,
    answer: tokio::sync::oneshot::Sender<Answer>,
}

struct Bench {
    freshness: Arc<Freshness>,
    checks: mpsc::UnboundedReceiver<Held>,
    replaced: Arc<AtomicUsize>,
    /// Number of comparisons of contents.
    compared: Arc<AtomicUsize>,
    /// Number of the next statuses that come from another member, which lags.
    lagging_statuses: Arc<AtomicU64>,
    /// Raft index in the fake etcd's status.
    raft_index: Arc<AtomicU64>,
    /// Revisions below which a check found everything compacted.
    compacted: Arc<Mutex<Vec<i64>>>,
    etcd: FakeEtcd,
    stop: DropGuard,
}

/// Flags with this `--freshness-timeout`.
fn live(freshness_timeout: &str) -> Live<MirrorConfig> {
    crate::testing::live(&["--freshness-timeout", freshness_timeout])
}

/// A Freshness with a fake etcd that responds to each check when the test releases it. No round is slow, however busy the
/// machine: a check is sent once the one before it was answered.
async fn bench() -> Bench {
    bench_with(Duration::from_secs(3600)).await
}

async fn bench_with(slow_round: Duration) -> Bench {
    let (arrived, checks) = mpsc::unbounded_channel();
    let raft_index = Arc::new(AtomicU64::new(0));
    let in_status = Arc::clone(&raft_index);
    let lagging_statuses = Arc::new(AtomicU64::new(0));
    let lagging = Arc::clone(&lagging_statuses);
    let etcd = FakeEtcd::start(move |path, message| {
        let (arrived, in_status) = (arrived.clone(), Arc::clone(&in_status));
        let lagging = Arc::clone(&lagging);
        async move {
            if path.ends_with("/Status") {
                let others = lagging.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
                if others.is_ok() {
                    return fake::status_of_member(2, "3.7.3", 1);
                }
                return fake::status_of("3.7.3", in_status.load(Ordering::SeqCst));
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
        &rangecache_edge::tls::Connector::plaintext(),
        true,
        Credentials::new(None),
        &tasks,
        &stop,
    );
    let replaced = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&replaced);
    let compared = Arc::new(AtomicUsize::new(0));
    let comparisons = Arc::clone(&compared);
    let compacted = Arc::new(Mutex::new(Vec::new()));
    let cluster_state = Arc::new(ClusterState::default());
    let (found, state) = (Arc::clone(&compacted), Arc::clone(&cluster_state));
    let findings = Findings {
        replaced: Box::new(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
        }),
        compacted: Box::new(move |history, revision| {
            state.note_compacted(history, revision);
            found.lock().push(revision);
        }),
        continues: Box::new(move |connection, history, lineage| {
            comparisons.fetch_add(1, Ordering::SeqCst);
            connection.set_history(history.number(), lineage);
            Box::pin(std::future::ready(true))
        }),
    };
    let mut freshness = Freshness::new(
        upstream,
        cluster_state,
        Arc::default(),
        live("20s"),
        tasks,
        stop.clone(),
        findings,
    );
    freshness.slow_round = slow_round;
    let freshness = Arc::new(freshness);
    Bench {
        freshness,
        checks,
        replaced,
        compared,
        raft_index,
        lagging_statuses,
        compacted,
        etcd,
        stop: stop.drop_guard(),
    }
}

impl Bench {
    fn read(&self) -> tokio::task::JoinHandle<Result<i64, Reason>> {
        let read = self.read_at(0);
        tokio::spawn(async move {
            read.await.unwrap().map_err(|unproven| match unproven {
                Unproven::For(reason) => reason,
                Unproven::Compacted(_) => panic!("a read of the newest state: {unproven:?}"),
            })
        })
    }

    /// A read that has joined a round when this returns.
    fn read_at(&self, revision: i64) -> tokio::task::JoinHandle<Result<i64, Unproven>> {
        let freshness = Arc::clone(&self.freshness);
        joined(async move {
            let proof = freshness.prove_at(revision, None).await?;
            Ok(proof.header.revision)
        })
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
async fn read_during_a_check_in_flight_gets_the_next_check() {
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
async fn waiting_reads_share_one_check() {
    // Reads gather for as long as the test takes, however slow the machine is.
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

/// Polls once what then waits for a round.
fn joined<T: Send + 'static>(
    joining: impl Future<Output = T> + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    let mut joining = Box::pin(joining);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(joining.as_mut().poll(&mut context).is_pending());
    tokio::spawn(joining)
}

/// Revision that the periodic check of a leaf proves, which has joined a round when this returns.
fn check_of_leaf(bench: &Bench) -> tokio::task::JoinHandle<Option<i64>> {
    let freshness = Arc::clone(&bench.freshness);
    joined(async move { Some(freshness.prove_with_others().await.ok()?.header.revision) })
}

#[tokio::test]
async fn periodic_checks_of_leaves_wait_for_the_next_check_that_a_read_needs() {
    let mut bench = bench().await;
    let of_leaves = [(); 3].map(|()| check_of_leaf(&bench));
    tokio::time::sleep(SLOW_ROUND).await;
    assert!(bench.checks.try_recv().is_err(), "nothing needs a check yet");
    let read = bench.read();
    let in_flight = bench.check().await;
    let late = check_of_leaf(&bench);
    in_flight.answer(fake::range_at(1, 5, 2));
    assert_eq!(read.await.unwrap(), Ok(5));
    for of_leaf in of_leaves {
        assert_eq!(of_leaf.await.unwrap(), Some(5));
    }
    // The check was sent before this one arrived, which makes one by itself after `PROBE_WAIT`.
    bench.check().await.answer(fake::range_at(1, 6, 2));
    assert_eq!(late.await.unwrap(), Some(6));
    assert!(bench.checks.try_recv().is_err());
}

/// The timeout of a round begins with the first read that needs it, not with the check of a leaf that waits in it.
#[tokio::test]
async fn read_in_a_round_in_which_a_leaf_waits_has_all_of_its_timeout() {
    let round = Round::default();
    round.state.lock().add_read(0);
    tokio::time::pause();
    tokio::time::advance(PROBE_WAIT).await;
    round.state.lock().require();
    let required = Instant::now();
    tokio::time::advance(PROBE_WAIT).await;
    round.state.lock().require();
    assert_eq!(round.required_since(), required);
}

#[tokio::test]
async fn lower_revision_or_term_or_another_cluster_is_reported_as_replaced_history() {
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
async fn check_at_a_hub_needs_its_proof_and_a_comparison_in_each_history_of_each_hub() {
    let mut bench = bench().await;
    for (history, expected, comparisons) in [
        ("0a", Err(Reason::CheckFailed), 0),
        ("0a.1.5000", Ok(10), 1),
        ("0a.1.5000", Ok(10), 1),
        ("0a", Err(Reason::CheckFailed), 1),
        ("0a.1.5000", Ok(10), 1),
        ("0a.2.5000", Ok(10), 2),
        ("0b.2.5000", Ok(10), 3),
        // A balancer sends each call to another hub.
        ("0a.2.5000", Ok(10), 3),
        ("0b.2.5000", Ok(10), 3),
        ("0b.3.5000", Ok(10), 4),
    ] {
        *bench.etcd.history.lock() = Some(history);
        let read = bench.read();
        bench.check().await.answer(fake::range_at(1, 10, 2));
        let compared = || bench.compared.load(Ordering::SeqCst);
        assert_eq!(
            (read.await.unwrap(), compared()),
            (expected, comparisons),
            "{history}"
        );
    }
    assert_eq!(bench.replaced.load(Ordering::SeqCst), 0);
}

/// A member that has installed a snapshot and applied no entry since reports an old term.
#[tokio::test]
async fn lower_term_with_the_same_raft_log_is_no_replaced_history() {
    let mut bench = bench().await;
    for (header, raft_index, expected) in [
        ((1, 10, 5), 30, Ok(10)),
        ((1, 10, 4), 30, Ok(10)),
        ((1, 12, 5), 0, Ok(12)),
        ((1, 300, 2), 310, Err(Reason::HistoryReplaced)),
    ] {
        bench.raft_index.store(raft_index, Ordering::SeqCst);
        let read = bench.read();
        let (cluster_id, revision, raft_term) = header;
        let check = fake::range_at(cluster_id, revision, raft_term);
        bench.check().await.answer(check);
        assert_eq!(read.await.unwrap(), expected, "{header:?}");
        let state = &bench.freshness.cluster_state;
        state.note_raft_index(&state.before_check(), 30, 10);
    }
    assert_eq!(bench.replaced.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn check_covers_what_one_of_the_two_connections_has_seen_as_well() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    for (check_opened, sent, opened, began, expected) in [
        (0, 20, 5, 10, true),
        (9, 20, 5, 10, true),
        (11, 20, 5, 10, false),
        (19, 20, 0, 10, false),
        (19, 20, 15, 30, true),
        (19, 20, 25, 30, false),
    ] {
        let proof = Proof {
            header: ResponseHeader::default(),
            history: HistoryId::FIRST,
            at: 0,
            sent: at(sent),
            connection_opened: at(check_opened),
        };
        let covers = proof.covers(at(opened), at(began));
        assert_eq!(covers, expected, "{check_opened} {sent} {opened} {began}");
    }
}

/// A balancer may send a check and the status after it to two members.
#[tokio::test]
async fn raft_index_of_another_member_than_the_checks_is_not_compared() {
    let mut bench = bench().await;
    let state = Arc::clone(&bench.freshness.cluster_state);
    state.note_raft_index(&state.before_check(), 100, 10);
    bench.raft_index.store(101, Ordering::SeqCst);
    bench.lagging_statuses.store(2, Ordering::SeqCst);
    let read = bench.read();
    bench.check().await.answer(fake::range_at(1, 10, 5));
    assert_eq!(read.await.unwrap(), Ok(10));
    assert_eq!(bench.replaced.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn reads_do_not_wait_for_a_check_after_the_process_was_told_to_stop() {
    let mut bench = bench().await;
    let reads = [bench.read(), bench.read()];
    let _in_flight = bench.check().await;
    let late = bench.read();
    drop(bench.stop);
    for read in reads.into_iter().chain([late]) {
        assert_eq!(read.await.unwrap(), Err(Reason::CheckFailed));
    }
}

/// No check on a new connection proves anything before the connection's history was compared.
#[tokio::test]
async fn concurrent_first_checks_on_a_connection_to_a_restored_etcd_all_fail() {
    let mut bench = bench().await;
    let state = Arc::clone(&bench.freshness.cluster_state);
    state.note_raft_index(&state.before_check(), 100, 10);
    bench.raft_index.store(250, Ordering::SeqCst);
    let reads = [bench.authorize(false), bench.authorize(false)];
    let checks = [bench.check().await, bench.check().await];
    for check in checks {
        check.answer(fake::range_at(1, 200, 2));
    }
    for read in reads {
        assert_eq!(read.await.unwrap(), Err(Reason::HistoryReplaced));
    }
    assert_eq!(
        bench.replaced.load(Ordering::SeqCst),
        1,
        "the mirrors are dropped once"
    );
    let read = bench.authorize(false);
    bench.check().await.answer(fake::range_at(1, 201, 2));
    assert_eq!(read.await.unwrap(), Ok(201), "in the new history");
}

#[tokio::test]
async fn failed_attempt_is_retried_and_refused_attempt_means_auth_is_on() {
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
async fn slow_check_does_not_delay_later_reads() {
    let mut bench = bench_with(SLOW_ROUND).await;
    let early = bench.read();
    let stuck = bench.check().await;
    let late = bench.read();
    bench.check().await.answer(fake::range_at(1, 8, 2));
    assert_eq!(late.await.unwrap(), Ok(8));
    stuck.answer(fake::range_at(1, 8, 2));
    assert_eq!(early.await.unwrap(), Ok(8));
}

#[tokio::test]
async fn single_read_after_a_large_round_is_not_delayed_for_long() {
    let mut bench = bench().await;
    let early = bench.read();
    let first = bench.check().await;
    let many: Vec<_> = (0..64).map(|_| bench.read()).collect();
    first.answer(fake::range_at(1, 5, 2));
    early.await.unwrap().unwrap();
    bench.check().await.answer(fake::range_at(1, 6, 2));
    for read in many {
        read.await.unwrap().unwrap();
    }
    let alone = bench.read();
    bench.check().await.answer(fake::range_at(1, 7, 2));
    assert_eq!(alone.await.unwrap(), Ok(7));
}

impl Bench {
    /// Requests permission to read `[k, l)`.
    fn authorize(&self, serializable: bool) -> tokio::task::JoinHandle<Result<i64, Reason>> {
        let freshness = Arc::clone(&self.freshness);
        tokio::spawn(async move {
            let authorization = Authorization {
                key: "k".into(),
                range_end: "l".into(),
                caller: Some(&HeaderMap::new()),
                trace: None,
                revision: 0,
                serializable,
            };
            let deadline = Instant::now() + Duration::from_secs(20);
            let granted = freshness.authorize(&authorization, deadline).await;
            granted.map(|proof| proof.header.revision).map_err(|unproven| {
                let Unproven::For(reason) = unproven else {
                    panic!("no revision was checked: {unproven:?}");
                };
                reason
            })
        })
    }
}

impl Held {
    /// Checks that the transaction has one range, in the branch that is not taken; returns whether it is serializable.
    fn is_serializable(&self) -> bool {
        assert!(self.path.ends_with("/Txn"), "{}", self.path);
        let request = TxnRequest::decode(self.message.clone()).unwrap();
        // Fields missing in our definition (compares, a success branch) would be lost by encoding again.
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
async fn authorizations_are_not_shared_and_a_refusal_leaves_auth_unknown() {
    let mut bench = bench().await;
    let (one, other) = (bench.authorize(false), bench.authorize(false));
    let (first, second) = (bench.check().await, bench.check().await);
    assert!(!first.is_serializable() && !second.is_serializable());
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
        "a refused caller does not show that auth is on"
    );
    let read = bench.read();
    bench.check().await.answer(fake::range_at(1, 5, 2));
    read.await.unwrap().unwrap();
    assert_eq!(bench.freshness.cluster_state.auth(), Auth::Off);
}

#[tokio::test]
async fn authorization_is_a_quorum_check() {
    let mut bench = bench().await;
    let authorized = bench.authorize(false);
    bench.check().await.answer(fake::range_at(1, 10, 2));
    assert_eq!(authorized.await.unwrap(), Ok(10));
    let authorized = bench.authorize(false);
    bench.check().await.answer(Err((14, "etcdserver: no leader")));
    bench.check().await.answer(fake::range_at(1, 9, 2));
    assert_eq!(
        authorized.await.unwrap(),
        Err(Reason::HistoryReplaced),
        "after another attempt"
    );
    assert_eq!(bench.replaced.load(Ordering::SeqCst), 1);
    let authorized = bench.authorize(false);
    bench
        .check()
        .await
        .answer(Err((8, "etcdserver: too many requests")));
    assert_eq!(
        authorized.await.unwrap(),
        Err(Reason::CheckFailed),
        "no second attempt"
    );
}

#[tokio::test]
async fn serializable_authorization_may_lag_once_the_connection_is_checked() {
    let mut bench = bench().await;
    let authorized = bench.authorize(true);
    let held = bench.check().await;
    assert!(
        !held.is_serializable(),
        "the connection's history is not known yet"
    );
    held.answer(fake::range_at(1, 10, 2));
    assert_eq!(authorized.await.unwrap(), Ok(10));
    let authorized = bench.authorize(true);
    let held = bench.check().await;
    assert!(held.is_serializable());
    held.answer(fake::range_at(1, 8, 2));
    assert_eq!(authorized.await.unwrap(), Ok(8));
    assert_eq!(bench.replaced.load(Ordering::SeqCst), 0, "a lagging member");
}

const COMPACTED: Answer = Err((11, "etcdserver: mvcc: required revision has been compacted"));
const FUTURE: Answer = Err((11, "etcdserver: mvcc: required revision is a future revision"));

impl Held {
    /// Revision at which the check reads.
    fn revision(&self) -> i64 {
        assert!(self.path.ends_with("/Range"), "{}", self.path);
        RangeRequest::decode(self.message.clone()).unwrap().revision
    }
}

/// A bench at revision 10, with a check in flight, so that reads gather, however long the test takes.
async fn gathering() -> (Bench, Held) {
    let mut bench = bench().await;
    bench.freshness.cluster_state.current().note_known(10);
    drop(bench.read());
    let in_flight = bench.check().await;
    (bench, in_flight)
}

#[tokio::test]
async fn past_reads_share_one_check_at_their_lowest_revision() {
    let (mut bench, in_flight) = gathering().await;
    let reads = [5, 3, 0, 10, -1].map(|revision| bench.read_at(revision));
    in_flight.answer(fake::range_at(1, 11, 2));
    let check = bench.check().await;
    assert_eq!(check.revision(), 3);
    check.answer(fake::range_at(1, 12, 2));
    for read in reads {
        assert_eq!(read.await.unwrap(), Ok(12));
    }
    assert!(bench.checks.try_recv().is_err(), "one check for all");
    let read = bench.read();
    let check = bench.check().await;
    assert_eq!(check.revision(), 0, "the next round has no past read");
    check.answer(fake::range_at(1, 12, 2));
    read.await.unwrap().unwrap();
}

#[tokio::test]
async fn compacted_revision_ends_its_reads_and_the_others_get_the_next_check() {
    let (mut bench, in_flight) = gathering().await;
    let compacted = [3, 3].map(|revision| bench.read_at(revision));
    let others = [5, 0, 7].map(|revision| bench.read_at(revision));
    in_flight.answer(fake::range_at(1, 11, 2));
    let check = bench.check().await;
    assert_eq!(check.revision(), 3);
    check.answer(COMPACTED);
    for read in compacted {
        assert_eq!(read.await.unwrap(), Err(Unproven::Compacted(3)));
    }
    assert_eq!(*bench.compacted.lock(), [4]);
    let check = bench.check().await;
    assert_eq!(check.revision(), 5);
    check.answer(COMPACTED);
    let [five, newest, seven] = others;
    assert_eq!(five.await.unwrap(), Err(Unproven::Compacted(5)));
    let check = bench.check().await;
    assert_eq!(check.revision(), 7);
    check.answer(fake::range_at(1, 12, 2));
    assert_eq!((newest.await.unwrap(), seven.await.unwrap()), (Ok(12), Ok(12)));
}

#[tokio::test]
async fn revision_known_to_be_compacted_does_not_fail_the_check_of_others() {
    let (mut bench, in_flight) = gathering().await;
    bench.freshness.cluster_state.note_compacted(HistoryId::FIRST, 8);
    let (compacted, newest) = (bench.read_at(7), bench.read_at(0));
    in_flight.answer(fake::range_at(1, 11, 2));
    let check = bench.check().await;
    assert_eq!(check.revision(), 0);
    check.answer(fake::range_at(1, 12, 2));
    assert_eq!(compacted.await.unwrap(), Err(Unproven::Compacted(7)));
    assert_eq!(newest.await.unwrap(), Ok(12));
}

#[tokio::test]
async fn revision_not_known_yet_takes_a_check_that_it_is_reached_before_one_at_it() {
    let (mut bench, in_flight) = gathering().await;
    in_flight.answer(fake::range_at(1, 11, 2));
    let future = bench.read_at(20);
    let check = bench.check().await;
    assert_eq!(check.revision(), 0);
    check.answer(fake::range_at(1, 15, 2));
    assert_eq!(
        future.await.unwrap(),
        Ok(15),
        "below the revision: it is in the future"
    );
    let reached = bench.read_at(20);
    bench.check().await.answer(fake::range_at(1, 25, 2));
    let check = bench.check().await;
    assert_eq!(check.revision(), 20, "it may be compacted");
    check.answer(fake::range_at(1, 26, 2));
    assert_eq!(reached.await.unwrap(), Ok(26));
}

#[tokio::test]
async fn known_revision_in_the_future_of_etcd_is_a_replaced_history() {
    let (mut bench, in_flight) = gathering().await;
    let read = bench.read_at(9);
    in_flight.answer(fake::range_at(1, 11, 2));
    bench.check().await.answer(FUTURE);
    let check = bench.check().await;
    assert_eq!(check.revision(), 0, "for the newest revision");
    check.answer(fake::range_at(1, 8, 2));
    assert_eq!(read.await.unwrap(), Err(Unproven::For(Reason::HistoryReplaced)));
    assert_eq!(bench.replaced.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn authorization_at_a_past_revision_finds_its_compaction() {
    let (mut bench, in_flight) = gathering().await;
    in_flight.answer(fake::range_at(1, 11, 2));
    for (answer, expected) in [
        (fake::range_at(1, 12, 2), Ok(12)),
        (COMPACTED, Err(Unproven::Compacted(5))),
    ] {
        let freshness = Arc::clone(&bench.freshness);
        let authorized = tokio::spawn(async move {
            let authorization = Authorization {
                key: "k".into(),
                range_end: "l".into(),
                caller: Some(&HeaderMap::new()),
                trace: None,
                revision: 5,
                serializable: false,
            };
            let deadline = Instant::now() + Duration::from_secs(20);
            freshness.authorize(&authorization, deadline).await
        });
        let held = bench.check().await;
        let request = TxnRequest::decode(held.message.clone()).unwrap();
        let counted = request.success[0].request_range.as_ref().unwrap();
        assert_eq!(
            (&counted.key[..], counted.revision, counted.count_only),
            (&b"k"[..], 5, true)
        );
        let asked = request.failure[0].request_range.as_ref().unwrap();
        assert_eq!((&asked.range_end[..], asked.revision), (&b"l"[..], 0));
        held.answer(answer);
        let authorized = authorized.await.unwrap();
        assert_eq!(authorized.map(|proof| proof.header.revision), expected);
    }
}

#[tokio::test]
async fn metadata_of_clients_never_travels_with_quorum_checks() {
    let mut bench = bench().await;
    for _ in 0..2 {
        let read = bench.read();
        bench.check().await.answer(fake::range_at(1, 5, 2));
        read.await.unwrap().unwrap();
        let authorized = bench.authorize(false);
        bench.check().await.answer(fake::range_at(1, 5, 2));
        authorized.await.unwrap().unwrap();
    }
    let calls = bench.etcd.calls.lock();
    let connections = |method: &str| -> BTreeSet<u64> {
        let of_method = calls.iter().filter(|(_, path, _)| path.ends_with(method));
        of_method.map(|(connection, ..)| *connection).collect()
    };
    let (checks, authorizations) = (connections("/Range"), connections("/Txn"));
    assert!(!checks.is_empty() && !authorizations.is_empty());
    assert!(
        checks.is_disjoint(&authorizations),
        "{checks:?} {authorizations:?}"
    );
}
