//! Watches from memory with auth on: etcd authorizes each create request, and what happens to a right later concerns
//! later requests only.

use http::Method;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Stream};
use testkit::pb::{RangeRequest, WatchResponse};
use testkit::proxy::Rangecache;
use testkit::roles::{MIRROR, create_users, password, token};
use testkit::wait::{SOON, until};

use super::watch_streams::{before, create, created, header_revision, next, open, prefix};

/// Ranges per caller.
const RANGES: i64 = 25;
/// Writes to the keys of each caller.
const WRITES: i64 = 200;

async fn with_own_user(etcd: &Etcd) -> Rangecache {
    let builder = before(etcd).with("--user", MIRROR);
    builder.with("--password", &password(MIRROR)).start().await
}

async fn caller(client: &Client, direct: &Client, name: &str) -> Client {
    client.with_metadata("token", &token(direct, name).await)
}

/// Refusal of a watch of the prefix `/b/` by a stream of its own.
async fn refusal(client: &Client) -> (bool, bool, i64, String) {
    let response = next(&mut open(client, &[create(prefix("/b/", 0))])).await;
    outcome(response)
}

fn outcome(response: WatchResponse) -> (bool, bool, i64, String) {
    let (created, canceled, id) = (response.created, response.canceled, response.watch_id);
    (created, canceled, id, response.cancel_reason)
}

async fn watches_respect_rights(version: Version) {
    let etcd = Etcd::start(version).await;
    let root = create_users(&etcd).await;
    let rangecache = with_own_user(&etcd).await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let mut streams = Vec::new();
    for (name, own) in [("alice", "/a/"), ("bob", "/b/")] {
        let caller = caller(&through, &direct, name).await;
        let creates: Vec<_> = (0..RANGES)
            .map(|range| create(prefix(&format!("{own}{range:02}/"), 0)))
            .collect();
        let mut stream = open(&caller, &creates);
        for id in 0..RANGES {
            let response = next(&mut stream).await;
            assert!(
                response.created && !response.canceled && response.watch_id == id,
                "{response:?}"
            );
        }
        streams.push((own, stream));
    }
    assert_eq!(created(&rangecache, "memory", "now").await, 2.0 * RANGES as f64);

    // What etcd does not grant it refuses in its own words.
    for name in ["alice", "carol"] {
        let [through, direct] = [&through, &direct].map(Client::clone);
        let expected = refusal(&caller(&direct, &direct, name).await).await;
        assert!(expected.1, "{expected:?}");
        assert_eq!(
            refusal(&caller(&through, &direct, name).await).await,
            expected,
            "{name}"
        );
    }
    let expected = refusal(&direct).await;
    assert_eq!(refusal(&through).await, expected, "without credentials");
    assert_eq!(created(&rangecache, "memory", "now").await, 2.0 * RANGES as f64);

    // In mid-stream, too; the stream's other watchers continue.
    let alice = &mut streams[0].1;
    alice.send(&create(prefix("/b/", 0)));
    let response = next(alice).await;
    assert!(
        response.created && response.canceled && response.watch_id == -1,
        "{response:?}"
    );

    let mut last = 0;
    for write in 0..WRITES {
        for own in ["/a/", "/b/"] {
            let key = format!("{own}{:02}/key", write % RANGES);
            last = root.put(&key, write.to_string()).await.expect("put");
        }
    }
    for (own, stream) in &mut streams {
        let mut events = 0;
        while events < WRITES {
            let response = next(stream).await;
            assert!(header_revision(&response) <= last);
            for event in &response.events {
                let key = String::from_utf8_lossy(&event.kv.as_ref().expect("a kv").key).into_owned();
                assert_eq!(
                    key,
                    format!("{own}{:02}/key", response.watch_id),
                    "another caller's event"
                );
                events += 1;
            }
        }
    }
}

/// Watches that are the same at etcd and through rangecache.
struct Compared {
    streams: [Stream; 2],
    /// Watchers of each stream.
    watchers: i64,
    root: Client,
}

impl Compared {
    /// Requests a watch of `/a/` on both streams, and returns the outcome, which must be the same.
    async fn create(&mut self, what: &str) -> (bool, bool, i64, String) {
        let mut outcomes = Vec::new();
        for stream in &mut self.streams {
            stream.send(&create(prefix("/a/", 0)));
            outcomes.push(outcome(next(stream).await));
        }
        assert_eq!(outcomes[0], outcomes[1], "{what}");
        let outcome = outcomes.remove(0);
        self.watchers += i64::from(!outcome.1);
        outcome
    }

