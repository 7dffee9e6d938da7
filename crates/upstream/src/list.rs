//! The endpoints that are used, and their changes: those that `--endpoints` names, those of members that were found by
//! `--endpoints-auto-sync-interval`, and, until one of these serves, those that were used before; metrics of them.

use std::sync::{Arc, atomic::Ordering};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use rangecache_base::net::Url;
use rangecache_base::telemetry::metrics::{Gauge, metric_group};
use rangecache_base::telemetry::state_changes::{ChangeKind, StateChanges};
use tokio::sync::Notify;

use super::endpoint::{Endpoint, EndpointSource};

/// Interval at which it is checked whether endpoints can be left.
const LEAVE_INTERVAL: Duration = Duration::from_millis(50);

/// Whether endpoints were left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// None was.
    None,
    /// Some were, because another one serves.
    ForAnother,
    /// Some were, because none of them was connected; no other one serves either.
    WithoutAnother,
}

/// The endpoints in their order of preference among equals.
#[derive(Debug)]
pub(super) struct EndpointList {
    endpoints: ArcSwap<Vec<Arc<Endpoint>>>,
    /// Held while the list is replaced.
    changing: Mutex<()>,
    /// Wakes [`EndpointList::leave`].
    wanted_to_leave: Notify,
    /// Endpoints that were left since [`EndpointList::take_left`].
    left: Mutex<Vec<Url>>,
    /// The newest changes of all endpoints.
    changes: Arc<StateChanges>,
}

impl EndpointList {
    /// The endpoints that the flags name at start.
    pub(super) fn new(urls: &[Url], changes: Arc<StateChanges>) -> EndpointList {
        let create = |url: &Url| {
            Arc::new(Endpoint::new(
                url.clone(),
                EndpointSource::Flag,
                Arc::clone(&changes),
            ))
        };
        EndpointList {
            endpoints: ArcSwap::from_pointee(urls.iter().map(create).collect()),
            changing: Mutex::new(()),
            wanted_to_leave: Notify::new(),
            left: Mutex::default(),
            changes,
        }
    }

    /// The endpoints of now.
    pub(super) fn load(&self) -> Guard<Arc<Vec<Arc<Endpoint>>>> {
        self.endpoints.load()
    }

    /// The endpoints of now, for longer than a moment.
    pub(super) fn load_full(&self) -> Arc<Vec<Arc<Endpoint>>> {
        self.endpoints.load_full()
    }

    /// Uses `urls` in the place of the endpoints of this `source`, a flag, and returns those that are new.
    pub(super) fn name(&self, urls: &[Url], source: EndpointSource) -> Vec<Arc<Endpoint>> {
        let _changing = self.changing.lock();
        let before = self.load_full();
        let mut added = Vec::new();
        let mut endpoints = Vec::with_capacity(urls.len());
        for url in urls {
            if let Some(known) = before.iter().find(|endpoint| endpoint.url == *url) {
                known.set_source(source);
                known.is_leaving.store(false, Ordering::Relaxed);
                endpoints.push(Arc::clone(known));
            } else {
                let endpoint = self.create(url, source);
                endpoints.push(Arc::clone(&endpoint));
                added.push(endpoint);
            }
        }
        let others = before.iter().filter(|endpoint| !urls.contains(&endpoint.url));
        for other in others {
            if other.source() == source {
                other.is_leaving.store(true, Ordering::Relaxed);
            }
            endpoints.push(Arc::clone(other));
        }
        self.endpoints.store(Arc::new(endpoints));
        self.wanted_to_leave.notify_one();
        added
    }

    /// Uses the endpoint of a member that was found, unless it is used already.
    pub(super) fn adopt(&self, url: &Url) -> Option<Arc<Endpoint>> {
        let _changing = self.changing.lock();
        let mut endpoints = Vec::clone(&self.load());
        if let Some(known) = endpoints.iter().find(|endpoint| endpoint.url == *url) {
            known.is_leaving.store(false, Ordering::Relaxed);
            return None;
        }
        let endpoint = self.create(url, EndpointSource::Members);
        endpoints.push(Arc::clone(&endpoint));
        self.endpoints.store(Arc::new(endpoints));
        Some(endpoint)
    }

