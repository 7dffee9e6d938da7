use std::{collections::BTreeMap, ops::ControlFlow, sync::mpsc, thread};

use etcd_store::cache::{Change, Entry, HistoryLimits, Rebuild, Snapshot, testing::KeyValue};
use etcd_wire::grpc::hub::HubHistory;
use rangecache_base::telemetry::{Telemetry, state_changes::ChangeKind};

use super::*;
use crate::lineage::Transition;

/// Bound on what must happen at once.
const SOON: Duration = Duration::from_secs(20);
/// Revision of the load.
const LOADED: i64 = 10;

type Model = BTreeMap<Vec<u8>, i64>;

fn mirror() -> Arc<Mirror> {
    let mirror = Mirror::new(Scope::prefix(b""), Arc::default(), &Telemetry::default());
    Arc::new(mirror)
}

fn entry(key: usize, revision: i64) -> Entry {
    KeyValue::new(format!("/k/{key:04}"), revision, "value").entry()
}

/// Fills the mirror with keys of `revision` and puts it in service.
fn load(mirror: &Mirror, revision: i64) {
    let tree = Tree::from_sorted((0..500).map(|key| entry(key, revision)));
    let store = Store::new(tree, revision, HistoryLimits::default(), mirror.now());
    let epoch = mirror.epoch();
    mirror.fill(epoch, store).unwrap();
    mirror.put_in_service(epoch).unwrap();
}

fn put(mirror: &Mirror, key: usize, revision: i64) {
    let changes = vec![Change::put(entry(key, revision))];
    mirror.apply(mirror.epoch(), changes, revision).unwrap();
}

/// A mirror in service with revisions 11 to `last`, which put one key each.
fn mirror_up_to(last: i64) -> Arc<Mirror> {
    let mirror = mirror();
    load(&mirror, LOADED);
    for revision in LOADED + 1..=last {
        put(&mirror, usize::try_from(revision).unwrap() % 7, revision);
    }
    mirror
}

