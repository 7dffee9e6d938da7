//! A request over HTTP/1, on a connection of its own.

use std::io;

use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

/// Sends a request without a body for `path` of `authority` on `stream`, which is closed afterwards. Returns the status and the
/// body, of at most `max_bytes`. The caller bounds the time.
///
/// # Errors
/// The connection's, if the response is not HTTP, or if it is longer.
pub async fn http_request<S>(
    stream: S,
    method: Method,
    authority: &str,
    path: &str,
    max_bytes: usize,
) -> io::Result<(StatusCode, String)>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, authority)
        .header(header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(io::Error::other)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    let reading = async {
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), max_bytes).collect().await;
        let body = body.map_err(io::Error::other)?.to_bytes();
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    tokio::pin!(reading, connection);
    // The connection may end with the response, before that is taken.
    tokio::select! {
        biased;
        read = &mut reading => read,
        _ = &mut connection => reading.await,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// The result of a request that gets `response`, and the request.
    async fn exchange(response: &str, max_bytes: usize) -> (io::Result<(StatusCode, String)>, String) {
        let (near, mut far) = duplex(1 << 10);
        let serving = async {
            let mut request = vec![0; 1 << 10];
            let length = far.read(&mut request).await.unwrap();
            far.write_all(response.as_bytes()).await.unwrap();
            drop(far);
            String::from_utf8(request[..length].to_vec()).unwrap()
        };
        tokio::join!(
            http_request(near, Method::GET, "etcd:2379", "/metrics", max_bytes),
            serving
        )
    }

    #[tokio::test]
    async fn body_is_read_to_the_end_of_the_connection_or_of_its_last_chunk() {
        let to_end = "HTTP/1.0 200 OK\r\n\r\nall of it";
        let chunks = "HTTP/1.1 503 Unavailable\r\ntransfer-encoding: chunked\r\n\r\n4\r\nall \r\n5\r\nof it\r\n0\r\n\r\n";
        for (response, status) in [(to_end, 200), (chunks, 503)] {
            let (read, request) = exchange(response, 9).await;
            assert_eq!(
                read.unwrap(),
                (StatusCode::from_u16(status).unwrap(), "all of it".to_owned())
            );
            assert!(
                request.starts_with("GET /metrics HTTP/1.1\r\nhost: etcd:2379\r\n"),
                "{request}"
            );
        }
    }

    #[tokio::test]
    async fn longer_body_and_what_is_not_http_are_errors() {
        assert!(exchange("HTTP/1.0 200 OK\r\n\r\nall of it", 8).await.0.is_err());
        assert!(exchange("SSH-2.0-OpenSSH\r\n", 8).await.0.is_err());
    }
}
