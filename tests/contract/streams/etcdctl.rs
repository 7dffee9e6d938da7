//! `etcdctl get --stream` prints the same from etcd and through rangecache, from memory and forwarded.

use testkit::etcd::{Etcd, Version};
use testkit::process::tool;

use super::{NOT_MIRRORED, PREFIX, fill, start};

/// Output of `etcdctl get --stream` with these arguments, and whether it succeeds.
async fn get(url: &str, arguments: &[&str]) -> (bool, String, String) {
    let output = tokio::process::Command::new(tool("etcdctl"))
        .args(["--endpoints", url, "get", "--stream"])
        .args(arguments)
        .output()
        .await
        .expect("etcdctl runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    // Its errors name the endpoint.
    let errors = text(output.stderr).replace(url.trim_start_matches("http://"), "endpoint");
    (output.status.success(), text(output.stdout), errors)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_prints_the_same_stream() {
    let etcd = Etcd::start(Version::V3_7).await;
    fill(&etcd.client().await, 300, 200).await;
    for flags in [&[][..], NOT_MIRRORED] {
        let rangecache = start(&etcd, flags).await;
        for (arguments, succeeds) in [
            (&[PREFIX, "--prefix"][..], true),
            (&[PREFIX, "--prefix", "--write-out=json"], true),
            (&[PREFIX, "--prefix", "--limit=7", "--keys-only"], true),
            (&["/streams/000007", "--write-out=json"], true),
            (&[PREFIX, "--prefix", "--rev=1"], true),
            (&[PREFIX, "--prefix", "--rev=1000000"], false),
            (&[PREFIX, "--prefix", "--order=DESCEND"], false),
        ] {
            let expected = get(&etcd.url(), arguments).await;
            assert_eq!(expected.0, succeeds, "{arguments:?}: {expected:?}");
            let got = get(rangecache.url(), arguments).await;
            assert_eq!(got, expected, "{arguments:?} with {flags:?}");
        }
        let outcomes = rangecache.stream_outcomes().await;
        assert_eq!(outcomes.memory_answers() >= 5, flags.is_empty(), "{outcomes:?}");
    }
}
