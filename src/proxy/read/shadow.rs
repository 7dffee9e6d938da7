//! `--shadow`: a share of the reads that memory could answer is answered by etcd, and etcd's response is compared with
//! memory's at the same revision.
//!
//! The client gets etcd's response as it is; a copy of it is compared once it has passed. Differences are counted and
//! logged, without keys and values.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::Response;
use http_body::Frame;
use prost::Message as _;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::scan::scan_in_steps;
use crate::proxy::handles::Proxy;
use crate::proxy::metrics::ProxyTelemetry;
use crate::proxy::response::{Observer, ResponseBody};
use etcd_store::cache::{
    Answer, Dialect, RangeQuery, ResponseHeader, Rope, Selected, Selecting, begin_select,
};
use etcd_wire::etcdserverpb::RangeResponse;
use etcd_wire::grpc::frame::PREFIX_BYTES;
use etcd_wire::grpc::status::is_ok;
use rangecache_mirror::Mirrors;
use rangecache_mirror::lineage::HistoryId;
use rangecache_upstream::Version;

/// Longest response that is compared, in bytes.
const MAX_BYTES: usize = 1 << 20;
/// Pieces that a frame of etcd's response may have; those that are forwarded have one.
const MAX_PIECES: usize = 16;
/// Time for the mirror to reach the revision of etcd's response.
const REACH_TIMEOUT: Duration = Duration::from_secs(3);

/// Compares `response` of etcd to `query` with memory's answer, once it has passed. `turn` ends with the comparison.
pub(super) fn observe(
    proxy: &Proxy,
    query: RangeQuery,
    turn: OwnedSemaphorePermit,
    response: Response<ResponseBody>,
) -> Response<ResponseBody> {
    let observer = ShadowObserver {
        read: Some(ShadowRead {
            mirrors: Arc::clone(&proxy.mirrors),
            telemetry: Arc::clone(&proxy.telemetry),
            history: proxy.mirrors.cluster_state.history(),
            version: proxy.forward.upstream.lowest_version(),
            query,
            received: Vec::new(),
            _turn: turn,
        }),
        telemetry: Arc::clone(&proxy.telemetry),
        tasks: proxy.forward.tasks.clone(),
    };
    response.map(|body| body.observed_by(observer))
}

/// Copies a response as it passes.
#[derive(Debug)]
struct ShadowObserver {
    /// `None` once the comparison has begun, or is given up.
    read: Option<ShadowRead>,
    telemetry: Arc<ProxyTelemetry>,
    tasks: TaskTracker,
}

impl ShadowObserver {
    fn give_up(&mut self, result: &'static str) {
        if self.read.take().is_some() {
            self.telemetry.metrics.reads.record_shadow(result);
        }
    }
}

impl Observer for ShadowObserver {
    fn frame(&mut self, frame: &Frame<Rope>) {
        let Some(read) = &mut self.read else {
            return;
        };
        if let Some(data) = frame.data_ref() {
            if read.received.len() + data.remaining() > MAX_BYTES {
                return self.give_up("too_large");
            }
            let before = read.received.len();
            let mut pieces = [IoSlice::new(&[]); MAX_PIECES];
            let count = data.chunks_vectored(&mut pieces);
            pieces[..count]
                .iter()
                .for_each(|piece| read.received.extend_from_slice(piece));
            if read.received.len() - before < data.remaining() {
                self.give_up("not_compared");
            }
        } else if let Some(trailers) = frame.trailers_ref() {
            if !is_ok(trailers) {
                return self.give_up("not_compared");
            }
            if let Some(read) = self.read.take() {
                self.tasks.spawn(read.compare());
            }
        }
    }
}

impl Drop for ShadowObserver {
    fn drop(&mut self) {
        self.give_up("not_compared");
    }
}

/// Read to compare with memory, and etcd's response to it.
#[derive(Debug)]
struct ShadowRead {
    mirrors: Arc<Mirrors>,
    telemetry: Arc<ProxyTelemetry>,
    /// The history in which the response began.
    history: HistoryId,
    version: Option<Version>,
    query: RangeQuery,
    received: Vec<u8>,
    _turn: OwnedSemaphorePermit,
}

impl ShadowRead {
    async fn compare(self) {
        let result = match self.both().await {
            None => "not_compared",
            Some((etcd, memory)) if is_same(&etcd, &memory) => "equal",
            Some((etcd, memory)) => {
                tracing::warn!(
                    mirror = self
                        .mirrors
                        .holding(&self.query.interval())
                        .map(|mirror| mirror.name.as_str()),
                    revision = etcd.header.map_or(0, |header| header.revision),
                    keys_of_etcd = etcd.kvs.len(),
                    keys_of_memory = memory.kvs.len(),
                    count_of_etcd = etcd.count,
                    count_of_memory = memory.count,
                    "memory's answer differs from etcd's at the same revision; the client got etcd's"
                );
                "different"
            }
        };
        self.telemetry.metrics.reads.record_shadow(result);
    }

