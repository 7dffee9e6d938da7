//! Starts from images on the disk (`--image-dir`).

use std::fs;
use std::path::Path;

use testkit::disk::folder_with_room;
use testkit::etcd::{Etcd, Version};
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, put_when_possible, recovers};
use testkit::wait::{SOON, until};

use super::two_events::{history_has_continued, put_and_delete};
use super::warm_start::filled_with;

const PREFIX: &str = "/image/";
const KEYS: usize = 300;
const VALUE_BYTES: usize = 1_000;

async fn filled(version: Version) -> Etcd {
    filled_with(version, PREFIX, KEYS, VALUE_BYTES).await
}

async fn start(etcd: &Etcd, folder: &Path) -> Rangecache {
    Rangecache::before(etcd)
        .with("--image-dir", &folder.join("images").display().to_string())
        .start()
        .await
}

/// Waits until the image has what etcd has.
async fn image_is_whole(etcd: &Etcd, rangecache: &Rangecache) {
    let list = RangeRequest::prefix(PREFIX);
    let direct = etcd.client().await;
    let revision = direct.range(&list).await.expect("etcd answers").revision();
    rangecache
        .client()
        .await
        .range(&list)
        .await
        .expect("rangecache answers");
    until(SOON, "the image is written", async || {
        let metrics = rangecache.metrics().await;
        let reached = metrics.sum("rangecache_mirror_revision") >= revision as f64;
        (reached && metrics.sum("rangecache_mirror_image_bytes") > 0.0).then_some(())
    })
    .await;
}

async fn adopted(rangecache: &Rangecache) -> f64 {
    let metrics = rangecache.metrics().await;
    metrics.sum_with_label("rangecache_mirror_adopted_total", "source=\"image\"")
}

/// Fails unless the answers of `rangecache` are those of `etcd`.
async fn answers_are_those_of(etcd: &Etcd, rangecache: &Rangecache, after: &str) {
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    recovers(after, PREFIX, &direct, rangecache, &through, Reads::MayFail).await;
}

/// Each start after the first one reads what has changed, whether the process before was stopped or killed, and also behind
/// a compaction.
async fn starts_from_its_image(version: Version) {
    let etcd = filled(version).await;
    let folder = folder_with_room();
    let first = start(&etcd, folder.path()).await;
    assert_eq!(adopted(&first).await, 0.0);
    image_is_whole(&etcd, &first).await;
    assert!(first.terminate().await.success());
    let client = etcd.client().await;
    client
        .put(format!("{PREFIX}007"), "changed")
        .await
        .expect("etcd writes");
    client.delete(format!("{PREFIX}008")).await.expect("etcd deletes");

    let second = start(&etcd, folder.path()).await;
    assert_eq!(adopted(&second).await, 1.0, "{}", second.log());
    let metrics = second.metrics().await;
    assert_eq!(metrics.sum("rangecache_mirror_reloads_total"), 1.0);
    assert_eq!(
        metrics.sum("rangecache_mirror_load_keys"),
        0.0,
        "nothing was read"
    );
    answers_are_those_of(&etcd, &second, "a stop").await;
    second.signal("KILL");
    drop(second);

    // Behind a compaction, keys are read, and values only of what has changed.
    let last = client
        .put(format!("{PREFIX}009"), "changed")
        .await
        .expect("etcd writes");
    client.compact(last).await.expect("etcd compacts");
    let third = start(&etcd, folder.path()).await;
    assert_eq!(adopted(&third).await, 1.0, "{}", third.log());
    let read = third.metrics().await.sum("rangecache_mirror_load_bytes");
    assert!(
        read > 0.0 && read < (KEYS * 200) as f64,
        "{read} bytes were read from etcd"
    );
    answers_are_those_of(&etcd, &third, "a kill").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_from_an_image_reads_no_values_from_etcd_3_7() {
    starts_from_its_image(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn start_from_an_image_reads_no_values_from_etcd_3_5() {
    starts_from_its_image(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_continues_after_two_events_of_one_key() {
    let etcd = filled(Version::V3_7).await;
    let folder = folder_with_room();
    let first = start(&etcd, folder.path()).await;
    image_is_whole(&etcd, &first).await;
    let client = etcd.client().await;
    put_and_delete(&client, &format!("{PREFIX}new")).await;
    put_and_delete(&client, &format!("{PREFIX}007")).await;
    image_is_whole(&etcd, &first).await;
    assert!(first.terminate().await.success());
    let second = start(&etcd, folder.path()).await;
    assert_eq!(adopted(&second).await, 1.0, "{}", second.log());
    answers_are_those_of(&etcd, &second, "a stop").await;
    history_has_continued(&second).await;
}

/// An etcd that was rolled back, and has written other values at the same revisions, is not answered from the image.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_of_a_history_that_was_rolled_back_is_never_served() {
    let mut etcd = filled(Version::V3_7).await;
    let folder = folder_with_room();
    let first = start(&etcd, folder.path()).await;
    etcd.copy_data();
    let write = async |etcd: &Etcd, value: &str| {
        let client = etcd.client().await;
        for n in 0..10 {
            put_when_possible(&client, &format!("{PREFIX}{n:03}"), value).await;
        }
    };
    write(&etcd, "lost").await;
    image_is_whole(&etcd, &first).await;
    assert!(first.terminate().await.success());
    etcd.roll_back();
    etcd.run();
    etcd.ready().await;
    write(&etcd, "kept").await;
    let second = start(&etcd, folder.path()).await;
    let list = second.client().await.range(&RangeRequest::prefix(PREFIX)).await;
    let list = list.expect("rangecache answers");
    assert!(list.kvs.iter().all(|kv| kv.value != b"lost"), "{}", second.log());
    answers_are_those_of(&etcd, &second, "a rollback").await;
}

/// A damaged image is discarded with one line, and so is one of another cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_and_foreign_images_are_discarded() {
    let etcd = filled(Version::V3_7).await;
    let folder = folder_with_room();
    let first = start(&etcd, folder.path()).await;
    image_is_whole(&etcd, &first).await;
    assert!(first.terminate().await.success());

    let other = filled(Version::V3_7).await;
    let second = start(&other, folder.path()).await;
    assert_eq!(adopted(&second).await, 0.0);
    answers_are_those_of(&other, &second, "another cluster").await;
    image_is_whole(&other, &second).await;
    assert!(second.terminate().await.success());

    let files = fs::read_dir(folder.path().join("images")).expect("images");
    let base = files.map(|file| file.expect("a file").path());
    let base = base
        .into_iter()
        .find(|path| path.extension().is_some_and(|name| name == "base"));
    let base = base.expect("a base");
    let mut bytes = fs::read(&base).expect("a base");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&base, bytes).expect("a base");
    let third = start(&other, folder.path()).await;
    assert_eq!(adopted(&third).await, 0.0);
    assert!(
        third.log().contains("the image is of no use and is discarded"),
        "{}",
        third.log()
    );
    answers_are_those_of(&other, &third, "damage").await;
}