    /// Each open watch gets an event.
    async fn write(&mut self, what: &str) {
        let revision = self.root.put("/a/key", what).await.expect("put");
        for stream in &mut self.streams {
            let mut ids = Vec::new();
            for _ in 0..self.watchers {
                let response = next(stream).await;
                let events = response.events.iter().map(|event| event.kv.as_ref());
                let revisions: Vec<_> = events.map(|kv| kv.expect("a kv").mod_revision).collect();
                assert_eq!(revisions, [revision], "{what}: {response:?}");
                ids.push(response.watch_id);
            }
            ids.sort_unstable();
            assert!(ids.into_iter().eq(0..self.watchers), "{what}");
        }
    }
}

async fn handovers(rangecache: &Rangecache) -> f64 {
    rangecache.metrics().await.sum("rangecache_watch_handovers_total")
}

async fn lost_rights_refuse_later_creates(version: Version) {
    let etcd = Etcd::start(version).await;
    let root = create_users(&etcd).await;
    let rangecache = with_own_user(&etcd).await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let streams = [
        open(&caller(&direct, &direct, "alice").await, &[]),
        open(&caller(&through, &direct, "alice").await, &[]),
    ];
    let mut compared = Compared {
        streams,
        watchers: 0,
        root: root.clone(),
    };
    assert_eq!(compared.create("granted").await, (true, false, 0, String::new()));
    compared.write("granted").await;

    root.revoke_role("alice", "a").await.expect("revoked");
    compared.write("role revoked").await;
    assert!(compared.create("role revoked").await.1);
    compared.write("after the refusal").await;

    root.grant_role("alice", "a").await.expect("granted");
    assert_eq!(compared.create("granted again").await.2, 1);
    compared.write("granted again").await;

    // As for an expired token.
    root.change_password("alice", "other").await.expect("changed");
    compared.write("token invalid").await;
    assert!(compared.create("token invalid").await.1);
    for stream in &mut compared.streams {
        stream.send(&create(prefix("/elsewhere/", 0)));
        assert!(next(stream).await.canceled, "token invalid");
    }
    compared.write("token invalid, after the refusals").await;

    root.delete_user("alice").await.expect("deleted");
    compared.write("user deleted").await;
    assert!(compared.create("user deleted").await.1);
    compared.write("user deleted, after the refusal").await;

    root.disable_auth().await.expect("disabled");
    compared.write("auth off").await;
    assert!(!compared.create("auth off").await.1);
    compared.write("auth off, after the create").await;
    assert_eq!(created(&rangecache, "memory", "now").await, 3.0);
    assert_eq!(handovers(&rangecache).await, 0.0);
}

/// A stream that left memory returns to it only with the rights of its watchers; meanwhile etcd serves them, which
/// checks rights at their creation.
async fn streams_without_rights_stay_at_etcd(version: Version) {
    let etcd = Etcd::start(version).await;
    let root = create_users(&etcd).await;
    let rangecache = with_own_user(&etcd).await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let alice = caller(&through, &direct, "alice").await;
    let mut stream = open(&alice, &[create(prefix("/a/", 0))]);
    assert!(!next(&mut stream).await.canceled);
    let is_served_by = async |source: &str, when: &str| {
        until(SOON, &format!("{when}: {source} serves the stream"), async || {
            (rangecache.metrics().await.watch_streams(source) == 1.0).then_some(())
        })
        .await;
    };
    is_served_by("memory", "at first").await;
    rangecache.forward_all(Method::POST).await;
    is_served_by("etcd", "memory is switched off").await;
    // etcd reports progress, which the return needs, from the next write on.
    root.put("/a/key", "memory is switched off").await.expect("put");

    let refusals = async || {
        let metrics = etcd.metrics().await;
        metrics.sum_with_label("grpc_server_handled_total", "grpc_code=\"PermissionDenied\"")
    };
    let before = refusals().await;
    root.revoke_role("alice", "a").await.expect("revoked");
    rangecache.forward_all(Method::DELETE).await;
    until(SOON, "etcd refuses the return to memory", async || {
        (refusals().await > before).then_some(())
    })
    .await;
    is_served_by("etcd", "without the right").await;
    root.put("/a/key", "without the right").await.expect("put");
    root.grant_role("alice", "a").await.expect("granted");
    is_served_by("memory", "granted again").await;
    root.put("/a/key", "granted again").await.expect("put");
    for value in ["memory is switched off", "without the right", "granted again"] {
        let response = next(&mut stream).await;
        let values = response
            .events
            .iter()
            .map(|event| &event.kv.as_ref().expect("a kv").value);
        assert!(values.eq([value.as_bytes()]), "{response:?}");
    }
}