#[test]
fn changes_of_service_are_recorded_once_with_revision_and_reason() {
    let telemetry = Telemetry::default();
    let mirror = Mirror::new(Scope::prefix(b""), Arc::default(), &telemetry);
    load(&mirror, LOADED);
    put(&mirror, 1, LOADED + 1);
    // Each attempt to resume that fails loses the feed again.
    mirror.lose_feed(mirror.epoch(), false).unwrap();
    mirror.lose_feed(mirror.epoch(), false).unwrap();
    mirror.put_in_service(mirror.epoch()).unwrap();
    mirror.put_in_service(mirror.epoch()).unwrap();
    mirror.replace_history(0);
    let changes = telemetry.state_changes.list();
    let changes: Vec<_> = changes
        .iter()
        .map(|change| (change.kind, change.details.as_str()))
        .collect();
    assert_eq!(
        changes,
        [
            (ChangeKind::MirrorInService, "revision 10"),
            (ChangeKind::MirrorOutOfService, "feed_lost"),
            (ChangeKind::MirrorInService, "revision 11"),
            (ChangeKind::MirrorOutOfService, "history_replaced"),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn mirror_without_its_feed_is_waited_for_and_any_other_is_not() {
    let mirror = mirror_up_to(12);
    let soon = || Instant::now() + SOON;
    assert_eq!(mirror.resumed(soon()).await, Ok(12));
    mirror.lose_feed(mirror.epoch(), false).unwrap();
    assert_eq!(mirror.resumed(soon()).await, Err(Reason::FeedLost));
    let waiting = tokio::spawn({
        let mirror = Arc::clone(&mirror);
        async move { mirror.resumed(Instant::now() + SOON).await }
    });
    tokio::task::yield_now().await;
    mirror.put_in_service(mirror.epoch()).unwrap();
    assert_eq!(waiting.await.unwrap(), Ok(12));
    mirror.replace_history(0);
    assert_eq!(mirror.resumed(soon()).await, Err(Reason::HistoryReplaced));
}

/// The mod_revision of every key.
fn keys(tree: &Tree) -> Model {
    let mut keys = Model::new();
    tree.for_each_from(0, |entry| {
        keys.insert(entry.key().to_vec(), entry.mod_revision());
        ControlFlow::Continue(())
    });
    keys
}

/// The keys of [`mirror_up_to`] at `revision`.
fn expected_at(revision: i64) -> Model {
    let mut keys: Model = (0..500)
        .map(|key| (entry(key, 1).key().to_vec(), LOADED))
        .collect();
    for put in LOADED + 1..=revision {
        keys.insert(entry(usize::try_from(put).unwrap() % 7, 1).key().to_vec(), put);
    }
    keys
}

fn past_of(mirror: &Mirror) -> Arc<PastRevisions> {
    Arc::clone(&mirror.contents.lock().loaded.as_ref().unwrap().past)
}

/// A read of a past revision in a thread of its own, held inside its rebuild until released.
struct HeldRead {
    release: mpsc::Sender<()>,
    result: mpsc::Receiver<Result<Tree, ViewAtError>>,
}

impl HeldRead {
    fn start(mirror: &Arc<Mirror>, revision: i64) -> HeldRead {
        let (entered, is_entered) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let (done, result) = mpsc::channel();
        let mirror = Arc::clone(mirror);
        thread::spawn(move || {
            let read = mirror.view_at_built_by(mirror.view().unwrap(), revision, |rebuild| {
                entered.send(()).unwrap();
                released.recv_timeout(SOON).unwrap();
                rebuild.run()
            });
            done.send(read).unwrap();
        });
        is_entered.recv_timeout(SOON).unwrap();
        HeldRead { release, result }
    }

    fn finish(self) -> Result<Tree, ViewAtError> {
        self.release.send(()).unwrap();
        self.result.recv_timeout(SOON).unwrap()
    }
}

/// Runs `action` in a thread of its own; fails if it is blocked.
fn soon(what: &str, action: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        action();
        done.send(()).unwrap();
    });
    assert!(
        is_done.recv_timeout(SOON).is_ok(),
        "{what} is blocked by a rebuild"
    );
}

#[test]
fn past_revisions_equal_a_model() {
    let mirror = mirror_up_to(400);
    // Twice: rebuilt, and then from memory.
    for revision in (LOADED..=400).chain((LOADED..=400).rev()) {
        let tree = mirror.view_at(revision).unwrap();
        assert_eq!(keys(&tree), expected_at(revision), "at {revision}");
    }
    assert_eq!(
        mirror.view_at(LOADED - 1).unwrap_err(),
        ViewAtError::Unavailable(AtError::Gone {
            revision: LOADED - 1,
            oldest: LOADED
        })
    );
    assert_eq!(
        mirror.view_at(401).unwrap_err(),
        ViewAtError::Unavailable(AtError::Future {
            revision: 401,
            current: 400
        })
    );
    assert!(past_of(&mirror).bytes() <= HistoryLimits::default().fraction_bytes());
}

#[test]
fn readers_of_many_past_revisions_hold_bounded_memory() {
    let mirror = mirror_up_to(400);
    let past = PastRevisions::new(0);
    let state = |revision| {
        let contents = mirror.contents.lock();
        let store = &contents.loaded.as_ref().unwrap().store;
        match store.snapshot_at(revision).unwrap() {
            Snapshot::Ready(_) => None,
            Snapshot::Rebuild(rebuild) => past.get_or_build(&rebuild, Rebuild::run),
        }
    };
    let held: Vec<Tree> = (LOADED..400).filter_map(state).collect();
    assert!(held.len() < 300, "{} states are held", held.len());
    assert!(state(399).is_none());
    drop(held);
    assert!(state(399).is_some(), "no reader holds another state");
}

#[test]
fn states_before_a_comparison_are_forgotten() {
    let mirror = mirror_up_to(60);
    mirror.forget_before(mirror.epoch(), 50).unwrap();
    assert_eq!(
        mirror.view_at(49).unwrap_err(),
        ViewAtError::Unavailable(AtError::Gone {
            revision: 49,
            oldest: 50
        })
    );
    for revision in 50..=60 {
        let tree = mirror.view_at(revision).unwrap();
        assert_eq!(keys(&tree), expected_at(revision), "at {revision}");
    }
    let log = mirror.observe(50, usize::MAX).log.unwrap();
    assert_eq!(log.complete_after, 50, "a watch from 50 on begins at etcd");
    assert!(mirror.anchor(mirror.epoch()).unwrap().unwrap().base.is_none());
}

#[test]
fn feed_is_not_blocked_while_a_past_revision_is_rebuilt() {
    let mirror = mirror_up_to(60);
    let read = HeldRead::start(&mirror, 40);
    let fed = Arc::clone(&mirror);
    soon("the feed", move || {
        put(&fed, 3, 61);
        fed.advance(fed.epoch(), 70).unwrap();
        fed.compacted(12);
        fed.age();
    });
    assert_eq!(mirror.revision(), Ok(70));
    assert_eq!(
        keys(&mirror.view_at(59).unwrap()),
        expected_at(59),
        "another revision"
    );
    assert_eq!(keys(&read.finish().unwrap()), expected_at(40));
}

#[test]
fn concurrent_reads_of_a_revision_share_one_rebuild() {
    let mirror = mirror_up_to(60);
    let first = HeldRead::start(&mirror, 40);
    let second = Arc::clone(&mirror);
    let second = thread::spawn(move || {
        second.view_at_built_by(second.view().unwrap(), 40, |_| panic!("built a second time"))
    });
    first.release.send(()).unwrap();
    let trees = [
        first.result.recv_timeout(SOON).unwrap().unwrap(),
        second.join().unwrap().unwrap(),
    ];
    assert_eq!(trees.map(|tree| keys(&tree)), [expected_at(40), expected_at(40)]);
}

#[test]
fn rebuilt_revision_of_a_replaced_history_is_not_served() {
    let mirror = mirror_up_to(60);
    mirror.view_at(45).unwrap();
    let read = HeldRead::start(&mirror, 40);
    mirror.replace_history(0);
    assert_eq!(
        mirror.view_at(45).unwrap_err(),
        ViewAtError::OutOfService(Reason::HistoryReplaced)
    );
    // The restored history has the same revisions, with other contents.
    load(&mirror, 30);
    for revision in 31..=60 {
        put(&mirror, 400, revision);
    }
    assert!(
        read.finish().is_err(),
        "the read began in the old history and ended in the new one"
    );
    for revision in [40, 45] {
        let new = keys(&mirror.view_at(revision).unwrap());
        assert_eq!(new.get(&b"/k/0400"[..]), Some(&revision));
        assert_eq!(new.get(&b"/k/0001"[..]), Some(&30));
    }
}

#[test]
fn dropped_contents_take_their_rebuilt_revisions_along() {
    let mirror = mirror_up_to(60);
    mirror.view_at(45).unwrap();
    let past = Arc::downgrade(&past_of(&mirror));
    mirror
        .drop_contents(
            mirror.epoch(),
            Reason::OverBudget,
            ReaderEnd::Dropped(Reason::OverBudget),
        )
        .unwrap();
    assert!(past.upgrade().is_none());
    assert_eq!(
        mirror.view_at(45).unwrap_err(),
        ViewAtError::OutOfService(Reason::OverBudget)
    );
}

#[test]
fn compaction_refuses_rebuilt_revisions_and_frees_them() {
    let mirror = mirror_up_to(400);
    for revision in [40, 300] {
        mirror.view_at(revision).unwrap();
    }
    mirror.age();
    let both = past_of(&mirror).bytes();
    mirror.compacted(200);
    assert_eq!(
        mirror.view_at(40).unwrap_err(),
        ViewAtError::Unavailable(AtError::Compacted {
            revision: 40,
            compacted: 200
        })
    );
    let left = past_of(&mirror).bytes();
    assert!(0 < left && left < both, "{left} of {both} bytes");
    assert_eq!(keys(&mirror.view_at(300).unwrap()), expected_at(300));
}

#[tokio::test(start_paused = true)]
async fn readers_do_not_wait_for_a_mirror_that_is_known_to_lag() {
    let mirror = mirror_up_to(LOADED);
    let timeout = Duration::from_secs(3);
    let reach = async |revision, timeout| {
        let began = Instant::now();
        let reached = mirror.reach(HistoryId::FIRST, revision, began + timeout).await;
        (reached.map(|(view, _)| view.revision), began.elapsed())
    };
    let short = Duration::from_millis(100);
    assert_eq!(reach(12, short).await, (Err(Reason::NotFresh), short));
    assert_eq!(
        reach(12, timeout).await,
        (Err(Reason::NotFresh), timeout),
        "a short deadline shows nothing"
    );
    assert_eq!(reach(11, timeout).await, (Err(Reason::NotFresh), Duration::ZERO));
    assert_eq!(reach(LOADED, timeout).await, (Ok(LOADED), Duration::ZERO));
    assert_eq!(*mirror.wanted().borrow(), 12, "the feed is still asked for it");
    put(&mirror, 1, 11);
    assert_eq!(reach(12, timeout).await, (Err(Reason::NotFresh), Duration::ZERO));
    put(&mirror, 1, 12);
    assert_eq!(reach(12, timeout).await, (Ok(12), Duration::ZERO));
    assert_eq!(
        reach(13, timeout).await,
        (Err(Reason::NotFresh), timeout),
        "it has caught up: readers wait again"
    );
    // The new history is at a lower revision.
    mirror.replace_history(0);
    load(&mirror, LOADED);
    assert_eq!(reach(11, timeout).await, (Err(Reason::NotFresh), timeout));
}

#[tokio::test]
async fn late_reader_of_an_old_history_neither_waits_nor_makes_the_feed_wait() {
    let mirror = mirror_up_to(60);
    let cluster_state = Arc::clone(&mirror.cluster_state);
    let wanted = mirror.wanted();
    mirror.want(HistoryId::FIRST, 70);
    assert_eq!(*wanted.borrow(), 70);
    assert_eq!(
        cluster_state.contradict(&cluster_state.before_check()),
        Transition::Replaced
    );
    let deadline = Instant::now() + SOON;
    assert_eq!(
        mirror.reach(HistoryId::of(1), 20, deadline).await.unwrap_err(),
        Reason::HistoryReplaced,
        "the mirror is not dropped yet"
    );
    mirror.replace_history(0);
    assert_eq!(*wanted.borrow(), 0);
    mirror.want(HistoryId::FIRST, 1_000);
    assert_eq!(*wanted.borrow(), 0, "a revision of the old history");
    mirror
        .drop_contents(
            mirror.epoch(),
            Reason::Loading,
            ReaderEnd::Dropped(Reason::Loading),
        )
        .unwrap();
    load(&mirror, 20);
    mirror.want(HistoryId::FIRST, 1_000);
    assert_eq!(*wanted.borrow(), 0, "a revision of the old history");
    assert_eq!(
        mirror.reach(HistoryId::FIRST, 1_000, deadline).await.unwrap_err(),
        Reason::HistoryReplaced
    );
    mirror.want(HistoryId::of(1), 21);
    assert_eq!(*wanted.borrow(), 21);
    assert_eq!(
        mirror
            .reach(HistoryId::of(1), 20, deadline)
            .await
            .unwrap()
            .0
            .revision,
        20
    );
    assert_eq!(cluster_state.known(), 20);
}

#[test]
fn oldest_numbers_are_forgotten_and_none_is_kept_twice() {
    let of_hub = |number| Lineage::Hub(HubHistory { instance: 1, number });
    let mut lineages = Lineages::default();
    for number in [0, 0].into_iter().chain(1..MAX_LINEAGES as u64) {
        lineages.note(of_hub(number));
    }
    assert!((0..MAX_LINEAGES as u64).all(|number| lineages.contains(of_hub(number))));
    lineages.note(of_hub(MAX_LINEAGES as u64));
    assert!(!lineages.contains(of_hub(0)) && lineages.contains(of_hub(1)));
}
