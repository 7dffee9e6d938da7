use std::collections::VecDeque;

use bytes::Buf;
use http_body_util::BodyExt;
use parking_lot::Mutex;

use super::*;
use crate::response::ResponseBody;

/// Returns scripted results, and records the requests.
#[derive(Clone, Default)]
struct Script {
    results: Arc<Mutex<VecDeque<PageResponse>>>,
    requests: Arc<Mutex<Vec<RangeRequest>>>,
}

impl Script {
    fn new(results: impl IntoIterator<Item = PageResponse>) -> Script {
        Script {
            results: Arc::new(Mutex::new(results.into_iter().collect())),
            requests: Arc::default(),
        }
    }

    fn limits(&self) -> Vec<i64> {
        self.requests.lock().iter().map(|request| request.limit).collect()
    }
}

impl FetchPage for Script {
    fn request_bytes(&self) -> u64 {
        0
    }

    async fn fetch_page(&self, request: &RangeRequest, _: Option<u64>) -> Result<PageResponse, PageError> {
        self.requests.lock().push(request.clone());
        Ok(self.results.lock().pop_front().unwrap())
    }
}

fn header(revision: i64) -> ResponseHeader {
    ResponseHeader {
        cluster_id: 1,
        revision,
        raft_term: 2,
        ..ResponseHeader::default()
    }
}

fn key_value(number: usize) -> Bytes {
    let key = format!("{number:04}");
    [&[0x0a, 4][..], key.as_bytes()].concat().into()
}

fn page(keys: std::ops::Range<usize>, count: i64, more: bool, revision: i64) -> PageResponse {
    let response = RangeResponse {
        header: Some(header(revision)),
        kvs: keys.map(key_value).collect(),
        more,
        count,
    };
    PageResponse::Page(response, 1000, None, opened())
}

/// When the connections were opened that are there from the beginning.
fn opened() -> Instant {
    Instant::now() - Duration::from_secs(1)
}

fn list() -> RangeQuery {
    RangeQuery {
        key: "0".into(),
        range_end: "9".into(),
        ..RangeQuery::default()
    }
}

fn unavailable() -> HeaderMap {
    Status::StoppingReconnect.trailers()
}

/// Returns the merged response, the number of entries per chunk, and the trailers' status code.
async fn read(stream: PagedStream<Script>) -> (RangeResponse, Vec<usize>, String) {
    let mut body = ResponseBody::from_source(stream);
    let (mut merged, mut chunks, mut code) = (RangeResponse::default(), Vec::new(), String::new());
    while let Some(frame) = body.frame().await {
        match frame.unwrap().into_data() {
            Ok(mut data) => {
                let length = data.remaining();
                let message = data.copy_to_bytes(length);
                let chunk = RangeStreamResponse::decode(&message[PREFIX_BYTES..]).unwrap();
                let chunk = chunk.range_response.unwrap();
                chunks.push(chunk.kvs.len());
                merged.merge(chunk.encode_to_vec().as_slice()).unwrap();
            }
            Err(frame) => {
                let trailers = frame.into_trailers().unwrap();
                code = trailers[GRPC_STATUS].to_str().unwrap().to_owned();
            }
        }
    }
    (merged, chunks, code)
}

#[tokio::test(start_paused = true)]
async fn pages_are_merged_at_the_first_pages_revision() {
    let script = Script::new([
        page(0..64, 100, true, 7),
        page(64..90, 36, true, 9),
        page(90..100, 10, false, 9),
    ]);
    let query = RangeQuery {
        serializable: true,
        ..list()
    };
    let stream = Pager::new(script.clone(), &query, Deadline::NONE)
        .start()
        .await
        .unwrap();
    let (merged, chunks, code) = read(stream).await;
    assert_eq!(merged.kvs, (0..100).map(key_value).collect::<Vec<_>>());
    assert_eq!(
        (merged.header, merged.count, merged.more),
        (Some(header(7)), 100, false)
    );
    assert_eq!(code, "0");
    assert_eq!(
        chunks,
        [10, 20, 34, 26, 10],
        "split by etcd's rule, and at the ends of pages"
    );
    let requests = script.requests.lock();
    let positions: Vec<_> = requests
        .iter()
        .map(|request| (&request.key[..], request.revision, request.serializable))
        .collect();
    assert_eq!(
        positions,
        [(&b"0"[..], 0, true), (b"0063\0", 7, false), (b"0089\0", 7, false)]
    );
}

#[tokio::test(start_paused = true)]
async fn stream_ends_at_the_clients_limit() {
    let script = Script::new([page(0..64, 5000, true, 7), page(64..1500, 4936, true, 7)]);
    let query = RangeQuery {
        limit: 1500,
        ..list()
    };
    let stream = Pager::new(script.clone(), &query, Deadline::NONE)
        .start()
        .await
        .unwrap();
    let (merged, _, code) = read(stream).await;
    assert_eq!((merged.kvs.len(), merged.more, merged.count), (1500, true, 5000));
    assert_eq!(code, "0");
    assert_eq!(script.limits(), [64, 1436]);
}

#[tokio::test(start_paused = true)]
async fn too_large_page_is_requested_again_with_fewer_keys() {
    let script = Script::new([PageResponse::TooLarge(64 << 20), page(0..4, 4, false, 7)]);
    let stream = Pager::new(script.clone(), &list(), Deadline::NONE)
        .start()
        .await
        .unwrap();
    assert_eq!(read(stream).await.0.kvs.len(), 4);
    assert_eq!(script.limits(), [64, 4]);
}

