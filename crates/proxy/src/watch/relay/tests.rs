use std::time::Duration;

use super::*;
use crate::watch::request::Options;

fn create(watch_id: i64, start_revision: i64) -> Create {
    Create {
        key: "k".into(),
        start_revision,
        watch_id,
        ..Create::default()
    }
}

fn carried(id: i64, through: i64) -> Carried {
    Carried {
        id,
        create: create(id, 0),
        through,
        quiet_since: None,
    }
}

fn head(watch_id: i64, revision: i64) -> Head {
    Head {
        cluster_id: 1,
        revision,
        watch_id,
        ..Head::default()
    }
}

fn created(watch_id: i64) -> Head {
    Head {
        created: true,
        ..head(watch_id, 50)
    }
}

fn events(watch_id: i64, first: i64) -> Head {
    Head {
        first_event: Some(first),
        ..head(watch_id, first)
    }
}

fn fragment(watch_id: i64, first: i64) -> Head {
    Head {
        fragment: true,
        ..events(watch_id, first)
    }
}

fn progress(revision: i64) -> Head {
    head(NO_WATCHER, revision)
}

/// Two watchers from memory, 0 with everything up to 40 and 7 up to 45, which etcd has created again.
fn relay() -> Relay {
    let watchers = vec![carried(7, 45), carried(0, 40)];
    let mut relay = Relay::new(Ids::default(), watchers, BTreeSet::new(), 45);
    let creates = relay.creates().into_iter();
    let order: Vec<_> = creates.map(|create| create.watch_id).collect();
    for id in order {
        assert!(!relay.accepts_request());
        assert_eq!(
            relay.response(&created(id)),
            RelayAction::Drop,
            "created is not relayed"
        );
    }
    assert!(relay.accepts_request());
    relay
}

#[test]
fn events_that_the_client_has_from_memory_are_dropped() {
    let mut relay = relay();
    assert_eq!(relay.response(&events(0, 39)), RelayAction::DropThrough(40));
    assert_eq!(relay.response(&events(0, 40)), RelayAction::DropThrough(40));
    assert_eq!(
        relay.response(&events(0, 41)),
        RelayAction::Pass,
        "P + 1 is etcd's"
    );
    assert_eq!(relay.response(&events(7, 45)), RelayAction::DropThrough(45));
    assert_eq!(relay.response(&events(7, 46)), RelayAction::Pass);
    assert_eq!(relay.response(&events(9, 46)), RelayAction::End, "for no watcher");
}

#[test]
fn fragments_below_the_fence_are_dropped_one_by_one() {
    let mut relay = relay();
    assert_eq!(relay.response(&fragment(0, 39)), RelayAction::DropThrough(40));
    assert_eq!(relay.response(&events(0, 39)), RelayAction::DropThrough(40));
    assert_eq!(relay.response(&fragment(0, 41)), RelayAction::Pass);
    assert_eq!(relay.response(&fragment(0, 41)), RelayAction::Pass);
    assert_eq!(relay.response(&events(0, 41)), RelayAction::Pass);
    assert_eq!(relay.response(&fragment(7, 50)), RelayAction::Pass);
    assert_eq!(
        relay.response(&events(0, 51)),
        RelayAction::End,
        "nothing comes between fragments"
    );
}

#[test]
fn progress_below_what_the_client_has_is_dropped() {
    let mut relay = relay();
    relay.request(&WatchRequest::Progress);
    assert_eq!(relay.response(&progress(44)), RelayAction::Drop);
    relay.request(&WatchRequest::Progress);
    assert_eq!(relay.response(&progress(45)), RelayAction::Pass);
    assert_eq!(relay.response(&progress(46)), RelayAction::Drop, "none is owed");
    assert_eq!(relay.response(&head(7, 44)), RelayAction::Drop, "periodic");
    assert_eq!(relay.response(&head(7, 45)), RelayAction::Pass);
}

#[test]
fn wrong_id_or_one_more_created_ends_the_stream() {
    let mut wrong = Relay::new(Ids::default(), vec![carried(7, 45)], BTreeSet::new(), 0);
    assert_eq!(wrong.response(&created(8)), RelayAction::End);
    assert_eq!(relay().response(&created(3)), RelayAction::End);
}

