//! Watchers of a stream on their way from one source to the other. The revision alone decides which source sends an
//! event: the old one up to [`Carried::through`], the new one from the next revision on (W9).

use tokio::time::Instant;

use super::request::{Create, Options};
use etcd_wire::etcdserverpb::WatchCreateRequest;

/// A watcher that continues at another source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Carried {
    pub(super) id: i64,
    pub(super) create: Create,
    /// The client has every event of the watcher up to this revision, and none above it. For a watcher of the future
    /// the revision before its start.
    pub(super) through: i64,
    /// Time of the last event or notification that the client got, or of the creation: an interval later it gets a
    /// notification. `None` if it asked for none.
    pub(super) quiet_since: Option<Instant>,
}

/// Creates that make etcd continue `watchers` on a new stream, in the order in which they have to be sent: etcd gives
/// id 0 only to the first create that leaves the id to it.
pub(super) fn creates<'a>(watchers: impl Iterator<Item = &'a Carried>) -> Vec<(i64, WatchCreateRequest)> {
    let mut creates: Vec<_> = watchers
        .map(|watcher| (watcher.id, continue_after(watcher)))
        .collect();
    creates.sort_by_key(|(id, _)| (*id != 0, *id));
    creates
}

fn continue_after(watcher: &Carried) -> WatchCreateRequest {
    wire(&watcher.create, watcher.id, watcher.through.saturating_add(1))
}

/// A create request as etcd's message.
pub(super) fn wire(create: &Create, watch_id: i64, start_revision: i64) -> WatchCreateRequest {
    let Options {
        progress_notify,
        prev_kv,
        fragment,
        no_put,
        no_delete,
    } = create.options;
    let filters = [(no_put, 0), (no_delete, 1)].into_iter();
    WatchCreateRequest {
        key: create.key.clone(),
        range_end: create.range_end.clone(),
        start_revision,
        progress_notify,
        filters: filters
            .filter_map(|(is_set, filter)| is_set.then_some(filter))
            .collect(),
        prev_kv,
        watch_id,
        fragment,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watcher(id: i64, through: i64) -> Carried {
        Carried {
            id,
            create: Create {
                key: "k".into(),
                range_end: "l".into(),
                ..Create::default()
            },
            through,
            quiet_since: None,
        }
    }

    #[test]
    fn watcher_zero_is_created_first_and_every_start_follows_what_was_sent() {
        let carried = [watcher(7, 40), watcher(0, 41), watcher(3, i64::MAX)];
        let creates = creates(carried.iter());
        let ids: Vec<_> = creates
            .iter()
            .map(|(id, create)| (*id, create.watch_id))
            .collect();
        assert_eq!(ids, [(0, 0), (3, 3), (7, 7)]);
        let starts: Vec<_> = creates.iter().map(|(_, create)| create.start_revision).collect();
        assert_eq!(starts, [42, i64::MAX, 41]);
    }

    #[test]
    fn created_again_with_the_same_options() {
        let mut carried = watcher(7, 40);
        carried.create.options = Options {
            progress_notify: true,
            prev_kv: true,
            fragment: true,
            no_put: true,
            no_delete: true,
        };
        let (_, create) = creates([carried].iter()).pop().unwrap();
        assert_eq!((&create.key[..], &create.range_end[..]), (&b"k"[..], &b"l"[..]));
        assert_eq!(create.filters, [0, 1]);
        assert!(create.progress_notify && create.prev_kv && create.fragment);
    }
}
