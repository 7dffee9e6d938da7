//! Starts from what a neighbour has (`--warm-from`).

use serde_json::Value;
use testkit::etcd::{Etcd, Version};
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, recovers};
use testkit::roles::{MIRROR, create_users, password};

const PREFIX: &str = "/warm/";
const KEYS: usize = 500;
const VALUE_BYTES: usize = 1_000;

async fn filled(version: Version) -> Etcd {
    filled_with(version, PREFIX, KEYS, VALUE_BYTES).await
}

/// An etcd with `keys` keys below `prefix`.
pub(crate) async fn filled_with(version: Version, prefix: &str, keys: usize, value_bytes: usize) -> Etcd {
    let etcd = Etcd::start(version).await;
    let client = etcd.client().await;
    for n in 0..keys {
        let put = client.put(format!("{prefix}{n:03}"), "v".repeat(value_bytes));
        put.await.expect("etcd writes");
    }
    etcd
}

/// Fails unless the answers of `rangecache` are those of `etcd`.
async fn answers_are_those_of(etcd: &Etcd, rangecache: &Rangecache) {
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    recovers(
        "a start",
        PREFIX,
        &direct,
        rangecache,
        &through,
        Reads::MustSucceed,
    )
    .await;
}

async fn loads_from_neighbours(rangecache: &Rangecache) -> f64 {
    let metrics = rangecache.metrics().await;
    metrics.sum_with_label("rangecache_mirror_adopted_total", "source=\"neighbour\"")
}

/// A rangecache that starts beside one that is warm has its keys, and compares them with all of etcd before it serves.
async fn starts_from_a_neighbour(version: Version) {
    let etcd = filled(version).await;
    let folder = tempfile::tempdir().expect("a folder");
    let socket = format!("unix://{}", folder.path().join("clients.sock").display());
    let first = Rangecache::before(&etcd).start().await;
    let on_socket = Rangecache::before(&etcd).listening_on(&socket).start().await;
    for neighbour in [first.url(), &socket] {
        let second = Rangecache::before(&etcd)
            .with("--warm-from", neighbour)
            .start()
            .await;
        assert_eq!(loads_from_neighbours(&second).await, 1.0, "{}", second.log());
        let metrics = second.metrics().await;
        assert_eq!(metrics.sum("rangecache_mirror_reloads_total"), 1.0);
        let compared = metrics.sum("rangecache_mirror_load_bytes");
        assert!(
            compared > (KEYS * VALUE_BYTES) as f64,
            "{compared} bytes of etcd were compared"
        );
        let kept = metrics.sum("rangecache_mirror_adopted_bytes_total");
        assert!(kept > (KEYS * VALUE_BYTES) as f64, "{kept}");
        answers_are_those_of(&etcd, &second).await;
    }
    drop(on_socket);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_from_a_neighbour_is_compared_with_all_of_etcd_3_7() {
    starts_from_a_neighbour(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn start_from_a_neighbour_is_compared_with_all_of_etcd_3_5() {
    starts_from_a_neighbour(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neighbours_that_are_of_no_use_cost_nothing_but_time() {
    let (etcd, another) = (filled(Version::V3_7).await, filled(Version::V3_7).await);
    let hangs = Rangecache::before(&etcd).start().await;
    hangs.pause();
    let cold = Rangecache::before(&etcd)
        .with("--cache-prefix", "/other/")
        .start()
        .await;
    let foreign = Rangecache::before(&another).start().await;
    let etcd_url = etcd.url();
    let neighbours = [
        hangs.url(),
        "http://127.0.0.1:1",
        cold.url(),
        &etcd_url,
        foreign.url(),
    ];
    let second = Rangecache::before(&etcd)
        .with("--warm-from", &neighbours.join(","))
        .start()
        .await;
    assert_eq!(loads_from_neighbours(&second).await, 0.0);
    let log = second.log();
    assert_eq!(log.matches("a neighbour is of no use").count(), 4, "{log}");
    assert_eq!(
        log.matches("the keys of the neighbour or image are of another cluster or history")
            .count(),
        1,
        "{log}"
    );
    let status: Value = serde_json::from_str(&second.admin("/status").await.body).expect("it is JSON");
    let findings = status["findings"].as_array().expect("findings");
    let of_no_use = findings
        .iter()
        .filter(|finding| finding["id"] == "neighbour-of-no-use");
    assert_eq!(of_no_use.count(), 4, "{status}");
    answers_are_those_of(&etcd, &second).await;
    hangs.resume();
}

/// A neighbour whose etcd continues a copy of the data: of the same cluster id, with the same keys at the same revisions, and one
/// other value below the newest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_value_of_a_neighbour_is_never_served_with_and_without_verification() {
    let etcd = filled(Version::V3_7).await;
    let twin = etcd.twin().await;
    for (etcd, value) in [(&etcd, "of this etcd"), (&twin, "of its twin")] {
        let client = etcd.client().await;
        client
            .put(format!("{PREFIX}000"), value)
            .await
            .expect("etcd writes");
        // More than are compared one by one.
        for n in 100..180 {
            client
                .put(format!("{PREFIX}{n}"), "equal")
                .await
                .expect("etcd writes");
        }
    }
    let neighbour = Rangecache::before(&twin).start().await;
    for interval in ["0s", "10m"] {
        let second = Rangecache::before(&etcd)
            .with("--warm-from", neighbour.url())
            .with("--verify-interval", interval)
            .start()
            .await;
        answers_are_those_of(&etcd, &second).await;
        assert!(
            second.log().contains("a neighbour has sent its keys"),
            "{}",
            second.log()
        );
        assert_eq!(loads_from_neighbours(&second).await, 0.0);
        assert_eq!(
            second.metrics().await.sum("rangecache_verify_mismatch_total"),
            0.0
        );
    }
}

/// While etcd's auth is on, rangecache's own user reads from the neighbour as from etcd.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neighbour_is_asked_as_the_own_user() {
    let etcd = filled(Version::V3_7).await;
    create_users(&etcd).await;
    let user = format!("{MIRROR}:{}", password(MIRROR));
    let of_user = || Rangecache::before(&etcd).with("--user", &user);
    let first = of_user().start().await;
    let second = of_user().with("--warm-from", first.url()).start().await;
    assert_eq!(loads_from_neighbours(&second).await, 1.0, "{}", second.log());
}
