//! The check that responses come from memory again after a fault, and that each response until then is right.

use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

use crate::grpc::Client;
use crate::pb::RangeRequest;
use crate::proxy::Rangecache;
use crate::wait::{SOON, until};

/// Whether reads through rangecache may fail until it has recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Each read must succeed.
    MustSucceed,
    /// A read that fails is sent again: etcd may have no leader yet.
    MayFail,
}

/// Puts a key, again until the cluster has a leader for it, and returns how long that took. A put that timed out may still
/// be applied later, so use a key only once.
pub async fn put_when_possible(client: &Client, key: &str, value: &str) -> Duration {
    // etcd lets a write that was lost with its leader time out after 7 s; the next one need not wait for it.
    let put = async || {
        let put = timeout(Duration::from_millis(500), client.put(key, value));
        put.await.ok()?.ok()
    };
    until(SOON, "etcd accepts a write", put).await.1
}

/// Writes below `prefix` by `direct` and lists it by `through` in turns, until a list comes from memory. Panics unless each
/// list holds the write before it and is what etcd has at the list's revision, or if it takes longer than twice [`SOON`].
pub async fn recovers(
    after: &str,
    prefix: &str,
    direct: &Client,
    rangecache: &Rangecache,
    through: &Client,
    reads: Reads,
) {
    let started = Instant::now();
    let list = RangeRequest::prefix(prefix);
    for turn in 0.. {
        let (key, value) = (
            format!("{prefix}recovers/{after}/{turn}"),
            format!("{after} {turn}"),
        );
        put_when_possible(direct, &key, &value).await;
        let before = rangecache.outcomes().await;
        let got = match reads {
            Reads::MustSucceed => through
                .range(&list)
                .await
                .unwrap_or_else(|status| panic!("{:?} after {after}: {status:?}", started.elapsed())),
            Reads::MayFail => {
                let what = format!("a read through rangecache after {after}");
                until(SOON, &what, async || through.range(&list).await.ok())
                    .await
                    .0
            }
        };
        let at_its_revision = RangeRequest {
            revision: got.revision(),
            ..list.clone()
        };
        let what = format!("etcd lists what rangecache listed after {after}");
        let (expected, _) = until(SOON, &what, async || direct.range(&at_its_revision).await.ok()).await;
        let elapsed = started.elapsed();
        assert_eq!(got.count, expected.count, "{elapsed:?} after {after}");
        assert_eq!(got.kvs.len(), expected.kvs.len(), "{elapsed:?} after {after}");
        // Only the first difference: the lists may have thousands of keys.
        let different = got.kvs.iter().zip(&expected.kvs).find(|(a, b)| a != b);
        assert_eq!(different, None, "{elapsed:?} after {after}");
        assert!(
            got.kvs
                .iter()
                .any(|kv| kv.key == key.as_bytes() && kv.value == value.as_bytes()),
            "{elapsed:?} after {after}: {key} is missing or has another value"
        );
        if rangecache.outcomes_since(&before, 1).await.memory_answers() > 0 {
            println!("responses come from memory {:?} after {after}", started.elapsed());
            return;
        }
        assert!(
            elapsed < SOON * 2,
            "no response from memory {elapsed:?} after {after}"
        );
        sleep(Duration::from_millis(20)).await;
    }
}
