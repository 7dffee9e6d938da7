//! Mirrors that a reload adds or removes while the others continue.

use std::{sync::Arc, time::Duration};

use etcd_store::keyspace::scope::{Scope, scopes};

use super::{fan_out::FanOut, lifecycle, mirrors::Mirrors, set::MirrorSlot, view::Mirror};

/// Time limit for the task of a removed mirror to end.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

impl Mirrors {
    /// Scopes of `prefixes` without `excluded` that have no mirror.
    fn missing(&self, prefixes: &[String], excluded: &[String]) -> Vec<Scope> {
        let mut wanted = scopes(prefixes, excluded);
        wanted.retain(|scope| self.all().all(|mirror| mirror.scope != *scope));
        wanted
    }

    /// Whether [`Mirrors::set_scopes`] has a place for each new mirror.
    #[must_use]
    pub fn has_places(&self, prefixes: &[String], excluded: &[String]) -> bool {
        self.missing(prefixes, excluded).len() <= self.set.free()
    }

    /// Mirrors the scopes of `prefixes` without `excluded` from now on. Reads of removed mirrors are forwarded and their
    /// watches continue at etcd; mirrors that stay continue, and new ones serve once they are loaded. Returns when the tasks
    /// of the removed ones have ended.
    pub async fn set_scopes(self: &Arc<Self>, prefixes: &[String], excluded: &[String]) {
        let added = self.missing(prefixes, excluded);
        let wanted = scopes(prefixes, excluded);
        let mut removed = Vec::new();
        for (_, slot) in self.set.present() {
            if !wanted.contains(&slot.mirror.scope) {
                slot.remove();
                tracing::info!(
                    mirror = slot.mirror.name,
                    "a mirror was removed; its reads and watches go to etcd"
                );
                removed.push(slot);
            }
        }
        for slot in removed {
            // A task ends at its next wait. If it does not, its metrics are left over.
            let _ = tokio::time::timeout(REMOVAL_TIMEOUT, slot.ended.cancelled()).await;
        }
        for scope in added {
            self.add(scope);
        }
    }

    fn add(self: &Arc<Self>, scope: Scope) {
        let cluster_state = Arc::clone(&self.cluster_state);
        let mirror = Mirror::new(scope, cluster_state, &self.telemetry);
        tracing::info!(
            mirror = mirror.name,
            "a mirror was added; its reads go to etcd until it is loaded"
        );
        let fan_out = Arc::<FanOut>::default();
        let _switching = self.switching.lock();
        fan_out.set_closed(self.forwards_all());
        if let Some(position) = self
            .set
            .add(MirrorSlot::new(mirror, fan_out, true, self.stop.child_token()))
        {
            lifecycle::start(self, position);
        }
    }
}
