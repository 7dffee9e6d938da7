//! Values that events replace and that memory does not hold: the feed asks etcd for them (`prev_kv`), for the watchers that do.
//! etcd reads each as it sends the event. One that it has compacted by then is left out, as in a watch of its own.

use etcd_store::cache::{Change, NotApplied};
use rangecache_base::telemetry::Reason;

use super::member::{FeedEnd, Feeding};

/// Applies the events of whole revisions up to `revision`; `are_brought` if the feed asks for what they replace.
///
/// # Errors
/// [`FeedEnd::Lost`] if a value is needed for which the feed does not ask; [`FeedEnd::StaleEpoch`] if one is another one than the
/// mirror's, which is dropped then.
pub(super) fn apply(
    feeding: Feeding<'_>,
    changes: Vec<Change>,
    revision: i64,
    are_brought: bool,
) -> Result<(), FeedEnd> {
    let Feeding { mirror, epoch, .. } = feeding;
    match mirror.apply_checked(epoch, changes, revision, are_brought)? {
        Ok(_) => Ok(()),
        Err(NotApplied::NotBrought) => Err(lacks_values()),
        Err(NotApplied::Differs) => Err(differs(feeding)),
    }
}

/// End of a feed that does not ask for what its events replace, once values are left out.
pub(super) fn lacks_values() -> FeedEnd {
    FeedEnd::Lost(
        "values are left out from now on, and a new watch brings those that its events replace".into(),
    )
}

/// Drops the mirror, because a value that it does not hold is another one in etcd than the one that it left out.
fn differs(feeding: Feeding<'_>) -> FeedEnd {
    let Feeding { mirror, epoch, .. } = feeding;
    tracing::error!(
        mirror = mirror.name,
        "a value that is not held differs in etcd; the mirror is being reloaded. Unless etcd was restored, please report it"
    );
    mirror.metrics.mismatches.inc();
    // A stale epoch means that the contents were dropped already.
    let _ = mirror.end_epoch(epoch, Reason::Mismatch);
    FeedEnd::StaleEpoch
}

#[cfg(test)]
mod tests;
