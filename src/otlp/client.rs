//! One connection to a collector, made when it is needed.

use std::future::Future;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HOST, TE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use prost::Message as _;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::settings::{Protocol, Settings};
use crate::opentelemetry::ExportTraceServiceResponse;
use crate::tls;

/// The method of OTLP over gRPC.
const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
/// What a collector may answer.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// gRPC's codes after which OTLP allows another attempt: cancelled, deadline exceeded, aborted, out of range, unavailable, data
/// loss.
const MAY_RETRY: [&[u8]; 6] = [b"1", b"4", b"10", b"11", b"14", b"15"];

/// Why spans did not arrive.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotSent {
    /// The collector is not there, or not able to.
    #[error("{0}")]
    Again(String),
    /// It will not take them, however often it is asked.
    #[error("{0}")]
    Refused(String),
}

/// Speaks to a collector.
#[derive(Debug)]
pub(super) struct Client {
    settings: Settings,
    tls: Option<tls::Collector>,
    tasks: TaskTracker,
    connection: Option<(Sender, DropGuard)>,
}

#[derive(Debug)]
enum Sender {
    Grpc(http2::SendRequest<Full<Bytes>>),
    Http(http1::SendRequest<Full<Bytes>>),
}

impl Client {
    /// One that is not connected yet. Its connections are `tasks`' to join, and end with it.
    pub(super) fn new(settings: Settings, tls: Option<tls::Collector>, tasks: TaskTracker) -> Client {
        Client {
            settings,
            tls,
            tasks,
            connection: None,
        }
    }

    /// Sends one request; returns how many of its spans the collector rejected, and why. The next request takes another
    /// connection if this one fails.
    pub(super) async fn send(&mut self, request: Bytes) -> Result<(u64, String), NotSent> {
        let timeout = self.settings.timeout;
        let sending = self.try_send(request);
        let sent = match tokio::time::timeout(timeout, sending).await {
            Ok(sent) => sent,
            Err(_) => Err(NotSent::Again(format!("no answer within {timeout:?}"))),
        };
        if sent.is_err() {
            self.connection = None;
        }
        sent
    }

    async fn try_send(&mut self, message: Bytes) -> Result<(u64, String), NotSent> {
        let lost = |error: hyper::Error| NotSent::Again(error.to_string());
        let is_open = match &self.connection {
            Some((Sender::Grpc(sender), _)) => !sender.is_closed(),
            Some((Sender::Http(sender), _)) => !sender.is_closed(),
            None => false,
        };
        if !is_open {
            self.connection = Some(self.connect().await?);
        }
        let request = self.request(message)?;
        match &mut self.connection {
            Some((Sender::Grpc(sender), _)) => {
                sender.ready().await.map_err(lost)?;
                judge_grpc(sender.send_request(request).await.map_err(lost)?).await
            }
            Some((Sender::Http(sender), _)) => {
                sender.ready().await.map_err(lost)?;
                judge_http(sender.send_request(request).await.map_err(lost)?).await
            }
            None => Err(NotSent::Again("not connected".to_owned())),
        }
    }

    async fn connect(&self) -> Result<(Sender, DropGuard), NotSent> {
        let url = &self.settings.endpoint;
        let is_grpc = self.settings.protocol == Protocol::Grpc;
        let again = |error: String| NotSent::Again(error);
        let stream = match &self.tls {
            Some(tls) => tls.connect(url, is_grpc).await,
            None => crate::net::connect(url)
                .await
                .map(tokio_util::either::Either::Left),
        };
        let io = TokioIo::new(stream.map_err(|error| again(error.to_string()))?);
        let lost = |error: hyper::Error| again(error.to_string());
        if is_grpc {
            let builder = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .handshake(io);
            let (sender, driver) = builder.await.map_err(lost)?;
            Ok((Sender::Grpc(sender), self.drive(driver)))
        } else {
            let (sender, driver) = http1::handshake(io).await.map_err(lost)?;
            Ok((Sender::Http(sender), self.drive(driver)))
        }
    }

    /// Drives a connection until the guard is dropped.
    fn drive(&self, driver: impl Future<Output = hyper::Result<()>> + Send + 'static) -> DropGuard {
        let alive = CancellationToken::new();
        let gone = alive.clone();
        // How it ended shows in the calls on it.
        self.tasks
            .spawn(async move { drop(gone.run_until_cancelled(driver).await) });
        alive.drop_guard()
    }

