//! Whether the member behind a connection is of the known history, before etcd continues on it what memory has begun
//! (W10), and before the first quorum check on it proves a read (I1). A lower revision, another cluster or a shorter raft log is found by quorum checks as well; a rollback whose
//! lost revisions were written again shows only in the events.

use std::sync::Arc;

use rangecache_upstream::{Connection, Lineage, Upstream};

use super::member::{FeedEnd, Feeding};
use super::opening::compare_history;
use crate::lineage::{HistoryId, Position};
use crate::set::{MirrorSet, WatchedLoads};
use crate::{load::LoadCause, view::Mirror};

/// Whether the member behind `connection` is of `history`: its events continue those of each mirror of `set`. A check on the
/// connection has just shown `of_check`; if that is a member's, what is behind the connection now has to show itself.
/// Where etcd cannot send them any more, and while a mirror is empty, its raft log decides, unless watchers of `watched` are handed
/// over: those whose last event nothing can show do not continue. This is asked once per connection and history; if the history is
/// another one, every mirror is dropped.
pub(crate) async fn is_of_history(
    set: &MirrorSet,
    upstream: &Upstream,
    connection: &Arc<Connection>,
    history: HistoryId,
    of_check: Lineage,
    watched: Option<&WatchedLoads>,
) -> bool {
    let is_handover = watched.is_some();
    // etcd may have been replaced behind the connection since the last comparison.
    let lineage = match of_check {
        Lineage::Hub(_) => of_check,
        Lineage::Member => match connection.prove_lineage(of_check).await {
            Ok(lineage) => lineage,
            Err(_) => return false,
        },
    };
    // Watchers continue only in a lineage in which the contents that they watched were found, and not only no difference. Another
    // mirror, or a later load, says nothing of them.
    let is_shown = || {
        connection.is_of_history(history.number(), lineage)
            && watched.is_none_or(|watched| watched.were_found_in(set, lineage))
    };
    if is_shown() {
        return true;
    }
    // Streams that continue on the same connection wait for one comparison.
    let Ok(_turn) = connection.history_turn().acquire().await else {
        return false;
    };
    if is_shown() {
        return true;
    }
    for mirror in set.all() {
        if let Err(end) = compare(feeding(set, upstream, mirror, connection), is_handover).await {
            tracing::debug!(mirror = mirror.name, endpoint = %connection.url(), explanation = %end,
                "a connection is not known to be of the mirror's history");
            return false;
        }
    }
    // A history is never current again.
    let is_current = set.cluster_state.history() == history;
    // What was compared is of the lineage only if that is still the same.
    let is_unchanged = async || matches!(connection.prove_lineage(lineage).await, Ok(now) if now == lineage);
    if is_current && is_unchanged().await {
        connection.set_history(history.number(), lineage);
    }
    is_shown()
}

/// Whether the history behind the connection of a feed, which resumes at `revision`, holds what mirrors further ahead have:
/// the proof of this feed alone concerns lower revisions.
///
/// # Errors
/// As [`compare_history`], but for what etcd cannot show any more.
pub(super) async fn others_continue(feed: Feeding<'_>, revision: i64) -> Result<(), FeedEnd> {
    let Feeding { set, upstream, .. } = feed;
    for other in set.all().filter(|other| !std::ptr::eq(*other, feed.mirror)) {
        let anchor = other.anchor(other.epoch())?;
        if anchor.is_some_and(|anchor| anchor.revision > revision) {
            compare(feeding(set, upstream, other, feed.connection), false).await?;
        }
    }
    Ok(())
}

fn feeding<'a>(
    set: &'a MirrorSet,
    upstream: &'a Upstream,
    mirror: &'a Mirror,
    connection: &'a Arc<Connection>,
) -> Feeding<'a> {
    Feeding {
        set,
        upstream,
        mirror,
        epoch: mirror.epoch(),
        connection,
    }
}

/// Compares one mirror; what nothing can show is an error only if `is_handover`.
async fn compare(feeding: Feeding<'_>, is_handover: bool) -> Result<(), FeedEnd> {
    if feeding.mirror.anchor(feeding.epoch)?.is_none() {
        return compare_log(feeding).await;
    }
    match compare_history(feeding).await {
        // The raft log was compared before, and etcd refuses watchers of what it has compacted.
        Err(FeedEnd::Reload(LoadCause::Compacted(_), _)) => Ok(()),
        Err(FeedEnd::Reload(LoadCause::Unproven, _)) if !is_handover => Ok(()),
        compared => compared,
    }
}

async fn compare_log(feeding: Feeding<'_>) -> Result<(), FeedEnd> {
    let Feeding { set, mirror, .. } = feeding;
    let before = set.cluster_state.before_check();
    let position = Position::read(feeding.connection, mirror.scope.key(), &before).await?;
    if position.continues(&before) {
        return Ok(());
    }
    set.replace_history(
        &before,
        position.header.revision,
        "the history behind a connection is not the known one",
    );
    Err(FeedEnd::StaleEpoch)
}
