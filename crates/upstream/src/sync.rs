//! Members of the cluster as endpoints (`--endpoints-auto-sync-interval`): a member to which no endpoint leads is
//! connected to, and the endpoint of a member that was removed is left.
//!
//! A member's URL is used only after the member has responded there with its own id and that of the cluster, and never
//! without TLS where an endpoint has TLS.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use etcd_wire::etcdserverpb::Member;
use rangecache_base::net::{Address, Url};
use tokio::time::{Instant, timeout};

use super::class::{ConnectionClass, ReceiveWindow};
use super::endpoint::{EndpointSource, EndpointView};
use super::{calls::members, pool::Upstream};

/// Longest pause before the members are requested for the first time, and after a failure.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// Timeout of the request for the members, and of the attempt to reach one.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Keeps the endpoints to the cluster's members, at `interval` unless that is zero, until the process stops.
pub fn follow_members(upstream: &Arc<Upstream>, interval: Duration) {
    if interval.is_zero() {
        return;
    }
    let following = Arc::clone(upstream);
    upstream.spawn("endpoints of the members", move || {
        let upstream = Arc::clone(&following);
        async move { follow(&upstream, interval).await }
    });
}

async fn follow(upstream: &Upstream, interval: Duration) {
    let mut warned = BTreeSet::new();
    let mut pause = interval.min(FIRST_PAUSE);
    let mut warned_of_memory = false;
    loop {
        tokio::time::sleep(pause).await;
        // Before the look at the endpoints: the response shows whether it comes from a hub.
        let found = known_members(upstream).await;
        if upstream.has_memory() {
            // The members would be used in the place of the hub.
            if !std::mem::replace(&mut warned_of_memory, true) {
                tracing::warn!(
                    "an endpoint is another rangecache: --endpoints-auto-sync-interval has no effect in front of it"
                );
            }
            pause = interval;
            continue;
        }
        let endpoints = upstream.endpoints();
        let is_settled = endpoints
            .iter()
            .all(|endpoint| !endpoint.is_connected || endpoint.member_id.is_some());
        let Some(members) = found.filter(|_| is_settled) else {
            pause = interval.min(FIRST_PAUSE);
            continue;
        };
        pause = interval;
        for member in missing(&members, &endpoints) {
            find(upstream, member, &endpoints, &mut warned).await;
        }
        for url in outdated(&members, &endpoints) {
            upstream.want_to_leave(url);
        }
    }
}

/// The members that a quorum knows; `None` if etcd does not tell, or names none.
async fn known_members(upstream: &Upstream) -> Option<Vec<Member>> {
    let deadline = Instant::now() + CALL_TIMEOUT;
    let connection = upstream.connection(ConnectionClass::Check, deadline).await.ok()?;
    match timeout(CALL_TIMEOUT, members(&connection, true)).await {
        Ok(Ok(mut members)) => {
            // A proxy that names itself has no id.
            members.retain(|member| member.id != 0);
            (!members.is_empty()).then_some(members)
        }
        Ok(Err(status)) => {
            tracing::debug!(code = ?status.code(), message_of_etcd = status.message(), "etcd does not list its members");
            None
        }
        Err(_) => None,
    }
}

/// The voting members to which no connected endpoint leads.
fn missing<'a>(members: &'a [Member], endpoints: &[EndpointView]) -> Vec<&'a Member> {
    let is_reached = |member: &Member| {
        endpoints
            .iter()
            .any(|endpoint| endpoint.is_connected && endpoint.member_id == Some(member.id))
    };
    members
        .iter()
        .filter(|member| !member.is_learner && !is_reached(member))
        .collect()
}