    /// etcd's response, and memory's at its revision; `None` if memory does not have that.
    async fn both(&self) -> Option<(RangeResponse, RangeResponse)> {
        let etcd = RangeResponse::decode(self.received.get(PREFIX_BYTES..)?).ok()?;
        let header: ResponseHeader = etcd.header?.into();
        let revision = if self.query.revision > 0 {
            self.query.revision
        } else {
            header.revision
        };
        let mirror = self.mirrors.holding(&self.query.interval())?;
        let deadline = Instant::now() + REACH_TIMEOUT;
        mirror.reach(self.history, revision, deadline).await.ok()?;
        let tree = mirror.view_at(revision).ok()?;
        let version = self.version?;
        let dialect = Dialect::of_version(version.major, version.minor);
        let selected = match begin_select(&tree, &self.query, &dialect) {
            Selecting::Done(selected) => selected,
            Selecting::Scan(scan) => scan_in_steps(scan).await,
        };
        let Selected::Answer(selection) = selected else {
            return None;
        };
        let answer = Answer::new(header, selection);
        if answer.len() > 2 * MAX_BYTES as u64 {
            // It differs, but there is no need to build all of it.
            return Some((etcd, RangeResponse::default()));
        }
        let memory = RangeResponse::decode(Bytes::from(answer.small(0).ok()?)).ok()?;
        Some((etcd, memory))
    }
}

/// Whether both have the same entries, byte for byte, and the same numbers. The order of the fields of the whole message
/// depends on how it was got from etcd.
fn is_same(etcd: &RangeResponse, memory: &RangeResponse) -> bool {
    (etcd.kvs.as_slice(), etcd.more, etcd.count) == (memory.kvs.as_slice(), memory.more, memory.count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::testing::Scene;
    use etcd_wire::grpc::Status;
    use etcd_wire::grpc::frame::framed;
    use etcd_wire::grpc::status::ok_trailers;
    use http_body_util::BodyExt as _;
    use rangecache_base::telemetry::exposition::Format;

    async fn result_of(data: Bytes, trailers: Option<http::HeaderMap>) -> (Bytes, Vec<String>) {
        let scene = Scene::new(&["--shadow=1"]);
        let turn = scene.proxy.shadow.choose().unwrap();
        let body = ResponseBody::whole(data, trailers.unwrap_or_default());
        let response = observe(&scene.proxy, RangeQuery::default(), turn, Response::new(body));
        let passed = response.into_body().collect().await.unwrap().to_bytes();
        scene.calls.close();
        scene.calls.wait().await;
        let text = scene.telemetry.metrics.encode(Format::Text);
        let counted = text
            .lines()
            .filter(|line| line.starts_with("rangecache_shadow_reads_total{"));
        let counted = counted.filter_map(|line| line.strip_suffix(" 1"));
        (
            passed,
            counted
                .map(|line| line.split('"').nth(1).unwrap().to_owned())
                .collect(),
        )
    }

    #[tokio::test]
    async fn response_passes_unchanged_and_is_counted_once_whatever_its_end() {
        let range = framed(&RangeResponse::default());
        let (passed, counted) = result_of(range.clone(), Some(Status::Compacted.trailers())).await;
        assert_eq!(
            (passed, counted),
            (range.clone(), vec!["not_compared".to_owned()])
        );
        let (passed, counted) = result_of(range.clone(), Some(ok_trailers())).await;
        assert_eq!(passed, range);
        assert_eq!(counted, ["not_compared"], "no mirror holds it");
        let long = Bytes::from(vec![0; MAX_BYTES + 1]);
        let (passed, counted) = result_of(long.clone(), Some(ok_trailers())).await;
        assert_eq!((passed, counted), (long, vec!["too_large".to_owned()]));
    }

    #[test]
    fn responses_are_the_same_if_entries_and_numbers_are() {
        let of = |kv: &'static str, count, more| RangeResponse {
            kvs: vec![kv.into()],
            count,
            more,
            ..RangeResponse::default()
        };
        let etcd = of("a", 2, true);
        let other_header = RangeResponse {
            header: Some(etcd_wire::etcdserverpb::ResponseHeader::default()),
            ..etcd.clone()
        };
        assert!(is_same(&etcd, &other_header));
        for memory in [of("b", 2, true), of("a", 3, true), of("a", 2, false)] {
            assert!(!is_same(&etcd, &memory), "{memory:?}");
        }
    }
}
