//! Core dumps, and the process's memory as other processes of its user see it.

use std::os::unix::fs::MetadataExt as _;

use testkit::etcd::{Etcd, Version};
use testkit::proxy::{Rangecache, is_root};

/// User as which root runs rangecache: what root's own processes may read says nothing.
const USER: u32 = 1_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_readable_to_its_user_only_if_core_dumps_are_permitted() {
    let etcd = Etcd::start(Version::V3_7).await;
    let own = std::fs::metadata("/proc/self").unwrap().uid();
    for permitted in ["false", "true"] {
        let builder = Rangecache::before(&etcd).with_environment("RANGECACHE_CORE_DUMPS", permitted);
        let (builder, user) = if is_root() {
            (builder.as_user(USER), USER)
        } else {
            (builder, own)
        };
        let rangecache = builder.start().await;
        // The kernel gives the files of a process that it would not dump to root.
        let memory = std::fs::metadata(format!("/proc/{}/mem", rangecache.pid())).unwrap();
        assert_eq!((memory.uid() == user).to_string(), permitted, "{}", memory.uid());
        // Its own figures it reads in either case.
        let metrics = rangecache.metrics().await;
        assert!(metrics.0["process_open_fds"] > 0.0 && metrics.0["process_resident_memory_bytes"] > 0.0);
    }
}