/// The endpoints that lead to no member: that of a member which was removed, and an address that was found and that a
/// member has given up. One that a flag names stays otherwise, for its member may come back.
fn outdated<'a>(members: &[Member], endpoints: &'a [EndpointView]) -> Vec<&'a Url> {
    let is_outdated = |endpoint: &EndpointView| {
        let of_member = members
            .iter()
            .find(|member| Some(member.id) == endpoint.member_id);
        let is_advertised = members
            .iter()
            .any(|member| member.client_urls.contains(&endpoint.url.to_string()));
        match endpoint.source {
            EndpointSource::Flag | EndpointSource::Fallback => {
                endpoint.member_id.is_some() && of_member.is_none() && !is_advertised
            }
            EndpointSource::Members => !is_advertised,
        }
    };
    endpoints
        .iter()
        .filter(|endpoint| !endpoint.is_connected && is_outdated(endpoint))
        .map(|endpoint| &endpoint.url)
        .collect()
}

/// The URLs of a member that may be used beside `endpoints`.
fn candidates(member: &Member, endpoints: &[EndpointView], has_tls: bool) -> Vec<Url> {
    let needs_tls = endpoints.iter().any(|endpoint| endpoint.url.tls);
    let may_be_used = |url: &Url| {
        matches!(url.address, Address::Tcp { .. })
            && (url.tls || !needs_tls)
            && (!url.tls || has_tls)
            && endpoints
                .iter()
                .all(|endpoint| endpoint.url != *url || !endpoint.is_connected)
    };
    let urls = member.client_urls.iter().filter_map(|url| url.parse().ok());
    urls.filter(may_be_used).collect()
}

/// Uses the first URL at which `member` responds.
async fn find(
    upstream: &Upstream,
    member: &Member,
    endpoints: &[EndpointView],
    warned: &mut BTreeSet<String>,
) {
    for url in candidates(member, endpoints, upstream.connector().has_tls()) {
        match is_at(upstream, member, &url).await {
            Ok(()) => {
                warned.remove(&url.to_string());
                if upstream.adopt(&url) {
                    tracing::info!(endpoint = %url, member = member.name, "a member of the cluster was found");
                }
                return;
            }
            Err(error) if warned.insert(url.to_string()) => {
                tracing::warn!(endpoint = %url, member = member.name, error,
                    "no endpoint leads to this member of the cluster, and the URL that it advertises cannot be used");
            }
            Err(_) => {}
        }
    }
}

