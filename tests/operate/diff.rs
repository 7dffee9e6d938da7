//! `rangecache diff`: equal and differing endpoints.

use std::process::Output;

use testkit::etcd::{Etcd, Version};
use testkit::proxy::{Rangecache, rangecache_command};
use testkit::roles::{MIRROR, create_users, password};

const PREFIX: &str = "/diff/";
const KEYS: usize = 25;

async fn diff(args: &[&str]) -> Output {
    let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let run = move || rangecache_command().arg("diff").args(args).output();
    tokio::task::spawn_blocking(run).await.unwrap().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_are_compared_page_by_page_at_one_revision() {
    let (one, other) = (Etcd::start(Version::V3_7).await, Etcd::start(Version::V3_6).await);
    let (to_one, to_other) = (one.client().await, other.client().await);
    let mut equal = 0;
    for n in 0..KEYS {
        for client in [&to_one, &to_other] {
            equal = client
                .put(format!("{PREFIX}{n:02}"), "same")
                .await
                .expect("etcd writes");
        }
    }
    let (a, b) = (one.url(), other.url());
    let pages = ["--prefix", PREFIX, "--page-keys", "4"];
    let same = diff(&[&pages[..], &[&a, &b]].concat()).await;
    assert_eq!(text(&same), format!("equal: {KEYS} keys at revision {equal}\n"));
    assert_eq!(same.status.code(), Some(0));
    // Outside of the prefix, so that both have the same revision.
    to_one.put("/other", "x").await.expect("etcd writes");
    to_other.delete(format!("{PREFIX}03")).await.expect("etcd writes");
    for (client, key, value) in [
        (&to_one, "05", "secret of one"),
        (&to_other, "05", "secret of other"),
        (&to_one, "99", "x"),
        (&to_other, "/elsewhere", "x"),
    ] {
        client
            .put(format!("{PREFIX}{key}"), value)
            .await
            .expect("etcd writes");
    }
    let different = diff(&[&pages[..], &[&a, &b]].concat()).await;
    let (put, newest) = (equal + 2, equal + 3);
    assert_eq!(
        text(&different),
        format!(
            "only in B  {PREFIX}/elsewhere\nonly in A  {PREFIX}03\n\
             differs    {PREFIX}05  (both modified at {put})\nonly in A  {PREFIX}99\n\
             different: 4 of {} keys at revision {newest}\n",
            KEYS + 2
        )
    );
    assert_eq!(different.status.code(), Some(1));
    let first = diff(&[&pages[..], &["--limit", "2", &a, &b]].concat()).await;
    assert!(text(&first).contains("2 of the first 5 keys"), "{}", text(&first));
    assert_eq!(first.status.code(), Some(1));
    let before = diff(&[&pages[..], &["--revision", &equal.to_string(), &a, &b]].concat()).await;
    assert_eq!(before.status.code(), Some(0), "{}", text(&before));
    let nothing = diff(&["--prefix", "/nothing", &a, &b]).await;
    assert_eq!((nothing.status.code(), text(&nothing)), (Some(2), String::new()));
    let error = String::from_utf8(nothing.stderr).unwrap();
    assert!(error.contains("nothing was compared"), "{error}");
    let future = diff(&["--revision", "9999", &a, &b]).await;
    assert_eq!(future.status.code(), Some(2));
    let error = String::from_utf8(future.stderr).unwrap();
    assert!(error.contains("is at revision"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rangecache_equals_its_etcd_with_and_without_a_prefix() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    for n in 0..KEYS {
        direct
            .put(format!("{PREFIX}{n:02}"), n.to_string())
            .await
            .expect("etcd writes");
    }
    let rangecache = Rangecache::before(&etcd).start().await;
    let (a, b) = (etcd.url(), rangecache.url().to_owned());
    for prefix in ["", PREFIX] {
        let same = diff(&["--prefix", prefix, "--page-keys", "7", &a, &b]).await;
        assert!(
            text(&same).starts_with(&format!("equal: {KEYS} keys")),
            "{}",
            text(&same)
        );
        assert_eq!(same.status.code(), Some(0));
    }
    assert!(rangecache.outcomes().await.memory_answers() > 0);
    let nowhere = diff(&[&a, "http://127.0.0.1:1"]).await;
    assert_eq!(nowhere.status.code(), Some(2), "{}", text(&nowhere));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_with_auth_are_read_as_the_user_that_the_flags_name() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    direct.put(format!("{PREFIX}1"), "x").await.expect("etcd writes");
    create_users(&etcd).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--user", &format!("{MIRROR}:{}", password(MIRROR)))
        .start()
        .await;
    let (a, b) = (etcd.url(), rangecache.url().to_owned());
    let (user, secret) = (MIRROR, password(MIRROR));
    let same = diff(&["--prefix", PREFIX, "--user", user, "--password", &secret, &a, &b]).await;
    assert!(text(&same).starts_with("equal: 1 keys"), "{}", text(&same));
    assert_eq!(same.status.code(), Some(0));
    for (flags, says) in [
        (&["--user", "mirror:wrong"][..], "refuses --user or its password"),
        (&["--user", "mirror"], "--user has no password"),
        (&[], "user name is empty"),
    ] {
        let refused = diff(&[flags, &[&a, &b]].concat()).await;
        assert_eq!(refused.status.code(), Some(2));
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(error.contains(says) && !error.contains("wrong"), "{error}");
    }
}
