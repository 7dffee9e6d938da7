//! Reads a response of etcd to its end, for callers that need all of it before they respond.

use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body;
use http_body_util::BodyExt;

use super::body::record_revisions;
use etcd_wire::grpc::{HeaderScanner, Method};
use rangecache_mirror::lineage::{ClusterState, History};

/// Reads a response piece by piece, and records the revisions in each piece before returning it (I11).
#[derive(Debug)]
pub(crate) struct ResponseReader<'a, B> {
    body: B,
    scanner: Option<HeaderScanner>,
    cluster_state: &'a ClusterState,
    /// etcd's history when the response began.
    history: Arc<History>,
    trailers: Option<HeaderMap>,
}

impl<'a, B: Body<Data = Bytes> + Unpin> ResponseReader<'a, B> {
    /// Creates a reader of `body`, the response to a call of `method`.
    pub(crate) fn new(body: B, method: Method, cluster_state: &'a ClusterState) -> ResponseReader<'a, B> {
        ResponseReader {
            body,
            scanner: HeaderScanner::new(method),
            cluster_state,
            history: cluster_state.current(),
            trailers: None,
        }
    }

    /// Returns the next piece of data; `None` at the end of the body, after the trailers have been read.
    ///
    /// # Errors
    /// Error of the body: the connection was lost, or etcd reset the stream.
    pub(crate) async fn data(&mut self) -> Result<Option<Bytes>, B::Error> {
        while let Some(frame) = self.body.frame().await.transpose()? {
            match frame.into_data() {
                Ok(data) => {
                    if let Some(scanner) = &mut self.scanner {
                        record_revisions(scanner, &data, self.cluster_state, &self.history);
                    }
                    return Ok(Some(data));
                }
                Err(frame) => self.trailers = frame.into_trailers().ok().or(self.trailers.take()),
            }
        }
        Ok(None)
    }

    /// Returns the trailers that have been read, if any.
    pub(crate) fn into_trailers(self) -> Option<HeaderMap> {
        self.trailers
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body::Frame;
    use http_body_util::StreamBody;

    use super::*;
    use etcd_wire::etcdserverpb::{RangeResponse, ResponseHeader};
    use etcd_wire::grpc::frame::framed;
    use etcd_wire::grpc::status::ok_trailers;

    type Frames = Vec<Result<Frame<Bytes>, &'static str>>;

    fn message(revision: i64) -> Bytes {
        framed(&RangeResponse {
            header: Some(ResponseHeader {
                cluster_id: 1,
                revision,
                ..ResponseHeader::default()
            }),
            ..RangeResponse::default()
        })
    }

    fn body(frames: Frames) -> impl Body<Data = Bytes, Error = &'static str> + Unpin {
        StreamBody::new(futures_util::stream::iter(frames))
    }

    #[tokio::test]
    async fn reader_returns_data_and_trailers_and_records_the_revision_at_once() {
        let cluster_state = ClusterState::default();
        let message = message(7);
        let frames = vec![
            Ok(Frame::data(message.slice(..3))),
            Ok(Frame::data(message.slice(3..))),
            Ok(Frame::trailers(ok_trailers())),
        ];
        let mut reader = ResponseReader::new(body(frames), Method::Range, &cluster_state);
        assert_eq!(reader.data().await.unwrap().unwrap(), message.slice(..3));
        assert_eq!(reader.data().await.unwrap().unwrap(), message.slice(3..));
        assert_eq!(cluster_state.min_served_revision(), Some(7));
        assert_eq!(reader.data().await, Ok(None));
        assert_eq!(reader.into_trailers(), Some(ok_trailers()));
    }

    #[tokio::test]
    async fn lost_connection_is_an_error() {
        let cluster_state = ClusterState::default();
        let frames = vec![Ok(Frame::data(message(7))), Err("lost")];
        let mut reader = ResponseReader::new(body(frames), Method::Range, &cluster_state);
        assert!(reader.data().await.unwrap().is_some());
        assert_eq!(reader.data().await, Err("lost"));
    }

    #[tokio::test]
    async fn response_without_trailers_returns_none() {
        let cluster_state = ClusterState::default();
        let mut reader = ResponseReader::new(
            http_body_util::Empty::<Bytes>::new(),
            Method::Range,
            &cluster_state,
        );
        let ended: Result<_, Infallible> = reader.data().await;
        assert_eq!(ended, Ok(None));
        assert_eq!(reader.into_trailers(), None);
    }
}
