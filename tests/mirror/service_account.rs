//! rangecache's own user with auth on: its token is renewed when invalidated; missing permissions are reported.

use testkit::etcd::{Etcd, Version};
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::roles::{MIRROR, create_users, password, token};
use testkit::wait::{SOON, until};

/// Tokens are invalidated: callers' when they expire, all of them when etcd is restarted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_tokens_get_etcds_error_and_rangecaches_own_is_renewed() {
    let mut etcd = Etcd::start_with(Version::V3_7, &["--auth-token-ttl", "2"]).await;
    let root = create_users(&etcd).await;
    root.put("/a/007", "here").await.unwrap();
    let rangecache = Rangecache::before(&etcd)
        .with("--user", &format!("{MIRROR}:{}", password(MIRROR)))
        .with(
            "--log-level",
            "trace,h2=trace,hyper=trace,hyper_util=trace,tonic=trace,tower=trace",
        )
        .start()
        .await;
    let read = RangeRequest::one("/a/007");
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let alice = token(&direct, "alice").await;
    let through = through.with_metadata("token", &alice);
    assert_eq!(through.range(&read).await.unwrap().kvs.len(), 1);
    // Each use extends a token's lifetime, so reads are rare.
    let refused = loop {
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        if let Err(status) = through.range(&read).await {
            break status;
        }
    };
    let as_etcd = direct
        .with_metadata("token", &alice)
        .range(&read)
        .await
        .unwrap_err();
    assert_eq!(refused, as_etcd);
    etcd.restart().await;
    let direct = etcd.client().await;
    until(SOON, "responses come from memory again", async || {
        let alice = token(&direct, "alice").await;
        let before = rangecache.outcomes().await;
        rangecache
            .client()
            .await
            .with_metadata("token", &alice)
            .range(&read)
            .await
            .ok()?;
        (rangecache.outcomes_since(&before, 1).await.memory_answers() == 1).then_some(())
    })
    .await;
    let log = rangecache.log();
    assert!(
        !log.contains("open-sesame") && !log.contains(&alice),
        "a secret in the log:\n{log}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_permissions_and_wrong_passwords_are_reported_until_fixed() {
    let etcd = Etcd::start(Version::V3_7).await;
    let root = create_users(&etcd).await;
    root.put("/a/007", "here").await.unwrap();
    let wrong = Rangecache::before(&etcd)
        .with("--user", "mirror:wrong")
        .start_cold()
        .await;
    let unprivileged = Rangecache::before(&etcd)
        .with("--user", "carol:open-sesame-carol")
        .start_cold()
        .await;
    let without_user = Rangecache::before(&etcd).start_cold().await;
    for (rangecache, says) in [
        (&wrong, "does not accept the user \"mirror\""),
        (
            &unprivileged,
            "the user \"carol\" of --user may not read all of the mirror",
        ),
        (&without_user, "set --user"),
    ] {
        until(SOON, says, async || {
            let ready = rangecache.admin("/readyz").await;
            let log = rangecache.log().replace("\\\"", "\"");
            (ready.status == 503
                && ready.body.to_lowercase().contains(
                    &says
                        .to_lowercase()
                        .replace("set --user", "no user of its own (--user)"),
                )
                && log.to_lowercase().contains(&says.to_lowercase()))
            .then_some(())
        })
        .await;
        // Callers are served nevertheless.
        let alice = rangecache
            .client()
            .await
            .with_metadata("token", &token(&etcd.client().await, "alice").await);
        assert_eq!(alice.get("/a/007").await.unwrap().unwrap(), b"here");
    }
    root.grant_role("carol", "all").await.unwrap();
    unprivileged.warm().await;
    until(SOON, "the message disappears from /readyz", async || {
        (!unprivileged.admin("/readyz").await.body.contains("may not")).then_some(())
    })
    .await;
    // Permission revoked at run time: the mirror is up to date, but compactions by others would go unnoticed.
    root.revoke_role("carol", "all").await.unwrap();
    until(SOON, "the message is in /readyz again", async || {
        unprivileged
            .admin("/readyz")
            .await
            .body
            .contains("may not")
            .then_some(())
    })
    .await;
    let alice = unprivileged
        .client()
        .await
        .with_metadata("token", &token(&etcd.client().await, "alice").await);
    let before = unprivileged.outcomes().await;
    alice.get("/a/007").await.unwrap();
    assert_eq!(unprivileged.outcomes_since(&before, 1).await.memory_answers(), 0);
}

/// A signed token names the revision of etcd's users and roles, and is invalid once these have changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signed_tokens_are_renewed_when_permissions_change() {
    let dir = tempfile::TempDir::new().unwrap();
    let key = dir.path().join("key");
    std::fs::write(&key, "a key that only etcd has to know, and long enough").unwrap();
    let flag = format!("jwt,sign-method=HS256,ttl=10m,priv-key={}", key.display());
    let etcd = Etcd::start_with(Version::V3_7, &["--auth-token", &flag]).await;
    let root = create_users(&etcd).await;
    root.put("/a/007", "here").await.unwrap();
    let rangecache = Rangecache::before(&etcd)
        .with("--user", MIRROR)
        .with("--password", &password(MIRROR))
        .start()
        .await;
    let (direct, read) = (etcd.client().await, RangeRequest::one("/a/007"));
    let mut old = None;
    for role in ["b", "c", "d"] {
        let alice = token(&direct, "alice").await;
        let through = rangecache.client().await.with_metadata("token", &alice);
        until(SOON, "memory answers", async || {
            let before = rangecache.outcomes().await;
            assert_eq!(through.range(&read).await.unwrap().kvs.len(), 1);
            (rangecache.outcomes_since(&before, 1).await.memory_answers() == 1).then_some(())
        })
        .await;
        if let Some(old) = old.replace(through) {
            let refused = old.range(&read).await.unwrap_err();
            assert!(
                refused.message.contains("revision of auth store is old"),
                "{refused:?}"
            );
        }
        let root = direct.with_metadata("token", &token(&direct, "root").await);
        if role != "b" {
            root.add_role(role).await.unwrap();
        }
        let root = direct.with_metadata("token", &token(&direct, "root").await);
        root.grant_role("carol", role).await.unwrap();
    }
}