    /// Leaves an endpoint, as soon as another one serves.
    pub(super) fn want_to_leave(&self, url: &Url) {
        let endpoints = self.load();
        let of_url = endpoints.iter().filter(|endpoint| endpoint.url == *url);
        of_url.for_each(|endpoint| endpoint.is_leaving.store(true, Ordering::Relaxed));
        self.wanted_to_leave.notify_one();
    }

    fn create(&self, url: &Url, source: EndpointSource) -> Arc<Endpoint> {
        self.changes
            .record(ChangeKind::EndpointAdded, url.to_string(), source.as_str());
        Arc::new(Endpoint::new(url.clone(), source, Arc::clone(&self.changes)))
    }

    /// Leaves endpoints that are to be left, once one of the others serves or none of them is connected: a list that is
    /// wrong, or of another cluster, costs nothing. Calls `left` after each change of the list.
    pub(super) async fn leave(&self, left: impl Fn(Left)) {
        loop {
            let wanted = self.wanted_to_leave.notified();
            if self.load().iter().any(|endpoint| endpoint.is_leaving()) {
                left(self.leave_what_can_be());
                tokio::time::sleep(LEAVE_INTERVAL).await;
            } else {
                wanted.await;
            }
        }
    }

    /// Leaves the endpoints that can be left now.
    pub(super) fn leave_what_can_be(&self) -> Left {
        let _changing = self.changing.lock();
        let (leaving, staying): (Vec<_>, Vec<_>) = self
            .load_full()
            .iter()
            .cloned()
            .partition(|endpoint| endpoint.is_leaving());
        // Those that are preferred are not left for a fallback.
        let only_fallbacks = leaving.iter().all(|endpoint| endpoint.is_fallback());
        let replaces =
            |endpoint: &Arc<Endpoint>| endpoint.serves() && (only_fallbacks || !endpoint.is_fallback());
        let left = if leaving.is_empty() || staying.is_empty() {
            Left::None
        } else if staying.iter().any(replaces) {
            Left::ForAnother
        } else if leaving.iter().all(|endpoint| !endpoint.is_connected()) {
            Left::WithoutAnother
        } else {
            Left::None
        };
        if left == Left::None {
            return left;
        }
        self.endpoints.store(Arc::new(staying));
        for endpoint in leaving {
            endpoint.server.remove();
            tracing::info!(endpoint = %endpoint.url, "this endpoint is used no more");
            self.changes
                .record(ChangeKind::EndpointRemoved, endpoint.url.to_string(), "");
            self.left.lock().push(endpoint.url.clone());
        }
        left
    }

    /// The endpoints that were left since the last call.
    pub(super) fn take_left(&self) -> Vec<Url> {
        std::mem::take(&mut *self.left.lock())
    }
}

