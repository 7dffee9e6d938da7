//! Events that etcd has written, by range, as a member that no fault concerns delivers them.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use parking_lot::RwLock;
use testkit::pb::{WatchCreateRequest, prefix_end};
use tokio::task::JoinSet;

use crate::client::{Connection, Method, Windows};
use crate::watch_message::{Event, Response};
use crate::watchers::{Stream, create_frame};

/// Prefix of every range.
pub(super) const PREFIX: &str = "/soak/";
/// Ranges that are written and watched.
pub(super) const RANGES: usize = 50;
/// Number under which the range of everything is known.
pub(super) const EVERYTHING: usize = RANGES;

/// Revision of an event, and the number of the put that made it.
pub(super) type Mark = (i64, u64);

/// The events of etcd, by range.
pub(super) struct Truth {
    /// Revision before the first put.
    pub(super) base: i64,
    ranges: RwLock<Vec<Vec<Mark>>>,
}

impl Truth {
    pub(super) fn new(base: i64) -> Truth {
        let ranges = RwLock::new(vec![Vec::new(); RANGES + 1]);
        Truth { base, ranges }
    }

    fn add(&self, range: usize, mark: Mark) {
        let mut ranges = self.ranges.write();
        ranges[range].push(mark);
        ranges[EVERYTHING].push(mark);
    }

    /// Number of events.
    pub(super) fn events(&self) -> usize {
        self.ranges.read()[EVERYTHING].len()
    }

    /// Whether the put of this mark is among the events.
    pub(super) fn has(&self, mark: Mark) -> bool {
        let ranges = self.ranges.read();
        ranges[EVERYTHING].binary_search(&mark).is_ok()
    }

    /// Revision up to which every event is known.
    pub(super) fn known(&self) -> i64 {
        self.ranges.read()[EVERYTHING]
            .last()
            .map_or(self.base, |mark| mark.0)
    }

    /// Calls `look` with the events of a range after a revision.
    pub(super) fn after<T>(&self, range: usize, revision: i64, look: impl FnOnce(&[Mark]) -> T) -> T {
        let ranges = self.ranges.read();
        let marks = &ranges[range];
        look(&marks[marks.partition_point(|mark| mark.0 <= revision)..])
    }
}

/// Key and end of a range.
pub(super) fn interval(range: usize) -> (Vec<u8>, Vec<u8>) {
    let prefix = if range == EVERYTHING {
        PREFIX.to_owned()
    } else {
        format!("{PREFIX}{range:02}/")
    };
    (prefix.as_bytes().to_vec(), prefix_end(prefix.as_bytes()))
}

/// Number of the range that holds a key.
fn range_of(key: &[u8]) -> Option<usize> {
    let digits = key.strip_prefix(PREFIX.as_bytes())?.get(..2)?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Follows everything at the first member, directly, in a task.
pub(super) async fn follow(
    members: &[SocketAddr],
    truth: &Arc<Truth>,
    tasks: &mut JoinSet<Result<()>>,
) -> Result<()> {
    let first = members.first().context("a member")?;
    let connection = Connection::open(*first, Windows::LARGE).await?;
    let (mut send, response) = connection.start(Method::Watch).await?;
    let (key, range_end) = interval(EVERYTHING);
    let create = WatchCreateRequest {
        key,
        range_end,
        start_revision: truth.base + 1,
        ..WatchCreateRequest::default()
    };
    send.send_data(create_frame(create), false)?;
    let mut stream = Stream::new(send, response.await?.into_body());
    let truth = Arc::clone(truth);
    tasks.spawn(async move {
        let _connection = connection;
        while let Some(message) = stream.next().await? {
            let response = Response::of(&message);
            for event in response.events() {
                let Event {
                    key,
                    revision,
                    number,
                    ..
                } = event.context("an event of the soak")?;
                let range = range_of(key)
                    .filter(|range| *range < RANGES)
                    .context("a key of the soak")?;
                truth.add(range, (revision, number));
            }
        }
        bail!("etcd has ended the watch that all others are compared with")
    });
    Ok(())
}
