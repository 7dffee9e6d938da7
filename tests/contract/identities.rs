//! I8 on real etcd with auth on: for every caller and during every change, responses through rangecache are those
//! that etcd has for that caller; permitted reads are answered from memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use testkit::effort::part_of;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Reply, Status};
use testkit::pb::{BY_MOD, DESCEND, RangeRequest, prefix_end};
use testkit::proxy::Rangecache;
use testkit::roles::{MIRROR, create_users, password, token};
use testkit::wait::{SOON, until};

const CALLERS: [&str; 6] = ["alice", "bob", "carol", "root", "anonymous", "garbage"];
const KEYS: usize = 40;

/// Errors that etcd returns to calls concurrent with a change of permissions.
fn is_of_the_moment(reply: &Reply) -> bool {
    let Status { code, message } = reply.status();
    (code == 3
        && (message.contains("revision of auth store is old") || message.contains("user name is empty")))
        || (code == 16 && message.contains("invalid auth token"))
}

/// Reads of every shape, over ranges that some users may read and others may not.
fn shapes(old: i64, now: i64) -> Vec<RangeRequest> {
    let mut shapes = vec![
        RangeRequest::one("/a/007"),
        RangeRequest::one("/b/007"),
        RangeRequest::one("/b/008"),
        RangeRequest::one("/a/not there"),
        RangeRequest::one("/c"),
        RangeRequest::one("\0"),
        RangeRequest::prefix("/a/"),
        RangeRequest::prefix("/a/00"),
        RangeRequest::prefix("/b/"),
        RangeRequest::prefix("/"),
        RangeRequest::range("/a/005", "/a/015"),
        RangeRequest::range("/a/035", "/b/005"),
        RangeRequest::range("/a/015", "/a/005"),
        RangeRequest::range("/a/030", "\0"),
        RangeRequest::range("/b/", "\0"),
        RangeRequest::everything(),
    ];
    let of = |key: &str| RangeRequest::prefix(key);
    for key in ["/a/", "/b/"] {
        shapes.extend([
            RangeRequest {
                count_only: true,
                ..of(key)
            },
            RangeRequest {
                keys_only: true,
                ..of(key)
            },
            RangeRequest { limit: 7, ..of(key) },
            RangeRequest {
                sort_order: DESCEND,
                sort_target: BY_MOD,
                limit: 3,
                ..of(key)
            },
            RangeRequest {
                serializable: true,
                ..of(key)
            },
            RangeRequest {
                revision: old,
                ..of(key)
            },
            RangeRequest {
                revision: old,
                serializable: true,
                limit: 5,
                ..of(key)
            },
            RangeRequest {
                revision: now + 1000,
                ..of(key)
            },
            RangeRequest {
                revision: 2,
                ..of(key)
            },
        ]);
    }
    shapes
}

/// A store with `/a/` and `/b/`, users with their roles, and rangecache with its own user.
struct Scene {
    etcd: Etcd,
    rangecache: Rangecache,
    root: Client,
    shapes: Vec<RangeRequest>,
    asked: AtomicU64,
    allowed: AtomicU64,
}

/// A caller, connected to etcd and to rangecache with the same token.
struct Caller {
    name: &'static str,
    direct: Client,
    through: Client,
}

impl Scene {
    async fn new(version: Version) -> Self {
        let etcd = Etcd::start_with(version, &["--auth-token-ttl", "60"]).await;
        let root = create_users(&etcd).await;
        let old = store(&root, "before").await;
        let rangecache = Rangecache::before(&etcd)
            .with("--user", MIRROR)
            .with("--password", &password(MIRROR))
            .start()
            .await;
        // The mirror's history holds the revision in between, and all later ones.
        store(&root, "since").await;
        root.compact(old - 40).await.unwrap();
        let now = root
            .range(&RangeRequest::one("/a/"))
            .await
            .unwrap()
            .header
            .unwrap()
            .revision;
        Self {
            etcd,
            rangecache,
            root,
            shapes: shapes(old, now),
            asked: AtomicU64::new(0),
            allowed: AtomicU64::new(0),
        }
    }