metric_group! {
    /// State of etcd's endpoints, set when the metrics are scraped.
    pub(super) struct EndpointMetrics by endpoint;
    /// State of one endpoint.
    pub(super) struct OneEndpoint {
        /// 1 while the endpoint is connected, serves, votes and knows a leader, otherwise 0
        ///
        /// Useful when: a member needs checking
        pub(super) healthy: Gauge = "rangecache_endpoint_healthy";
        /// Established connections to the endpoint
        ///
        /// Useful when: connections are refused
        pub(super) connections: Gauge = "rangecache_endpoint_connections";
        /// Calls in flight on the endpoint's shared connections
        ///
        /// Useful when: one member gets more calls than the others
        pub(super) calls: Gauge = "rangecache_endpoint_calls";
        /// 1 if a connection to the endpoint led to another cluster in the last ten minutes and was left out
        ///
        /// Useful when: it is 1: see [RangecacheOtherCluster](../runbooks.md#rangecacheothercluster)
        pub(super) left_out: Gauge = "rangecache_endpoint_left_out";
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Request;
    use tokio::time::Instant;

    use super::*;
    use crate::testing::{SOON, member, start, status, until, urls};
    use crate::{class::ConnectionClass, fake::FakeEtcd, outgoing::Outgoing};

    fn unreachable() -> Url {
        "http://127.0.0.1:1".parse().unwrap()
    }

    #[tokio::test]
    async fn endpoint_that_is_named_no_more_is_left_and_its_calls_end_in_peace() {
        let (arrived, mut arrivals) = tokio::sync::mpsc::unbounded_channel();
        let may_respond = Arc::new(Notify::new());
        let respond = Arc::clone(&may_respond);
        let a = FakeEtcd::start(move |path, _| {
            let (arrived, respond) = (arrived.clone(), Arc::clone(&respond));
            async move {
                if path == "/slow" {
                    arrived.send(()).unwrap();
                    respond.notified().await;
                }
                Ok(status("3.6.0", 7, 1, 2))
            }
        })
        .await;
        let b = member("3.7.0", 7, 2).await;
        let (upstream, _stop) = start(&[&a.url], true);
        let connection = upstream.connection(ConnectionClass::Unary, Instant::now() + SOON);
        let connection = connection.await.unwrap();
        let body = Outgoing::whole(Bytes::from_static(b"\0\0\0\0\0"));
        let sender = Arc::clone(&connection);
        let call = tokio::spawn(async move { sender.send(Request::post("/slow").body(body).unwrap()).await });
        arrivals.recv().await.unwrap();
        until(|| upstream.lowest_version().is_some()).await;

        upstream.set_endpoints(std::slice::from_ref(&b.url));
        until(|| urls(&upstream) == [b.url.clone()]).await;
        connection.until_removed().await;
        until(|| {
            upstream
                .lowest_version()
                .is_some_and(|version| version.to_string() == "3.7.0")
        })
        .await;
        may_respond.notify_one();
        assert!(
            call.await.unwrap().is_ok(),
            "the call in flight gets its response"
        );
        let kinds: Vec<_> = upstream
            .state_changes()
            .iter()
            .map(|change| change.kind)
            .collect();
        assert!(kinds.contains(&ChangeKind::EndpointAdded) && kinds.contains(&ChangeKind::EndpointRemoved));
        let next = upstream
            .connection(ConnectionClass::Unary, Instant::now() + SOON)
            .await;
        assert_eq!(next.unwrap().url(), &b.url);
    }

    #[tokio::test]
    async fn list_of_which_nothing_serves_costs_nothing_and_can_be_taken_back() {
        let a = member("3.6.0", 7, 2).await;
        let (other, third) = (member("3.6.0", 8, 2).await, member("3.6.0", 8, 2).await);
        let (upstream, _stop) = start(&[&a.url], true);
        until(|| upstream.endpoints()[0].is_healthy).await;
        upstream.set_endpoints(&[unreachable(), other.url.clone(), third.url.clone()]);
        until(|| {
            let views = upstream.endpoints();
            views
                .iter()
                .all(|view| view.is_leaving || !view.last_error.ends_with("not connected yet"))
        })
        .await;
        assert_eq!(upstream.leave_what_can_be(), Left::None, "none of them serves");
        let all = [unreachable(), other.url.clone(), third.url.clone(), a.url.clone()];
        assert_eq!(urls(&upstream), all);
        assert!(upstream.endpoints()[3].is_leaving && upstream.endpoints()[3].is_healthy);
        let used = upstream
            .connection(ConnectionClass::Unary, Instant::now() + SOON)
            .await;
        assert_eq!(used.unwrap().url(), &a.url);

        upstream.set_endpoints(std::slice::from_ref(&a.url));
        until(|| urls(&upstream) == [a.url.clone()]).await;
        assert!(!upstream.endpoints()[0].is_leaving);
        until(|| upstream.mixed_clusters().is_empty()).await;
    }

    #[tokio::test]
    async fn list_is_taken_over_once_nothing_before_it_is_connected() {
        let (a, restored) = (member("3.6.0", 7, 2).await, member("3.6.0", 8, 2).await);
        let (upstream, _stop) = start(&[&a.url], true);
        until(|| upstream.endpoints()[0].is_healthy).await;
        drop(a);
        until(|| upstream.endpoints()[0].connections == 0).await;
        upstream.set_endpoints(std::slice::from_ref(&restored.url));
        until(|| {
            let views = upstream.endpoints();
            views.len() == 1 && views[0].is_healthy
        })
        .await;
        assert!(!upstream.is_left_out(Some(8)) && upstream.is_left_out(Some(7)));
    }
}