#[tokio::test(start_paused = true)]
async fn sorted_query_is_read_whole_or_refused() {
    let query = RangeQuery {
        sort_target: 3,
        ..list()
    };
    let script = Script::new([PageResponse::TooLarge(65 << 20)]);
    let refused = Pager::new(script, &query, Deadline::NONE)
        .start()
        .await
        .unwrap_err();
    assert!(matches!(refused, PageError::Local(Status::SortedTooLong(_))));
    let script = Script::new([page(0..3, 3, false, 7)]);
    let stream = Pager::new(script.clone(), &query, Deadline::NONE)
        .start()
        .await
        .unwrap();
    assert_eq!(read(stream).await.0.kvs.len(), 3);
    assert_eq!(script.limits(), [0]);
}

#[tokio::test(start_paused = true)]
async fn unavailable_in_mid_stream_is_retried_up_to_max_tries() {
    let failing = (0..MAX_TRIES - 1).map(|_| PageResponse::Status(unavailable()));
    let script = Script::new(
        std::iter::once(page(0..64, 65, true, 7))
            .chain(failing)
            .chain([page(64..65, 1, false, 7)]),
    );
    let began = Instant::now();
    let stream = Pager::new(script, &list(), Deadline::NONE).start().await.unwrap();
    assert_eq!(read(stream).await.0.kvs.len(), 65);
    assert_eq!(began.elapsed(), RETRY_PAUSE * (MAX_TRIES - 1));

    let failing = (0..MAX_TRIES).map(|_| PageResponse::Status(unavailable()));
    let script = Script::new(std::iter::once(page(0..64, 65, true, 7)).chain(failing));
    let stream = Pager::new(script, &list(), Deadline::NONE).start().await.unwrap();
    assert_eq!(read(stream).await.2, "14");
}

#[tokio::test(start_paused = true)]
async fn status_before_the_first_page_fails_the_call() {
    let script = Script::new([PageResponse::Status(unavailable())]);
    let refused = Pager::new(script, &list(), Deadline::NONE)
        .start()
        .await
        .unwrap_err();
    assert!(matches!(refused, PageError::Etcd(_)));
}

#[tokio::test(start_paused = true)]
async fn replaced_history_in_mid_stream_ends_the_stream() {
    let script = Script::new([page(0..64, 100, true, 7), page(64..100, 36, false, 6)]);
    let stream = Pager::new(script, &list(), Deadline::NONE).start().await.unwrap();
    let (merged, _, code) = read(stream).await;
    assert_eq!(merged.kvs.len(), 64);
    assert_eq!(code, "14");
}

/// All members may have been put back to an older state while none was connected, and written past the first page's revision
/// again: the pages show no difference then.
#[tokio::test(start_paused = true)]
async fn page_of_a_connection_that_was_opened_since_the_first_page_ends_the_stream() {
    for (opened_later, expected) in [(Duration::ZERO, "0"), (Duration::from_millis(1), "14")] {
        let mut second = page(64..100, 36, false, 9);
        if let PageResponse::Page(_, _, _, opened) = &mut second {
            *opened = Instant::now() + opened_later;
        }
        let script = Script::new([page(0..64, 100, true, 7), second]);
        let stream = Pager::new(script, &list(), Deadline::NONE).start().await.unwrap();
        let (merged, _, code) = read(stream).await;
        assert_eq!(code, expected);
        assert_eq!(merged.kvs.len(), if expected == "0" { 100 } else { 64 });
    }
}

/// The first page may wait for a connection.
#[tokio::test(start_paused = true)]
async fn pages_of_the_first_pages_connection_continue_the_stream() {
    let script = Script::new([page(0..64, 100, true, 7), page(64..100, 36, false, 9)]);
    for result in script.results.lock().iter_mut() {
        if let PageResponse::Page(_, _, _, opened) = result {
            *opened = Instant::now() + Duration::from_secs(3);
        }
    }
    let stream = Pager::new(script, &list(), Deadline::NONE).start().await.unwrap();
    assert_eq!(read(stream).await.2, "0");
}

#[tokio::test(start_paused = true)]
async fn stream_ends_with_deadline_exceeded_at_the_deadline() {
    let lost = (0..MAX_TRIES).map(|_| PageResponse::Lost(Status::ConnectionLost(String::new())));
    let script = Script::new(std::iter::once(page(0..64, 65, true, 7)).chain(lost));
    let deadline = Instant::now() + RETRY_PAUSE * 2;
    let expires = Deadline::after(Instant::now(), Some(RETRY_PAUSE * 2));
    let stream = Pager::new(script, &list(), expires).start().await.unwrap();
    assert_eq!(read(stream).await.2, "4");
    assert_eq!(Instant::now(), deadline);
}

#[test]
fn chunks_of_large_values_stay_near_the_target_size() {
    let mut page = Page {
        kvs: vec![Bytes::from(vec![0; 1 << 20]); 5].into(),
        tail: None,
        _held: None,
    };
    let mut size = ChunkSize::default();
    let chunks = std::iter::from_fn(|| page.cut_chunk(&mut size));
    let mebibytes: Vec<_> = chunks.map(|chunk| chunk.len() >> 20).collect();
    assert_eq!(mebibytes, [2, 2, 1]);
}