    fn request(&self, message: Bytes) -> Result<Request<Full<Bytes>>, NotSent> {
        let settings = &self.settings;
        let authority = settings.endpoint.authority();
        let is_grpc = settings.protocol == Protocol::Grpc;
        let mut headers: HeaderMap = settings.headers.iter().cloned().collect();
        headers.insert(
            USER_AGENT,
            HeaderValue::from_static(concat!("rangecache/", env!("CARGO_PKG_VERSION"))),
        );
        let odd = |error: http::Error| NotSent::Refused(error.to_string());
        let (uri, body) = if is_grpc {
            headers.insert(TE, HeaderValue::from_static("trailers"));
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            let uri = Uri::builder()
                .scheme(settings.endpoint.scheme())
                .authority(authority)
                .path_and_query(EXPORT)
                .build()
                .map_err(odd)?;
            let mut framed = BytesMut::with_capacity(5 + message.len());
            framed.extend_from_slice(&[0]);
            framed.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
            framed.extend_from_slice(&message);
            (uri, framed.freeze())
        } else {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
            let host = HeaderValue::from_str(&authority).map_err(|error| odd(error.into()))?;
            headers.insert(HOST, host);
            let path = settings.path.parse::<Uri>().map_err(|error| odd(error.into()))?;
            (path, message)
        };
        let mut request = Request::post(uri).body(Full::new(body)).map_err(odd)?;
        *request.headers_mut() = headers;
        Ok(request)
    }
}

async fn judge_grpc(response: Response<Incoming>) -> Result<(u64, String), NotSent> {
    let (head, body) = response.into_parts();
    if head.status != StatusCode::OK {
        return Err(of_http_status(head.status));
    }
    let (message, trailers) = collect(body).await?;
    let trailers = trailers.unwrap_or(head.headers);
    let status = trailers
        .get("grpc-status")
        .map_or(&b""[..], HeaderValue::as_bytes);
    if status == b"0" {
        return Ok(rejected(message.get(5..).unwrap_or_default()));
    }
    let said = trailers.get("grpc-message").map(HeaderValue::as_bytes);
    let words = format!(
        "the collector answered with gRPC status {} {}",
        String::from_utf8_lossy(status),
        String::from_utf8_lossy(said.unwrap_or_default())
    );
    Err(if MAY_RETRY.contains(&status) {
        NotSent::Again(words)
    } else {
        NotSent::Refused(words)
    })
}

async fn judge_http(response: Response<Incoming>) -> Result<(u64, String), NotSent> {
    let (head, body) = response.into_parts();
    if !head.status.is_success() {
        return Err(of_http_status(head.status));
    }
    let (message, _) = collect(body).await?;
    Ok(rejected(&message))
}

fn of_http_status(status: StatusCode) -> NotSent {
    let words = format!("the collector answered with HTTP status {status}");
    match status.as_u16() {
        429 | 502..=504 => NotSent::Again(words),
        _ => NotSent::Refused(words),
    }
}

async fn collect(mut body: Incoming) -> Result<(Bytes, Option<HeaderMap>), NotSent> {
    let (mut data, mut trailers) = (BytesMut::new(), None);
    while let Some(frame) = body.frame().await {
        match frame
            .map_err(|error| NotSent::Again(error.to_string()))?
            .into_data()
        {
            Ok(piece) if data.len() + piece.len() <= MAX_ANSWER_BYTES => data.extend_from_slice(&piece),
            Ok(_) => {
                let words = "the collector's answer is too long: it is none of OTLP's";
                return Err(NotSent::Refused(words.to_owned()));
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    Ok((data.freeze(), trailers))
}

/// How many spans were not taken, and why. An answer that is none of OTLP's rejects nothing.
fn rejected(message: &[u8]) -> (u64, String) {
    let partial = ExportTraceServiceResponse::decode(message)
        .ok()
        .and_then(|response| response.partial_success);
    partial.map_or((0, String::new()), |partial| {
        (
            u64::try_from(partial.rejected_spans).unwrap_or(0),
            partial.error_message,
        )
    })
}