#[test]
fn refusal_for_rights_ends_the_stream_and_any_other_cancels_the_watcher() {
    let refused = |reason: &str| {
        let mut relay = Relay::new(Ids::default(), vec![carried(7, 45)], BTreeSet::new(), 0);
        relay.response(&Head {
            canceled: true,
            cancel_reason: reason.to_owned(),
            ..created(NO_WATCHER)
        })
    };
    assert_eq!(refused("etcdserver: permission denied"), RelayAction::End);
    assert_eq!(refused("etcdserver: invalid auth token"), RelayAction::End);
    let expected = RelayAction::Cancel {
        id: 7,
        reason: "mvcc: required revision has been compacted".to_owned(),
        compact_revision: 0,
    };
    assert_eq!(refused("mvcc: required revision has been compacted"), expected);
}

#[test]
fn creates_get_the_ids_that_the_client_expects() {
    let mut ids = Ids::default();
    assert_eq!(ids.allocate(0, |_| false), Some(0));
    assert_eq!(ids.allocate(0, |_| false), Some(1));
    let mut relay = Relay::new(ids, vec![carried(1, 45)], BTreeSet::new(), 45);
    assert_eq!(relay.response(&created(1)), RelayAction::Drop);
    let auto = WatchRequest::Create(create(0, 0));
    assert_eq!(relay.request(&auto), Some(2), "0 and 1 were given before");
    assert!(!relay.accepts_request(), "one create at a time");
    let refusal = Head {
        canceled: true,
        ..created(NO_WATCHER)
    };
    assert_eq!(relay.response(&refusal), RelayAction::Pass);
    assert_eq!(relay.request(&auto), Some(2), "a refused create consumes no id");
    assert_eq!(relay.response(&created(2)), RelayAction::Pass);
    assert_eq!(relay.request(&WatchRequest::Create(create(9, 0))), Some(9));
    assert_eq!(relay.response(&created(9)), RelayAction::Pass);
    assert_eq!(relay.request(&auto), Some(3));
}

#[test]
fn first_id_is_left_to_etcd() {
    let mut relay = Relay::new(Ids::default(), Vec::new(), BTreeSet::new(), 0);
    assert_eq!(relay.request(&WatchRequest::Create(create(0, 0))), Some(0));
    assert_eq!(relay.response(&created(0)), RelayAction::Pass);
}

#[test]
fn stream_returns_at_a_barrier() {
    let mut relay = relay();
    assert!(relay.may_return(|_| true));
    assert!(
        !relay.may_return(|create| create.watch_id != 7),
        "all watchers or none"
    );
    relay.await_barrier();
    assert!(!relay.accepts_request(), "requests wait");
    assert_eq!(relay.response(&events(0, 48)), RelayAction::Pass);
    let barrier = relay.response(&progress(60));
    assert_eq!(
        barrier,
        RelayAction::Barrier {
            revision: 60,
            is_owed: false
        }
    );
    assert!(!relay.accepts_request(), "requests wait for what follows");
    relay.stay();
    assert!(relay.accepts_request());
    let through: Vec<_> = relay
        .carried(60)
        .into_iter()
        .map(|watcher| (watcher.id, watcher.through))
        .collect();
    assert_eq!(through, [(0, 60), (7, 60)]);
}

#[test]
fn watcher_of_the_future_returns_before_its_start() {
    let mut relay = Relay::new(Ids::default(), Vec::new(), BTreeSet::new(), 0);
    relay.request(&WatchRequest::Create(create(0, 90)));
    relay.response(&created(0));
    assert_eq!(relay.carried(60)[0].through, 89);
}

/// etcd before 3.5.24 and 3.6.6 creates it.
#[test]
fn watcher_of_the_lowest_start_revision_returns() {
    let mut relay = Relay::new(Ids::default(), Vec::new(), BTreeSet::new(), 0);
    relay.request(&WatchRequest::Create(create(0, i64::MIN)));
    relay.response(&created(0));
    assert_eq!(relay.carried(60)[0].through, 60);
}

