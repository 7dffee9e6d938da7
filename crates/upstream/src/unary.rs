//! The message of a unary gRPC response.

use http::StatusCode;
use prost::Message;
use tonic::{Code, Status};

use etcd_wire::grpc::frame::{PREFIX_BYTES, Prefix};
use lean_h2::Whole;

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
    use http::header::TE;
    use http::{HeaderMap, HeaderValue, Uri};
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
