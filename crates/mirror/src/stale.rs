//! Age of a mirror's view, and last views, for reads that may be stale while no member of etcd answers (`--serve-stale`).

use std::time::Duration;

use tokio::time::Instant;

use super::lineage::Auth;
use super::mirrors::Mirrors;
use super::view::{Mirror, View};

/// View of a mirror, and how long ago it was proven to lack nothing.
#[derive(Debug)]
pub struct StaleView {
    /// The view.
    pub view: View,
    /// Time since the last check was sent that proves the view.
    pub age: Duration,
}

/// Whether no client has been answered later than a view of this revision, which a check proved that was sent at this time:
/// neither from a later revision, nor on a connection that was opened after the check, `answered_by`. `shown` is the highest
/// revision that clients are known to have seen.
fn has_not_been_passed(view: (i64, Instant), shown: Option<i64>, answered_by: Instant) -> bool {
    let (revision, proven_at) = view;
    shown.is_some_and(|shown| shown <= revision) && answered_by <= proven_at
}

impl Mirrors {
    /// Whether last views are served at all.
    #[must_use]
    pub fn serve_stale(&self) -> bool {
        !self.longest_stale().is_zero()
    }

    /// Time since the last check was sent which proves that `view` lacked no acknowledged write then; `None` if there is
    /// none, or the view is of a replaced history.
    #[must_use]
    pub fn age(&self, view: &View) -> Option<Duration> {
        let history = self.cluster_state.current();
        let proven_at = history.proven_at(view.revision)?;
        (view.history == history.id).then(|| proven_at.elapsed())
    }

    /// Last view of `mirror`, for a caller without credentials, while no member answers and the view's age is within
    /// `--serve-stale`.
    ///
    /// `None` also if a client is known to have seen a later revision (I11), and if etcd has answered a client's call on a connection
    /// that was opened after the view's proof: that may have been another history, after which the old one must not
    /// appear again (I4). A response whose revision could not be read is no reason: no check can come that would tell what
    /// it has shown, and the view's age says what the answer is worth.
    #[must_use]
    pub fn stale_view(&self, mirror: &Mirror) -> Option<StaleView> {
        if !self.serve_stale() || !self.upstream.is_silent() {
            return None;
        }
        let cluster_state = &self.cluster_state;
        let (history, view) = (cluster_state.current(), mirror.last_view()?);
        let proven_at = history.proven_at(view.revision)?;
        let age = proven_at.elapsed();
        let is_usable = view.history == history.id
            && cluster_state.auth() == Auth::Off
            && age <= self.longest_stale()
            && has_not_been_passed(
                (view.revision, proven_at.instant),
                cluster_state.known_shown_revision(),
                cluster_state.last_answered_by(),
            );
        is_usable.then_some(StaleView { view, age })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn view_is_passed_by_a_later_revision_and_by_an_answer_on_a_newer_connection() {
        let proven_at = Instant::now();
        let (before, after) = (
            proven_at - Duration::from_secs(1),
            proven_at + Duration::from_secs(1),
        );
        for (shown, answered_by, expected) in [
            (Some(7), before, true),
            (Some(7), proven_at, true),
            (Some(8), before, false),
            (None, before, false),
            (Some(7), after, false),
        ] {
            let passed = has_not_been_passed((7, proven_at), shown, answered_by);
            assert_eq!(
                passed,
                expected,
                "shown {shown:?}, answered on a newer connection: {}",
                answered_by > proven_at
            );
        }
    }
}