#[test]
fn stream_stays_while_something_is_incomplete() {
    let mut relay = relay();
    relay.request(&WatchRequest::Create(create(0, 0)));
    assert!(!relay.may_return(|_| true), "a create is unanswered");
    relay.response(&created(1));
    assert!(relay.may_return(|_| true));
    relay.response(&fragment(1, 70));
    assert!(!relay.may_return(|_| true), "a response is incomplete");
    relay.response(&events(1, 70));
    assert!(relay.may_return(|_| true));
    let compacted = Head {
        canceled: true,
        compact_revision: 60,
        ..head(7, 0)
    };
    assert_eq!(relay.response(&compacted), RelayAction::Pass);
    assert!(!relay.may_return(|_| true), "etcd sends no progress");
    let cancel = Head {
        canceled: true,
        ..head(7, 70)
    };
    assert_eq!(relay.response(&cancel), RelayAction::Pass);
    assert!(relay.may_return(|_| true));
}

#[test]
fn owed_progress_is_passed_at_the_barrier_too() {
    let mut relay = relay();
    relay.request(&WatchRequest::Progress);
    relay.await_barrier();
    let barrier = RelayAction::Barrier {
        revision: 60,
        is_owed: true,
    };
    assert_eq!(relay.response(&progress(60)), barrier);
    assert!(
        !relay.accepts_request(),
        "a create would be lost with etcd's stream if it were sent before the client has the progress"
    );
    relay.stay();
    assert_eq!(
        relay.response(&progress(61)),
        RelayAction::Drop,
        "the other one is not owed"
    );
    relay.await_barrier();
    relay.stay();
    assert!(relay.accepts_request());
}

#[test]
fn watcher_that_memory_has_cancelled_keeps_its_id_and_mutes_progress() {
    let mut ids = Ids::default();
    assert_eq!(ids.allocate(0, |_| false), Some(0));
    let mut relay = Relay::new(ids, Vec::new(), BTreeSet::from([1]), 0);
    assert_eq!(relay.request(&WatchRequest::Create(create(0, 0))), Some(2));
    assert_eq!(relay.response(&created(2)), RelayAction::Pass);
    relay.request(&WatchRequest::Progress);
    assert_eq!(relay.response(&progress(50)), RelayAction::Drop);
    relay.release(1);
    relay.request(&WatchRequest::Progress);
    assert_eq!(relay.response(&progress(50)), RelayAction::Pass);
}

#[test]
fn barrier_is_not_older_than_a_watcher_or_an_event() {
    let mut relay = relay();
    relay.request(&WatchRequest::Create(create(0, 0)));
    let since = Head {
        revision: 70,
        ..created(1)
    };
    assert_eq!(relay.response(&since), RelayAction::Pass);
    relay.await_barrier();
    let late = "of an earlier request";
    assert_eq!(relay.response(&progress(69)), RelayAction::Drop, "{late}");
    assert_eq!(relay.response(&events(0, 72)), RelayAction::Pass);
    assert_eq!(relay.response(&progress(71)), RelayAction::Drop, "{late}");
    let barrier = relay.response(&progress(72));
    assert!(
        matches!(barrier, RelayAction::Barrier { revision: 72, .. }),
        "{barrier:?}"
    );
}

#[test]
fn barrier_is_not_a_response_to_a_request_before_a_watcher_of_the_past() {
    let mut relay = relay();
    relay.request(&WatchRequest::Progress);
    relay.request(&WatchRequest::Create(create(0, 30)));
    let of_70 = Head {
        revision: 70,
        ..created(1)
    };
    assert_eq!(
        relay.response(&of_70),
        RelayAction::Pass,
        "it overtakes the progress"
    );
    relay.await_barrier();
    assert_eq!(
        relay.response(&progress(70)),
        RelayAction::Pass,
        "watcher 1 has nothing yet, as at etcd"
    );
    assert_eq!(relay.response(&events(1, 30)), RelayAction::Pass);
    let barrier = relay.response(&progress(70));
    assert!(
        matches!(barrier, RelayAction::Barrier { revision: 70, .. }),
        "there was one request before the watcher: {barrier:?}"
    );
}