    /// All callers, with new tokens.
    async fn callers(&self) -> Vec<Caller> {
        let (direct, through) = (self.etcd.client().await, self.rangecache.client().await);
        let mut callers = Vec::new();
        for name in CALLERS {
            let pair = [&direct, &through].map(Client::clone);
            let pair = match name {
                "anonymous" => pair,
                "garbage" => pair.map(|client| client.with_metadata("token", "garbage.77")),
                _ => {
                    let token = token(&direct, name).await;
                    // etcd accepts a token under either header name.
                    let field = if name == "bob" { "authorization" } else { "token" };
                    pair.map(|client| client.with_metadata(field, &token))
                }
            };
            let [direct, through] = pair;
            callers.push(Caller {
                name,
                direct,
                through,
            });
        }
        callers
    }

    /// etcd's responses to every caller and shape, in that order.
    async fn expected(&self, callers: &[Caller]) -> Vec<Vec<Reply>> {
        let mut expected = Vec::new();
        for caller in callers {
            let mut replies = Vec::new();
            for shape in &self.shapes {
                replies.push(caller.direct.range_raw(shape).await.unwrap());
            }
            expected.push(replies);
        }
        expected
    }

    /// Without changes every response equals etcd's.
    async fn is_quiet(&self, callers: &[Caller], what: &str) -> Vec<Vec<Reply>> {
        let expected = self.expected(callers).await;
        for (caller, expected) in callers.iter().zip(&expected) {
            for (shape, expected) in self.shapes.iter().zip(expected) {
                let reply = caller.through.range_raw(shape).await.unwrap();
                assert_eq!(reply, *expected, "{what}: {} asks {shape:?}", caller.name);
                self.count(&reply);
            }
        }
        expected
    }

