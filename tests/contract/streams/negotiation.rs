//! Endpoints with and without RangeStream, and what clients get from each.

use std::process::Command;

use tempfile::TempDir;

use super::{NOT_MIRRORED, fill, list, start, started};
use testkit::effort::part_of;
use testkit::etcd::{Cluster, Etcd, Version, free_port};
use testkit::grpc::{Client, Status, UNIMPLEMENTED};
use testkit::pb::{RangeRequest, RangeResponse};
use testkit::process::{Process, tool};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn range_stream_off_never_opens_etcds_range_stream() {
    for (setting, used) in [("off", false), ("auto", true)] {
        let etcd = Etcd::start(Version::V3_7).await;
        let direct = etcd.client().await;
        fill(&direct, 100, 10).await;
        let flags = [("--range-stream", setting), ("--cache-prefix", "/elsewhere/")];
        let rangecache = start(&etcd, &flags).await;
        let through = rangecache.client().await;
        assert_eq!(through.streamed(&list()).await, direct.range(&list()).await);
        assert_eq!(started(&etcd, "RangeStream").await > 0.0, used, "{setting}");
        let fallbacks = rangecache.metrics().await.0;
        let off = fallbacks.get("rangecache_range_stream_fallback_total{reason=\"off\"}");
        // The load and the read.
        assert_eq!(off, Some(if used { &0.0 } else { &2.0 }), "{setting}");
    }
}

/// Sends the reads of kube-apiserver: whole lists, and pages of 500 at the first page's revision. kube-apiserver
/// stops streaming for ten minutes after one `Unimplemented`; this client stops for good.
struct KubeStyle {
    client: Client,
    calls: usize,
}

impl KubeStyle {
    /// Lists as a whole and in pages. `Err` is a failed call; `Unimplemented` must not occur.
    async fn lists(&mut self) -> Result<usize, Status> {
        self.calls += 1;
        let whole = self.watched(list()).await?;
        let mut page = RangeRequest { limit: 500, ..list() };
        let mut read = 0;
        loop {
            self.calls += 1;
            let answer = self.watched(page.clone()).await?;
            read += answer.kvs.len();
            let (true, Some(last)) = (answer.more, answer.kvs.last()) else {
                break;
            };
            page.key = [&last.key[..], b"\0"].concat();
            if page.revision == 0 {
                page.revision = answer.revision();
            }
        }
        assert_eq!(read, whole.kvs.len(), "no writes in the meantime");
        Ok(read)
    }