async fn auth_that_is_enabled_refuses_later_creates(version: Version) {
    let etcd = Etcd::start(version).await;
    let root = create_users(&etcd).await;
    root.disable_auth().await.expect("disabled");
    let rangecache = with_own_user(&etcd).await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let mut compared = Compared {
        streams: [open(&direct, &[]), open(&through, &[])],
        watchers: 0,
        root: root.clone(),
    };
    assert!(!compared.create("auth off").await.1);
    compared.write("auth off").await;
    root.auth_enable().await.expect("enabled");
    compared.root = direct
        .authenticate("root", &password("root"))
        .await
        .expect("root");
    compared.write("auth on").await;
    assert!(compared.create("auth on").await.1);
    compared.write("auth on, after the refusal").await;
    assert_eq!(handovers(&rangecache).await, 0.0);
}

/// Without a user no version is known, no check succeeds and no mirror loads, and auth is the cause of all of that.
#[tokio::test]
async fn reads_and_watches_of_a_rangecache_without_a_user_count_as_auth() {
    let etcd = Etcd::start(Version::V3_7).await;
    create_users(&etcd).await;
    let rangecache = before(&etcd).start_cold().await;
    until(SOON, "rangecache knows that auth is on", async || {
        let readiness = rangecache.admin("/readyz").await.body;
        readiness.contains("--user").then_some(())
    })
    .await;
    let through = rangecache.client().await;
    let refused = through.range(&RangeRequest::one("/a/0")).await.unwrap_err();
    assert_eq!(refused.message, "etcdserver: user name is empty");
    refusal(&through).await;
    let alice = caller(&through, &etcd.client().await, "alice").await;
    alice.range(&RangeRequest::one("/a/0")).await.expect("may read");
    let outcomes = rangecache.outcomes().await.0;
    let auth = ("forwarded".to_owned(), "auth".to_owned());
    assert_eq!(outcomes.get(&auth), Some(&2), "{outcomes:?}");
    assert_eq!(created(&rangecache, "etcd", "auth").await, 1.0);
}

#[tokio::test]
async fn rights_that_are_lost_refuse_later_watches_and_end_none_3_7() {
    lost_rights_refuse_later_creates(Version::V3_7).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn rights_that_are_lost_refuse_later_watches_and_end_none_3_6() {
    lost_rights_refuse_later_creates(Version::V3_6).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn rights_that_are_lost_refuse_later_watches_and_end_none_3_5() {
    lost_rights_refuse_later_creates(Version::V3_5).await;
}

#[tokio::test]
async fn streams_return_to_memory_with_their_rights_alone_3_7() {
    streams_without_rights_stay_at_etcd(Version::V3_7).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn streams_return_to_memory_with_their_rights_alone_3_6() {
    streams_without_rights_stay_at_etcd(Version::V3_6).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn streams_return_to_memory_with_their_rights_alone_3_5() {
    streams_without_rights_stay_at_etcd(Version::V3_5).await;
}

#[tokio::test]
async fn auth_that_is_enabled_refuses_later_watches_and_ends_none_3_7() {
    auth_that_is_enabled_refuses_later_creates(Version::V3_7).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn auth_that_is_enabled_refuses_later_watches_and_ends_none_3_6() {
    auth_that_is_enabled_refuses_later_creates(Version::V3_6).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn auth_that_is_enabled_refuses_later_watches_and_ends_none_3_5() {
    auth_that_is_enabled_refuses_later_creates(Version::V3_5).await;
}

#[tokio::test]
async fn watches_from_memory_are_authorized_by_etcd_3_7() {
    watches_respect_rights(Version::V3_7).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn watches_from_memory_are_authorized_by_etcd_3_6() {
    watches_respect_rights(Version::V3_6).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn watches_from_memory_are_authorized_by_etcd_3_5() {
    watches_respect_rights(Version::V3_5).await;
}