    fn count(&self, reply: &Reply) {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if reply.status().code == 0 {
            self.allowed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All callers send every shape `rounds` times through rangecache while `change` is applied. A response to a read
    /// sent after the change equals etcd's after it; any other equals etcd's before, after or during the change.
    /// Responses to `loose` callers may equal those before the change even afterwards.
    async fn hammer(
        &self,
        callers: &[Caller],
        rounds: usize,
        what: &str,
        change: impl Future<Output = ()>,
        loose: impl Fn(&Caller, &RangeRequest) -> bool,
    ) {
        let before = self.is_quiet(callers, what).await;
        let (begun, changed) = (AtomicU64::new(0), AtomicBool::new(false));
        let shapes = &self.shapes;
        let ask = async |number: usize, start: usize| {
            let caller = &callers[number];
            let mut answers = Vec::new();
            for round in 0..rounds {
                for offset in 0..shapes.len() {
                    let shape = (start * 5 + offset * 7 + round) % shapes.len();
                    let late = changed.load(Ordering::SeqCst);
                    begun.fetch_add(1, Ordering::Relaxed);
                    let reply = caller.through.range_raw(&shapes[shape]).await.unwrap();
                    self.count(&reply);
                    if reply != before[number][shape] || late {
                        answers.push((shape, late, reply));
                    }
                }
            }
            answers
        };
        let lanes = 2;
        let asking = (0..callers.len() * lanes).map(|lane| ask(lane % callers.len(), lane));
        let all = (rounds * shapes.len() * callers.len() * lanes) as u64;
        let changing = async {
            until(SOON, "a third of the reads is sent", async || {
                (begun.load(Ordering::Relaxed) > all / 3).then_some(())
            })
            .await;
            change.await;
            changed.store(true, Ordering::SeqCst);
        };
        let (answers, ()) = tokio::join!(futures_util::future::join_all(asking), changing);
        let after = self.expected(callers).await;
        let mut late_answers = 0;
        for (lane, answers) in answers.iter().enumerate() {
            let number = lane % callers.len();
            let caller = &callers[number];
            for (shape, late, reply) in answers {
                let (before, after) = (&before[number][*shape], &after[number][*shape]);
                let request = &shapes[*shape];
                let name = caller.name;
                late_answers += u64::from(*late);
                if *late && !loose(caller, request) {
                    assert_eq!(reply, after, "{what}: after it, {name} asks {request:?}");
                } else {
                    assert!(
                        reply == after || reply == before || is_of_the_moment(reply),
                        "{what}: {name} asks {request:?} and gets {reply:?}\nbefore: {before:?}\nafter: {after:?}"
                    );
                }
            }
        }
        assert!(
            late_answers > all / 10,
            "{what}: {late_answers} of {all} sent after it"
        );
    }

    /// Nearly all permitted reads are answered from memory.
    async fn mostly_from_memory(&self) {
        let asked = self.asked.load(Ordering::Relaxed);
        let allowed = self.allowed.load(Ordering::Relaxed);
        let outcomes = self.rangecache.outcomes().await;
        println!("{asked} reads, {allowed} permitted by etcd: {outcomes:?}");
        assert!(
            outcomes.memory_answers() * 10 >= allowed * 9,
            "of {allowed} permitted reads too few were answered from memory: {outcomes:?}"
        );
    }
}

/// Writes the keys that are read; returns the revision.
async fn store(root: &Client, when: &str) -> i64 {
    for number in 0..KEYS {
        for prefix in ["/a/", "/b/"] {
            root.put(format!("{prefix}{number:03}"), format!("{when} {number}"))
                .await
                .unwrap();
        }
    }
    root.put("/c", when).await.unwrap();
    root.put("\0", when).await.unwrap();
    root.put("/a", when).await.unwrap()
}

async fn responses_respect_permissions_while_they_change(version: Version, rounds: usize) {
    let scene = Scene::new(version).await;
    let root = &scene.root;
    let exact = |_: &Caller, _: &RangeRequest| false;
    macro_rules! while_all_read {
        ($what:literal, $change:expr) => {
            let callers = scene.callers().await;
            scene
                .hammer(
                    &callers,
                    rounds,
                    $what,
                    async { $change.await.unwrap() },
                    exact,
                )
                .await;
            scene.is_quiet(&scene.callers().await, $what).await;
        };
    }
    while_all_read!("carol is granted a role", root.grant_role("carol", "a"));
    while_all_read!("alice's role is revoked", root.revoke_role("alice", "a"));
    while_all_read!(
        "bob's role is granted another prefix",
        root.grant_read("b", "/a/", prefix_end(b"/a/"))
    );
    while_all_read!(
        "bob's role loses that prefix",
        root.revoke_read("b", "/a/", prefix_end(b"/a/"))
    );
    while_all_read!(
        "bob's role loses its single key",
        root.revoke_read("b", "/a/007", "")
    );
    while_all_read!("a role is added", root.add_role("from"));
    while_all_read!(
        "the role is granted an open range",
        root.grant_read("from", "/a/020", "\0")
    );
    while_all_read!("alice is granted that role", root.grant_role("alice", "from"));
    while_all_read!("carol's role is revoked", root.revoke_role("carol", "a"));
    scene.mostly_from_memory().await;
    let log = scene.rangecache.log();
    assert!(!log.contains("open-sesame"), "a password in the log:\n{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_respect_permissions_while_they_change_3_7() {
    responses_respect_permissions_while_they_change(Version::V3_7, part_of(20) as usize).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn responses_respect_permissions_while_they_change_3_6() {
    responses_respect_permissions_while_they_change(Version::V3_6, part_of(3) as usize).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn responses_respect_permissions_while_they_change_3_5() {
    responses_respect_permissions_while_they_change(Version::V3_5, part_of(3) as usize).await;
}

async fn responses_respect_auth_while_it_is_switched(version: Version) {
    let scene = Scene::new(version).await;
    let anonymous = scene.etcd.client().await;
    // A serializable read without a token may see the state of a moment ago, like on a member that lags.
    let lag = |caller: &Caller, request: &RangeRequest| {
        caller.name == "anonymous" && (request.serializable || request.revision > 0)
    };
    for turn in 0..2 {
        let callers = scene.callers().await;
        let root = anonymous.authenticate("root", &password("root")).await.unwrap();
        scene
            .hammer(
                &callers,
                3,
                "auth is switched off",
                async { root.disable_auth().await.unwrap() },
                lag,
            )
            .await;
        let tokenless = &callers[4..5];
        learned(&scene, tokenless).await;
        scene.is_quiet(&callers, "auth is off").await;
        scene
            .hammer(
                &callers,
                3,
                "auth is switched on",
                async { anonymous.auth_enable().await.unwrap() },
                lag,
            )
            .await;
        learned(&scene, tokenless).await;
        scene.is_quiet(&callers, "old tokens").await;
        scene.is_quiet(&scene.callers().await, "new tokens").await;
        // rangecache's own token was invalidated with the others.
        until(SOON, "rangecache has a new token", async || {
            let caller = &scene.callers().await[0];
            let before = scene.rangecache.outcomes().await;
            let allowed = &RangeRequest::one("/a/007");
            caller.through.range(allowed).await.unwrap();
            let since = scene.rangecache.outcomes_since(&before, 1).await;
            (since.memory_answers() == 1).then_some(())
        })
        .await;
        println!("turn {turn}: {:?}", scene.rangecache.outcomes().await);
    }
}

/// Waits until callers without a token get etcd's responses to every shape.
async fn learned(scene: &Scene, tokenless: &[Caller]) {
    let expected = scene.expected(tokenless).await;
    until(SOON, "rangecache learns whether auth is on", async || {
        for (shape, expected) in scene.shapes.iter().zip(&expected[0]) {
            if tokenless[0].through.range_raw(shape).await.unwrap() != *expected {
                return None;
            }
        }
        Some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_respect_auth_while_it_is_switched_3_7() {
    responses_respect_auth_while_it_is_switched(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn responses_respect_auth_while_it_is_switched_3_6() {
    responses_respect_auth_while_it_is_switched(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn responses_respect_auth_while_it_is_switched_3_5() {
    responses_respect_auth_while_it_is_switched(Version::V3_5).await;
}

/// A permission is revoked before a secret is written, and granted again after the secret is deleted: a caller with
/// permission at the time of its read must not see the later write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_after_a_revocation_are_never_seen() {
    let scene = Scene::new(Version::V3_7).await;
    let done = AtomicBool::new(false);
    let direct = scene.etcd.client().await;
    let (seen, refused) = (AtomicU64::new(0), AtomicU64::new(0));
    // Before rights change: etcd checks a password again until no right has changed meanwhile.
    let token = token(&direct, "alice").await;
    let alice = async || {
        let through = scene.rangecache.client().await;
        let through = through.with_metadata("token", &token);
        while !done.load(Ordering::SeqCst) {
            match through.get("/a/book").await {
                Ok(value) => {
                    let value = String::from_utf8(value.unwrap_or_default()).unwrap();
                    assert!(!value.contains("secret"), "alice reads {value:?}");
                    seen.fetch_add(1, Ordering::Relaxed);
                }
                Err(_) => _ = refused.fetch_add(1, Ordering::Relaxed),
            }
        }
    };
    let root = async {
        let end = prefix_end(b"/a/");
        for turn in 0..300 {
            scene.root.put("/a/book", format!("open {turn}")).await.unwrap();
            scene.root.grant_read("a", "/a/", &end).await.unwrap();
            let before = seen.load(Ordering::Relaxed);
            until(SOON, "alice reads", async || {
                (seen.load(Ordering::Relaxed) > before).then_some(())
            })
            .await;
            scene.root.revoke_read("a", "/a/", &end).await.unwrap();
            scene.root.put("/a/book", format!("secret {turn}")).await.unwrap();
        }
        done.store(true, Ordering::SeqCst);
    };
    let readers = futures_util::future::join_all((0..24).map(|_| alice()));
    tokio::join!(root, readers);
    let outcomes = scene.rangecache.outcomes().await;
    println!("{seen:?} seen, {refused:?} refused: {outcomes:?}");
    assert!(refused.into_inner() > 0);
    // A read that meets a change of permissions is forwarded: on a busy machine that is nearly all of them.
    assert!(outcomes.memory_answers() > 0, "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn authorizations_cost_etcd_neither_keys_nor_bytes() {
    let scene = Scene::new(Version::V3_7).await;
    for number in 0..64 {
        scene
            .root
            .put(format!("/a/large/{number}"), vec![b'x'; 8 << 10])
            .await
            .unwrap();
    }
    let list = RangeRequest::prefix("/a/");
    let sent = async || {
        let metrics = scene.etcd.metrics().await;
        let cpu = metrics.sum("process_cpu_seconds_total");
        (metrics.sum("etcd_network_client_grpc_sent_bytes_total"), cpu)
    };
    let alice = &scene.callers().await[0];
    let mut spent = Vec::new();
    for client in [&alice.direct, &alice.through] {
        // The first check on a connection is compared by the newest events.
        client.range(&list).await.unwrap();
        let before = sent().await;
        for _ in 0..50 {
            assert_eq!(client.range(&list).await.unwrap().kvs.len(), KEYS + 64);
        }
        let after = sent().await;
        spent.push((after.0 - before.0, after.1 - before.1));
    }
    println!("etcd's bytes and CPU seconds for 50 lists, direct and through rangecache: {spent:?}");
    assert!(spent[1].0 * 100.0 < spent[0].0, "{spent:?}");
}