#[test]
fn progress_of_a_return_that_was_given_up_is_not_a_response_to_a_later_request() {
    let of_70 = |id| Head {
        revision: 70,
        ..created(id)
    };
    let mut relay = relay();
    relay.await_barrier();
    relay.stay();
    relay.request(&WatchRequest::Create(create(0, 30)));
    relay.request(&WatchRequest::Progress);
    assert_eq!(
        relay.response(&of_70(1)),
        RelayAction::Pass,
        "it overtakes the progress"
    );
    assert_eq!(relay.response(&progress(70)), RelayAction::Drop, "of the return");
    assert_eq!(relay.response(&events(1, 30)), RelayAction::Pass);
    assert_eq!(relay.response(&progress(70)), RelayAction::Pass, "of the client");

    let mut unanswered = self::relay();
    unanswered.await_barrier();
    unanswered.stay();
    unanswered.request(&WatchRequest::Create(create(0, 30)));
    unanswered.request(&WatchRequest::Progress);
    assert_eq!(unanswered.response(&of_70(1)), RelayAction::Pass);
    assert_eq!(unanswered.response(&events(1, 30)), RelayAction::Pass);
    assert_eq!(
        unanswered.response(&progress(70)),
        RelayAction::Pass,
        "etcd has not answered the return: its response would have come before the event"
    );

    let mut future = self::relay();
    future.await_barrier();
    future.stay();
    future.request(&WatchRequest::Create(create(0, 71)));
    future.request(&WatchRequest::Progress);
    assert_eq!(future.response(&of_70(1)), RelayAction::Pass);
    assert_eq!(
        future.response(&progress(70)),
        RelayAction::Drop,
        "below its start"
    );
    assert_eq!(future.response(&progress(71)), RelayAction::Pass, "of the client");

    let mut pinned = self::relay();
    pinned.await_barrier();
    pinned.stay();
    pinned.pin();
    assert_eq!(pinned.response(&progress(70)), RelayAction::Drop, "of the return");
    assert_eq!(pinned.response(&progress(70)), RelayAction::Pass);

    let mut pinned = self::relay();
    pinned.await_barrier();
    pinned.stay();
    pinned.request(&WatchRequest::Progress);
    assert_eq!(
        pinned.response(&progress(70)),
        RelayAction::Pass,
        "the client cannot tell which of the two was answered"
    );
    pinned.pin();
    assert_eq!(pinned.response(&progress(70)), RelayAction::Drop, "the other one");
    assert_eq!(
        pinned.response(&progress(70)),
        RelayAction::Pass,
        "requested since"
    );
}

#[test]
fn pinned_stream_knows_whether_etcd_would_give_another_id() {
    let mut relay = relay();
    relay.request(&WatchRequest::Create(create(0, 0)));
    assert_eq!(relay.response(&created(1)), RelayAction::Pass);
    relay.pin();
    assert!(relay.chooses_expected_id(), "0 and 1 are taken");
    relay.pin();
    assert!(relay.chooses_expected_id());
    relay.request(&WatchRequest::Cancel(0));
    assert!(!relay.chooses_expected_id(), "etcd would give 0 again");

    let mut cancelling = self::relay();
    cancelling.request(&WatchRequest::Create(create(0, 0)));
    assert_eq!(cancelling.response(&created(1)), RelayAction::Pass);
    cancelling.request(&WatchRequest::Cancel(0));
    cancelling.pin();
    assert!(
        !cancelling.chooses_expected_id(),
        "etcd frees 0 before it reads the next create"
    );

    let mut begun = begun_at_etcd();
    begun.pin();
    begun.request(&WatchRequest::Cancel(0));
    assert!(begun.chooses_expected_id(), "etcd has seen every create");
}

#[test]
fn stream_does_not_return_before_a_cancel_is_answered() {
    let mut relay = relay();
    relay.request(&WatchRequest::Cancel(7));
    assert!(!relay.may_return(|_| true));
    relay.request(&WatchRequest::Cancel(99));
    let canceled = Head {
        canceled: true,
        ..head(7, 60)
    };
    assert_eq!(relay.response(&canceled), RelayAction::Pass);
    assert!(
        relay.may_return(|_| true),
        "etcd does not answer one for an unknown id"
    );
}