/// The user may read one prefix, below which there is nothing yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_mirror_of_a_restricted_user_comes_into_service() {
    let etcd = Etcd::start(Version::V3_7).await;
    let root = create_users(&etcd).await;
    root.put("/b/elsewhere", "v").await.unwrap();
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/a/")
        .with("--user", &format!("alice:{}", password("alice")))
        .start()
        .await;
    let read = RangeRequest::prefix("/a/");
    let from_memory = async |keys: usize| {
        until(SOON, "memory answers", async || {
            let direct = etcd.client().await;
            let through = rangecache.client().await;
            let through = through.with_metadata("token", &token(&direct, "alice").await);
            let before = rangecache.outcomes().await;
            assert_eq!(through.range(&read).await.ok()?.kvs.len(), keys);
            (rangecache.outcomes_since(&before, 1).await.memory_answers() == 1).then_some(())
        })
        .await;
    };
    from_memory(0).await;
    root.put("/a/first", "v").await.unwrap();
    from_memory(1).await;
    root.delete("/a/first").await.unwrap();
    from_memory(0).await;
    assert_eq!(
        rangecache.metrics().await.sum("rangecache_mirror_reloads_total"),
        1.0
    );
}

/// A restart of etcd while the mirror holds no key and has never seen an event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_mirror_of_a_restricted_user_resumes_after_a_restart() {
    let mut etcd = Etcd::start(Version::V3_5).await;
    create_users(&etcd).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/a/")
        .with("--user", &format!("alice:{}", password("alice")))
        .start()
        .await;
    etcd.restart().await;
    let direct = etcd.client().await;
    until(SOON, "memory answers after a restart", async || {
        let through = rangecache.client().await;
        let through = through.with_metadata("token", &token(&direct, "alice").await);
        let before = rangecache.outcomes().await;
        through.range(&RangeRequest::prefix("/a/")).await.ok()?;
        (rangecache.outcomes_since(&before, 1).await.memory_answers() == 1).then_some(())
    })
    .await;
    assert_eq!(
        rangecache.metrics().await.sum("rangecache_mirror_reloads_total"),
        1.0,
        "the mirror was resumed"
    );
}

/// etcd refuses to enable auth without a user root: reads of others still come from memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_switch_of_auth_forwards_no_read() {
    let etcd = Etcd::start(Version::V3_7).await;
    etcd.client().await.put("/a/007", "here").await.unwrap();
    let rangecache = Rangecache::before(&etcd).start().await;
    let through = rangecache.client().await;
    let read = RangeRequest {
        serializable: true,
        ..RangeRequest::one("/a/007")
    };
    through.range(&RangeRequest::one("/a/007")).await.unwrap();
    let before = rangecache.outcomes().await;
    for _ in 0..50 {
        through.auth_enable().await.unwrap_err();
        assert_eq!(through.range(&read).await.unwrap().kvs.len(), 1);
    }
    let outcomes = rangecache.outcomes_since(&before, 50).await;
    assert_eq!(outcomes.memory_answers(), 50, "{outcomes:?}");
}

/// The password is changed in etcd and in the file, in this order, while rangecache runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_password_file_is_read_again() {
    let etcd = Etcd::start(Version::V3_7).await;
    let root = create_users(&etcd).await;
    root.put("/a/007", "here").await.unwrap();
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("password");
    std::fs::write(&file, format!("{}\n", password(MIRROR))).unwrap();
    let rangecache = Rangecache::before(&etcd)
        .with("--user", MIRROR)
        .with("--password-file", file.to_str().unwrap())
        .start()
        .await;
    let direct = etcd.client().await;
    let from_memory = async || {
        let alice = token(&direct, "alice").await;
        let through = rangecache.client().await.with_metadata("token", &alice);
        let before = rangecache.outcomes().await;
        through.range(&RangeRequest::one("/a/007")).await.ok()?;
        (rangecache.outcomes_since(&before, 1).await.memory_answers() == 1).then_some(())
    };
    until(SOON, "memory answers", from_memory).await;
    // The tokens of the user are invalid from then on.
    root.change_password(MIRROR, "another one").await.unwrap();
    until(SOON, "etcd refuses the old password", async || {
        rangecache
            .log()
            .contains("does not accept the user")
            .then_some(())
    })
    .await;
    std::fs::write(&file, "another one\n").unwrap();
    until(SOON * 2, "memory answers again", from_memory).await;
    assert!(!rangecache.log().contains("another one"), "a secret in the log");
}
