//! Bodies of etcd's responses, from either client, and the message of a unary response of `lean_h2`.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use etcd_wire::grpc::frame::{PREFIX_BYTES, Prefix};
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Either;
use hyper::body::Incoming;
use lean_h2::{LeanError, Parts, Whole};
use prost::Message;
use tonic::{Code, Status};

use super::outgoing::BoxError;

/// Body of a response.
#[derive(Debug)]
pub struct UpstreamBody(Either<Incoming, Parts>);

impl From<Incoming> for UpstreamBody {
    fn from(body: Incoming) -> UpstreamBody {
        UpstreamBody(Either::Left(body))
    }
}

impl From<Parts> for UpstreamBody {
    fn from(body: Parts) -> UpstreamBody {
        UpstreamBody(Either::Right(body))
    }
}

/// Whether etcd itself has ended a call with this error: it has reset the stream, and the connection was not lost.
#[must_use]
pub fn is_reset(error: &BoxError) -> bool {
    if let Some(error) = error.downcast_ref::<LeanError>() {
        return matches!(error, LeanError::Reset(_));
    }
    std::error::Error::source(&**error)
        .and_then(|source| source.downcast_ref::<h2::Error>())
        .is_some_and(|h2| h2.is_reset() && h2.is_remote())
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.0).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

/// The message of a unary response.
///
/// # Errors
/// The status of the response, or why it is none of gRPC's.
pub(crate) fn unary_message<R: Message + Default>(response: Whole) -> Result<R, Status> {
    let (parts, (body, trailers)) = response.into_parts();
    if parts.status != StatusCode::OK {
        return Err(Status::unavailable(format!(
            "the peer answers with {}",
            parts.status
        )));
    }
    match Status::from_header_map(trailers.as_ref().unwrap_or(&parts.headers)) {
        Some(status) if status.code() == Code::Ok => {}
        Some(status) => return Err(status),
        None => return Err(Status::unavailable("the peer answers without a status")),
    }
    let prefix = Prefix::parse(&body).filter(|prefix| !prefix.is_compressed);
    let message = body.get(PREFIX_BYTES..).unwrap_or_default();
    if prefix.is_none_or(|prefix| prefix.length_bytes as usize != message.len()) {
        return Err(Status::internal("the response is not one message"));
    }
    R::decode(message).map_err(|error| Status::internal(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::BufMut as _;
    use http::{HeaderMap, HeaderValue, Uri, header::TE};
    use lean_h2::Lean;
    use tokio::net::TcpStream;
    use tokio_util::either::Either;

    use super::*;
    use crate::fake::FakeEtcd;

    #[tokio::test]
    async fn calls_to_hypers_server_are_answered_on_one_connection() {
        // Of one and of several frames.
        let sizes = [0, 1, 300, 70_000, 1 << 20];
        let etcd = FakeEtcd::start(move |_, message| {
            let size = u32::from_be_bytes(message[..4].try_into().unwrap());
            std::future::ready(match size {
                1 => Err((11, "etcdserver: mvcc: required revision has been compacted")),
                size => Ok(vec![7; size as usize]),
            })
        })
        .await;
        let address = etcd.url.authority().to_string();
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (lean, driver) = Lean::new(Either::Left(Either::Left(stream)), Duration::from_secs(5));
        let driver = tokio::spawn(driver);
        let uri = Uri::from_static("http://etcd:2379/etcdserverpb.KV/Range");
        let headers = HeaderMap::from_iter([(TE, HeaderValue::from_static("trailers"))]);
        for size in sizes.iter().cycle().take(200).copied() {
            let mut body = vec![0, 0, 0, 0, 4];
            body.put_u32(size);
            let response = lean.call(&uri, &headers, &body).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(response.headers()["content-type"], "application/grpc");
            let (body, trailers) = response.into_body();
            let trailers = trailers.unwrap();
            if size == 1 {
                assert_eq!(trailers["grpc-status"], "11");
                assert_eq!(
                    trailers["grpc-message"],
                    "etcdserver: mvcc: required revision has been compacted"
                );
            } else {
                assert_eq!(trailers["grpc-status"], "0");
                assert_eq!(body.len(), 5 + size as usize);
                assert!(body[5..].iter().all(|byte| *byte == 7));
            }
        }
        let calls = etcd.calls.lock();
        assert!(calls.iter().all(|(connection, path, headers)| {
            *connection == 1 && path == uri.path() && headers["te"] == "trailers"
        }));
        assert!(!driver.is_finished());
    }
}