#[test]
fn stream_that_begins_at_etcd_leaves_its_ids_to_etcd() {
    let mut relay = Relay::new(Ids::default(), Vec::new(), BTreeSet::new(), 0);
    for _ in 0..3 {
        assert!(relay.accepts_request(), "creates need not wait for each other");
        assert_eq!(relay.request(&WatchRequest::Create(create(0, 0))), Some(0));
    }
    for id in 0..3 {
        assert!(!relay.may_return(|_| true));
        assert_eq!(relay.response(&created(id)), RelayAction::Pass);
    }
    assert!(relay.may_return(|_| true));
}

#[test]
fn watchers_of_a_replaced_history_are_taken_from_etcd_unless_it_has_others() {
    let mut pending = Relay::new(
        Ids::default(),
        vec![carried(7, 45), carried(0, 40)],
        BTreeSet::new(),
        45,
    );
    assert_eq!(pending.response(&created(0)), RelayAction::Drop);
    let abandoned = pending.abandon().unwrap();
    let ids: Vec<_> = abandoned.watchers.iter().map(|(id, _)| *id).collect();
    assert_eq!(
        ids,
        [0, 7],
        "one that etcd has continued, and one that it has not"
    );

    let mut asked = relay();
    asked.request(&WatchRequest::Cancel(7));
    asked.request(&WatchRequest::Create(create(9, 0)));
    let abandoned = asked.abandon().unwrap();
    assert!(abandoned.cancelled.contains(&7));
    assert_eq!(abandoned.unanswered, Some(create(9, 0)));

    let mut mixed = relay();
    mixed.request(&WatchRequest::Create(create(0, 0)));
    assert_eq!(mixed.response(&created(1)), RelayAction::Pass);
    assert!(mixed.has_watchers_of_memory() && mixed.abandon().is_none());
    let opaque = Relay::new(Ids::default(), Vec::new(), BTreeSet::new(), 0);
    assert!(!opaque.has_watchers_of_memory());
}

#[test]
fn pinned_stream_passes_what_the_client_does_not_have() {
    let mut relay = relay();
    relay.pin();
    assert!(!relay.may_return(|_| true));
    assert_eq!(
        relay.response(&created(1)),
        RelayAction::Pass,
        "of a request that was not read"
    );
    assert_eq!(relay.response(&events(1, 50)), RelayAction::Pass);
    assert_eq!(relay.response(&events(0, 40)), RelayAction::DropThrough(40));
    assert_eq!(relay.response(&progress(44)), RelayAction::Drop);
    assert_eq!(relay.response(&progress(50)), RelayAction::Pass);
}

/// A stream at etcd from its beginning, with watcher 0.
fn begun_at_etcd() -> Relay {
    let mut relay = Relay::new(Ids::default(), Vec::new(), BTreeSet::new(), 0);
    relay.request(&WatchRequest::Create(create(0, 0)));
    assert_eq!(relay.response(&created(0)), RelayAction::Pass);
    relay
}

#[test]
fn event_with_a_long_key_pins_the_stream_unless_the_client_may_have_it() {
    let mut relay = begun_at_etcd();
    relay.request(&WatchRequest::Create(create(0, 30)));
    assert_eq!(relay.long_key(&head(0, 60)), RelayAction::Pass);
    assert!(relay.is_pinned() && !relay.may_return(|_| true));
    assert_eq!(relay.response(&created(1)), RelayAction::Pass);
    assert_eq!(relay.response(&events(1, 30)), RelayAction::Pass);
    assert_eq!(relay.long_key(&head(1, 61)), RelayAction::Pass, "once more");
    assert_eq!(self::relay().long_key(&head(0, 60)), RelayAction::End);
    let mut pending = Relay::new(
        Ids::default(),
        vec![carried(7, 45), carried(0, 40)],
        BTreeSet::new(),
        45,
    );
    assert_eq!(pending.response(&created(0)), RelayAction::Drop);
    assert_eq!(pending.response(&events(0, 41)), RelayAction::Pass);
    assert_eq!(
        pending.long_key(&head(0, 60)),
        RelayAction::End,
        "7 was not continued"
    );
}