    async fn watched(&self, request: RangeRequest) -> Result<RangeResponse, Status> {
        let answer = self.client.streamed(&request).await;
        if let Err(status) = &answer {
            assert_ne!(
                status.code, UNIMPLEMENTED,
                "kube-apiserver would stop streaming: {status:?}"
            );
        }
        answer
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kube_style_client_never_falls_back_from_streams() {
    for version in [Version::V3_5, Version::V3_6, Version::V3_7] {
        for flags in [&[][..], NOT_MIRRORED] {
            let etcd = Etcd::start(version).await;
            fill(&etcd.client().await, 1200, 20).await;
            let rangecache = start(&etcd, flags).await;
            let mut kube = KubeStyle {
                client: rangecache.client().await,
                calls: 0,
            };
            while kube.calls < part_of(2_000) as usize {
                assert_eq!(kube.lists().await, Ok(1200), "{version:?} {flags:?}");
            }
        }
    }
}

/// Before the first load, and over a real upgrade and downgrade behind one port.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_and_downgrade_behind_one_port_are_noticed() {
    let mut etcd = Etcd::start(Version::V3_6).await;
    fill(&etcd.client().await, 1200, 20).await;
    let backup = etcd.save_snapshot().await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/elsewhere/")
        .start_cold()
        .await;
    let mut kube = KubeStyle {
        client: rangecache.client().await,
        calls: 0,
    };
    // Reads fail while etcd is down, but never with a status that stops streaming; returns once a read is answered by
    // `way`.
    let until_answered = async |kube: &mut KubeStyle, way: &str| {
        until(SOON * 3, &format!("streams are {way}"), async || {
            let before = rangecache.stream_outcomes().await;
            let answered = kube.lists().await;
            let since = rangecache.stream_outcomes().await.since(&before);
            // If etcd streams, pages after the second come from a series.
            let counted = since.of(way)
                + if way == "forwarded" {
                    since.of("streamed")
                } else {
                    0
                };
            (answered == Ok(1200) && since.total() == counted).then_some(())
        })
        .await;
    };
    for turn in 0..2 {
        until_answered(&mut kube, "paged").await;
        etcd.switch(Version::V3_7);
        etcd.run();
        until_answered(&mut kube, "forwarded").await;
        assert!(started(&etcd, "RangeStream").await > 0.0);
        etcd.switch(Version::V3_6);
        etcd.restore(&backup, "rangecache", &[]);
        etcd.run();
        println!("turn {turn}: {} calls", kube.calls);
    }
    until_answered(&mut kube, "paged").await;
}

/// Endpoints of both versions: those with RangeStream are found, and memory answers like the lowest version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_work_in_a_cluster_of_mixed_versions() {
    let cluster = Cluster::start_mixed([Version::V3_6, Version::V3_7, Version::V3_6]).await;
    let direct = cluster.members[0].client().await;
    fill(&direct, 1200, 20).await;
    for flags in [&[][..], NOT_MIRRORED] {
        let mut builder = Rangecache::at(&cluster.endpoints());
        for (flag, value) in flags {
            builder = builder.with(flag, value);
        }
        let rangecache = builder.start().await;
        let mut kube = KubeStyle {
            client: rangecache.client().await,
            calls: 0,
        };
        while kube.calls < 300 {
            assert_eq!(kube.lists().await, Ok(1200), "{flags:?}");
        }
    }
    assert!(
        started(&cluster.members[1], "RangeStream").await > 100.0,
        "the member with RangeStream is called"
    );
}

/// A proxy that reports the version of the etcd behind it, but has no RangeStream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoint_with_a_wrong_version_is_handled() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    fill(&direct, 1200, 20).await;
    let (_grpc_proxy, url) = GrpcProxy::start(&etcd).await;
    let rangecache = Rangecache::at(&url)
        .with("--cache-prefix", "/elsewhere/")
        .start_cold()
        .await;
    let mut kube = KubeStyle {
        client: rangecache.client().await,
        calls: 0,
    };
    while kube.calls < 100 {
        assert_eq!(kube.lists().await, Ok(1200));
    }
    let metrics = rangecache.metrics().await.0;
    let learned = metrics.get("rangecache_range_stream_fallback_total{reason=\"unimplemented\"}");
    assert!(learned.is_some_and(|count| *count >= 100.0), "{learned:?}");
    assert_eq!(started(&etcd, "RangeStream").await, 0.0);
}

struct GrpcProxy(
    #[expect(dead_code, reason = "keeps the process running")] Process,
    #[expect(dead_code, reason = "its log")] TempDir,
);

impl GrpcProxy {
    async fn start(etcd: &Etcd) -> (Self, String) {
        let dir = TempDir::with_prefix("rangecache-grpc-proxy-").expect("a directory");
        let port = free_port();
        let mut command = Command::new(tool("etcd-3.7"));
        command
            .args(["grpc-proxy", "start", "--endpoints", &etcd.url()])
            .args(["--listen-addr", &format!("127.0.0.1:{port}")])
            .current_dir(dir.path());
        let process = Process::spawn("grpc-proxy", &mut command, &dir.path().join("log"));
        let url = format!("http://127.0.0.1:{port}");
        let client = Client::connect(&url).await;
        let refused = client
            .range_stream(&list())
            .await
            .expect_err("the proxy has no RangeStream");
        assert_eq!(refused.code, UNIMPLEMENTED);
        (Self(process, dir), url)
    }
}