/// Checks that `member` is behind `url`.
async fn is_at(upstream: &Upstream, member: &Member, url: &Url) -> Result<(), String> {
    let deadline = Instant::now() + CALL_TIMEOUT;
    let opening = upstream.neighbour(url, ReceiveWindow::SHARED, deadline);
    let connection = opening.await.map_err(|error| error.to_string())?;
    let status = connection.member_status().await;
    let status = status.map_err(|status| status.message().to_owned())?;
    let header = status.header.unwrap_or_default();
    if header.member_id != member.id || upstream.is_left_out(Some(header.cluster_id)) {
        return Err("another member, or another cluster, responds there".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use etcd_wire::etcdserverpb::MemberListResponse;
    use parking_lot::Mutex;
    use prost::Message as _;

    use super::*;
    use crate::testing::{start, status, until, urls};
    use crate::{endpoint::Endpoint, fake::FakeEtcd};

    /// A member whose list of the members is that of `list`.
    async fn listing(id: u64, list: &Arc<Mutex<Vec<Member>>>) -> FakeEtcd {
        let list = Arc::clone(list);
        FakeEtcd::start(move |path, _| {
            let response = if path.ends_with("/MemberList") {
                let members = list.lock().clone();
                MemberListResponse {
                    header: None,
                    members,
                }
                .encode_to_vec()
            } else {
                status("3.6.0", 7, id, 2)
            };
            std::future::ready(Ok(response))
        })
        .await
    }

    #[tokio::test]
    async fn members_are_found_where_they_respond_and_left_once_removed() {
        let list = Arc::<Mutex<Vec<Member>>>::default();
        let (a, b, wrong) = (
            listing(1, &list).await,
            listing(2, &list).await,
            listing(9, &list).await,
        );
        *list.lock() = vec![
            member(1, "http://advertised-in-vain:1"),
            member(2, &b.url.to_string()),
            member(3, &wrong.url.to_string()),
        ];
        let (upstream, _stop) = start(&[&a.url], true);
        follow_members(&upstream, Duration::from_millis(1));
        until(|| urls(&upstream) == [a.url.clone(), b.url.clone()]).await;
        until(|| upstream.endpoints().iter().all(|view| view.is_healthy)).await;
        assert_eq!(upstream.endpoints()[1].source, EndpointSource::Members);
        let asked = wrong.calls.lock().len();
        until(|| wrong.calls.lock().len() > asked).await;
        assert_eq!(
            urls(&upstream).len(),
            2,
            "another member responds at the third one's URL"
        );

        list.lock().remove(0);
        let requests = b.calls.lock().len();
        until(|| b.calls.lock().len() > requests + 20).await;
        assert_eq!(urls(&upstream).len(), 2, "the removed member is connected");
        drop(a);
        until(|| urls(&upstream) == [b.url.clone()]).await;
    }

    fn member(id: u64, url: &str) -> Member {
        Member {
            id,
            client_urls: vec![url.to_owned()],
            ..Member::default()
        }
    }

    fn endpoint(url: &str, member_id: u64, is_connected: bool, source: EndpointSource) -> EndpointView {
        EndpointView {
            member_id: Some(member_id).filter(|id| *id != 0),
            is_connected,
            ..Endpoint::new(url.parse().unwrap(), source, Arc::default()).view()
        }
    }

    fn ids(members: &[&Member]) -> Vec<u64> {
        members.iter().map(|member| member.id).collect()
    }

    #[test]
    fn member_is_missing_if_no_connected_endpoint_leads_to_it_whatever_its_url() {
        let learner = Member {
            is_learner: true,
            ..member(4, "http://d:1")
        };
        let members = [
            member(1, "http://a:1"),
            member(2, "http://b:1"),
            member(3, "http://c:1"),
            learner,
        ];
        let endpoints = [
            endpoint("http://name:1", 1, true, EndpointSource::Flag),
            endpoint("http://b:1", 2, false, EndpointSource::Flag),
        ];
        assert_eq!(ids(&missing(&members, &endpoints)), [2, 3]);
    }

    #[test]
    fn endpoints_of_removed_members_and_given_up_addresses_are_outdated_once_not_connected() {
        let members = [member(1, "http://a:1"), member(2, "http://moved:1")];
        let endpoints = [
            endpoint("http://a:1", 1, false, EndpointSource::Flag),
            endpoint("http://unknown:1", 0, false, EndpointSource::Flag),
            endpoint("http://name-of-2:1", 2, false, EndpointSource::Flag),
            endpoint("http://removed:1", 7, false, EndpointSource::Flag),
            endpoint("http://removed-but-there:1", 7, true, EndpointSource::Flag),
            endpoint("http://before-the-move:1", 2, false, EndpointSource::Members),
            endpoint("http://moved:1", 9, false, EndpointSource::Flag),
            endpoint("http://given-up:1", 2, true, EndpointSource::Members),
        ];
        let found: Vec<_> = outdated(&members, &endpoints)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, ["http://removed:1", "http://before-the-move:1"]);
    }

    #[test]
    fn urls_without_tls_are_not_used_beside_endpoints_with_tls() {
        let urls = [
            "http://a:1",
            "https://a:2",
            "unix:///a",
            "not a url",
            "https://b:1",
        ];
        let member = Member {
            client_urls: urls.map(str::to_owned).to_vec(),
            ..member(1, "")
        };
        let found = |endpoints: &[EndpointView], has_tls| -> Vec<String> {
            candidates(&member, endpoints, has_tls)
                .iter()
                .map(ToString::to_string)
                .collect()
        };
        let with_tls = [endpoint("https://b:1", 2, true, EndpointSource::Flag)];
        assert_eq!(found(&with_tls, true), ["https://a:2"]);
        let plain = [endpoint("http://b:1", 2, true, EndpointSource::Flag)];
        assert_eq!(found(&plain, false), ["http://a:1"]);
        assert_eq!(found(&plain, true), ["http://a:1", "https://a:2", "https://b:1"]);
    }
}