#[test]
fn watchers_and_unanswered_creates_count_until_they_are_gone_or_the_stream_is_pinned() {
    let of_one = create(0, 0).watcher_bytes();
    let mut relay = relay();
    assert_eq!(relay.held_bytes(), 2 * of_one, "those of memory");
    relay.request(&WatchRequest::Create(create(0, 0)));
    assert_eq!(relay.held_bytes(), 3 * of_one, "unanswered");
    let refusal = Head {
        canceled: true,
        ..created(NO_WATCHER)
    };
    relay.response(&refusal);
    assert_eq!(relay.held_bytes(), 2 * of_one);
    relay.request(&WatchRequest::Create(create(0, 0)));
    relay.response(&created(1));
    relay.request(&WatchRequest::Cancel(7));
    let canceled = Head {
        canceled: true,
        ..head(7, 60)
    };
    relay.response(&canceled);
    assert_eq!(relay.held_bytes(), 2 * of_one);
    assert_eq!(relay.response(&events(0, 41)), RelayAction::Pass);
    relay.pin();
    assert_eq!(relay.held_bytes(), 0);
    relay.request(&WatchRequest::Create(create(0, 0)));
    assert_eq!(relay.held_bytes(), 0, "etcd alone knows it");
    assert!(relay.has_watchers_of_memory() && relay.abandon().is_none());
}

#[test]
fn watcher_returns_with_the_time_of_what_the_client_got_last() {
    let asks = Create {
        options: Options {
            progress_notify: true,
            ..Options::default()
        },
        ..create(0, 0)
    };
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    let mut relay = Relay::new(Ids::default(), Vec::new(), BTreeSet::new(), 0);
    relay.request(&WatchRequest::Create(asks.clone()));
    relay.response(&created(0));
    relay.record_sent(0, at(1));
    relay.request(&WatchRequest::Create(create(0, 0)));
    relay.response(&created(1));
    relay.record_sent(1, at(2));
    relay.record_sent(NO_WATCHER, at(3));
    let quiet_since = |relay: &Relay| {
        let carried = relay.carried(60).into_iter();
        carried.map(|watcher| watcher.quiet_since).collect::<Vec<_>>()
    };
    assert_eq!(
        quiet_since(&relay),
        [Some(at(1)), None],
        "the other one asked for none"
    );
    let from_memory = Carried {
        create: asks,
        quiet_since: Some(at(4)),
        ..carried(0, 40)
    };
    let mut relay = Relay::new(Ids::default(), vec![from_memory], BTreeSet::new(), 0);
    relay.response(&created(0));
    assert_eq!(quiet_since(&relay), [Some(at(4))], "nothing was sent at etcd");
    relay.record_sent(0, at(5));
    assert_eq!(quiet_since(&relay), [Some(at(5))]);
}

#[test]
fn watcher_zero_is_created_first_and_every_start_follows_what_was_sent() {
    let watchers = vec![carried(7, 40), carried(0, 41), carried(3, i64::MAX)];
    let creates = Relay::new(Ids::default(), watchers, BTreeSet::new(), 0).creates();
    let ids: Vec<_> = creates.iter().map(|create| create.watch_id).collect();
    assert_eq!(ids, [0, 3, 7]);
    let starts: Vec<_> = creates.iter().map(|create| create.start_revision).collect();
    assert_eq!(starts, [42, i64::MAX, 41]);
}

#[test]
fn watcher_is_created_again_with_the_same_options() {
    let mut watcher = carried(7, 40);
    watcher.create.range_end = "l".into();
    watcher.create.options = Options {
        progress_notify: true,
        prev_kv: true,
        fragment: true,
        no_put: true,
        no_delete: true,
    };
    let mut creates = Relay::new(Ids::default(), vec![watcher], BTreeSet::new(), 0).creates();
    let create = creates.pop().unwrap();
    assert_eq!((&create.key[..], &create.range_end[..]), (&b"k"[..], &b"l"[..]));
    assert_eq!(create.filters, [0, 1]);
    assert!(create.progress_notify && create.prev_kv && create.fragment);
}
